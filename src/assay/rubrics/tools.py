"""Checks of tool use, of scope `final`. Each is called as `check(task, prediction, rollout, **with)`.

Adoption alone can be gained by calling a tool on every task, so `adoption_when_needed` belongs next to
`abstention_when_not`: a task is graded by one of them, and the other does not apply to it.

The calls are the prediction's field `calls` (as `tool_user` has it), otherwise the recorded ones, otherwise the field
`steps`. Whether a task needs a tool is known from `expected.calls` (empty: none), or from its metadata: `tool_calls`
(the calls or their number) or `needs_tool`.
"""

from collections.abc import Mapping
from typing import Any

from assay.datasets import Task
from assay.rubrics.call_matching import expected_calls, matched_calls
from assay.rubrics.criteria import Grade, NoGrade, NotApplicable, beyond, not_expected
from assay.traces.records import Rollout

__all__ = [
    "abstention_when_not",
    "adoption_when_needed",
    "argument_exactness",
    "calls_used",
    "recovery_after_error",
]


def needs_tool(task: Task) -> bool | None:
    """Whether a task needs a tool; None if it does not say."""
    wanted, metadata = task.expected.get("calls"), task.metadata
    if isinstance(wanted, list | tuple):
        return bool(wanted)
    needed = metadata.get("tool_calls")
    if isinstance(needed, list | tuple):
        return bool(needed)
    if isinstance(needed, int) and not isinstance(needed, bool):  # a number of calls; True is an int in Python
        return needed > 0
    needs_tool = metadata.get("needs_tool")
    return needs_tool if isinstance(needs_tool, bool) else None


def made_calls(prediction: Mapping[str, Any], rollout: Rollout | None) -> list[dict[str, Any]] | None:
    """The calls of a run, in order, each with `name`, `arguments` and `error`; None if they are not known."""
    listed = prediction.get("calls")
    if isinstance(listed, list | tuple) and all(isinstance(call, Mapping) and "name" in call for call in listed):
        return [{"arguments": {}, "error": None, **call} for call in listed]
    if rollout is not None and (rollout.transitions or rollout.tools):
        return [{"name": call.name, "arguments": call.arguments, "error": call.error} for call in rollout.tools]
    steps = prediction.get("steps")
    if isinstance(steps, list | tuple):
        return [
            {"name": step.get("tool"), "arguments": step.get("arguments") or {}, "error": step.get("error")}
            for step in steps
            if isinstance(step, Mapping)
        ]
    return None


def _calls(prediction: Mapping[str, Any], rollout: Rollout | None) -> list[dict[str, Any]]:
    calls = made_calls(prediction, rollout)
    if calls is None:
        raise NoGrade("tool calls are unknown: the prediction has no field 'calls' or 'steps', and there is no rollout")
    return calls


def _needed(task: Task) -> bool:
    needed = needs_tool(task)
    if needed is None:
        raise NoGrade(
            f"task {task.id!r} does not say whether it needs a tool: set expected.calls (empty: none), "
            "or tool_calls or needs_tool in its metadata"
        )
    return needed


def adoption_when_needed(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if a tool was called, on tasks that need one; does not apply to others."""
    if not _needed(task):
        raise NotApplicable("the task needs no tool")
    called = bool(_calls(prediction, rollout))
    return Grade(value=float(called), reason="" if called else "No tool was called, and the task needs one.")


def abstention_when_not(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if no tool was called, on tasks that need none; does not apply to others."""
    if _needed(task):
        raise NotApplicable("the task needs a tool")
    calls = _calls(prediction, rollout)
    return Grade(
        value=float(not calls), reason=f"{calls[0]['name']} was called, and the task needs no tool." if calls else ""
    )


def argument_exactness(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, all_or_nothing: bool = False
) -> Grade:
    """Share of calls that match the expected ones: matching calls / max(made, expected), in any order.

    A call matches if its name, its required arguments and all values are right; `expected.calls` has alternatives for
    each value. Calls that failed are not counted. Does not apply to tasks that need no tool.

    Args:
        all_or_nothing: grade 1 if all calls match and none is missing, otherwise 0.
    """
    listed = task.expected.get("calls")
    if not isinstance(listed, list | tuple):
        raise not_expected(task, "calls")
    if not listed:
        raise NotApplicable("the task needs no tool")
    try:
        expected = expected_calls(listed)
    except ValueError as error:
        raise NoGrade(f"task {task.id!r}: {error}") from None
    made = [call for call in _calls(prediction, rollout) if call["error"] is None]
    matched, reason = matched_calls(made, expected, _schemas(task))
    share = matched / max(len(made), len(expected))
    return Grade(value=float(share == 1) if all_or_nothing else share, reason=f"{reason}." if reason else "")


def _schemas(task: Task) -> dict[str, Any]:
    listed = task.inputs.get("tools")
    if not isinstance(listed, list | tuple):
        return {}
    inner = [tool.get("function", tool) for tool in listed if isinstance(tool, Mapping)]
    return {str(tool["name"]): tool for tool in inner if isinstance(tool, Mapping) and "name" in tool}


def recovery_after_error(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Share of failed calls whose next call had no error; does not apply to runs without a failed call."""
    calls = _calls(prediction, rollout)
    following = [
        index + 1 < len(calls) and calls[index + 1]["error"] is None
        for index, call in enumerate(calls)
        if call["error"] is not None
    ]
    if not following:
        raise NotApplicable("no call failed")
    share = sum(following) / len(following)
    failed = next(call for call in calls if call["error"] is not None)
    return Grade(value=share, reason=f"{failed['name']} failed: {str(failed['error'])[:200]}." if share < 1 else "")


def calls_used(task: Task, prediction: dict[str, Any], rollout: Rollout | None, budget: int | None = None) -> Grade:
    """For a pitfall: 0 up to `budget` calls, rising linearly to 1 at twice the budget (at one call if it is 0).

    Args:
        budget: default: the number of calls that the task needs.
    """
    calls = len(_calls(prediction, rollout))
    needed: Any = budget
    if needed is None:
        listed = task.expected.get("calls", task.metadata.get("tool_calls"))
        needed = len(listed) if isinstance(listed, list | tuple) else listed
    if not isinstance(needed, int) or isinstance(needed, bool) or needed < 0:
        raise NoGrade(f"task {task.id!r} does not say how many calls it needs: set budget, or expected.calls")
    over = beyond(calls, needed)
    return Grade(value=over, reason=f"{calls} tool calls, the budget is {needed}." if over else "")
