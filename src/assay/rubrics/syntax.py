"""Syntax tests for tool arguments: whether a text is well formed in a language, without running it."""

import ast
import json
import re
from collections.abc import Callable

_ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.Constant,
    ast.operator,
    ast.unaryop,
    ast.Call,
    ast.Name,
    ast.Load,
)
_SQL = re.compile(r"\s*(select|with|insert|update|delete|create|drop|alter|pragma|explain|values)\b", re.IGNORECASE)


def _arithmetic(text: str) -> bool:
    expression = text.split("=")[0].replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**").strip()
    try:
        nodes = list(ast.walk(ast.parse(expression, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _ARITHMETIC) for node in nodes) and any(
        isinstance(node, ast.Constant) for node in nodes
    )


def _python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _sql(text: str) -> bool:
    """Starts with a statement keyword, and quotes and parentheses are balanced."""
    unquoted = re.sub(r"'(?:[^']|'')*'|\"[^\"]*\"", "", text)
    balanced = unquoted.count("(") == unquoted.count(")") and not re.search(r"['\"]", unquoted)
    return bool(_SQL.match(text)) and balanced


SYNTAX: dict[str, Callable[[str], bool]] = {"arithmetic": _arithmetic, "json": _json, "python": _python, "sql": _sql}
