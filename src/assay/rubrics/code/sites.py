"""Statements of a file as the rules of hack detection see them: with dotted names, parents and enclosing functions."""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from assay.rubrics.code.difference import FUNCTIONS, Source, arguments_of, statements_of

__all__ = ["Code", "Site", "all_sites", "header"]

Function = ast.FunctionDef | ast.AsyncFunctionDef
_PATH = "pathlib.Path"
_PATHS = {_PATH, "pathlib.PosixPath", "pathlib.WindowsPath", f"{_PATH}.cwd", f"{_PATH}.home"}


def header(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without the statements inside it."""
    waiting = [node]
    while waiting:
        inner = waiting.pop()
        yield inner
        waiting += [
            child
            for child in ast.iter_child_nodes(inner)
            if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case)
        ]


class Code:
    """A file with what its names stand for."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.aliases: dict[str, str] = {}
        self.bound = set[str]()
        self.star = ""  # the module of the last `from module import *`
        self._assigned: dict[str, list[ast.expr | None]] = {}  # name -> values; None where it is bound otherwise
        self.parents: dict[int, ast.AST] = {}
        for node in ast.walk(source.tree):
            self.parents.update((id(child), node) for child in ast.iter_child_nodes(node))
            self._bind(node)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                self.aliases[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                self.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self.star = (node.module or "") if alias.name == "*" else self.star
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            self.bound.add(node.id)
            parent = self.parents.get(id(node))
            value = parent.value if isinstance(parent, ast.Assign) and node in parent.targets else None
            self._assigned.setdefault(node.id, []).append(value)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            self.bound.add(node.name)
        if isinstance(node, (*FUNCTIONS, ast.Lambda)):
            for argument in arguments_of(node.args):
                self.bound.add(argument.arg)
                self._assigned.setdefault(argument.arg, []).append(None)

    def dotted(self, node: ast.AST) -> str:
        """What an expression stands for, such as `os.environ` or `builtins.open`; empty if unknown.

        Also through a name that is assigned once (`exits = os`), `__import__("os")`, `importlib.import_module("os")`,
        `getattr(os, "name")`, `os.__dict__["name"]`, `vars(os)["name"]` and `sys.modules["os"]`. A path is
        `pathlib.Path`.
        """
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and self.dotted(node.left) == _PATH:
            return _PATH
        return ""

    def _named(self, name: str) -> str:
        if name in self.aliases:
            return self.aliases[name]
        if name in self.bound:
            values = self._assigned.pop(name, [])  # without the name, so that `a = b; b = a` ends
            dotted = self.dotted(values[0]) if len(values) == 1 and values[0] is not None else ""
            self._assigned[name] = values
            return dotted
        if name == "__builtins__":
            return "builtins"
        if hasattr(builtins, name):
            return f"builtins.{name}"
        return f"{self.star}.{name}" if self.star else ""

    def _item(self, node: ast.Subscript) -> str:
        key = _joined(node.slice)
        if key is None:
            return ""
        owner = self.dotted(node.value)
        if owner == "sys.modules":
            return key
        if owner == "builtins":  # `__builtins__` is a dict, except in the main module
            return f"builtins.{key}"
        if isinstance(node.value, ast.Call) and self.dotted(node.value.func) == "builtins.vars" and node.value.args:
            owner = f"{self.dotted(node.value.args[0])}.__dict__"
        owner, separator, _ = owner.rpartition(".__dict__")
        return f"{owner}.{key}" if owner and separator else ""

    def _called(self, node: ast.Call) -> str:
        texts = [_joined(argument) for argument in node.args]
        function = self.dotted(node.func)
        if function in ("builtins.__import__", "importlib.import_module") and texts and texts[0] is not None:
            return texts[0]
        if function == "builtins.getattr" and len(texts) >= 2 and texts[1] is not None:
            owner = self.dotted(node.args[0])
            return f"{owner}.{texts[1]}" if owner else ""
        return _PATH if function in _PATHS else ""

    def enclosing(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, innermost first."""
        while (parent := self.parents.get(id(node))) is not None:
            yield parent
            node = parent

    def function(self, node: ast.AST) -> Function | None:
        """The function that a statement is in, or is."""
        return next((outer for outer in (node, *self.enclosing(node)) if isinstance(outer, FUNCTIONS)), None)

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions of the file and its classes by qualified name."""
        result: dict[str, Function] = {}

        def add(body: list[ast.stmt], prefix: str) -> None:
            for node in body:
                if isinstance(node, FUNCTIONS):
                    result[f"{prefix}{node.name}"] = node
                elif isinstance(node, ast.ClassDef):
                    add(node.body, f"{prefix}{node.name}.")

        add(self.source.tree.body, "")
        return result

    @cached_property
    def augmented(self) -> set[str]:
        """Names that the file changes in place, `name += …`."""
        targets = [node.target for node in ast.walk(self.source.tree) if isinstance(node, ast.AugAssign)]
        return {target.id for target in targets if isinstance(target, ast.Name)}

    @cached_property
    def returned(self) -> set[str]:
        """Names whose values the file's functions return or yield, also by way of other names."""
        names, assignments = set[str](), list[tuple[set[str], set[str]]]()
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Return | ast.Yield):
                names |= _passed_on(node.value)
            elif isinstance(node, ast.Lambda):
                names |= _passed_on(node.body)
            elif isinstance(node, ast.Assign):
                targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
                assignments.append((targets, _passed_on(node.value)))
        while more := {name for targets, values in assignments if targets & names for name in values} - names:
            names |= more
        return names


def _passed_on(value: ast.expr | None) -> set[str]:
    """Names whose value an expression may have."""
    if isinstance(value, ast.Name):
        return {value.id}
    parts: list[ast.expr] = []
    if isinstance(value, ast.IfExp):
        parts = [value.body, value.orelse]
    elif isinstance(value, ast.BoolOp):
        parts = value.values
    return {name for part in parts for name in _passed_on(part)}


def _joined(node: ast.AST) -> str | None:
    """The text of a string literal, also of several that are added or formatted; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_joined(node.left), _joined(node.right)]
    elif isinstance(node, ast.JoinedStr):
        parts = [_joined(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values]
    else:
        return None
    return None if None in parts else "".join(part for part in parts if part is not None)


@dataclass(frozen=True)
class Site:
    """A statement of one file; `before` is the statement that an edit changed into it."""

    code: Code
    node: ast.AST
    before: ast.AST | None = None


def all_sites(code: Code) -> Iterator[Site]:
    for statement in statements_of(code.source.tree):
        yield Site(code, statement)
        for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield Site(code, part)
