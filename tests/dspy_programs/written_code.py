"""Code as a typed output, which a second predictor reads."""

import dspy


class Write(dspy.Signature):
    """Write Python code that prints the answer."""

    question: str = dspy.InputField()
    program: dspy.Code = dspy.OutputField()


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.write = dspy.Predict(Write)
        self.run_it = dspy.Predict("question, program: dspy.Code -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.run_it(question=question, program=self.write(question=question).program)
