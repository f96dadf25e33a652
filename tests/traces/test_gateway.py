"""The gateway over real sockets: recorded calls, how rollouts are named, opened and ended."""

import time
from typing import Any

import openai
import pytest
from gateway_stage import Stage, stage as stage

from assay.datasets.tasks import task_key
from rigs.serving import post

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def test_invalid_arguments_of_a_tool_are_kept_with_the_error(stage: Stage) -> None:
    stage.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "use the tool #badtool"}], tools=[TOOL]
    )  # type: ignore[list-item]
    (tool,) = stage.rollouts()[0].tools
    assert (tool.arguments, tool.error) == ({"arguments": "{broken"}, "the arguments are not a JSON object")


def test_a_growing_conversation_is_one_rollout_and_equal_ones_are_a_group(stage: Stage) -> None:
    for _ in range(3):  # three samples of one task, answered alike
        stage.chat("one")
    for _ in range(3):  # each is continued
        stage.chat("one", "echo: one", "two")
    stage.chat("other")
    rollouts = stage.rollouts()
    assert sorted(len(r.transitions) for r in rollouts) == [1, 2, 2, 2]
    groups = {r.group_id for r in rollouts if len(r.transitions) == 2}
    assert len(groups) == 1
    assert all([t.t for t in r.transitions] == list(range(len(r.transitions))) for r in rollouts)


def test_responses_continue_by_their_id(stage: Stage) -> None:
    first = stage.client.responses.create(model="m", input="one")
    stage.client.responses.create(model="m", input="two", previous_response_id=first.id)
    (rollout,) = stage.rollouts()
    assert [t.output for t in rollout.transitions] == ["echo: one", "echo: two"]


@pytest.mark.parametrize("how", ["header", "path", "key"])
def test_a_rollout_is_named_by_header_path_or_key(stage: Stage, how: str) -> None:
    fields = {
        "task_id": "t1",
        "group": "g1",
        "inputs": {"question": "?"},
        "expected": {"answer": "7"},
        "tenant": "acme",
        "data_subject": "ann",
    }
    _, opened = stage.manage("/assay/rollouts", fields)
    options: dict[str, Any] = {"base_url": f"{stage.url}/v1", "api_key": "none", "max_retries": 0}
    options.update(
        {
            "header": {"default_headers": {"x-assay-rollout": opened["id"]}},
            "path": {"base_url": opened["base_url"]},
            "key": {"api_key": opened["api_key"]},
        }[how]
    )
    client = openai.OpenAI(**options)
    for text in ("one", "something else"):  # no growing conversation
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    assert stage.manage(f"/assay/rollouts/{opened['id']}/reward", {"reward": 0.05, "t": 0, "name": "tidy"})[0] == 200
    assert (
        stage.manage(f"/assay/rollouts/{opened['id']}/close", {"reward": 0.75, "prediction": {"answer": "7"}})[0] == 200
    )
    assert stage.manage("/feedback", {"rollout": opened["id"], "rating": 1})[0] == 200
    (rollout,) = stage.rollouts()
    assert (rollout.task_id, rollout.group_id, rollout.expected, rollout.tenant) == (
        "t1",
        "g1",
        {"answer": "7"},
        "acme",
    )
    assert (rollout.score, rollout.human_rating, rollout.status, rollout.prediction) == (
        0.75,
        1.0,
        "done",
        {"answer": "7"},
    )
    assert [t.step_rewards for t in rollout.transitions] == [{"tidy": 0.05}, {}]


def test_calls_are_recorded_with_the_agent_of_their_header(stage: Stage) -> None:
    for name in ("planner", "Löser", ""):
        stage.chat(
            name, extra_headers={"x-assay-rollout": "team", **({"x-assay-agent": name.encode()} if name else {})}
        )
    (rollout,) = stage.rollouts()
    assert [transition.agent for transition in rollout.transitions] == ["planner", "Löser", ""]
    for wrong in ("x" * 65, "a\tb"):
        with pytest.raises(openai.UnprocessableEntityError, match=r"x-assay-agent=.* must be a text of 1 to 64"):
            stage.chat("no", extra_headers={"x-assay-rollout": "team", "x-assay-agent": wrong})
    assert len(stage.rollouts()[0].transitions) == 3


