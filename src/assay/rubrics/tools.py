"""Checks of tool use, of scope `final`. Each is called as `check(task, prediction, rollout, **with)`.

Adoption alone can be gained by calling a tool on every task, so `adoption_when_needed` belongs next to
`abstention_when_not`: a task is graded by one of them, and the other does not apply to it.

The calls are the prediction's field `calls` (as `tool_user` has it), otherwise the recorded ones, otherwise the field
`steps`. Whether a task needs a tool is known from `expected.calls` (empty: none), or from its metadata: `tool_calls`
(the calls or their number) or `needs_tool`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from assay.datasets import Task
from assay.rubrics.criteria import Grade, NoGrade, NotApplicable, not_expected
from assay.traces.records import Rollout

__all__ = [
    "abstention_when_not",
    "adoption_when_needed",
    "argument_exactness",
    "calls_used",
    "recovery_after_error",
]

# -- Compares tool calls with expected ones: names, required arguments, and alternatives for each value.
#
# The rules are those of the Berkeley Function Calling Leaderboard's AST check for Python: text is compared without
# case, spaces and `,./-_*^`; an integer is a float, but not the other way round; the alternative "" means that the
# argument may be missing; the calls may have any order. Does not execute calls.


_IGNORED = re.compile(r"[ ,./\-_*^]")
_FLOATS = ("float", "number", "double")
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("string", "any"), (str,)),
    "integer": (int,),
    "boolean": (bool,),
    **dict.fromkeys(("array", "tuple"), (list, tuple)),
    **dict.fromkeys(("dict", "object"), (dict,)),
}

Alternatives = Mapping[str, Sequence[Any]]  # argument -> acceptable values


def expected_calls(listed: Sequence[Any]) -> list[tuple[str, Alternatives]]:
    """Name and alternatives of each expected call.

    Args:
        listed: BFCL's ground truth (`{NAME: {ARGUMENT: [VALUE, …]}}`), or calls with one value for each argument
            (`{"name": NAME, "arguments": {ARGUMENT: VALUE}}`).
    Raises:
        ValueError: an entry is neither.
    """
    calls: list[tuple[str, Alternatives]] = []
    for entry in listed:
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and "arguments" in entry:
            arguments = entry["arguments"]
            if isinstance(arguments, Mapping):
                calls.append((entry["name"], {name: [_nested(value)] for name, value in arguments.items()}))
                continue
        elif isinstance(entry, Mapping) and len(entry) == 1:
            name, alternatives = next(iter(entry.items()))
            if isinstance(alternatives, Mapping) and all(isinstance(part, list) for part in alternatives.values()):
                calls.append((str(name), alternatives))
                continue
        raise ValueError(
            "an expected call is {NAME: {ARGUMENT: [VALUE, …]}} or {'name': NAME, 'arguments': {…}}, "
            f"got {str(entry)[:200]}"
        )
    return calls


def _nested(value: Any) -> Any:
    """One value in the form of alternatives: those of a mapping are listed by key, in BFCL's format."""
    if isinstance(value, Mapping):
        return {name: [_nested(part)] for name, part in value.items()}
    if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        return [_nested(part) for part in value]
    return value


def matched_calls(
    made: Sequence[Mapping[str, Any]], expected: Sequence[tuple[str, Alternatives]], tools: Mapping[str, Any]
) -> tuple[int, str]:
    """Largest number of calls that match different expected ones, and what is wrong with the first that does not.

    Args:
        made: calls with `name` and `arguments`.
        tools: schemas of the tools by name, as far as they are known.
    """
    wrong = [[mismatch(call, wanted, tools.get(wanted[0])) for wanted in expected] for call in made]
    owner: dict[int, int] = {}  # expected -> made

    def place(call: int, seen: set[int]) -> bool:
        for at, reason in enumerate(wrong[call]):
            if reason is None and at not in seen:
                seen.add(at)
                if at not in owner or place(owner[at], seen):
                    owner[at] = call
                    return True
        return False

    count = sum(place(call, set()) for call in range(len(made)))
    placed = set(owner.values())
    for at, reasons in enumerate(wrong):
        if at not in placed:
            same = [reason for (name, _), reason in zip(expected, reasons, strict=True) if name == made[at].get("name")]
            text = next((reason for reason in same if reason), None)
            return count, text or f"{made[at].get('name')} is not among the expected calls that are left"
    missing = [name for at, (name, _) in enumerate(expected) if at not in owner]
    return count, f"no call of {missing[0]}" if missing else ""


