"""Requests with secrets in every part, a server that echoes them, and all that a store and a log hold."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from rigs.serving import served


class Echo:
    """A server that echoes each request: as an error, as an answer's text, or streamed in chunks of a few bytes."""

    def __init__(self) -> None:
        self.status = 401
        self.received = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.received = f"{request.rel_url} {dict(request.headers)} {await request.text()}"
        if self.status >= 400:
            return web.json_response({"error": {"message": f"wrong key: {self.received}"}}, status=self.status)
        if "pieces" not in self.received:
            choice = {"index": 0, "message": {"role": "assistant", "content": self.received}, "finish_reason": "stop"}
            known = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "service_tier": "default"}
            return web.json_response({**known, "choices": [choice]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta, finish in (({"content": self.received}, None), ({}, "stop")):
            event = json.dumps({"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
            for part in (f"data: {event}\n\n"[at : at + 7] for at in range(0, len(event) + 8, 7)):
                await response.write(part.encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def everything_in(folder: Path) -> str:
    """All bytes of the files in a folder, and all cells of its databases."""
    texts = [path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file()]
    for path in folder.rglob("*.db"):
        with sqlite3.connect(path) as database:
            texts += list(database.iterdump())
    return "\n".join(texts)


class Planted:
    """Secrets with a number each, no two alike, in no shape that a provider uses."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def __call__(self) -> str:
        self.all.append(f"plant{len(self.all):02d}Qz7wXk{len(self.all) * 7919:06d}")
        return self.all[-1]

    def in_(self, text: str) -> list[str]:
        return [secret for secret in self.all if secret in text]


@pytest.fixture
def echo() -> Iterator[tuple[Echo, str]]:
    server = Echo()
    with served(server.app()) as url:
        yield server, url
