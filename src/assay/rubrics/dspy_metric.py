"""A rubric as a DSPy metric, for `dspy.Evaluate`, every teleprompter, and GEPA with feedback text."""

from typing import Any

from assay.datasets import Task
from assay.datasets.tasks import TaskIndex, task_key
from assay.errors import Unscored
from assay.rubrics.protection import MissingScore, protect_dspy
from assay.rubrics.protocols import Scorer
from assay.rubrics.scoring import ScoredRun, ScoreResult

__all__ = ["RubricMetric", "example_fields"]


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
        tasks: in which the task of an example is found.
    Raises:
        Unscored: the score is NaN although the unscored criteria were graded a second time.
    """

    def __init__(
        self, rubric: Scorer, *, threshold: float = 0.8, feedback: bool = False, tasks: TaskIndex | None = None
    ) -> None:
        self.rubric, self.threshold, self.feedback, self.tasks = rubric, threshold, feedback, tasks or TaskIndex()
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
        """Returns the full result. A prediction whose rollout was already scored for this task is not scored again."""
        task, run = self.task_of(example), ScoredRun.of(prediction)
        if run is not None and run.result is not None and run.rollout.task_id in ("", task.id):
            return run.result
        rollout = None if run is None else run.rollout
        scored = self.rubric.score(task, getattr(prediction, "_failed", None) or prediction, rollout)
        if run is not None and run.result is not None:
            run.result = scored  # it was of another row with the same inputs, which are all that the program was given
        return scored

    def task_of(self, example: Any) -> Task:
        """Returns the task of a DSPy example: that in `tasks` with the same inputs, otherwise one with its fields."""
        if isinstance(example, Task):
            return example
        inputs, expected = example_fields(example)
        return self.tasks.find(inputs, expected) or Task(id=task_key(inputs), inputs=inputs, expected=expected)


def example_fields(example: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and expected outputs of a DSPy example; all fields are inputs if it names none."""
    inputs = dict((example.inputs() if getattr(example, "_input_keys", None) else example).items())
    return inputs, {key: value for key, value in example.items() if key not in inputs}


def _with_feedback(score: float, feedback: str) -> Any:
    import dspy

    return dspy.Prediction(score=score, feedback=feedback)