def mismatch(call: Mapping[str, Any], expected: tuple[str, Alternatives], tool: Any) -> str | None:
    """Why a call is not the expected one; None if it is.

    Args:
        tool: schema of the tool; None if it is not known, and then types and required arguments are those of the
            alternatives.
    """
    name, alternatives = expected
    if call.get("name") != name:
        return f"{call.get('name')} is not {name}"
    arguments = call.get("arguments")
    if not isinstance(arguments, Mapping):
        return f"{name} has no arguments"
    parameters = _parameters(tool)
    for argument in parameters.get("required") or ():
        if argument not in arguments:
            return f"{name}: the required argument {argument} is missing"
    for argument, value in arguments.items():
        if argument not in alternatives:
            return f"{name}: unexpected argument {argument}"
        known = (parameters.get("properties") or {}).get(argument)
        if not _accepted(value, alternatives[argument], known if isinstance(known, Mapping) else {}):
            return f"{name}: {argument} is {value!r}, expected one of {list(alternatives[argument])!r}"[:400]
    for argument, values in alternatives.items():
        if argument not in arguments and "" not in values:
            return f"{name}: the argument {argument} is missing"
    return None


def _parameters(tool: Any) -> Mapping[str, Any]:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    parameters = inner.get("parameters") if isinstance(inner, Mapping) else None
    return parameters if isinstance(parameters, Mapping) else {}


def _accepted(value: Any, alternatives: Sequence[Any], schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    present = [option for option in alternatives if option != ""]
    if (
        isinstance(kind, str)
        and not _is_of(value, kind)
        and not any(type(value) is type(option) for option in present[:1])
    ):
        return False
    return any(_equal(value, option) for option in alternatives)


def _is_of(value: Any, kind: str) -> bool:
    if kind in _FLOATS:
        return isinstance(value, int | float) and not isinstance(value, bool)
    kinds = _KINDS.get(kind)
    return kinds is None or (isinstance(value, kinds) and (kind == "boolean" or not isinstance(value, bool)))


def _equal(value: Any, option: Any) -> bool:
    """Whether a value is one alternative; in a mapping, each key has alternatives of its own."""
    if isinstance(value, Mapping) and isinstance(option, Mapping):
        return (
            all(
                key in option and any(_equal(part, one) for one in _as_list(option[key]))
                for key, part in value.items()
            )
            and all(key in value or "" in _as_list(values) for key, values in option.items())
        )  # fmt: skip
    if isinstance(value, list | tuple) and isinstance(option, list | tuple):
        return len(value) == len(option) and all(_equal(a, b) for a, b in zip(value, option, strict=True))
    if isinstance(value, str) and isinstance(option, str):
        return _plain(value) == _plain(option)
    if isinstance(value, bool) or isinstance(option, bool):
        return value is option
    return type(value) in (int, float, type(None)) and bool(value == option)


def _as_list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


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
    if (steps := prediction.get("steps")) is None:
        return None
    return [
        {"name": step.get("tool"), "arguments": step.get("arguments") or {}, "error": step.get("error")}
        for step in (steps if isinstance(steps, list | tuple) else ())
        if isinstance(step, Mapping)
    ]


def calls_of(prediction: Mapping[str, Any], rollout: Rollout | None) -> list[dict[str, Any]]:
    """As `made_calls`. Raises `NoGrade` if they are not known."""
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
    return Grade.of(bool(calls_of(prediction, rollout)), "No tool was called, and the task needs one.")


def abstention_when_not(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if no tool was called, on tasks that need none; does not apply to others."""
    if _needed(task):
        raise NotApplicable("the task needs a tool")
    calls = calls_of(prediction, rollout)
    return Grade.of(not calls, f"{calls[0]['name']} was called, and the task needs no tool." if calls else "")


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
    made = [call for call in calls_of(prediction, rollout) if call["error"] is None]
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
    calls = calls_of(prediction, rollout)
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
    calls = len(calls_of(prediction, rollout))
    needed: Any = budget
    if needed is None:
        listed = task.expected.get("calls", task.metadata.get("tool_calls"))
        needed = len(listed) if isinstance(listed, list | tuple) else listed
    if not isinstance(needed, int) or isinstance(needed, bool) or needed < 0:
        raise NoGrade(f"task {task.id!r} does not say how many calls it needs: set budget, or expected.calls")
    return Grade.beyond(calls, needed, f"{calls} tool calls, the budget is {needed}.")
