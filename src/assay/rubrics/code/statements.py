"""Source code as trees of normalised statements: no formatting, comments, docstrings, local names or import order.

A statement's `tokens` are its header in preorder: text for what counts, numbers for local names. The statements inside
it are its children.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

from assay.rubrics.code.scopes import (
    FUNCTIONS,
    Bindings,
    Scope,
    bindings,
    class_scope,
    comprehension_scope,
    function_scope,
    module_scope,
)

__all__ = [
    "MOST_CHARACTERS",
    "MOST_STATEMENTS",
    "Source",
    "Statement",
    "UnreadableCode",
    "definition_name",
    "read_source",
    "statements_of",
]

MOST_CHARACTERS = 500_000  # of a source; the largest module of the standard library has 230,000
MOST_STATEMENTS = 20_000  # and 2,600 statements; this many take about five seconds
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})

Token = str | int


class UnreadableCode(ValueError):
    """A source cannot be compared: it is not Python, nested too deeply, or too long."""


@dataclass(slots=True)
class Statement:
    """One statement, `except` clause or `case`.

    Args:
        tokens: its header; numbers are local names.
        parameters: of a function: name -> number, for those that can be passed by keyword.
    """

    tokens: tuple[Token, ...]
    line: int
    text: str
    node: ast.AST
    children: "list[Statement]" = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A parsed file."""

    tree: ast.Module
    lines: Sequence[bytes]
    count: int  # of statements
    _bound: dict[int, Bindings] = field(default_factory=dict)

    def text(self, node: ast.AST) -> bytes:
        """The source of a statement with its decorators, as written."""
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda part: part.lineno)
        start, end = first.lineno - 1, node.end_lineno  # type: ignore[attr-defined]
        lines = list(self.lines[start:end])
        lines[-1] = lines[-1][: node.end_col_offset]  # type: ignore[attr-defined]
        lines[0] = lines[0][first.col_offset :]
        return b"\n".join(lines)

    def statements(self, nodes: Sequence[ast.stmt], *, of: Sequence[ast.ClassDef] = ()) -> list[Statement]:
        """Normalises top-level statements, or members of the class that the path `of` leads to.

        Raises:
            UnreadableCode: nested too deeply.
        """
        scope = module_scope()
        for owner in of:
            if id(owner) not in self._bound:
                self._bound[id(owner)] = bindings(owner.body)
            scope = class_scope(owner, scope, self._bound[id(owner)])
        try:
            return _Normalizer(self.lines).body(nodes, scope, "")
        except RecursionError:
            raise UnreadableCode("it is nested too deeply to compare") from None


@lru_cache(maxsize=16)  # the rollouts of a group share their source
def read_source(text: str) -> Source:
    """Parses a file.

    Raises:
        UnreadableCode: no text, not Python, nested too deeply, or longer than `MOST_CHARACTERS`.
    """
    if not isinstance(text, str):
        raise UnreadableCode(f"it is of type {type(text).__name__}, not text")
    if len(text) > MOST_CHARACTERS:
        raise UnreadableCode(f"it has {len(text)} characters; at most {MOST_CHARACTERS} are compared")
    text = text.removeprefix("\ufeff")  # the mark of a UTF-8 file, which Python skips
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        line = "" if error.lineno is None else f" (line {error.lineno})"  # of null bytes there is none
        raise UnreadableCode(f"not valid Python: {error.msg}{line}") from None
    except (RecursionError, MemoryError):
        raise UnreadableCode("it is nested too deeply to parse") from None
    except ValueError as error:  # null bytes and unpaired surrogates
        raise UnreadableCode(f"not valid Python: {error}") from None
    if (count := sum(1 for _ in statements_of(tree))) > MOST_STATEMENTS:
        raise UnreadableCode(f"it has {count} statements; at most {MOST_STATEMENTS} are compared")
    return Source(tree, tuple(_lines(text)), count)


