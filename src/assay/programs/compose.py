"""Composite programs: nearest demonstrations at run time, and ensembles. Both can be saved and loaded.

DSPy's own KNN program bootstraps at every call and does not save its demonstrations. Its ensemble draws members without
a seed and cannot be rebuilt from its state.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import dspy
import numpy as np

from assay.models.scope import settings_for_threads
from assay.models.thinking import Thinking
from assay.programs.adapters import listen_under, make_adapter
from assay.programs.agent import Agent, in_thread, streaming_as
from assay.programs.isolation import copied
from assay.support.awaited import completed
from assay.support.values import json_text, value_text
from assay.traces.listening import with_lm
from assay.traces.places import note_carried
from assay.traces.records import RUN_FIELDS

_HASHED = 4096


class Embedding:
    """TF-IDF embedding of texts as unit vectors; their dot product is the similarity. Deterministic; calls no model.

    Features are words and character n-grams within words (3 to 5, tolerant of inflection and typos), each hashed into
    4,096 dimensions.

    Args:
        texts: corpus for the inverse document frequencies.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer

        self._words = HashingVectorizer(
            n_features=_HASHED, alternate_sign=False, norm=None, token_pattern=r"(?u)\b\w+\b"
        )
        self._grams = HashingVectorizer(
            n_features=_HASHED, alternate_sign=False, norm=None, analyzer="char_wb", ngram_range=(3, 5)
        )
        self._idf = []
        for counts in self._counts(texts):
            present = np.asarray((counts > 0).sum(axis=0)).ravel()
            self._idf.append(1 + np.log((1 + len(texts)) / (1 + present)))

    def _counts(self, texts: Sequence[str]) -> list[Any]:
        return [part.transform(texts).log1p() for part in (self._words, self._grams)]

    def vectors(self, texts: Sequence[str]) -> Any:
        """Returns a sparse matrix, one row per text."""
        from scipy import sparse
        from sklearn.preprocessing import normalize

        parts = [
            normalize(counts.multiply(idf).tocsr()) for counts, idf in zip(self._counts(texts), self._idf, strict=True)
        ]
        return normalize(sparse.hstack(parts, format="csr"))


@functools.lru_cache(maxsize=8)
def _embedded(keys: tuple[str, ...]) -> tuple[Embedding, Any]:
    """The embedding of a pool and its vectors. Cached, because the candidates of a search share one pool."""
    embedding = Embedding(keys)
    return embedding, embedding.vectors(keys)


class Composite(Agent):
    """Runs its members with its own parameters and prompt format; with `plain`, members are run unchanged."""

    plain = False

    def forward(self, **inputs: Any) -> Any:
        return self.solve(**inputs) if self.plain else super().forward(**inputs)


class NearestDemos(Composite):
    """Uses the `k` runs whose inputs are most similar to the task's as demonstrations.

    Args:
        program: the program to run.
        pool: runs as `{"key": text of the inputs, "demos": {predictor: [fields]}}`. If a run called a predictor several
            times, its first and last call are used.
        k: number of runs.
    """

    def __init__(self, program: dspy.Module, pool: Sequence[dict[str, Any]], k: int = 4) -> None:
        super().__init__()
        self.program, self.pool, self.k = program, list(pool), k
        self._embedding, self._vectors = _embedded(tuple(entry["key"] for entry in self.pool))
        take_settings(self, program)

    def nearest(self, **inputs: Any) -> list[dict[str, Any]]:
        """Returns the `k` most similar runs of the pool, most similar last."""
        similarity = self._vectors @ self._embedding.vectors([input_key(inputs)]).toarray().ravel()
        return [self.pool[i] for i in np.argsort(-similarity, kind="stable")[: self.k]][::-1]

    def solve(self, **inputs: Any) -> Any:
        nearest, program = self.nearest(**inputs), copied(self.program)
        for name, predictor in program.named_predictors():
            predictor.demos = [
                dspy.Example(**fields) for entry in nearest for fields in ends(entry["demos"].get(name, []))
            ]
        with streaming_as(self.program, program):
            return run_member(program, self, inputs)


