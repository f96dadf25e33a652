"""A gateway changes nothing between a client and its upstream: headers both ways, addresses, and what is no LM call."""

import asyncio
import gzip
import http.client
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from assay.testing.serving import get, served
from assay.testing.upstream import ScriptedUpstream
from assay.traces import Rollout, Store
from assay.traces.gateway.headers import response_headers
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of

KEY, CALLERS_KEY = "gateway-key-1", "sk-of-the-caller"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
SENT = {
    "Idempotency-Key": "abc", "traceparent": "00-1-2-01", "OpenAI-Beta": "x", "X-Custom": "kept",
    "User-Agent": "agent/1", "Cookie": "a=b",
    "Connection": "keep-alive, X-Hop", "X-Hop": "1", "TE": "trailers", "x-assay-task": "t",
}  # fmt: skip
RETURNED = {
    "x-should-retry": "false",
    "retry-after-ms": "12",
    "x-ratelimit-remaining": "3",
    "X-Custom": "kept",
    "Set-Cookie": "a=b",
    "Server": "theirs",
}


class Echo:
    """Records method, address, headers and body of every request."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.status = 200

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.path_qs))
        self.headers.append({key.lower(): ", ".join(request.headers.getall(key)) for key in request.headers})
        self.bodies.append(body)
        reply: dict[str, Any] = {
            "choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
            "length": len(body),
        }
        if request.path.endswith("/moved"):
            return web.Response(status=307, headers={"Location": "http://elsewhere.example/"})
        return web.json_response(reply, status=self.status, headers=RETURNED)


class Stage:
    def __init__(self, gateway: Gateway, echo: Echo, url: str) -> None:
        self.gateway, self.echo, self.url = gateway, echo, url

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        try:
            connection.request(method, path, body=data, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def rollouts(self) -> list[Rollout]:
        self.gateway.store.flush()
        return [self.gateway.store.rollout(rollout.id) for rollout in self.gateway.store.rollouts()]


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    echo, options = Echo(), dict(getattr(request, "param", {}))
    with Store(tmp_path / "s.db") as store, served(echo.app()) as behind:
        gateway = Gateway(
            store, upstream_of(options.pop("model", "m"), base=behind, key=options.pop("upstream_key", None)), **options
        )
        with served(gateway.app()) as url:
            yield Stage(gateway, echo, url)


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


@pytest.mark.parametrize(("named", "tries"), [("false", 1), ("true", 3)])
def test_a_client_retries_as_the_upstreams_headers_request(
    stage: Stage, named: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RETURNED, "x-should-retry", named)
    stage.echo.status = 500
    with pytest.raises(openai.InternalServerError):
        openai.OpenAI(base_url=f"{stage.url}/v1", api_key="x", max_retries=2).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}]
        )
    assert len(stage.echo.requests) == tries


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
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
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


# -- addresses


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[tuple[Gateway, ScriptedUpstream, str]]:
    upstream = ScriptedUpstream()
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(store, upstream_of(None, base=behind))
        with served(gateway.app()) as url:
            yield gateway, upstream, url


@pytest.mark.parametrize("stream", [False, True])
def test_azures_client_is_recorded_like_openais(scripted: tuple[Gateway, ScriptedUpstream, str], stream: bool) -> None:
    gateway, upstream, url = scripted
    client = openai.AzureOpenAI(azure_endpoint=url, api_key="azure-key", api_version="2024-10-21", max_retries=0)
    answer = client.chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": "hello"}], stream=stream
    )  # type: ignore[call-overload]
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    gateway.store.flush()
    (transition,) = gateway.store.rollout(next(gateway.store.rollouts()).id).transitions
    assert (text, transition.output, transition.request["dialect"]) == ("echo: hello", "echo: hello", "chat")
    assert upstream.headers[-1]["api-key"] == "azure-key"


def test_a_streamed_answer_has_the_upstreams_headers_and_no_others(
    scripted: tuple[Gateway, ScriptedUpstream, str],
) -> None:
    def headers(url: str) -> dict[str, str]:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
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


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_recorded_like_chats(scripted: tuple[Gateway, ScriptedUpstream, str], stream: bool) -> None:
    gateway, _, url = scripted
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    answer = client.completions.create(model="m", prompt="once upon a time", stream=stream)
    text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
    gateway.store.flush()
    rollout = gateway.store.rollout(next(gateway.store.rollouts()).id)
    (transition,) = rollout.transitions
    assert text == transition.output == "echo: once upon a time"
    assert (rollout.inputs, rollout.prediction) == ({"prompt": "once upon a time"}, {"answer": text})
    assert gateway.stats()["unrecorded"] == 0


# -- what is no LM call

OTHERS = [
    ("GET", "/v1/models/gpt-4o", None),
    ("POST", "/v1/embeddings", {"input": "x"}),
    ("POST", "/v1/files?purpose=batch", b"x" * (20 << 20)),  # more than a call may have
    ("POST", "/v1/batches", {"input_file_id": "f"}),
    ("GET", "/v1/responses/resp_68a1", None),
    ("DELETE", "/v1/responses/resp_68a1", None),
    ("GET", "/v1/chat/completions", None),  # those that the provider has stored
]


def test_other_paths_are_forwarded_and_counted_but_not_recorded(stage: Stage) -> None:
    for method, path, body in OTHERS:
        status, returned, reply = stage.ask(
            method, path, body, Authorization=f"Bearer {CALLERS_KEY}", **{"Content-Type": "application/json"}
        )
        assert (status, returned["retry-after-ms"]) == (200, "12")
        length = 0 if body is None else len(body if isinstance(body, bytes) else json.dumps(body))
        assert reply["length"] == length
    assert stage.echo.requests == [(method, path) for method, path, _ in OTHERS]
    assert {headers["authorization"] for headers in stage.echo.headers} == {f"Bearer {CALLERS_KEY}"}
    stats = get(f"{stage.url}/assay/stats", Authorization=f"Bearer {stage.gateway.access.key}")
    assert stats["passed_through"] == {
        "GET /v1/models/*": 1, "POST /v1/embeddings": 1, "POST /v1/files": 1, "POST /v1/batches": 1,
        "GET /v1/responses/*": 1,
        "DELETE /v1/responses/*": 1, "GET /v1/chat/completions": 1,
    }  # fmt: skip
    assert (stats["calls"], stats["unrecorded"], stats["refused_paths"]) == (0, 0, {})
    assert stage.rollouts() == []


def test_an_lm_call_on_another_path_is_counted_as_unrecorded(stage: Stage) -> None:
    stage.ask("POST", "/v1beta/interactions", {"model": "gemini-pro", "input": "hi"})
    stats = stage.gateway.stats()
    assert (stats["calls"], stats["stored"], stats["unrecorded"]) == (1, 0, 1)


def test_a_redirect_is_an_error_and_not_followed(stage: Stage) -> None:
    status, _, reply = stage.ask("POST", "/v1/moved", b"secret body", Authorization=f"Bearer {CALLERS_KEY}")
    assert (status, "elsewhere.example" in str(reply)) == (502, True)
    assert len(stage.echo.requests) == 1


@pytest.mark.parametrize(
    "stage",
    [{"upstream_key": "sk-owner"}, {"upstream_key": "sk-owner", "key": KEY}],
    ids=["open", "keyed"],
    indirect=True,
)
def test_the_upstreams_key_is_used_on_other_paths_only_with_the_gateways_key(stage: Stage) -> None:
    body, access = {"input": "x"}, stage.gateway.access
    token = access.token("0" * 32)
    assert stage.ask("POST", "/v1/embeddings", body)[0] == (403 if access.open else 401)
    assert stage.ask("POST", "/v1/embeddings", body, Authorization=f"Bearer {token}")[0] == 403
    assert stage.ask("POST", f"/r/{token}/v1/embeddings", body)[0] == 403
    assert stage.echo.requests == []
    assert stage.ask("POST", "/v1/embeddings", body, Authorization=f"Bearer {access.key}")[0] == 200
    assert stage.ask("POST", f"/r/{token}/v1/embeddings", body, Authorization=f"Bearer {CALLERS_KEY}")[0] == 200
    assert [headers["authorization"] for headers in stage.echo.headers] == ["Bearer sk-owner", f"Bearer {CALLERS_KEY}"]
    assert {path for _, path in stage.echo.requests} == {"/v1/embeddings"}
    assert token not in json.dumps(stage.gateway.stats())


@pytest.mark.parametrize("stage", [{}, {"key": KEY}], ids=["open", "keyed"], indirect=True)
def test_a_rollouts_token_reaches_no_other_path_of_an_upstream_without_a_key(stage: Stage) -> None:
    token, body = stage.gateway.access.token("0" * 32), {"lora_name": "mine"}
    assert stage.ask("POST", "/v1/load_lora_adapter", body, Authorization=f"Bearer {token}")[0] == 403
    assert stage.ask("POST", f"/r/{token}/v1/load_lora_adapter", body)[0] == 403
    assert stage.echo.requests == []
    assert (
        stage.ask("POST", "/v1/load_lora_adapter", body, Authorization=f"Bearer {stage.gateway.access.key}")[0] == 200
    )


@pytest.mark.parametrize("stage", [{"upstream_key": "sk-owner", "key": KEY}], indirect=True)
def test_a_rollouts_token_lists_models_and_counts_tokens(stage: Stage) -> None:
    token = stage.gateway.access.token("0" * 32)
    assert stage.ask("GET", f"/r/{token}/v1/models")[0] == 200
    assert stage.ask("POST", "/v1/messages/count_tokens", CHAT, **{"x-api-key": token})[0] == 200
    assert [headers["x-api-key"] for headers in stage.echo.headers] == ["sk-owner"] * 2
    assert stage.rollouts() == []


@pytest.mark.parametrize("path", ["/", "/assay/nothing", "/feedback", "/r/some/reward", "/health/x"])
def test_paths_of_the_gateway_are_never_forwarded(stage: Stage, path: str) -> None:
    status, _, reply = stage.ask("GET", path, Authorization=f"Bearer {stage.gateway.access.key}")
    assert (status, "is not supported here" in reply["error"]["message"]) == (404, True)
    assert stage.echo.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "/openai/deployments/../chat/completions", "/openai/deployments/..%2f..%2ffiles/chat/completions",
        "/r/a/openai/deployments/%2e%2e/completions",
        "/v1beta/models/%2E%2E%2Ffiles%3f:generateContent", "/openai/deployments/a%23/chat/completions",
        "/openai/deployments/a%5c..%5cb/chat/completions",
    ],
)  # fmt: skip
def test_a_name_in_an_address_cannot_lead_to_another_path_with_the_providers_key(stage: Stage, path: str) -> None:
    assert stage.ask("POST", path, CHAT)[0] == 422
    assert not stage.echo.requests
    assert stage.ask("POST", "/openai/deployments/my%20own%2Fmodel..v2/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize("path", ["/v1/files", "/v1/chat/completions"])
def test_a_compressed_body_reaches_the_upstream_decompressed(stage: Stage, path: str) -> None:
    body = json.dumps({**CHAT, "padding": "a" * 10_000}).encode()
    assert stage.ask("POST", path, gzip.compress(body), **{"Content-Encoding": "gzip"})[0] == 200
    assert stage.echo.bodies == [body]
    status, _, reply = stage.ask("POST", "/v1/chat/completions", b"no gzip", **{"Content-Encoding": "gzip"})
    assert (status, "cannot be read" in reply["error"]["message"]) == (400, True)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/chat/completions"])
def test_a_repeated_header_is_forwarded_twice(stage: Stage, path: str) -> None:
    connection = http.client.HTTPConnection(stage.url.removeprefix("http://"), timeout=30)
    connection.putrequest("POST", path)
    body = json.dumps(CHAT).encode()
    for name, value in (("anthropic-beta", "a"), ("anthropic-beta", "b"), ("Content-Length", str(len(body)))):
        connection.putheader(name, value)
    connection.endheaders(body)
    assert connection.getresponse().status == 200
    connection.close()
    assert stage.echo.headers[0]["anthropic-beta"] == "a, b"


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [5, {"function": 7}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]},
        {"tools": 5},
    ],
)
def test_a_request_of_unknown_form_is_answered_by_the_upstream(stage: Stage, more: dict[str, Any]) -> None:
    assert stage.ask("POST", "/v1/chat/completions", {**CHAT, **more})[0] == 200
    assert (len(stage.echo.requests), len(stage.rollouts()), stage.gateway.unrecorded) == (1, 1, 0)


def test_a_call_that_cannot_be_recorded_is_forwarded_and_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage.gateway.rollouts, "register_call", lambda *_: 1 / 0)
    assert stage.ask("POST", "/v1/chat/completions", CHAT)[0] == 200
    assert (stage.gateway.stats()["calls"], stage.gateway.stats()["stored"], stage.gateway.unrecorded) == (1, 0, 1)
