"""Connections that are silent, slow or many: others are answered, and the gateway's descriptors stay bounded."""

import asyncio
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.errors import ConfigError, FailureKind
from assay.traces import Store
from assay.traces.gateway.connections import ConnectionLimits, Listener, most_connections
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import HttpUpstream
from rigs.gateway import AnsweringServer, Stage, body_of, opened_stage, through_litellm, until
from rigs.serving import served
from rigs.upstream import ScriptedUpstream

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF_OPEN = {
    "nothing": b"",
    "half a line": b"POST /v1/ch",
    "half of the headers": HEAD,
    "no body": HEAD + b"Content-Length: 100\r\n\r\n",
    "half of the body": HEAD + b'Content-Length: 100\r\n\r\n{"messages": [',
    "half of a chunked body": HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"mes\r\n',
}


class Endless(AnsweringServer):
    """Streams without an end, or begins to; counts the streams that are open."""

    def __init__(self) -> None:
        super().__init__(self._stream)
        self.open, self.part = 0, b""

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["messages"][-1]["content"]
        if "never" in prompt:
            await asyncio.sleep(60)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        try:
            await response.write(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
            while True:
                await asyncio.sleep(0 if self.part else 60)
                await response.write(self.part)
        finally:
            self.open -= 1


class Listening(Stage):
    """A gateway whose listener has limits of the test."""

    listener: Listener


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Listening]:
    options: dict[str, Any] = dict(getattr(request, "param", {}))
    upstream = options.pop("upstream", ScriptedUpstream)()
    idle_s, limits = options.pop("upstream_idle_s", 600.0), ConnectionLimits(**options)
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(store, HttpUpstream("m", behind, idle_s=idle_s), receive_s=limits.receive_s)
        app = gateway.app()
        listener = Listener(app, limits, gateway.connections.answered, shutdown_s=1.0)
        with served(app, listener) as url:
            opened = Listening(gateway, upstream, url, behind)
            opened.listener = listener
            yield opened


def connect(stage: Stage, sent: bytes = b"", *, small: bool = False) -> socket.socket:
    sock = socket.socket()
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(120)
    sock.connect(("127.0.0.1", int(stage.url.rpartition(":")[2])))
    sock.sendall(sent)
    return sock


def call_bytes(text: str, *, stream: bool = False) -> bytes:
    """A call that ends its connection."""
    body = json.dumps(body_of("chat", text, stream=stream)).encode()
    return HEAD + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def remaining_bytes(sock: socket.socket) -> bytes:
    """What a connection still brings until it is closed."""
    received = b""
    try:
        while part := sock.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    sock.close()
    return received


# -- callers


@pytest.mark.slow
@pytest.mark.parametrize("stage", [{"idle_s": 2.0, "receive_s": 2.0}], indirect=True)
def test_half_open_connections_are_closed_and_others_are_answered_meanwhile(stage: Listening) -> None:
    assert stage.ask("warm") == 200
    assert len(stage.calls()) == 1  # the database is open
    until(lambda: not stage.listener.runner.server.connections)  # type: ignore[union-attr]
    before = descriptors()
    silent = {name: [connect(stage, sent) for _ in range(8)] for name, sent in HALF_OPEN.items()}
    until(lambda: descriptors() >= before + 2 * 8 * len(HALF_OPEN))
    assert stage.ask("hello") == 200
    for name, connections in silent.items():
        for connection in connections:
            received = remaining_bytes(connection)
            assert received == b"" if b"\r\n\r\n" not in HALF_OPEN[name] else received.startswith(b"HTTP/1.1 408"), name
    until(lambda: descriptors() <= before)
    assert len(stage.calls()) == 2  # none of the half requests


@pytest.mark.parametrize("stage", [{"upstream": Endless, "receive_s": 0.5}], indirect=True)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files"])
@pytest.mark.timeout(120)
def test_a_body_that_arrives_too_slowly_is_refused(stage: Listening, path: str) -> None:
    connection = connect(stage, HEAD.replace(b"/v1/chat/completions", path.encode()) + b"Content-Length: 1000\r\n\r\n")
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            try:
                connection.sendall(b" ")
            except OSError:
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    received = connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 408")
    assert b"the body did not come within 0.5 s" in received + connection.recv(65536)
    remaining_bytes(connection)
    stop.set()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [{"upstream": Endless, "stalled_s": 0.8}], indirect=True)
def test_a_caller_that_reads_nothing_does_not_block_the_upstream(stage: Listening) -> None:
    stage.upstream.part = b"data: {}\n\n" * 2000
    connection = connect(stage, call_bytes("hello", stream=True), small=True)
    until(lambda: stage.upstream.open == 1)
    until(lambda: stage.upstream.open == 0)
    connection.close()
    until(lambda: len(stage.calls()) == 1)
    assert stage.call().failure == FailureKind.CAP


# -- upstreams


@pytest.mark.parametrize("stage", [{"upstream": Endless, "upstream_idle_s": 0.5}], indirect=True)
def test_an_upstream_that_never_answers_is_a_timeout(stage: Listening) -> None:
    assert stage.ask("never") == 504
    assert stage.call().failure == FailureKind.TIMEOUT


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_provider_behind_litellm_that_falls_silent_is_a_timeout(tmp_path: Path, stream: bool) -> None:
    with opened_stage(tmp_path, upstream=partial(through_litellm, idle_s=2.0)) as stage:
        received = remaining_bytes(connect(stage, call_bytes("#hang", stream=stream)))
        call = stage.call()
    assert received.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 504")
    assert not received.endswith(b"0\r\n\r\n")
    assert (call.failure, "nothing for 2 s" in str(call.error)) == (FailureKind.TIMEOUT, True)


# -- how many


@pytest.mark.parametrize("stage", [{"most": 4}], indirect=True)
@pytest.mark.slow
def test_idle_connections_are_closed_at_the_limit(stage: Listening) -> None:
    silent = [connect(stage, sent) for sent in HALF_OPEN.values() for _ in range(2)]
    assert stage.ask("hello") == 200  # long before any of them is too old
    assert len(stage.listener.runner.server.connections) <= 4  # type: ignore[union-attr]
    for connection in silent:
        connection.close()


@pytest.mark.parametrize("stage", [{"most": 3}], indirect=True)
def test_a_call_waits_while_all_connections_are_in_use(stage: Listening) -> None:
    calls = [connect(stage, call_bytes("#hang")) for _ in range(3)]
    until(lambda: len(stage.gateway.connections.answered) == 3)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(stage.ask, "hello")
        time.sleep(1.5)
        assert not waiting.done()
        assert len(stage.gateway.connections.answered) == 3  # none was closed for it
        calls[0].close()
        assert waiting.result(20) == 200
    for connection in calls:
        connection.close()


def test_the_number_of_connections_follows_the_limit_on_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 298), (256, 42), (64, 8), (resource.RLIM_INFINITY, 2000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections() == ConnectionLimits().connections == most
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert ConnectionLimits(most=500).connections == 500
    for wrong, why in (({"most": 600}, r"may open 1024: .*ulimit -n 1928"), ({"idle_s": 0}, "must be above 0")):
        with pytest.raises(ConfigError, match=why):
            ConnectionLimits(**wrong)
