"""What DSPy's optimizers get wrong for weighted rubrics and small models, put right while they run.

- `Evaluate` gives up after ten errors, resubmits slow examples (doubling the work on a slow machine) and counts an
  unscored example as 0. Here it does none of these: an unscored example takes the mean of the scored ones, which
  leaves it out of the mean.
- `ParallelExecutor` (under `dspy.Parallel`, which SIMBA uses) likewise; SIMBA's own wrapper makes a 0 of a score that
  could not be had.
- Optuna studies that teleprompters open have no seed.
- Everything they print goes to a log: standard output belongs to the command.
"""

import contextvars
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any, TextIO

import dspy
import numpy as np
from dspy.evaluate.evaluate import Evaluate, EvaluationResult
from dspy.teleprompt import simba
from dspy.utils.parallelizer import ParallelExecutor

from assay.errors import StopRun, Unscored

__all__ = ["repaired_dspy"]

_lock = threading.RLock()


Seen = Callable[[Any, EvaluationResult], None]


@contextmanager
def repaired_dspy(log: TextIO | None = None, seed: int = 0, seen: Seen = lambda program, result: None) -> Iterator[None]:
    """Within: DSPy's loops behave as above. One run at a time in a process.

    Args:
        log: takes what they print; None leaves it on standard output.
        seen: told of every program that a teleprompter evaluates, with its result.
    """
    import optuna

    with _lock:
        kept = Evaluate.__call__, ParallelExecutor.__init__, ParallelExecutor.execute, simba.wrap_program, optuna.create_study
        Evaluate.__call__ = _evaluating(seen)
        ParallelExecutor.__init__, ParallelExecutor.execute = _patient(kept[1]), _neutral(kept[2])
        simba.wrap_program = _marking(kept[3])
        optuna.create_study = _seeded(kept[4], seed)
        random.seed(seed)  # some teleprompters draw from the global generators
        np.random.seed(seed % 2**32)
        try:
            with redirect_stdout(log) if log is not None else nullcontext():
                yield
        finally:
            Evaluate.__call__, ParallelExecutor.__init__, ParallelExecutor.execute, simba.wrap_program, optuna.create_study = kept


def _patient(init: Callable[..., None]) -> Callable[..., None]:
    def patient(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.timeout, self.max_errors, self.disable_progress_bar = 0, 10**9, True

    return patient


def _marking(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """SIMBA's runs with the score None where there is none."""

    def marking(program: Any, metric: Callable[..., Any]) -> Any:
        def marked(example: Any, prediction: Any) -> Any:
            try:
                return metric(example, prediction)
            except Unscored:
                return dspy.Prediction(score=None)

        return wrap(program, marked)

    return marking


def _neutral(execute: Callable[..., Any]) -> Callable[..., Any]:
    """A run without a score takes the mean of its example's other runs, or of all: it moves no comparison."""

    def neutral(self: Any, function: Any, data: Any) -> Any:
        results = execute(self, function, data)
        runs = [run for run in results if isinstance(run, dict) and "score" in run]
        known = [run for run in runs if run["score"] is not None]
        if runs and not known:
            raise Unscored("none of the examples could be scored")
        for run in runs:
            if run["score"] is None:
                same = [other["score"] for other in known if other["example"] is run["example"]] or [other["score"] for other in known]
                run["score"] = sum(same) / len(same)
        return results

    return neutral


def _seeded(create: Callable[..., Any], seed: int) -> Callable[..., Any]:
    def seeded(*args: Any, **kwargs: Any) -> Any:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        kwargs.setdefault("sampler", optuna.samplers.TPESampler(seed=seed))
        return create(*args, **kwargs)

    return seeded


def _evaluating(seen: Seen) -> Callable[..., EvaluationResult]:
    def evaluating(self: Any, program: Any, *args: Any, **kwargs: Any) -> EvaluationResult:
        result = _evaluate(self, program, *args, **kwargs)
        seen(program, result)
        return result

    return evaluating


def _evaluate(self: Any, program: Any, metric: Any = None, devset: Any = None, num_threads: Any = None, **_: Any) -> EvaluationResult:
    metric, devset = metric or self.metric, devset if devset is not None else self.devset
    if not devset:
        raise ValueError("devset must contain at least one example")

    def one(example: Any) -> tuple[Any, Any]:
        try:
            prediction = program(**example.inputs())
            return prediction, metric(example, prediction)
        except StopRun:
            raise
        except Unscored:
            return prediction, None
        except Exception as error:  # a metric or program of somebody's own: a failed example, as in DSPy
            failed = dspy.Prediction()
            failed._error = error
            return failed, self.failure_score

    threads = num_threads or self.num_threads or dspy.settings.num_threads or 1
    with ThreadPoolExecutor(max_workers=threads) as pool:
        futures = [pool.submit(contextvars.copy_context().run, one, example) for example in devset]
        try:
            outcomes = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    known = [_number(score) for _, score in outcomes if score is not None]
    if not known:
        raise Unscored("none of the examples could be scored")
    mean = sum(known) / len(known)
    feedback = getattr(metric, "feedback", False)
    neutral = dspy.Prediction(score=mean, feedback="This run could not be scored.") if feedback else mean
    results = [(example, prediction, neutral if score is None else score) for example, (prediction, score) in zip(devset, outcomes, strict=True)]
    return EvaluationResult(score=round(100 * mean, 2), results=results)


def _number(score: Any) -> float:
    return float(score["score"] if isinstance(score, dspy.Prediction) else score)
