"""Judges with known defects, and sound ones with an answer key, to test audits and judge cards. No model is called."""

import random
from collections.abc import Mapping
from typing import Any

from assay.judges.base import Judge, Reading
from assay.judges.comparing import PairwiseJudge

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
