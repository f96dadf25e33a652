"""A gateway in front of a server that echoes what reaches it."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.traces import Rollout, Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import served

KEY, CALLERS_KEY = "gateway-key-1", "sk-of-the-caller"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


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
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=120)
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
