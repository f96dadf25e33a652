"""A gateway over real sockets in front of a server of the test's choice, and requests to it, for tests."""

import json
import sqlite3
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from assay.traces import Rollout, Store, Transition
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import LitellmUpstream, upstream_of
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream

KEY = "gateway-key-1"
OWNER = {"Authorization": f"Bearer {KEY}"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "gemini": "/v1beta/models/m:generateContent",
}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"type": "function", "function": {"name": "calculator", "description": "Calculates.", "parameters": PARAMETERS}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def body_of(dialect: str, text: str = "hello", **more: Any) -> dict[str, Any]:
    """A request with one user text; `stream` is not for Gemini, whose path tells it."""
    prompts: dict[str, Any] = {
        "chat": {"messages": [user(text)]},
        "completions": {"prompt": text},
        "responses": {"input": text},
        "messages": {"messages": [user(text)], "max_tokens": 60},
        "gemini": {"contents": [{"role": "user", "parts": [{"text": text}]}]},
    }
    return {**({} if dialect == "gemini" else {"model": "m"}), **prompts[dialect], **more}


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.02)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another connection's write lock on an SQLite store."""
    other = sqlite3.connect(path, isolation_level=None, timeout=120, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


class AnsweringServer:
    """A server that answers every request with the result of a function."""

    def __init__(self, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self.answer = answer

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app


async def send_events(request: web.Request, events: Iterable[Any]) -> web.StreamResponse:
    """Streams the events: JSON values in the form of server-sent events, bytes as they are."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        data = event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode()
        await response.write(data)
    return response


class Stage:
    """A gateway, its store, the server behind it, and their addresses."""

    def __init__(self, gateway: Gateway, upstream: Any, url: str, behind: str) -> None:
        self.gateway, self.store, self.upstream, self.url, self.behind = gateway, gateway.store, upstream, url, behind
        self.owner = {"Authorization": f"Bearer {gateway.access.key}"}

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON; `path` may be a dialect's name."""
        return post(self.url + PATHS.get(path, path), body, **headers)

    def manage(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """A POST with the gateway's key."""
        return self.post(path, body, **self.owner)

    def ask(self, text: str, dialect: str = "chat", *, headers: dict[str, str] | None = None, **more: Any) -> int:
        """The status of a call with one user text."""
        return self.post(dialect, body_of(dialect, text, **more), **(headers or {}))[0]

    def chat(self, *messages: dict[str, Any], headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        """The message of a chat that is answered."""
        status, reply = self.post("chat", {"model": "m", "messages": list(messages), **more}, **(headers or {}))
        assert status == 200, reply
        message: dict[str, Any] = reply["choices"][0]["message"]
        return message

    def stream(self, path: str, body: dict[str, Any], **headers: str) -> bytes:
        """The bytes of a streamed answer; `path` may be a dialect's name."""
        if path == "gemini":
            path = PATHS[path].replace("generateContent", "streamGenerateContent?alt=sse")
        elif path in PATHS:
            path, body = PATHS[path], {**body, "stream": True}
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            content: bytes = answer.read()
        return content

    def rollouts(self) -> list[Rollout]:
        """From the store, the oldest first, with their calls."""
        self.store.flush()
        return [self.store.rollout(rollout.id) for rollout in self.store.rollouts()][::-1]

    def rollout(self) -> Rollout:
        """The only one."""
        (rollout,) = self.rollouts()
        return rollout

    def calls(self) -> list[Transition]:
        return [call for rollout in self.rollouts() for call in rollout.transitions]

    def call(self) -> Transition:
        """The only one."""
        (call,) = self.calls()
        return call

    @property
    def turns(self) -> list[int]:
        """The number of calls of each rollout."""
        return [len(rollout.transitions) for rollout in self.rollouts()]

    def settled(self, calls: int) -> None:
        """Waits until so many calls are stored: a stream's record is written after its last byte has gone out."""
        until(lambda: self.gateway.stored >= calls)


def through_litellm(behind: str, **options: Any) -> LitellmUpstream:
    """A server as a provider that litellm calls."""
    return LitellmUpstream("openai/echo", {"api_base": f"{behind}/v1", "api_key": "secret"}, **options)


@contextmanager
def opened_stage(
    folder: Path,
    server: Any = None,
    *,
    model: str | None = "echo",
    upstream_key: str | None = None,
    upstream: Any = None,
    **options: Any,
) -> Iterator[Stage]:
    """A gateway with a store in the folder.

    Args:
        server: has `app()`; by default a `ScriptedUpstream`.
        model: for the address of the server, see `upstream_of`.
        upstream: makes another upstream of the server's address.
        options: for `Gateway`.
    """
    server = ScriptedUpstream() if server is None else server
    with Store(folder / "s.db") as store, served(server.app()) as behind:
        made = upstream(behind) if upstream else upstream_of(model, base=behind, key=upstream_key)
        gateway = Gateway(store, made, **options)
        with served(gateway.app()) as url:
            yield Stage(gateway, server, url, behind)


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A gateway in front of a scripted server; its parameter, if any, has the arguments of `opened_stage`."""
    options = dict(getattr(request, "param", {}))
    server = options.pop("server", ScriptedUpstream)()
    with opened_stage(tmp_path, server, **options) as opened:
        yield opened
