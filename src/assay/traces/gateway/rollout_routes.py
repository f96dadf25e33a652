"""HTTP handlers that open, show, score, close and rate rollouts. Permissions are checked before they are called."""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from assay.errors import ConfigError, UnknownRollout
from assay.traces.gateway.access import Access
from assay.traces.gateway.connections import Connections
from assay.traces.gateway.request_bodies import json_body
from assay.traces.gateway.rollout_fields import check_name, check_status, failure_kind, rollout_id_of, text_or_none
from assay.traces.gateway.sessions import LiveRollouts
from assay.traces.gateway.store_access import FLUSH_S, StoreAccess
from assay.traces.records import Rollout

__all__ = ["RolloutRoutes"]


class RolloutRoutes:
    """Handlers over the rollouts of a gateway.

    Args:
        upstream: returns the upstream of new rollouts, which may change while the gateway runs.
    """

    def __init__(
        self,
        rollouts: LiveRollouts,
        access: Access,
        connections: Connections,
        store_access: StoreAccess,
        upstream: Callable[[], Any],
    ) -> None:
        self.rollouts, self.access, self.connections = rollouts, access, connections
        self.store_access, self._upstream = store_access, upstream

    def add_to(self, app: web.Application) -> None:
        """Adds the routes to an application."""
        app.router.add_post("/assay/rollouts", self.open)
        app.router.add_get("/assay/rollouts/{rollout}", self.show)
        for prefix in ("/assay/rollouts/{rollout}", "/r/{rollout}"):
            app.router.add_post(f"{prefix}/reward", self.reward)
            app.router.add_post(f"{prefix}/close", self.close)
        app.router.add_post("/feedback", self.feedback)

    async def stored(self, name: str) -> Rollout | None:
        """The stored rollout of that name; None if it is in memory or does not exist."""
        if self.rollouts.open_or_recent(name):
            return None
        rollout: Rollout | None = await self.store_access.call(self.rollouts.stored, name, waits=False)
        return rollout

    async def _body(self, request: web.Request, *, optional: bool = False) -> dict[str, Any]:
        raw = await self.connections.body(request)
        return json_body(raw or b"{}" if optional else raw)

    async def open(self, request: web.Request) -> web.Response:
        """POST /assay/rollouts: opens a rollout; returns its id, base URLs and token."""
        body = await self._body(request, optional=True)
        name = check_name(body.pop("id", None))
        existing = None if name is None else await self.stored(name)
        if name is not None and (recent := self.rollouts.open_or_recent(name)) is not None:
            existing = recent.rollout
        live = self.rollouts.begin(self._upstream(), name, body, existing=existing)
        rollout_id = live.rollout.id
        token = self.access.token(rollout_id)
        base = f"{request.scheme}://{request.host}/r/{token}"
        return web.json_response(
            {
                "id": rollout_id,
                "base_url": f"{base}/v1",
                "anthropic_base_url": base,
                "gemini_base_url": base,
                "api_key": token,
            }
        )

    async def show(self, request: web.Request) -> web.Response:
        """GET /assay/rollouts/ID: status, scores and number of turns, from the store."""
        await self.store_access.call(self.rollouts.store.flush, FLUSH_S)
        rollout = await self.store_access.call(self.rollouts.stored, self._id(request))
        if rollout is None:
            raise UnknownRollout(f"there is no rollout {self._id(request)!r}")
        body = {
            "id": rollout.id,
            "status": rollout.status,
            "score": rollout.score,
            "human_rating": rollout.human_rating,
            "turns": len(rollout.transitions),
        }
        return web.json_response(body)

    async def reward(self, request: web.Request) -> web.Response:
        """POST …/reward: the score of a rollout or, with `t`, the step reward of a turn."""
        body = await self._body(request)
        value = body.get("reward", body.get("value"))
        stored = await self.stored(self._id(request))
        rollout = self.rollouts.reward(
            self._id(request), value, t=body.get("t"), criterion=str(body.get("name", "posted")), stored=stored
        )
        return web.json_response({"id": rollout.id})

    async def close(self, request: web.Request) -> web.Response:
        """POST …/close: ends a rollout, with a final reward if one is sent."""
        body = await self._body(request, optional=True)
        status, error = str(body.get("status", "done")), text_or_none(body.get("error"))
        check_status(status)
        failure = failure_kind(body.get("failure"))
        name, prediction = self._id(request), body.get("prediction")
        stored = await self.stored(name)
        if body.get("reward") is not None:
            self.rollouts.reward(name, body["reward"], stored=stored)
        rollout = self.rollouts.close(
            name, status=status, prediction=prediction, error=error, failure=failure, stored=stored
        )
        return web.json_response({"id": rollout.id, "status": rollout.status})

    async def feedback(self, request: web.Request) -> web.Response:
        """POST /feedback: a human rating of a rollout."""
        body = await self._body(request)
        rating = body.get("rating")
        if isinstance(rating, bool) or not isinstance(rating, int | float) or not 0 <= rating <= 1:
            raise ConfigError(f"rating={rating!r} must be a number between 0 and 1")
        name = str(body.get("rollout", ""))
        rollout_id = rollout_id_of(name)
        if self.rollouts.open_or_recent(name) is None:
            await self.store_access.call(self.rollouts.of_gateway, name, waits=False)
        await self.store_access.call(self.rollouts.store.rate, rollout_id, float(rating))
        if (live := self.rollouts.open.get(rollout_id)) is not None:
            live.rollout.human_rating = float(rating)
        return web.json_response({"rollout": rollout_id, "rating": rating})

    def _id(self, request: web.Request) -> str:
        return self.access.rollout_managed(request)
