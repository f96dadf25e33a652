"""What DSPy's optimizers get wrong for weighted rubrics and small models, put right while they run.

- `Evaluate` gives up after ten errors and resubmits slow examples (doubling the work on a slow machine). Here it does
  neither, and nor does `ParallelExecutor` (under `dspy.Parallel`, which SIMBA uses).
- What is unscored is left out, as everywhere: see `assay.rubrics.protection`.
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
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.parallelizer import ParallelExecutor

from assay.errors import StopRun
from assay.optimizers.proposals import Watch
from assay.rubrics.protection import MissingScore, protect_dspy, protected_call

__all__ = ["repaired_dspy"]

_lock = threading.RLock()


Seen = Callable[[Any, EvaluationResult], None]
Ran = Callable[[Any, float], None]


@contextmanager
def repaired_dspy(
    log: TextIO | None = None, seed: int = 0, seen: Seen = lambda program, result: None, watch: Watch | None = None,
    ran: Ran = lambda program, score: None,
) -> Iterator[None]:  # fmt: skip
    """Within: DSPy's loops behave as above. One run at a time in a process.

    Args:
        log: takes what they print; None leaves it on standard output.
        seen: told of every program that a teleprompter evaluates, with its result.
        ran: told of every run that SIMBA makes, with its program and score.
        watch: programs with an instruction that it refuses score 0 without being run, and GEPA keeps the instruction before.
    """
    import optuna

    protect_dspy()
    with _lock:
        kept = Evaluate.__call__, ParallelExecutor.__init__, optuna.create_study, DspyAdapter.propose_new_texts, simba.wrap_program
        Evaluate.__call__ = _watched(_seen(protected_call(_evaluate), seen), watch)
        DspyAdapter.propose_new_texts = _whole(kept[3], watch)
        ParallelExecutor.__init__ = _patient(kept[1])
        simba.wrap_program = _told(kept[4], ran)
        optuna.create_study = _seeded(kept[2], seed)
        random.seed(seed)  # some teleprompters draw from the global generators
        np.random.seed(seed % 2**32)
        try:
            with redirect_stdout(log) if log is not None else nullcontext():
                yield
        finally:
            Evaluate.__call__, ParallelExecutor.__init__, optuna.create_study, DspyAdapter.propose_new_texts, simba.wrap_program = kept


def _watched(call: Callable[..., EvaluationResult], watch: Watch | None) -> Callable[..., EvaluationResult]:
    def watched(self: Any, program: Any, *args: Any, **kwargs: Any) -> EvaluationResult:
        if watch is None or not watch.refuses(program):
            return call(self, program, *args, **kwargs)
        devset = kwargs.get("devset") or self.devset or []
        return EvaluationResult(score=0.0, results=[(example, dspy.Prediction(), 0.0) for example in devset])

    return watched


def _whole(propose: Callable[..., dict[str, str]], watch: Watch | None) -> Callable[..., dict[str, str]]:
    def whole(self: Any, candidate: dict[str, str], *args: Any, **kwargs: Any) -> dict[str, str]:
        texts = propose(self, candidate, *args, **kwargs)
        if watch is None:
            return texts
        return {name: candidate.get(name, text) if watch.why(text, candidate.get(name, "")) is not None else text for name, text in texts.items()}

    return whole


def _told(wrap: Callable[..., Callable[..., Any]], ran: Ran) -> Callable[..., Callable[..., Any]]:
    def told(program: Any, metric: Any) -> Callable[..., Any]:
        inner = wrap(program, metric)

        def run(example: Any) -> Any:
            result = inner(example)
            ran(program, float(result["score"]))
            return result

        return run

    return told


def _patient(init: Callable[..., None]) -> Callable[..., None]:
    def patient(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.timeout, self.max_errors, self.disable_progress_bar = 0, 10**9, True

    return patient


def _seeded(create: Callable[..., Any], seed: int) -> Callable[..., Any]:
    def seeded(*args: Any, **kwargs: Any) -> Any:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        kwargs.setdefault("sampler", optuna.samplers.TPESampler(seed=seed))
        return create(*args, **kwargs)

    return seeded


def _seen(call: Callable[..., EvaluationResult], seen: Seen) -> Callable[..., EvaluationResult]:
    """Outside of the protection, which passes the program on in a function."""

    def told(self: Any, program: Any, *args: Any, **kwargs: Any) -> EvaluationResult:
        result = call(self, program, *args, **kwargs)
        seen(program, result)
        return result

    return told


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
    results = [(example, prediction, score) for example, (prediction, score) in zip(devset, outcomes, strict=True)]
    mean = sum(_number(score) for *_, score in results) / len(results)
    return EvaluationResult(score=round(100 * mean, 2), results=results)


def _number(score: Any) -> float:
    found = score["score"] if isinstance(score, dspy.Prediction) else score
    return found if isinstance(found, MissingScore) else float(found)
