"""An agent whose adapter sends tools by native function calling."""

import dspy


def successor(number: int) -> int:
    """The number after this one."""
    return number + 1


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.agent = dspy.ReActV2("question -> answer", tools=[successor], max_iters=3)

    def forward(self, question: str) -> dspy.Prediction:
        with dspy.context(adapter=dspy.ChatAdapter(use_native_function_calling=True)):
            return dspy.Prediction(answer=self.agent(question=question).answer)
