"""Tasks that runners on other machines ask for over HTTP: a lease per task, heartbeats, results.

A runner that sends no heartbeat loses its lease. Does not decide what happens then: the caller of `result` does. The
routes need the gateway's key.
"""

import asyncio
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from assay.errors import ConfigError, ModelError
from assay.traces.gateway.replies import error_response
from assay.traces.gateway.request_bodies import json_body
from assay.traces.records import new_id

__all__ = ["Lease", "Leases", "LostLease"]

CHECK_S = 0.1  # between two checks of a lease or of the waiting tasks
_POLL_S = 20.0  # that a runner's request for a task waits for one
_RUNNER = 200  # maximum characters of a runner's name


class LostLease(Exception):
    """The runner of a lease sent no heartbeat in time."""


@dataclass
class Lease:
    """A task that waits for a runner, or that one is at work on."""

    document: dict[str, Any]
    id: str = field(default_factory=new_id)
    runner: str | None = None  # None while it waits
    heard: float = field(default_factory=time.monotonic)
    reply: dict[str, Any] | None = None


class Leases:
    """Tasks that wait for runners on other machines, and those that runners execute.

    Args:
        heartbeat_s: a runner sends a request at least this often; after three times as long it counts as lost.
        patience_s: maximum time that a task waits for the first runner, or for the next one after all were lost.
    """

    def __init__(self, *, heartbeat_s: float = 5.0, patience_s: float = 120.0) -> None:
        self.heartbeat_s, self.patience_s = heartbeat_s, patience_s
        self.late_results = 0  # results of leases that had ended; they were refused
        self._open: dict[str, Lease] = {}  # in the order in which they came
        self._taken = deque[tuple[str, bytes]](maxlen=1000)  # lease and digest of its result
        self._lock = threading.Lock()
        self._heard = time.monotonic()  # when a runner last asked for something

    def __deepcopy__(self, memo: object) -> "Leases":
        return self

    def result(self, document: dict[str, Any], check: Callable[[], None]) -> dict[str, Any]:
        """What a runner replied about a task. Waits, and calls `check` meanwhile, which may raise.

        Raises:
            LostLease: the runner sent no heartbeat in time.
            ModelError: no runner has asked for a task for `patience_s`.
        """
        lease = Lease(document)
        began = time.monotonic()
        with self._lock:
            self._open[lease.id] = lease
        try:
            while lease.reply is None:
                time.sleep(CHECK_S)
                check()
                self._require_heard(lease, began)
        finally:
            with self._lock:
                self._open.pop(lease.id, None)
        return lease.reply

    def _require_heard(self, lease: Lease, began: float) -> None:
        now = time.monotonic()
        if lease.runner is not None and now - lease.heard > 3 * self.heartbeat_s:
            raise LostLease(f"the runner {lease.runner!r} was not heard of for {3 * self.heartbeat_s:g} s")
        if lease.runner is None and now - max(self._heard, began) > self.patience_s:
            raise ModelError(
                f"no runner has asked for a task for {self.patience_s:g} s: start one with "
                "`assay agent run AGENT --server URL --key KEY`"
            )

    # -- routes

    def add_to(self, app: web.Application) -> None:
        """Adds the routes to a gateway's application."""
        app.router.add_post("/assay/tasks/lease", self.lease)
        app.router.add_post("/assay/tasks/{lease}/alive", self.alive)
        app.router.add_post("/assay/tasks/{lease}/result", self.take_result)

    async def lease(self, request: web.Request) -> web.Response:
        """POST /assay/tasks/lease: the next task, or 204 if none came for some time."""
        runner = json_body(await request.read() or b"{}").get("runner")
        if not isinstance(runner, str) or not 0 < len(runner) <= _RUNNER:
            raise ConfigError(f"runner={runner!r} must be a name of at most {_RUNNER} characters")
        end = time.monotonic() + _POLL_S
        while time.monotonic() < end:
            self._heard = time.monotonic()
            if (lease := self._next(runner)) is not None:
                document = {"lease": lease.id, "heartbeat_s": self.heartbeat_s, "task": lease.document}
                return web.json_response(document)
            await asyncio.sleep(CHECK_S)
        return web.Response(status=204)

    def _next(self, runner: str) -> Lease | None:
        with self._lock:
            lease = next((lease for lease in self._open.values() if lease.runner is None), None)
            if lease is not None:
                lease.runner, lease.heard = runner, time.monotonic()
            return lease

    async def alive(self, request: web.Request) -> web.Response:
        """POST /assay/tasks/LEASE/alive: the runner still works on it. 410 if the lease has ended."""
        if (lease := self._leased(request)) is None:
            return error_response(410, "this lease has ended: its rollout was given up, or the task went to another")
        lease.heard = self._heard = time.monotonic()
        return web.json_response({"lease": lease.id})

    async def take_result(self, request: web.Request) -> web.Response:
        """POST /assay/tasks/LEASE/result: `{"answer": …}`, `{"failed": why}` or `{"lost": why}`; once.

        The same bytes again are accepted: a proxy may have lost the reply to the first request.
        """
        raw = await request.read()
        body, taken = json_body(raw), (request.match_info["lease"], hashlib.sha256(raw).digest())
        if len(body.keys() & {"answer", "failed", "lost"}) != 1:
            raise ConfigError("a result has one of answer, failed and lost")
        self._heard = time.monotonic()
        if (lease := self._leased(request)) is None:
            if taken in self._taken:
                return web.json_response({"lease": taken[0]})
            self.late_results += "lost" not in body
            return error_response(410, "this lease has ended: a task has one result, and a late one is not taken")
        self._taken.append(taken)
        lease.reply = body
        return web.json_response({"lease": lease.id})

    def _leased(self, request: web.Request) -> Lease | None:
        with self._lock:
            lease = self._open.get(request.match_info["lease"])
            return lease if lease is not None and lease.runner is not None and lease.reply is None else None