class EnsembleProgram(Composite):
    """Runs all members and takes the majority value of each output field; ties go to the earliest member."""

    def __init__(self, members: Sequence[dspy.Module]) -> None:
        super().__init__()
        self.members = list(members)
        take_settings(self, self.members[0])

    def solve(self, **inputs: Any) -> Any:
        answers = []
        failure: Exception | None = None
        for member in self.members:
            try:
                answers.append(run_member(member, self, inputs))
            except Exception as error:  # the ensemble fails only if all members fail
                failure = error
        if not answers:
            raise failure or RuntimeError("the ensemble has no members")
        voted = {
            name: _majority([answer[name] for answer in answers if name in answer])
            for name in answers[0]
            if name not in RUN_FIELDS
        }
        steps = [step for answer in answers for step in answer.get("steps") or []]
        return dspy.Prediction(**voted, **({"steps": steps} if "steps" in answers[0] else {}))


def ends(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first and the last of a predictor's calls in a run."""
    return list(calls) if len(calls) < 2 else [calls[0], calls[-1]]


def is_agent(program: Any) -> bool:
    """Whether a program has the five agent parameters: it is an Agent, but not a composite of plain modules."""
    return isinstance(program, Agent) and not getattr(program, "plain", False)


def input_key(inputs: dict[str, Any]) -> str:
    """The text by which inputs are compared: all values, sorted by name."""
    return "\n".join(value_text(inputs[name]) for name in sorted(inputs))


def _majority(values: Sequence[Any]) -> Any:
    keys = [" ".join(json_text(value).casefold().split()) for value in values]
    winner = Counter(keys).most_common(1)[0][0]
    return values[keys.index(winner)]


def take_settings(outer: Composite, inner: dspy.Module) -> None:
    if isinstance(inner, Agent):
        outer.agent_parameters, outer.prompt_format = inner.agent_parameters, inner.prompt_format
    else:
        outer.plain = True


def run_member(program: dspy.Module, outer: Agent, inputs: dict[str, Any]) -> Any:
    """Runs a program inside of another; an Agent with the parameters and prompt format of the outer one."""
    if isinstance(program, Agent):
        program.agent_parameters, program.prompt_format = outer.agent_parameters, outer.prompt_format
    return completed(program(**inputs))


def without_nearest(program: Any) -> Any:
    """The program itself, or the one that gets the nearest demonstrations."""
    return program.program if isinstance(program, NearestDemos) else program


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """The settings of a plain module's compilation that DSPy's state does not include.

    Attributes:
        thinking: budget of its calls.
        own_lm: returns the model to use if none is configured in DSPy.
    """

    prompt_format: str | None = None
    temperature: float | None = None
    thinking: Thinking | None = None
    own_lm: Callable[[], Any] | None = None

    def __deepcopy__(self, memo: object) -> "CallSettings":
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None: a program that DSPy saves whole (`save_program=True`) is loaded without assay."""
        return type(None), ()

    def context(self) -> AbstractContextManager[Any]:
        options: dict[str, Any] = {}
        lm = dspy.settings.lm
        if lm is None and self.own_lm is not None:
            options = with_lm(lm := self.own_lm())
        if self.prompt_format is not None:
            options["adapter"] = make_adapter(self.prompt_format)
            listen_under(options["adapter"])
        changed = {"temperature": self.temperature, "thinking": self.thinking}
        if lm is not None and (changed := {name: value for name, value in changed.items() if value is not None}):
            options |= with_lm(lm.copy(**changed))
        context: AbstractContextManager[Any] = dspy.context(**options)
        return context


def configured(program: dspy.Module, settings: CallSettings) -> dspy.Module:
    """The program itself, which is called with these settings from now on, as are its copies.

    It stays an instance of its class: its class gets a `__call__` and an `acall` that apply the settings of an instance
    that has some.
    """
    kind = type(program)
    if not hasattr(kind.__call__, "_assay_settings"):
        kind.__call__, kind.acall = _called(kind.__call__), _awaited(kind.acall, kind.__call__)
    program._assay_settings = settings
    return program


def _called(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(self: Any, *arguments: Any, **inputs: Any) -> Any:
        if (settings := vars(self).get("_assay_settings")) is None:
            return call(self, *arguments, **inputs)
        note_carried(self)
        with settings.context(), settings_for_threads():
            return completed(call(self, *arguments, **inputs))

    called._assay_settings = True  # type: ignore[attr-defined]
    return called


def _awaited(acall: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(acall)
    async def awaited(self: Any, *arguments: Any, **inputs: Any) -> Any:
        if (settings := vars(self).get("_assay_settings")) is None:
            return await acall(self, *arguments, **inputs)
        note_carried(self)
        with settings.context(), settings_for_threads():
            if hasattr(self, "aforward"):
                return await acall(self, *arguments, **inputs)
            return await in_thread(functools.partial(call, self), *arguments, **inputs)

    return awaited
