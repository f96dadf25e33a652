"""The final answer of a run: one rule for gateway, recordings in process and imports."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.datasets import Task
from assay.evaluation.stored import task_of, write_score
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.rubrics.steps import tool_executed
from assay.traces import Recorder, Rollout, Store, ToolCall, Transition
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from assay.traces.messages.dialects import answer_of
from assay.traces.messages.final_answer import NO_ANSWER, Ending, answered_with, final_answer, prediction_of
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream

Q = [{"role": "user", "content": "six times seven?"}]
RIGHT = Rubric(name="r", criteria=[Criterion(name="right", check=exact)])


def tool(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"answer": {}}}},
    }


def chat_body(content: str | None, *calls: tuple[str, str]) -> dict[str, Any]:
    listed = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": text}}
        for at, (name, text) in enumerate(calls)
    ]
    return {
        "choices": [{"message": {"role": "assistant", "content": content, **({"tool_calls": listed} if calls else {})}}]
    }


def turn(body: dict[str, Any], answer: dict[str, Any] | None, t: int = 0, **more: Any) -> Transition:
    read = answer_of("chat", answer) if answer is not None else None
    more = {"tools": read.tool_calls(), "output": read.output, **more} if read is not None else more
    return Transition(
        t=t,
        model="m",
        request={"dialect": "chat", "body": {"messages": Q, **body}},
        response=None if answer is None else {"body": answer},
        **more,
    )


@pytest.mark.parametrize(
    ("body", "answer", "value"),
    [
        ({}, chat_body("42"), "42"),
        ({}, chat_body(""), ""),
        ({"tools": [tool("calculator")]}, chat_body("It is 42.", ("note", '{"text": "42"}')), "It is 42."),
        ({"tools": [tool("calculator")]}, chat_body(None, ("calculator", '{"expression": "6*7"}')), None),
        (
            {"tools": [tool("calculator"), tool("final_answer")]},
            chat_body("I am done", ("final_answer", '{"answer": "42"}')),
            "42",
        ),  # smolagents
        (
            {"tools": [tool("calculator"), tool("final_answer")]},
            chat_body("I think", ("calculator", '{"expression": "6*7"}')),
            None,
        ),
        # pydantic-ai, a number
        ({"tools": [tool("final_result")]}, chat_body(None, ("final_result", '{"response": 42}')), 42),
        (
            {"tools": [tool("final_result_City")]},
            chat_body(None, ("final_result_City", '{"name": "Rome", "in": "Italy"}')),
            '{"name": "Rome", "in": "Italy"}',
        ),
        ({}, chat_body(None, ("final_result", '{"cities": ["Rome"]}')), '["Rome"]'),
        ({}, chat_body(None, ("final_result", "{broken")), "{broken"),
        ({}, chat_body(None, ("calculator", "{}"), ("final_result", '{"response": "42"}')), "42"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "Product"}}},
            chat_body(None, ("Product", '{"value": "42"}')),
            "42",
        ),  # instructor
        (
            {"tool_choice": "required", "tools": [tool("calculator"), tool("Product")]},
            chat_body(None, ("Product", '{"value": "42"}')),
            "42",
        ),  # LangChain
        (
            {"tool_choice": "required", "tools": [tool("add"), tool("final_answer")]},
            chat_body(None, ("add", '{"a": 1}')),
            None,
        ),
    ],
)
def test_a_run_ends_with_its_last_text_or_with_the_tool_call_that_ended_it(
    body: dict[str, Any], answer: dict[str, Any], value: Any
) -> None:
    assert answered_with({"dialect": "chat", "body": body}, answer_of("chat", answer)) == Ending(value)


def test_a_tool_with_earlier_results_does_not_end_a_run() -> None:
    body = {"tool_choice": "required", "tools": [tool("calculator")]}
    call = chat_body(None, ("calculator", '{"expression": "6*7"}'))
    assert final_answer([turn(body, call)]).value == "6*7"
    ending = final_answer([turn(body, call), turn(body, call, 1)])
    assert (ending.value, ending.known) == (None, True)


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ('Thought: done.\n<code>\nfinal_answer("42")\n</code>', Ending("42")),
        ("Thought: done.\n<code>\nfinal_answer(answer=[4, 2])\n", Ending("[4, 2]")),  # cut at its stop sequence
        (
            "```py\nx = 6 * 7\nfinal_answer(x)\n```<end_code>",
            Ending(known=False),
        ),  # its computed answer was not recorded
        ("Thought: compute.\n<code>\nx = calculator('6*7')\n</code>", Ending(None)),
        ("<code>\nnot python\n</code>", Ending(None)),
        ("42", Ending("42")),
    ],
)
def test_an_agent_that_writes_code_ends_with_its_final_answer(text: str, ending: Ending) -> None:
    instructions = {
        "role": "system",
        "content": [{"type": "text", "text": "Solve it by code. At the end call final_answer(result)."}],
    }
    answer = answer_of("chat", chat_body(text))
    assert answered_with({"dialect": "chat", "body": {"messages": [instructions, *Q]}}, answer) == ending
    assert answered_with({"dialect": "chat", "body": {"messages": Q}}, answer) == Ending(
        text
    )  # code that was asked for is an answer


def test_dspys_sections_are_the_fields_of_the_answer() -> None:
    text = "[[ ## reasoning ## ]]\nsix sevens\n\n[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]"
    assert prediction_of(text) == {"reasoning": "six sevens", "answer": "42"}
    assert prediction_of("see [[ ## answer ## ]]") == {"answer": "see [[ ## answer ## ]]"}
    assert prediction_of(None) is None


def scored(*turns: Transition, **fields: Any) -> tuple[float, Rollout]:
    rollout = Rollout(status="done", expected={"answer": "42"}, transitions=list(turns), **fields)
    return write_score(RIGHT, task_of(rollout), rollout, Recorder(None)), rollout


def test_a_rollout_without_a_prediction_is_scored_by_the_answer_of_its_calls() -> None:
    value, rollout = scored(
        turn({}, chat_body(None, ("calculator", "{}"))),
        turn({}, chat_body(None, ("final_result", '{"response": "42"}')), 1),
    )
    assert (value, rollout.prediction) == (1.0, {"answer": "42"})


def test_a_run_that_used_all_its_steps_scores_zero() -> None:
    value, rollout = scored(
        *(turn({}, chat_body("Let me see", ("calculator", "{}")), at) for at in range(2)),
        turn({}, chat_body(None, ("calculator", "{}")), 2),
    )
    assert (value, rollout.prediction, rollout.error) == (0.0, None, NO_ANSWER)


@pytest.mark.parametrize(
    "last",
    [
        turn({}, None, 1),  # no response was recorded
        turn({}, chat_body(None), 1, completion_tokens=5),  # five tokens, none of them recorded
        turn({"messages": []}, chat_body(None), 1),  # content is switched off
    ],
)
def test_a_run_with_an_unrecorded_last_answer_is_unscored(last: Transition) -> None:
    value, rollout = scored(turn({}, chat_body(None, ("calculator", "{}"))), last)
    assert math.isnan(value)
    assert (rollout.score, rollout.prediction) == (None, None)


def test_an_empty_answer_scores_zero() -> None:
    assert scored(turn({}, chat_body("")))[0] == 0.0


def test_recording_in_process_follows_the_same_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    task = Task(id="t", inputs={"q": "six times seven?"}, expected={"answer": "42"})
    with assay.record(task, rubric="r.yaml", store="s.db") as run:
        run.call(Q, "42", model="m")
    assert (run.rollout.score, run.rollout.prediction) == (1.0, {"answer": "42"})


def test_a_tool_without_a_recorded_result_earns_no_step_reward() -> None:
    rubric = Rubric(
        name="s",
        criteria=[
            Criterion(name="right", check=exact),
            Criterion(name="ran", scope="step", weight=0.05, check=tool_executed),
        ],
    )
    calls = [
        ToolCall(name="a", arguments={}),
        ToolCall(name="b", arguments={}, result="42"),
        ToolCall(name="c", arguments={}, error="no"),
    ]
    steps = [[calls[0]], [calls[1]], calls[:2], calls]
    rollout = Rollout(
        expected={"answer": "42"},
        transitions=[turn({}, chat_body("x"), t, tools=tools) for t, tools in enumerate(steps)],
    )
    earned = rubric.step_rewards(task_of(rollout), rollout)
    assert [entry.get("ran") for entry in earned] == [None, 0.05, 0.025, pytest.approx(0.05 / 3)]


# -- through the gateway


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[Gateway, str]]:
    with Store(tmp_path / "s.db") as store, served(ScriptedUpstream().app()) as behind:
        made = Gateway(store, upstream_of("echo", base=behind))
        with served(made.app()) as url:
            yield made, url


def ask(url: str, *messages: dict[str, Any], **body: Any) -> Any:
    status, reply = post(f"{url}/v1/chat/completions", {"model": "m", "messages": list(messages), **body})
    assert status == 200
    return reply["choices"][0]["message"]


def recorded(gateway: Gateway) -> list[Rollout]:
    gateway.store.flush()
    return [gateway.store.rollout(r.id) for r in gateway.store.rollouts()][::-1]


def test_text_before_the_last_tool_calls_is_not_the_answer(gateway: tuple[Gateway, str]) -> None:
    made, url = gateway
    both = {"role": "user", "content": "use the tool #both"}
    ask(url, both, tools=[tool("calculator"), tool("final_answer")])
    assert [r.prediction for r in recorded(made)] == [None]
