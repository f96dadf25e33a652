"""Fits on val how a program thinks: the largest saving that is shown to keep the score within a margin.

Of an agent with a thinking budget its policy (`ThinkingPolicy`), of a `Refine` program when it halts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.datasets import Task
from assay.errors import ProgramError
from assay.evaluation.evaluation import Evaluation, evaluate
from assay.evaluation.session import RecordedProgram, Session
from assay.evaluation.statistics import largest_loss, lossless_tasks, paired_gain
from assay.programs import Refine, ThinkingPolicy
from assay.programs.budgets import allocates, with_policy
from assay.programs.compose import without_nearest
from assay.programs.isolation import copied
from assay.programs.refinement import Halting
from assay.support.numbers import signed

ALL_ROUNDS = "all rounds"
_HALT_AT = (0.7, 0.5, 0.3)  # probabilities that are tried besides the program's own, where they are lower
_MIN_GAIN = (0.01, 0.05, 0.1, 0.2)
_NO_ROUNDS = (
    "no halting was fitted: no round on val could have been left out. There are rounds from "
    "`parameters={'reasoning_depth': 6}` on, while the verifier does not accept the answer"
)
FULL = "thinks once"
POLICIES: Mapping[str, ThinkingPolicy] = {
    FULL: ThinkingPolicy(),
    "probe 0.3": ThinkingPolicy(probe_margin=0.3),
    "probe 0.6": ThinkingPolicy(probe_margin=0.6),
    "probe 0.9": ThinkingPolicy(probe_margin=0.9),
    "stops when stable": ThinkingPolicy(stable=2, piece=16),
    "probe 0.6, stops when stable": ThinkingPolicy(probe_margin=0.6, stable=2, piece=16),
}
"""Policies that are tried, the one without allocation first. None of them samples, which needs more tokens."""

Rows = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Fitted:
    """The program that was chosen, with its evaluation on val. `note` says why, for the report."""

    name: str
    program: RecordedProgram
    evaluation: Evaluation
    note: str


def fit(student: RecordedProgram, val: Sequence[Task], session: Session, *, margin: float) -> Fitted | str:
    """Runs every policy of `POLICIES`, or every halting that would have saved a round, on all val tasks.

    Returns:
        The best of `fitted_policy`; why nothing was fitted, if no halting would have saved a round.
    """
    programs, results = dict[str, RecordedProgram](), dict[str, Evaluation]()

    def run(name: str, program: Any) -> Evaluation:
        programs[name] = student.around(program)
        results[name] = evaluate(programs[name], val, session, name=f"val: {name}")
        return results[name]

    if (refine := refinement_in(student.program)) is None:
        what, baseline = "thinking policy", FULL
        for name, policy in POLICIES.items():
            run(name, with_policy(student.program, policy))
    else:
        what, baseline, own = "halting", ALL_ROUNDS, refine.halting
        # without a table; the others make a part of its calls, which the response cache answers
        everything = run(ALL_ROUNDS, with_halting(student.program, Halting(own.halt_at, own.min_gain)))
        for name, halting in haltings(own, [r.rounds for r in everything.runs.values() if r.rounds]).items():
            run(name, with_halting(student.program, halting))
        if len(results) == 1:
            return _NO_ROUNDS
    name, rows = fitted_policy(results, baseline=baseline, margin=margin)
    row = rows[name]
    note = (
        f"{what} stays {name!r}: {why_none(rows, baseline=baseline, margin=margin)}"
        if name == baseline
        else f"{what} fitted on val: {name}; tokens {signed(-100 * row['saved'], 0)} %, score "
        f"{signed(-row['loss'])} on {row['n']} tasks, a loss of at most {row['loss_high']:.3f} (one-sided 95 %)"
    )
    return Fitted(name, programs[name], results[name], note)


def fitted_policy(
    evaluations: Mapping[str, Evaluation], *, baseline: str = FULL, margin: float = 0.01
) -> tuple[str, Rows]:
    """The policy that saves most tokens among those that are shown to lose at most `margin` of the score.

    Shown is what the one-sided 95 % interval of the paired loss says, see `largest_loss`: a mean loss within the margin
    on a few tasks says little about the next ones. The interval is that of one policy; it is not corrected for their
    number.

    Args:
        evaluations: of each policy on the same val tasks.
        baseline: the policy that losses and savings are measured against; it is returned if no other saves tokens and
            is within the margin.
        margin: largest loss of score, in [0, 1).
    Returns:
        The name, and of each policy `n` (tasks scored under both), `loss`, `loss_high` (upper end of its interval) and
        `saved` (share of all tokens).
    """
    before, rows = evaluations[baseline], Rows()
    for name, evaluation in evaluations.items():
        gain = paired_gain(before.scores, evaluation.scores)
        common = [task for task in before.tokens if task in evaluation.tokens]
        spent = [math.fsum(side.tokens[task] for task in common) for side in (before, evaluation)]
        rows[name] = {
            "n": gain.n,
            "loss": -gain.mean if gain.n else math.nan,
            "loss_high": largest_loss(before.scores, evaluation.scores),
            "saved": 1 - spent[1] / spent[0] if spent[0] else 0.0,
        }
    fitting = [name for name in saving(rows, baseline) if rows[name]["loss_high"] <= margin]
    return max(fitting, key=lambda name: rows[name]["saved"], default=baseline), rows


def saving(rows: Rows, baseline: str) -> list[str]:
    """The policies other than the baseline that save tokens."""
    return [name for name, row in rows.items() if name != baseline and row["saved"] > 0]


def why_none(rows: Rows, *, baseline: str, margin: float) -> str:
    """Why `fitted_policy` returned the baseline, and how many val tasks another policy would need."""
    others = saving(rows, baseline)
    if not others:
        return "no other saves tokens"
    best = min(others, key=lambda name: (tasks_for(rows[name], margin), rows[name]["loss_high"]))
    row, needed = rows[best], tasks_for(rows[best], margin)
    return (
        f"none that saves tokens is shown to lose at most {margin:g}. Closest is {best!r}: tokens "
        f"{signed(-100 * row['saved'], 0)} %, score {signed(-row['loss'])}, a loss of up to {row['loss_high']:.3f} "
        f"(one-sided 95 %) on {row['n']} val tasks; "
        + (f"about {needed:.0f} are needed" if math.isfinite(needed) else "more tasks would not show it")
    )


def tasks_for(row: Mapping[str, float], margin: float) -> float:
    """Val tasks on which a policy with this mean loss would be shown to keep the margin; infinite if it does not.

    The interval shrinks with the square root of the number of tasks, but not below the rule of three.
    """
    if not row["loss"] < margin:
        return math.inf
    fewest = 0 if row["loss"] < 0 else lossless_tasks(margin)
    if row["loss"] == 0 and row["n"] < fewest:
        return fewest
    return max(fewest, math.ceil(row["n"] * ((row["loss_high"] - row["loss"]) / (margin - row["loss"])) ** 2))


def refinement_in(program: Any) -> Refine | None:
    """The `Refine` program itself, or the one that gets the nearest demonstrations."""
    inner = without_nearest(program)
    return inner if isinstance(inner, Refine) else None


def fits_thinking(program: Any) -> bool:
    """Whether there is something to fit: a `Refine` program, or an Agent that may be given a policy."""
    return refinement_in(program) is not None or allocates(program)


def never_revises(program: Any) -> str:
    """Why a `Refine` program makes no revision, whatever its verifier says; empty if it may, and for others."""
    refine = refinement_in(program)
    if refine is None or refine.rounds:
        return ""
    depth, steps = refine.agent_parameters.reasoning_depth, refine.agent_parameters.max_steps
    return (
        f"no answer is revised: there are rounds from reasoning_depth 6 and max_steps 2 on, and the program has "
        f"reasoning_depth {depth} and max_steps {steps}"
    )


def with_halting(program: Any, halting: Halting) -> Any:
    """A copy of a program with these thresholds."""
    other = copied(program)
    refine = refinement_in(other)
    if refine is None:
        raise ProgramError(f"{type(program).__name__} is not a Refine program, so it has no halting")
    refine.halting = halting
    return other


def haltings(own: Halting, runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Halting]:
    """Thresholds that would have ended some of the runs earlier, by name; of those that do the same only the first.

    Args:
        own: the program's thresholds; its table is not used.
        runs: `rounds` of predictions on val, made without a table.
    """
    table = Halting()
    table.fit(runs)
    made: dict[tuple[int, ...], tuple[str, Halting]] = {}
    ends = tuple(len(rounds) for rounds in runs)
    for halt_at in (own.halt_at, *(value for value in _HALT_AT if value < own.halt_at)):
        for min_gain in (0.0, *_MIN_GAIN):
            halting = Halting(halt_at, min_gain, table.gains)
            used = tuple(halting.used(rounds) for rounds in runs)
            if used != ends:
                made.setdefault(used, (f"halts at {halt_at:g}, or below a gain of {min_gain:g}", halting))
    return dict(made.values())
