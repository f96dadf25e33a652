"""Runs an agent once per line of standard input, a JSON object with `mode` and `question`.

Each line of standard output is a JSON object with `answer`, or with `error` if the agent raised. The agent's own output
goes to standard error.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["INSTRUCTIONS", "SCHEMA", "calculator", "run"]

INSTRUCTIONS = "You calculate."
SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}


def calculator(expression: str) -> str:
    """Calculates a product.

    Args:
        expression: such as 2*3
    """
    left, right = expression.split("*")
    return str(int(left) * int(right))


def run(**modes: Callable[[str], Any]) -> None:
    """Serves agents by mode until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = modes[asked["mode"]](asked["question"])
            reply = {"answer": asyncio.run(answer) if inspect.iscoroutine(answer) else answer}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": type(error).__name__}
        answers.write(json.dumps(reply) + "\n")
