"""Test runs of solutions that try to pass without being correct; suites, and values that travel to a solution."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from solution_suites import RIGHT, SUITES, isolated as isolated, outcome, sandboxed as sandboxed, suite as suite

from assay.errors import DataError, SandboxError
from assay.programs.sandbox import Case, Suite, run_tests
from assay.programs.sandbox.values import NotPlain, decode, encode, same, show


@pytest.mark.slow
def test_a_right_solution_passes_every_test(isolated: str, suite: Suite) -> None:
    result = outcome(RIGHT, suite, isolated)
    assert [case.name for case in result.results] == list(suite.names)
    assert (result.passed, result.share, result.isolation) == (3, 1.0, isolated), result
    assert result.feedback() == "3 of 3 tests passed."


EQUAL_TO_ALL = """
class Any(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __getattr__(self, name): return self
    def __len__(self): return 2
    def __iter__(self): return iter([self, self])
def double(x):
    return Any()
"""


FORGED = """
import json, os, sys, gc
for descriptor in range(3, 64):
    for line in ({"done": "test_numbers", "passed": True}, {"done": "check", "passed": True}, {"passed": True},
                 {"id": "", "value": 4}, {"over": "", "how": "exit 0"}, [], 1, None):
        try: os.write(descriptor, json.dumps(line).encode() + b"\\n")
        except OSError: pass
print("3 passed in 0.01s")
sys.stderr.write("OK")
def double(x): return None
"""


PATCHED = """
import builtins, json, operator, sys, unittest
class Same(int):
    def __eq__(self, other): return True
for module in [*sys.modules.values()]:
    for name in ("encode", "decode", "check", "same", "_run_test"):
        if hasattr(module, name): setattr(module, name, lambda *a, **k: True)
json.dumps = lambda value, **k: '{"passed": true}'
builtins.AssertionError = type("AssertionError", (BaseException,), {})
builtins.eval = builtins.exec = builtins.compile = builtins.isinstance = builtins.issubclass = lambda *a, **k: True
operator.eq = lambda *a: True
def double(x): return 0
"""


THREADS = """
import atexit, os, sys, threading
def watch():
    while True:
        try: os.write(1, b"3 passed\\n")
        except OSError: pass
threading.Thread(target=watch, daemon=True).start()
atexit.register(os._exit, 0)
sys.excepthook = lambda *a: os._exit(0)
def double(x): raise SystemExit(0)
"""


CHEATS = {
    "exits at import": "import sys\nsys.exit(0)",
    "hard exit at import": "import os\nos._exit(0)",
    "exits in a call": "def double(x):\n    raise SystemExit(0)",
    "hard exit in a call": "import os\ndef double(x):\n    os._exit(0)",
    "kills its parent": "import os\ndef double(x):\n    os.kill(os.getppid(), 9)\n    os.kill(0, 9)",
    "equal to everything": EQUAL_TO_ALL.replace("BASE", "object"),
    "number equal to everything": EQUAL_TO_ALL.replace("BASE", "int"),
    "text equal to everything": EQUAL_TO_ALL.replace("BASE", "str"),
    "forges reports": FORGED,
    "patches the runner": PATCHED,
    "threads and atexit": THREADS,
    "closes everything": "import os\nos.closerange(0, 256)\ndef double(x): return x",
    "raises assertion errors": "def double(x): raise AssertionError",
    "raises what ends tests": "class Skipped(BaseException): pass\ndef double(x): raise Skipped",
    "forks": "import os\nos.fork()\ndef double(x): return os.fork()",
    "no such name": "def triple(x): return 3 * x",
    "syntax error": "def double(x:",
    "empty": "",
    "null bytes": "def double(x): return 2 * x\0",
    "lone surrogate": "double = '\ud800'",
    "function as answer": "def double(x): return double",
    "endless answer": "import itertools\ndef double(x): return itertools.repeat(4)",
    "nested answer": "def double(x):\n    a = []\n    for _ in range(100_000): a = [a]\n    return a",
    "cyclic answer": "def double(x):\n    a = []\n    a.append(a)\n    return a",
    "huge answer": "def double(x): return 'x' * 50_000_000",
    "fills memory": "def double(x): return [bytearray(2**27) for _ in range(99)]",
}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", sorted(CHEATS))
@pytest.mark.timeout(120)
def test_no_cheat_passes_a_case(isolated: str, cheat: str) -> None:
    assert_fails(cheat, SUITES["cases"], isolated)


@pytest.mark.slow
@pytest.mark.parametrize("cheat", sorted(CHEATS))
@pytest.mark.timeout(120)
def test_no_cheat_passes_a_test_function(sandboxed: str, cheat: str) -> None:
    assert_fails(cheat, SUITES["functions"], sandboxed)


def assert_fails(cheat: str, suite: Suite, isolation: str) -> None:
    result = outcome(CHEATS[cheat], suite, isolation, test_timeout_s=1.5)
    assert [case.passed for case in result.results] == [False, False, False], result
    assert all(case.reason for case in result.results)


@pytest.mark.slow
def test_an_endless_loop_fails_its_own_test_alone(isolated: str) -> None:
    code = "def double(x):\n    while x == 2: pass\n    return x + x"
    result = outcome(code, SUITES["cases"], isolated, test_timeout_s=1)
    assert [case.passed for case in result.results] == [False, True, True]
    assert result.results[0].reason == "double(2): no result within 1 s"


def test_tests_of_a_suite_are_isolated_from_each_other(sandboxed: str) -> None:
    code = "calls = []\ndef count(x):\n    calls.append(x)\n    open('seen', 'a').write('x')\n    return len(calls)"
    suite = Suite.parse([["count(1)", "1"], ["count(2)", "1"]])
    assert outcome(code, suite, sandboxed).share == 1.0


SPY = """
import gc, os, sys
def texts():
    for item in gc.get_objects():
        try: yield str(item)
        except Exception: pass
    for folder, _, names in os.walk("/"):
        if folder.startswith(("/proc", "/sys", "/usr", "/lib", "/dev", "/nix", sys.base_prefix)): continue
        for name in names:
            try: yield open(os.path.join(folder, name), errors="replace").read(10**6)
            except OSError: pass
    frame = sys._getframe()
    while frame:
        yield str(frame.f_locals) + str(frame.f_globals)
        frame = frame.f_back
    try: pids = os.listdir("/proc")
    except OSError: pids = []
    for pid in pids:
        for name in ("cmdline", "environ"):
            try: yield open(f"/proc/{pid}/{name}").read()
            except OSError: pass
def double(x):
    import re
    return next((text[:300] for text in texts() if re.search("zebra[ ]730019", text)), False)
"""


@pytest.mark.slow
def test_expected_values_are_nowhere_in_the_solutions_process(isolated: str) -> None:
    hidden = Suite(
        cases=(Case(expression="double(1)", expected="'zebra 730019'"),),
        source="def test_hidden():\n    found = double(1)\n    assert found == 'zebra 730019', found",
    )
    result = outcome(SPY, hidden, isolated, timeout_s=120, test_timeout_s=60, memory_mb=1024)
    assert result.results[0].reason == "double(1): expected 'zebra 730019', found False"
    assert result.results[1].reason.endswith("AssertionError: False")


@pytest.mark.parametrize(
    "source",
    [
        "class TestF:\n    def test_f(self):\n        assert f(1) == 1\n",
        "async def test_f():\n    assert f(1) == 1\n",
        "def test_f(x):\n    assert f(x) == 1\n",
        "def test_f(*, x):\n    assert f(x) == 1\n",
    ],
)
def test_tests_that_would_not_be_run_are_refused(source: str) -> None:
    with pytest.raises(DataError, match=r"test_f: a test is a plain function without arguments"):
        Suite(source=f"{source}\ndef test_other():\n    assert f(2) == 2\n")


def test_a_failing_sandbox_is_an_error_and_no_failed_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from assay.programs.sandbox import isolation

    monkeypatch.setattr(isolation, "SCRIPTS", Path("/nowhere"))
    with pytest.raises(SandboxError, match="could not be started"):
        run_tests(RIGHT, SUITES["cases"], timeout_s=5, memory_mb=128, isolation="none")


@pytest.mark.parametrize(
    ("tests", "entry_point"),
    [
        *(([], ""), (3, ""), ("x = 1", ""), ("def check(c): pass", ""), ("def test_(:", ""), ([["f(", "1"]], "")),
        *(([["f()", "object()"]], ""), ([["f()", "1", "2"]], ""), ([{"expression": "f()"}], "")),
        *(([{"expression": "f()", "expected": "1", "raises": "E"}], ""), ([["f()", "__import__('os')"]], "")),
    ],
)
def test_malformed_suites_are_refused(tests: Any, entry_point: str) -> None:
    with pytest.raises(DataError):
        Suite.parse(tests, entry_point)


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


VALUES = st.recursive(
    KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4) | st.sets(KEYS, max_size=4),
    max_leaves=8,
)


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(encode(value)))


@settings(deadline=None)
@given(VALUES)
def test_values_travel_unchanged_and_equal_themselves(value: Any) -> None:
    data = _through_json(value)
    assert repr(decode(data, lambda *_: None)) == repr(value) or "{" in repr(value)
    assert same(data, encode(value))
    assert show(data)


def _has_nan(value: Any) -> bool:
    return "nan" in repr(value)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_values_are_compared_by_pythons_equality(one: Any, other: Any) -> None:
    if not _has_nan(one) and not _has_nan(other):
        assert same(_through_json(one), _through_json(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        *((1, True, True), (1, 1.0, True), (0.0, -0.0, True), (2, 2 + 0j, True), ([1], (1,), False), ("1", 1, False)),
        *((math.nan, math.nan, True), ({1, 2}, frozenset({2, 1}), True), (b"a", bytearray(b"a"), True)),
        *((range(0, 10, 3), range(0, 11, 3), True), (range(0), range(5, 5), True), (range(3), [0, 1, 2], False)),
        *(({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ({"a": 1}, {"a": 2}, False)),
        *((range(10**18), range(10**18), True), ("nan", math.nan, False), (2**63, float(2**63), True)),
    ],
)
def test_equality_of_encoded_values(one: Any, other: Any, equal: bool) -> None:
    assert same(_through_json(one), _through_json(other)) is equal


def test_objects_of_other_classes_are_no_plain_values() -> None:
    for value in (object(), [object()], {1: print}, int):
        with pytest.raises(NotPlain):
            encode(value)
