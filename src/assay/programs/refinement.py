"""Outer-loop refinement: a program's answer is verified and revised, and the best round is returned.

Differs from `dspy.Refine`: the temperature is the agent's own, a round that fails never discards an earlier one, and
each round's gain is recorded as a reward of its call, so that revising can be trained. Does not decide whether a judge
may be a verifier; `assay.load_verifier` does.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dspy
from dspy.predict.parameter import Parameter

from assay.datasets import Task
from assay.errors import ConfigError, ProgramError
from assay.programs.agent import Agent, Held, calls_so_far
from assay.programs.compose import is_agent, run_member
from assay.rubrics.criteria import Grade, NoGrade
from assay.rubrics.protocols import Grader
from assay.support.scrubbing import error_text
from assay.support.values import value_text
from assay.traces.places import current_rollout

_BINS = 5  # equal intervals of the verifier's probability
_PRIOR = 2.0  # runs by which a bin's mean is pulled towards the mean of its round
_RESERVED = ("draft", "feedback")


class Halting(Parameter):  # type: ignore[misc]
    """When another round is not worth it. Part of an artifact's state; `assay compile` fits it on val.

    Attributes:
        halt_at: probability from which an answer is accepted, in (0, 1].
        min_gain: smallest expected gain that another round is worth, in [0, 1].
        gains: expected gain of one more round, by round and by interval of the verifier's probability so far:
            `gains[round][bin]` in [0, 1] is the mean of max(0, gain), because a round that is worse is not kept. Empty
            until `fit`; then no round is ended by it.
    Raises:
        ConfigError: a value out of range.
    """

    def __init__(self, halt_at: float = 0.9, min_gain: float = 0.01, gains: Sequence[Sequence[float]] = ()) -> None:
        for name, value, lowest in (("halt_at", halt_at, math.ulp(0.0)), ("min_gain", min_gain, 0.0)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= 1:
                above = "above 0 and at most 1" if lowest else "between 0 and 1"
                raise ConfigError(f"{name}={value!r} must be {above}")
        self.halt_at, self.min_gain = halt_at, min_gain
        self.gains: list[list[float]] = [list(row) for row in gains]

    def reset(self) -> None:
        self.gains = []

    def dump_state(self, json_mode: bool = True) -> dict[str, Any]:
        return {"gains": self.gains, "halt_at": self.halt_at, "min_gain": self.min_gain}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.gains = [[float(value) for value in row] for row in state["gains"]]
        self.halt_at, self.min_gain = float(state["halt_at"]), float(state["min_gain"])

    def fit(self, runs: Iterable[Sequence[Mapping[str, Any]]]) -> None:
        """Fits the table to the `rounds` of predictions on validation tasks, made before any fit.

        A bin with few runs is pulled towards the mean of its round, as if it had two more runs of that mean. A round
        that no run reached is not in the table.
        """
        pairs: dict[int, list[tuple[float, float]]] = {}
        for rounds in runs:
            best = -math.inf
            for at, entry in enumerate(rounds):
                if at and entry["probability"] is not None and best > -math.inf:
                    pairs.setdefault(at - 1, []).append((best, max(0.0, entry["probability"] - best)))
                best = max(best, -math.inf if entry["probability"] is None else entry["probability"])
        self.gains = []
        for at in range(len(pairs)):
            if at not in pairs:
                break
            mean = math.fsum(gain for _, gain in pairs[at]) / len(pairs[at])
            bins: list[list[float]] = [[] for _ in range(_BINS)]
            for probability, gain in pairs[at]:
                bins[_bin(probability)].append(gain)
            self.gains.append([(math.fsum(gains) + _PRIOR * mean) / (len(gains) + _PRIOR) for gains in bins])

    def expected(self, at: int, probability: float) -> float | None:
        """Expected gain of the round after round `at`; None if unknown."""
        return self.gains[at][_bin(probability)] if at < len(self.gains) else None

    def halts(self, at: int, probability: float) -> bool:
        """Whether another round after round `at` is not worth it. An undecided answer is never revised."""
        if math.isnan(probability) or probability >= self.halt_at:
            return True
        expected = self.expected(at, probability)
        return expected is not None and expected < self.min_gain

    def used(self, rounds: Sequence[Mapping[str, Any]]) -> int:
        """How many of the `rounds` of a prediction would have been made with these thresholds."""
        best = -math.inf
        for at, entry in enumerate(rounds):
            best = max(best, -math.inf if entry["probability"] is None else entry["probability"])
            if self.halts(at, best if best > -math.inf else math.nan):
                return at + 1
        return len(rounds)


def _bin(probability: float) -> int:
    return min(_BINS - 1, int(probability * _BINS))


class Refine(Agent):
    """Runs a program, verifies its answer, and revises it until it is good enough.

    Round 0 is the program's own answer. A revision sees the inputs, the draft and the verifier's reason. It ends when
    the verifier's probability reaches `halt_at`, when an answer repeats the one before, when the expected gain of
    another round is below `min_gain`, when the verifier cannot decide, or after the rounds that `reasoning_depth` sets:
    none below 6, one at 6 and 7, two at 8 and 9, three at 10; each takes one of `max_steps`. The two thresholds are
    those of `halting`, which `assay compile` fits on val.

    The prediction is that of the round with the highest probability, the earliest of equal ones, with `rounds`: for
    each its `probability` (None if undecided), `gain` over the best before it, `reason`, and `calls`, the range of its
    LM calls in the rollout (None if it is not recorded). The step check `refinement_gain` rewards calls by it.

    Args:
        program: the program to refine. An Agent is run with the parameters and prompt format of this one.
        verifier: grades a prediction in [0, 1], higher is better: a check, or a judge from `assay.load_verifier`. Its
            prompts are not optimised with the program. It sees the inputs, never the expected answer.
        signature: inputs and outputs of a revision; by default that of the program's only predictor.
        halt_at: probability from which an answer is accepted, in (0, 1].
        min_gain: smallest expected gain that another round is worth, in [0, 1].
    Raises:
        ConfigError: a value out of range, or a verifier that cannot be called.
        ProgramError: `signature` is needed or has a field named `draft` or `feedback`.
    """

    def __init__(
        self,
        program: dspy.Module,
        verifier: Grader,
        *,
        signature: Any = None,
        halt_at: float = 0.9,
        min_gain: float = 0.01,
    ) -> None:
        super().__init__()
        self.halting = Halting(halt_at, min_gain)
        _check_parts(program, verifier)
        self.program, self._verifier = program, Held(verifier)
        if is_agent(program):
            self.agent_parameters, self.prompt_format = program.agent_parameters, program.prompt_format
        task = _signature_of(program) if signature is None else dspy.ensure_signature(signature)
        if clash := [name for name in _RESERVED if name in task.fields]:
            raise ProgramError(f"the program has a field named {clash[0]!r}, which a revision uses itself: rename it")
        own = program.input_names if is_agent(program) else ()
        self.input_names = own or tuple(task.input_fields)  # type: ignore[misc]  # other agents fix theirs by class
        self.outputs = list(task.output_fields)
        fields = {name: (field.annotation, field) for name, field in task.fields.items()}
        added = {
            "draft": (str, dspy.InputField(desc="an answer that may be wrong")),
            "feedback": (str, dspy.InputField(desc="what a check says of the draft")),
        }
        inputs = {name: fields[name] for name in task.input_fields}
        answer = {name: fields[name] for name in task.output_fields}
        self.revise = dspy.Predict(
            dspy.Signature({**inputs, **added, **answer}, f"{task.instructions} Correct the draft where it is wrong.")
        )

    def solve(self, **inputs: Any) -> dspy.Prediction:
        start = calls_so_far()
        best = run_member(self.program, self, inputs)
        best_probability, reason = self._verified(inputs, best)
        rounds = [_entry(best_probability, None, reason, start)]
        latest = best
        for at in range(self.rounds):
            if self.halting.halts(at, best_probability):
                break
            start = calls_so_far()
            try:
                revised = self._revised(inputs, latest, reason)
            except Exception as error:  # the answer so far is kept; caps and cancellations are BaseException
                rounds.append(_entry(math.nan, None, f"the revision failed: {error_text(error)}", start))
                break
            if _same(revised, latest, self.outputs):
                rounds.append(_entry(rounds[-1]["probability"], 0.0, "unchanged", start))
                break
            probability, reason = self._verified(inputs, revised)
            rounds.append(_entry(probability, probability - best_probability, reason, start))
            latest = revised
            if math.isnan(probability):
                break
            if probability > best_probability:
                best, best_probability = revised, probability
        return dspy.Prediction(**dict(best.items()), rounds=rounds)

    def _revised(self, inputs: dict[str, Any], draft: Any, reason: str) -> dspy.Prediction:
        text = "; ".join(f"{name}: {draft.get(name)}" for name in self.outputs)
        accepted = {name: value for name, value in inputs.items() if name in self.revise.signature.input_fields}
        filled = self.fit_context(self.revise, self.revise.signature, {**accepted, "draft": text}, [reason], "feedback")
        revised = self.revise(**filled)
        rest = {name: value for name, value in draft.items() if name not in self.outputs}
        return dspy.Prediction(**rest, **{name: revised[name] for name in self.outputs})

    def _verified(self, inputs: dict[str, Any], prediction: Any) -> tuple[float, str]:
        """The verifier's probability, NaN if it could not decide, and its reason."""
        rollout = current_rollout()
        task = Task(id=rollout.task_id if rollout is not None else "", inputs=inputs)
        try:
            result = self._verifier.value(task, dict(prediction.items()), rollout)
        except NoGrade as error:
            return math.nan, str(error)
        except Exception as error:  # a broken verifier must not cost the answer
            return math.nan, f"the verifier failed: {error_text(error)}"
        if result is None:
            return math.nan, "the verifier could not decide"
        value, reason = (result.value, result.reason) if isinstance(result, Grade) else (result, "")
        try:
            grade = float(value)
        except (TypeError, ValueError):
            grade = math.nan
        if not 0 <= grade <= 1:
            return math.nan, f"the verifier returned {value!r}, not a grade between 0 and 1"
        return grade, reason


