"""Judges that are broken in known ways, and one that knows the answers: what an audit and a card must tell apart."""

import random
from collections.abc import Mapping
from typing import Any

from assay.judges.base import Judge, Reading
from assay.judges.pairwise import PairwiseJudge

__all__ = ["AnswerKeyJudge", "ConstantJudge", "FirstPlaceJudge", "LengthJudge", "PairKeyJudge", "PhraseJudge", "RandomJudge", "broken_judges"]

_QUESTION = "Is the output a right answer to the task?"


class ConstantJudge(Judge):
    """Likes everything."""

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        return None, self.labels[-1]


class RandomJudge(Judge):
    """Throws a die for every verdict, seeded once."""

    def __init__(self, spec: Any, **options: Any) -> None:
        super().__init__(spec, **options)
        self.rng = random.Random(0)

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        return None, self.rng.choice(self.labels)


class LengthJudge(Judge):
    """The longer the better: a word of the scale for every forty characters."""

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        return None, self.labels[min(len(self.labels) - 1, len(str(given["output"])) // 40)]


class PhraseJudge(Judge):
    """Likes whatever says one phrase."""

    def __init__(self, spec: Any, *, phrase: str = "step by step", **options: Any) -> None:
        super().__init__(spec, **options)
        self.phrase = phrase

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        return None, self.labels[-1 if self.phrase in str(given["output"]).lower() else 0]


class AnswerKeyJudge(Judge):
    """A sound judge: it has the answers, and likes an output that holds the right one.

    Args:
        key: task input -> what a right answer says.
    """

    def __init__(self, spec: Any, *, key: Mapping[str, str], **options: Any) -> None:
        super().__init__(spec, **options)
        self.key = dict(key)

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        return None, self.labels[-1 if self.key[given["task_input"]] in str(given["output"]) else 0]


class FirstPlaceJudge(PairwiseJudge):
    """Prefers what is shown first."""

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        first = {label: float(label == self.labels[0]) for label in self.labels}
        return {"given": first, "swapped": first}, None


class PairKeyJudge(PairwiseJudge):
    """A sound judge of pairs: it has the answers."""

    def __init__(self, spec: Any = _QUESTION, *, key: Mapping[str, str], **options: Any) -> None:
        super().__init__(spec, **options)
        self.key = dict(key)

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        wanted = self.key[given["task_input"]]
        a, b = (wanted in str(given[name]) for name in ("output_a", "output_b"))
        said = 1 if a == b else 0 if a else 2
        reading = {label: float(at == said) for at, label in enumerate(self.labels)}
        return {"given": reading, "swapped": {self._swapped(label): p for label, p in reading.items()}}, None


def broken_judges(spec: Any = _QUESTION) -> dict[str, Judge]:
    """One of each, by what is wrong with it. All but the last judge one output; that judges pairs."""
    return {
        "constant": ConstantJudge(spec),
        "random": RandomJudge(spec),
        "length-biased": LengthJudge(spec),
        "keyed to one phrase": PhraseJudge(spec),
        "position-biased": FirstPlaceJudge(),
    }
