"""Two programs on the same tasks: what gate decides by, and what is reported of the sealed test split."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.datasets import Task
from assay.errors import BudgetExceeded, ModelError
from assay.optimizers.evaluation import Evaluation, evaluate
from assay.optimizers.sequential import SequentialTest
from assay.optimizers.session import Session, Student
from assay.optimizers.statistics import Gain, differences_of, paired_gain

__all__ = ["Comparison", "compare", "ended_early"]


@dataclass(frozen=True)
class Comparison:
    """Both evaluations, and the paired gain of the second.

    `planned` is the number of tasks it might have taken; `ended` says why it took fewer: `decided`, `futile`, or the cap. `level` is the
    error of the interval.
    """

    before: Evaluation
    after: Evaluation
    gain: Gain
    planned: int
    ended: str = ""
    cap: BudgetExceeded | None = None
    level: float = 0.05


def compare(
    before: Student,
    after: Student,
    tasks: Sequence[Task],
    session: Session,
    *,
    split: str,
    names: tuple[str, str],
    rule: SequentialTest | None = None,
    after_session: Session | None = None,
) -> Comparison:
    """Runs both, task by task in pairs; the same program is run once.

    Args:
        rule: when to stop before the last task; None runs them all.
        after_session: the session of `after`, where it is another one.
    Raises:
        ModelError: no task of one of them could be scored.
        BudgetExceeded: a cap was reached before any pair was complete. With some, those are compared and `cap` says so.
        Cancelled: what was finished is in the store.
    """
    sessions = (session, after_session or session)
    for one in sessions:
        one.know(tasks, split)
    first, second = Evaluation(), Evaluation()
    level, ended, cap, done = 0.05, "", None, list[int]()
    with session.phase(split), sessions[1].phase(split):
        try:
            if after is before:
                second = evaluate(before, tasks, session, name=f"{split}: {names[0]}", into=first)
            else:
                level, ended = _in_parts((before, first), (after, second), tasks, sessions, split, names, rule, done)
        except BudgetExceeded as error:
            both = [key for key in first.results if after is before or key in second.results]
            if not both:
                raise
            first, second, cap, ended = first.only(both), (first if after is before else second).only(both), error, str(error)
            level = rule.level([*(count for count in done if count < len(both)), len(both)]) if rule is not None else level
    for evaluation in (first, second):
        if evaluation.why_unscored is not None:
            raise ModelError(f"none of the {len(evaluation)} {split} tasks could be scored: {evaluation.why_unscored}")
    guarded = ended != ""
    return Comparison(first, second, paired_gain(first.scores, second.scores, level=level, guarded=guarded), len(tasks), ended, cap, level)


def _in_parts(
    before: tuple[Student, Evaluation],
    after: tuple[Student, Evaluation],
    tasks: Sequence[Task],
    sessions: tuple[Session, Session],
    split: str,
    names: tuple[str, str],
    rule: SequentialTest | None,
    done: list[int],
) -> tuple[float, str]:
    """Runs part after part of the tasks, each with both programs, and notes in `done` how many; the level of the interval, and why it stopped."""
    for end in rule.evaluations if rule is not None else (len(tasks),):
        part = tasks[done[-1] if done else 0 : end]
        for (student, evaluation), name, session in zip((before, after), names, sessions, strict=True):
            evaluate(student, part, session, name=f"{split}: {name}", into=evaluation)
        done.append(end)
        if rule is None:
            return 0.05, ""
        decision = rule.decide(list(differences_of(before[1].scores, after[1].scores)), done)
        if decision.stop:
            return decision.level, decision.why
    return 0.05, ""  # no tasks


def ended_early(found: Comparison, split: str) -> str:
    """A line for the report where not all tasks were run because they were not needed; empty otherwise."""
    why = {
        "decided": "a difference is shown; its interval holds for stopping early",
        "futile": "the difference that it is to show could hardly be shown any more",
    }.get(found.ended)
    return f"{split} ended after {len(found.after)} of {found.planned} tasks: {why}" if why else ""
