"""The final answer of a run: one rule for gateway, recordings in process and imports."""

import math
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.datasets import Task
from assay.evaluation.stored import task_of, write_score
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.rubrics.steps import tool_executed
from assay.traces import Recorder, Rollout, ToolCall, Transition
from assay.traces.messages.dialects import answer_of
from assay.traces.messages.final_answer import NO_ANSWER, Ending, answered_with, final_answer, prediction_of
from rigs.gateway import Stage, stage as stage, user

Q = [user("six times seven?")]
RIGHT = Rubric(name="r", criteria=[Criterion(name="right", check=exact)])
CALLED = ("calculator", '{"expression": "6*7"}')
CITY = '{"name": "Rome", "in": "Italy"}'
PRODUCT = ("Product", '{"value": "42"}')


def tools(*names: str) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"answer": {}}}
    return [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]


def chat_body(content: str | None, *calls: tuple[str, str]) -> dict[str, Any]:
    listed = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": text}}
        for at, (name, text) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, **({"tool_calls": listed} if calls else {})}
    return {"choices": [{"message": message}]}


def turn(body: dict[str, Any], answer: dict[str, Any] | None, t: int = 0, **more: Any) -> Transition:
    request = {"dialect": "chat", "body": {"messages": Q, **body}}
    if answer is None:
        return Transition(t=t, model="m", request=request, response=None, **more)
    read = answer_of("chat", answer)
    more = {"tools": read.tool_calls(), "output": read.output, **more}
    return Transition(t=t, model="m", request=request, response={"body": answer}, **more)


@pytest.mark.parametrize(
    ("body", "answer", "value"),
    [
        ({}, chat_body("42"), "42"),
        ({}, chat_body(""), ""),
        ({"tools": tools("calculator")}, chat_body("It is 42.", ("note", '{"text": "42"}')), "It is 42."),
        ({"tools": tools("calculator")}, chat_body(None, CALLED), None),
        # smolagents
        ({"tools": tools("calculator", "final_answer")}, chat_body("Done", ("final_answer", '{"answer": "42"}')), "42"),
        ({"tools": tools("calculator", "final_answer")}, chat_body("I think", CALLED), None),
        # pydantic-ai: a number, an object, a list, what cannot be read, and after another call
        ({"tools": tools("final_result")}, chat_body(None, ("final_result", '{"response": 42}')), 42),
        ({"tools": tools("final_result_City")}, chat_body(None, ("final_result_City", CITY)), CITY),
        ({}, chat_body(None, ("final_result", '{"cities": ["Rome"]}')), '["Rome"]'),
        ({}, chat_body(None, ("final_result", "{broken")), "{broken"),
        ({}, chat_body(None, ("calculator", "{}"), ("final_result", '{"response": "42"}')), "42"),
        # instructor
        ({"tool_choice": {"type": "function", "function": {"name": "Product"}}}, chat_body(None, PRODUCT), "42"),
        # LangChain
        ({"tool_choice": "required", "tools": tools("calculator", "Product")}, chat_body(None, PRODUCT), "42"),
        ({"tool_choice": "required", "tools": tools("calculator", "final_answer")}, chat_body(None, CALLED), None),
    ],
)
def test_a_run_ends_with_its_last_text_or_with_the_tool_call_that_ended_it(
    body: dict[str, Any], answer: dict[str, Any], value: Any
) -> None:
    assert answered_with({"dialect": "chat", "body": body}, answer_of("chat", answer)) == Ending(value)


def test_a_tool_with_earlier_results_does_not_end_a_run() -> None:
    body, call = {"tool_choice": "required", "tools": tools("calculator")}, chat_body(None, CALLED)
    assert final_answer([turn(body, call)]).value == "6*7"
    ending = final_answer([turn(body, call), turn(body, call, 1)])
    assert (ending.value, ending.known) == (None, True)


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ('Thought: done.\n<code>\nfinal_answer("42")\n</code>', Ending("42")),
        ("Thought: done.\n<code>\nfinal_answer(answer=[4, 2])\n", Ending("[4, 2]")),  # cut at its stop sequence
        # its computed answer was not recorded
        ("```py\nx = 6 * 7\nfinal_answer(x)\n```<end_code>", Ending(known=False)),
        ("Thought: compute.\n<code>\nx = calculator('6*7')\n</code>", Ending(None)),
        ("<code>\nnot python\n</code>", Ending(None)),
        ("42", Ending("42")),
    ],
)
def test_an_agent_that_writes_code_ends_with_its_final_answer(text: str, ending: Ending) -> None:
    told = [{"type": "text", "text": "Solve it by code. At the end call final_answer(result)."}]
    messages, answer = [{"role": "system", "content": told}, *Q], answer_of("chat", chat_body(text))
    assert answered_with({"dialect": "chat", "body": {"messages": messages}}, answer) == ending
    # code that was asked for is an answer
    assert answered_with({"dialect": "chat", "body": {"messages": Q}}, answer) == Ending(text)


