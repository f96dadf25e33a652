"""Runs test suites on a solution in sandboxes. The parent's side: it asks, compares and counts."""

import json
import secrets
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, DataError, SandboxError
from assay.programs.sandbox.execution import choose_isolation
from assay.programs.sandbox.isolation import Limits
from assay.programs.sandbox.process import SandboxedProcess
from assay.programs.sandbox.suites import Case, CaseResult, Suite, SuiteResult
from assay.programs.sandbox.values import same, show

__all__ = ["run_tests"]

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

    A failure of the solution (an error while it is loaded, an exit, a limit) is no error: the tests that it concerns
    have failed.

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
