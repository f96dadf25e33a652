"""Compiles a judge against human labels: selected on val, decided on gate, reported on the sealed test items.

Candidates are made in `assay.optimizers.judges.search`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.datasets import Task
from assay.errors import BudgetExceeded
from assay.evaluation.judged import Judged, judge_items
from assay.evaluation.session import Session
from assay.judges import Judge
from assay.judges.labels import Item, LabelSplits
from assay.judges.quality.agreement import (
    Agreement,
    agreement,
    ceiling,
    measure_gain,
)
from assay.optimizers.judges.config import JudgeConfig
from assay.optimizers.judges.search import LOST, JudgeSearch
from assay.rubrics import Criterion, Grade, Rubric
from assay.rubrics.criteria import JudgeSpec
from assay.support.reprs import ReportRepr, shortened
from assay.traces import Rollout

__all__ = ["JudgeConfig", "JudgeOutcome", "agreement_rubric", "compile_judge_prompts"]


@dataclass(repr=False)
class JudgeOutcome(ReportRepr):
    """The result of compiling a judge. Agreement and gains are measured on the sealed test items."""

    baseline: Judge
    compiled: Judge
    objective: str
    winner: str
    candidates: list[dict[str, Any]]
    gate: dict[str, Any] | None = None
    replaces: bool = False
    stopped: str | None = None
    test_baseline: Agreement | None = None
    test_compiled: Agreement | None = None
    answers: dict[str, Judged] = field(default_factory=dict)  # of the test items: `baseline` and `compiled`
    gain: dict[str, Any] | None = None
    accuracy_gain: dict[str, Any] | None = None
    ceiling: Agreement | None = None
    notes: list[str] = field(default_factory=list)

    def _facts(self) -> list[tuple[str, str]]:
        facts = {"winner": self.winner, "replaces": self.replaces, "objective": self.objective, "stopped": self.stopped}
        return [(key, shortened(value)) for key, value in facts.items() if value is not None]


def agreement_rubric(spec: JudgeSpec) -> Rubric:
    """A rubric that scores one verdict for teleprompters, in [0, 1]; higher is better.

    The score is the share of raters who gave the verdict or, on an ordered scale, one minus the mean squared distance
    to their labels. The feedback text quotes the raters' rationales.
    """
    steps = dict(zip(spec.scale, spec.steps, strict=True))
    width = (spec.steps[-1] - spec.steps[0]) or 1.0

    def agrees(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
        shares, verdict = task.metadata["shares"], prediction["verdict"]
        if spec.kind == "nominal" or len(spec.scale) == 2:
            grade = shares.get(verdict, 0.0)
        else:
            grade = 1 - math.fsum(
                share * ((steps[verdict] - steps[label]) / width) ** 2 for label, share in shares.items()
            )
        labels = ", ".join(
            f"{label} ({100 * share:.0f} %)" for label, share in sorted(shares.items(), key=lambda entry: -entry[1])
        )
        note = f" Their reasons: {' | '.join(task.metadata['rationales'][:3])}" if task.metadata["rationales"] else ""
        return Grade(value=min(1.0, max(0.0, grade)), reason=f"The judge said {verdict!r}; people said {labels}.{note}")

    return Rubric("agreement", [Criterion(name="agrees", check=agrees)])


def compile_judge_prompts(
    judge: Judge,
    splits: LabelSplits,
    session: Session,
    config: JudgeConfig,
    *,
    folder: Path | None = None,
    on_open: Callable[[], Any] | None = None,
) -> JudgeOutcome:
    """Compiles a judge against human labels and reports it on the sealed test items.

    If a cap is reached during the search, the best candidate so far is decided on and reported as far as the caps
    allow.

    Args:
        folder: receives the printed output of DSPy's optimizers; None drops it.
        on_open: called before the test items are judged.
    Raises:
        ModelError: no verdict could be read at all: the model or its server is at fault.
        Cancelled: the user stopped the run; what was judged is in the response cache.
    """
    search = JudgeSearch(judge, splits, session, config, folder)
    stopped = None
    with session.phase("search"):
        try:
            search.run()
        except BudgetExceeded as cap:
            stopped = str(cap)
            session.progress.say(f"end of the search: {cap}; continuing with the best candidate so far")
    winner = search.best()
    outcome = JudgeOutcome(
        judge,
        winner.judge,
        search.objective,
        winner.name,
        [c.summary() for c in search.candidates],
        stopped=stopped,
        notes=search.notes,
    )
    outcome.ceiling = ceiling(splits.test, judge.spec, seed=session.seed)
    try:
        _decide(outcome, splits, session)
        if on_open is not None:
            on_open()
        _report(outcome, splits, session)
    except BudgetExceeded as cap:
        outcome.stopped = str(cap)
    return outcome


def _decide(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> None:
    if outcome.compiled is outcome.baseline:
        outcome.notes.append("no candidate agreed better with the raters before the gate; the judge is unchanged")
        return
    with session.phase("gate"):
        before, after = _judge_both(outcome, splits.gate, session, "gate")
    outcome.gate = measure_gain(outcome.objective, before.answers, after.answers, splits.gate, outcome.baseline.spec)
    lost = (after.unscored - before.unscored) / len(splits.gate)
    if lost > LOST:
        outcome.notes.append(
            f"on gate it leaves {lost:.0%} more of the items unscored than its parent: it does not replace it"
        )
    outcome.replaces = outcome.gate["low"] is not None and outcome.gate["low"] > 0 and lost <= LOST


def _report(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> None:
    spec = outcome.baseline.spec
    with session.phase("test"):
        before, after = _judge_both(outcome, splits.test, session, "test")
    outcome.answers = {"baseline": before, "compiled": after}
    outcome.test_baseline = agreement(before.answers, splits.test, spec)
    outcome.test_compiled = agreement(after.answers, splits.test, spec)
    outcome.gain = measure_gain(outcome.objective, before.answers, after.answers, splits.test, spec)
    outcome.accuracy_gain = measure_gain("accuracy", before.answers, after.answers, splits.test, spec)


def _judge_both(outcome: JudgeOutcome, items: Sequence[Item], session: Session, split: str) -> tuple[Judged, Judged]:
    before = judge_items(outcome.baseline, items, session, name=f"{split}: baseline", split=split)
    if outcome.compiled is outcome.baseline:
        return before, before
    return before, judge_items(outcome.compiled, items, session, name=f"{split}: compiled", split=split)
