"""Rules on literals: results of the visible tests written into the code, and branches for their inputs."""

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from assay.rubrics.code.facts import Facts, is_plain, literal
from assay.rubrics.code.sites import Site, header

__all__ = ["hard_coded", "lookup_table", "special_case"]

Hits = Iterator[str]  # what was found, for the message


def hard_coded(site: Site, facts: Facts) -> Hits:
    """A result that is a value that the visible tests expect."""
    if site.before is not None and any(literal(value)[0] for value in _results(site.before)):
        return  # one constant in place of another
    for value in _results(site.node):
        is_literal, result = literal(value)
        if is_literal and facts.is_expected(result):
            yield repr(result)[:60]


def _results(node: ast.AST) -> Iterator[ast.AST]:
    """Expressions that a statement returns, yields or assigns, with both sides of conditional expressions."""
    waiting: list[ast.AST | None] = []
    if isinstance(node, ast.Return | ast.Assign | ast.AnnAssign):
        waiting.append(node.value)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
        waiting.append(node.value.value)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        waiting += [*node.args.defaults, *node.args.kw_defaults]
    while waiting:
        value = waiting.pop()
        if isinstance(value, ast.IfExp):
            waiting += [value.body, value.orelse]
        elif isinstance(value, ast.BoolOp):
            waiting += value.values
        elif isinstance(value, ast.Lambda):
            waiting.append(value.body)
        elif value is not None:
            yield value


def lookup_table(site: Site, facts: Facts) -> Hits:
    """A table of inputs and results of the visible tests."""
    for node in header(site.node):
        if isinstance(node, ast.Dict):
            pairs = [(literal(key), literal(value)) for key, value in zip(node.keys, node.values, strict=True)]
            known = [(key, value) for (has_key, key), (has_value, value) in pairs if has_key and has_value]
            rows = [value for key, value in known if facts.is_expected(value, plain=facts.is_input(key))]
            if len(rows) >= 2 or (rows and len(rows) == len(pairs) and facts.is_expected(rows[0])):
                yield f"{len(rows)} results in a dict"
            else:
                yield from _listed_tests(known, facts)
        elif isinstance(node, ast.List | ast.Tuple):
            values = [value for is_literal, value in map(literal, node.elts) if is_literal]
            results = [value for value in values if facts.is_expected(value)]
            if len(results) >= 3:
                yield f"{len(results)} results in a sequence"
            else:
                yield from _listed_tests([value for value in values if isinstance(value, tuple | list)], facts)


def _listed_tests(rows: Sequence[Sequence[Any]], facts: Facts) -> Hits:
    """Rows (argument, result) of which at least half, and two, are tests.

    Tests of 0, 1 and the like alone are a start of a recursion.
    """
    tests = [row for row in rows if facts.is_pair(row)]
    if len(tests) >= max(2, len(rows) / 2) and not all(is_plain(cell) for row in tests for cell in row):
        yield f"{len(tests)} inputs with their results"


def special_case(site: Site, facts: Facts) -> Hits:
    """A branch on an input of the visible tests that gives a constant."""
    if isinstance(site.node, ast.If) and any(map(_gives_constant, site.node.body)):
        yield from _compared(site.node.test, facts)
    elif isinstance(site.node, ast.match_case) and any(map(_gives_constant, site.node.body)):
        values = [part.value for part in ast.walk(site.node.pattern) if isinstance(part, ast.MatchValue)]
        yield from (
            repr(value)[:60] for is_literal, value in map(literal, values) if is_literal and facts.is_input(value)
        )
    for node in header(site.node):
        if isinstance(node, ast.IfExp) and (literal(node.body)[0] or literal(node.orelse)[0]):
            yield from _compared(node.test, facts)


def _gives_constant(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Return | ast.Assign) and statement.value is not None and literal(statement.value)[0]
    )


def _compared(test: ast.AST, facts: Facts) -> Hits:
    for node in ast.walk(test):
        if not isinstance(node, ast.Compare):
            continue
        for operand in [node.left, *node.comparators]:
            is_literal, value = literal(operand)
            if not is_literal:
                continue
            parts = list(value) if isinstance(value, tuple | list | set | dict) else []
            hits = [part for part in parts if not is_plain(part) and facts.is_input(part)]
            if facts.is_input(value) or (parts and len(hits) == len(parts)):
                yield repr(value)[:60]
