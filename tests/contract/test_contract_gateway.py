"""The gateway forwards requests and returns answers byte for byte, in four dialects, and records them."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from contract_files import Contract, shape

import assay
from assay.traces import Rollout
from rigs.command_line import Done, while_serving

# Bodies as no JSON library writes them: spaces, escapes, the order of keys and unknown keys have to stay.
EXCHANGES = {
    "chat": (
        "/v1/chat/completions?trace=1",
        b'{ "model":"m",  "messages":[{"role":"user","content":"caf\\u00e9 \xe2\x82\xac"}], "vendor":{"b":1,"a":2} }',
        b'{"id":"1", "choices":[ {"index":0,"message":{"role":"assistant","content":"d\\u00e9j\xc3\xa0"},'
        b'"finish_reason":"stop"}], "usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7},"extra" : 1.5 }',
    ),
    "chat, streamed": (
        "/v1/chat/completions",
        b'{"stream":true, "model":"m","messages":[{"role":"user","content":"hi"}],'
        b'"stream_options":{"include_usage":true}}',
        b': a comment\n\ndata: {"choices":[{"index":0,"delta":{"role":"assistant","content":"he"}}]}\n\n'
        b'data:  {"choices":[{"index":0,"delta":{"content":"llo"},"finish_reason":"stop"}]}\r\n\r\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}\n\ndata: [DONE]\n\n',
    ),
    "responses": (
        "/v1/responses",
        b'{"model":"m", "input":"hi",  "store":false}',
        b'{"id":"resp_1","object":"response", "status":"completed","output":[{"type":"message","id":"msg_1","role":'
        b'"assistant","content":[{"type":"output_text","text":"hello","annotations":[]}]}],"usage":{"input_tokens":5,'
        b'"output_tokens":2,"total_tokens":7}}',
    ),
    "messages": (
        "/v1/messages",
        b'{"model":"m","max_tokens":9, "messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}]}',
        b'{"id":"msg_1","type":"message","role":"assistant", "content":[{"type":"text","text":"hello"}],"model":"m",'
        b'"stop_reason":"end_turn","usage":{"input_tokens":5,"output_tokens":2}}',
    ),
    "messages, streamed": (
        "/v1/messages",
        b'{"model":"m","max_tokens":9,"stream":true,"messages":[{"role":"user","content":"hi"}]}',
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message","role":'
        b'"assistant","content":[],"model":"m","usage":{"input_tokens":5,"output_tokens":0}}}\n\n'
        b'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text",'
        b'"text":""}}\n\nevent: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":'
        b'"text_delta","text":"hello"}}\n\nevent: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{'
        b'"output_tokens":2}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n',
    ),
    "gemini": (
        "/v1beta/models/m:generateContent",
        b'{ "contents":[{"role":"user","parts":[{"text":"hi"}]}] }',
        b'{"candidates": [{"content":{"parts":[{"text":"hello"}],"role":"model"},"finishReason":"STOP","index":0}],'
        b'"usageMetadata":{"promptTokenCount":5,"candidatesTokenCount":2,"totalTokenCount":7}}',
    ),
    "gemini, streamed": (
        "/v1beta/models/m:streamGenerateContent?alt=sse",
        b'{"contents":[{"role":"user","parts":[{"text":"hi"}]}]}',
        b'data: {"candidates": [{"content":{"parts":[{"text":"he"}],"role":"model"},"index":0}]}\r\n\r\n'
        b'data: {"candidates": [{"content":{"parts":[{"text":"llo"}],"role":"model"},"finishReason":"STOP","index":0}],'
        b'"usageMetadata":{"promptTokenCount":5,"candidatesTokenCount":2,"totalTokenCount":7}}\r\n\r\n',
    ),
    "an error": (
        "/v1/chat/completions",
        b'{"model":"fails","messages":[{"role":"user","content":"hi"}]}',
        b'{"error" : {"message":"no such model","type":"invalid_request_error"}}',
    ),
}
STATUS = {"an error": 404}
SENT = {
    "Content-Type": "application/json",
    "Authorization": "Bearer sk-caller",
    "X-Custom": "kept",
    "x-assay-task": "t1",
}


@dataclass
class Received:
    """A request as it reached the upstream."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Upstream:
    """A server that answers each request with stored bytes, and keeps what it received."""

    url: str
    received: dict[str, Received] = field(default_factory=dict)


