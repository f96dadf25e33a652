"""Rollouts at the gateway, over real sockets: how they are named, opened, rewarded and ended."""

import time
from typing import Any

import openai
import pytest

from assay.datasets.tasks import task_key
from assay.traces import Verdict
from assay.traces.gateway.sessions import close_abandoned
from rigs.gateway import PARAMETERS, TOOL, Stage, stage as stage, user

# -- names and fields


@pytest.mark.parametrize("how", ["header", "path", "key"])
def test_a_rollout_is_named_by_header_path_or_key(stage: Stage, how: str) -> None:
    given = {"expected": {"answer": "7"}, "tenant": "acme", "data_subject": "ann", "inputs": {"question": "?"}}
    _, opened = stage.manage("/assay/rollouts", {"task_id": "t1", "group": "g1", **given})
    options: dict[str, Any] = {
        "header": {"default_headers": {"x-assay-rollout": opened["id"]}},
        "path": {"base_url": opened["base_url"]},
        "key": {"api_key": opened["api_key"]},
    }[how]
    client = openai.OpenAI(**{"base_url": f"{stage.url}/v1", "api_key": "none", "max_retries": 0, **options})
    for text in ("one", "something else"):  # no growing conversation
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    base = f"/assay/rollouts/{opened['id']}"
    assert stage.manage(f"{base}/reward", {"reward": 0.05, "t": 0, "name": "tidy"})[0] == 200
    assert stage.manage(f"{base}/close", {"reward": 0.75, "prediction": {"answer": "7"}})[0] == 200
    assert stage.manage("/feedback", {"rollout": opened["id"], "rating": 1})[0] == 200
    rollout = stage.rollout()
    assert {name: getattr(rollout, name) for name in given} == given
    assert (rollout.task_id, rollout.group_id, rollout.status) == ("t1", "g1", "done")
    assert (rollout.score, rollout.human_rating, rollout.prediction) == (0.75, 1.0, {"answer": "7"})
    assert [t.step_rewards for t in rollout.transitions] == [{"tidy": 0.05}, {}]


def test_rollouts_opened_with_the_same_inputs_are_of_one_task(stage: Stage) -> None:
    """Two spellings of a task are one task; an id that the client sent stays."""
    for question in ("Where is order 7?", "where is  order 7?"):
        stage.manage("/assay/rollouts", {"inputs": {"question": question}})
    _, opened = stage.manage("/assay/rollouts", {"inputs": {"question": "q"}, "task_id": "mine"})
    stage.ask("q", headers={"x-assay-rollout": opened["id"]})
    first, second, named = stage.rollouts()
    assert first.task_id == second.task_id == first.group_id == second.group_id == task_key(first.inputs)
    assert (named.task_id, named.group_id) == ("mine", "mine")


def test_consent_may_be_a_boolean_or_a_text(stage: Stage) -> None:
    for consent in (True, False, "given", None):
        assert stage.manage("/assay/rollouts", {"task_id": "t", "consent": consent})[0] == 200
    assert [rollout.consent for rollout in stage.rollouts()] == ["yes", "no", "given", None]


def test_calls_are_recorded_with_the_agent_of_their_header(stage: Stage) -> None:
    def as_agent(name: Any) -> None:
        headers = {"x-assay-rollout": "team", **({"x-assay-agent": name} if name else {})}
        stage.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], extra_headers=headers
        )

    for name in ("planner", "Löser".encode(), ""):
        as_agent(name)
    for wrong in ("x" * 65, "a\tb"):
        with pytest.raises(openai.UnprocessableEntityError, match=r"x-assay-agent=.* must be a text of 1 to 64"):
            as_agent(wrong)
    assert [transition.agent for transition in stage.rollout().transitions] == ["planner", "Löser", ""]


