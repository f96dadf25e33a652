"""A question about an image."""

import dspy


class Look(dspy.Signature):
    """Answer the question; the image may help."""

    image: dspy.Image = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.look = dspy.ChainOfThought(Look)

    def forward(self, image: dspy.Image, question: str) -> dspy.Prediction:
        return self.look(image=image, question=question)
