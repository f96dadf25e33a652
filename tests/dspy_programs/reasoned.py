"""Native reasoning as a typed output field."""

import dspy


class Solve(dspy.Signature):
    """Work out the sum."""

    question: str = dspy.InputField()
    thoughts: dspy.Reasoning = dspy.OutputField()
    answer: str = dspy.OutputField()


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.solve = dspy.Predict(Solve)

    def forward(self, question: str) -> dspy.Prediction:
        found = self.solve(question=question)
        return dspy.Prediction(answer=found.answer)
