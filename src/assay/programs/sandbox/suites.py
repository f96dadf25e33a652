"""Tests of untrusted code. The outcome does not depend on anything that the code reports about itself.

Expected values stay in this process, or in a second sandbox that the code cannot reach. Exit codes, printed reports and
comparisons made by the code's own objects count for nothing.
"""

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import DataError
from assay.programs.sandbox.values import NotPlain, encode

__all__ = ["Case", "CaseResult", "Suite", "SuiteResult"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An expression over the names of the solution, and what it must give: a plain value or an exception.

    Args:
        expression: such as `wrap('a b', 1)`. The solution's process evaluates it.
        expected: `repr` of the value: None, numbers, text, bytes, and containers of these.
        raises: name of the exception's class, instead of `expected`.
    """

    expression: str
    expected: str = ""
    raises: str = ""

    def __post_init__(self) -> None:
        if bool(self.expected) == bool(self.raises):
            raise DataError(f"test {self.expression!r}: set exactly one of expected and raises")
        try:
            ast.parse(self.expression, mode="eval")
        except (SyntaxError, ValueError) as error:
            raise DataError(f"test {self.expression!r} is not an expression: {error}") from None
        if self.expected:
            self.value  # noqa: B018 (fails here and not in the middle of a run)

    @property
    def value(self) -> Any:
        """The expected value, encoded."""
        try:
            return encode(eval_plain(self.expected))
        except (NotPlain, ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise DataError(
                f"test {self.expression!r}: expected={self.expected[:200]!r} is not the repr of a plain value: {error}"
            ) from None


def eval_plain(text: str) -> Any:
    """Value of a literal; also `inf`, `nan`, `set()`, `frozenset(…)`, `bytearray(…)`, `range(…)` as `repr` has them."""
    tree = ast.parse(text.strip(), mode="eval").body
    return _plain(tree)


def _plain(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_plain(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        makers = {"set": set, "frozenset": frozenset, "bytearray": bytearray, "range": range}
        if node.func.id in makers:
            return makers[node.func.id](*map(_plain, node.args))
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        parts = [_plain(part) for part in node.elts]
        return {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)](parts)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_plain(key): _plain(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tests of one solution: cases, test functions, or both.

    Args:
        source: Python with functions `test_…` without arguments, or `check(candidate)`. Names that it does not define
            are the solution's; it may also import them from the module `solution`. Only plain values and objects of the
            solution pass between the two, arguments by value: what a call changes in a list is not seen.
        entry_point: name of the function that `check` is given.
    """

    cases: tuple[Case, ...] = ()
    source: str = ""
    entry_point: str = ""

    def __post_init__(self) -> None:
        if refused := list(_not_run(self.source)):
            raise DataError(
                f"{', '.join(refused)}: a test is a plain function without arguments. Write a loop for parameters and "
                "call fixtures and coroutines in the function"
            )
        if self.source and not self.functions:
            raise DataError("the source of a test suite has no function test_… and no check(candidate)")
        if "check" in self.functions and not self.entry_point.isidentifier():
            raise DataError(f"check(candidate) needs entry_point, the function's name; found {self.entry_point!r}")
        if not self.names:
            raise DataError("a test suite needs at least one test")

    @classmethod
    def parse(cls, tests: Any, entry_point: str = "") -> "Suite":
        """A suite from JSON.

        Args:
            tests: Python source with test functions or `assert` statements, a list of such texts, or a list of cases as
                `[expression, expected]` or as objects with `expression` and `expected` or `raises`. Each `assert`
                outside of a function is one test: a case, where it compares with a literal.
        Raises:
            DataError: the tests have another form.
        """
        if isinstance(tests, Suite):
            return tests
        if isinstance(tests, list | tuple) and tests and all(isinstance(text, str) for text in tests):
            tests = "\n".join(tests)
        if isinstance(tests, str):
            cases, source = _from_source(tests)
            return cls(cases=cases, source=source, entry_point=entry_point)
        if not isinstance(tests, list | tuple):
            raise DataError(f"tests must be Python source or a list of cases, found {type(tests).__name__}")
        return cls(cases=tuple(map(_case, tests)), entry_point=entry_point)

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the test functions, in order."""
        names = [node.name for node in _parsed(self.source).body if isinstance(node, ast.FunctionDef)]
        return tuple(name for name in dict.fromkeys(names) if name.startswith("test_") or name == "check")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tests. A test without a result counts as failed."""
        return (*(case.expression for case in self.cases), *self.functions)

    @property
    def free_names(self) -> tuple[str, ...]:
        """Names that the source reads and does not define: the solution's."""
        nodes = list(ast.walk(ast.parse(self.source)))
        read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        return tuple(sorted(read - set(_defined(nodes)) - set(dir(builtins))))


def _defined(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def _not_run(source: str) -> Iterator[str]:
    """Tests that pytest or unittest would run, and a suite would not: of classes, asynchronous, with arguments."""
    for node in _parsed(source).body:
        if isinstance(node, ast.ClassDef):
            members = [inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from (f"{node.name}.{inner.name}" for inner in members if inner.name.startswith("test"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            parameters = [*node.args.posonlyargs, *node.args.args]
            required = len(parameters) > len(node.args.defaults) or None in node.args.kw_defaults
            if required or isinstance(node, ast.AsyncFunctionDef):
                yield node.name


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the source of a test suite is not Python: {error}") from None


def _from_source(source: str) -> tuple[tuple[Case, ...], str]:
    """Cases of the asserts outside of functions, and the rest of the source with the other asserts as functions."""
    tree = _parsed(source)
    asserts = [node for node in tree.body if isinstance(node, ast.Assert)]
    if not asserts:
        return (), source
    rest: list[ast.stmt] = [node for node in tree.body if not isinstance(node, ast.Assert)]
    own = {name for node in rest for name in _defined(list(ast.walk(node)))}
    cases, functions = [], []
    for node in asserts:
        case = _case_of(node, own)
        if case is not None:
            cases.append(case)
        else:
            functions.append(f"def test_assert_{node.lineno}():\n    {ast.unparse(node)}")
    preamble = ast.unparse(ast.Module(body=rest, type_ignores=[])) if functions or rest else ""
    if not functions and not any(isinstance(node, ast.FunctionDef) for node in rest):
        preamble = ""  # imports and constants that no test uses
    return tuple(cases), "\n\n".join(part for part in (preamble, *functions) if part)


def _case_of(node: ast.Assert, own: set[str]) -> Case | None:
    """`assert EXPRESSION == LITERAL` as a case, unless the expression needs a name that the tests define."""
    test = node.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    if any(isinstance(inner, ast.Name) and inner.id in own for inner in ast.walk(test)):
        return None
    try:
        return Case(expression=ast.unparse(test.left), expected=ast.unparse(test.comparators[0]))
    except DataError:
        return None


def _case(row: Any) -> Case:
    if isinstance(row, Case):
        return row
    if isinstance(row, Mapping) and set(row) <= {"expression", "expected", "raises"}:
        return Case(**{key: str(value) for key, value in row.items() if value is not None})
    if isinstance(row, list | tuple) and len(row) == 2 and all(isinstance(part, str) for part in row):
        return Case(expression=row[0], expected=row[1])
    raise DataError(f"test {row!r} must be [expression, expected], or an object with expression and expected or raises")


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Outcome of one test. `reason` says why it failed, with the expected value: show it only for visible tests."""

    name: str
    passed: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """Outcome of a suite: one result for each of its tests, in order.

    Args:
        output: what the solution printed.
        isolation: the isolation that was used.
        killed_by: the limit that ended the solution's process last.
    """

    results: tuple[CaseResult, ...]
    output: str
    isolation: str
    killed_by: str | None
    duration_s: float

    @property
    def passed(self) -> int:
        """Number of tests that passed."""
        return sum(result.passed for result in self.results)

    @property
    def share(self) -> float:
        """Share of the tests that passed, in [0, 1]."""
        return self.passed / len(self.results)

    def feedback(self, most: int = 5) -> str:
        """Summary and the first failures, for the author of the solution."""
        failed = [result for result in self.results if not result.passed]
        lines = [f"{self.passed} of {len(self.results)} tests passed."]
        lines += [f"- {result.reason}" for result in failed[:most]]
        lines += [f"- {len(failed) - most} more failed."] if len(failed) > most else []
        return "\n".join(lines)
