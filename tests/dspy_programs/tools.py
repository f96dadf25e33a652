"""A ReAct agent with one tool, inside a module."""

import dspy


def successor(number: int) -> int:
    """The number after this one."""
    return number + 1


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.agent = dspy.ReAct("question -> answer", tools=[successor], max_iters=3)

    def forward(self, question: str) -> dspy.Prediction:
        return self.agent(question=question)
