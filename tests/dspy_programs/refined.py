"""Refine: tries again, with advice, while the answer is not an even number."""

from typing import Any

import dspy


def even(arguments: dict[str, Any], prediction: dspy.Prediction) -> float:
    return 1.0 if str(prediction.answer).isdigit() and int(prediction.answer) % 2 == 0 else 0.0


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.solve = dspy.Refine(dspy.ChainOfThought("question -> answer"), N=2, reward_fn=even, threshold=1.0)

    def forward(self, question: str) -> dspy.Prediction:
        return self.solve(question=question)