def test_an_id_is_unique_and_a_late_call_changes_neither_status_nor_answer(stage: Stage) -> None:
    named = {"x-assay-rollout": "mine"}
    assert [stage.manage("/assay/rollouts", {"id": "mine"})[0] for _ in range(2)] == [200, 422]
    stage.ask("one", headers={**named, "x-assay-end": "0"})
    assert stage.manage("/assay/rollouts/mine/close", {"reward": 0.5})[0] == 200
    assert stage.manage("/assay/rollouts", {"id": "mine"})[0] == 422
    stage.ask("late", headers={**named, "x-assay-end": "1"})
    stage.gateway.rollouts.sweep(all_of_them=True)
    rollout = stage.rollout()
    assert (rollout.status, rollout.score, [t.t for t in rollout.transitions]) == ("done", 0.5, [0, 1])
    assert rollout.prediction == {"answer": "echo: one"}  # the scored one


def test_what_cannot_be_stored_is_refused_with_the_reason(stage: Stage) -> None:
    rollout = stage.manage("/assay/rollouts", {})[1]["id"]
    opening, own = "/assay/rollouts", f"/assay/rollouts/{rollout}"
    for path, body, status, why in (
        (f"{own}/reward", b'{"reward": NaN}', 422, "finite"),
        (f"{own}/reward", b'{"reward": Infinity, "t": 0}', 422, "finite"),
        (f"{own}/reward", b'{"reward": ' + b"9" * 400 + b"}", 422, ""),
        (f"{own}/reward", {"reward": 1.5}, 422, "between 0 and 1"),
        (f"{own}/reward", {"reward": True}, 422, "finite number"),
        (f"{own}/reward", {"reward": 0.5, "t": 0}, 422, "0 turns"),
        (f"{own}/reward", {"reward": 0.5, "t": -1}, 422, "index of a turn"),
        (f"{own}/reward", {"reward": 1e308, "t": 0}, 422, ""),
        (f"{own}/reward", {}, 422, "finite number"),
        (f"{own}/reward", b"not json", 422, "is not JSON"),
        (f"{own}/reward", b"[1]", 422, "JSON object"),
        (f"{own}/close", {"status": "great"}, 422, "great"),
        (f"{own}/close", {"error": {"a": 1}}, 422, "error"),
        ("/feedback", {"rollout": rollout, "rating": 7}, 422, "between 0 and 1"),
        (f"{opening}/nobody/reward", {"reward": 1}, 404, "rollout 'nobody'"),
        (f"{opening}/nobody/close", {}, 404, "rollout 'nobody'"),
        ("/feedback", {"rollout": "nobody", "rating": 0.5}, 404, "rollout 'nobody'"),
        (opening, {"speed": 3, "id": "mine"}, 422, "has no field 'speed'; its fields are id, group, task_id, "),
        (opening, {"inputs": "text"}, 422, "inputs"),
        (opening, {"split": "x" * 1000}, 422, "split"),
        (opening, {"split": "Test"}, 422, "split"),
    ):
        answered, reply = stage.manage(path, body)
        assert (answered, why in reply["error"]["message"]) == (status, True), (path, body, reply)
    assert stage.rollout().score is None


# -- tools


def test_the_result_of_a_tool_is_its_error_if_it_says_so(stage: Stage) -> None:
    for result, failed in (
        ("error: boom", True),
        ("Traceback (most recent call last):\n  …\nValueError: x", True),
        ("ValueError: x", True),
        ('{"isError": true, "content": "boom"}', True),
        ('{"error": {"code": 7}}', True),
        ('{"error": null, "value": 1}', False),
        ('{"error": 0.25}', False),
        ("Errors: none", False),
        ("There was no error: fine", False),
    ):
        call = stage.chat(user("use the tool"), tools=[TOOL])
        told = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": result}
        stage.chat(user("use the tool"), call, told, tools=[TOOL])
        (tool,) = stage.rollouts()[-1].tools
        assert (tool.error, tool.result) == ((result, None) if failed else (None, result))
    stage.chat(user("use the tool #badtool"), tools=[TOOL])
    (tool,) = stage.rollouts()[-1].tools
    assert (tool.arguments, tool.error) == ({"arguments": "{broken"}, "the arguments are not a JSON object")