def statements_of(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements below a node, without looking into expressions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        for block in _BLOCKS:
            if isinstance(nodes := getattr(node, block, None), list):
                waiting += nodes


def _lines(text: str) -> list[bytes]:
    """Lines as the parser counts them; `splitlines` also splits at form feeds and other separators."""
    return text.replace("\r\n", "\n").replace("\r", "\n").encode("utf-8").split(b"\n")


def definition_name(node: ast.AST) -> str | None:
    """Name of a function or class definition, None for any other statement."""
    return node.name if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else None


class _Normalizer:
    def __init__(self, lines: Sequence[bytes]) -> None:
        self.lines = lines

    def body(self, nodes: Sequence[ast.AST], scope: Scope, role: str) -> list[Statement]:
        """Normalises a block. `role` tells blocks of one statement apart: `else` from the rest."""
        result: list[Statement] = []
        for is_import, run in groupby(nodes, lambda node: isinstance(node, ast.Import | ast.ImportFrom)):
            if is_import:
                result += self._imports(run, scope, role)
            else:
                result += [self._statement(node, scope, role) for node in run]
        return result

    def _imports(self, nodes: Iterator[Any], scope: Scope, role: str) -> list[Statement]:
        """One statement per imported name; sorted, unless the order can matter (`*`, one name bound twice)."""
        single = [(node, alias) for node in nodes for alias in node.names]
        bound = [alias.asname or alias.name for _, alias in single]
        statements = []
        for node, alias in single:
            name = alias.asname or alias.name.partition(".")[0]
            whole = (
                isinstance(node, ast.Import) and alias.asname is None and "." in alias.name
            )  # `import a.b` binds `a`
            module = "" if isinstance(node, ast.Import) else f"{'.' * node.level}{node.module or ''}"
            tokens = [role, "(Import", module, alias.name, str(whole), self._name(name, scope), ")"]
            alone = type(node)(**{**dict(ast.iter_fields(node)), "names": [alias]})
            statements.append(self._made(ast.copy_location(alone, node), tokens))
        if "*" not in bound and len(set(bound)) == len(bound):
            statements.sort(key=lambda statement: _anonymous(statement.tokens))
        return statements

    def _statement(self, node: ast.AST, scope: Scope, role: str) -> Statement:
        inner = scope
        if isinstance(node, FUNCTIONS):
            inner = function_scope(node, scope)
        elif isinstance(node, ast.ClassDef):
            inner = class_scope(node, scope)
        tokens: list[Token] = [role]
        self._emit(node, scope, tokens, inner=inner)
        made = self._made(node, tokens)
        if isinstance(node, FUNCTIONS):
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                if (number := inner.resolve(argument.arg)) is not None:
                    made.parameters[argument.arg] = number
        for block in _BLOCKS:
            if isinstance(nodes := getattr(node, block, None), list):
                listed = _without_docstring(node, nodes) if block == "body" else nodes
                made.children += self.body(listed, inner, "" if block in ("body", "handlers", "cases") else block)
        return made

    def _made(self, node: Any, tokens: Sequence[Token]) -> Statement:
        place = node if hasattr(node, "lineno") else node.pattern  # a `case` has no position of its own
        text = self.lines[place.lineno - 1].decode("utf-8", "replace").strip()
        return Statement(tuple(tokens), place.lineno, text[:120], node)

    def _name(self, name: str, scope: Scope) -> Token:
        number = scope.resolve(name)
        return f"name {name}" if number is None else number

    def _emit(self, node: ast.AST, scope: Scope, out: list[Token], *, inner: Scope | None = None) -> None:
        """Appends the tokens of a node; of a statement (`inner` is set) those of its header."""
        if isinstance(node, ast.Name):
            out.append(self._name(node.id, scope))
            return
        if isinstance(node, ast.Constant):
            out.append(_constant(node.value))
            return
        if isinstance(node, ast.Lambda):
            inner = function_scope(node, scope)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            return self._comprehension(node, scope, out)
        out.append(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if name in _IGNORED or (isinstance(value, list) and name in _BLOCKS and inner is not None):
                continue
            if isinstance(value, ast.arguments):
                self._arguments(value, scope, inner or scope, out)
            elif isinstance(value, ast.AST):
                within = inner if inner is not None and isinstance(node, ast.Lambda) else scope
                self._emit(value, within, out)
            elif isinstance(value, list):
                out.append("[")
                for item in value:
                    self._item(item, scope, out, bound=isinstance(node, ast.Nonlocal))
                out.append("]")
            else:
                self._item(value, scope, out, bound=_binds(node, name))
        out.append(")")

    def _item(self, value: Any, scope: Scope, out: list[Token], *, bound: bool) -> None:
        if isinstance(value, ast.AST):
            self._emit(value, scope, out)
        elif bound and isinstance(value, str):
            out.append(self._name(value, scope))
        else:
            out.append(f"= {value!r}")

    def _arguments(self, arguments: ast.arguments, scope: Scope, inner: Scope, out: list[Token]) -> None:
        """Parameters: those that can be passed by keyword with their names, the others as local names."""
        kinds: list[tuple[str, list[ast.arg]]] = [
            ("positional", arguments.posonlyargs),
            ("args", arguments.args),
            ("keyword", arguments.kwonlyargs),
            ("*", [arguments.vararg] if arguments.vararg else []),
            ("**", [arguments.kwarg] if arguments.kwarg else []),
        ]
        out.append("(arguments")
        for kind, listed in kinds:
            for argument in listed:
                named = argument.arg if kind in ("args", "keyword") else ""
                out += [f"({kind} {named}", self._name(argument.arg, inner)]
                if argument.annotation is not None:
                    self._emit(argument.annotation, scope, out)
                out.append(")")
        for default in [*arguments.defaults, None, *arguments.kw_defaults]:
            if default is None:
                out.append("-")
            else:
                self._emit(default, scope, out)
        out.append(")")

    def _comprehension(self, node: Any, scope: Scope, out: list[Token]) -> None:
        """The first iterable is evaluated outside, everything else inside."""
        inner = comprehension_scope(node.generators, scope)
        out.append(f"({type(node).__name__}")
        for index, generator in enumerate(node.generators):
            out.append(f"(for {generator.is_async}")
            self._emit(generator.iter, inner if index else scope, out)
            self._emit(generator.target, inner, out)
            for condition in generator.ifs:
                self._emit(condition, inner, out)
            out.append(")")
        for name in ("elt", "key", "value"):
            if hasattr(node, name):
                self._emit(getattr(node, name), inner, out)
        out.append(")")


def _binds(node: ast.AST, name: str) -> bool:
    """Whether a field of a node holds the name of a variable."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return name == "name"
    return isinstance(node, ast.MatchMapping) and name == "rest"


def _constant(value: Any) -> str:
    return f"const {hex(value)}" if type(value) is int else f"const {value!r}"  # hex: of any length


def _anonymous(tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple("$" if isinstance(token, int) else token for token in tokens)


def _without_docstring(node: ast.AST, nodes: list[ast.stmt]) -> Sequence[ast.AST]:
    if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)) or not nodes:
        return nodes
    first = nodes[0]
    if not (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    ):
        return nodes
    return nodes[1:] or [ast.copy_location(ast.Pass(), first)]