@contextlib.contextmanager
def upstream() -> Iterator[Upstream]:
    """Knows an exchange by its header `X-Exchange`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body of an answer are two writes

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            name = self.headers["X-Exchange"]
            kept.received[name] = Received(self.path, {key.lower(): value for key, value in self.headers.items()}, body)
            answer = EXCHANGES[name][2]
            self.send_response(STATUS.get(name, 200))
            self.send_header("Content-Type", "text/event-stream" if "streamed" in name else "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.send_header("X-Upstream", "theirs")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kept = Upstream(f"http://127.0.0.1:{server.server_port}")
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True)
class Returned:
    """An answer as it reached the client."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Served:
    """What happened between the client and the upstream, and in the store."""

    received: dict[str, Received]
    returned: dict[str, Returned]
    rollouts: dict[str, Rollout]
    start: dict[str, Any]
    done: Done


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """One gateway that gets every exchange once."""
    store = tmp_path_factory.mktemp("gateway") / "assay.db"
    starts: list[dict[str, Any]] = []

    def client(start: dict[str, Any]) -> dict[str, Returned]:
        starts.append(start)
        return {name: ask(start["url"], name, path, body) for name, (path, body, _) in EXCHANGES.items()}

    with upstream() as behind:
        returned, done = while_serving(
            "serve", "--upstream", behind.url, "--port", "0", "--store", str(store), "--json", client=client
        )
    with assay.Store(store) as opened:
        ids = {name: answer.headers["x-assay-rollout"] for name, answer in returned.items()}
        rollouts = {name: opened.rollout(rollout) for name, rollout in ids.items()}
    return Served(behind.received, returned, rollouts, starts[0], done)


def ask(url: str, name: str, path: str, body: bytes) -> Returned:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, body=body, headers={**SENT, "X-Exchange": name})
        answer = connection.getresponse()
        return Returned(answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_request_reaches_the_upstream_byte_for_byte(name: str, served: Served) -> None:
    path, body, _ = EXCHANGES[name]
    assert (served.received[name].path, served.received[name].body) == (path, body)


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_answer_reaches_the_client_byte_for_byte(name: str, served: Served) -> None:
    returned = served.returned[name]
    assert (returned.status, returned.body) == (STATUS.get(name, 200), EXCHANGES[name][2])


def test_headers_pass_both_ways_except_the_gateways_own(served: Served) -> None:
    for name in EXCHANGES:
        sent, returned = served.received[name].headers, served.returned[name].headers
        assert (sent["authorization"], sent["x-custom"]) == ("Bearer sk-caller", "kept")
        assert [key for key in sent if key.startswith("x-assay")] == []
        assert returned["x-upstream"] == "theirs"


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_recorded_call_is_unchanged(name: str, served: Served, contract: Contract) -> None:
    (call,) = served.rollouts[name].transitions
    assert call.request["body"] == json.loads(EXCHANGES[name][1])
    contract.check(
        "gateway",
        name,
        {
            "dialect": call.request["dialect"],
            "output": call.output,
            "failure": call.failure,
            "tokens": [call.prompt_tokens, call.completion_tokens],
            "model": call.model,
            "response": call.response,
            "status": served.rollouts[name].status,
        },
    )


def test_no_key_of_a_caller_is_stored(served: Served, tmp_path_factory: pytest.TempPathFactory) -> None:
    stores = [path for path in tmp_path_factory.getbasetemp().rglob("gateway*/assay.db*") if path.is_file()]
    assert stores
    assert [path for path in stores if b"sk-caller" in Path(path).read_bytes()] == []


def test_the_gateway_prints_its_address_and_its_counts(served: Served, contract: Contract) -> None:
    first, last = map(json.loads, served.done.stdout.splitlines())
    assert first == served.start
    assert (served.done.code, last["calls"], last["stored"], last["unrecorded"]) == (
        0,
        len(EXCHANGES),
        len(EXCHANGES),
        0,
    )
    contract.check("gateway", "serve", {"start": shape(first), "end": shape(last)})
