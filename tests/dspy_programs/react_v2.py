"""A bare ReActV2 instance, as a notebook leaves it."""

import dspy


def successor(number: int) -> int:
    """The number after this one."""
    return number + 1


program = dspy.ReActV2("question -> answer", tools=[successor], max_iters=3)
