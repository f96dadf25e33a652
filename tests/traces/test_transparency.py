"""A gateway changes nothing between a client and its upstream: headers, paths, waiting, addresses."""

import asyncio
import gzip
import http.client
import json
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.errors import ConfigError
from assay.traces.gateway.calls import Call
from assay.traces.gateway.replies import response_headers
from assay.traces.gateway.upstreams import upstream_of
from rigs.gateway import CHAT, KEY, PATHS, AnsweringServer, Stage, body_of, opened_stage
from rigs.upstream import ScriptedUpstream, response_body

CALLERS_KEY = "sk-of-the-caller"
AZURE = "/openai/deployments/gpt/chat/completions?api-version=1"
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
SENT = {
    "Idempotency-Key": "abc", "traceparent": "00-1-2-01", "OpenAI-Beta": "x", "X-Custom": "kept",
    "User-Agent": "agent/1", "Cookie": "a=b",
    "Connection": "keep-alive, X-Hop", "X-Hop": "1", "TE": "trailers", "x-assay-task": "t",
}  # fmt: skip
RETURNED = {
    "x-should-retry": "false", "retry-after-ms": "12", "x-ratelimit-remaining": "3", "X-Custom": "kept",
    "Set-Cookie": "a=b", "Server": "theirs",
}  # fmt: skip


