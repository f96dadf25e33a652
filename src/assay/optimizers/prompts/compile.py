"""Prompt compilation: baseline on val, search, winner on val, decision on gate, report on the sealed test split.

Each step writes its result into the run folder. A killed run is resumed with `resume=True`; calls made before the stop
are answered from the response cache. Candidates are made in `assay.optimizers.prompts.search`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.datasets import Splits, Task
from assay.errors import BudgetExceeded, ModelError
from assay.evaluation.comparison import (
    Comparison,
    compare,
    losses_behind_gain,
    what_would_decide,
)
from assay.evaluation.evaluation import Evaluation
from assay.evaluation.metrics import overridden_format
from assay.evaluation.session import RecordedProgram, Session
from assay.evaluation.statistics import (
    LEAST_SPREAD,
    WORST_SPREAD,
    Gain,
    differences_of,
    lossless_tasks,
    paired_gain,
    spread_of,
)
from assay.optimizers.budget import (
    Decisions,
    ReportPlan,
    forecast_pair,
    pair_of,
    plan_report,
)
from assay.optimizers.prompts.candidates import Candidate
from assay.optimizers.prompts.dspy_patches import repaired_dspy
from assay.optimizers.prompts.search import PromptSearch
from assay.optimizers.prompts.teleprompters import too_few_calls
from assay.optimizers.prompts.thinking import fit, fits_thinking, refinement_in
from assay.optimizers.settings import CompileConfig
from assay.support.report import ReportRepr, measure_text, shortened
from assay.support.scrubbing import scrubbed

_SIDES = ("baseline", "compiled")


@dataclass(repr=False)
class CompileOutcome(ReportRepr):
    """The result of a compile. `replaces`: the whole interval of the paired gain on gate is above zero."""

    baseline: RecordedProgram
    compiled: RecordedProgram
    winner: str
    candidates: list[dict[str, Any]]
    explored: list[dict[str, Any]]
    stopped: str | None = None
    broken: str | None = None  # why gate or test could not be scored at all
    failed: str | None = None  # why the optimizer ended with an error
    gated: bool = True  # whether gate decides; otherwise the winner on val is the result
    replaces: bool = False
    gate: Gain | None = None
    test_baseline: Evaluation | None = None
    test_compiled: Evaluation | None = None
    test_gain: Gain | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def unproven(self) -> bool:
        """Whether the winner on val was not proven better on gate, so that the baseline is the result."""
        return self.gated and self.compiled is not self.baseline and not self.replaces

    @property
    def result(self) -> RecordedProgram:
        return self.baseline if self.unproven else self.compiled

    def _facts(self) -> list[tuple[str, str]]:
        facts = {"winner": self.winner, "replaces": self.replaces, "candidates": len(self.candidates)}
        gains = {"gate": self.gate, "gain": self.test_gain}
        facts |= {key: measure_text(gain.to_dict(), change=True) for key, gain in gains.items() if gain is not None}
        facts |= {"stopped": self.stopped}
        return [(key, shortened(value)) for key, value in facts.items() if value is not None]


def compile_prompts(
    student: RecordedProgram, splits: Splits, session: Session, config: CompileConfig, decisions: Decisions, *,
    thinking_margin: float | None = None, folder: Path,
) -> CompileOutcome:  # fmt: skip
    """Compiles `student` and reports it on the sealed test split.

    If a cap is reached during the search, the best candidate so far is evaluated on gate and test as far as the caps
    allow, and `stopped` says why. If a named optimizer raises an error, the same happens and `notes` say why.

    Args:
        thinking_margin: score that a thinking policy, or the halting of a `Refine` program, is shown on val to cost at
            most; None fits none, see `assay.optimizers.prompts.thinking.fitted_policy`.
    Raises:
        OptimizerError: the optimizer raised an error before any program was evaluated.
        ModelError: the model's server is gone, or no val task could be scored.
        Cancelled: the user stopped the run; its state is kept for `--resume`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    search = PromptSearch(student, splits, session, config, folder)
    session.meter.ends_without_server = True
    _reserve_report(student, splits, session, decisions)
    settings = config.optimizer_settings or {}
    if (warning := too_few_calls(config.optimizer, settings, student, len(search.val), session)) is not None:
        search.notes.append(warning)
        session.progress.say(f"warning: {warning}")
    stopped: str | None = None
    with (
        scrubbed(open(folder / "dspy.log", "a")) as log,
        repaired_dspy(log, session.seed, search.keep_if_best, search.instruction_check, search.record_run),
        search.instruction_check.listening(session.lm, session.prompt_lm),
    ):
        try:
            with session.phase("search"):
                search.run()
        except BudgetExceeded as cap:
            # `auto` always spends its budget of search calls, so this cap is its normal end; it cuts other optimizers
            # short
            stopped = None if cap.what == "search calls" and config.optimizer == "auto" else str(cap)
            session.progress.say(f"end of the search: {cap}; continuing with the best candidate so far")
        winner = _fitted(search, search.best(), session, thinking_margin)
        search.finish()
        outcome = CompileOutcome(
            student,
            winner.student,
            winner.name,
            search.summaries(),
            search.explored,
            stopped,
            notes=search.notes,
            failed=search.failed,
            gated=decisions.gate,
        )
        outcome.notes += overridden_format(student.prompt_format, search.candidates[0].evaluation.sent_formats)
        _gate_and_test(outcome, search.candidates[0], winner, splits, session, decisions)
        if outcome.compiled is outcome.baseline:
            outcome.notes += _nearest_rival(search.candidates)
    return outcome


