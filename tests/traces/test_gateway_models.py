"""The gateway in front of LiteLLM, the embedded model and many clients at once; what is left after it was killed."""

import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_stage import Stage, stage as stage

from assay.traces import Store, Verdict
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.sessions import close_abandoned
from assay.traces.gateway.upstreams import HttpUpstream, LitellmUpstream, upstream_of
from rigs.serving import get, post, served
from rigs.upstream import ScriptedUpstream


def test_another_model_answers_new_rollouts_while_open_ones_keep_theirs(stage: Stage) -> None:
    stage.chat("one")
    other = ScriptedUpstream(name="other")
    with served(other.app()) as behind:
        stage.gateway.serve_model(HttpUpstream("newer", behind))
        stage.chat("one", "echo: one", "two")
        stage.chat("a new one")
        assert get(f"{stage.url}/v1/models")["data"][0]["id"] == "other"
    assert [(r.model, [t.model for t in r.transitions]) for r in stage.rollouts()] == [
        ("echo", ["echo", "echo"]),
        ("newer", ["newer"]),
    ]
    assert (stage.upstream.calls, other.calls) == (2, 1)
    assert stage.manage("/assay/model", {"model": "embedded/nobody"})[0] == 500
    assert (
        stage.manage("/assay/model", {"model": "mistral/some", "upstream": "http://127.0.0.1:9"})[1]["model"]
        == "mistral/some"
    )
    assert isinstance(stage.gateway.upstream, LitellmUpstream)  # an address is not taken from a caller


@pytest.mark.slow
def test_200_streaming_clients_at_once_lose_nothing(stage: Stage) -> None:
    failed: list[BaseException] = []

    def talk(number: int) -> None:
        try:
            answer = "".join(
                c.choices[0].delta.content or "" for c in stage.chat(f"client {number} says a few words", stream=True)
            )
            assert answer == f"echo: client {number} says a few words"
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    stage.settled(200)
    outputs = {r.transitions[0].output for r in stage.rollouts()}
    assert outputs == {f"echo: client {number} says a few words" for number in range(200)}
    assert stage.gateway.stats()["unrecorded"] == 0


def test_a_call_that_could_not_be_stored_is_counted_as_unrecorded(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(stage.gateway.store, "put_transition", refuse)
    assert stage.chat("hello").choices[0].message.content == "echo: hello"
    assert get(f"{stage.url}/assay/stats", **stage.owner)["unrecorded"] == 1


def test_litellm_answers_in_all_dialects_for_other_providers(tmp_path: Path) -> None:
    upstream = ScriptedUpstream()
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        through = LitellmUpstream("openai/echo", {"api_base": f"{behind}/v1", "api_key": "none"})
        with served(Gateway(store, through).app()) as url:
            messages = [{"role": "user", "content": "hello there"}]
            for stream in (False, True):
                for path, body in (
                    ("/v1/chat/completions", {"messages": messages}),
                    ("/v1/messages", {"messages": messages, "max_tokens": 20}),
                    ("/v1/responses", {"input": "hello there"}),
                ):
                    import urllib.request

                    data = json.dumps({"model": "x", "stream": stream, **body}).encode()
                    with urllib.request.urlopen(urllib.request.Request(url + path, data=data), timeout=60) as answer:
                        assert answer.read()
            status, reply = post(
                f"{url}/v1/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "#429"}]}
            )
            assert status == 429
            assert "scripted 429" in reply["error"]["message"]
        store.flush()
        rollouts = [store.rollout(r.id) for r in store.rollouts()]
    assert sum(len(r.transitions) for r in rollouts) == 7
    assert {t.output for r in rollouts for t in r.transitions if t.error is None} == {"echo: hello there"}


def test_rollouts_left_open_by_a_killed_gateway_can_be_ended(stage: Stage) -> None:
    stage.manage("/assay/rollouts", {"id": "left"})
    stage.manage("/assay/rollouts", {"id": "empty"})
    stage.client.with_options(default_headers={"x-assay-rollout": "left"}).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}]
    )
    stage.chat("found by its conversation")
    stage.gateway.rollouts.open.clear()  # what a kill leaves: the store alone
    assert stage.manage("/assay/rollouts/left/close", {"reward": 0.8, "status": "bogus"})[0] == 422
    assert [r.score for r in stage.rollouts()] == [None, None, None]
    assert stage.manage("/assay/rollouts/left/close", {"reward": 0.8})[1]["status"] == "done"
    assert stage.manage("/assay/rollouts/left/close", {})[0] == 404
    assert close_abandoned(stage.gateway.store, idle_s=3600) == {"done": 0, "error": 0, "running": 2}
    assert close_abandoned(stage.gateway.store, idle_s=0) == {"done": 1, "error": 1, "running": 0}
    by_id = {r.metadata.get("client_id", "found"): r for r in stage.rollouts()}
    assert {name: (r.status, r.score, len(r.transitions)) for name, r in by_id.items()} == {
        "left": ("done", 0.8, 1), "empty": ("error", None, 0), "found": ("done", None, 1),
    }  # fmt: skip


