"""Figures of tool use in reports, each with an interval."""

from typing import Any

import pytest

from assay import evaluate
from assay.datasets import Task
from assay.evaluation.metrics import figures_of
from assay.traces import Rollout

CALL = {"name": "add", "arguments": {"a": 1}, "result": "1", "error": None}


def figures(expected: list[Any], calls: list[Any]) -> dict[str, float]:
    task = Task(id="t", inputs={"question": "?"}, expected={"calls": expected})
    return figures_of(task, Rollout(prediction={"answer": "", "calls": calls}))


def test_a_run_has_the_figures_that_apply_to_its_task() -> None:
    truth = [{"add": {"a": [1]}}]
    assert figures(truth, [CALL]) == {"adoption_when_needed": 1, "argument_exactness": 1, "calls_per_task": 1}
    assert figures([], [CALL]) == {"abstention_when_not": 0, "calls_per_task": 1}
    assert figures(truth, [{**CALL, "error": "x"}, CALL])["recovery_after_error"] == 1
    assert figures_of(Task(id="t", inputs={"q": 1}), Rollout(prediction={"answer": "5"})) == {}


@pytest.mark.slow
def test_evaluate_reports_both_sides_for_a_program_with_tools(tmp_path: Any) -> None:
    from assay.programs import ToolUser
    from assay.testing import scripted_lm

    def script(request: Any) -> str:
        import json

        fields = request.config.response_format["schema"]["properties"]
        done = "add(" in (request.messages[-1].text or "").split("results")[-1]
        values: dict[str, Any] = {
            "thought": "",
            "action": "answer" if done else "add",
            "also": [],
            "need": 0 if done else 1,
        }
        values |= {"arguments": {"a": 1}, "answer": "1"}
        return json.dumps({name: values[name] for name in fields})

    def add(a: int) -> int:
        return a

    rows = [
        {
            "inputs": {"question": f"add {i}?"},
            "expected": {"calls": [{"add": {"a": [1]}}] if i % 2 else []},
            "split": "val",
        }
        for i in range(10)
    ]
    report = evaluate(
        ToolUser([add]), rubric="tool_user", data=rows, lm=scripted_lm(script), store=tmp_path / "a.db", split="val"
    )
    result = report.to_dict()["result"]
    assert result["tool_use"]["adoption_when_needed"]["mean"] == 1
    assert result["tool_use"]["abstention_when_not"]["mean"] == 0
    assert result["tool_use"]["adoption_when_needed"]["n"] == 5
    assert result["criteria"]["abstention_when_not"] == 0
    assert result["criteria_intervals"]["adoption_when_needed"][0] == pytest.approx(
        1 - 0.599, abs=0.01
    )  # rule of three
    assert result["score"] == 0.5
    assert result["coverage"] == 1
