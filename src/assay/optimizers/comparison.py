"""Two programs on the same tasks: what gate decides by, and what is reported of the sealed test split."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.datasets import Task
from assay.errors import ModelError
from assay.optimizers.evaluation import Evaluation, evaluate
from assay.optimizers.session import Session, Student
from assay.optimizers.statistics import Gain, paired_gain

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """Both evaluations, and the paired gain of the second."""

    before: Evaluation
    after: Evaluation
    gain: Gain


def compare(before: Student, after: Student, tasks: Sequence[Task], session: Session, *, split: str, names: tuple[str, str]) -> Comparison:
    """Runs both; the same program is run once.

    Raises:
        ModelError: no task of one of them could be scored.
        BudgetExceeded, Cancelled: what was finished is in the store.
    """
    session.know(tasks, split)
    with session.phase(split):
        first = evaluate(before, tasks, session, name=f"{split}: {names[0]}")
        second = first if after is before else evaluate(after, tasks, session, name=f"{split}: {names[1]}")
    for evaluation in (first, second):
        if evaluation.why_unscored is not None:
            raise ModelError(f"none of the {len(evaluation)} {split} tasks could be scored: {evaluation.why_unscored}")
    return Comparison(first, second, paired_gain(first.scores, second.scores))