@pytest.mark.parametrize("length", [10, 200_000], ids=["whole row", "changes alone"])
def test_a_score_in_the_store_is_kept_when_the_gateway_writes_its_last_row(stage: Stage, length: int) -> None:
    stage.chat("a" * length)
    store = stage.gateway.store
    assert close_abandoned(store, idle_s=0) == {
        "done": 1,
        "error": 0,
        "running": 0,
    }  # while the gateway still holds it open
    (rollout,) = stage.rollouts()
    rollout.score, rollout.coverage, rollout.rubric, rollout.transitions = 0.7, 1.0, "mine", []
    rollout.verdicts = [Verdict(criterion="right", grade=0.7)]
    store.put_rollout(rollout)
    store.flush()
    assert stage.gateway.rollouts.sweep(all_of_them=True) == 1
    (after,) = stage.rollouts()
    assert (after.status, after.score, after.coverage, after.rubric) == ("done", 0.7, 1.0, "mine")
    assert after.verdicts == rollout.verdicts


def test_a_score_is_removed_with_another_prediction(stage: Stage) -> None:
    stage.chat("a")
    store = stage.gateway.store
    close_abandoned(store, idle_s=0)
    (rollout,) = stage.rollouts()
    rollout.score, rollout.rubric, rollout.transitions = 0.7, "mine", []
    store.put_rollout(rollout)
    store.flush()
    (live,) = stage.gateway.rollouts.open.values()
    live.rollout.prediction = {"answer": "another"}
    stage.gateway.rollouts.sweep(all_of_them=True)
    (after,) = stage.rollouts()
    assert (after.prediction, after.score, after.rubric) == ({"answer": "another"}, None, "")


def test_keys_that_a_server_echoes_or_a_body_contains_are_not_stored(tmp_path: Path) -> None:
    upstream = ScriptedUpstream()
    with (
        Store(tmp_path / "s.db") as store,
        served(upstream.app()) as behind,
        served(Gateway(store, upstream_of("m", base=behind)).app()) as url,
    ):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-verysecret-1", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "#401"}])
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            extra_body={"extra_body": {"api_key": "sk-verysecret-2", "top_k": 3}},
        )
        store.flush()
        transitions = [store.rollout(r.id).transitions[0] for r in store.rollouts()]
        assert "Bearer [key]" in next(t.error for t in transitions if t.error)
        assert "verysecret" not in str(transitions)
        assert [t.request["body"]["extra_body"] for t in transitions if not t.error] == [{"top_k": 3}]


@pytest.mark.parametrize("stage", [{"one_server": True}], indirect=True)
def test_another_model_of_the_same_server_keeps_its_address_and_key(stage: Stage) -> None:
    assert stage.manage("/assay/model", {"model": "my-lora"}) == (
        200,
        {"model": "my-lora", "weights": "", "adapters": []},
    )
    stage.chat("to the adapter")
    assert stage.upstream.calls == 1
    assert stage.upstream.headers[-1]["Authorization"] == "Bearer upstream-secret"
    assert [r.transitions[0].model for r in stage.rollouts()] == ["my-lora"]


@pytest.mark.slow
def test_bodies_nested_too_deeply_are_refused(stage: Stage) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    status, reply = post(f"{stage.url}/v1/chat/completions", {"messages": [{"role": "user", "content": deep}]})
    assert (status, "nested more than 200 deep" in str(reply)) == (422, True)
    wide = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 400}]
    assert post(f"{stage.url}/v1/chat/completions", {"messages": wide})[0] == 200
