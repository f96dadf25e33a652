"""Compares two programs on the same tasks. Gate decides by this comparison, and the test report shows it.

Does not choose between candidates: the optimizers do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from assay.datasets import Task
from assay.errors import BudgetExceeded, ModelError
from assay.evaluation.evaluation import Evaluation, evaluate
from assay.evaluation.session import RecordedProgram, Session
from assay.evaluation.statistics import (
    FEWEST,
    LEAST_SPREAD,
    POWER,
    Gain,
    SequentialTest,
    detectable_difference,
    differences_of,
    fewest_to_accept,
    paired_gain,
    spread_of,
    tasks_needed,
)
from assay.support.numbers import counted, figure, signed


@dataclass(frozen=True)
class Comparison:
    """Both evaluations, and the paired gain of the second.

    Attributes:
        gain: paired difference of mean scores, `after` minus `before`, in [-1, 1]; higher is better.
        planned: number of tasks the comparison was allowed to run.
        ended: why fewer tasks were run: `decided`, `futile`, or the text of the cap; empty if all were run.
    """

    before: Evaluation
    after: Evaluation
    gain: Gain
    planned: int
    ended: str = ""
    cap: BudgetExceeded | None = None

    def end_of(self, split: str) -> str:
        """A report line that says why not all tasks were run; empty if they were."""
        reason = {
            "decided": "a difference is shown; its interval holds for stopping early",
            "futile": "it can hardly become significant with the tasks that are left",
        }.get(self.ended)
        reason = str(self.cap) if self.cap is not None else reason
        return f"{split} ended after {len(self.after)} of {counted(self.planned, 'tasks')}: {reason}" if reason else ""

    def undecided(self, split: str) -> BudgetExceeded | None:
        """The cap that ended the comparison before it could decide; None if it has decided.

        A part of gate decides only if it shows a gain; a part of test is enough if it gives an interval.
        """
        enough = self.gain.is_gain if split == "gate" else self.gain.n >= FEWEST
        return None if enough else self.cap


def compare(
    before: RecordedProgram,
    after: RecordedProgram,
    tasks: Sequence[Task],
    session: Session,
    *,
    split: str,
    names: tuple[str, str],
    rule: SequentialTest | None = None,
    after_session: Session | None = None,
) -> Comparison:
    """Runs both programs on the same tasks. If `after` is `before`, the program is run once.

    Args:
        rule: decides when to stop before the last task; None runs all tasks.
        after_session: the session of `after`; None uses `session`.
    Raises:
        ModelError: no task of one of them could be scored.
        BudgetExceeded: there is no task, or a cap was reached before any pair was complete. If some pairs were
            complete, they are compared and `Comparison.cap` holds the error.
        Cancelled: finished runs are in the store.
    """
    if not tasks:
        raise BudgetExceeded(f"the caps leave nothing for {split}")
    sessions = (session, after_session or session)
    first, second = Evaluation(), Evaluation()
    level, ended, cap, done = 0.05, "", None, list[int]()
    with session.phase(split), sessions[1].phase(split):
        try:
            if after is before:
                second = evaluate(before, tasks, session, name=f"{split}: {names[0]}", into=first)
            else:
                level, ended = _in_parts((before, first), (after, second), tasks, sessions, split, names, rule, done)
        except BudgetExceeded as error:
            keys = [key for key in first.results if after is before or key in second.results]
            if not keys:
                raise
            first, second, cap, ended = (
                first.only(keys),
                (first if after is before else second).only(keys),
                error,
                str(error),
            )
            level = (
                rule.level([*(count for count in done if count < len(keys)), len(keys)]) if rule is not None else level
            )
    for evaluation in (first, second):
        if evaluation.why_unscored is not None:
            raise ModelError(f"none of the {len(evaluation)} {split} tasks could be scored: {evaluation.why_unscored}")
    return Comparison(
        first,
        second,
        paired_gain(first.scores, second.scores, level=level),
        len(tasks),
        ended,
        cap,
    )


def _in_parts(
    before: tuple[RecordedProgram, Evaluation],
    after: tuple[RecordedProgram, Evaluation],
    tasks: Sequence[Task],
    sessions: tuple[Session, Session],
    split: str,
    names: tuple[str, str],
    rule: SequentialTest | None,
    done: list[int],
) -> tuple[float, str]:
    """Runs both programs on the tasks between two interim analyses, until `rule` stops.

    Appends the number of finished tasks to `done` after each part.

    Returns:
        The level of the interval, and why the comparison stopped early (empty if it did not).
    """
    for end in rule.evaluations if rule is not None else (len(tasks),):
        part = tasks[done[-1] if done else 0 : end]
        for (recorded, evaluation), name, session in zip((before, after), names, sessions, strict=True):
            evaluate(recorded, part, session, name=f"{split}: {name}", into=evaluation)
        done.append(end)
        if rule is None:
            return 0.05, ""
        decision = rule.decide(list(differences_of(before[1].scores, after[1].scores)), done)
        if decision.stop:
            return decision.level, decision.why
    return 0.05, ""  # no tasks


def what_would_decide(before: Evaluation, after: Evaluation, split: str) -> str:
    """A report line for a difference that is not shown: with how many tasks it would be, at its size and spread.

    Where nothing was gained, the smallest gain that these tasks would have shown.
    """
    differences = list(differences_of(before.scores, after.scores))
    if not differences:
        return f"no task of {split} was scored for both, so nothing is known of a gain"
    tasks, mean = len(differences), fmean(differences)
    spread = max(LEAST_SPREAD, spread_of(differences))
    if mean > 0:
        needed = max(tasks + 1, fewest_to_accept(), tasks_needed(mean, spread=spread))
        return (
            f"the gain of {signed(mean)} on {counted(tasks, split + ' tasks')} is not shown: if it is real, "
            f"{needed:,} tasks show it with {POWER:.0%} power, {needed - tasks:,} more than these"
        )
    least = detectable_difference(tasks, spread=spread)
    return (
        f"{counted(tasks, split + ' tasks')} can show a gain of {figure(least)} or more with {POWER:.0%} power; the "
        f"measured gain is {signed(mean)}. Smaller gains need more tasks"
    )


def gains_by_criterion(before: Evaluation, after: Evaluation, *, level: float = 0.05) -> dict[str, Gain]:
    """The paired gain of each final criterion. `level` is that of `paired_gain`."""
    changes = {}
    for name in before.criteria():
        pair = (
            {task: result.grades.get(name, math.nan) for task, result in side.results.items()}
            for side in (before, after)
        )
        changes[name] = paired_gain(*pair, level=level)
    return changes


def losses_behind_gain(comparison: Comparison, split: str) -> list[str]:
    """Report lines on criteria that got worse while the score rose, such as right answers behind more abstentions.

    A criterion is named if the interval of its paired difference excludes zero, at the comparison's error divided by
    the number of criteria (Bonferroni).
    """
    before, after = comparison.before, comparison.after
    weights = {verdict.criterion: verdict.weight for result in after.results.values() for verdict in result.verdicts}
    if not comparison.gain.mean > 0 or not weights:
        return []
    changes = gains_by_criterion(before, after, level=comparison.gain.level / len(before.criteria()))
    first, second = before.criteria(), after.criteria()
    return [
        f"{split}: the score rose, but {name!r} {'rose' if change.is_gain else 'fell'} from {figure(first[name], 2)} "
        f"to {figure(second.get(name), 2)}: look at the tasks that got worse, and at the weights of the rubric"
        for name, change in changes.items()
        if (change.is_gain if weights.get(name, 1.0) < 0 else change.high < 0)
    ]