class Echo(AnsweringServer):
    """Lists method, address, headers and body of every request."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        self.headers.append({key.lower(): ", ".join(request.headers.getall(key)) for key in request.headers})
        self.bodies.append(await request.read())
        return web.json_response(ANSWER, headers=RETURNED)


class Transparent(Stage):
    """A gateway in front of a server that lists what reaches it."""

    upstream: Echo

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON; no client adds headers of its own."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=120)
        try:
            connection.request(method, path, body=data, headers=headers)
            answer = connection.getresponse()
            returned = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, returned, json.loads(answer.read() or b"null")
        finally:
            connection.close()


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Transparent]:
    with opened_stage(tmp_path, Echo(), **{"model": "m", **getattr(request, "param", {})}) as opened:
        yield Transparent(opened.gateway, opened.upstream, opened.url, opened.behind)


# -- headers


def test_headers_are_forwarded_except_those_of_a_connection_and_of_the_gateway(stage: Transparent) -> None:
    keys = {"api-key": CALLERS_KEY, "x-api-key": CALLERS_KEY}
    status, returned, _ = stage.request("POST", PATHS["chat"], CHAT, **SENT, **keys)
    (received,) = stage.upstream.headers
    expected = {**SENT, "Connection": received.get("connection"), "X-Hop": None, "TE": None, "x-assay-task": None}
    assert status == 200
    assert {name: received.get(name.lower()) for name in SENT} == expected
    assert {name: received.get(name) for name in [*keys, "accept"]} == {**keys, "accept": None}
    assert {name: returned.get(name.lower()) for name in RETURNED} == RETURNED
    assert "x-assay-rollout" in returned
    stage.request("POST", PATHS["chat"], CHAT)
    assert stage.upstream.headers[1].get("cookie") is None  # neither the caller's nor the server's


@pytest.mark.parametrize("stage", [{"upstream_key": "sk-owner", "key": KEY}], indirect=True)
def test_gateway_keys_are_not_forwarded_and_the_upstreams_key_is_sent(stage: Transparent) -> None:
    keys = {"api-key": KEY, "Authorization": f"Bearer {CALLERS_KEY}"}
    assert stage.request("POST", PATHS["chat"], CHAT, **keys)[0] == 200
    assert stage.request("POST", AZURE, CHAT, **{"api-key": KEY})[0] == 200
    plain, azure = stage.upstream.headers
    assert (plain["authorization"], plain["x-api-key"], plain.get("api-key")) == ("Bearer sk-owner", "sk-owner", None)
    assert (azure.get("authorization"), azure.get("x-api-key"), azure["api-key"]) == (None, None, "sk-owner")
    assert KEY not in json.dumps(stage.upstream.headers)
    assert CALLERS_KEY not in json.dumps(stage.upstream.headers)


@pytest.mark.parametrize("stage", [{"upstream_key": "choices", "key": KEY}], indirect=True)
def test_a_word_as_the_key_of_a_server_without_keys_is_not_removed_from_its_answers(stage: Transparent) -> None:
    status, _, answer = stage.request("POST", PATHS["chat"], CHAT, **stage.owner)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hi")


def test_header_values_in_latin_1_are_not_cut(stage: Transparent) -> None:
    sent = {"X-Name": "caf\u00e9", "X-Other": "\u20ac".encode().decode("latin-1")}
    stage.request("POST", PATHS["chat"], CHAT, **sent)
    (received,) = stage.upstream.headers
    assert (received["x-name"], received["x-other"]) == ("caf\u00e9", "\u20ac")  # Node and http.client send Latin-1
    assert response_headers({"X-Name": "caf\udce9"})["X-Name"] == "caf\u00e9"  # as aiohttp reads the byte E9


# -- paths


@pytest.mark.parametrize("owned", ["", "sk-owner"], ids=["no key", "upstream's key"])
@pytest.mark.parametrize("key", [None, KEY], ids=["open", "keyed"])
def test_other_paths_are_open_to_the_gateways_key_and_not_to_a_rollouts_token(
    tmp_path: Path, owned: str, key: str | None
) -> None:
    path, body = "/v1/load_lora_adapter", {"lora_name": "mine"}
    with opened_stage(tmp_path, Echo(), upstream_key=owned or None, key=key) as stage:
        token = stage.gateway.access.token("0" * 32)
        assert stage.post(path, body, Authorization=f"Bearer {token}")[0] == 403
        assert stage.post(f"/r/{token}{path}", body)[0] == 403
        if owned:  # else an open gateway passes on what its caller may ask the server itself
            assert stage.post(path, body)[0] == (401 if key else 403)
        assert stage.upstream.requests == []
        assert stage.manage(path, body)[0] == 200
        if owned:
            assert stage.post(f"/r/{token}{path}", body, Authorization=f"Bearer {CALLERS_KEY}")[0] == 200
            sent = [headers["authorization"] for headers in stage.upstream.headers]
            assert sent == ["Bearer sk-owner", f"Bearer {CALLERS_KEY}"]
        assert {called for _, called in stage.upstream.requests} == {path}
        assert token not in json.dumps(stage.gateway.stats())


@pytest.mark.parametrize("stage", [{"upstream_key": "sk-owner", "key": KEY}], indirect=True)
def test_a_rollouts_token_lists_models_and_counts_tokens(stage: Transparent) -> None:
    token = stage.gateway.access.token("0" * 32)
    assert stage.request("GET", f"/r/{token}/v1/models")[0] == 200
    assert stage.request("POST", "/v1/messages/count_tokens", CHAT, **{"x-api-key": token})[0] == 200
    assert [headers["x-api-key"] for headers in stage.upstream.headers] == ["sk-owner"] * 2
    assert stage.rollouts() == []


def test_paths_of_the_gateway_are_never_forwarded(stage: Transparent) -> None:
    for path in ("/", "/assay/nothing", "/feedback", "/r/some/reward", "/health/x"):
        status, _, reply = stage.request("GET", path, **stage.owner)
        assert (status, "is not supported here" in reply["error"]["message"]) == (404, True)
    assert stage.upstream.requests == []


def test_a_name_in_an_address_cannot_lead_to_another_path_with_the_providers_key(stage: Transparent) -> None:
    for path in (
        "/openai/deployments/../chat/completions",
        "/openai/deployments/..%2f..%2ffiles/chat/completions",
        "/r/a/openai/deployments/%2e%2e/completions",
        "/v1beta/models/%2E%2E%2Ffiles%3f:generateContent",
        "/openai/deployments/a%23/chat/completions",
        "/openai/deployments/a%5c..%5cb/chat/completions",
    ):
        assert stage.request("POST", path, CHAT)[0] == 422
    assert stage.upstream.requests == []
    assert stage.request("POST", "/openai/deployments/my%20own%2Fmodel..v2/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize("stage", [{"model": "openai/other"}], indirect=True)
def test_the_gateways_model_replaces_the_deployment(stage: Transparent) -> None:
    stage.request("POST", AZURE, CHAT)
    assert stage.upstream.requests == [("POST", AZURE.replace("gpt", "other"))]


def test_a_compressed_body_reaches_the_upstream_decompressed(stage: Transparent) -> None:
    body, compressed = json.dumps({**CHAT, "padding": "a" * 10_000}).encode(), {"Content-Encoding": "gzip"}
    for path in ("/v1/files", PATHS["chat"]):
        assert stage.request("POST", path, gzip.compress(body), **compressed)[0] == 200
    assert stage.upstream.bodies == [body] * 2
    status, _, reply = stage.request("POST", PATHS["chat"], b"no gzip", **compressed)
    assert (status, "cannot be read" in reply["error"]["message"]) == (400, True)


# -- time


class Slow(AnsweringServer):
    """Streams an answer in parts released by the test, blank lines between; an empty part disconnects."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.parts: queue.Queue[bytes | None] = queue.Queue()

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
def slow(tmp_path: Path) -> Iterator[tuple[Stage, http.client.HTTPConnection]]:
    with opened_stage(tmp_path, Slow(), model=None) as stage:
        connection = http.client.HTTPConnection(stage.url.removeprefix("http://"), timeout=120)
        connection.request("POST", PATHS["chat"], body=json.dumps(CHAT))
        yield stage, connection
        connection.close()