def _check_parts(program: Any, verifier: Any) -> None:
    """Refuses what cannot be refined, and what cannot verify: a verifier that raises would only leave rounds out."""
    if not isinstance(program, dspy.Module):
        made = f"; make an object of it: {program.__name__}()" if isinstance(program, type) else ""
        raise ConfigError(
            f"program={program!r} must be a dspy.Module, such as dspy.Predict('question -> answer'){made}"
        )
    rule = "must be a function (task, prediction, rollout) -> grade"
    if isinstance(verifier, dspy.Module | str) or not callable(verifier):
        is_judge = isinstance(verifier, dspy.Module | str)
        hint = "; assay.load_verifier makes a verifier of a judge" if is_judge else ""
        raise ConfigError(f"verifier={verifier!r} {rule}{hint}")
    if inspect.iscoroutinefunction(verifier):
        raise ConfigError(f"verifier={verifier!r} {rule}: it is 'async def'")
    try:
        inspect.signature(verifier).bind(None, None, None)
    except TypeError as error:
        name = getattr(verifier, "__qualname__", None) or repr(verifier)
        hint = "; a reward_fn(args, pred) of dspy.Refine needs these three arguments instead"
        raise ConfigError(f"verifier={name} {rule}: {error}{hint}") from None
    except ValueError:
        pass  # a builtin without a signature


def _entry(probability: float | None, gain: float | None, reason: str, start: int | None) -> dict[str, Any]:
    """One round as JSON: NaN is None."""
    end = calls_so_far()
    return {
        "probability": None if probability is None or math.isnan(probability) else probability,
        "gain": None if gain is None or math.isnan(gain) else gain,
        "reason": reason,
        "calls": None if start is None or end is None else [start, end],
    }


def _same(a: Any, b: Any, names: Sequence[str]) -> bool:
    return all(" ".join(value_text(a.get(name)).split()) == " ".join(value_text(b.get(name)).split()) for name in names)


def _signature_of(program: dspy.Module) -> Any:
    """The task of a program: the one that it declares, or that of its only predictor."""
    declared = getattr(program, "task_signature", None)
    if declared is not None:
        return declared
    predictors = program.predictors()
    if len(predictors) != 1:
        raise ProgramError(
            f"{type(program).__name__} has {len(predictors)} predictors, so its inputs and outputs are unknown: pass "
            "signature='inputs -> outputs'"
        )
    if isinstance(program, dspy.ChainOfThought):
        return predictors[0].signature.delete("reasoning")
    return predictors[0].signature
