"""Statements of a file as the rules of hack detection see them: with dotted names, parents and enclosing functions."""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from assay.rubrics.code.scopes import FUNCTIONS, arguments_of
from assay.rubrics.code.statements import Source, statements_of

__all__ = ["Code", "Site", "all_sites", "header"]

Function = ast.FunctionDef | ast.AsyncFunctionDef


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
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            self.bound.add(node.id)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            self.bound.add(node.name)
        if isinstance(node, (*FUNCTIONS, ast.Lambda)):
            self.bound.update(argument.arg for argument in arguments_of(node.args))

    def dotted(self, node: ast.AST) -> str:
        """What an expression stands for, such as `os.environ` or `builtins.open`; empty if unknown.

        Also through `__import__("os")`, `importlib.import_module("os")`, `getattr(os, "name")`, `vars(os)["name"]` and
        `__builtins__`.
        """
        if isinstance(node, ast.Name):
            if node.id == "__builtins__":
                return "builtins"
            if node.id in self.aliases:
                return self.aliases[node.id]
            return f"builtins.{node.id}" if hasattr(builtins, node.id) and node.id not in self.bound else ""
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        if isinstance(node, ast.Call):
            return self._called(node)
        return self._looked_up(node) if isinstance(node, ast.Subscript) else ""

    def _looked_up(self, node: ast.Subscript) -> str:
        """A name of a module's dictionary: `vars(os)["name"]`, `os.__dict__["name"]`, `__builtins__["name"]`."""
        owner, key = node.value, _joined(node.slice)
        if isinstance(owner, ast.Call) and len(owner.args) == 1 and self.dotted(owner.func) == "builtins.vars":
            module = self.dotted(owner.args[0])
        else:
            module = self.dotted(owner).removesuffix(".__dict__")
            if module != "builtins" and not (isinstance(owner, ast.Attribute) and owner.attr == "__dict__"):
                return ""  # an item of any other object
        return f"{module}.{key}" if module and key is not None else ""

    def _called(self, node: ast.Call) -> str:
        texts = [_joined(argument) for argument in node.args]
        function = self.dotted(node.func)
        if function in ("builtins.__import__", "importlib.import_module") and texts and texts[0] is not None:
            return texts[0]
        if function == "builtins.getattr" and len(texts) >= 2 and texts[1] is not None:
            owner = self.dotted(node.args[0])
            return f"{owner}.{texts[1]}" if owner else ""
        return function if function == "pathlib.Path" else ""  # its methods are known

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
