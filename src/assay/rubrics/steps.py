"""Checks of scope `step`: `prediction["transition"]` is the LM call that is graded.

A transition without a tool call gives no grade for what only tool calls can earn.
"""

import json
from typing import Any

from assay.datasets import Task
from assay.rubrics.criteria import Grade, NoGrade
from assay.traces.records import Rollout, Transition

__all__ = ["answered", "not_repeated", "tool_executed"]


def _transition(prediction: dict[str, Any]) -> Transition:
    found = prediction.get("transition")
    if not isinstance(found, Transition):
        raise NoGrade("a step check needs a transition")
    return found


def answered(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """1 where the model answered without an error."""
    transition = _transition(prediction)
    return Grade(value=float(transition.error is None and bool(transition.output.strip())))


def tool_executed(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """The share of the step's tool calls that ran without an error."""
    tools = _transition(prediction).tools
    if not tools:
        raise NoGrade("the step called no tool")
    return Grade(value=sum(tool.error is None for tool in tools) / len(tools))


def not_repeated(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """1 where no tool call of the step was made before with the same arguments."""
    transition = _transition(prediction)
    if not transition.tools or rollout is None:
        raise NoGrade("the step called no tool")

    def key(tool: Any) -> tuple[str, str]:
        return tool.name, json.dumps(tool.arguments, sort_keys=True, default=str)

    before = {key(tool) for earlier in rollout.transitions if earlier.t < transition.t for tool in earlier.tools}
    return Grade(value=float(not any(key(tool) in before for tool in transition.tools)))
