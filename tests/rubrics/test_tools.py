"""Checks of tool use: adoption, abstention, exact calls, recovery, number of calls."""

from pathlib import Path
from typing import Any

import pytest

from assay.datasets import Task
from assay.rubrics import NoGrade, NotApplicable, load_rubric, tools
from assay.rubrics.tools import (
    adoption_when_needed,
    argument_exactness,
    calls_used,
    expected_calls,
    matched_calls,
    needs_tool,
    recovery_after_error,
)
from assay.traces import Rollout, ToolCall, Transition

AREA = {
    "name": "area",
    "parameters": {
        "type": "dict",
        "properties": {"base": {"type": "integer"}, "height": {"type": "float"}, "unit": {"type": "string"}},
        "required": ["base", "height"],
    },
}
TRUTH = [{"area": {"base": [10], "height": [5.0, 5.5], "unit": ["cm", ""]}}]


def task(calls: Any = None, **metadata: Any) -> Task:
    expected = {} if calls is None else {"calls": calls}
    return Task(id="t", inputs={"question": "?", "tools": [AREA]}, expected=expected, metadata=metadata)


def call(name: str = "area", error: str | None = None, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments, "result": None, "error": error}


def made(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"answer": "", "calls": list(calls)}


@pytest.mark.parametrize(
    ("wanted", "metadata", "needed"),
    [
        (TRUTH, {}, True),
        ([], {}, False),
        (None, {"tool_calls": 2}, True),
        (None, {"tool_calls": 0}, False),
        (None, {"tool_calls": []}, False),
        (None, {"needs_tool": True}, True),
        (None, {"needs_tool": False}, False),
        (None, {"tool_calls": True}, None),
        (None, {}, None),
    ],
)
def test_a_task_says_whether_it_needs_a_tool(wanted: Any, metadata: dict[str, Any], needed: bool | None) -> None:
    assert needs_tool(task(wanted, **metadata)) is needed
    if needed is None:
        with pytest.raises(NoGrade, match="does not say whether it needs a tool"):
            adoption_when_needed(task(wanted, **metadata), made(), None)


def test_calls_are_read_from_rollouts_and_steps_too() -> None:
    rollout = Rollout(transitions=[Transition(t=0, model="m", request={}, tools=[ToolCall(name="area", arguments={})])])
    assert adoption_when_needed(task(TRUTH), {"answer": "x"}, rollout).value == 1
    steps = [{"tool": "area", "arguments": {"base": 10, "height": 5.0}, "result": "25", "error": None}]
    assert argument_exactness(task(TRUTH), {"answer": "x", "steps": steps}, None).value == 1
    with pytest.raises(NoGrade, match="tool calls are unknown"):
        adoption_when_needed(task(TRUTH), {"answer": "x"}, None)


@pytest.mark.parametrize(
    ("arguments", "right", "why"),
    [
        ({"base": 10, "height": 5.0}, True, ""),
        ({"base": 10, "height": 5}, True, ""),  # an integer is a float
        ({"base": 10, "height": 5.5, "unit": " C.M"}, True, ""),  # text without case, spaces and some punctuation
        ({"base": 10.0, "height": 5.0}, False, "base is 10.0"),  # and a float is not an integer
        ({"base": True, "height": 5.0}, False, "base is True"),
        ({"base": "10", "height": 5.0}, False, "base is '10'"),
        ({"base": 10}, False, "required argument height is missing"),
        ({"base": 10, "height": 5.0, "unit": "m"}, False, "unit is 'm'"),
        ({"base": 10, "height": 5.0, "color": "red"}, False, "unexpected argument color"),
    ],
)
def test_arguments_are_compared_with_the_alternatives(arguments: dict[str, Any], right: bool, why: str) -> None:
    grade = argument_exactness(task(TRUTH), made(call(**arguments)), None)
    assert grade.value == float(right)
    assert why in grade.reason


def test_mappings_and_lists_of_mappings_have_alternatives_by_key() -> None:
    wanted = expected_calls(
        [{"f": {"where": [{"city": ["Bern", "Berne"], "zip": ["", 3000]}], "rows": [[{"x": [1, 2]}]]}}]
    )
    good = {"name": "f", "arguments": {"where": {"city": "berne"}, "rows": [{"x": 2}]}}
    assert matched_calls([good], wanted, {}) == (1, "")
    for wrong in (
        {"where": {"city": "Basel"}},
        {"where": {"city": "Bern", "a": 1}},
        {"rows": []},
        {"rows": [{"x": 3}]},
    ):
        assert matched_calls([{"name": "f", "arguments": {**good["arguments"], **wrong}}], wanted, {})[0] == 0


def test_calls_may_have_any_order_and_each_expected_one_is_used_once() -> None:
    wanted = [{"area": {"base": [1], "height": [1]}}, {"area": {"base": [1, 2], "height": [1]}}]
    one, two = call(base=1, height=1), call(base=2, height=1)
    assert argument_exactness(task(wanted), made(two, one), None).value == 1
    assert argument_exactness(task(wanted), made(one, one), None).value == 1  # the second accepts base 1 too
    assert argument_exactness(task(wanted), made(two, two), None).value == 0.5
    assert argument_exactness(task(wanted), made(one, two, call("other")), None).value == pytest.approx(2 / 3)
    assert argument_exactness(task(wanted), made(one), None, all_or_nothing=True).value == 0
    assert argument_exactness(task(wanted), made(call(base=9, error="no"), one, two), None).value == 1


def test_plain_calls_are_expected_values_too() -> None:
    plain = [{"name": "area", "arguments": {"base": 10, "height": 5.0, "unit": "cm"}}]
    assert argument_exactness(task(plain), made(call(base=10, height=5.0, unit="cm")), None).value == 1
    assert argument_exactness(task(plain), made(call(base=10, height=5.0)), None).value == 0
    for wrong in (["area"], [{"area": 3}], [{"area": {"base": 10}}], [{"a": {}, "b": {}}]):
        with pytest.raises(NoGrade, match="an expected call is"):
            argument_exactness(task(wrong), made(), None)


def test_recovery_is_the_share_of_failed_calls_that_a_good_one_follows() -> None:
    bad, good = call(error="timeout"), call()
    assert recovery_after_error(task(TRUTH), made(bad, good), None).value == 1
    assert recovery_after_error(task(TRUTH), made(bad, bad, good), None).value == 0.5
    assert recovery_after_error(task(TRUTH), made(good, bad), None).value == 0
    with pytest.raises(NotApplicable):
        recovery_after_error(task(TRUTH), made(good), None)


def test_calls_beyond_the_needed_ones_are_a_pitfall() -> None:
    assert calls_used(task(TRUTH), made(call()), None).value == 0
    assert calls_used(task(TRUTH), made(call(), call()), None).value == 1
    assert calls_used(task([]), made(call()), None).value == 1
    assert calls_used(task(None), made(call(), call(), call()), None, budget=2).value == 0.5
    with pytest.raises(NoGrade):
        calls_used(task(None), made(call()), None)


def test_the_checks_have_short_names_in_a_rubric_file(tmp_path: Path) -> None:
    file = tmp_path / "use.yaml"
    rows = [f"  - {{name: {name}, check: {name}}}\n" for name in tools.__all__]
    file.write_text(f"name: use\ncriteria:\n{''.join(rows)}")
    assert [criterion.name for criterion in load_rubric(str(file)).criteria] == tools.__all__
