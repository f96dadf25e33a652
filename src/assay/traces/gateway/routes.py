"""Store calls of the gateway in threads of their own, so that an unreachable store does not block the event loop."""

import asyncio
import contextvars
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import sqlalchemy as sa
from aiohttp import web

from assay.errors import ConfigError, ModelError, StoreError, UnknownRollout
from assay.support.names import nearest
from assay.support.values import json_value
from assay.traces.gateway.access import Access
from assay.traces.gateway.connections import Connections
from assay.traces.gateway.replies import error_response
from assay.traces.gateway.requests import json_body
from assay.traces.gateway.sessions import (
    LiveRollouts,
    check_name,
    check_status,
    failure_kind,
    rollout_id_of,
    text_or_none,
)
from assay.traces.gateway.texts import TextSwap
from assay.traces.otlp.exporter import DURATION, Point, points_of
from assay.traces.records import Rollout, new_id

FLUSH_S = 25.0  # that a request waits for waiting rows; below `_STORE_S`, so that the store can give its own reason
_STORE_S = 30.0  # that a request waits for the store
_OTHERS_S = 1.0  # that a request waits until rows are written that other gateways read


class StoreAccess:
    """Runs functions that wait for the store.

    Reads have threads of their own: calls that wait until rows are written would otherwise occupy all of them while the
    store is unreachable.
    """

    def __init__(self) -> None:
        self._readers, self._waiters = (ThreadPoolExecutor(4, f"assay-gateway-{name}") for name in ("reads", "waits"))

    async def call(self, function: Callable[..., Any], *arguments: Any, waits: bool = True) -> Any:
        """The function's result.

        Args:
            waits: the function waits until rows are written; False for one that only reads.
        Raises:
            StoreError: the store is unreachable or too slow.
        """
        try:
            threads = self._waiters if waits else self._readers
            async with asyncio.timeout(_STORE_S):  # `wait_for` of Python 3.11 may lose the cancellation of its caller
                return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *arguments))
        except TimeoutError:
            raise StoreError(
                f"the store did not answer within {_STORE_S:g} s: another process holds its lock, or it is unreachable"
            ) from None
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the store does not answer: {getattr(error, 'orig', error)}") from error

    def shutdown(self) -> None:
        """Ends the threads without waiting for calls that are under way."""
        for threads in (self._readers, self._waiters):
            threads.shutdown(wait=False)


# -- HTTP handlers that open, show, score, close and rate rollouts. Permissions are checked before they are called.


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

    async def _tell_others(self) -> None:
        """Waits until what was changed is in the store, if other gateways read it there."""
        if self.rollouts.shared:
            with suppress(StoreError):
                await self.store_access.call(self.rollouts.store.written, _OTHERS_S)

    async def _see_others_end(self, name: str) -> None:
        """Drops an open rollout that another gateway has ended."""
        if self.rollouts.shared and (live := self.rollouts.open.get(rollout_id_of(name))) is not None:
            await self._tell_others()
            with suppress(StoreError):
                stored = await self.store_access.call(self.rollouts.stored, name, waits=False)
                if stored is not None and stored.status != "running" and not live.adopted:
                    self.rollouts.drop(live.rollout.id)

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
        await self._tell_others()
        token = self.access.token(live.rollout.id)
        base = f"{request.scheme}://{request.host}/r/{token}"
        bases = {"base_url": f"{base}/v1", "anthropic_base_url": base, "gemini_base_url": base}
        return web.json_response({"id": live.rollout.id, **bases, "api_key": token})

    async def show(self, request: web.Request) -> web.Response:
        """GET /assay/rollouts/ID: status, scores and number of turns, from the store."""
        await self.store_access.call(self.rollouts.store.flush, FLUSH_S)
        rollout = await self.store_access.call(self.rollouts.stored, self._id(request))
        if rollout is None:
            raise UnknownRollout(f"there is no rollout {self._id(request)!r}")
        shown = {name: getattr(rollout, name) for name in ("id", "status", "score", "human_rating")}
        return web.json_response({**shown, "turns": len(rollout.transitions)})

    async def reward(self, request: web.Request) -> web.Response:
        """POST …/reward: the score of a rollout or, with `t`, the step reward of a turn."""
        body = await self._body(request)
        value = body.get("reward", body.get("value"))
        name, t = self._id(request), body.get("t")
        stored = await self.stored(name)
        if t is not None and self.rollouts.shared:  # another gateway may have recorded the turn
            with suppress(StoreError):
                stored = await self.store_access.call(self.rollouts.stored, name, waits=False)
        criterion = str(body.get("name", "posted"))
        rollout = self.rollouts.reward(name, value, t=t, criterion=criterion, stored=stored)
        return web.json_response({"id": rollout.id})

    async def close(self, request: web.Request) -> web.Response:
        """POST …/close: ends a rollout, with a final reward if one is sent."""
        body = await self._body(request, optional=True)
        status, error = str(body.get("status", "done")), text_or_none(body.get("error"))
        check_status(status)
        failure = failure_kind(body.get("failure"))
        name, prediction = self._id(request), body.get("prediction")
        await self._see_others_end(name)
        stored = await self.stored(name)
        rollout = self.rollouts.close(
            name, status=status, prediction=prediction, error=error, failure=failure, reward=body.get("reward"),
            stored=stored,
        )  # fmt: skip
        await self._tell_others()
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


