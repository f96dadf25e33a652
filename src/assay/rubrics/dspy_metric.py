"""A rubric as a DSPy metric, for `dspy.Evaluate`, every teleprompter, and GEPA with feedback text."""

import functools
import inspect
import math
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from assay.datasets import Task
from assay.datasets.tasks import TaskIndex, task_key
from assay.errors import Unscored
from assay.models.calls import failure_of_program, is_agent_failure
from assay.rubrics.protocols import Scorer
from assay.rubrics.scoring import ScoredRun, ScoreResult

# -- Patches DSPy so that unscored tasks are excluded from the averages of its own loops.
#
# DSPy counts an exception of a metric as the score 0, in `Evaluate`, MIPROv2's evaluations, SIMBA's runs and GEPA's
# batches; ten exceptions end the run. `protect_dspy` is called when a rubric becomes a metric. From then on
# `assay.errors.Unscored`, which only assay raises, means "no score". Metrics that never raise it are not affected.
#
# The same applies if the program raised because its model server failed: DSPy would count 0 without calling the metric.
#
# - `Evaluate`: the score is the mean over the scored tasks. An unscored task is NaN (`MissingScore`) in `results`, not
#   an error. If no task is scored, `Unscored` is raised.
# - GEPA compares sums over one batch: a missing score is replaced by the task's last known score, otherwise by the mean
#   of the batch's other scores, so that it does not change a comparison.
# - SIMBA: a missing score is replaced by the mean of the example's other runs, otherwise of all runs.
# - MIPROv2: an evaluation without any score raises `Unscored`; DSPy would count it as 0.


_MAX_EMPTY_BATCHES = 5  # consecutive GEPA batches without a score after which the judge is considered unavailable
_lock = threading.Lock()
_installed = False


class MissingScore(float):
    """A missing score: a NaN that is false and is excluded from averages.

    A sum skips it, and dividing that sum by the number of tasks divides by the number of scored tasks. DSPy's own
    average and progress bar are therefore correct.
    """

    total: float | None
    missing: int

    def __new__(cls, total: float | None = None, missing: int = 1) -> "MissingScore":
        score = super().__new__(cls, math.nan if total is None else total)
        score.total, score.missing = total, missing
        return score

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.total, self.missing

    def __add__(self, other: Any) -> "MissingScore":
        value, missing = (other.total or 0.0, other.missing) if isinstance(other, MissingScore) else (float(other), 0)
        return MissingScore((self.total or 0.0) + value, self.missing + missing)

    __radd__ = __add__

    def __mul__(self, factor: Any) -> "MissingScore":
        return self if self.total is None else MissingScore(self.total * float(factor), self.missing)

    __rmul__ = __mul__

    def __truediv__(self, count: Any) -> float:
        return (self.total or 0.0) / (count - self.missing) if count > self.missing else math.nan

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:  # GEPA warns if two scores of one run differ
        return isinstance(other, MissingScore) and (self.total, self.missing) == (other.total, other.missing)

    __hash__ = float.__hash__


def _guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a program or its `forward`: a failure of the model server becomes a prediction that holds the exception."""

    @functools.wraps(run, updated=())
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if is_agent_failure(failure_of_program(error)):
                raise
            import dspy

            prediction = dspy.Prediction()
            prediction._broken = error
            return prediction

    guarded._assay_guard = True  # type: ignore[attr-defined]
    return guarded


def protect_dspy() -> None:
    """Installs the patches once per process."""
    global _installed
    with _lock:
        if _installed:
            return
        from assay.models import dspy_seam as seam

        seam.patch_parts(
            (seam.EVALUATE, protected_call),
            (seam.SIMBA_PROGRAM, _simba_program),
            (seam.EXECUTE, _neutral),
            (seam.MIPRO_CANDIDATE, _mipro_evaluation),
            (seam.GEPA_BATCH, _gepa_batch),
        )
        _installed = True


class _ProtectedMetric:
    """Wraps a metric: `Unscored` becomes a `MissingScore`, and its reason is stored in `reasons`.

    If the model server's failure ended the run and the metric returns a number for it nevertheless, the program's
    exception is raised, as DSPy would do.
    """

    def __init__(self, metric: Callable[..., Any]) -> None:
        self.metric, self.reasons = metric, list[str]()
        self.__signature__ = inspect.signature(metric)  # GEPA passes only the arguments that the signature names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        broken = next((error for value in args if (error := getattr(value, "_broken", None)) is not None), None)
        try:
            score = self.metric(*args, **kwargs)
        except Unscored as error:
            self.reasons.append(str(error))
            return MissingScore()
        except Exception as error:
            raise broken or error  # noqa: B904
        if broken is not None and not isinstance(getattr(score, "score", score), MissingScore):
            raise broken
        return score

    def named(self) -> Callable[..., Any]:
        """The same metric with the name that DSPy displays: the function's, otherwise the class's."""
        if isinstance(self.metric, types.FunctionType):
            return functools.wraps(self.metric)(lambda *args, **kwargs: self(*args, **kwargs))
        return type(type(self.metric).__name__, (), {"__call__": lambda _, *args, **kwargs: self(*args, **kwargs)})()


def protected_call(outer: Callable[..., Any]) -> Callable[..., Any]:
    """Patches `Evaluate.__call__` inside DSPy's callbacks, so that callbacks still see the original metric."""
    from assay.models.dspy_seam import with_callbacks

    raw = getattr(outer, "__wrapped__", None)
    is_dspy = raw is not None and raw.__module__ == "dspy.evaluate.evaluate" and not hasattr(raw, "__wrapped__")
    inner: Callable[..., Any] = raw if is_dspy and raw is not None else outer  # keep the wrappers of other libraries

    @functools.wraps(inner)
    def evaluated(self: Any, program: Any, metric: Any = None, *args: Any, **kwargs: Any) -> Any:
        original = metric if metric is not None else self.metric
        if original is None:
            return inner(self, program, metric, *args, **kwargs)
        protected = _ProtectedMetric(original)
        result = inner(self, _guarded(program), protected.named(), *args, **kwargs)
        if protected.reasons and math.isnan(result.score):
            raise Unscored(f"none of the {len(result.results)} examples could be scored: {protected.reasons[0]}")
        return result

    return with_callbacks(evaluated) if is_dspy else evaluated


