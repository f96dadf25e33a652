"""Patches of DSPy's optimizers for weighted rubrics and small models, in effect while they run.

- `Evaluate` stops after ten errors and resubmits slow examples, which doubles the work on a slow machine. The patched
  one does neither; the same holds for `ParallelExecutor` (used by `dspy.Parallel` and so by SIMBA).
- Unscored examples are left out of means, see `assay.rubrics.dspy_metric`.
- SIMBA refuses programs whose predictors have different models. Here each predictor samples from its own model.
- Optuna studies that teleprompters create get a seed; DSPy gives them none.
- Output is written to a log: standard output belongs to the command. Bars of tqdm are left out: standard error has the
  command's own progress, and in a file each of their steps would be a line.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partialmethod
from types import SimpleNamespace
from typing import Any, TextIO

import dspy
import numpy as np
from dspy.evaluate import EvaluationResult
from dspy.utils.exceptions import AdapterParseError
from tqdm.std import tqdm

from assay.errors import StopRun
from assay.evaluation.executors import in_order
from assay.models.dspy_seam import (
    EVALUATE,
    EXECUTOR,
    GEPA_TEXTS,
    SET_LM,
    SIMBA_MODELS,
    SIMBA_PROGRAM,
    patched_parts,
)
from assay.optimizers.prompts.proposals import UNREADABLE, InstructionCheck
from assay.rubrics.dspy_metric import MissingScore, protect_dspy, protected_call

_lock = threading.RLock()


OnEvaluated = Callable[[Any, EvaluationResult], None]
OnRun = Callable[[Any, float], None]


@contextmanager
def repaired_dspy(
    log: TextIO | None = None,
    seed: int = 0,
    on_evaluated: OnEvaluated = lambda program, result: None,
    instruction_check: InstructionCheck | None = None,
    on_run: OnRun = lambda program, score: None,
) -> Iterator[None]:
    """Applies the patches inside the context. One context at a time per process; others wait.

    Args:
        log: receives the printed output; None leaves it on standard output.
        on_evaluated: called with every program that a teleprompter evaluates and its result.
        on_run: called with the program and score of every run that SIMBA makes.
        instruction_check: programs with an instruction that it rejects score 0 without being run; GEPA keeps the
            previous instruction.
    """
    import optuna

    protect_dspy()
    evaluate = _watched(protected_call(_evaluate), instruction_check, on_evaluated)
    resampled: list[dspy.BaseLM] = []
    with _lock:
        originals = optuna.create_study, tqdm.__init__
        optuna.create_study = _seeded(originals[0], seed)
        tqdm.__init__ = partialmethod(originals[1], disable=True)
        random.seed(seed)  # some teleprompters draw from the global generators
        np.random.seed(seed % 2**32)
        try:
            with (
                redirect_stdout(log) if log is not None else nullcontext(),
                patched_parts(
                    (EVALUATE, lambda _: evaluate),
                    (GEPA_TEXTS, lambda propose: _keeping_previous(propose, instruction_check)),
                    (EXECUTOR, _patient),
                    (SIMBA_PROGRAM, lambda wrap: _reporting_runs(wrap, on_run)),
                    (SIMBA_MODELS, lambda prepare: _for_several_models(prepare, resampled)),
                    (SET_LM, lambda set_lm: _keeping_own_models(set_lm, resampled)),
                ),
            ):
                yield
        finally:
            optuna.create_study, tqdm.__init__ = originals


def _watched(
    call: Callable[..., EvaluationResult], instruction_check: InstructionCheck | None, on_evaluated: OnEvaluated
) -> Callable[..., EvaluationResult]:
    """Wraps the protected call, because the protection passes the program on inside a function."""

    def reject_or_evaluate(self: Any, program: Any, *args: Any, **kwargs: Any) -> EvaluationResult:
        if instruction_check is not None and instruction_check.refuses(program):
            devset = kwargs.get("devset") or self.devset or []
            return EvaluationResult(score=0.0, results=[(example, dspy.Prediction(), 0.0) for example in devset])
        result = call(self, program, *args, **kwargs)
        on_evaluated(program, result)
        return result

    return reject_or_evaluate


def _keeping_previous(
    propose: Callable[..., dict[str, str]], instruction_check: InstructionCheck | None
) -> Callable[..., dict[str, str]]:
    def propose_valid(self: Any, candidate: dict[str, str], *args: Any, **kwargs: Any) -> dict[str, str]:
        if instruction_check is None:
            return propose(self, candidate, *args, **kwargs)
        number = instruction_check.proposed
        try:
            texts = propose(self, candidate, *args, **kwargs)
        except AdapterParseError:
            instruction_check.proposed += 1
            instruction_check.rejected.append((number, UNREADABLE))
            raise
        instruction_check.proposed += len(texts)
        valid = dict(texts)
        for at, (name, text) in enumerate(texts.items(), start=number):
            before = candidate.get(name, "")
            if (reason := instruction_check.why(text, before)) is not None:
                instruction_check.rejected.append((at, reason.partition(":")[0]))
                valid[name] = candidate.get(name, text)
        return valid

    return propose_valid


def _reporting_runs(wrap: Callable[..., Callable[..., Any]], on_run: OnRun) -> Callable[..., Callable[..., Any]]:
    def reporting(program: Any, metric: Any) -> Callable[..., Any]:
        inner = wrap(program, metric)

        def run(example: Any) -> Any:
            result = inner(example)
            on_run(program, float(result["score"]))
            return result

        return run

    return reporting


def _for_several_models(prepare: Callable[..., list[Any]], resampled: list[dspy.BaseLM]) -> Callable[..., list[Any]]:
    """Copies of the job's model for a program with several models; they are added to `resampled`."""

    def prepared(program: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if len({predictor.lm for predictor in program.predictors()}) < 2:
            return prepare(program, *args, **kwargs)
        resampled[:] = prepare(SimpleNamespace(get_lm=lambda: None), *args, **kwargs)
        return list(resampled)

    return prepared


def _keeping_own_models(set_lm: Callable[..., None], resampled: list[dspy.BaseLM]) -> Callable[..., None]:
    """With a model of `resampled`, a predictor that has a model of its own gets a copy of that, sampled likewise."""

    def set_or_copy(self: Any, lm: Any) -> None:
        if not any(lm is model for model in resampled):
            set_lm(self, lm)
            return
        for predictor in self.predictors():
            own = predictor.lm
            predictor.lm = lm if own is None else own.copy(rollout_id=lm.kwargs["rollout_id"], temperature=1.0)

    return set_or_copy


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


def _evaluate(
    self: Any, program: Any, metric: Any = None, devset: Any = None, num_threads: Any = None, **_: Any
) -> EvaluationResult:
    metric, devset = metric or self.metric, devset if devset is not None else self.devset
    if not devset:
        raise ValueError("devset must contain at least one example")

    def evaluate_example(example: Any) -> tuple[Any, Any]:
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
    outcomes = in_order(lambda index: evaluate_example(devset[index]), len(devset), threads=threads)
    results = [(example, prediction, score) for example, (prediction, score) in zip(devset, outcomes, strict=True)]
    mean = sum(_number(score) for *_, score in results) / len(results)
    return EvaluationResult(score=round(100 * mean, 2), results=results)


def _number(score: Any) -> float:
    value = score["score"] if isinstance(score, dspy.Prediction) else score
    return value if isinstance(value, MissingScore) else float(value)
