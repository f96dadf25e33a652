"""Rules on tests inside the edited code: deleted, weakened, and without content."""

import ast
from collections.abc import Iterator, Sequence

from assay.rubrics.code.difference import FUNCTIONS, Edit
from assay.rubrics.code.facts import Facts
from assay.rubrics.code.folding import cannot_fail, cannot_pass, folded
from assay.rubrics.code.sites import Code, Function, Site, header

__all__ = ["changed_tests", "trivial_assert"]

Hit = tuple[str, int, str]  # rule, line, what
_EMPTY: tuple[tuple[bool, object], ...] = ((True, []), (True, ()))  # of an iterable without items
_ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_ANY_FAILURE = {"AssertionError", "BaseException", "Exception"}


def changed_tests(before: Code, after: Code, edits: Sequence[Edit]) -> Iterator[Hit]:
    """Tests of the original source that were removed or weakened."""
    bodies = {_body(new) for name, new in after.functions.items() if _is_test(name) and _is_collected(name, after)}
    lines = {
        edit.line for edit in edits if edit.kind == "changed" and edit.before is not None and _checks(edit.before.node)
    }
    unbound = dict(_unbound(after))
    for name, old in before.functions.items():
        if not _is_test(name):
            continue
        new = after.functions.get(name)
        if new is None:
            if _body(old) not in bodies:  # not only renamed
                yield "deleted_test", old.lineno, name
            continue
        if name in unbound and name not in dict(_unbound(before)):
            yield "weakened_test", unbound[name], f"{name} is replaced"
        yield from (("weakened_test", new.lineno, f"{name} {what}") for what in _weaker(old, new))
        yield from (
            ("weakened_test", line, f"an assertion of {name}")
            for line in sorted(lines)
            if new.lineno <= line <= (new.end_lineno or line)
        )


def _weaker(old: Function, new: Function) -> Iterator[str]:
    had, has = _reached(old.body), _reached(new.body)
    if _returns_early(new) and not _returns_early(old):
        yield "returns before its last assertion"
    elif has < had:
        yield f"has {has} of {had} assertions"
    if _yields(new) and not _yields(old):
        yield "is a generator, which does not run"
    awaits = any(isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) for node in ast.walk(new))
    if isinstance(new, ast.AsyncFunctionDef) and not isinstance(old, ast.AsyncFunctionDef) and not awaits:
        yield "is async and awaits nothing"
    known = {ast.dump(decorator) for decorator in old.decorator_list}
    for decorator in new.decorator_list:
        if ast.dump(decorator) not in known and (what := _disabled_by(decorator)):
            yield what


def _disabled_by(decorator: ast.expr) -> str:
    call = decorator if isinstance(decorator, ast.Call) else None
    function = decorator if call is None else call.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    if name == "fixture":
        return "is a fixture, which is not run as a test"
    if name == "parametrize" and call is not None and len(call.args) > 1 and folded(call.args[1]) in _EMPTY:
        return "has no cases"
    return ""


def _unbound(code: Code) -> Iterator[tuple[str, int]]:
    """Functions whose name is deleted or given to something else, with the line."""
    for node in code.source.tree.body:
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        for target in targets:
            if ast.unparse(target) in code.functions:
                yield ast.unparse(target), node.lineno


def _reached(body: Sequence[ast.stmt]) -> int:
    """Assertions that run and can fail the test, whatever the conditions around them give."""
    return _assertions(body, body)[0]


def _assertions(block: Sequence[ast.stmt], whole: Sequence[ast.stmt]) -> tuple[int, bool]:
    """Number of assertions of a block, and whether it is always left."""
    count = 0
    for node in block:
        more, left = _inside(node, whole)
        count += more
        if left:
            return count, True
    return count, False


def _inside(node: ast.stmt, whole: Sequence[ast.stmt]) -> tuple[int, bool]:
    if isinstance(node, FUNCTIONS):
        names = [inner for outer in whole for inner in ast.walk(outer) if isinstance(inner, ast.Name)]
        return (_assertions(node.body, whole)[0], False) if any(name.id == node.name for name in names) else (0, False)
    if isinstance(node, ast.If):
        return _branches(node, whole)
    if isinstance(node, ast.For | ast.AsyncFor | ast.While):
        never = cannot_pass(node.test) if isinstance(node, ast.While) else folded(node.iter) in _EMPTY
        return (0 if never else _assertions(node.body, whole)[0]) + _assertions(node.orelse, whole)[0], False
    if isinstance(node, ast.With | ast.AsyncWith):
        count, left = _assertions(node.body, whole)
        return (0, False) if count and _expects_any_failure(node) else (count + _checks(node), left)
    if isinstance(node, ast.Try | ast.TryStar):
        caught = any(_catches_all(handler) for handler in node.handlers)
        parts = [_assertions(part, whole) for part in (node.body, node.orelse, node.finalbody)]
        return sum(count for count, _ in parts[caught:]), parts[0][1] or parts[2][1]
    if isinstance(node, ast.Match):
        cases = [_assertions(case.body, whole)[0] for case in node.cases]
        return min(cases, default=0), False
    return int(_checks(node)), isinstance(node, _ENDS)


def _branches(node: ast.If, whole: Sequence[ast.stmt]) -> tuple[int, bool]:
    yes, no = _assertions(node.body, whole), _assertions(node.orelse, whole)
    if cannot_fail(node.test):
        return yes
    if cannot_pass(node.test):
        return no
    return min(yes[0], no[0]), yes[1] and no[1]


def _catches_all(handler: ast.ExceptHandler) -> bool:
    if any(isinstance(node, ast.Raise | ast.Assert) for node in ast.walk(handler)):
        return False
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or getattr(kind, "id", "") in _ANY_FAILURE for kind in kinds)


def _expects_any_failure(node: ast.With | ast.AsyncWith) -> bool:
    """`with pytest.raises(AssertionError)`, `with suppress(Exception)`."""
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return any(getattr(kind, "id", "") in _ANY_FAILURE for call in calls for kind in call.args)


def _yields(function: Function) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))


def trivial_assert(site: Site, _: Facts) -> Iterator[str]:
    """An assertion that cannot fail."""
    node = site.node
    if isinstance(node, ast.Assert) and cannot_fail(node.test):
        yield ast.unparse(node)[:60]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _checks(node):
        args = [ast.dump(arg) for arg in node.value.args]
        name = getattr(node.value.func, "attr", "")
        same = name in ("assertEqual", "assertIs") and len(args) >= 2 and args[0] == args[1]
        if same or (name == "assertTrue" and node.value.args and cannot_fail(node.value.args[0])):
            yield ast.unparse(node)[:60]


def _is_test(name: str) -> bool:
    return name.rpartition(".")[2].startswith("test")


def _is_collected(name: str, code: Code) -> bool:
    """Whether the classes that a test is in are of tests, by their names or bases."""
    owners = name.split(".")[:-1]
    classes = {node.name: node for node in ast.walk(code.source.tree) if isinstance(node, ast.ClassDef)}
    return all(owner.startswith("Test") or bool(classes[owner].bases) for owner in owners)


def _body(function: Function) -> str:
    return "\n".join(ast.dump(statement) for statement in function.body)


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
