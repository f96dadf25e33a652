"""Fields that checks of code read: values of a task, and the code of a prediction."""

import re
from typing import Any

from assay.datasets.tasks import Task

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def value_of(task: Task, name: str) -> Any:
    """A value of the task's metadata, expected outputs or inputs; None if there is none."""
    for values in (task.metadata, task.expected, task.inputs):
        if values.get(name) is not None:
            return values[name]
    return None


def code_of(prediction: dict[str, Any], field: str) -> str | None:
    """The code of a prediction: its longest fenced block if it has fences. None if it has no text."""
    value = prediction.get(field)
    if value is None and len(prediction) == 1 and next(iter(prediction)) in ("answer", "output"):
        value = next(iter(prediction.values()))  # recorded from outside, where the recorder names the field
    value = getattr(value, "code", value)  # `dspy.Code`
    if not isinstance(value, str):
        return None
    return max(_FENCE.findall(value), key=len, default=value)
