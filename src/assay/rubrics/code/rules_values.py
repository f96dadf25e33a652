"""Rules on literals: results of the visible tests written into the code, and branches for their inputs.

Constants of ordinary code are no finding: labels and bounds behind a condition that names no input of the tests,
constants that are not returned, and tables of which the tests cover only a part.
"""

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from assay.rubrics.code.difference import FUNCTIONS, arguments_of
from assay.rubrics.code.facts import Facts, is_plain, literal
from assay.rubrics.code.folding import folded
from assay.rubrics.code.sites import Site, header

__all__ = ["hard_coded", "lookup_table", "special_case"]

Result = tuple[ast.AST, tuple[ast.AST, ...]]  # an expression, and the conditions inside the statement that lead to it
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def hard_coded(site: Site, facts: Facts) -> Iterator[str]:
    """A result that is a value that the visible tests expect."""
    alone = _is_whole_function(site)
    replaced = site.before is not None and _given_to(site.before) == _given_to(site.node)
    old = [value for value, _ in _results(site.before)] if replaced and site.before is not None else []
    constants = [value for is_literal, value in map(literal, old) if is_literal]
    if constants and not (alone and all(map(is_plain, constants))):
        return  # one constant in place of another
    outer = tuple(_conditions(site))
    for value, inner in _results(site.node):
        if _is_kept(site, value):
            continue
        is_literal, result = folded(value)
        if not is_literal:
            continue
        guards = (*outer, *inner)
        if _is_expected(result, facts) and not _is_ordinary(result, guards, facts):
            yield repr(result)[:60]
        elif alone and not guards and not constants and facts.is_expected(result, plain=True):
            yield f"{result!r} for every input"[:60]


def _given_to(node: ast.AST) -> list[str]:
    """What a statement gives values to; nothing for one that returns or yields them."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [ast.dump(target) for target in targets if target is not None]


def _is_expected(result: Any, facts: Facts) -> bool:
    """Also of the other numeric type: 51.0 passes a test for 51."""
    if facts.is_expected(result):
        return True
    if isinstance(result, float) and result.is_integer():
        return facts.is_expected(int(result))
    return type(result) is int and abs(result) < 2**53 and facts.is_expected(float(result))


def _is_whole_function(site: Site) -> bool:
    """Whether a statement is all that a function with parameters does."""
    function = site.code.function(site.node)
    if function is None or site.node is function:
        return False
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    names = {argument.arg for argument in arguments_of(function.args)} - {"self", "cls"}
    return body == [site.node] and bool(names)


def _results(node: ast.AST) -> Iterator[Result]:
    """Expressions that a statement returns, yields or assigns, with both sides of conditional expressions."""
    waiting: list[tuple[ast.AST | None, tuple[ast.AST, ...]]] = []
    if isinstance(node, ast.Return | ast.Assign | ast.AnnAssign):
        waiting.append((node.value, ()))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
        waiting.append((node.value.value, ()))
    elif isinstance(node, FUNCTIONS):
        waiting += [(default, ()) for default in [*node.args.defaults, *node.args.kw_defaults]]
    while waiting:
        value, guards = waiting.pop()
        if isinstance(value, ast.IfExp):
            waiting += [(part, (*guards, value.test)) for part in (value.body, value.orelse)]
        elif isinstance(value, ast.BoolOp):
            waiting += [(part, (*guards, *value.values[:at])) for at, part in enumerate(value.values)]
        elif isinstance(value, ast.Lambda):
            waiting.append((value.body, guards))
        elif value is not None:
            yield value, guards


def _is_kept(site: Site, value: ast.AST) -> bool:
    """Whether a value is given to a name that no function returns as it is: a factor, a bound, the start of a sum."""
    node = site.node
    targets: list[ast.AST] = []
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets += node.targets if isinstance(node, ast.Assign) else [node.target]
    elif isinstance(node, FUNCTIONS):
        positional = [*node.args.posonlyargs, *node.args.args]
        pairs = [
            *zip(reversed(positional), reversed(node.args.defaults), strict=False),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        return not any(default is value and argument.arg in site.code.returned for argument, default in pairs)
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    constant = not isinstance(getattr(node, "value", None), ast.Lambda)
    if not constant or not names or len(names) != len(targets):
        return False
    return not site.code.returned & set(names) or bool(site.code.augmented & set(names))


def _conditions(site: Site) -> Iterator[ast.AST]:
    """What decides whether a statement runs, inside of its function; also `if …: return` before it."""
    inside = site.node
    for outer in site.code.enclosing(site.node):
        yield from (node.test for node in _before(inside, outer) if isinstance(node, ast.If) and _leaves(node))
        inside = outer
        if isinstance(outer, FUNCTIONS):
            return
        if isinstance(outer, ast.If | ast.While):
            yield outer.test
        elif isinstance(outer, ast.match_case):
            yield outer.pattern


def _before(node: ast.AST, outer: ast.AST) -> list[ast.stmt]:
    """Statements before one in its block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(outer, name, None)
        if isinstance(block, list) and node in block:
            return block[: block.index(node)]
    return []


def _leaves(node: ast.If) -> bool:
    return isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _is_ordinary(result: Any, guards: Sequence[ast.AST], facts: Facts) -> bool:
    """Whether a constant is a label or a bound: its conditions name no input of the tests."""
    if not guards or any(_names_input(guard, facts) for guard in guards):
        return False
    return isinstance(result, str) or any(
        literal(bound) == (True, result) for guard in guards for bound in _bounds(guard)
    )


