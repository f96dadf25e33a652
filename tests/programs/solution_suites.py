"""Suites of tests, and runs of solutions in each isolation that works here."""

from typing import Any

import pytest
from sandbox_attacks import isolated as isolated

from assay.programs.sandbox import Suite, SuiteResult, available, run_tests

CASES = [["double(2)", "4"], ["double(5)", "10"], ["double([1])", "[1, 1]"]]


FUNCTIONS = """
from solution import double
FACTOR = 2

def test_numbers():
    for number in (2, 5):
        assert double(number) == FACTOR * number

def test_lists():
    assert double([1]) == [1, 1], "lists are repeated"

def check(candidate):
    assert candidate(7) == 14
    assert candidate("ab") == "abab"
"""


SUITES = {"cases": Suite.parse(CASES), "functions": Suite(source=FUNCTIONS, entry_point="double")}
RIGHT = "def double(x):\n    return x + x\n"


@pytest.fixture(scope="module")
def sandboxed() -> str:
    """The isolation of tests that need one alone."""
    for name in ("bubblewrap", "landlock"):
        if not available(name):
            return name
    pytest.skip("no isolation works here")


@pytest.fixture(params=sorted(SUITES))
def suite(request: pytest.FixtureRequest) -> Suite:
    return SUITES[request.param]


def outcome(code: str, suite: Suite, isolated: str, **options: Any) -> SuiteResult:
    return run_tests(
        code, suite, **{"timeout_s": 20, "memory_mb": 256, "isolation": isolated, "test_timeout_s": 5, **options}
    )