def test_dspys_sections_are_the_fields_of_the_answer() -> None:
    text = "[[ ## reasoning ## ]]\nsix sevens\n\n[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]"
    assert prediction_of(text) == {"reasoning": "six sevens", "answer": "42"}
    assert prediction_of("see [[ ## answer ## ]]") == {"answer": "see [[ ## answer ## ]]"}
    assert prediction_of(None) is None


# -- scores


@pytest.mark.parametrize(
    ("answers", "score", "prediction"),
    [
        ([chat_body(None, CALLED), chat_body(None, ("final_result", '{"response": "42"}'))], 1.0, {"answer": "42"}),
        ([chat_body("Let me see", CALLED), chat_body(None, CALLED)], 0.0, None),  # it used all its steps
        ([chat_body("")], 0.0, {"answer": ""}),
    ],
)
def test_a_rollout_without_a_prediction_is_scored_by_the_answer_of_its_calls(
    answers: list[dict[str, Any]], score: float, prediction: Any
) -> None:
    turns = [turn({}, answer, t) for t, answer in enumerate(answers)]
    rollout = Rollout(status="done", expected={"answer": "42"}, transitions=turns)
    assert write_score(RIGHT, task_of(rollout), rollout, Recorder(None)) == score
    assert (rollout.prediction, rollout.error) == (prediction, NO_ANSWER if prediction is None else None)


@pytest.mark.parametrize(
    "last",
    [
        turn({}, None, 1),  # no response was recorded
        turn({}, chat_body(None), 1, completion_tokens=5),  # five tokens, none of them recorded
        turn({"messages": []}, chat_body(None), 1),  # content is switched off
    ],
)
def test_a_run_with_an_unrecorded_last_answer_is_unscored(last: Transition) -> None:
    turns = [turn({}, chat_body(None, CALLED)), last]
    rollout = Rollout(status="done", expected={"answer": "42"}, transitions=turns)
    assert math.isnan(write_score(RIGHT, task_of(rollout), rollout, Recorder(None)))
    assert (rollout.score, rollout.prediction) == (None, None)


def test_recording_in_process_follows_the_same_rule(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    task = Task(id="t", inputs={"q": "six times seven?"}, expected={"answer": "42"})
    with assay.record(task, rubric="r.yaml", store="s.db") as run:
        run.call(Q, "42", model="m")
    assert (run.rollout.score, run.rollout.prediction) == (1.0, {"answer": "42"})


def test_text_before_the_last_tool_calls_is_not_the_answer(stage: Stage) -> None:
    stage.chat(user("use the tool #both"), tools=tools("calculator", "final_answer"))
    assert stage.rollout().prediction is None


def test_a_tool_without_a_recorded_result_earns_no_step_reward() -> None:
    ran = Criterion(name="ran", scope="step", weight=0.05, check=tool_executed)
    pending, done = ToolCall(name="a", arguments={}), ToolCall(name="b", arguments={}, result="42")
    steps = [[pending], [done], [pending, done], [pending, done, ToolCall(name="c", arguments={}, error="no")]]
    turns = [turn({}, chat_body("x"), t, tools=called) for t, called in enumerate(steps)]
    rollout = Rollout(expected={"answer": "42"}, transitions=turns)
    earned = Rubric(name="s", criteria=[*RIGHT.criteria, ran]).step_rewards(task_of(rollout), rollout)
    assert [entry.get("ran") for entry in earned] == [None, 0.05, 0.025, pytest.approx(0.05 / 3)]
