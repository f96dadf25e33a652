"""Runs test suites on a solution in sandboxes. The parent's side: it asks, compares and counts."""

import ast
import builtins
import json
import secrets
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, DataError, SandboxError
from assay.programs.sandbox.isolation import Limits
from assay.programs.sandbox.process import SandboxedProcess, choose_isolation
from assay.programs.sandbox.values import NotPlain, encode, same, show

# -- Tests of untrusted code. The outcome does not depend on anything that the code reports about itself.
#
# Expected values stay in this process, or in a second sandbox that the code cannot reach. Exit codes, printed reports
# and comparisons made by the code's own objects count for nothing.


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


_GRACE_S = 2.0  # after the harness should have ended a test by itself
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError)
_CUT = 500  # characters of the solution's texts in a reason


def run_tests(
    code: str,
    suite: Suite,
    *,
    timeout_s: float,
    memory_mb: int,
    isolation: str = "auto",
    test_timeout_s: float | None = None,
    files: Mapping[str, str | bytes] | None = None,
    module: str = "solution",
    processes: int = 16,
    disk_mb: int = 64,
) -> SuiteResult:
    """Runs each test of a suite on a solution, each in a fresh process that has loaded the solution's code.

    A failure of the solution (an error while it is loaded, an exit, a limit) is not an error: the tests that it
    concerns have failed.

    Args:
        timeout_s: for all tests together; tests beyond it have failed.
        test_timeout_s: for one test; by default a quarter of `timeout_s`.
        files: other files that the solution may read and import.
        module: name under which the solution is imported, by itself or by test functions.
    Raises:
        SandboxError: no sandbox could be started.
        ConfigError: a limit is out of range.
        DataError: a test function imports a package that is not installed.
    """
    limits = Limits(timeout_s=timeout_s, memory_mb=memory_mb, processes=processes, disk_mb=disk_mb)
    each = timeout_s / 4 if test_timeout_s is None else test_timeout_s
    if not 0 < each <= timeout_s:
        raise ConfigError(f"test_timeout_s={test_timeout_s!r} must be above 0 and at most timeout_s={timeout_s!r}")
    if not module.isidentifier():
        raise ConfigError(f"module={module!r} must be a name")
    solution = _Solution(choose_isolation(isolation), limits, {**(files or {}), f"{module}.py": code}, module, each)
    began = time.monotonic()
    try:
        results = [_run_case(solution, case) for case in suite.cases]
        if suite.functions:
            results += _run_functions(solution, suite, module)
    finally:
        solution.close()
    return SuiteResult(
        results=tuple(results),
        output=solution.output,
        isolation=solution.isolation,
        killed_by=solution.killed_by,
        duration_s=time.monotonic() - began,
    )


class _Ended(Exception):
    """The solution's process gave no answer. The message is the reason for a test that needed one."""


class _Solution:
    """The solution's process, started again where a test ended it. Its time is the suite's."""

    def __init__(
        self, isolation: str, limits: Limits, files: Mapping[str, str | bytes], module: str, each: float
    ) -> None:
        self.isolation, self.limits, self.each = isolation, limits, each
        self._files, self._module = files, module
        self.output = ""
        self.killed_by: str | None = None
        self._process: SandboxedProcess | None = None
        self._session = ""
        self._start()
        self.deadline = time.monotonic() + limits.timeout_s

    def _start(self) -> None:
        script = ["-s", "-P", "-u", "{scripts}/harness.py", "serve", "{requests}", "{replies}"]
        self._process = SandboxedProcess(
            self.isolation,
            [*script, f"{self._module}.py", self._module, str(self.each)],
            limits=self.limits,
            files=self._files,
            channel=True,
        )

    def begin(self) -> None:
        """Loads the solution for one test.

        Raises:
            _Ended: it raised, ended or took too long.
        """
        if time.monotonic() >= self.deadline:
            raise _Ended(f"not run: the tests took more than {self.limits.timeout_s:g} s")
        if self._process is None:
            self._start()
        self._session = secrets.token_hex(16)
        answer = self._exchange({"op": "begin", "id": self._session}, self._session)
        if "raised" in answer:
            self.end()
            raise _Ended(f"the solution cannot be loaded: {_error_text(answer)}")

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The solution's answer: `value`, or `raised` with `text`. Its own claim, whatever it says.

        Raises:
            _Ended: it gave no answer.
        """
        token = secrets.token_hex(16)
        return self._exchange({**request, "id": token}, token)

    def _exchange(self, request: Mapping[str, Any], token: str) -> dict[str, Any]:
        process = self._process
        if process is None:
            raise _Ended("the solution's process had ended before")
        until = min(self.deadline, time.monotonic() + self.each) + _GRACE_S
        if process.send(json.dumps(request).encode(), until):
            while (line := process.receive(until)) is not None:
                message = _message(line)
                if message.get("id") == token and ("value" in message or isinstance(message.get("raised"), str)):
                    return message
                if message.get("over") == self._session:
                    self._session = ""  # the test's process has ended
                    raise _Ended(self._how(str(message.get("how"))))
        self._drop()
        if self.killed_by is not None:
            raise _Ended(f"the solution exceeded the limit on {self.killed_by}")
        raise _Ended("the solution ended its process or stopped answering")

    def _how(self, how: str) -> str:
        if how == "time":
            return f"no result within {self.each:g} s"
        return f"the solution ended its process ({how[:20]})"

    def end(self) -> None:
        """Ends the test's process and waits for it."""
        process, until = self._process, time.monotonic() + self.each + _GRACE_S
        if process is None or not self._session:
            return
        if process.send(b'{"op": "end"}', until):
            while (line := process.receive(until)) is not None:
                if _message(line).get("over") == self._session:
                    return
        self._drop()

    def _drop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self.killed_by = self._process.killed_by or self.killed_by
            self.output += self._process.text("stdout")[: self.limits.output_bytes - len(self.output)]
            self._process.close()
            self._process = None

    def close(self) -> None:
        self._drop()


