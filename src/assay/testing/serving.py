"""Runs an aiohttp application on a free port of this process, and asks it: for tests of what talks HTTP."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from assay.traces.connections import ConnectionLimits, Listener

__all__ = ["asked", "get", "post", "served"]


@contextmanager
def served(app: web.Application, listener: Listener | None = None) -> Iterator[str]:
    """The application's address while it runs.

    Args:
        listener: what it is served by, with limits; its application is `app`.
    """
    loop = asyncio.new_event_loop()
    found = listener or Listener(app, ConnectionLimits(), set(), shutdown_s=1.0)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    port = asyncio.run_coroutine_threadsafe(found.start("127.0.0.1", 0), loop).result(30)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(found.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def post(url: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a POST; `body` may be bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def get(url: str, **headers: str) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def asked(method: str, url: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """Status and text of any request, errors included."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
