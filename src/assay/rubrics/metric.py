"""A rubric as a DSPy metric, for `dspy.Evaluate`, every teleprompter, and GEPA with feedback text."""

from collections.abc import Mapping
from typing import Any

from assay.datasets import Task
from assay.datasets.tasks import content_hash
from assay.errors import Unscored
from assay.rubrics.protection import MissingScore, protect_dspy
from assay.rubrics.rubric import Rubric
from assay.rubrics.scoring import ScoreResult
from assay.traces.records import Rollout

__all__ = ["RubricMetric"]


class RubricMetric:
    """`metric(example, prediction, trace=None, pred_name=None, pred_trace=None)`.

    The score is in [0, 1], higher is better; with `feedback` a `dspy.Prediction` of it and of feedback text. While a
    teleprompter collects demonstrations (it passes a trace and names no predictor) the answer is a bool, success at
    `threshold`: teleprompters count any non-zero number as a success, and a weighted rubric is seldom exactly zero. An
    unscored run is no demonstration. GEPA asks for the feedback on one predictor, by name, and always gets it.

    `dspy.Evaluate` and DSPy's optimizers leave unscored tasks out, also where they are used without assay: see
    `assay.rubrics.protection`, which is put in place when a metric is made.

    Raises:
        Unscored: the score is NaN, after the unscored criteria were judged a second time. It is never a number.
    """

    def __init__(self, rubric: Rubric, *, threshold: float = 0.8, feedback: bool = False, tasks: Mapping[str, Task] | None = None) -> None:
        self.rubric, self.threshold, self.feedback, self.tasks = rubric, threshold, feedback, tasks or {}
        self.__name__ = f"rubric_{rubric.name}"
        protect_dspy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        protect_dspy()  # it was made in another process

    def __deepcopy__(self, memo: object) -> "RubricMetric":
        return self

    def __call__(self, example: Any, prediction: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        result = self.result(example, prediction)
        if trace is not None and pred_name is None:
            return result.scored and result.value >= self.threshold
        if pred_name is not None:
            return _with_feedback(MissingScore() if not result.scored else result.value, result.feedback)
        if not result.scored:
            raise Unscored(f"unscored: {result.feedback}")
        return _with_feedback(result.value, result.feedback) if self.feedback else result.value

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


def _with_feedback(score: float, feedback: str) -> Any:
    import dspy

    return dspy.Prediction(score=score, feedback=feedback)