def test_invalid_rewards_are_refused_with_the_reason(stage: Stage) -> None:
    _, opened = stage.manage("/assay/rollouts", {})
    base = "/assay/rollouts"
    for body, status, why in (
        (b'{"reward": NaN}', 422, "finite"),
        (b'{"reward": Infinity, "t": 0}', 422, "finite"),
        ({"reward": 1.5}, 422, "between 0 and 1"),
        ({"reward": True}, 422, "finite number"),
        ({"reward": 0.5, "t": 0}, 422, "0 turns"),
        ({"reward": 0.5, "t": -1}, 422, "index of a turn"),
        ({}, 422, "finite number"),
        (b"not json", 422, "is not JSON"),
        (b"[1]", 422, "JSON object"),
    ):
        answered, reply = stage.manage(f"{base}/{opened['id']}/reward", body)
        assert (answered, why in reply["error"]["message"]) == (status, True), (body, reply)
    assert stage.manage(f"{base}/nobody/reward", {"reward": 1})[0] == 404
    assert stage.manage(f"{base}/nobody/close", {})[0] == 404
    assert stage.manage(f"{base}/{opened['id']}/close", {"status": "great"})[0] == 422
    assert stage.manage("/feedback", {"rollout": "nobody", "rating": 0.5})[0] == 404
    for path, body in (
        (f"{base}/nobody/reward", {"reward": 1}),
        (f"{base}/nobody/close", {}),
        ("/feedback", {"rollout": "nobody", "rating": 0.5}),
    ):
        assert "rollout 'nobody'" in str(
            stage.manage(path, body)[1]
        )  # the name that was given, not the id that the store made of it
    assert stage.manage("/feedback", {"rollout": opened["id"], "rating": 7})[0] == 422
    assert stage.manage(base, {"speed": 3})[0] == 422
    assert stage.manage(base, {"inputs": "text"})[0] == 422
    assert stage.manage(base, {"split": "x" * 1000})[0] == 422
    assert stage.rollouts()[0].score is None


@pytest.mark.parametrize("stage", [{"idle_s": 0.2}], indirect=True)
def test_a_rollout_that_is_never_closed_ends_unscored_and_is_counted(stage: Stage) -> None:
    _, opened = stage.manage("/assay/rollouts", {"task_id": "t"})
    stage.chat("found by itself")
    for _ in range(100):
        if not stage.gateway.rollouts.open:
            break
        time.sleep(0.05)
    by_id = {r.id: r for r in stage.rollouts()}
    never = by_id.pop(opened["id"])
    assert (never.status, never.score, never.error) == ("error", None, "the rollout was never closed")
    assert [r.status for r in by_id.values()] == ["done"]
    assert stage.gateway.stats()["unclosed"] == 1


def test_rollouts_opened_with_the_same_inputs_are_of_one_task(stage: Stage) -> None:
    """Two spellings of a task are one task; an id that the client sent stays."""
    for question in ("Where is order 7?", "where is  order 7?"):
        stage.manage("/assay/rollouts", {"inputs": {"question": question}})
    _, opened = stage.manage("/assay/rollouts", {"inputs": {"question": "q"}, "task_id": "mine"})
    stage.client.with_options(base_url=opened["base_url"], api_key=opened["api_key"]).chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": "q"}]
    )
    first, second, named = stage.rollouts()
    assert first.task_id == second.task_id == first.group_id == second.group_id == task_key(first.inputs)
    assert (named.task_id, named.group_id) == ("mine", "mine")


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        ("error: boom", True),
        ("Traceback (most recent call last):\n  …\nValueError: x", True),
        ("ValueError: x", True),
        ('{"isError": true, "content": "boom"}', True),
        ('{"error": {"code": 7}}', True),
        ('{"error": null, "value": 1}', False),
        ('{"error": 0.25}', False),
        ("Errors: none", False),
        ("There was no error: fine", False),
    ],
)
def test_a_result_that_says_that_the_tool_failed_is_its_error(stage: Stage, result: str, failed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "use the tool"}]
    answer = stage.client.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # type: ignore[list-item]
    message = answer.choices[0].message
    call_id = message.tool_calls[0].id  # type: ignore[index]
    messages += [message, {"role": "tool", "tool_call_id": call_id, "content": result}]
    stage.client.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # type: ignore[list-item]
    (tool,) = stage.rollouts()[0].tools
    assert (tool.error, tool.result) == ((result, None) if failed else (None, result))


def test_a_result_that_anthropics_api_marks_is_an_error(stage: Stage) -> None:
    tools = [{"name": "calculator", "input_schema": TOOL["function"]["parameters"]}]  # type: ignore[index]
    messages: list[Any] = [{"role": "user", "content": "use the tool"}]
    body = {"model": "m", "max_tokens": 99, "tools": tools, "messages": messages}
    _, reply = post(f"{stage.url}/v1/messages", body)
    (call,) = [part for part in reply["content"] if part["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "boom", "is_error": True}
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
    post(f"{stage.url}/v1/messages", body)
    (tool,) = stage.rollouts()[0].tools
    assert (tool.error, tool.result) == ("boom", None)
