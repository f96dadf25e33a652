"""The gateway over real sockets: how rollouts are named, opened and ended; models behind it and their errors."""

import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from assay.datasets.tasks import task_key
from assay.errors import ConfigError
from assay.traces import Store, Verdict
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.sessions import close_abandoned
from assay.traces.gateway.upstreams import HttpUpstream, LitellmUpstream, upstream_of
from rigs.gateway import (
    CHAT,
    PARAMETERS,
    PATHS,
    TOOL,
    Stage,
    body_of,
    opened_stage,
    stage as stage,
    through_litellm,
    user,
)
from rigs.serving import get, served
from rigs.upstream import ScriptedUpstream

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
    assert stage.manage("/assay/rollouts/mine/close", {"reward": 0.9, "prediction": "other"})[0] == 404
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


# -- models


def test_another_model_answers_new_rollouts_while_open_ones_keep_theirs(stage: Stage) -> None:
    first = stage.chat(user("one"))
    other = ScriptedUpstream(name="other")
    with served(other.app()) as behind:
        stage.gateway.serve_model(HttpUpstream("newer", behind))
        stage.chat(user("one"), first, user("two"))
        stage.chat(user("a new one"))
        assert get(f"{stage.url}/v1/models")["data"][0]["id"] == "other"
    assert [(r.model, [t.model for t in r.transitions]) for r in stage.rollouts()] == [
        ("echo", ["echo", "echo"]),
        ("newer", ["newer"]),
    ]
    assert (stage.upstream.calls, other.calls) == (2, 1)
    assert stage.manage("/assay/model", {"model": "embedded/nobody"})[0] == 500
    moved = {"model": "mistral/some", "upstream": "http://127.0.0.1:9"}
    assert stage.manage("/assay/model", moved)[1]["model"] == "mistral/some"
    assert isinstance(stage.gateway.upstream, LitellmUpstream)  # an address is not taken from a caller


@pytest.mark.parametrize("stage", [{"one_server": True, "upstream_key": "upstream-secret"}], indirect=True)
def test_another_model_of_the_same_server_keeps_its_address_and_key(stage: Stage) -> None:
    served_model = {"model": "my-lora", "weights": "", "adapters": []}
    assert stage.manage("/assay/model", {"model": "my-lora"}) == (200, served_model)
    stage.chat(user("to the adapter"))
    assert stage.upstream.headers[-1]["Authorization"] == "Bearer upstream-secret"
    assert stage.call().model == "my-lora"


def test_a_row_names_the_model_that_the_answer_names(tmp_path: Path) -> None:
    with opened_stage(tmp_path, ScriptedUpstream(name="small-2025-01"), model=None) as stage:
        for dialect in PATHS:
            assert stage.ask("a", dialect) == 200
            stage.stream(dialect, body_of(dialect))
        assert {rollout.model for rollout in stage.rollouts()} == {"small-2025-01"}
        assert [call.model for call in stage.calls()] == ["small-2025-01"] * 2 * len(PATHS)
        assert stage.ask("#500", "gemini") == 500
        assert stage.calls()[-1].model == "m"  # of the path


@pytest.mark.parametrize("stage", [{"model": "openai/tuned"}], indirect=True)
def test_rows_have_the_model_passed_to_serve(stage: Stage) -> None:
    stage.chat(user("a"))
    assert (stage.rollout().model, stage.call().model) == ("openai/tuned", "openai/tuned")


@pytest.mark.parametrize("model", ["stockbot-1", "nobody/stockbot-1"])
def test_a_model_of_no_known_provider_is_refused_before_any_call(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=f"model='{model}' names no provider.*PROVIDER/NAME.*upstream"):
        upstream_of(model)
    assert capfd.readouterr().out == ""  # litellm's own advice is not for standard output
    assert upstream_of("gpt-4o").name == "gpt-4o"


def test_litellm_answers_in_all_dialects_for_other_providers(tmp_path: Path) -> None:
    with opened_stage(tmp_path, upstream=through_litellm) as stage:
        for dialect in ("chat", "messages", "responses"):
            assert stage.ask("hello there", dialect) == 200
            assert stage.stream(dialect, body_of(dialect, "hello there"))
        status, reply = stage.post("chat", body_of("chat", "#429"))
        assert (status, "scripted 429" in reply["error"]["message"]) == (429, True)
        calls = stage.calls()
    assert [call.output for call in calls if call.error is None] == ["echo: hello there"] * 6
    assert len(calls) == 7


# -- many, or none that answers


@pytest.mark.slow
def test_streaming_clients_at_once_lose_nothing(stage: Stage) -> None:
    texts = {f"client {number} says a few words" for number in range(100)}

    def streamed(text: str) -> str:
        chunks = stage.client.chat.completions.create(model="m", messages=[user(text)], stream=True)  # type: ignore[list-item]
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(len(texts)) as clients:
        assert set(clients.map(streamed, texts)) == {f"echo: {text}" for text in texts}
    stage.settled(len(texts))
    assert {call.output for call in stage.calls()} == {f"echo: {text}" for text in texts}
    assert stage.gateway.stats()["unrecorded"] == 0


class HangingAgent:
    """A deployed agent that answers once `released`, or at once if it is asked to."""

    counts: Mapping[tuple[str, str, str], int] = {}
    seconds: Mapping[tuple[str, str], float] = {}
    fallbacks: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.released, self.waiting = threading.Event(), threading.Semaphore(0)

    def __call__(self, inputs: Mapping[str, Any], **fields: Any) -> Any:
        class Answer(dict[str, Any]):
            rollout, version = "r1", "support@1"

        if inputs["question"] == "hang":
            self.waiting.release()
            self.released.wait(120)
        return Answer(answer=inputs["question"])


