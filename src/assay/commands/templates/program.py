"""Sorts messages of customers. Any `dspy.Module` compiles; this one is a start."""

from typing import Literal

import dspy


class Triage(dspy.Module):
    """One language model call for each message."""

    def __init__(self) -> None:
        super().__init__()
        signature = dspy.Signature("message: str -> label: str", "Sort the message.").with_updated_fields(
            "label", type_=Literal["bug", "billing", "praise"]
        )
        self.sort = dspy.Predict(signature)

    def forward(self, message: str) -> dspy.Prediction:
        return self.sort(message=message)
