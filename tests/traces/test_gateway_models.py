"""Models behind the gateway: servers, LiteLLM, deployed agents; their errors, names and keys; many clients at once."""

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from assay.errors import ConfigError
from assay.traces import Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import HttpUpstream, LitellmUpstream, upstream_of
from rigs.gateway import CHAT, PATHS, Stage, body_of, opened_stage, stage as stage, through_litellm, user
from rigs.serving import get, served
from rigs.upstream import ScriptedUpstream

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
