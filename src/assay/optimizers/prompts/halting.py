"""Fits when a `Refine` program halts, on val: the largest saving that is shown to keep the score within a margin."""

from collections.abc import Mapping, Sequence
from typing import Any

from assay.datasets import Task
from assay.errors import ProgramError
from assay.evaluation.evaluation import Evaluation, evaluate
from assay.evaluation.session import RecordedProgram, Session
from assay.programs import Refine
from assay.programs.budgets import allocates
from assay.programs.compose import without_nearest
from assay.programs.isolation import copied
from assay.programs.refinement import Halting

__all__ = [
    "ALL_ROUNDS",
    "evaluated_haltings",
    "fits_thinking",
    "haltings",
    "never_revises",
    "refinement_in",
    "with_halting",
]

ALL_ROUNDS = "all rounds"
_HALT_AT = (0.7, 0.5, 0.3)  # probabilities that are tried besides the program's own, where they are lower
_MIN_GAIN = (0.01, 0.05, 0.1, 0.2)

Rounds = Sequence[Mapping[str, Any]]


def refinement_in(program: Any) -> Refine | None:
    """The `Refine` program itself, or the one that gets the nearest demonstrations."""
    inner = without_nearest(program)
    return inner if isinstance(inner, Refine) else None


def fits_thinking(program: Any) -> bool:
    """Whether `thinking_margin` has an effect: a `Refine` program, or an Agent that may be given a policy."""
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
        raise ProgramError(f"{type(program).__name__} is no Refine program, so it has no halting")
    refine.halting = halting
    return other


def haltings(own: Halting, runs: Sequence[Rounds]) -> dict[str, Halting]:
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


def evaluated_haltings(
    student: RecordedProgram, val: Sequence[Task], session: Session
) -> dict[str, tuple[RecordedProgram, Evaluation]]:
    """Programs that halt differently, evaluated on val: `ALL_ROUNDS` first, which has no table.

    The others make a part of its calls, which the response cache answers.
    """
    refine = refinement_in(student.program)
    own = Halting() if refine is None else refine.halting
    tried = {ALL_ROUNDS: _tried(student, Halting(own.halt_at, own.min_gain), val, session, ALL_ROUNDS)}
    runs = [run.rounds for run in tried[ALL_ROUNDS][1].runs.values() if run.rounds]
    for name, halting in haltings(own, runs).items():
        tried[name] = _tried(student, halting, val, session, name)
    return tried


def _tried(
    student: RecordedProgram, halting: Halting, val: Sequence[Task], session: Session, name: str
) -> tuple[RecordedProgram, Evaluation]:
    program = with_halting(student.program, halting)
    made = RecordedProgram(program, session, prompt_format=student.settings["adapter"])
    made.temperature = student.temperature
    return made, evaluate(made, val, session, name=f"val: {name}")
