"""An adapter of its own, XML, and outputs with structure."""

import dspy
from pydantic import BaseModel


class Term(BaseModel):
    value: int
    sign: str


class Sum(BaseModel):
    terms: list[Term]
    total: int


class ReadSum(dspy.Signature):
    """Read the sum in the question and work it out."""

    question: str = dspy.InputField()
    sum: Sum = dspy.OutputField()


class Answer(dspy.Signature):
    """Write the total."""

    question: str = dspy.InputField()
    sum: Sum = dspy.InputField()
    answer: str = dspy.OutputField()


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = dspy.Predict(ReadSum)
        self.respond = dspy.Predict(Answer)

    def forward(self, question: str) -> dspy.Prediction:
        with dspy.context(adapter=dspy.XMLAdapter()):
            return self.respond(question=question, sum=self.read(question=question).sum)