def _names_input(guard: ast.AST, facts: Facts) -> bool:
    if any(_compared(guard, facts)):
        return True
    calls = [node for node in ast.walk(guard) if isinstance(node, ast.Call)]
    values = [argument for call in calls for argument in call.args]
    values += [node.value for node in ast.walk(guard) if isinstance(node, ast.MatchValue)]
    return any(is_literal and facts.is_input(value) for is_literal, value in map(literal, values))


def _bounds(guard: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(guard):
        if isinstance(node, ast.Compare) and all(isinstance(op, _ORDER) for op in node.ops):
            yield from [node.left, *node.comparators]


def lookup_table(site: Site, facts: Facts) -> Iterator[str]:
    """A table of inputs and results of the visible tests."""
    for node in header(site.node):
        if isinstance(node, ast.Dict) and not _is_expected(folded(node)[1], facts):  # not a result as a whole
            yield from _dict_of_results(site, node, facts)
        elif isinstance(node, ast.List | ast.Tuple):
            values = [value for is_literal, value in map(literal, node.elts) if is_literal]
            results = {repr(value) for value in values if facts.is_expected(value)}
            least = 2 if isinstance(site.code.parents.get(id(node)), ast.Subscript) else 3
            if len(results) >= max(least, len(node.elts) / 2):
                yield f"{len(results)} results in a sequence"
            else:
                yield from _listed_tests([value for value in values if isinstance(value, tuple | list)], facts)


def _dict_of_results(site: Site, node: ast.Dict, facts: Facts) -> Iterator[str]:
    """Rows that the table had before do not count; of more than one row most must be tests."""
    had = {row for inner in (header(site.before) if site.before else ()) for row in _rows(inner)}
    rows = [row for row in _rows(node) if row not in had]
    known = [(literal(key)[1], literal(value)[1]) for key, value in zip(node.keys, node.values, strict=True) if key]
    known = [pair for pair in known if _row(*pair) in rows]
    tests = [value for key, value in known if facts.names_input(key) and facts.is_expected(value, plain=True)]
    results = [value for _, value in known if facts.is_expected(value)]
    whole = results if len(results) == len(node.values) and len(set(map(repr, results))) > len(results) / 2 else []
    count = len(tests) if len(tests) >= 2 and len(tests) > len(rows) / 2 else len(whole)
    if count:
        yield f"{count} results in a dict"
    else:
        yield from _listed_tests(known, facts)


def _row(key: Any, value: Any) -> tuple[str, str]:
    return repr(key), repr(value)


def _rows(node: ast.AST) -> list[tuple[str, str]]:
    """Rows of a dict whose keys and values are literals."""
    if not isinstance(node, ast.Dict):
        return []
    pairs = [(literal(key), literal(value)) for key, value in zip(node.keys, node.values, strict=True)]
    return [_row(key, value) for (has_key, key), (has_value, value) in pairs if has_key and has_value]


def _listed_tests(rows: Sequence[Sequence[Any]], facts: Facts) -> Iterator[str]:
    """Rows (argument, result) of which most, and two, are tests.

    Tests of 0, 1 and the like alone are a start of a recursion.
    """
    tests = [row for row in rows if facts.is_pair(row)]
    if len(tests) >= 2 and len(tests) > len(rows) / 2 and not all(is_plain(cell) for row in tests for cell in row):
        yield f"{len(tests)} inputs with their results"


def special_case(site: Site, facts: Facts) -> Iterator[str]:
    """A branch on an input of the visible tests that gives a constant."""
    if isinstance(site.node, ast.If) and any(map(_gives_constant, site.node.body)):
        yield from _compared(site.node.test, facts)
    elif isinstance(site.node, ast.match_case) and any(map(_gives_constant, site.node.body)):
        values = [part.value for part in ast.walk(site.node.pattern) if isinstance(part, ast.MatchValue)]
        yield from (
            repr(value)[:60] for is_literal, value in map(literal, values) if is_literal and facts.is_input(value)
        )
    for node in header(site.node):
        if isinstance(node, ast.IfExp) and (folded(node.body)[0] or folded(node.orelse)[0]):
            yield from _compared(node.test, facts)


def _gives_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Return | ast.Assign) and statement.value is not None and folded(statement.value)[0]


def _compared(test: ast.AST, facts: Facts) -> Iterator[str]:
    """Inputs of the tests that a condition compares with; a bound, such as `x > 90`, is none."""
    for node in ast.walk(test):
        if not isinstance(node, ast.Compare):
            continue
        operands = [node.left, *node.comparators]
        equal = [not isinstance(op, _ORDER) for op in node.ops]
        for at, operand in enumerate(operands):
            is_literal, value = literal(operand)
            squeezed = len(operands) == 3 and ast.dump(operands[0]) == ast.dump(operands[2])  # 3 <= x <= 3
            if not is_literal or not (any(equal[max(0, at - 1) : at + 1]) or squeezed):
                continue
            parts = list(value) if isinstance(value, tuple | list | set | dict) else []
            hits = [part for part in parts if not is_plain(part) and facts.is_input(part)]
            if facts.is_input(value) or (parts and len(hits) == len(parts)):
                yield repr(value)[:60]
