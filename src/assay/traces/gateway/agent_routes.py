"""HTTP handler that runs deployed agents. Permissions are checked before it is called."""

import asyncio
import contextvars
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from assay.errors import ConfigError
from assay.support.settings import nearest
from assay.support.values import json_value
from assay.traces.gateway.connections import Connections
from assay.traces.gateway.metrics import Metrics
from assay.traces.gateway.request_bodies import json_body

__all__ = ["AgentRoutes", "AgentRunner"]

_MOST_ROLLOUTS = 256  # at once. They have threads of their own: one version that hangs must not hold up the others
_FIELDS = ("unit", "task_type", "tenant", "data_subject", "consent", "expected")


class AgentRunner(Protocol):
    """A deployed agent. Called in threads, several at a time.

    Attributes:
        counts: number of rollouts by version, arm ("" without one) and status.
        seconds: their duration by version and arm.
        fallbacks: rollouts that the champion took over, by version.
    """

    @property
    def counts(self) -> Mapping[tuple[str, str, str], int]: ...

    @property
    def seconds(self) -> Mapping[tuple[str, str], float]: ...

    @property
    def fallbacks(self) -> Mapping[str, int]: ...

    def __call__(self, inputs: Mapping[str, Any], **fields: Any) -> Any:
        """Runs one rollout.

        Args:
            fields: `unit`, `task_type`, `tenant`, `data_subject`, `consent`, `expected`, where the request has them.
        Returns:
            A prediction with `items()`, `rollout` (id) and `version`.
        """
        ...


class AgentRoutes:
    """Handler over the agents of a gateway, by name."""

    def __init__(
        self, agents: Mapping[str, AgentRunner], connections: Connections, stats: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.agents, self.connections, self.metrics = agents, connections, Metrics(stats, agents)
        self._threads = ThreadPoolExecutor(_MOST_ROLLOUTS, "assay-agent")

    def add_to(self, app: web.Application) -> None:
        """Adds the routes to an application, with that of the metrics."""
        app.router.add_post("/agents/{agent}", self.run)
        app.router.add_get("/metrics", self.metrics.get)
        app.on_cleanup.append(self._close)

    async def run(self, request: web.Request) -> web.Response:
        """POST /agents/NAME: `{"inputs": {…}, "unit": …}`; returns outputs, rollout and version."""
        name = request.match_info["agent"]
        if name not in self.agents:
            hint = f"Did you mean {near!r}?" if (near := nearest(name, self.agents)) else "Start it with --agent NAME."
            raise web.HTTPNotFound(reason=f"no agent {name[:80]!r} is served here. {hint}".replace("\n", " "))
        body = json_body(await self.connections.body(request))
        inputs = body.pop("inputs", None)
        if not isinstance(inputs, dict):
            raise ConfigError('the body must be {"inputs": {"NAME": …}, "unit": "a user or conversation"}')
        if unknown := sorted(set(body) - set(_FIELDS)):
            hint = f". Did you mean {near!r}?" if (near := nearest(unknown[0], ("inputs", *_FIELDS))) else ""
            raise ConfigError(f"unknown key {unknown[0]!r}: the body has inputs, {', '.join(_FIELDS)}{hint}")
        for name in ("unit", "task_type", "tenant", "data_subject"):
            if body.get(name) is not None and not isinstance(body[name], str):
                raise ConfigError(f"{name}={body[name]!r} must be a string")
        if "unit" not in body and (unit := request.headers.get("x-assay-unit")):
            body["unit"] = unit
        fields = {key: value for key, value in body.items() if value is not None}
        call = partial(contextvars.copy_context().run, self.agents[name], inputs, **fields)
        prediction = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        outputs = json_value(dict(prediction.items()), placeholders=True)
        return web.json_response({"rollout": prediction.rollout, "version": prediction.version, "outputs": outputs})

    async def _close(self, _: web.Application) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
