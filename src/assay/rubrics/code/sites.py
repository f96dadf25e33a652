"""Statements of a file as the rules of hack detection see them: with dotted names, parents and enclosing functions."""

import ast
import builtins
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from assay.errors import RubricError
from assay.rubrics.code.difference import FUNCTIONS, Source, arguments_of, statements_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
_PATH = "pathlib.Path"
_PATHS = {_PATH, "pathlib.PosixPath", "pathlib.WindowsPath", f"{_PATH}.cwd", f"{_PATH}.home"}


def defaults_of(arguments: ast.arguments) -> list[tuple[ast.arg, ast.expr | None]]:
    """The arguments that have a default, with it; None for one that must be given by keyword."""
    positional = [*arguments.posonlyargs, *arguments.args]
    return [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]


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


# -- Values in visible tests: what the tests pass to functions and what they expect.


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


# -- Values of expressions that depend on nothing: `2 + 3`, `int('5')`, `[5][0]`, `f'{"a"}b'`. Does not run code.


_TYPES: dict[str, Callable[..., Any]] = {
    **{"bytes": bytes, "dict": dict, "float": float, "frozenset": frozenset, "int": int, "list": list},
    **{"set": set, "sorted": sorted, "str": str, "tuple": tuple},
}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
_LARGEST = 10**12  # of a product, so that nothing large is computed
_DEEPEST = 20
_NONE = (False, None)


def folded(node: ast.AST | None, depth: int = 0) -> tuple[bool, Any]:
    """Whether an expression is a literal or made of literals alone, and its value."""
    folded_value = literal(node)
    if folded_value[0] or node is None or depth > _DEEPEST:
        return folded_value
    try:
        return _folded(node, depth + 1)
    except (TypeError, ValueError, ArithmeticError, LookupError):
        return _NONE


def _folded(node: ast.AST, depth: int) -> tuple[bool, Any]:
    if isinstance(node, ast.JoinedStr):
        return _text(node, depth)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        (has_left, left), (has_right, right) = folded(node.left, depth), folded(node.right, depth)
        if has_left and has_right and _is_small(left, node.op) and _is_small(right, node.op):
            return True, _OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
        (has_value, value), (has_index, index) = folded(node.value, depth), folded(node.slice, depth)
        if has_value and has_index:
            return True, value[index]
    elif isinstance(node, ast.Subscript):
        part = node.slice
        if isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None:
            return folded(node.value, depth)
    elif isinstance(node, ast.Call):
        return _called(node, depth)
    return _NONE


def _text(node: ast.JoinedStr, depth: int) -> tuple[bool, Any]:
    parts = [folded(part.value if isinstance(part, ast.FormattedValue) else part, depth) for part in node.values]
    plain = all(part.format_spec is None for part in node.values if isinstance(part, ast.FormattedValue))
    return (
        (True, "".join(str(value) for _, value in parts))
        if plain and all(is_constant for is_constant, _ in parts)
        else _NONE
    )


def _is_small(value: Any, op: ast.operator) -> bool:
    if isinstance(value, int | float):
        return abs(value) <= _LARGEST
    return isinstance(op, ast.Add) and isinstance(value, str | bytes | list | tuple)


def _called(node: ast.Call, depth: int) -> tuple[bool, Any]:
    if isinstance(node.func, ast.Lambda) and not node.args and not node.keywords:
        return folded(node.func.body, depth)
    arguments = [folded(argument, depth) for argument in node.args]
    keywords = {keyword.arg: folded(keyword.value, depth) for keyword in node.keywords}
    if not all(is_constant for is_constant, _ in [*arguments, *keywords.values()]) or None in keywords:
        return _NONE
    values = [value for _, value in arguments]
    name = getattr(node.func, "id", "")
    if name == "dict":
        return True, dict(*values, **{str(key): value for key, (_, value) in keywords.items()})
    if keywords or len(values) != 1:
        return _NONE
    if name in _TYPES and not (name == "bytes" and isinstance(values[0], int)):
        return True, _TYPES[name](values[0])
    if isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        has_glue, glue = folded(node.func.value, depth)
        if has_glue and isinstance(glue, str):
            return True, glue.join(values[0])
    return _NONE


def cannot_fail(test: ast.expr) -> bool:
    """Whether a condition is true whatever its names stand for."""
    is_constant, value = folded(test)
    if is_constant or isinstance(test, ast.Tuple):
        return bool(value) if is_constant else bool(getattr(test, "elts", ()))
    if isinstance(test, ast.Lambda) or (isinstance(test, ast.Name) and test.id == "__debug__"):
        return True
    if isinstance(test, ast.BoolOp):
        results = map(cannot_fail, test.values)
        return any(results) if isinstance(test.op, ast.Or) else all(results)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return cannot_pass(test.operand)
    if isinstance(test, ast.Call):
        return _is_true_call(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        same = ast.dump(test.left) == ast.dump(test.comparators[0])
        return same and isinstance(test.ops[0], ast.Eq | ast.Is | ast.LtE | ast.GtE)
    return False


def cannot_pass(test: ast.expr) -> bool:
    """Whether a condition is false whatever its names stand for."""
    is_constant, value = folded(test)
    if is_constant:
        return not value
    if isinstance(test, ast.BoolOp):
        results = map(cannot_pass, test.values)
        return any(results) if isinstance(test.op, ast.And) else all(results)
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and cannot_fail(test.operand)


def _is_true_call(test: ast.Call) -> bool:
    name = getattr(test.func, "id", "")
    if name == "isinstance" and len(test.args) == 2:
        return getattr(test.args[1], "id", "") == "object"
    if name == "bool" and len(test.args) == 1:
        return cannot_fail(test.args[0])
    if name in ("any", "all") and len(test.args) == 1 and isinstance(test.args[0], ast.List | ast.Tuple):
        parts = test.args[0].elts
        return any(map(cannot_fail, parts)) if name == "any" else all(map(cannot_fail, parts))
    return False


def is_settled(value: ast.expr) -> bool:
    """Whether an expression has the same truth for every value of its names."""
    return folded(value)[0] or cannot_fail(value) or cannot_pass(value)