@pytest.mark.parametrize("breaks", [False, True])
def test_what_arrives_before_an_answer_or_of_a_part_of_one_is_forwarded_at_once(
    slow: tuple[Stage, http.client.HTTPConnection], breaks: bool
) -> None:
    stage, connection = slow
    whole = json.dumps(ANSWER).encode()
    if breaks:
        stage.upstream.parts.put(whole[:20])
    answer = connection.getresponse()
    assert (answer.status, answer.read1().strip()) in ((200, b""), (200, whole[:20]))  # blank lines while it waits
    stage.upstream.parts.put(b"" if breaks else whole)
    stage.upstream.parts.put(None)
    if breaks:
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
        assert (stage.call().output.strip(), stage.call().failure) == (whole[:20].decode(), "model")
    else:
        assert json.loads(answer.read()) == ANSWER
        assert (stage.call().output, stage.call().error) == ("hi", None)


def test_a_streamed_answer_has_the_upstreams_headers_and_no_others(tmp_path: Path) -> None:
    def headers(url: str) -> dict[str, str]:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        connection.request("POST", PATHS["chat"], body=json.dumps({**CHAT, "stream": True}))
        answer = connection.getresponse()
        answer.read()
        connection.close()
        lower_case = {name.lower(): value for name, value in answer.getheaders()}
        return {name: value for name, value in lower_case.items() if name not in ("date", "x-assay-rollout")}

    with opened_stage(tmp_path, ScriptedUpstream(), model=None) as stage:
        assert headers(stage.url) == headers(stage.behind)


