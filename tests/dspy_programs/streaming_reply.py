"""Streams one field while the answer is written, as behind a chat page."""

import dspy


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reply = dspy.Predict("question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        listener = dspy.streaming.StreamListener(signature_field_name="answer", allow_reuse=True)
        stream = dspy.streamify(self.reply, stream_listeners=[listener], async_streaming=False)
        last = None
        for part in stream(question=question):
            last = part
        assert isinstance(last, dspy.Prediction)
        return last