def test_deployed_agents_that_hang_do_not_hold_up_others(tmp_path: Path) -> None:
    agent, hanging = HangingAgent(), 40  # more than asyncio's own pool of threads has on any small machine
    with opened_stage(tmp_path, agents={"support": agent}) as stage, ThreadPoolExecutor(hanging) as clients:

        def answer(question: str) -> str:
            return str(stage.manage("/agents/support", {"inputs": {"question": question}})[1]["outputs"]["answer"])

        try:
            waiting = [clients.submit(answer, "hang") for _ in range(hanging)]
            assert all(agent.waiting.acquire(timeout=120) for _ in waiting)
            assert answer("now") == "now"
        finally:
            agent.released.set()
        assert {future.result() for future in waiting} == {"hang"}


def test_errors_and_rate_limits_of_the_upstream_are_forwarded_unchanged(stage: Stage) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        stage.client.chat.completions.create(model="m", messages=[user("#429")])  # type: ignore[list-item]
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.body["message"] == "scripted 429"  # type: ignore[index]
    assert (stage.ask("#500"), stage.ask("#die")) == (500, 502)
    assert stage.stream(PATHS["chat"], body_of("chat", "#garbage")) == b"{this is no json"
    *refused, died, garbage = [call.error or "" for call in stage.calls()]
    assert [error[:8] for error in refused] == ["HTTP 429", "HTTP 500"]
    assert (bool(died), "could not be read" in garbage) == (True, True)
    stage.gateway.rollouts.sweep(all_of_them=True)
    assert {(rollout.status, rollout.score) for rollout in stage.rollouts()} == {("error", None)}


def test_a_call_of_an_unreachable_server_is_stored(tmp_path: Path) -> None:
    with opened_stage(tmp_path, upstream=lambda behind: HttpUpstream("gone", "http://127.0.0.1:9")) as stage:
        assert stage.post("chat", {"messages": []})[0] == 502
        assert stage.gateway.stats()["stored"] == 1


@pytest.mark.parametrize("method", ["store.put_transition", "rollouts.register_call"])
def test_a_call_that_cannot_be_recorded_is_answered_and_counted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no space left")

    part, name = method.split(".")
    monkeypatch.setattr(getattr(stage.gateway, part), name, refuse)
    assert stage.chat(user("hello"))["content"] == "echo: hello"
    counts = get(f"{stage.url}/assay/stats", **stage.owner)
    assert [counts[name] for name in ("calls", "stored", "unrecorded")] == [1, 0, 1]


# -- requests


@pytest.mark.parametrize("stage", [{"max_body": 1 << 20, "upstream_key": "secret"}], indirect=True)
def test_large_and_nested_bodies_unknown_paths_and_invalid_json_are_refused(stage: Stage) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    for path, body, status, why in (
        ("chat", body_of("chat", "x" * (1 << 20)), 413, "larger than 1 MB"),
        ("chat", b"{broken", 422, ""),
        ("chat", {"messages": [{"role": "user", "content": deep}]}, 422, "nested more than 200 deep"),
        ("/v1/embeddings", {"input": "x"}, 403, "with the gateway's key"),
    ):
        answered, reply = stage.post(path, body)
        assert (answered, why in reply["error"]["message"]) == (status, True)
    assert stage.gateway.stats()["refused_paths"] == {"/v1/embeddings": 1}
    assert (stage.upstream.calls, stage.rollouts()) == (0, [])
    wide = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 400}]
    odd = [{"role": "assistant", "tool_calls": [{"function": "text"}]}, user("x"), "text", 7]
    assert [stage.post("chat", {**CHAT, "messages": messages})[0] for messages in (wide, odd)] == [200, 200]


def test_requests_of_pages_of_other_sites_are_refused(stage: Stage) -> None:
    assert stage.ask("x", headers={"Origin": "http://evil.example"}) == 403
    assert stage.ask("x", headers={"Origin": "http://localhost:3000"}) == 200
    assert stage.upstream.calls == 1


# -- keys


def test_a_caller_can_neither_choose_a_server_nor_obtain_a_key(tmp_path: Path) -> None:
    evil = ScriptedUpstream()
    with opened_stage(tmp_path, upstream=through_litellm) as stage, served(evil.app()) as elsewhere:
        address = f"{elsewhere}/v1"
        assert stage.ask("x", api_base=address, base_url=address, api_key="sk-theirs") == 200
        assert (stage.upstream.calls, evil.calls) == (1, 0)
        assert "sk-theirs" not in json.dumps(stage.call().request)


def test_keys_that_a_server_echoes_or_a_body_contains_are_not_stored(stage: Stage) -> None:
    more = {"extra_body": {"api_key": "sk-verysecret-2", "top_k": 3}}
    assert stage.ask("#401", headers={"Authorization": "Bearer sk-verysecret-1"}) == 401
    assert stage.ask("x", headers={"Authorization": "Bearer sk-verysecret-1"}, **more) == 200
    failed, answered = stage.calls()
    assert "Bearer [key]" in str(failed.error)
    assert answered.request["body"]["extra_body"] == {"top_k": 3}
    assert "verysecret" not in str(stage.calls())


def test_a_key_that_is_short_or_missing_beyond_loopback_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        for wrong, why in (({"host": "0.0.0.0"}, "set the key that callers send"), ({"key": "short"}, "at least 8")):
            with pytest.raises(ConfigError, match=why):
                Gateway(store, HttpUpstream("x", "http://x"), **wrong)  # type: ignore[arg-type]
        keys = {Gateway(store, HttpUpstream("x", "http://x")).access.key for _ in range(3)}
    assert (len(keys), min(map(len, keys)) >= 32) == (3, True)