def _nearest_rival(candidates: Sequence[Candidate]) -> list[str]:
    """A report line on the candidate that came nearest to beating the baseline on val; none without any."""
    baseline = candidates[0].evaluation
    rivals = [candidate.evaluation for candidate in candidates[1:] if len(candidate.evaluation)]
    gains = [paired_gain(baseline.scores, rival.scores).mean for rival in rivals]
    known = [(gain, rival) for gain, rival in zip(gains, rivals, strict=True) if not math.isnan(gain)]
    if not known:
        return []
    return [what_would_decide(baseline, max(known, key=lambda pair: pair[0])[1], "val")]


def _fitted(search: PromptSearch, winner: Candidate, session: Session, margin: float | None) -> Candidate:
    """The winner with the thinking policy, or the halting of a `Refine` program, that saves most tokens and is shown on
    val to keep the margin. Unchanged without `thinking_margin`, or if a cap ends it. These calls do not count towards
    `max_search_calls`."""
    baseline, program = search.candidates[0], winner.student.program
    if margin is None or not len(baseline.evaluation):
        return winner
    if not fits_thinking(program) or (refinement_in(program) is None and session.only_own_models):
        if fits_thinking(baseline.student.program):  # otherwise the job has said so before it began
            search.notes.append(f"`thinking_margin` had no effect: {winner.name} takes no thinking policy")
        return winner
    if margin and len(search.val) < (needed := lossless_tasks(margin)):
        session.progress.say(
            f"warning: `thinking_margin={margin:g}` needs {needed} val tasks if no score changes, or more; "
            f"there are {len(search.val)}, so probably nothing is saved"
        )
    try:
        with session.phase("thinking"):  # `auto` has spent all search calls
            fitted = fit(winner.student, search.val, session, margin=margin)
    except BudgetExceeded as cap:
        search.notes.append(f"nothing was fitted to thinking_margin: {cap}")
        return winner
    if isinstance(fitted, str):
        search.notes.append(fitted)
        return winner
    search.notes.append(fitted.note)
    search.candidates.append(Candidate(f"{winner.name}, {fitted.name}", fitted.program, fitted.evaluation))
    return search.candidates[-1]