# -- Counts of the gateway and its agents as Prometheus text (format 0.0.4). Counters start at 0 with each process.
#
# Names, units and texts are those of `assay.traces.otlp.exporter`, as in OTLP.


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(stats: Mapping[str, Any], agents: Mapping[str, Any]) -> str:
    """The text of all metrics."""
    lines = []
    for measure, points in points_of(stats, agents):
        name = measure.prometheus
        lines += [f"# HELP {name} {measure.text}", f"# TYPE {name} {measure.kind}"]
        for point in points:
            lines += (
                _summed(name, point) if measure.kind == DURATION else [f"{name}{_labels(point.labels)} {point.value}"]
            )
    return "\n".join(lines) + "\n"


def _summed(name: str, point: Point) -> Iterator[str]:
    labels = _labels(point.labels)
    yield f"{name}_bucket{_labels({**point.labels, 'le': '+Inf'})} {point.count}"
    yield f"{name}_sum{labels} {point.value:.6f}"
    yield f"{name}_count{labels} {point.count}"


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


# -- HTTP handler that runs deployed agents. Permissions are checked before it is called.


_MOST_ROLLOUTS = 256  # at once. They have threads of their own: one version that hangs must not hold up the others
_FIELDS = ("unit", "task_type", "tenant", "data_subject", "consent", "expected")


class Registered(Protocol):
    """What is counted of an agent of the registry.

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


class AgentRunner(Registered, Protocol):
    """A deployed agent. Called in threads, several at a time."""

    def __call__(self, inputs: Mapping[str, Any], **fields: Any) -> Any:
        """Runs one rollout.

        Args:
            fields: `unit`, `task_type`, `tenant`, `data_subject`, `consent`, `expected`, where the request has them.
        Returns:
            A prediction with `items()`, `rollout` (id) and `version`.
        """
        ...


class StagedTexts(Registered, Protocol):
    """The texts of a registered agent. Called in threads, except `are_in`."""

    def are_in(self, body: Mapping[str, Any]) -> bool:
        """Whether a request has one of the agent's own texts."""

    def assigned(self, rollout: Rollout, unit: str) -> tuple[TextSwap, Mapping[str, Any]]:
        """The texts of a rollout, and the fields of the rollout that say of which version they are: of the one that it
        has, else of the one that its unit is assigned."""

    def of_champion(self) -> tuple[TextSwap, Mapping[str, Any]]:
        """As `assigned`, of the champion and outside a comparison, without asking the store."""

    def count(self, fields: Mapping[str, Any]) -> None:
        """Counts a rollout that has begun with these fields."""


class AgentRoutes:
    """Handler over the agents of a gateway, by name.

    Args:
        texts: of agents that run elsewhere, by name.
    """

    def __init__(
        self, agents: Mapping[str, AgentRunner], texts: Mapping[str, StagedTexts], connections: Connections,
        stats: Callable[[], Mapping[str, Any]],
    ) -> None:  # fmt: skip
        self.agents, self.texts, self.connections, self.stats = agents, texts, connections, stats
        self._threads = ThreadPoolExecutor(_MOST_ROLLOUTS, "assay-agent")

    def add_to(self, app: web.Application) -> None:
        """Adds the routes to an application, with that of the metrics."""
        app.router.add_post("/agents/{agent}", self.run)
        app.router.add_get("/metrics", self.metrics)
        app.on_cleanup.append(self._close)

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics; needs the gateway's key."""
        text = metrics_text(self.stats(), {**self.agents, **self.texts})
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def run(self, request: web.Request) -> web.Response:
        """POST /agents/NAME: `{"inputs": {…}, "unit": …}`; returns outputs, rollout and version."""
        name = request.match_info["agent"]
        if name not in self.agents:
            near = nearest(name, self.agents)
            hint = f"Did you mean {near!r}?" if near else "Start it with --registered NAME."
            if name in self.texts:
                hint = "It runs where you start it, and gets its texts in the calls that it sends through this gateway."
            raise web.HTTPNotFound(reason=f"no agent {name[:80]!r} is served here. {hint}".replace("\n", " "))
        body = json_body(await self.connections.body(request))
        inputs = body.pop("inputs", None)
        if not isinstance(inputs, dict):
            raise ConfigError('the body must be {"inputs": {"NAME": …}, "unit": "a user or conversation"}')
        if unknown := sorted(set(body) - set(_FIELDS)):
            hint = f". Did you mean {near!r}?" if (near := nearest(unknown[0], ("inputs", *_FIELDS))) else ""
            raise ConfigError(f"unknown key {unknown[0]!r}: the body has inputs, {', '.join(_FIELDS)}{hint}")
        for key in ("unit", "task_type", "tenant", "data_subject"):
            if body.get(key) is not None and not isinstance(body[key], str):
                raise ConfigError(f"{key}={body[key]!r} must be a string")
        if "unit" not in body and (unit := request.headers.get("x-assay-unit")):
            body["unit"] = unit
        fields = {key: value for key, value in body.items() if value is not None}
        call = partial(contextvars.copy_context().run, self.agents[name], inputs, **fields)
        prediction = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        outputs = json_value(dict(prediction.items()), placeholders=True)
        return web.json_response({"rollout": prediction.rollout, "version": prediction.version, "outputs": outputs})

    async def _close(self, _: web.Application) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


# -- Tasks that runners on other machines ask for over HTTP: a lease per task, heartbeats, results.
#
# A runner that sends no heartbeat loses its lease. Does not decide what happens then: the caller of `result` does. The
# routes need the gateway's key.


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
