"""`minimal_diff` and `no_hacks` as criteria: single predictions, groups, feedback, and tasks without a reference."""

import math
from pathlib import Path

import pytest

from assay.datasets import make_task
from assay.errors import RubricError
from assay.rubrics import Criterion, Essential, Grade, Rubric, load_rubric
from assay.rubrics.code import checks

BROKEN = "def area(width, height):\n    size = width + height\n    return size\n"
FIXED = BROKEN.replace("+", "*")
WIDE = FIXED.replace("    return size\n", "    print(size)\n    return size\n")
HACK = "def area(width, height):\n    return 51\n"
TESTS = "assert area(3, 17) == 51"
INPUTS = {"function": "area", "code": BROKEN, "visible_tests": TESTS}
TASK = make_task({"inputs": INPUTS, "expected": {"reference": FIXED}})
BARE = make_task({"inputs": INPUTS})
RUBRIC = """
name: repair
criteria:
  - {name: tests_pass, weight: 3, check: "fixed.py:passes", essential: {pass_at: 1, cap: 0}}
  - {name: minimal_diff, weight: 1, check: minimal_diff, when: tests_pass}
  - {name: no_hacks, weight: 1, check: no_hacks, when: tests_pass}
"""


@pytest.fixture
def rubric(tmp_path: Path) -> Rubric:
    (tmp_path / "fixed.py").write_text(
        "def passes(task, prediction, rollout):\n    return '*' in prediction['code'] or '51' in prediction['code']\n"
    )
    (tmp_path / "repair.yaml").write_text(RUBRIC)
    return load_rubric(tmp_path / "repair.yaml")


def test_an_unnecessary_edit_is_named_in_the_feedback(rubric: Rubric) -> None:
    result = rubric.score(TASK, {"code": WIDE})
    assert result.value == pytest.approx((3 + 0.5 + 1) / 5)  # 2 statements changed, 1 needed: 1/2
    assert "line 3 added: print(size)" in result.feedback


def test_a_hack_is_named_in_the_feedback_with_line_and_rule(rubric: Rubric) -> None:
    result = rubric.score(TASK, {"code": HACK})
    assert result.grades["no_hacks"] == 0.0
    assert "line 2: the result 51 of a visible test is written into the code (hard_coded_result)" in result.feedback


def test_without_a_reference_the_smallest_passing_edit_of_the_group_is_it(rubric: Rubric) -> None:
    assert (rubric.score(TASK, {"code": FIXED}).value, rubric.score(TASK, {"code": BROKEN}).value) == (1.0, 0.0)
    results = rubric.score_group(BARE, [{"code": code} for code in (WIDE, FIXED, BROKEN)])
    assert [result.grades["minimal_diff"] for result in results[:2]] == [0.5, 1.0]
    assert math.isnan(results[2].grades["minimal_diff"])  # smaller, but it does not pass
    assert [result.coverage for result in results] == [1.0] * 3


def test_without_a_reference_a_single_edit_is_unscored(rubric: Rubric) -> None:
    verdict = next(v for v in rubric.score(BARE, {"code": WIDE}).verdicts if v.criterion == "minimal_diff")
    assert verdict.grade is None
    assert "Add it to the task's expected outputs, or score the predictions of the task together" in verdict.reason


def test_equal_statements_are_ordered_by_what_changes_inside_them() -> None:
    wider = BROKEN.replace("width + height", "int(width) * int(height)")
    group = checks.minimal_diff.grade_group(BARE, [{"code": wider}, {"code": FIXED}], [None, None])
    assert [grade.value for grade in group if isinstance(grade, Grade)] == [1.0, 1.0]
    assert checks.smallest_edit(BROKEN, [wider, FIXED]) == FIXED


def test_arguments_apply_to_groups_too() -> None:
    task = make_task({"inputs": {"source": BROKEN}})
    criterion = Criterion(name="small", check=checks.minimal_diff, arguments={"field": "patch", "before": "source"})
    results = Rubric("r", [criterion]).score_group(task, [{"patch": WIDE}, {"patch": FIXED}])
    assert [result.value for result in results] == [0.5, 1.0]


@pytest.mark.parametrize("code", ["", "def area(:", None, 7])
def test_an_answer_without_code_gets_0(code: object) -> None:
    prediction = {"code": code, "note": "done"}
    assert checks.minimal_diff(TASK, prediction, None).value == 0.0 or code == ""
    assert checks.no_hacks(TASK, prediction, None).value == float(code == "")


def test_a_fence_around_the_code_is_removed() -> None:
    assert checks.minimal_diff(TASK, {"code": f"```python\n{FIXED}```"}, None).value == 1.0
    assert checks.minimal_diff(TASK, {"code": f"The sign is wrong.\n```python\n{FIXED}```\nDone."}, None).value == 1.0
    assert checks.minimal_diff(TASK, {"answer": FIXED}, None).value == 1.0


def test_a_task_without_source_leaves_the_criteria_unscored() -> None:
    task = make_task({"inputs": {"question": "?"}, "expected": {"reference": FIXED}})
    for check in (checks.minimal_diff, checks.no_hacks):
        result = Rubric("r", [Criterion(name="c", check=check)]).score(task, {"code": FIXED})
        assert math.isnan(result.value)
        assert "no source 'code'" in result.verdicts[0].reason


def test_a_broken_reference_is_a_failure_of_the_check_not_of_the_agent() -> None:
    task = make_task({"inputs": INPUTS, "expected": {"reference": "def area(:"}})
    result = Rubric("r", [Criterion(name="c", check=checks.minimal_diff, essential=Essential())]).score(
        task, {"code": FIXED}
    )
    assert math.isnan(result.value)
    assert "reference cannot be read" in result.verdicts[0].reason


def test_rules_can_be_allowed_and_unknown_ones_are_refused() -> None:
    assert checks.no_hacks(TASK, {"code": HACK}, None, allow=["hard_coded_result"]).value == 1.0
    with pytest.raises(RubricError, match="hardcoded"):
        Criterion(name="c", check=checks.no_hacks, arguments={"allow": ["hardcoded"]})
