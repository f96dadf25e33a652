"""Fakes for tests of your own judges, stores and agents.

A scripted engine is a DSPy engine whose responses are a function of the request, for tests without a model. A synthetic
agent has a known optimum: a published test function of the five parameters decides the probability of a correct answer,
and a tuner sees only whether each answer is correct. Judges with known defects, and sound ones with an answer key, test
audits and judge cards without a model.
"""

import hashlib
import json
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from dspy import lm15

from assay.errors import ConfigError
from assay.judges.base import Judge, Reading
from assay.judges.comparing import PairwiseJudge
from assay.models import LanguageModel, Meter, ResponseCache, with_recording
from assay.models.calls import Observer
from assay.optimizers.parameters import Space
from assay.programs import RANGES, AgentParameters
from assay.support.names import one_of


class ScriptedEngine:
    """Returns `script(request)` as the response, or raises it if it is an exception. `calls` is the number of calls.

    Args:
        script: canonical request -> text, an exception, or next-token probabilities by word.
        tokens: prompt and completion tokens that each call reports.
    """

    supports_function_calling = False
    supports_reasoning = False
    supports_response_schema = True

    def __init__(
        self,
        script: Callable[[Any], Any],
        *,
        tokens: tuple[int, int] = (10, 5),
        price_usd: float | None = 0.0,
        logprobs: bool = False,
    ) -> None:
        self.supported_params = frozenset(
            {
                "temperature",
                "max_tokens",
                "response_format",
                "seed",
                *(("logprobs", "top_logprobs") if logprobs else ()),
            }
        )
        self.script, self.tokens, self.price_usd, self.calls = script, tokens, price_usd, 0
        self._lock = threading.Lock()

    def complete(self, request: Any) -> Any:
        with self._lock:
            self.calls += 1
        output = self.script(request)
        if isinstance(output, BaseException):
            raise output
        prompt, completion = self.tokens
        usage = lm15.Usage(input_tokens=prompt, output_tokens=completion)
        logprobs = None
        if isinstance(output, dict):
            top = tuple(lm15.TopLogprob(token=word, logprob=math.log(p)) for word, p in output.items() if p > 0)
            output = max(output, key=output.__getitem__)
            logprobs = (lm15.TokenLogprob(token=output, logprob=0.0, top=top),)
        return lm15.Response(
            id=None,
            model=request.model,
            message=lm15.Message.assistant([lm15.TextPart(str(output))]),
            finish_reason="stop",
            usage=usage,
            logprobs=logprobs,
        )

    def stream(self, request: Any) -> Any:
        return iter(lm15.response_to_events(self.complete(request)))

    def close(self) -> None:
        pass


def scripted_lm(
    script: Callable[[Any], Any],
    *,
    num_retries: int = 0,
    tokens: tuple[int, int] = (10, 5),
    price_usd: float | None = 0.0,
    logprobs: bool = False,
    cache: ResponseCache | None = None,
    meter: Meter | None = None,
    observers: Sequence[Observer] = (),
) -> LanguageModel:
    """A language model with a `ScriptedEngine`, which is its attribute `scripted`.

    Args:
        script: as in `ScriptedEngine`, as are `tokens`, `price_usd` and `logprobs`.
        num_retries: retries of a failed call.
        cache, meter, observers: as in `assay.models.with_recording`.
    """
    import dspy

    engine = ScriptedEngine(script, tokens=tokens, price_usd=price_usd, logprobs=logprobs)
    model = dspy.LM("scripted/model", engine=engine, cache=False, num_retries=num_retries)
    lm = with_recording(model, cache=cache, meter=meter, observers=observers)
    lm.scripted = engine
    return lm


_BEST = 0.95  # probability of a correct answer at the optimum
_SPACE = Space(programs=["agent"], acting={"agent": list(RANGES)})


def _ackley(u: np.ndarray) -> float:
    """Ackley 1987, on an interval of length 4 with the optimum off the middle; minimum 0."""
    x = 4 * (u - np.array([0.3, 0.2, 0.6, 0.35, 0.7]))
    return float(-20 * np.exp(-0.2 * np.sqrt((x**2).mean())) - np.exp(np.cos(2 * np.pi * x).mean()) + 20 + np.e)


def _rosenbrock(u: np.ndarray) -> float:
    """log(1 + f) of Rosenbrock 1960 (Computer Journal 3:175) on [-2.048, 2.048]; minimum 0 where every x is 1."""
    x = 4.096 * u - 2.048
    return float(np.log1p((100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()))


_A = np.array(
    [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
)
_P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)
_ALPHA = np.array([1.0, 1.2, 3.0, 3.2])
_OPTIMUM = np.array([0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573])


def _hartmann(u: np.ndarray) -> float:
    """Six-dimensional Hartmann function (Dixon and Szegö 1978), the last x fixed at its optimum; minimum -3.32237."""
    x = np.append(u, _OPTIMUM[5])
    return float(-(_ALPHA * np.exp(-(_A * (x - _P) ** 2).sum(axis=1))).sum())


# Function, its minimum, and midpoint and width of the logistic map to a probability. About a quarter of the parameter
# space has values below the midpoint; one point in 100 to 400 is within 5 % of the optimum.
FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], float], float, float, float]] = {
    "ackley": (_ackley, 0.0, 5.6, 0.9),
    "rosenbrock": (_rosenbrock, 0.0, math.log1p(880), 0.9),
    "hartmann": (_hartmann, -3.32237, -0.6, 0.5),
}


