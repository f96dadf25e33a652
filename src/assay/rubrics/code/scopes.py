"""Which names of a function are its own: Python's scope rules on the AST.

Local names are numbered, so that a renaming is no change. Names that others can see are kept: globals, attributes,
names of a class body, keyword arguments, parameters that can be passed by keyword. So are all names of a function
that looks names up at run time (`eval`, `locals`).
"""

import ast
from collections.abc import Iterable, Iterator

__all__ = [
    "FUNCTIONS",
    "Bindings",
    "Scope",
    "arguments_of",
    "bindings",
    "class_scope",
    "comprehension_scope",
    "function_scope",
    "module_scope",
]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Bindings = tuple[set[str], set[str], set[str]]  # own names, nonlocal ones, global ones
_BY_NAME = frozenset({"dir", "eval", "exec", "locals", "vars"})


class Scope:
    """A module, class or function (also a lambda or comprehension) with the names bound in it.

    Args:
        numbers: name -> number; shared by all scopes of one top-level statement.
        dynamic: its names are looked up at run time, so they are not numbered.
    """

    def __init__(
        self,
        kind: str,
        parent: "Scope | None",
        names: Iterable[str] = (),
        *,
        outer: Iterable[str] = (),
        global_names: Iterable[str] = (),
        dynamic: bool = False,
    ) -> None:
        self.kind, self.parent, self.dynamic = kind, parent, dynamic
        self.outer, self.global_names = frozenset(outer), frozenset(global_names)
        self.names = frozenset(names) - self.outer - self.global_names
        self.numbers: dict[tuple[Scope, str], int] = {} if parent is None else parent.numbers

    def resolve(self, name: str) -> int | None:
        """Number of a local name of this or an enclosing function, by first occurrence; None for any other name."""
        scope: Scope | None = self
        while scope is not None and scope.parent is not None:
            if scope.kind == "class":
                if scope is self and (name in scope.names or name in scope.global_names):
                    return None
            elif name in scope.global_names:
                return None
            elif name in scope.names:
                if scope.dynamic:
                    return None
                return self.numbers.setdefault((scope, name), len(self.numbers))
            scope = scope.parent
        return None


def module_scope() -> Scope:
    return Scope("module", None)


def class_scope(node: ast.ClassDef, parent: Scope, bound: Bindings | None = None) -> Scope:
    names, outer, global_names = bindings(node.body) if bound is None else bound
    return Scope("class", parent, names, outer=outer, global_names=global_names)


def function_scope(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, parent: Scope) -> Scope:
    body = node.body if isinstance(node.body, list) else [node.body]
    names, outer, global_names = bindings(body)
    names |= {argument.arg for argument in arguments_of(node.args)}
    dynamic = any(isinstance(inner, ast.Name) and inner.id in _BY_NAME for inner in ast.walk(node))
    return Scope("function", parent, names, outer=outer, global_names=global_names, dynamic=dynamic)


def comprehension_scope(generators: Iterable[ast.comprehension], parent: Scope) -> Scope:
    names = {
        inner.id
        for generator in generators
        for inner in ast.walk(generator.target)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    return Scope("function", parent, names, dynamic=parent.dynamic)


def arguments_of(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    yield from (argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None)


def bindings(body: Iterable[ast.AST]) -> Bindings:
    """Names that these statements bind in their own scope, and those that they declare nonlocal and global."""
    names, outer, global_names = set[str](), set[str](), set[str]()
    waiting: list[tuple[ast.AST, bool]] = [(node, False) for node in body]
    while waiting:
        node, only_walrus = waiting.pop()  # inside a comprehension only `:=` binds a name of the function
        if isinstance(node, ast.NamedExpr):
            names.add(node.target.id)
            waiting.append((node.value, only_walrus))
            continue
        if isinstance(node, ast.Nonlocal):
            outer.update(node.names)
        elif isinstance(node, ast.Global):
            global_names.update(node.names)
        elif not only_walrus:
            names.update(_bound_by(node))
        waiting += [(inner, only_walrus or walrus) for inner, walrus in _evaluated_here(node)]
    return names, outer, global_names


def _bound_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names if alias.name != "*")
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest is not None:
        yield node.rest


def _evaluated_here(node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Parts of a node that are evaluated in the scope of the node; True for the inside of a comprehension."""
    if isinstance(node, FUNCTIONS):
        annotations = [argument.annotation for argument in arguments_of(node.args)]
        parts = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults, *annotations, node.returns]
        yield from ((part, False) for part in parts if part is not None)
    elif isinstance(node, ast.ClassDef):
        yield from ((part, False) for part in [*node.decorator_list, *node.bases, *node.keywords])
    elif isinstance(node, ast.Lambda):
        yield from ((part, False) for part in [*node.args.defaults, *node.args.kw_defaults] if part is not None)
    elif isinstance(node, _COMPREHENSIONS):
        yield node.generators[0].iter, False
        yield from ((inner, True) for inner in ast.iter_child_nodes(node))
    else:
        yield from ((inner, False) for inner in ast.iter_child_nodes(node))
