"""Judges as the deciders of a rubric's criteria."""

from collections.abc import Callable
from typing import Any

import dspy

from assay.datasets import Task
from assay.errors import RubricError
from assay.judges.loading import load_judge
from assay.judges.pointwise import PointwiseJudge
from assay.rubrics import Criterion, Grade, NoGrade
from assay.rubrics.rubric import Resolver
from assay.traces import Rollout
from assay.traces.recorder import aside

__all__ = ["JudgeDecider", "resolver"]


class JudgeDecider:
    """Grades one criterion by a judge. Its calls are a rollout of their own, of the task it judges, and counted like any other.

    Args:
        lm: the model that judges.
    """

    def __init__(self, judge: PointwiseJudge, lm: dspy.LM) -> None:
        self.judge, self.lm = judge, lm

    def __call__(self, task: Task, prediction: dict[str, Any], rollout: Rollout | None, **_: Any) -> Grade:
        seen = {"task_input": _one(task.inputs), "output": _one({k: v for k, v in prediction.items() if k != "steps"})}
        given = {name: seen.get(name, task.inputs.get(name, prediction.get(name, ""))) for name in self.judge.shows}
        own = Rollout(
            task_id=task.id, task_type=task.task_type, group_id=task.id, source="judge", program=self.judge.spec.text[:200],
            split=rollout.split if rollout else "", inputs=given,
        )  # fmt: skip
        with dspy.context(lm=self.lm, trace=[]), aside(own):
            found = self.judge(**given)
            own.prediction = {key: found[key] for key in ("verdict", "confidence", "value")}
        if found.value is None:
            raise NoGrade(f"the judge said {found.verdict!r}, and the words of its scale have no grades")
        said = f"The judge said {found.verdict!r} to: {self.judge.spec.text}"
        return Grade(value=found.value, label=found.verdict, confidence=found.confidence, reason=said)


def _one(fields: Any) -> Any:
    """The value of a single field, else all by name: what people would be shown."""
    values = {key: value for key, value in dict(fields).items() if value not in (None, "")}
    return next(iter(values.values())) if len(values) == 1 else values


def resolver(lm: dspy.LM, find: Callable[[str], PointwiseJudge] = load_judge) -> Resolver:
    """Makes a rubric's judge criteria decidable by `lm`.

    Args:
        find: gives the judge that a criterion uses from elsewhere, by its file or folder.
    """

    def resolve(criterion: Criterion) -> JudgeDecider:
        assert criterion.judge is not None
        judge = find(criterion.judge.use) if criterion.judge.use else PointwiseJudge(criterion.judge)
        if not judge.spec.graded:
            raise RubricError(f"criterion {criterion.name!r}: its judge's scale is nominal; say what each word is worth in grades")
        return JudgeDecider(judge, lm)

    return resolve
