"""Serves an aiohttp application on a free port and sends HTTP requests to it, for tests."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from assay.traces.gateway.connections import ConnectionLimits, Listener

__all__ = ["chat_completion", "get", "post", "send", "served"]


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
