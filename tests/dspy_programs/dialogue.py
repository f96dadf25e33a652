"""A turn of a conversation: the earlier turns come as a History."""

import dspy


class Reply(dspy.Signature):
    """Answer the user's question."""

    question: str = dspy.InputField()
    history: dspy.History = dspy.InputField()
    answer: str = dspy.OutputField()


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reply = dspy.Predict(Reply)

    def forward(self, question: str, history: dspy.History) -> dspy.Prediction:
        return self.reply(question=question, history=history)
