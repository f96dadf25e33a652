"""A rubric as a DSPy metric, for `dspy.Evaluate`, every teleprompter, and GEPA with feedback text."""

import math
from collections.abc import Mapping
from typing import Any

from assay.datasets import Task
from assay.datasets.tasks import content_hash
from assay.errors import Unscored
from assay.rubrics.rubric import Rubric
from assay.rubrics.scoring import ScoreResult
from assay.traces.records import Rollout

__all__ = ["RubricMetric"]


class RubricMetric:
    """`metric(example, prediction, trace=None, pred_name=None, pred_trace=None)`.

    While a teleprompter collects demonstrations (it passes a trace) the answer is a bool, success at `threshold`:
    teleprompters count any non-zero number as a success, and a weighted rubric is seldom exactly zero. Else it is the
    score. With `feedback` it is always a `dspy.Prediction` of score and feedback text, which GEPA reads.

    Raises:
        Unscored: the score is NaN, after the unscored criteria were judged a second time. It is never a number.
    """

    def __init__(self, rubric: Rubric, *, threshold: float = 0.8, feedback: bool = False, tasks: Mapping[str, Task] | None = None) -> None:
        self.rubric, self.threshold, self.feedback, self.tasks = rubric, threshold, feedback, tasks or {}
        self.__name__ = f"rubric_{rubric.name}"

    def __deepcopy__(self, memo: object) -> "RubricMetric":
        return self

    def __call__(self, example: Any, prediction: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        result = self.result(example, prediction)
        if math.isnan(result.value):
            raise Unscored(f"unscored: {result.feedback}")
        if self.feedback:
            import dspy

            return dspy.Prediction(score=result.value, feedback=result.feedback)
        return result.value >= self.threshold if trace is not None else result.value

    def result(self, example: Any, prediction: Any) -> ScoreResult:
        """The whole result. A rollout that the recorder tied to the prediction is scored only once."""
        known = getattr(prediction, "_result", None)
        if isinstance(known, ScoreResult):
            return known
        rollout = getattr(prediction, "_rollout", None)
        return self.rubric.score(self.task_of(example), prediction, rollout if isinstance(rollout, Rollout) else None)

    def task_of(self, example: Any) -> Task:
        """The task behind a DSPy example: the known one with the same inputs, else one made of its fields."""
        if isinstance(example, Task):
            return example
        inputs = example.inputs().toDict() if getattr(example, "_input_keys", None) else example.toDict()
        digest = content_hash(inputs)
        if digest in self.tasks:
            return self.tasks[digest]
        expected = {key: value for key, value in example.toDict().items() if key not in inputs}
        return Task(id=digest[:16], inputs=inputs, expected=expected)