def _mipro_evaluation(evaluated: Callable[..., Any]) -> Callable[..., Any]:
    """Raises `Unscored` for an evaluation without any score, where DSPy returns 0.0."""

    @functools.wraps(evaluated)
    def candidate(batch_size: int, trainset: Any, program: Any, evaluate: Callable[..., Any], rng: Any = None) -> Any:
        unscored: list[Unscored] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            try:
                return evaluate(*args, **kwargs)
            except Unscored as error:
                unscored.append(error)
                raise

        score = evaluated(batch_size, trainset, program, recorded, rng)
        if unscored:
            raise unscored[0]
        return score

    return candidate


def _simba_program(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """SIMBA's runs with a `MissingScore` where DSPy uses 0.0."""

    @functools.wraps(wrap)
    def wrapped(program: Any, metric: Callable[..., Any]) -> Any:
        return wrap(_guarded(program), _ProtectedMetric(metric))

    return wrapped


def _neutral(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the missing score of a SIMBA run by the mean of its example's other runs, otherwise of all runs."""

    @functools.wraps(execute)
    def neutral(self: Any, function: Any, data: Any) -> Any:
        results = execute(self, function, data)
        missing = [run for run in results if isinstance(run, dict) and isinstance(run.get("score"), MissingScore)]
        if not missing:
            return results
        scored = [
            run
            for run in results
            if isinstance(run, dict) and not isinstance(run.get("score", MissingScore()), MissingScore)
        ]
        if not scored:
            raise Unscored(f"none of the {len(results)} runs could be scored")
        for run in missing:
            same = [float(other["score"]) for other in scored if other["example"] is run["example"]]
            run["score"] = _mean(same or [float(other["score"]) for other in scored])
        return results

    return neutral


def _gepa_batch(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces missing scores in GEPA's batches, because GEPA compares the sums of batches."""

    @functools.wraps(evaluate)
    def batch_of(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.metric_fn, _ProtectedMetric):
            self.build_program = _built(self.build_program)
            self.metric_fn = _ProtectedMetric(self.metric_fn)
        output = evaluate(self, batch, *args, **kwargs)
        output.scores = _filled(self, [id(example) for example in batch], output.scores)
        return output

    return batch_of


def _built(build: Callable[..., Any]) -> Callable[..., Any]:
    """Guards GEPA's candidates. They are copies of the program whose predictors GEPA reads, so `forward` is wrapped."""

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        program = build(*args, **kwargs)
        program.forward = _guarded(object.__getattribute__(program, "forward"))
        return program

    return built


def _filled(adapter: Any, keys: Sequence[int], scores: Sequence[Any]) -> list[Any]:
    """Replaces missing scores of a batch.

    A missing score becomes the example's last known score, otherwise the mean of the batch, otherwise the mean of all
    known scores.

    Raises:
        Unscored: there is no score at all, or none in five consecutive batches.
    """
    history: dict[int, float] = adapter.__dict__.setdefault("_assay_scores", {})
    scored = {key: float(score) for key, score in zip(keys, scores, strict=True) if not isinstance(score, MissingScore)}
    adapter._assay_empty = 0 if scored else getattr(adapter, "_assay_empty", 0) + 1
    if not (scored or history) or adapter._assay_empty >= _MAX_EMPTY_BATCHES:
        reason = f": {adapter.metric_fn.reasons[-1]}" if adapter.metric_fn.reasons else ""
        raise Unscored(
            f"none of the {len(scores)} examples could be scored in {adapter._assay_empty} consecutive batches{reason}"
        )
    neutral = _mean(list(scored.values()) or list(history.values()))
    filled = [
        history.get(key, neutral) if isinstance(score, MissingScore) else score
        for key, score in zip(keys, scores, strict=True)
    ]
    history.update(scored)
    return filled


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


class RubricMetric:
    """`metric(example, prediction, trace=None, pred_name=None, pred_trace=None)`.

    Returns a score in [0, 1], higher is better; with `feedback`, a `dspy.Prediction` with `score` and `feedback`. While
    a teleprompter collects demonstrations (it passes `trace` but not `pred_name`), the result is a bool: score >=
    `threshold`. Teleprompters count any non-zero number as a success, and a weighted score is rarely exactly zero. An
    unscored run is not used as a demonstration. If `pred_name` is set (GEPA), the feedback is always included.

    Creating a metric installs `assay.rubrics.dspy_metric`: from then on `dspy.Evaluate` and DSPy's optimizers exclude
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
        scored = self.rubric.score(task, prediction, None if run is None else run.rollout)
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
