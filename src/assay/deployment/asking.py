"""What the arguments in a manifest would do where a program is built from them: import modules by the types of a signature, or send prompts to an
address. Reads texts alone; nothing is imported or built.
"""

import ast
import datetime
import decimal
import functools
import re
import typing
import uuid
from collections.abc import Iterator
from typing import Any

import dspy

__all__ = ["has_address", "imported_types", "model_addresses"]

_BUILTINS = {"int", "str", "float", "bool", "list", "tuple", "dict", "set", "frozenset", "complex", "bytes", "bytearray", "NoneType"}
_HARMLESS = {"typing": typing, "datetime": datetime, "decimal": decimal, "uuid": uuid}  # loaded, so that no file of the same name takes their place


def has_address(model: Any) -> bool:
    """Whether a model's name holds the address of a server, to which some providers' clients send what they are asked."""
    return isinstance(model, str) and re.search(r"://|\bhttps?:", model, re.IGNORECASE) is not None


def model_addresses(config: Any) -> list[str]:
    """Names of models in constructor arguments that hold an address."""
    return [value for key, value in _values(config) if key == "model" and has_address(value)]


def imported_types(config: Any) -> list[str]:
    """Types of signatures in constructor arguments (`q: module.Name -> a`) for which DSPy would import a module, other than its own."""
    sides = [side for _, value in _values(config) if isinstance(value, str) and "->" in value for side in value.split("->")]
    return [name for side in sides for name in _imported(side)]


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    """Every value with the key it stands under, however deep."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(inner), one) for inner, one in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(key, one) for one in value]
        else:
            yield key, value


def _imported(fields: str) -> list[str]:
    """The types of one side of a signature that are imported; none where DSPy cannot read it either."""
    try:
        tree = ast.parse(f"def f({fields}): pass")  # as DSPy reads it
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found, waiting = [], [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg) and node.annotation is not None]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            found += [] if _known(ast.unparse(node)) else [ast.unparse(node)]
        elif isinstance(node, ast.Subscript | ast.BinOp | ast.Tuple | ast.List):
            waiting += [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        elif not isinstance(node, ast.Constant):
            found.append(ast.unparse(node))  # Field(…), and what DSPy does not read
    return found


def _known(name: str) -> bool:
    """Whether a type is one of Python's own, of `typing` or of DSPy."""
    first, *rest = name.split(".")
    if not rest:
        return name in _BUILTINS or name in typing.__all__
    if any(not part.isidentifier() or part.startswith("_") for part in rest):
        return False
    if first in _HARMLESS:
        return rest[0] in typing.__all__ if first == "typing" else isinstance(getattr(_HARMLESS[first], rest[0], None), type) and len(rest) == 1
    found = functools.reduce(lambda holder, part: getattr(holder, part, None), rest, dspy) if first == "dspy" else None
    return isinstance(found, type) and found.__module__.partition(".")[0] == "dspy"
