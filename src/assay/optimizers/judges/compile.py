"""Compiles a judge against human labels: selected on val, decided on gate, reported on the sealed test items.

If gate does not prove the compiled judge better, the baseline is the result. It is measured on gate, and the test items
stay sealed.

Candidates are made in `assay.optimizers.judges.search`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.datasets import Task
from assay.errors import BudgetExceeded
from assay.evaluation.judged import Judged, judge_items, measure_gain
from assay.evaluation.session import Session
from assay.judges import Judge
from assay.judges.labels import Item, LabelSplits
from assay.judges.quality.agreement import Agreement, agreement, ceiling
from assay.optimizers.judges.search import LOST, JudgeSearch
from assay.optimizers.settings import JudgeConfig
from assay.rubrics import Criterion, Grade, Rubric
from assay.rubrics.criteria import JudgeSpec
from assay.support.reprs import ReportRepr, shortened
from assay.traces import Rollout


@dataclass(repr=False)
class JudgeOutcome(ReportRepr):
    """The result of compiling a judge.

    Attributes:
        replaces: whether the whole interval of the paired gain on gate is above zero, or the baseline gave no verdict.
        split: whose items the result was measured on: `test`, or `gate` if the baseline is the result; empty if the
            compile was stopped before.
        judged, agreement: the result's verdicts on these items, and their agreement with the raters.
        ceiling: agreement of their raters with each other.
    """

    baseline: Judge
    compiled: Judge
    objective: str
    winner: str
    candidates: list[dict[str, Any]]
    gate: dict[str, Any] | None = None
    replaces: bool = False
    stopped: str | None = None
    split: str = ""
    judged: Judged | None = None
    agreement: Agreement | None = None
    ceiling: Agreement | None = None
    before: Judged | None = None  # the baseline's verdicts on the test items; the fields below are of test too
    test_baseline: Agreement | None = None
    gain: dict[str, Any] | None = None
    accuracy_gain: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def unproven(self) -> bool:
        """Whether the winner on val was not proven better on gate, so that the baseline is the result."""
        return self.compiled is not self.baseline and not self.replaces

    @property
    def result(self) -> Judge:
        return self.compiled if self.replaces else self.baseline

    @property
    def test_compiled(self) -> Agreement | None:
        return self.agreement if self.split == "test" else None

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
    """Compiles a judge against human labels. A judge that gate proves better is reported on the sealed test items.

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
    try:
        _decide(outcome, splits, session)
        if outcome.replaces:
            if on_open is not None:
                on_open()
            _report(outcome, splits, session)
    except BudgetExceeded as cap:
        outcome.stopped = str(cap)
    return outcome


def _decide(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> None:
    """Compares the compiled judge with the baseline on gate. If it does not replace it, the baseline is measured."""
    with session.phase("gate"):
        before = judge_items(outcome.baseline, splits.gate, session, name="gate: baseline", split="gate")
    if outcome.compiled is outcome.baseline:
        outcome.notes.append("no candidate agreed better with the raters before the gate; the judge is unchanged")
    else:
        with session.phase("gate"):
            after = judge_items(outcome.compiled, splits.gate, session, name="gate: compiled", split="gate")
        spec = outcome.baseline.spec
        outcome.gate = measure_gain(outcome.objective, before.answers, after.answers, splits.gate, spec)
        lost = (after.unscored - before.unscored) / len(splits.gate)
        if lost > LOST:
            outcome.notes.append(
                f"on gate it leaves {lost:.0%} more of the items unscored than its parent: it does not replace it"
            )
        outcome.replaces = outcome.gate["low"] is not None and outcome.gate["low"] > 0 and lost <= LOST
        if before.unscored == len(splits.gate) > after.unscored:
            outcome.replaces = True
            outcome.notes.append("on gate the judge as it was gave no verdict, so there was nothing to compare with")
        elif not outcome.replaces and outcome.gate["low"] is not None:
            outcome.notes.append(
                "more labels can show a smaller gain: four times as many gate items halve the interval"
            )
    if not outcome.replaces:
        _measure(outcome, before, splits.gate, session, "gate")


def _report(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> None:
    spec, items = outcome.baseline.spec, splits.test
    with session.phase("test"):
        before = judge_items(outcome.baseline, items, session, name="test: baseline", split="test")
        after = judge_items(outcome.compiled, items, session, name="test: compiled", split="test")
    _measure(outcome, after, items, session, "test")
    outcome.before = before
    outcome.test_baseline = agreement(before.answers, items, spec)
    outcome.gain = measure_gain(outcome.objective, before.answers, after.answers, items, spec)
    outcome.accuracy_gain = measure_gain("accuracy", before.answers, after.answers, items, spec)


def _measure(outcome: JudgeOutcome, judged: Judged, items: Sequence[Item], session: Session, split: str) -> None:
    outcome.split, outcome.judged = split, judged
    outcome.agreement = agreement(judged.answers, items, outcome.baseline.spec)
    outcome.ceiling = ceiling(items, outcome.baseline.spec, seed=session.seed)
