"""Encodes values of untrusted code as JSON data, and compares them without calling their methods.

`ast.literal_eval` of a `repr` would do for honest code. A hostile text can exhaust the parser's stack, and a hostile
set can be built so that its hashes collide: data that is compared as data can do neither. Imports the standard library
alone, as the scripts inside of the sandbox import this file.
"""

import json
from collections.abc import Callable
from typing import Any

_MOST_DIGITS = 4000  # of an integer in decimal; longer ones are written in hexadecimal
_DEEPEST = 100  # levels of nested values
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class NotPlain(ValueError):
    """A value that is not built of None, bool, numbers, text, bytes, ranges and containers of these."""


def encode(value: Any, keep: Callable[[Any], int] | None = None, depth: int = 0) -> Any:
    """A value as JSON data that names the types of containers. Instances of subclasses count as their plain base.

    Args:
        keep: stores an object that is not plain and returns its number.
    Raises:
        NotPlain: there is no `keep` for such an object, or it is nested too deep.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if depth > _DEEPEST:
        raise NotPlain(f"values are nested more than {_DEEPEST} levels deep")
    if issubclass(kind, int):
        number = int.__index__(value)
        return number if abs(number) < 10**_MOST_DIGITS else {"t": "int", "v": hex(number)}
    for base, convert in ((float, float.__float__), (str, str.__str__)):
        if issubclass(kind, base):
            return convert(value)
    if issubclass(kind, complex):
        return {"t": "complex", "v": [value.real, value.imag]}
    if issubclass(kind, bytes | bytearray):
        return {"t": "bytes", "v": bytes(value).hex()}
    if kind is range:
        return {"t": "range", "v": [value.start, value.stop, value.step]}
    if issubclass(kind, dict):
        items = [[encode(part, keep, depth + 1) for part in item] for item in dict.items(value)]
        return {"t": "dict", "v": items}
    for name, container in _CONTAINERS.items():
        if issubclass(kind, container):
            return {"t": name, "v": [encode(part, keep, depth + 1) for part in container.__iter__(value)]}
    if keep is None:
        raise NotPlain(f"an object of the type {kind.__name__!r} is not a plain value")
    return {"t": "object", "v": keep(value), "name": str(kind.__name__)[:100]}


def decode(data: Any, known: Callable[[int, str], Any]) -> Any:
    """The value of `encode`'s data. `known` gives the object of a number.

    Only for use inside of a sandbox: keys of hostile sets and dicts may be chosen so that they collide.
    """
    if not isinstance(data, dict):
        return data
    kind, content = data["t"], data["v"]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]([decode(part, known) for part in content])
    if kind == "dict":
        return {decode(key, known): decode(part, known) for key, part in content}
    if kind == "object":
        return known(content, data["name"])
    makers: dict[str, Callable[[Any], Any]] = {
        **{"int": lambda text: int(text, 16), "bytes": bytes.fromhex},
        **{"complex": lambda parts: complex(*parts), "range": lambda parts: range(*parts)},
    }
    return makers[kind](content)


def same(actual: Any, expected: Any) -> bool:
    """Whether two encoded values are equal as Python values. NaN equals NaN. Uses no method of either value."""
    return _canonical(actual) == _canonical(expected)


def _canonical(data: Any) -> Any:
    """Encoded data in which equal values are equal: True as 1, 1.0 as 1, and sets and dicts in one order."""
    if isinstance(data, bool):
        return int(data)
    if isinstance(data, float):
        return "nan" if data != data else int(data) if data.is_integer() else data
    if isinstance(data, str):
        return ["str", data]
    if not isinstance(data, dict):
        return data
    kind, content = data["t"], data["v"]
    if kind == "range":
        numbers = range(*content)
        return [kind, *([numbers[0], numbers[-1], numbers[0] != numbers[-1] and content[2]] if numbers else [])]
    if kind == "complex":
        real, imaginary = map(_canonical, content)
        return real if imaginary == 0 else [kind, real, imaginary]
    if kind not in (*_CONTAINERS, "dict"):
        return [kind, content]
    if kind == "dict":
        return [kind, sorted(([_canonical(key), _canonical(part)] for key, part in content), key=json.dumps)]
    parts = [_canonical(part) for part in content]
    return ["set", sorted(parts, key=json.dumps)] if kind in ("set", "frozenset") else [kind, parts]


def show(data: Any, most: int = 300) -> str:
    """Encoded data as Python would write it, cut to a number of characters."""
    text = _written(data)
    return text if len(text) <= most else f"{text[:most]}…"


def _written(data: Any) -> str:
    if not isinstance(data, dict):
        return repr(data)
    kind, content = data["t"], data["v"]
    if kind == "dict":
        return "{" + ", ".join(f"{_written(key)}: {_written(part)}" for key, part in content) + "}"
    if kind in _CONTAINERS:
        inner = ", ".join(map(_written, content))
        forms = {"list": f"[{inner}]", "tuple": f"({inner}{',' if len(content) == 1 else ''})"}
        return forms.get(kind) or (f"{kind}({{{inner}}})" if kind == "frozenset" or not content else f"{{{inner}}}")
    if kind == "object":
        return f"<{data['name']} object>"
    return repr(bytes.fromhex(content)) if kind == "bytes" else f"{kind}({content})"
