"""Calls in the dialect of Google's Gemini API: recorded, assigned by conversation, stored without their API keys."""

import http.client
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gemini_calls import CALCULATOR, MODEL, content, store as store

from assay.errors import FailureKind
from assay.support.scrubbing import fields
from assay.traces import Rollout, Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import HttpUpstream, upstream_of
from assay.traces.messages.dialects import chat_messages
from assay.traces.messages.final_answer import final_answer
from rigs.serving import get, post, send, served
from rigs.upstream import ScriptedUpstream


class Stage:
    def __init__(self, gateway: Gateway, upstream: ScriptedUpstream, url: str, behind: str) -> None:
        self.gateway, self.upstream, self.url, self.behind = gateway, upstream, url, behind

    def ask(
        self, *contents: Any, path: str = f"{MODEL}:generateContent", headers: dict[str, str] | None = None, **more: Any
    ) -> tuple[int, Any]:
        body = {"contents": list(contents), **more}
        return post(self.url + path, body, **({"x-goog-api-key": "gateway-key-1"} if headers is None else headers))

    def rollouts(self) -> list[Rollout]:
        self.gateway.store.flush()
        return [self.gateway.store.rollout(r.id) for r in self.gateway.store.rollouts()][::-1]


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    upstream = ScriptedUpstream()
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        answers = upstream_of(getattr(request, "param", None), base=behind, key="upstream-secret")
        gateway = Gateway(store, answers, run_id="run", key="gateway-key-1")
        with served(gateway.app()) as url:
            yield Stage(gateway, upstream, url, behind)


def streamed(url: str, body: Any, query: str = "") -> tuple[str, bytes]:
    """Content type and bytes of a stream."""
    headers = {"Content-Type": "application/json", "x-goog-api-key": "gateway-key-1"}
    request = urllib.request.Request(
        f"{url}{MODEL}:streamGenerateContent{query}", data=json.dumps(body).encode(), headers=headers
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.headers["content-type"], answer.read()


# -- through the gateway


def test_a_call_is_forwarded_unchanged_and_becomes_a_transition(stage: Stage) -> None:
    config = {"temperature": 0.3, "maxOutputTokens": 50}
    status, reply = stage.ask(
        content("hello"), systemInstruction={"parts": [{"text": "Be kind."}]}, generationConfig=config
    )
    assert (status, reply["candidates"][0]["content"]["parts"]) == (200, [{"text": "echo: hello"}])
    (rollout,) = stage.rollouts()
    (transition,) = rollout.transitions
    assert transition.request == {
        "dialect": "gemini",
        "model": "gemini-2.5-flash",
        "stream": False,
        "body": {
            "contents": [content("hello")],
            "systemInstruction": {"parts": [{"text": "Be kind."}]},
            "generationConfig": config,
        },
    }
    assert transition.response == {"body": reply}
    assert (transition.output, transition.prompt_tokens, transition.completion_tokens, transition.error) == (
        "echo: hello",
        7,
        2,
        None,
    )
    assert chat_messages(transition.request) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
    ]
    assert (rollout.inputs, rollout.prediction) == ({"prompt": "hello"}, {"answer": "echo: hello"})


@pytest.mark.parametrize(("query", "kind"), [("?alt=sse", "text/event-stream"), ("", "application/json")])
def test_a_stream_is_forwarded_unchanged_and_stored_like_an_unstreamed_answer(
    stage: Stage, query: str, kind: str
) -> None:
    body = {"contents": [content("use the tool #both")], "tools": [CALCULATOR]}
    unstreamed = stage.ask(*body["contents"], tools=body["tools"])[1]
    content_type, raw = streamed(stage.url, body, query)
    with served(ScriptedUpstream().app()) as alone:
        assert content_type.startswith(kind)
        assert raw.replace(b"gen-2", b"gen-1") == streamed(alone, body, query)[1]
    first, second = (rollout.transitions[0] for rollout in stage.rollouts())
    assert (second.request["stream"], second.error) == (True, None)
    assert second.response == {"body": {**unstreamed, "responseId": "gen-2"}}
    assert [(tool.name, tool.arguments) for tool in first.tools] == [("calculator", {"expression": "6*7"})] * 2
    assert second.tools == first.tools


