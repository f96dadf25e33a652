"""Rules on tests inside the edited code: deleted, weakened, and without content."""

import ast
from collections.abc import Iterator, Sequence

from assay.rubrics.code.difference import Edit
from assay.rubrics.code.facts import Facts, literal
from assay.rubrics.code.sites import Code, Function, Site, header

__all__ = ["changed_tests", "trivial_assert"]

Hit = tuple[str, int, str]  # rule, line, what


def changed_tests(before: Code, after: Code, edits: Sequence[Edit]) -> Iterator[Hit]:
    """Tests of the original source that were removed or weakened."""
    bodies = {_body(function) for name, function in after.functions.items() if _is_test(name)}
    lines = {
        edit.line for edit in edits if edit.kind == "changed" and edit.before is not None and _checks(edit.before.node)
    }
    for name, old in before.functions.items():
        if not _is_test(name):
            continue
        new = after.functions.get(name)
        if new is None:
            if _body(old) not in bodies:  # not only renamed
                yield "deleted_test", old.lineno, name
            continue
        had, has = _count(old), _count(new)
        if has < had:
            yield "weakened_test", new.lineno, f"{name} has {has} of {had} assertions"
        yield from (
            ("weakened_test", line, f"an assertion of {name}")
            for line in sorted(lines)
            if new.lineno <= line <= (new.end_lineno or line)
        )
        if _returns_early(new) and not _returns_early(old):
            yield "weakened_test", new.lineno, f"{name} returns before its last assertion"


def trivial_assert(site: Site, _: Facts) -> Iterator[str]:
    """An assertion that cannot fail."""
    node = site.node
    if isinstance(node, ast.Assert) and _cannot_fail(node.test):
        yield ast.unparse(node)[:60]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _checks(node):
        args = [ast.dump(arg) for arg in node.value.args]
        name = getattr(node.value.func, "attr", "")
        same = name in ("assertEqual", "assertIs") and len(args) >= 2 and args[0] == args[1]
        if same or (name == "assertTrue" and node.value.args and _cannot_fail(node.value.args[0])):
            yield ast.unparse(node)[:60]


def _cannot_fail(test: ast.expr) -> bool:
    is_literal, value = literal(test)
    if is_literal or isinstance(test, ast.Tuple):
        return bool(value) if is_literal else bool(getattr(test, "elts", ()))
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return any(map(_cannot_fail, test.values))
    if (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and isinstance(test.ops[0], ast.Eq | ast.Is | ast.LtE | ast.GtE)
    ):
        return ast.dump(test.left) == ast.dump(test.comparators[0])
    return False


def _is_test(name: str) -> bool:
    return name.rpartition(".")[2].startswith("test")


def _body(function: Function) -> str:
    return "\n".join(ast.dump(statement) for statement in function.body)


def _count(function: Function) -> int:
    return sum(_checks(node) for node in ast.walk(function) if isinstance(node, ast.stmt))


def _checks(node: ast.AST) -> bool:
    """Whether a statement is an assertion: `assert`, `self.assert…(…)`, `with pytest.raises(…)`."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Expr | ast.With):
        calls = [inner.func for inner in header(node) if isinstance(inner, ast.Call)]
        names = [getattr(function, "attr", getattr(function, "id", "")) for function in calls]
        return any(name.startswith("assert") or name in ("raises", "warns", "fail") for name in names)
    return False


def _returns_early(function: Function) -> bool:
    """Whether the body of a test returns, unconditionally, before its last assertion."""
    ends = [index for index, node in enumerate(function.body) if isinstance(node, ast.Return | ast.Raise)]
    checks = [index for index, node in enumerate(function.body) if any(_checks(n) for n in ast.walk(node))]
    return bool(ends and checks) and ends[0] < checks[-1]
