"""Programs made of programs: nearest demonstrations at run time, and ensembles. Both save and load like any other.

DSPy's own compiled KNN program bootstraps anew at every call and its saved state is not the KNN program; its ensemble
draws members without a seed and cannot be rebuilt from its state.
"""

import copy
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import dspy
import numpy as np

from assay.programs.adapters import make_adapter
from assay.programs.agent import Agent

__all__ = ["Configured", "EnsembleProgram", "NearestDemos", "input_key", "is_agent"]

_DIMENSIONS = 512


def embed(text: str) -> np.ndarray:
    """Character trigrams hashed into 512 dimensions, of unit length. No model, no network; the same everywhere."""
    vector = np.zeros(_DIMENSIONS)
    padded = f"  {text.casefold()} "
    for i in range(len(padded) - 2):
        code = 0
        for char in padded[i : i + 3]:
            code = (code * 1_000_003 + ord(char)) & 0xFFFFFFFF
        vector[code % _DIMENSIONS] += 1
    norm = np.linalg.norm(vector)
    return vector / norm if norm else vector


class _Composite(Agent):
    """Runs its members under its own parameters and adapter. Plain members run as they are (`plain`)."""

    plain = False

    def forward(self, **inputs: Any) -> Any:
        return self.solve(**inputs) if self.plain else super().forward(**inputs)


class NearestDemos(_Composite):
    """Shows the `k` runs whose inputs are nearest to the task's.

    Args:
        program: what is run.
        pool: runs as `{"key": text of the inputs, "demos": {predictor: [fields]}}`.
    """

    def __init__(self, program: dspy.Module, pool: Sequence[dict[str, Any]], k: int = 4) -> None:
        super().__init__()
        self.program, self.pool, self.k = program, list(pool), k
        self._vectors = np.array([embed(entry["key"]) for entry in self.pool])
        _take_settings(self, program)

    def solve(self, **inputs: Any) -> Any:
        likeness = self._vectors @ embed(input_key(inputs))
        nearest = [self.pool[i] for i in np.argsort(-likeness, kind="stable")[: self.k]][::-1]  # the nearest one last
        program = copy.deepcopy(self.program)
        for name, predictor in program.named_predictors():
            predictor.demos = [dspy.Example(**fields) for entry in nearest for fields in entry["demos"].get(name, [])[:1]]
        return _run(program, self, inputs)


class EnsembleProgram(_Composite):
    """Runs all members and takes, for each output field, what most of them say; ties go to the earliest member."""

    def __init__(self, members: Sequence[dspy.Module]) -> None:
        super().__init__()
        self.members = list(members)
        _take_settings(self, self.members[0])

    def solve(self, **inputs: Any) -> Any:
        answers = []
        failure: Exception | None = None
        for member in self.members:
            try:
                answers.append(_run(member, self, inputs))
            except Exception as error:  # one member's failure is outvoted; all of them failing is a failure
                failure = error
        if not answers:
            raise failure or RuntimeError("the ensemble has no members")
        voted = {name: _majority([answer[name] for answer in answers if name in answer]) for name in answers[0] if name != "steps"}
        steps = [step for answer in answers for step in answer.get("steps") or []]
        return dspy.Prediction(**voted, **({"steps": steps} if "steps" in answers[0] else {}))


def is_agent(program: Any) -> bool:
    """Whether a program has the five parameters: an Agent, but not a composite of plain modules."""
    return isinstance(program, Agent) and not getattr(program, "plain", False)


def input_key(inputs: dict[str, Any]) -> str:
    """The text by which inputs are compared."""
    return "\n".join(str(inputs[name]) for name in sorted(inputs))


def _majority(values: Sequence[Any]) -> Any:
    keys = [" ".join(json.dumps(value, default=str).casefold().split()) for value in values]
    winner = Counter(keys).most_common(1)[0][0]
    return values[keys.index(winner)]


def _take_settings(outer: _Composite, inner: dspy.Module) -> None:
    if isinstance(inner, Agent):
        outer.parameters, outer.adapter = inner.parameters, inner.adapter
    else:
        outer.plain = True


def _run(program: dspy.Module, outer: Agent, inputs: dict[str, Any]) -> Any:
    if isinstance(program, Agent):
        program.parameters, program.adapter = outer.parameters, outer.adapter
    return program(**inputs)


class Configured(dspy.Module):  # type: ignore[misc]
    """A plain module with the adapter and temperature that it was compiled with, which DSPy's own state leaves out."""

    def __init__(self, program: dspy.Module, adapter: str | None, temperature: float | None) -> None:
        super().__init__()
        self.program, self.adapter, self.temperature = program, adapter, temperature

    def forward(self, **inputs: Any) -> Any:
        changed: dict[str, Any] = {}
        if self.adapter is not None:
            changed["adapter"] = make_adapter(self.adapter)
        if self.temperature is not None and dspy.settings.lm is not None:
            changed["lm"] = dspy.settings.lm.copy(temperature=self.temperature)
        with dspy.context(**changed):
            return self.program(**inputs)
