"""A question about a file."""

import dspy


class Read(dspy.Signature):
    """Answer the question from the paper."""

    paper: dspy.File = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


program = dspy.Predict(Read)