def test_a_result_that_anthropics_api_marks_is_an_error(stage: Stage) -> None:
    messages: list[Any] = [user("use the tool")]
    tools = [{"name": "calculator", "input_schema": PARAMETERS}]
    body = {"model": "m", "max_tokens": 99, "tools": tools, "messages": messages}
    _, reply = stage.post("messages", body)
    (call,) = [part for part in reply["content"] if part["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "boom", "is_error": True}
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
    stage.post("messages", body)
    (tool,) = stage.rollout().tools
    assert (tool.error, tool.result) == ("boom", None)


# -- ends


@pytest.mark.parametrize("stage", [{"idle_s": 0.2}], indirect=True)
def test_a_rollout_that_is_never_closed_ends_unscored_and_is_counted(stage: Stage) -> None:
    _, opened = stage.manage("/assay/rollouts", {"task_id": "t"})
    stage.ask("found by itself")
    for _ in range(100):
        if not stage.gateway.rollouts.open:
            break
        time.sleep(0.05)
    never, found = sorted(stage.rollouts(), key=lambda rollout: rollout.id != opened["id"])
    assert (never.status, never.score, never.error) == ("error", None, "the rollout was never closed")
    assert (found.status, stage.gateway.stats()["unclosed"]) == ("done", 1)


def test_rollouts_left_open_by_a_killed_gateway_can_be_ended(stage: Stage) -> None:
    for name in ("left", "empty"):
        stage.manage("/assay/rollouts", {"id": name})
    stage.ask("a", headers={"x-assay-rollout": "left"})
    stage.ask("found by its conversation")
    stage.gateway.rollouts.open.clear()  # what a kill leaves: the store alone
    assert stage.manage("/assay/rollouts/left/close", {"reward": 0.8, "status": "bogus"})[0] == 422
    assert [r.score for r in stage.rollouts()] == [None, None, None]
    assert stage.manage("/assay/rollouts/left/close", {"reward": 0.8})[1]["status"] == "done"
    assert stage.manage("/assay/rollouts/left/close", {})[0] == 404
    assert close_abandoned(stage.store, idle_s=3600) == {"done": 0, "error": 0, "running": 2}
    assert close_abandoned(stage.store, idle_s=0) == {"done": 1, "error": 1, "running": 0}
    ended = {r.metadata.get("client_id", "found"): (r.status, r.score, len(r.transitions)) for r in stage.rollouts()}
    assert ended == {"left": ("done", 0.8, 1), "empty": ("error", None, 0), "found": ("done", None, 1)}


@pytest.mark.parametrize("length", [10, 200_000], ids=["whole row", "changes alone"])
@pytest.mark.parametrize("changed", [False, True])
def test_a_score_in_the_store_stays_with_its_prediction(stage: Stage, length: int, changed: bool) -> None:
    question = user("a" * length)
    answer = stage.chat(question)
    assert close_abandoned(stage.store, idle_s=0)["done"] == 1  # while the gateway still holds it open
    scored = stage.rollout()
    scored.score, scored.coverage, scored.rubric, scored.transitions = 0.7, 1.0, "mine", []
    scored.verdicts = [Verdict(criterion="right", grade=0.7)]
    stage.store.put_rollout(scored)
    stage.store.flush()
    if changed:
        stage.chat(question, answer, user("another"))
    assert stage.gateway.rollouts.sweep(all_of_them=True) == 1
    after = stage.rollout()
    if changed:
        assert (after.prediction, after.score, after.rubric) == ({"answer": "echo: another"}, None, "")
    else:
        assert (after.status, after.score, after.coverage, after.rubric) == ("done", 0.7, 1.0, "mine")
        assert after.verdicts == scored.verdicts
