"""A question about a recording."""

import dspy


class Listen(dspy.Signature):
    """Answer the question; the recording may help."""

    recording: dspy.Audio = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listen = dspy.Predict(Listen)

    def forward(self, recording: dspy.Audio, question: str) -> dspy.Prediction:
        return self.listen(recording=recording, question=question)
