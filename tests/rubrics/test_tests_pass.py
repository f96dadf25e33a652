"""The criterion `tests_pass`: hidden tests decide, visible ones explain, and a broken sandbox scores nothing."""

import math
from pathlib import Path
from typing import Any

import pytest

from assay.datasets import Task
from assay.errors import RubricError
from assay.programs.sandbox import available
from assay.rubrics import Criterion, Rubric
from assay.rubrics.code import checks as tested
from assay.rubrics.criteria import NoGrade

needs_sandbox = pytest.mark.skipif(
    bool(available("bubblewrap") and available("landlock")), reason="no isolation works here"
)
VISIBLE = "assert double(2) == 4\nassert double('ab') == 'abab'"
HIDDEN = [["double(3)", "6"], ["double([7])", "[7, 7]"], ["double(-1)", "-2"], ["double('')", "''"]]


def task(**metadata: Any) -> Task:
    fields = {"visible_tests": VISIBLE, "hidden_tests": HIDDEN, **metadata}
    return Task(id="t", inputs={"code": "def double(x): return x"}, metadata=fields)


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "share"),
    [
        ("def double(x):\n    return x + x", 1.0),
        ("Here it is:\n```python\ndef double(x):\n    return x + x\n```\nas asked, not `x`.", 1.0),
        ("def double(x):\n    return x * 2 if isinstance(x, int) else x", 0.75),
        ("def double(x):\n    return {2: 4, 'ab': 'abab'}[x]", 0.0),
        ("def double(x:", 0.0),
        ("import os\nos._exit(0)", 0.0),
    ],
)
@pytest.mark.slow
def test_the_grade_is_the_share_of_hidden_tests(code: str, share: float) -> None:
    assert tested.tests_pass(task(), {"code": code}, None).value == share


@needs_sandbox
def test_the_reason_shows_visible_tests_alone() -> None:
    def reason(code: str, **fields: Any) -> str:
        return tested.tests_pass(task(**fields), {"code": code}, None).reason

    assert reason("def double(x):\n    return x") == (
        "Visible tests: 0 of 2 tests passed.\n- double(2): expected 4, found 2\n"
        "- double('ab'): expected 'abab', found 'ab'"
    )
    special = "def double(x):\n    return {2: 4, 'ab': 'abab'}[x]"
    assert reason(special) == "All visible tests passed, and hidden tests failed."
    assert reason(special, visible_tests=None) == "Hidden tests failed. The task has no visible tests."
    assert reason("def double(x): return x + x") == ""


@needs_sandbox
def test_a_check_function_is_given_the_entry_point() -> None:
    fields = {"hidden_tests": "def check(candidate):\n    assert candidate(4) == 8", "entry_point": "double"}
    assert tested.tests_pass(task(**fields), {"code": "def double(x): return x + x"}, None).value == 1.0


@pytest.mark.parametrize("prediction", [{"code": ""}, {"code": "  "}, {"code": None}, {"text": "x"}, {}])
def test_no_code_is_the_agents_own_failure(prediction: dict[str, Any]) -> None:
    grade = tested.tests_pass(task(), prediction, None)
    assert (grade.value, "no code in 'code'" in grade.reason) == (0.0, True)


def test_a_broken_sandbox_leaves_the_criterion_unscored(monkeypatch: pytest.MonkeyPatch) -> None:
    from assay.programs.sandbox import isolation

    monkeypatch.setattr(isolation, "SCRIPTS", Path("/nowhere"))
    rubric = Rubric("r", [Criterion(name="tests_pass", check=tested.tests_pass, arguments={"isolation": "none"})])
    result = rubric.score(task(), {"code": "def double(x): return x + x"})
    assert math.isnan(result.value)
    assert "could not be started" in str(result)


@pytest.mark.parametrize("fields", [{"hidden_tests": None}, {"hidden_tests": 3}, {"hidden_tests": "x = 1"}])
def test_tasks_without_tests_are_unscored(fields: dict[str, Any]) -> None:
    with pytest.raises(NoGrade, match=r"task 't'"):
        tested.tests_pass(task(**fields), {"code": "def double(x): return x"}, None)


@pytest.mark.parametrize(
    "arguments", [{"timeout_s": 0}, {"memory_mb": 1}, {"isolation": "docker"}, {"test_timeout_s": 50}, {"limit": 3}]
)
def test_wrong_arguments_are_refused_when_the_rubric_is_made(arguments: dict[str, Any]) -> None:
    with pytest.raises(RubricError):
        Criterion(name="tests_pass", check=tested.tests_pass, arguments=arguments)
