"""A gateway changes nothing between a client and its upstream: headers both ways, waiting, addresses."""

import asyncio
import http.client
import json
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from transparent_stage import CALLERS_KEY, CHAT, KEY, RETURNED, Stage, stage as stage

from assay.traces import Store
from assay.traces.gateway.replies import response_headers
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import served
from rigs.upstream import ScriptedUpstream

SENT = {
    "Idempotency-Key": "abc", "traceparent": "00-1-2-01", "OpenAI-Beta": "x", "X-Custom": "kept",
    "User-Agent": "agent/1", "Cookie": "a=b",
    "Connection": "keep-alive, X-Hop", "X-Hop": "1", "TE": "trailers", "x-assay-task": "t",
}  # fmt: skip


def test_headers_are_forwarded_except_those_of_a_connection_and_of_the_gateway(stage: Stage) -> None:
    status, returned, _ = stage.ask(
        "POST", "/v1/chat/completions", CHAT, **SENT, **{"api-key": CALLERS_KEY, "x-api-key": CALLERS_KEY}
    )
    (received,) = stage.echo.headers
    assert status == 200
    assert {name: received.get(name.lower()) for name in SENT} == {
        **SENT, "Connection": received.get("connection"), "X-Hop": None, "TE": None, "x-assay-task": None,
    }  # fmt: skip
    assert (received["api-key"], received["x-api-key"], received.get("accept")) == (CALLERS_KEY, CALLERS_KEY, None)
    returned = {name.lower(): value for name, value in returned.items()}
    assert {name: returned.get(name.lower()) for name in RETURNED} == RETURNED
    assert "x-assay-rollout" in returned


def test_a_cookie_of_one_caller_is_not_sent_for_another(stage: Stage) -> None:
    for _ in range(2):
        stage.ask("POST", "/v1/chat/completions", CHAT)
    assert [headers.get("cookie") for headers in stage.echo.headers] == [None, None]


@pytest.mark.parametrize("stage", [{"upstream_key": "sk-owner", "key": KEY}], indirect=True)
def test_gateway_keys_are_not_forwarded_and_the_upstreams_key_is_sent(stage: Stage) -> None:
    assert (
        stage.ask("POST", "/v1/chat/completions", CHAT, **{"api-key": KEY, "Authorization": f"Bearer {CALLERS_KEY}"})[0]
        == 200
    )
    assert (
        stage.ask("POST", "/openai/deployments/gpt/chat/completions?api-version=1", CHAT, **{"api-key": KEY})[0] == 200
    )
    plain, azure = stage.echo.headers
    assert (plain["authorization"], plain["x-api-key"], plain.get("api-key")) == ("Bearer sk-owner", "sk-owner", None)
    assert (azure.get("authorization"), azure.get("x-api-key"), azure["api-key"]) == (None, None, "sk-owner")
    assert KEY not in json.dumps(stage.echo.headers)
    assert CALLERS_KEY not in json.dumps(stage.echo.headers)


@pytest.mark.parametrize("stage", [{"upstream_key": "choices", "key": KEY}], indirect=True)
def test_a_word_as_the_key_of_a_server_without_keys_is_not_removed_from_its_answers(stage: Stage) -> None:
    status, _, answer = stage.ask("POST", "/v1/chat/completions", CHAT, Authorization=f"Bearer {KEY}")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hi")


def test_header_values_in_latin_1_are_not_cut(stage: Stage) -> None:
    stage.ask(
        "POST", "/v1/chat/completions", CHAT, **{"X-Name": "caf\u00e9", "X-Other": "\u20ac".encode().decode("latin-1")}
    )
    (received,) = stage.echo.headers
    assert (received["x-name"], received["x-other"]) == ("caf\u00e9", "\u20ac")  # Node and http.client send Latin-1
    assert response_headers({"X-Name": "caf\udce9"})["X-Name"] == "caf\u00e9"  # as aiohttp reads the byte E9


class Slow:
    """A server that streams an answer in parts released by the test, blank lines between; an empty part disconnects."""

    def __init__(self) -> None:
        self.parts: queue.Queue[bytes | None] = queue.Queue()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while (part := await self._next()) is not None:
            if not part and request.transport is not None:
                request.transport.abort()
                break
            await response.write(part)
        return response

    async def _next(self) -> bytes | None:
        await asyncio.sleep(0.02)
        return self.parts.get_nowait() if self.parts.qsize() else b"\n"


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Slow, Gateway, http.client.HTTPConnection]]:
    server = Slow()
    with Store(tmp_path / "s.db") as store, served(server.app()) as behind:
        gateway = Gateway(store, upstream_of(None, base=behind))
        with served(gateway.app()) as url:
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
            connection.request("POST", "/v1/chat/completions", body=json.dumps(CHAT))
            yield server, gateway, connection
            connection.close()


ANSWER = json.dumps(
    {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
).encode()


def test_blank_lines_that_keep_a_client_waiting_are_forwarded_at_once(
    slow: tuple[Slow, Gateway, http.client.HTTPConnection],
) -> None:
    server, gateway, connection = slow
    answer = connection.getresponse()
    assert (answer.status, answer.read1().strip()) == (200, b"")  # the model has not answered yet
    for part in (ANSWER, None):
        server.parts.put(part)
    assert json.loads(answer.read())["choices"][0]["message"]["content"] == "hi"
    gateway.store.flush()
    (transition,) = gateway.store.rollout(next(gateway.store.rollouts()).id).transitions
    assert (transition.output, transition.error) == ("hi", None)


def test_an_answer_that_breaks_off_breaks_off_for_the_client_too(
    slow: tuple[Slow, Gateway, http.client.HTTPConnection],
) -> None:
    server, gateway, connection = slow
    server.parts.put(ANSWER[:20])
    answer = connection.getresponse()
    server.parts.put(b"")
    with pytest.raises(http.client.IncompleteRead) as broken:
        answer.read()
    assert (answer.status, broken.value.partial.strip()) == (200, ANSWER[:20])
    gateway.store.flush()
    (transition,) = gateway.store.rollout(next(gateway.store.rollouts()).id).transitions
    assert (transition.output.strip(), transition.failure) == (ANSWER[:20].decode(), "model")


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[tuple[Gateway, ScriptedUpstream, str]]:
    upstream = ScriptedUpstream()
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(store, upstream_of(None, base=behind))
        with served(gateway.app()) as url:
            yield gateway, upstream, url


def test_a_streamed_answer_has_the_upstreams_headers_and_no_others(
    scripted: tuple[Gateway, ScriptedUpstream, str],
) -> None:
    def headers(url: str) -> dict[str, str]:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        connection.request("POST", "/v1/chat/completions", body=json.dumps({**CHAT, "stream": True}))
        answer = connection.getresponse()
        answer.read()
        connection.close()
        lower_case = {name.lower(): value for name, value in answer.getheaders()}
        return {name: value for name, value in lower_case.items() if name not in ("date", "x-assay-rollout")}

    with served(scripted[1].app()) as behind:
        assert headers(scripted[2]) == headers(behind)


@pytest.mark.parametrize("stage", [{"model": "openai/other"}], indirect=True)
def test_the_gateways_model_replaces_the_deployment(stage: Stage) -> None:
    stage.ask("POST", "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21", CHAT)
    assert stage.echo.requests == [("POST", "/openai/deployments/other/chat/completions?api-version=2024-10-21")]
