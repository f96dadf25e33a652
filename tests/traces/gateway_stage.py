"""A gateway over real sockets in front of a scripted server."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from assay.traces import Rollout, Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream


class Stage:
    """A gateway, its store and the upstream behind it."""

    def __init__(self, gateway: Gateway, upstream: ScriptedUpstream, url: str, behind: str) -> None:
        self.gateway, self.upstream, self.url, self.behind = gateway, upstream, url, behind
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.owner = {"Authorization": f"Bearer {gateway.access.key}"}

    def rollouts(self) -> list[Rollout]:
        self.gateway.store.flush()
        return [self.gateway.store.rollout(r.id) for r in self.gateway.store.rollouts()][::-1]

    def manage(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """A POST with the gateway's key."""
        return post(self.url + path, body, **self.owner)

    def chat(self, *texts: str, **options: Any) -> Any:
        messages = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]
        return self.client.chat.completions.create(model="gpt-4o", messages=messages, **options)

    def settled(self, calls: int) -> None:
        """Waits until so many calls are stored: a stream's record is written after its last byte has gone out."""
        for _ in range(200):
            if self.gateway.stored >= calls:
                return
            time.sleep(0.02)
        raise AssertionError(f"{self.gateway.stored} of {calls} calls were stored")


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    options = getattr(request, "param", {})
    upstream = ScriptedUpstream()
    with Store(tmp_path / "s.db") as store, served(upstream.app()) as behind:
        gateway = Gateway(store, upstream_of("echo", base=behind, key="upstream-secret"), run_id="run", **options)
        with served(gateway.app()) as url:
            yield Stage(gateway, upstream, url, behind)
