"""A rubric as a DSPy metric, for `dspy.Evaluate`, every teleprompter, and GEPA with feedback text."""

from collections.abc import Mapping
from typing import Any

from assay.datasets import Task
from assay.datasets.tasks import content_hash
from assay.errors import Unscored
from assay.rubrics.protection import MissingScore, protect_dspy
from assay.rubrics.protocols import Scorer
from assay.rubrics.scoring import ScoreResult
from assay.traces.records import Rollout

__all__ = ["RubricMetric"]


class RubricMetric:
    """`metric(example, prediction, trace=None, pred_name=None, pred_trace=None)`.

    Returns a score in [0, 1], higher is better; with `feedback`, a `dspy.Prediction` with `score` and `feedback`. While
    a teleprompter collects demonstrations (it passes `trace` but not `pred_name`), the result is a bool: score >=
    `threshold`. Teleprompters count any non-zero number as a success, and a weighted score is rarely exactly zero. An
    unscored run is not used as a demonstration. If `pred_name` is set (GEPA), the feedback is always included.

    Creating a metric installs `assay.rubrics.protection`: from then on `dspy.Evaluate` and DSPy's optimizers exclude
    unscored tasks, also when they are used without assay.

    Args:
        threshold: lowest score that counts as success.
        tasks: content hash of the inputs -> task, to find the task of an example.
    Raises:
        Unscored: the score is NaN although the unscored criteria were graded a second time.
    """

    def __init__(
        self, rubric: Scorer, *, threshold: float = 0.8, feedback: bool = False, tasks: Mapping[str, Task] | None = None
    ) -> None:
        self.rubric, self.threshold, self.feedback, self.tasks = rubric, threshold, feedback, tasks or {}
        self.__name__ = f"rubric_{rubric.name}"
        protect_dspy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        protect_dspy()  # an unpickled metric was created in another process

    def __deepcopy__(self, memo: object) -> "RubricMetric":
        return self

    def __call__(
        self, example: Any, prediction: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None
    ) -> Any:
        result = self.result(example, prediction)
        if trace is not None and pred_name is None:
            return result.scored and result.value >= self.threshold
        if pred_name is not None:
            return _with_feedback(MissingScore() if not result.scored else result.value, result.feedback)
        if not result.scored:
            raise Unscored(f"unscored: {result.feedback}")
        return _with_feedback(result.value, result.feedback) if self.feedback else result.value

    def result(self, example: Any, prediction: Any) -> ScoreResult:
        """Returns the full result. A prediction whose rollout was already scored is not scored again."""
        result = getattr(prediction, "_result", None)
        if isinstance(result, ScoreResult):
            return result
        rollout = getattr(prediction, "_rollout", None)
        return self.rubric.score(self.task_of(example), prediction, rollout if isinstance(rollout, Rollout) else None)

    def task_of(self, example: Any) -> Task:
        """Returns the task of a DSPy example: that in `tasks` with the same inputs, otherwise one with its fields."""
        if isinstance(example, Task):
            return example
        inputs = dict((example.inputs() if getattr(example, "_input_keys", None) else example).items())
        digest = content_hash(inputs)
        if digest in self.tasks:
            return self.tasks[digest]
        expected = {key: value for key, value in example.items() if key not in inputs}
        return Task(id=digest[:16], inputs=inputs, expected=expected)


def _with_feedback(score: float, feedback: str) -> Any:
    import dspy

    return dspy.Prediction(score=score, feedback=feedback)
