"""The shipped program `tool_user`: tools of the task and of the program, parallel calls, errors, hostile tools."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.datasets import load_tasks
from assay.errors import BudgetExceeded
from assay.models.limits import limited
from assay.programs import AgentParameters, ToolUser
from assay.programs.toolbox import schema_tool
from assay.rubrics import load_rubric
from assay.testing import scripted_lm
from assay.traces import Recorder, Rollout

ADD = {
    "name": "math.add",
    "description": "Adds.",
    "parameters": {"type": "dict", "properties": {"a": {"type": "integer"}, "b": {"type": "float"}}, "required": ["a"]},
}


def add(a: int, b: float = 1.0) -> float:
    """Adds two numbers."""
    return a + b


def scripted(*turns: Any, prompts: list[str] | None = None) -> Any:
    """A model that gives its next turn as the value of each field, whatever it is called.

    A turn is a list of tools to call, or the arguments of a call; without more turns it answers.
    """
    left = list(turns)

    def script(request: Any) -> str:
        if prompts is not None:
            prompts.append("\n".join(str(message.text) for message in request.messages))
        fields = request.config.response_format["schema"]["properties"]
        if "action" in fields:
            tools = left.pop(0) if left else []
            values = {"action": [*tools, "answer"][0], "also": tools[1:], "need": float(bool(tools)), "thought": "hm"}
        elif "arguments" in fields:
            values = {"arguments": left.pop(0)}
        else:
            values = {"answer": "done"}
        return json.dumps({name: values[name] for name in fields})

    return scripted_lm(script)


def run(agent: Any, lm: Any, **inputs: Any) -> Any:
    with dspy.context(lm=lm, trace=[]):
        return agent(**{"question": "2 + 3?", **inputs})


def test_tools_of_a_task_are_recorded_and_are_the_answer() -> None:
    agent, recorder, rollout = ToolUser(), Recorder(), Rollout()
    with recorder.active(), recorder.rollout(rollout):
        result = run(agent, scripted(["math.add"], {"a": 2, "b": None}), tools=[ADD])
    assert result.calls == [{"name": "math.add", "arguments": {"a": 2}, "result": None, "error": None}]
    assert result.answer == "math.add(a=2)"
    assert [(call.name, call.arguments, call.result) for call in rollout.tools] == [("math.add", {"a": 2}, "recorded")]


def test_several_calls_in_one_step() -> None:
    prompts: list[str] = []
    lm = scripted(["add", "add"], {"a": 1, "b": 1}, {"a": 2, "b": 2}, prompts=prompts)
    result = run(ToolUser([add]), lm)
    assert [call["result"] for call in result.calls] == ["2.0", "4.0"]
    assert lm.scripted.calls == 5  # one decision, two calls, another decision, the answer
    assert "add(a=1, b=1): called" in prompts[2]  # the second call is written with the first in sight
    assert "add(a=1, b=1) = 2.0" in prompts[3]
    assert len(run(ToolUser([add], parallel=False), scripted(["add"], {"a": 1})).calls) == 1


def test_wrong_arguments_and_raised_errors_are_observations() -> None:
    def shop(item: str) -> str:
        if item == "tea":
            raise KeyError("no tea")
        return "12"

    prompts: list[str] = []
    lm = scripted(["shop"], {"item": 3}, ["shop"], {"item": "tea"}, ["shop"], {"item": "jam"}, prompts=prompts)
    result = run(ToolUser([shop]), lm)
    first, second, third = result.calls
    assert first["error"] == "invalid arguments: item: 3 is not of type 'string'"
    assert second["error"] == "KeyError: 'no tea'"
    assert third["result"] == "12"
    assert "error: KeyError: 'no tea'" in prompts[-1]


def test_a_repeated_call_ends_the_tool_use() -> None:
    turns = [turn for _ in range(20) for turn in (["add"], {"a": 2})]
    assert len(run(ToolUser([add]), scripted(*turns)).calls) == 2
    # a recorded call is not made twice: the calls are the answer
    assert (
        len(run(ToolUser(), scripted(*[t for _ in range(20) for t in (["math.add"], {"a": 2})]), tools=[ADD]).calls)
        == 1
    )


def test_the_context_length_bounds_prompts_of_many_tools_and_long_results() -> None:
    def page(number: int) -> str:
        return f"page {number} " + "word " * 5_000

    prompts: list[str] = []
    agent = ToolUser([page], parameters=AgentParameters(context_length=500))
    run(agent, scripted(["page"], {"number": 1}, ["page"], {"number": 2}, prompts=prompts))
    assert "page 2 word" in prompts[-1]
    assert max(map(len, prompts)) < 4_000

    many = [{**ADD, "name": f"tool_{i}", "description": "Does something. " * 50} for i in range(100)]
    result = run(agent, scripted(["tool_7"], {"a": 7}, prompts=prompts), tools=many)
    assert result.calls[0]["name"] == "tool_7"
    assert max(map(len, prompts)) < 10_000  # a choice of 100 names is in the prompt twice


@pytest.mark.timeout(120)
def test_hostile_tools_are_bounded_errors() -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Unreadable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no message")

    def hang() -> None:
        while True:
            time.sleep(0.01)

    def fails() -> None:
        raise Unreadable

    tools: list[Callable[[], Any]] = [
        lambda: "x" * 10_000_000,
        Unprintable,
        lambda: hang(),
        lambda: exit(3),
        lambda: fails(),
    ]
    named = [dspy.Tool(tool, name=f"t{i}", args={}) for i, tool in enumerate(tools)]
    turns = [turn for i in range(len(tools)) for turn in ([f"t{i}"], {})]
    with limited(4.0):  # a quarter of it for each tool
        result = run(ToolUser(named), scripted(*turns))
    big, *others = result.calls
    assert big["result"].endswith("… (10,000,000 characters in all)")
    assert len(big["result"]) < 21_000
    errors = [call["error"] for call in others]
    assert errors[0] == "RuntimeError: no text"
    assert "no result after 1 s" in errors[1]
    assert errors[2] == "SystemExit: 3"
    assert errors[3] == "Unreadable: its message cannot be read (RuntimeError)"
    assert len(json.dumps(result.calls)) < 30_000


def test_a_cap_that_is_reached_inside_of_a_tool_ends_the_run() -> None:
    def asks() -> str:
        raise RuntimeError("wrapped") from BudgetExceeded("the cap")

    with pytest.raises(BudgetExceeded):
        run(ToolUser([asks]), scripted(["asks"], {}))


def test_names_that_clash_or_are_no_words_are_kept_distinct() -> None:
    tools = [
        {"name": "answer", "parameters": {"type": "object", "properties": {"self": {"type": "integer"}}}},
        {"name": "Wetter abfragen!\n[x]", "parameters": {}},
        {"name": "天气", "description": "first"},
        {"name": "天气", "description": "second"},
        {"name": "天气", "description": "second"},
    ]
    prompts: list[str] = []
    turns = (
        ["answer_2"],
        {"self": 1},
        ["Wetter_abfragen!_x_"],
        {"tool": 1, "instance": 2},
        ["天气_2"],
        {"城市": "北京"},
    )
    result = run(ToolUser(), scripted(*turns, prompts=prompts), tools=tools)
    assert [(call["name"], call["arguments"]) for call in result.calls] == [
        ("answer", {"self": 1}),
        ("Wetter abfragen!\n[x]", {"tool": 1, "instance": 2}),
        ("天气", {"城市": "北京"}),
    ]
    assert "天气_3" not in prompts[0]


@pytest.mark.slow
def test_a_program_with_tools_of_its_own_compiles_and_its_artifact_calls_them(tmp_path: Path) -> None:
    (tmp_path / "adder.py").write_text(
        "from assay.programs import ToolUser\n\n"
        "def add(a: int, b: int) -> int:\n    return a + b\n\n"
        "class Adder(ToolUser):\n    def __init__(self):\n        super().__init__([add])\n"
    )

    def script(request: Any) -> str:
        fields = request.config.response_format["schema"]["properties"]
        results = (request.messages[-1].text or "").rpartition("[[ ## results ## ]]")[2]
        wanted = re.search(r"Add (\d+) and (\d+)", request.messages[-1].text or "")
        more = wanted is not None and "add(" not in results
        values = {"thought": "", "action": "add" if more else "answer", "also": [], "need": float(more), "answer": "ok"}
        values["arguments"] = {"a": int(wanted[1]), "b": int(wanted[2])} if wanted else {}
        return json.dumps({name: values[name] for name in fields})

    data = [
        {
            "inputs": {"question": f"Add {i} and {i}." if i % 2 else f"Hello {i}."},
            "expected": {"calls": [{"name": "add", "arguments": {"a": i, "b": i}}] if i % 2 else []},
            "split": ("train", "val", "gate", "test")[i // 2 % 4],
        }
        for i in range(40)
    ]
    report = assay.compile(
        f"{tmp_path}/adder.py:Adder", rubric="tool_user", data=data, lm=scripted_lm(script), max_calls=300,
        optimizer="labeled", out=str(tmp_path / "artifact"), store=str(tmp_path / "a.db"),
    ).to_dict()  # fmt: skip
    measured = assay.evaluate(
        report["artifact"], rubric="tool_user", data=data, lm=scripted_lm(script), store=str(tmp_path / "a.db")
    ).to_dict()  # fmt: skip
    assert measured["result"]["tool_use"]["adoption_when_needed"]["mean"] == 1
    with dspy.context(lm=scripted_lm(script)):
        calls = assay.load(report["artifact"])(question="Add 4 and 5.").calls
    assert [call["result"] for call in calls] == ["9"]


def score(task: Any, *turns: tuple[str, dict[str, Any]]) -> tuple[Any, float]:
    prediction = run(ToolUser(), scripted(*(part for name, made in turns for part in ([name], made))), **task.inputs)
    return prediction, load_rubric("tool_user").score(task, prediction).value


def test_a_corrected_call_recovers_from_the_injected_error() -> None:
    task = next(task for task in load_tasks("tools:errors?size=40") if len(task.inputs["tools"]) == 1)
    (right,) = task.expected["calls"]
    first = task.inputs["tools"][0]["simulation"][1]["arguments"]
    prediction, value = score(task, (right["name"], first), (right["name"], right["arguments"]))
    assert "is not accepted: give the code" in prediction.calls[0]["error"]
    assert prediction.calls[1]["result"] == "done"
    assert value > score(task, (right["name"], first))[1]


def test_a_malformed_simulation_is_named() -> None:
    for cases in ("x", [1], [{"arguments": {}}], [{"arguments": 1, "result": "x"}]):
        with pytest.raises(ValueError, match="the simulation of tool 'a' must be a list of cases"):
            schema_tool({"name": "a", "simulation": cases})
