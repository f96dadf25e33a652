"""Serves an aiohttp application or starts a gateway on a free port, and sends HTTP requests to it, for tests."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from assay.traces.gateway.connections import ConnectionLimits, Listener


@contextmanager
def served(app: web.Application, listener: Listener | None = None) -> Iterator[str]:
    """The application's address while it runs.

    Args:
        listener: serves the application, for tests of its limits; by default one with the default limits.
    """
    loop = asyncio.new_event_loop()
    listener = listener or Listener(app, ConnectionLimits(), set(), shutdown_s=1.0)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(listener.start("127.0.0.1", 0), loop).result(30)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(listener.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def chat_completion(model: str, text: str) -> web.Response:
    """A server's response with one choice: its message is `text`."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    return web.json_response(
        {"id": "x", "object": "chat.completion", "created": 1, "model": model, "choices": [choice], "usage": usage}
    )


class ChatServer:
    """A server of chat completions. `bodies`, `models` and `keys` are those of its requests so far.

    Args:
        answer: of a request's body: the text of the completion, the whole completion, or a response.
        owner: who provides its models, as it says.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Any], *, owner: str = "somebody") -> None:
        self.answer, self.owner, self.delay_s, self.url = answer, owner, 0.0, ""
        self.bodies, self.keys = list[dict[str, Any]](), list[str]()
        self.running = self.most = 0  # requests at the same time

    @property
    def models(self) -> list[str]:
        return [body["model"] for body in self.bodies]

    @contextmanager
    def serving(self) -> Iterator["ChatServer"]:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._complete)
        with served(app) as address:
            self.url = f"{address}/v1"
            yield self

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": self.owner}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delay_s)
        self.running -= 1
        answer = self.answer(body)
        if isinstance(answer, web.Response):
            return answer
        return chat_completion(body["model"], answer) if isinstance(answer, str) else web.json_response(answer)


@contextmanager
def refusing() -> Iterator[str]:
    """An address where connections are refused: its port is bound and nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def post(url: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a POST; `body` may be bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def get(url: str, **headers: str) -> dict[str, Any]:
    """JSON of a GET."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
        body: dict[str, Any] = json.loads(response.read())
        return body


def send(method: str, url: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """Status and text of the response to any request, also of an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, method=method, headers={"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def answering(answer: Callable[[str, Any], tuple[int, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """The address of a server, and the bodies that were posted to it.

    Args:
        answer: path and body of a request (None of a GET) -> status and JSON of the response.
    """
    bodies: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json() if request.method == "POST" else None
        if body is not None:
            bodies.append(body)
        status, response = answer(request.path, body)
        return web.json_response(response, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    with served(app) as url:
        yield url, bodies