@pytest.mark.slow
def test_streamed_text_is_forwarded_before_the_call_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the whole stream came at once; its end waits, as the client's next call may come with it."""
    last = b'"content": "o"'  # of "hello"
    original, received_before, received = Call.keep, list[bytes](), list[bytes]()

    def keep(call: Call) -> bool:
        end = time.monotonic() + 120
        while last not in b"".join(received) and time.monotonic() < end:  # in the gateway's own thread
            time.sleep(0.01)
        received_before.append(b"".join(received))
        return original(call)

    monkeypatch.setattr(Call, "keep", keep)
    body = json.dumps({**CHAT, "stream": True}).encode()
    head = (
        f"POST {PATHS['chat']} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with opened_stage(tmp_path) as stage:
        address = ("127.0.0.1", int(stage.url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=120) as sock:
            sock.sendall(head.encode() + body)
            while part := sock.recv(65536):
                received.append(part)
    (before,) = received_before
    assert b"[DONE]" in b"".join(received)
    assert last in before
    assert b"[DONE]" not in before
    assert b'"finish_reason": "stop"' not in before


# -- addresses: what `--upstream` takes, and calls at paths that are not the dialects' own


CLAUDE = body_of("messages")
RESPONSES = body_of("responses")
ENDS = {"chat": "/chat/completions", "completions": "/completions", "responses": "/responses", "messages": "/messages"}


class Listing(AnsweringServer):
    """Answers every path, as a call of the dialect in which its path ends, and lists the addresses."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.asked: list[str] = []

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        dialect = next((name for name, end in ENDS.items() if request.path.endswith(end)), None)
        return web.json_response(response_body(dialect, 1, "m", "hello", []) if dialect else {"reply": "hello"})


def asked_at(folder: Path, address: str, *calls: tuple[str, Any]) -> tuple[list[str], list[str]]:
    """The addresses at the server and the outputs on record of calls through a gateway."""
    server = Listing()
    with opened_stage(folder, upstream=lambda behind: upstream_of(None, base=behind + address), server=server) as stage:
        for path, body in calls:
            assert stage.post(path, body)[0] == 200
        return server.asked, [call.output for call in stage.calls()]


@pytest.mark.parametrize(
    ("address", "located"),
    [
        ("", "/v1/chat/completions"),
        ("/", "/v1/chat/completions"),
        ("/v1", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/api/v1", "/api/v1/chat/completions"),
        ("/api/paas/v4", "/api/paas/v4/chat/completions"),
        ("/api/paas/v4/", "/api/paas/v4/chat/completions"),
        ("/v1beta/openai", "/v1beta/openai/chat/completions"),
        ("/v1beta/openai/", "/v1beta/openai/chat/completions"),
        ("/compatible-mode/v1", "/compatible-mode/v1/chat/completions"),
        ("/v4?api-version=2", "/v4/chat/completions?api-version=2"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v3/chat/completions/?a=1", "/api/v3/chat/completions?a=1"),
        ("/openai/deployments/x?api-version=2", "/openai/deployments/x/chat/completions?api-version=2"),
        ("/openai/deployments/x/chat/completions?v=2", "/openai/deployments/x/chat/completions?v=2"),
        ("/inference", "/inference/chat/completions"),
    ],
)
def test_an_upstreams_address_is_taken_as_it_is(tmp_path: Path, address: str, located: str) -> None:
    calls = [(path, CHAT) for path in ("/v1/chat/completions", "/chat/completions")]
    assert asked_at(tmp_path, address, *calls) == ([located] * 2, ["hello"] * 2)


@pytest.mark.parametrize(
    ("address", "path", "body", "located"),
    [
        ("/anthropic", "/v1/messages", CLAUDE, "/anthropic/v1/messages"),
        ("/api/v4", "/v1/responses", RESPONSES, "/api/v4/responses"),
        ("/api/v4?a=1", "/v1/embeddings?b=2", {"input": "hi"}, "/api/v4/embeddings?a=1&b=2"),
        ("/v1", "/tokenize", {"text": "hi"}, "/tokenize"),
        *(  # a caller's path that repeats the address is not doubled
            (address, f"{address}/chat/completions", CHAT, f"{address}/chat/completions")
            for address in ("/api/paas/v4", "/v1beta/openai", "/openai/v1", "/openai/deployments/x")
        ),
    ],
)
def test_other_dialects_and_paths_follow_the_address(
    tmp_path: Path, address: str, path: str, body: Any, located: str
) -> None:
    asked, outputs = asked_at(tmp_path, address, (path, body))
    assert (asked, outputs) == ([located], ["hello"] if any(located.endswith(end) for end in ENDS.values()) else [])


@pytest.mark.parametrize("address", ["HTTP://Host/v4", "Http://Host/v4", " http://Host/v4/\n"])
def test_the_scheme_of_an_address_may_have_capitals_and_blanks_around_it(address: str) -> None:
    upstream = upstream_of(None, base=address)
    assert (upstream.base, upstream.version) == ("http://Host", "/v4")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "address",
    [
        None, "http://", "http:///v1", "HTTPS://?a=1", "ftp://host", "//host", "host/v4", "localhost:8000",
        "https://user:secret@host/v4", "https://host/v4?api_key=secret",
    ],
)  # fmt: skip
def test_an_address_without_a_host_or_with_a_key_is_refused_and_the_key_not_repeated(address: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        upstream_of(None, base=address)
    assert "secret" not in str(refused.value)


# -- calls at other paths


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with opened_stage(tmp_path_factory.mktemp("addresses"), Listing(), model=None) as opened:
        yield opened


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/openai/deployments/x/chat/completions?api-version=2024", CHAT),
        ("/v1/engines/x/completions", {"prompt": "hi"}),
        ("/v1/engines/x/chat/completions", {"messages": CHAT["messages"]}),
        ("/v2/projects/p/messages", CLAUDE),
        ("/anthropic/v1/messages", CLAUDE),
        ("/api/v1/chat/completions", CHAT),
        ("/api/paas/v4/chat/completions", CHAT),
        ("/v1beta/openai/chat/completions", CHAT),
        ("/proxy/openai/v1/responses", RESPONSES),
        ("/chat/completions", CHAT),
        ("/responses", RESPONSES),
        ("/messages", CLAUDE),
        ("/r/me/api/v3/chat/completions", CHAT),
    ],
)
def test_calls_at_odd_paths_are_recorded(listing: Stage, path: str, body: dict[str, Any]) -> None:
    before, unrecorded = len(listing.calls()), listing.gateway.unrecorded
    assert listing.post(path, body)[0] == 200
    assert (listing.calls()[-1].output, len(listing.calls()), listing.gateway.unrecorded) == (
        "hello",
        before + 1,
        unrecorded,
    )


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/model/x/converse", "/odd", "/v1beta/interactions"])
def test_calls_in_other_formats_are_counted_and_said_at_once(
    listing: Stage, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, unrecorded = len(listing.calls()), listing.gateway.unrecorded
    assert listing.post(path, {**CHAT, "prompt": "hi", "input": "hi"})[0] == 200
    assert (len(listing.calls()), listing.gateway.unrecorded) == (before, unrecorded + 1)
    said = [record.getMessage() for record in caplog.records if record.name == "assay.gateway"]
    assert [path.split("/")[1] in text for text in said] == [True]


@pytest.mark.parametrize("path", ["/v1/threads/t/messages", "/v1/embeddings", "/v1/files"])
def test_requests_that_are_no_calls_are_passed_on(listing: Stage, path: str, caplog: pytest.LogCaptureFixture) -> None:
    before, unrecorded = len(listing.calls()), listing.gateway.unrecorded
    assert listing.post(path, {"role": "user", "content": "hi"})[0] == 200
    assert (len(listing.calls()), listing.gateway.unrecorded, caplog.records) == (before, unrecorded, [])
