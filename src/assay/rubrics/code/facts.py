"""Values in visible tests: what the tests pass to functions and what they expect."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import RubricError

__all__ = ["Facts", "is_plain", "literal", "read_facts"]

_SMALL = 2  # integers up to this size occur in any code
_Key = tuple[str, str]


@dataclass(frozen=True)
class Facts:
    """Values of visible tests, each as (type, repr).

    Args:
        pairs: (input, expected) of one assertion or row of a table; several arguments are a tuple.
    """

    inputs: frozenset[_Key] = frozenset()
    expected: frozenset[_Key] = frozenset()
    pairs: frozenset[tuple[_Key, _Key]] = frozenset()

    def is_input(self, value: Any) -> bool:
        return not is_plain(value) and _key(value) in self.inputs

    def names_input(self, value: Any) -> bool:
        """Whether a key of a table stands for an input, also as its text: `"(2, 3)"`."""
        texts = {text for _, text in self.inputs if len(text) > _SMALL} if isinstance(value, str) else ()
        return self.is_input(value) or value in texts

    def is_expected(self, value: Any, *, plain: bool = False) -> bool:
        """Whether the tests expect this value. Values as common as 0 and True count only with `plain`."""
        return (plain or not is_plain(value)) and _key(value) in self.expected

    def is_pair(self, cells: Sequence[Any]) -> bool:
        """Whether these are the arguments of one test, followed by what it expects."""
        return len(cells) > 1 and (_key_of_all(cells[:-1]), _key(cells[-1])) in self.pairs


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
    if not isinstance(visible_tests, str | list | tuple):
        raise RubricError(
            f"visible_tests={visible_tests!r} must be Python source with asserts, or a list of cases "
            "[expression, expected]"
        )
    inputs, expected, pairs = set[_Key](), set[_Key](), set[tuple[_Key, _Key]]()
    for text in [visible_tests] if isinstance(visible_tests, str) else map(_source, visible_tests):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise RubricError(f"visible_tests cannot be read: {error}. Pass Python source with asserts") from None
        for node in ast.walk(tree):
            _read(node, inputs, expected)
            pairs.update(_pairs(node))
    return Facts(frozenset(inputs), frozenset(expected), frozenset(pairs))


def _source(test: Any) -> str:
    if isinstance(test, Mapping) and "expression" in test:
        test = [test["expression"], test.get("expected") or "None"]
    if isinstance(test, list | tuple) and len(test) == 2:
        return f"{test[0]} == {test[1]}"
    if not isinstance(test, str):
        raise RubricError(f"visible_tests: {test!r} must be Python source or a case [expression, expected]")
    return test


def _read(node: ast.AST, inputs: set[_Key], expected: set[_Key]) -> None:
    if isinstance(node, ast.Compare):
        expected.update(_keys([node.left, *node.comparators]))
    elif isinstance(node, ast.Assert):
        expected.update(_keys([ast.Constant(value) for value in _truth(node.test)]))
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name.startswith("assert") or name == "approx":
            expected.update(_keys(node.args))
            return
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        inputs.update(_keys(values))
        known = [literal(value) for value in node.args]
        if len(known) > 1 and all(is_literal for is_literal, _ in known):
            inputs.add(_key(tuple(value for _, value in known)))
    for cells in _rows(node):
        inputs.update(_keys(cells[:-1]))
        expected.update(_keys(cells[-1:]))


def _truth(test: ast.expr) -> Iterator[bool]:
    """`assert f(x)` expects True, `assert not f(x)` False."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from (not value for value in _truth(test.operand))
    elif isinstance(test, ast.Call):
        yield True


def _rows(node: ast.AST) -> Iterator[Sequence[ast.expr]]:
    """Rows of a table of cases: (argument, expected) or argument: expected."""
    if isinstance(node, ast.Dict):
        rows = zip(node.keys, node.values, strict=True)
        yield from ([key, value] for key, value in rows if key is not None)
    elif isinstance(node, ast.List | ast.Tuple):
        yield from (row.elts for row in node.elts if isinstance(row, ast.Tuple) and len(row.elts) > 1)


def _pairs(node: ast.AST) -> Iterator[tuple[_Key, _Key]]:
    """What one assertion or each row of a table calls a function with, and what it expects."""
    sides: list[ast.expr] = []
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.Is):
        sides = [node.left, node.comparators[0]]
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        sides = node.args[:2]  # assertEqual(f(1), 2)
    for call, result in (sides, sides[::-1]) if sides else ():
        if isinstance(call, ast.Call):
            arguments = [literal(value) for value in [*call.args, *(keyword.value for keyword in call.keywords)]]
            is_literal, value = literal(result)
            if is_literal and arguments and all(known for known, _ in arguments):
                yield _key_of_all([argument for _, argument in arguments]), _key(value)
    for row in _rows(node):
        cells = [literal(cell) for cell in row]
        if all(is_literal for is_literal, _ in cells):
            yield _key_of_all([value for _, value in cells[:-1]]), _key(cells[-1][1])


def _keys(nodes: Sequence[ast.AST]) -> Iterator[_Key]:
    for node in nodes:
        is_literal, value = literal(node)
        if is_literal:
            yield _key(value)
            yield "str", repr(repr(value))  # compared as text: `repr(x) == "[1, 2]"`


def _key_of_all(values: Sequence[Any]) -> _Key:
    """The key of one value, or of several as a tuple."""
    return _key(values[0] if len(values) == 1 else tuple(values))


def _key(value: Any) -> _Key:
    try:
        return type(value).__name__, repr(value)
    except ValueError:  # an integer too long for decimal notation
        return type(value).__name__, hex(value) if isinstance(value, int) else ""