def _reserve_report(student: RecordedProgram, splits: Splits, session: Session, decisions: Decisions) -> None:
    """Keeps the part of the caps that gate and test are expected to need, before the search spends any of them."""
    pair = forecast_pair(student.program, session)
    plan = plan_report(splits, session.meter, decisions, pair=pair, searching=True)
    plan.reserve(session.meter)
    if decisions.gate:
        session.progress.say(plan.detectable_gain)


def _gate_and_test(
    outcome: CompileOutcome,
    baseline: Candidate,
    winner: Candidate,
    splits: Splits,
    session: Session,
    decisions: Decisions,
) -> None:
    """Compares winner and baseline on gate, then on test. A cap or a failing model is written into `outcome`."""
    try:
        plan = _planned(baseline, winner, splits, session, decisions)
        outcome.stopped = outcome.stopped or plan.short
        _decide(outcome, splits.gate[: plan.gate], session, decisions)
        if decisions.test and outcome.result is not outcome.baseline:
            _report(outcome, splits.unseal()[: plan.test], session, decisions)
    except BudgetExceeded as cap:
        outcome.stopped = str(cap)
        session.progress.say(f"stopped before the report was complete: {cap}")
    except ModelError as error:  # the search result is kept; the report can be made when the model answers again
        outcome.stopped = outcome.broken = str(error)


def _planned(
    baseline: Candidate, winner: Candidate, splits: Splits, session: Session, decisions: Decisions
) -> ReportPlan:
    """Plans the tasks of gate and test by the spread and calls measured on val, and reserves their part of the caps."""
    before, after = baseline.evaluation, winner.evaluation
    spread = WORST_SPREAD
    if winner is not baseline:  # the winner was selected on val, so the spread there is biased downwards
        spread = max(LEAST_SPREAD, spread_of(list(differences_of(before.scores, after.scores))))
    pair = (
        pair_of(before, after, session, winner.student.program)
        if len(before) and len(after)
        else forecast_pair(winner.student.program, session)
    )
    plan = plan_report(splits, session.meter, decisions, pair=pair, spread=spread)
    plan.reserve(session.meter)
    return plan


def _decide(outcome: CompileOutcome, tasks: list[Task], session: Session, decisions: Decisions) -> None:
    """Decides on gate whether the result replaces the baseline; does nothing if `decisions.gate` is False."""
    if outcome.compiled is outcome.baseline:
        compared = sum((row["n"] or 0) > 0 for row in outcome.candidates) > 1
        reason = (
            "the cap ended the search before any candidate was compared on val"
            if outcome.stopped
            else "only the plain program was proposed"
        )
        outcome.notes.append(
            "no candidate beat the plain program on val; it is unchanged" if compared else f"{reason}; it is unchanged"
        )
        return
    if not decisions.gate:
        return
    comparison = _compared(outcome, tasks, session, decisions, "gate")
    outcome.gate, outcome.replaces = comparison.gain, comparison.gain.is_gain
    if not outcome.replaces:
        outcome.notes.append(what_would_decide(comparison.before, comparison.after, "gate"))


def _report(outcome: CompileOutcome, tasks: list[Task], session: Session, decisions: Decisions) -> None:
    """The sealed test split, opened here and only here: baseline and result together."""
    comparison = _compared(outcome, tasks, session, decisions, "test")
    outcome.test_baseline, outcome.test_compiled, outcome.test_gain = (
        comparison.before,
        comparison.after,
        comparison.gain,
    )


def _compared(
    outcome: CompileOutcome, tasks: list[Task], session: Session, decisions: Decisions, split: str
) -> Comparison:
    comparison = compare(
        outcome.baseline, outcome.compiled, tasks, session, split=split, names=_SIDES, rule=decisions.rule(len(tasks))
    )
    if (cap := comparison.undecided(split)) is not None:
        outcome.stopped = str(cap)
    elif note := comparison.end_of(split):
        outcome.notes.append(note)
    outcome.notes += losses_behind_gain(comparison, split)
    return comparison
