"""Compares tool calls with expected ones: names, required arguments, and alternatives for each value.

The rules are those of the Berkeley Function Calling Leaderboard's AST check for Python: text is compared without case,
spaces and `,./-_*^`; an integer is a float, but not the other way round; the alternative "" means that the argument may
be missing; the calls may have any order. Does not execute calls.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["expected_calls", "matched_calls", "mismatch"]

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
