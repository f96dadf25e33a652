"""Keeps unscored tasks out of the averages of DSPy's own loops, whoever calls them.

DSPy counts an exception of a metric as the score 0: in `Evaluate`, in MIPROv2's evaluations, in SIMBA's runs and in GEPA's
batches; ten of them end the run. `protect_dspy` is called where a rubric becomes a metric. From then on `assay.errors.Unscored`,
which only assay raises, means "no score" there. A metric that never raises it behaves exactly as before.

The same where the program raised because its model's server failed: DSPy would not ask the metric, and count 0.

- `Evaluate`: the score is the mean over the scored tasks; an unscored one stands in `results` as NaN (`MissingScore`) and is no error.
  None scored: `Unscored`.
- GEPA compares sums over one batch: a missing score takes the task's last known one, else the mean of the batch's others, so that
  it moves no comparison.
- SIMBA: a missing score takes the mean of its example's other runs, or of all.
- MIPROv2: an evaluation in which nothing was scored raises, where DSPy makes it 0.
"""

import functools
import inspect
import math
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from assay.errors import Unscored
from assay.models.failures import failure_of_program, is_own
from assay.rubrics.criteria import Failed
from assay.scrubbing import said

__all__ = ["MissingScore", "protect_dspy", "protected_call"]

_PATIENCE = 5  # batches of GEPA in a row without any score, after which the judge is taken to be gone
_lock = threading.Lock()
_installed = False


class MissingScore(float):
    """A score that is not there. It reads as NaN and is false; a sum leaves it out, and dividing that sum by the number of tasks
    divides by those that have a score. DSPy's own average and progress bar are right with it."""

    total: float | None
    missing: int

    def __new__(cls, total: float | None = None, missing: int = 1) -> "MissingScore":
        made = super().__new__(cls, math.nan if total is None else total)
        made.total, made.missing = total, missing
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.total, self.missing

    def __add__(self, other: Any) -> "MissingScore":
        more, missing = (other.total or 0.0, other.missing) if isinstance(other, MissingScore) else (float(other), 0)
        return MissingScore((self.total or 0.0) + more, self.missing + missing)

    __radd__ = __add__

    def __mul__(self, factor: Any) -> "MissingScore":
        return self if self.total is None else MissingScore(self.total * float(factor), self.missing)

    __rmul__ = __mul__

    def __truediv__(self, count: Any) -> float:
        return (self.total or 0.0) / (count - self.missing) if count > self.missing else math.nan

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:  # GEPA warns where two scores of one run differ
        return isinstance(other, MissingScore) and (self.total, self.missing) == (other.total, other.missing)

    __hash__ = float.__hash__


def _guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    """A program, or its forward, that answers a failure of its model's server with a prediction that says so."""

    @functools.wraps(run, updated=())
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            kind = failure_of_program(error)
            if is_own(kind):
                raise
            import dspy

            prediction = dspy.Prediction()
            prediction._failed = Failed(said(error), own=False, kind=kind)
            prediction._broken = error
            return prediction

    return guarded


def protect_dspy() -> None:
    """Puts the protection in place, once in a process."""
    global _installed
    with _lock:
        if _installed:
            return
        from dspy.evaluate.evaluate import Evaluate
        from dspy.teleprompt import mipro_optimizer_v2, simba
        from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
        from dspy.utils.parallelizer import ParallelExecutor

        Evaluate.__call__ = protected_call(Evaluate.__call__)
        simba.wrap_program = _simba_program(simba.wrap_program)
        ParallelExecutor.execute = _neutral(ParallelExecutor.execute)
        mipro_optimizer_v2.eval_candidate_program = _mipro_evaluation(mipro_optimizer_v2.eval_candidate_program)
        DspyAdapter.evaluate = _gepa_batch(DspyAdapter.evaluate)
        _installed = True


class _Watched:
    """A metric whose `Unscored` is a `MissingScore`; the reasons are kept. One that scores a run without an answer, which the model's
    server broke off, is no such metric: DSPy gets the program's exception."""

    def __init__(self, metric: Callable[..., Any]) -> None:
        self.metric, self.reasons = metric, list[str]()
        self.__signature__ = inspect.signature(metric)  # GEPA passes what a metric names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        broken = next((error for value in args if (error := getattr(value, "_broken", None)) is not None), None)
        try:
            found = self.metric(*args, **kwargs)
        except Unscored as error:
            self.reasons.append(str(error))
            return MissingScore()
        except Exception as error:
            raise broken or error  # noqa: B904
        if broken is not None and not isinstance(getattr(found, "score", found), MissingScore):
            raise broken
        return found

    def named(self) -> Callable[..., Any]:
        """The same under the name that DSPy would show: a function's own, else the class's."""
        if isinstance(self.metric, types.FunctionType):
            return functools.wraps(self.metric)(lambda *args, **kwargs: self(*args, **kwargs))
        shown = type(type(self.metric).__name__, (), {"__call__": lambda _, *args, **kwargs: self(*args, **kwargs)})()
        return shown


