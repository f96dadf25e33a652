"""Programs of the user's own, in a file that imports nothing else of the tests: an artifact copies it."""

from collections.abc import Sequence
from typing import Any

import dspy

from assay.programs import Classify


class Sums(dspy.Module):
    """A program with an attribute, a method, and a constructor with an argument."""

    def __init__(self, hint: str = "none") -> None:
        super().__init__()
        self.hint = hint
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question: str) -> Any:
        return self.answer(question=question)

    def shout(self) -> str:
        return self.hint.upper()


class Sentiment(Classify):
    """A classifier with a thinking budget."""

    def __init__(self, labels: Sequence[str] = ("sad", "happy"), thinking: Any = 64) -> None:
        super().__init__(labels, thinking=thinking)