def test_a_function_that_must_be_called_ends_the_run_with_its_arguments(stage: Stage) -> None:
    config = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["calculator"]}}
    stage.ask(content("answer"), tools=[CALCULATOR], toolConfig=config)
    (rollout,) = stage.rollouts()
    assert rollout.prediction == {"answer": "6*7"}
    assert final_answer(rollout.transitions).value == "6*7"


# -- keys


@pytest.mark.parametrize("query", ["", "?key=wrong-key-12"])
def test_without_the_gateways_key_no_request_is_forwarded(stage: Stage, query: str) -> None:
    status, reply = stage.ask(content("hello"), path=f"{MODEL}:generateContent{query}", headers={})
    assert (status, reply["error"]["code"], stage.upstream.calls) == (401, 401, 0)
    assert "x-goog-api-key" in reply["error"]["message"]


def test_a_key_in_the_address_is_accepted_only_on_googles_paths(stage: Stage) -> None:
    assert send("GET", f"{stage.url}/assay/stats?key=gateway-key-1")[0] == 401
    assert get(f"{stage.url}/assay/stats", **{"x-goog-api-key": "gateway-key-1"})["calls"] == 0


def test_credentials_of_vertex_tools_are_removed_from_a_request() -> None:
    auth = {
        "apiAuth": {"apiKeyConfig": {"apiKeyString": "s3cr3t-of-search-1"}},
        "authConfig": {"apiKeyConfig": {"api_key_string": "s3cr3t-2-of-it"}},
    }
    assert "s3cr3t" not in json.dumps(fields({"tools": [{"retrieval": {"externalApi": auth}}]}))


# -- failures


@pytest.mark.parametrize("how", ["#429", "#500", "#garbage"])
def test_a_failed_call_is_stored_with_its_reason(stage: Stage, how: str) -> None:
    stage.ask(content(f"hello {how}")) if how != "#garbage" else send("POST", *_plain(stage, how))
    (rollout,) = stage.rollouts()
    assert rollout.transitions[0].error is not None
    assert rollout.transitions[0].failure == FailureKind.MODEL


def _plain(stage: Stage, how: str) -> tuple[str, Any]:
    return f"{stage.url}{MODEL}:generateContent?key=gateway-key-1", {"contents": [content(f"hello {how}")]}


def test_a_retried_call_stays_in_its_rollout(stage: Stage) -> None:
    assert [stage.ask(content("hello #once429"))[0] for _ in range(2)] == [429, 200]
    (rollout,) = stage.rollouts()
    assert [(t.error or "")[:8] for t in rollout.transitions] == ["HTTP 429", ""]


@pytest.mark.parametrize("query", ["?alt=sse", ""])
def test_an_interrupted_stream_is_incomplete_and_keeps_the_received_parts(stage: Stage, query: str) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        streamed(stage.url, {"contents": [content("a long story to tell #die")]}, query)
    (rollout,) = stage.rollouts()
    assert rollout.transitions[0].error is not None
    assert rollout.transitions[0].output.startswith("echo: a")


@pytest.mark.parametrize("variable", ["GEMINI_API_KEY", "GOOGLE_API_KEY"])
def test_googles_models_are_called_at_google_in_their_dialect(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "AIza-of-the-environment")
    upstream = upstream_of("gemini/gemini-2.5-flash")
    assert isinstance(upstream, HttpUpstream)
    assert (upstream.base, upstream.model, upstream.key) == (
        "https://generativelanguage.googleapis.com",
        "gemini-2.5-flash",
        "AIza-of-the-environment",
    )
    assert (upstream.dialects, upstream.other is not None) == (("gemini",), True)