def protected_call(outer: Callable[..., Any]) -> Callable[..., Any]:
    """`Evaluate.__call__` with the protection inside of DSPy's callbacks, which go on seeing the metric that was given."""
    from dspy.utils.callback import with_callbacks

    raw = getattr(outer, "__wrapped__", None)
    plain = raw is not None and raw.__module__ == "dspy.evaluate.evaluate" and not hasattr(raw, "__wrapped__")
    inner: Callable[..., Any] = raw if plain and raw is not None else outer  # what somebody else wrapped it in stays

    @functools.wraps(inner)
    def evaluated(self: Any, program: Any, metric: Any = None, *args: Any, **kwargs: Any) -> Any:
        used = metric if metric is not None else self.metric
        if used is None:
            return inner(self, program, metric, *args, **kwargs)
        watched = _Watched(used)
        result = inner(self, _guarded(program), watched.named(), *args, **kwargs)
        if watched.reasons and math.isnan(result.score):
            raise Unscored(f"none of the {len(result.results)} examples could be scored: {watched.reasons[0]}")
        return result

    return with_callbacks(evaluated) if plain else evaluated


def _mipro_evaluation(evaluated: Callable[..., Any]) -> Callable[..., Any]:
    """DSPy makes a score of 0.0 of an evaluation that raises; one without a score has none."""

    @functools.wraps(evaluated)
    def candidate(batch_size: int, trainset: Any, program: Any, evaluate: Callable[..., Any], rng: Any = None) -> Any:
        unscored: list[Unscored] = []

        def kept(*args: Any, **kwargs: Any) -> Any:
            try:
                return evaluate(*args, **kwargs)
            except Unscored as error:
                unscored.append(error)
                raise

        found = evaluated(batch_size, trainset, program, kept, rng)
        if unscored:
            raise unscored[0]
        return found

    return candidate


def _simba_program(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """SIMBA's runs, with a `MissingScore` where DSPy puts 0.0."""

    @functools.wraps(wrap)
    def wrapped(program: Any, metric: Callable[..., Any]) -> Any:
        return wrap(_guarded(program), _Watched(metric))

    return wrapped


def _neutral(execute: Callable[..., Any]) -> Callable[..., Any]:
    """A run of SIMBA without a score takes the mean of its example's other runs, or of all."""

    @functools.wraps(execute)
    def neutral(self: Any, function: Any, data: Any) -> Any:
        results = execute(self, function, data)
        missing = [run for run in results if isinstance(run, dict) and isinstance(run.get("score"), MissingScore)]
        if not missing:
            return results
        known = [run for run in results if isinstance(run, dict) and not isinstance(run.get("score", MissingScore()), MissingScore)]
        if not known:
            raise Unscored(f"none of the {len(results)} runs could be scored")
        for run in missing:
            same = [float(other["score"]) for other in known if other["example"] is run["example"]]
            run["score"] = _mean(same or [float(other["score"]) for other in known])
        return results

    return neutral


def _gepa_batch(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """GEPA's batches, whose sums it compares: every score is a number."""

    @functools.wraps(evaluate)
    def batch_of(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.metric_fn, _Watched):
            self.build_program = _built(self.build_program)
            self.metric_fn = _Watched(self.metric_fn)
        found = evaluate(self, batch, *args, **kwargs)
        found.scores = _filled(self, [id(example) for example in batch], found.scores)
        return found

    return batch_of


def _built(build: Callable[..., Any]) -> Callable[..., Any]:
    """GEPA's candidates, which are copies of the program: it reads their predictors, so the guard is around their forward."""

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        program = build(*args, **kwargs)
        program.forward = _guarded(object.__getattribute__(program, "forward"))
        return program

    return built


def _filled(adapter: Any, keys: Sequence[int], scores: Sequence[Any]) -> list[Any]:
    """The scores of a batch with the missing ones replaced: by the example's last known score, else by the mean of the batch's
    others, else by that of all that is known.

    Raises:
        Unscored: nothing was ever scored, or nothing in five batches in a row.
    """
    history: dict[int, float] = adapter.__dict__.setdefault("_assay_scores", {})
    known = {key: float(score) for key, score in zip(keys, scores, strict=True) if not isinstance(score, MissingScore)}
    adapter._assay_empty = 0 if known else getattr(adapter, "_assay_empty", 0) + 1
    if not (known or history) or adapter._assay_empty >= _PATIENCE:
        why = f": {adapter.metric_fn.reasons[-1]}" if adapter.metric_fn.reasons else ""
        raise Unscored(f"none of the {len(scores)} examples could be scored, {adapter._assay_empty} batches in a row{why}")
    neutral = _mean(list(known.values()) or list(history.values()))
    filled = [history.get(key, neutral) if isinstance(score, MissingScore) else score for key, score in zip(keys, scores, strict=True)]
    history.update(known)
    return filled


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
