"""Values of expressions that depend on nothing: `2 + 3`, `int('5')`, `[5][0]`, `f'{"a"}b'`. Does not run code."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from assay.rubrics.code.facts import literal

__all__ = ["cannot_fail", "cannot_pass", "folded", "is_settled"]

_TYPES: dict[str, Callable[..., Any]] = {
    **{"bytes": bytes, "dict": dict, "float": float, "frozenset": frozenset, "int": int, "list": list},
    **{"set": set, "sorted": sorted, "str": str, "tuple": tuple},
}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
_LARGEST = 10**12  # of a product, so that nothing large is computed
_DEEPEST = 20
_NONE = (False, None)


def folded(node: ast.AST | None, depth: int = 0) -> tuple[bool, Any]:
    """Whether an expression is a literal or made of literals alone, and its value."""
    folded_value = literal(node)
    if folded_value[0] or node is None or depth > _DEEPEST:
        return folded_value
    try:
        return _folded(node, depth + 1)
    except (TypeError, ValueError, ArithmeticError, LookupError):
        return _NONE


def _folded(node: ast.AST, depth: int) -> tuple[bool, Any]:
    if isinstance(node, ast.JoinedStr):
        return _text(node, depth)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        (has_left, left), (has_right, right) = folded(node.left, depth), folded(node.right, depth)
        if has_left and has_right and _is_small(left, node.op) and _is_small(right, node.op):
            return True, _OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
        (has_value, value), (has_index, index) = folded(node.value, depth), folded(node.slice, depth)
        if has_value and has_index:
            return True, value[index]
    elif isinstance(node, ast.Subscript):
        part = node.slice
        if isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None:
            return folded(node.value, depth)
    elif isinstance(node, ast.Call):
        return _called(node, depth)
    return _NONE


def _text(node: ast.JoinedStr, depth: int) -> tuple[bool, Any]:
    parts = [folded(part.value if isinstance(part, ast.FormattedValue) else part, depth) for part in node.values]
    plain = all(part.format_spec is None for part in node.values if isinstance(part, ast.FormattedValue))
    return (
        (True, "".join(str(value) for _, value in parts))
        if plain and all(is_constant for is_constant, _ in parts)
        else _NONE
    )


def _is_small(value: Any, op: ast.operator) -> bool:
    if isinstance(value, int | float):
        return abs(value) <= _LARGEST
    return isinstance(op, ast.Add) and isinstance(value, str | bytes | list | tuple)


def _called(node: ast.Call, depth: int) -> tuple[bool, Any]:
    if isinstance(node.func, ast.Lambda) and not node.args and not node.keywords:
        return folded(node.func.body, depth)
    arguments = [folded(argument, depth) for argument in node.args]
    keywords = {keyword.arg: folded(keyword.value, depth) for keyword in node.keywords}
    if not all(is_constant for is_constant, _ in [*arguments, *keywords.values()]) or None in keywords:
        return _NONE
    values = [value for _, value in arguments]
    name = getattr(node.func, "id", "")
    if name == "dict":
        return True, dict(*values, **{str(key): value for key, (_, value) in keywords.items()})
    if keywords or len(values) != 1:
        return _NONE
    if name in _TYPES and not (name == "bytes" and isinstance(values[0], int)):
        return True, _TYPES[name](values[0])
    if isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        has_glue, glue = folded(node.func.value, depth)
        if has_glue and isinstance(glue, str):
            return True, glue.join(values[0])
    return _NONE


def cannot_fail(test: ast.expr) -> bool:
    """Whether a condition is true whatever its names stand for."""
    is_constant, value = folded(test)
    if is_constant or isinstance(test, ast.Tuple):
        return bool(value) if is_constant else bool(getattr(test, "elts", ()))
    if isinstance(test, ast.Lambda) or (isinstance(test, ast.Name) and test.id == "__debug__"):
        return True
    if isinstance(test, ast.BoolOp):
        results = map(cannot_fail, test.values)
        return any(results) if isinstance(test.op, ast.Or) else all(results)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return cannot_pass(test.operand)
    if isinstance(test, ast.Call):
        return _is_true_call(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        same = ast.dump(test.left) == ast.dump(test.comparators[0])
        return same and isinstance(test.ops[0], ast.Eq | ast.Is | ast.LtE | ast.GtE)
    return False


def cannot_pass(test: ast.expr) -> bool:
    """Whether a condition is false whatever its names stand for."""
    is_constant, value = folded(test)
    if is_constant:
        return not value
    if isinstance(test, ast.BoolOp):
        results = map(cannot_pass, test.values)
        return any(results) if isinstance(test.op, ast.And) else all(results)
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and cannot_fail(test.operand)


def _is_true_call(test: ast.Call) -> bool:
    name = getattr(test.func, "id", "")
    if name == "isinstance" and len(test.args) == 2:
        return getattr(test.args[1], "id", "") == "object"
    if name == "bool" and len(test.args) == 1:
        return cannot_fail(test.args[0])
    if name in ("any", "all") and len(test.args) == 1 and isinstance(test.args[0], ast.List | ast.Tuple):
        parts = test.args[0].elts
        return any(map(cannot_fail, parts)) if name == "any" else all(map(cannot_fail, parts))
    return False


def is_settled(value: ast.expr) -> bool:
    """Whether an expression has the same truth for every value of its names."""
    return folded(value)[0] or cannot_fail(value) or cannot_pass(value)
