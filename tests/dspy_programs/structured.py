"""Nested pydantic output with a Literal and a list."""

from typing import Literal

import dspy
from pydantic import BaseModel


class Term(BaseModel):
    value: int
    sign: Literal["plus", "minus"]


class Sum(BaseModel):
    terms: list[Term]
    total: int


class ReadSum(dspy.Signature):
    """Read the sum in the question and work it out."""

    question: str = dspy.InputField()
    sum: Sum = dspy.OutputField(desc="the terms in order, and their total")


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = dspy.Predict(ReadSum)

    def forward(self, question: str) -> dspy.Prediction:
        return self.read(question=question)
