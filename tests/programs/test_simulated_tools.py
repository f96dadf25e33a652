"""`tool_user` on generated tasks whose tools have simulated results: two steps, and errors to correct."""

import json
from typing import Any

import dspy
import pytest

from assay.datasets import load_tasks
from assay.programs import ToolUser
from assay.programs.toolbox import schema_tool
from assay.rubrics import load_rubric
from assay.testing import scripted_lm


def scripted(*turns: tuple[str, dict[str, Any]], prompts: list[str]) -> Any:
    """A model that makes these calls in turn, then answers."""
    left = list(turns)

    def script(request: Any) -> str:
        prompts.append("\n".join(str(message.text) for message in request.messages))
        fields = request.config.response_format["schema"]["properties"]
        if "action" in fields:
            values = {"action": left[0][0] if left else "answer", "also": [], "need": float(bool(left)), "thought": ""}
        elif "arguments" in fields:
            values = {"arguments": left.pop(0)[1]}
        else:
            values = {"answer": "done"}
        return json.dumps({name: values[name] for name in fields})

    return scripted_lm(script)


def score(task: Any, *turns: tuple[str, dict[str, Any]], prompts: list[str]) -> tuple[Any, float]:
    with dspy.context(lm=scripted(*turns, prompts=prompts), trace=[]):
        prediction = ToolUser()(**task.inputs)
    return prediction, load_rubric("tool_user").score(task, prediction).value


def test_a_corrected_call_recovers_from_the_injected_error() -> None:
    task = next(task for task in load_tasks("tools:errors?size=40") if len(task.inputs["tools"]) == 1)
    (right,) = task.expected["calls"]
    first = task.inputs["tools"][0]["simulation"][1]["arguments"]
    prompts: list[str] = []
    prediction, value = score(task, (right["name"], first), (right["name"], right["arguments"]), prompts=prompts)
    assert "is not accepted: give the code" in prediction.calls[0]["error"]
    assert prediction.calls[1]["result"] == "done"
    assert value > score(task, (right["name"], first), prompts=[])[1]


def test_a_malformed_simulation_is_named() -> None:
    for cases in ("x", [1], [{"arguments": {}}], [{"arguments": 1, "result": "x"}]):
        with pytest.raises(ValueError, match="the simulation of tool 'a' must be a list of cases"):
            schema_tool({"name": "a", "simulation": cases})
