"""Values in visible tests: what the tests pass to functions and what they expect."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import RubricError

__all__ = ["Facts", "is_plain", "literal", "read_facts"]

_SMALL = 2  # integers up to this size occur in any code


@dataclass(frozen=True)
class Facts:
    """Values of visible tests, each as (type, repr)."""

    inputs: frozenset[tuple[str, str]] = frozenset()
    expected: frozenset[tuple[str, str]] = frozenset()

    def is_input(self, value: Any) -> bool:
        return not is_plain(value) and _key(value) in self.inputs

    def is_expected(self, value: Any, *, plain: bool = False) -> bool:
        """Whether the tests expect this value. Values as common as 0 and True count only with `plain`."""
        return (plain or not is_plain(value)) and _key(value) in self.expected


def literal(node: ast.AST | None) -> tuple[bool, Any]:
    """Whether an expression is a literal, and its value."""
    if not isinstance(node, ast.Constant | ast.UnaryOp | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.BinOp):
        return False, None
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return False, None


def is_plain(value: Any) -> bool:
    """Whether a value is so common that finding it in code means nothing."""
    if value is None or value is ... or isinstance(value, bool):
        return True
    if isinstance(value, int | float | complex):
        return abs(value) <= _SMALL and value == int(value.real)
    if isinstance(value, str | bytes):
        return len(value) < 2
    return len(value) <= 1 and all(map(is_plain, value))


def read_facts(visible_tests: str | Sequence[Any]) -> Facts:
    """Reads the literals of tests.

    Args:
        visible_tests: Python source, or a list of sources or cases: `[expression, expected]`, or mappings with
            `expression` and `expected`.
    Raises:
        RubricError: not valid Python, or another form.
    """
    inputs, expected = set[tuple[str, str]](), set[tuple[str, str]]()
    for text in [visible_tests] if isinstance(visible_tests, str) else map(_source, visible_tests):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise RubricError(f"visible_tests cannot be read: {error}. Pass Python source with asserts") from None
        for node in ast.walk(tree):
            _read(node, inputs, expected)
    return Facts(frozenset(inputs), frozenset(expected))


def _source(test: Any) -> str:
    if isinstance(test, Mapping) and "expression" in test:
        test = [test["expression"], test.get("expected") or "None"]
    if isinstance(test, list | tuple) and len(test) == 2:
        return f"{test[0]} == {test[1]}"
    if not isinstance(test, str):
        raise RubricError(f"visible_tests: {test!r} must be Python source or a case [expression, expected]")
    return test


def _read(node: ast.AST, inputs: set[tuple[str, str]], expected: set[tuple[str, str]]) -> None:
    if isinstance(node, ast.Compare):
        expected.update(_keys([node.left, *node.comparators]))
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name.startswith("assert") or name == "approx":
            expected.update(_keys(node.args))
            return
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        inputs.update(_keys(values))
        known = [literal(value) for value in node.args]
        if len(known) > 1 and all(found for found, _ in known):
            inputs.add(_key(tuple(value for _, value in known)))
    elif isinstance(
        node, ast.List | ast.Tuple | ast.Dict
    ):  # tables of cases: (argument, expected) or argument: expected
        rows = (
            zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else (_cells(e) for e in node.elts)
        )
        for row in rows:
            cells = [cell for cell in row if cell is not None]
            if len(cells) > 1:
                inputs.update(_keys(cells[:-1]))
                expected.update(_keys(cells[-1:]))


def _cells(node: ast.AST) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else []


def _keys(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        found, value = literal(node)
        if found:
            yield _key(value)
            yield "str", repr(repr(value))  # compared as text: `repr(x) == "[1, 2]"`


def _key(value: Any) -> tuple[str, str]:
    try:
        return type(value).__name__, repr(value)
    except ValueError:  # an integer too long for decimal notation
        return type(value).__name__, hex(value) if isinstance(value, int) else ""