class SyntheticAgent:
    """A `BaseAgent` whose `execute(task)` is correct with a probability that depends on the five parameters.

    The same seed, task and parameters give the same answer.

    Args:
        function: `ackley`, `rosenbrock` or `hartmann`.
        tasks: number of tasks.
        fixed: share of the tasks whose answers do not depend on the parameters: half of them always correct, half
            always wrong.
    """

    def __init__(self, function: str = "ackley", *, tasks: int = 50, seed: int = 0, fixed: float = 0.0) -> None:
        if function not in FUNCTIONS:
            raise ConfigError(f"function={function!r} {one_of(function, FUNCTIONS)}")
        self.function, self.seed, self.executed, self.fixed = function, seed, 0, fixed
        self.tasks: Sequence[str] = [f"task {number}" for number in range(tasks)]
        self.parameters = AgentParameters()

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = AgentParameters.of(parameters, base=self.parameters)

    def execute(self, task: Any) -> bool:
        self.executed += 1
        task_draw = _uniform(f"{self.seed} {task}")
        if task_draw < self.fixed:
            return task_draw < self.fixed / 2
        parameters = self.parameters.model_dump()
        return _uniform(json.dumps([self.seed, str(task), parameters])) < self.success(parameters)

    def success(self, parameters: Mapping[str, Any]) -> float:
        """The true probability of a correct answer; `best` at the optimum."""
        function, minimum, midpoint, width = FUNCTIONS[self.function]
        u = np.array([_SPACE.place(name, parameters[name]) for name in RANGES])
        return _BEST * _logistic((midpoint - function(u)) / width) / _logistic((midpoint - minimum) / width)

    @property
    def best(self) -> float:
        """Probability of a correct answer at the optimum."""
        return _BEST

    @staticmethod
    def right(task: Any, output: Any) -> dict[str, float]:
        """An evaluator: accuracy 1 for a correct answer, 0 for a wrong one."""
        return {"accuracy": float(output)}


def _uniform(key: str) -> float:
    """A number in [0, 1) from the hash of the key."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-max(-60.0, min(60.0, x))))


_QUESTION = "Is the output a right answer to the task?"


class ConstantJudge(Judge):
    """Gives every output the best label."""

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        return None, self.labels[-1]


class RandomJudge(Judge):
    """Gives random labels."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.rng = random.Random(0)

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        return None, self.rng.choice(self.labels)


class LengthJudge(Judge):
    """Prefers long outputs: one step of the scale for every 40 characters."""

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        return None, self.labels[min(len(self.labels) - 1, len(str(inputs["output"])) // 40)]


class PhraseJudge(Judge):
    """Prefers outputs that contain a phrase."""

    def __init__(self, spec: Any, *, phrase: str = "step by step") -> None:
        super().__init__(spec)
        self.phrase = phrase

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        return None, self.labels[-1 if self.phrase in str(inputs["output"]).lower() else 0]


class AnswerKeyJudge(Judge):
    """A sound judge: gives the best label to outputs that contain the correct answer, else the worst.

    Args:
        key: task input -> correct answer.
    """

    def __init__(self, spec: Any, *, key: Mapping[str, str]) -> None:
        super().__init__(spec)
        self.key = dict(key)

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        return None, self.labels[-1 if self.key[inputs["task_input"]] in str(inputs["output"]) else 0]


class FirstPlaceJudge(PairwiseJudge):
    """Prefers the first output of every pair."""

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        first = {label: float(label == self.labels[0]) for label in self.labels}
        return {"given": first, "swapped": first}, None


class PairKeyJudge(PairwiseJudge):
    """A sound judge of pairs: prefers the output that contains the correct answer.

    Args:
        key: task input -> correct answer.
    """

    def __init__(self, spec: Any = _QUESTION, *, key: Mapping[str, str]) -> None:
        super().__init__(spec)
        self.key = dict(key)

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        answer = self.key[inputs["task_input"]]
        a, b = (answer in str(inputs[name]) for name in ("output_a", "output_b"))
        verdict = 1 if a == b else 0 if a else 2  # the label in the middle is a tie
        reading = {label: float(index == verdict) for index, label in enumerate(self.labels)}
        return {"given": reading, "swapped": {self._swapped(label): p for label, p in reading.items()}}, None


def broken_judges(spec: Any = _QUESTION) -> dict[str, Judge]:
    """One judge of each kind, by its defect. The last one judges pairs, the others single outputs."""
    return {
        "constant": ConstantJudge(spec),
        "random": RandomJudge(spec),
        "length-biased": LengthJudge(spec),
        "keyed to one phrase": PhraseJudge(spec),
        "position-biased": FirstPlaceJudge(),
    }