def _message(line: bytes) -> dict[str, Any]:
    """A message of a harness; empty for anything else that was written to its descriptor."""
    try:
        message = json.loads(line)
    except _UNREADABLE:
        return {}
    return message if isinstance(message, dict) else {}


def _error_text(answer: Mapping[str, Any]) -> str:
    text = f"{answer['raised']}: {answer.get('text', '')}".removesuffix(": ")
    return text if len(text) <= _CUT else f"{text[:_CUT]}…"


def _run_case(solution: _Solution, case: Case) -> CaseResult:
    try:
        solution.begin()
        answer = solution.ask({"op": "eval", "expression": case.expression})
        solution.end()
    except _Ended as ended:
        return CaseResult(name=case.expression, passed=False, reason=f"{case.expression}: {ended}")
    wanted = case.expected or f"an exception {case.raises}"
    if "raised" in answer:
        passed = bool(case.raises) and answer["raised"] == case.raises
        actual = f"raised {_error_text(answer)}"
    else:
        try:
            passed = not case.raises and same(answer["value"], case.value)
            actual = f"found {show(answer['value'])}"
        except _UNREADABLE:
            passed, actual = False, "found a value that cannot be read"
    reason = "" if passed else f"{case.expression}: expected {wanted[:_CUT]}, {actual}"
    return CaseResult(name=case.expression, passed=passed, reason=reason)


def _run_functions(solution: _Solution, suite: Suite, module: str) -> list[CaseResult]:
    """Runs test functions in a sandbox of their own, and passes their calls on to the solution."""
    limits = Limits(timeout_s=solution.limits.timeout_s + 2 * _GRACE_S, memory_mb=solution.limits.memory_mb)
    packages = [folder for folder in (Path(sysconfig.get_paths()["purelib"]),) if folder.is_dir()]  # such as pytest
    results: dict[str, CaseResult] = {}
    with SandboxedProcess(
        solution.isolation,
        ["-s", "-P", "-u", "{scripts}/harness.py", "check", "{requests}", "{replies}"],
        limits=limits,
        files={},
        read_only=packages,
        channel=True,
    ) as checker:
        tests = {"source": suite.source, "free": suite.free_names, "entry_point": suite.entry_point, "module": module}
        tests["packages"] = [str(folder) for folder in packages]
        until = time.monotonic() + 30
        if not checker.send(json.dumps(tests).encode(), until) or checker.receive(until) is None:
            raise SandboxError("the process for test functions did not start")
        for name in suite.functions:
            results[name] = _run_function(solution, checker, name)
    return list(results.values())


def _run_function(solution: _Solution, checker: SandboxedProcess, name: str) -> CaseResult:
    try:
        solution.begin()
    except _Ended as ended:
        return CaseResult(name=name, passed=False, reason=f"{name}: {ended}")
    outcome = {"passed": False, "reason": "the test took too long or used too much memory"}
    until = min(solution.deadline, time.monotonic() + solution.each) + _GRACE_S
    sent = checker.send(json.dumps({"run": name}).encode(), until)
    while sent and (line := checker.receive(until)) is not None:
        message = _message(line)
        if message.get("done") == name:
            outcome = message
            if "missing" in message:
                raise DataError(
                    f"{name} imports {str(message['missing'])!r}, which is not installed here: install it, or write "
                    "the test without it"
                )
            break
        if isinstance(message.get("ask"), dict):
            try:
                reply: Mapping[str, Any] = solution.ask(message["ask"])
            except _Ended as ended:
                reply = {"gone": str(ended)}
            sent = checker.send(json.dumps(reply).encode(), until)
    solution.end()
    passed = outcome["passed"] is True
    return CaseResult(name=name, passed=passed, reason="" if passed else f"{name}: {str(outcome['reason'])[:1000]}")
