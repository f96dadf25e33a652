"""A gateway that assigns requests to rollouts, and the messages that tests send to it."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.traces import Rollout, Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream

Message = dict[str, Any]


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("calculator", "final_answer")
]


class Place:
    """A gateway in front of a scripted model."""

    def __init__(self, gateway: Gateway, url: str) -> None:
        self.gateway, self.url = gateway, url

    def chat(self, *messages: Message, headers: dict[str, str] | None = None, **body: Any) -> Message:
        status, reply = post(
            f"{self.url}/v1/chat/completions", {"model": "m", "messages": list(messages), **body}, **(headers or {})
        )
        assert status == 200, reply
        return reply["choices"][0]["message"]

    def respond(self, text: str, **body: Any) -> str:
        status, reply = post(f"{self.url}/v1/responses", {"model": "m", "input": text, **body})
        assert status == 200, reply
        return str(reply["id"])

    def rollouts(self) -> list[Rollout]:
        self.gateway.store.flush()
        return [self.gateway.store.rollout(r.id) for r in self.gateway.store.rollouts()][::-1]

    @property
    def turns(self) -> list[int]:
        return [len(rollout.transitions) for rollout in self.rollouts()]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Store(tmp_path / "s.db") as store, served(ScriptedUpstream().app()) as behind:
        gateway = Gateway(store, upstream_of("echo", base=behind))
        with served(gateway.app()) as url:
            yield Place(gateway, url)


Answers = Callable[[list[Message]], Message]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[Answers], Place]]:
    """A gateway whose model answers with the result of a function."""
    scripts: list[Answers] = []
    numbers = itertools.count(1)

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        message = {"role": "assistant", **scripts[-1](body["messages"])}
        return web.json_response(
            {"id": f"c{next(numbers)}", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    with Store(tmp_path / "s.db") as store, served(app) as behind:
        gateway = Gateway(store, upstream_of("echo", base=behind))
        with served(gateway.app()) as url:

            def begin(script: Answers) -> Place:
                scripts.append(script)
                return Place(gateway, url)

            yield begin


def user(text: str) -> Message:
    return {"role": "user", "content": text}
