"""Finds constructor arguments in a manifest that would import modules (types of a signature) or name an address.

Reads text only; does not import or build anything.
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

from assay.models.roles import address_in

# Arguments of model clients that set the address of the model.
_PLACE = re.compile(r"(?:.*_)?(?:api_base|base_url|endpoint|region|region_name|location|host|proxy)", re.IGNORECASE)

_BUILTINS = {
    "int",
    "str",
    "float",
    "bool",
    "list",
    "tuple",
    "dict",
    "set",
    "frozenset",
    "complex",
    "bytes",
    "bytearray",
    "NoneType",
}
_SHOWN = 60  # characters of fields in a message
_MOST_FIELDS = 20_000  # characters of one side of a signature

# Imported here, so that a file of the same name cannot replace them.
_HARMLESS = {"typing": typing, "datetime": datetime, "decimal": decimal, "uuid": uuid}


def has_address(model: Any) -> bool:
    """Whether a model's name contains the address of a server, to which some providers' clients send prompts, or the
    path of a model's file.
    """
    return address_in(model) is not None or (isinstance(model, str) and model.lower().startswith("embedded:"))


def places_in(config: Any) -> list[str]:
    """Destinations of prompts or keys in constructor arguments: addresses, and settings that reach model clients."""
    return [
        value if isinstance(value, str) else f"{key}={value!r}"
        for key, value in _values(config)
        if _PLACE.fullmatch(key) or _is_address(value) or (key == "model" and has_address(value))
    ]


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w+://\S+", value) is not None


def imported_types(config: Any) -> list[str]:
    """Types of signatures in constructor arguments (`q: module.Name -> a`) for which DSPy would import a module."""
    sides = [
        side for _, value in _values(config) if isinstance(value, str) and "->" in value for side in value.split("->")
    ]
    return [name for side in sides for name in _imported(side)]


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    """Every nested value with its key."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(inner), item) for inner, item in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(key, item) for item in value]
        else:
            yield key, value


def _imported(fields: str) -> list[str]:
    """The types of one side of a signature that are imported or evaluated; empty if DSPy cannot parse it either."""
    if len(fields) > _MOST_FIELDS:
        return [f"{fields[:_SHOWN]}…"]
    try:
        return _types_of(ast.parse(f"def f({fields}): pass"))  # as DSPy reads it
    except (SyntaxError, ValueError):
        return []
    except (RecursionError, MemoryError):
        return [f"{fields[:_SHOWN]}…"]


def _types_of(tree: ast.AST) -> list[str]:
    types: list[str] = []
    waiting = [
        (node.annotation, False) for node in ast.walk(tree) if isinstance(node, ast.arg) and node.annotation is not None
    ]
    while waiting:
        node, chosen = waiting.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            types += [] if _known(ast.unparse(node)) else [ast.unparse(node)]
        elif isinstance(node, ast.Subscript):
            inside = ast.unparse(node.value) in ("Literal", "typing.Literal")
            waiting += [(node.value, False), (node.slice, inside)]
        elif isinstance(node, ast.BinOp | ast.Tuple | ast.List):
            within = chosen and isinstance(node, ast.Tuple)
            waiting += [(part, within) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        elif not isinstance(node, ast.Constant) or (isinstance(node.value, str) and not chosen):
            # Field(…), forms that DSPy does not read, and a type in quotes, which pydantic evaluates as code
            types.append(ast.unparse(node))
    return types


def _known(name: str) -> bool:
    """Whether a type is one of Python's own, of `typing` or of DSPy."""
    first, *rest = name.split(".")
    if not rest:
        return name in _BUILTINS or name in typing.__all__
    if any(not part.isidentifier() or part.startswith("_") for part in rest):
        return False
    if first in _HARMLESS:
        return (
            rest[0] in typing.__all__
            if first == "typing"
            else isinstance(getattr(_HARMLESS[first], rest[0], None), type) and len(rest) == 1
        )
    target = functools.reduce(lambda holder, part: getattr(holder, part, None), rest, dspy) if first == "dspy" else None
    return isinstance(target, type) and target.__module__.partition(".")[0] == "dspy"
