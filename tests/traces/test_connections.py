"""Connections that are silent, slow or many: others are answered, and the gateway's descriptors stay bounded."""

import asyncio
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.errors import ConfigError, FailureKind
from assay.traces import Store, Transition
from assay.traces.gateway.connections import ConnectionLimits, Listener, most_connections
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import HttpUpstream, LitellmUpstream
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF_OPEN = {
    "nothing": b"",
    "half a line": b"POST /v1/ch",
    "half of the headers": HEAD,
    "no body": HEAD + b"Content-Length: 100\r\n\r\n",
    "half of the body": HEAD + b'Content-Length: 100\r\n\r\n{"messages": [',
    "half of a chunked body": HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"mes\r\n',
}


class Endless:
    """Streams without an end, or begins to; counts the streams that are open."""

    def __init__(self) -> None:
        self.open, self.part, self.bodies = 0, b"", list[int]()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._stream)
        app.router.add_post("/v1/files", self._take)
        return app

    async def _take(self, request: web.Request) -> web.Response:
        self.bodies.append(len(await request.read()))
        return web.json_response({})

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


class Stage:
    def __init__(self, store: Store, gateway: Gateway, listener: Listener, upstream: Any, url: str) -> None:
        self.store, self.gateway, self.listener, self.upstream, self.url = store, gateway, listener, upstream, url
        self.port = int(url.rpartition(":")[2])

    def connect(self, sent: bytes = b"", *, small: bool = False) -> socket.socket:
        sock = socket.socket()
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(120)
        sock.connect(("127.0.0.1", self.port))
        sock.sendall(sent)
        return sock

    def say(self, text: str, **more: Any) -> tuple[int, dict[str, Any]]:
        return post(f"{self.url}/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})

    def calls(self) -> list[Transition]:
        self.store.flush()
        return [call for rollout in self.store.rollouts() for call in self.store.rollout(rollout.id).transitions]


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    options: dict[str, Any] = dict(getattr(request, "param", {}))
    upstream = options.pop("upstream", ScriptedUpstream)()
    idle_s, limits = options.pop("upstream_idle_s", 600.0), ConnectionLimits(**options)
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(store, HttpUpstream("m", behind, idle_s=idle_s), receive_s=limits.receive_s)
        app = gateway.app()
        listener = Listener(app, limits, gateway.connections.answered, shutdown_s=1.0)
        with served(app, listener) as url:
            yield Stage(store, gateway, listener, upstream, url)


def until(condition: Callable[[], bool], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.02)


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
def test_half_open_connections_are_closed_and_others_are_answered_meanwhile(stage: Stage) -> None:
    assert stage.say("warm")[0] == 200
    assert len(stage.calls()) == 1  # the database is open
    until(lambda: not stage.listener.runner.server.connections)  # type: ignore[union-attr]
    before = descriptors()
    silent = {name: [stage.connect(sent) for _ in range(8)] for name, sent in HALF_OPEN.items()}
    until(lambda: descriptors() >= before + 2 * 8 * len(HALF_OPEN))
    assert stage.say("hello")[0] == 200
    for name, connections in silent.items():
        for connection in connections:
            received = remaining_bytes(connection)
            assert received == b"" if b"\r\n\r\n" not in HALF_OPEN[name] else received.startswith(b"HTTP/1.1 408"), name
    until(lambda: descriptors() <= before)
    assert len(stage.calls()) == 2  # none of the half requests


@pytest.mark.parametrize("stage", [{"upstream": Endless, "receive_s": 0.5}], indirect=True)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files"])
@pytest.mark.timeout(120)
def test_a_body_that_arrives_too_slowly_is_refused(stage: Stage, path: str) -> None:
    connection = stage.connect(HEAD.replace(b"/v1/chat/completions", path.encode()) + b"Content-Length: 1000\r\n\r\n")
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
def test_a_caller_that_reads_nothing_does_not_block_the_upstream(stage: Stage) -> None:
    stage.upstream.part = b"data: {}\n\n" * 2000
    body = json.dumps({**HELLO, "stream": True}).encode()
    connection = stage.connect(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body, small=True)
    until(lambda: stage.upstream.open == 1)
    until(lambda: stage.upstream.open == 0)
    connection.close()
    until(lambda: len(stage.calls()) == 1)
    assert stage.calls()[0].failure == FailureKind.CAP


# -- upstreams


@pytest.mark.parametrize("stage", [{"upstream": Endless, "upstream_idle_s": 0.5}], indirect=True)
def test_an_upstream_that_never_answers_is_a_timeout(stage: Stage) -> None:
    assert stage.say("never")[0] == 504
    (call,) = stage.calls()
    assert call.failure == FailureKind.TIMEOUT


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["#hang", "#hang in a stream"])
def test_a_provider_behind_litellm_that_falls_silent_is_a_timeout(tmp_path: Path, prompt: str) -> None:
    with Store(tmp_path / "s.db") as store, served(ScriptedUpstream().app()) as behind:
        upstream = LitellmUpstream("openai/echo", {"api_base": f"{behind}/v1", "api_key": "secret"}, idle_s=2.0)
        stream = "stream" in prompt
        with served(Gateway(store, upstream).app()) as url:
            body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": stream}).encode()
            sock = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=120)
            sock.sendall(HEAD + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            received = remaining_bytes(sock)
        store.flush()
        (rollout,) = store.rollouts()
        (call,) = store.rollout(rollout.id).transitions
    assert received.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 504")
    assert not received.endswith(b"0\r\n\r\n")
    assert call.failure == FailureKind.TIMEOUT
    assert "nothing for 2 s" in str(call.error)


# -- how many


@pytest.mark.parametrize("stage", [{"most": 4}], indirect=True)
@pytest.mark.slow
def test_idle_connections_are_closed_at_the_limit(stage: Stage) -> None:
    silent = [
        stage.connect(HALF_OPEN[name])
        for name in ("nothing", "half of the headers", "no body", "half of the body")
        for _ in range(3)
    ]
    assert stage.say("hello")[0] == 200  # long before any of them is too old
    assert len(stage.listener.runner.server.connections) <= 4  # type: ignore[union-attr]
    for connection in silent:
        connection.close()


@pytest.mark.parametrize("stage", [{"most": 3}], indirect=True)
def test_a_call_waits_while_all_connections_are_in_use(stage: Stage) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "#hang"}]}).encode()
    calls = [stage.connect(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body) for _ in range(3)]
    until(lambda: len(stage.gateway.connections.answered) == 3)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(stage.say, "hello")
        time.sleep(1.5)
        assert not waiting.done()
        assert len(stage.gateway.connections.answered) == 3  # none was closed for it
        calls[0].close()
        assert waiting.result(20)[0] == 200
    for connection in calls:
        connection.close()


def test_the_number_of_connections_follows_the_limit_on_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 298), (256, 42), (64, 8), (resource.RLIM_INFINITY, 2000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections() == ConnectionLimits().connections == most
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert ConnectionLimits(most=500).connections == 500
    with pytest.raises(
        ConfigError, match=r"most=600 connections .* this process may open 1024: raise the limit \(ulimit -n 1928\)"
    ):
        ConnectionLimits(most=600)
    with pytest.raises(ConfigError, match="idle_s=0 must be above 0"):
        ConnectionLimits(idle_s=0)
