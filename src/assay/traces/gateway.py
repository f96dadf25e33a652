"""The gateway: any agent that speaks OpenAI chat completions, Responses, Anthropic messages or Gemini is recorded without changing its code.

Requests and answers pass as they are, streamed or not; what went by becomes transitions of rollouts once it is over. Keys are never kept; who
may do what is in `assay.traces.access`. Every call that went to a model is counted beside what was stored: what could not be seen is said, never
made up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import sqlalchemy as sa
from aiohttp import web

from assay.errors import AssayError, ConfigError, FailureKind, StoreError, UnknownRollout
from assay.models.failures import failure_of_call
from assay.models.roles import is_embedded
from assay.scrubbing import know, message, said
from assay.traces import gemini
from assay.traces.access import LOOPBACK, Access, Caller, Refused
from assay.traces.calls import Call, Turns, sent
from assay.traces.connections import Connections, SlowRequest
from assay.traces.dialects import DIALECTS
from assay.traces.live import LiveRollouts, check_status, rollout_id_of
from assay.traces.passing import json_body, pass_on, sent_secrets
from assay.traces.records import Rollout
from assay.traces.relay import Relay, inner_path, without_ids
from assay.traces.store import Store
from assay.traces.upstreams import EmbeddedUpstream, HttpUpstream, LitellmUpstream, upstream_of

__all__ = ["Gateway"]

_LOG = logging.getLogger("assay.gateway")
_OWN = ("/assay", "/feedback", "/health", "/reward", "/close")  # of the gateway itself: never passed on
_AZURE = ("/openai/deployments/{deployment}", "/openai/v1", "/openai")  # how addresses begin that name no dialect's own path
_STATUS = {FailureKind.TIMEOUT: 504, FailureKind.CONTEXT: 400}  # of a failed call by its kind; others are 502
_STORE_S, _FLUSH_S, _COUNTS_S = 30.0, 25.0, 0.5  # that a request waits for the store
Upstream = HttpUpstream | LitellmUpstream


class Gateway:
    """Args:
    upstream: what answers new rollouts; `serve_model` changes it while agents run.
    key: what callers must send; needed where it listens beyond loopback. Without one, calls on this machine need none, and one is made for
        all else (`access.key`).
    host: address it listens on.
    names: further names that requests may be sent to, see `Access`.
    max_body: bytes of a request.
    receive_s: in which a request's body must have come, see `ConnectionLimits`.
    one_server: other models that are named over HTTP are models of the upstream's server.
    """

    def __init__(
        self,
        store: Store,
        upstream: Upstream,
        *,
        key: str | None = None,
        host: str = "127.0.0.1",
        names: Sequence[str] = (),
        run_id: str = "",
        idle_s: float = 600.0,
        max_body: int = 10 << 20,
        receive_s: float = 60.0,
        one_server: bool = False,
    ) -> None:
        self.access = Access(key, host=host, names=names)
        know(self.access.key)
        self.store, self.upstream, self.max_body = store, upstream, max_body
        self.one_server = one_server
        self.rollouts = LiveRollouts(store, run_id=run_id, idle_s=idle_s)
        self.asked = self.ended = self.stored = self.refused = 0
        self.past: dict[str, int] = {}  # paths that were neither recorded nor passed on, by how often they were asked for
        self.connections = Connections(receive_s, max_body)
        self.relay = Relay()
        self._upstreams: list[Upstream] = [upstream]
        self._turns = Turns()
        self._several = False  # whether open rollouts have another upstream than new ones
        # Those that only read are not kept waiting by those that wait until rows are written.
        self._readers, self._waiters = (ThreadPoolExecutor(4, f"assay-gateway-{name}") for name in ("reads", "waits"))
        store.never_wait()
        self._asking: set[Any] = {self._models, self._count_tokens}  # what an agent may ask for; all else needs the gateway's key

    # -- the application

    def app(self) -> web.Application:
        """An aiohttp application; `web.run_app` or any runner serves it."""
        app = web.Application(client_max_size=self.max_body, middlewares=[self._guard])
        for dialect, path in DIALECTS.items():
            call = self._call_of(dialect)
            self._asking.add(call)
            for prefix in ("", "/r/{rollout}"):
                if dialect == "gemini":
                    app.router.add_post(prefix + gemini.ROUTE, call)
                    continue
                app.router.add_post(prefix + path, call)
                app.router.add_post(prefix + path.removeprefix("/v1"), call)
                for azure in _AZURE if dialect != "messages" else ():
                    app.router.add_post(prefix + azure + path.removeprefix("/v1"), call)
        for prefix in ("", "/r/{rollout}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count_tokens)
        app.router.add_post("/assay/rollouts", self._open)
        app.router.add_get("/assay/rollouts/{rollout}", self._show)
        app.router.add_post("/assay/rollouts/{rollout}/reward", self._reward)
        app.router.add_post("/assay/rollouts/{rollout}/close", self._close)
        app.router.add_post("/r/{rollout}/reward", self._reward)
        app.router.add_post("/r/{rollout}/close", self._close)
        app.router.add_post("/feedback", self._feedback)
        app.router.add_get("/assay/stats", self._stats)
        app.router.add_post("/assay/model", self._serve_model)
        app.router.add_get("/health", self._health)
        for prefix in ("/r/{rollout}", ""):
            app.router.add_route("*", f"{prefix}/{{path:.*}}", self._other)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, app: web.Application) -> Any:
        async def sweeping() -> None:
            while True:
                await asyncio.sleep(min(30.0, max(0.05, self.rollouts.idle_s / 4)))
                try:
                    self.rollouts.sweep()
                    self._several = any(live.upstream is not self.upstream for live in self.rollouts.open.values())
                    await self._settle()
                except Exception as error:  # it must go on
                    _LOG.error("idle rollouts could not be ended: %s: %s", type(error).__name__, error)

        task = asyncio.create_task(sweeping())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self.rollouts.sweep(all_of_them=True)
        for upstream in self._upstreams:
            await upstream.close()
        for threads in (self._readers, self._waiters):
            threads.shutdown(wait=False)

    async def _from_store(self, function: Callable[..., Any], *arguments: Any, waits: bool = True) -> Any:
        """What a function returns that waits for the store. It has threads of its own: those of a store that is away are held for long.

        Raises:
            StoreError: the store is away, or too slow.
        """
        try:
            threads = self._waiters if waits else self._readers
            asked = asyncio.get_running_loop().run_in_executor(threads, partial(function, *arguments))
            return await asyncio.wait_for(asked, _STORE_S)
        except TimeoutError:
            raise StoreError(f"the store did not answer within {_STORE_S:g} s: another process holds its lock, or it is away") from None
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the store does not answer: {getattr(error, 'orig', error)}") from error

    async def _settle(self) -> None:
        """Lets go of ended rollouts that are in the database."""
        written = {rollout_id: live.rollout.ended_at for rollout_id, live in self.rollouts.ended.items()}
        if written:
            with suppress(StoreError):
                await self._from_store(self.store.flush, _FLUSH_S)
                self.rollouts.settled(written)

    async def _stored(self, name: str) -> Rollout | None:
        """The rollout of that name from the store, where it is not at hand."""
        return None if self.rollouts.at_hand(name) else await self._from_store(self.rollouts.stored, name, waits=False)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        """Who may do what, and errors in the shape that clients read."""
        try:
            self._admit(request)
            return await handler(request)
        except Refused as error:
            return _error(error.status, str(error))
        except ConfigError as error:
            return _error(422, str(error))
        except UnknownRollout as error:
            return _error(404, str(error))
        except StoreError as error:
            return _error(503, str(error), headers={"Retry-After": "5"})
        except AssayError as error:
            return _error(500, str(error))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than {self.max_body >> 20} MB; --max-body-mb raises it")
        except SlowRequest as error:
            return _error(408, str(error), headers={"Connection": "close"})
        except (ConnectionError, asyncio.CancelledError):
            raise
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        except Exception as error:
            told = said(error, sent_secrets(request))
            _LOG.error("%s %s: %s", request.method, message(inner_path(request)), told)
            return _error(500, told[:300])
        finally:
            self.connections.done(request)

    def _admit(self, request: web.Request) -> None:
        """Raises `Refused` where a request may not be made: by its host, the page it comes from, or its key."""
        self.access.check_host(request.headers.get("Host", ""))
        if (origin := request.headers.get("Origin")) and urlsplit(origin).hostname not in LOOPBACK and self.access.open:
            raise Refused(403, f"a page of {origin!r} may not use this gateway")  # a browser sends what any page tells it to
        caller = self.access.caller(request)
        handler = request.match_info.handler
        if handler == self._health:
            return
        if handler in self._asking or handler == self._other:
            self.access.may_call(caller)
        else:
            self.access.may_manage(caller)

    # -- calls

    def _call_of(self, dialect: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def call(request: web.Request) -> web.StreamResponse:
            return await self._call(dialect, request)

        return call

    async def _call(self, dialect: str, request: web.Request) -> web.StreamResponse:
        raw = await self.connections.body(request)
        body = json_body(raw)
        caller = self.access.caller(request)  # an agent with a token of its own does not choose what its rollout is compared with
        streams = gemini.streams(request.path)
        in_path = {"model": gemini.model_in(request.path), "stream": streams} if dialect == "gemini" else {}
        path = inner_path(request) if "/openai/" in request.path or in_path else ""
        call = Call(self.rollouts, dialect, request, body, path, in_path, request.headers if caller.rollout is None else {})
        upstream = await self._upstream_of(request, caller, call)
        passed = call.passed
        self.asked += 1
        try:
            asking = upstream.ask(dialect, body, raw, self.access.passed_on(request.headers), self.access.query_passed_on(request), path)
            async with sent(asking, self._turns, partial(call.begin, upstream)) as reply:
                keep = partial(self._keep, call)
                return await pass_on(
                    request, reply, passed, call.rollout_id, keep, self._turns.record, choices=_choices(dialect, body), streams=streams
                )
        except AssayError as error:  # a package that is missing: the caller is told which
            passed.fail(str(error), FailureKind.MODEL)
            raise
        except (ConnectionResetError, asyncio.CancelledError):
            passed.left = True
            passed.fail("the client went away before the answer was complete", FailureKind.CAP)
            raise
        except Exception as error:  # of the upstream; aiohttp's client errors are no OSErrors all of them
            kind = failure_of_call(error)
            passed.fail(said(error, passed.secrets), kind)
            if passed.response is None:
                return _error(_STATUS.get(kind, 502), f"the upstream does not answer: {type(error).__name__}", rollout=call.rollout_id)
            if isinstance(error, ConnectionError):
                raise
            raise ConnectionResetError(said(error, passed.secrets)) from error
        finally:
            self._keep(call)
            ends = request.headers.get("x-assay-end", "0").lower() not in ("", "0", "false", "no")
            if ends and call.rollout_id in self.rollouts.open:
                self.rollouts.close(call.rollout_id)

    def _keep(self, call: Call) -> None:
        if not call.passed.kept:
            self.ended += 1
            self.stored += call.keep()

    async def _upstream_of(self, request: web.Request, caller: Caller, call: Call) -> Upstream:
        """What answers a call. Its rollout is found by token, header, path or key; by the conversation only where rollouts have several upstreams."""
        name = self.access.rollout_named(request, caller)
        if name is not None:
            if len(name) > 200:
                raise ConfigError("a rollout's name may have at most 200 characters")
            known = await self._stored(name)
            by_token = caller.rollout is not None and not caller.has_key
            if by_token and self.rollouts.was_ended(name, known):
                raise Refused(403, "the rollout of this token has ended: open a new one for further calls, or make them with the gateway's key")
            call.of(self.rollouts.named(name, self.upstream, known), name, reopens=not by_token)
        elif self._several:
            call.of(self.rollouts.of_conversation(call.asked(), self.upstream))
        found: Upstream = self.upstream if call.live is None else call.live.upstream
        return found

    # -- rollouts over HTTP

    async def _open(self, request: web.Request) -> web.Response:
        told = json_body(await self.connections.body(request) or b"{}")
        name = told.pop("id", None)
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 200 or "/" in name):
            raise ConfigError("id must be a text of at most 200 characters without a slash")
        known = None if name is None else await self._stored(name)
        if name is not None and (there := self.rollouts.at_hand(name)) is not None:
            known = there.rollout
        live = self.rollouts.begin(self.upstream, name, told, known=known)
        rollout_id = live.rollout.id
        token = self.access.token(rollout_id)
        base = f"{request.scheme}://{request.host}/r/{token}"
        return web.json_response({"id": rollout_id, "base_url": f"{base}/v1", "anthropic_base_url": base, "gemini_base_url": base, "api_key": token})

    async def _show(self, request: web.Request) -> web.Response:
        await self._from_store(self.store.flush, _FLUSH_S)
        found = await self._from_store(self.rollouts.stored, self._id(request))
        if found is None:
            raise UnknownRollout(f"there is no rollout {self._id(request)!r}")
        told = {"id": found.id, "status": found.status, "score": found.score, "human_rating": found.human_rating, "turns": len(found.transitions)}
        return web.json_response(told)

    async def _reward(self, request: web.Request) -> web.Response:
        told = json_body(await self.connections.body(request))
        value = told.get("reward", told.get("value"))
        stored = await self._stored(self._id(request))
        found = self.rollouts.reward(self._id(request), value, t=told.get("t"), criterion=str(told.get("name", "posted")), stored=stored)
        return web.json_response({"id": found.id})

    async def _close(self, request: web.Request) -> web.Response:
        told = json_body(await self.connections.body(request) or b"{}")
        status, error = str(told.get("status", "done")), _text_or_none(told.get("error"))
        check_status(status)
        failure = _failure_kind(told.get("failure"))
        name, prediction = self._id(request), told.get("prediction")
        stored = await self._stored(name)
        if told.get("reward") is not None:
            self.rollouts.reward(name, told["reward"], stored=stored)
        found = self.rollouts.close(name, status=status, prediction=prediction, error=error, failure=failure, stored=stored)
        return web.json_response({"id": found.id, "status": found.status})

    async def _feedback(self, request: web.Request) -> web.Response:
        told = json_body(await self.connections.body(request))
        rating = told.get("rating")
        if isinstance(rating, bool) or not isinstance(rating, int | float) or not 0 <= rating <= 1:
            raise ConfigError(f"rating={rating!r} must be a number between 0 and 1")
        name = str(told.get("rollout", ""))
        rollout_id = rollout_id_of(name)
        if self.rollouts.at_hand(name) is None:
            await self._from_store(self.rollouts.of_gateway, name, waits=False)
        await self._from_store(self.store.rate, rollout_id, float(rating))
        if (live := self.rollouts.open.get(rollout_id)) is not None:
            live.rollout.human_rating = float(rating)
        return web.json_response({"rollout": rollout_id, "rating": rating})

    def _id(self, request: web.Request) -> str:
        return self.access.rollout_managed(request)

    # -- the rest

    async def _serve_model(self, request: web.Request) -> web.Response:
        told = json_body(await self.connections.body(request))
        name = told.get("model")
        if not isinstance(name, str) or not name:
            raise ConfigError('name the model: {"model": "embedded/smollm2-135m"}')
        first = self._upstreams[0]
        if self.one_server and isinstance(first, HttpUpstream) and not is_embedded(name):
            upstream: Upstream = replace(first, name=name, model=name.removeprefix("openai/"), _session=None)  # another of the same server's
        else:
            upstream = await asyncio.to_thread(upstream_of, name)  # by name alone: a server's address would be anybody's to choose
        self.serve_model(upstream)
        return web.json_response({"model": upstream.name, "weights": upstream.weights, "adapters": list(upstream.adapters)})

    def serve_model(self, upstream: Upstream) -> None:
        """Another model or adapter for new rollouts; those that are open keep theirs."""
        self.upstream = upstream
        self._upstreams.append(upstream)
        self._several = True

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if isinstance(self.upstream, LitellmUpstream | EmbeddedUpstream):
            return web.json_response(self.upstream.models())
        return await self._passed_on(request, self.upstream, lent=True)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        if isinstance(self.upstream, LitellmUpstream):
            return self._not_here(request)
        return await self._passed_on(request, self.upstream, lent=True)

    async def _other(self, request: web.Request) -> web.StreamResponse:
        """Anything else: passed on, where the caller may ask the upstream for it."""
        path, upstream, lent = inner_path(request), self.upstream, self.access.caller(request).has_key
        if path == "/" or path.startswith(_OWN) or isinstance(upstream, LitellmUpstream):
            return self._not_here(request)
        if not self.relay.may_pass(upstream, path, self.access.passed_on(request.headers), self.access.query_passed_on(request), lent=lent):
            self._count_refused(path)
            raise Refused(403, f"{path[:100]} is not recorded and is passed on with the gateway's key, or with a key of your own for the upstream")
        return await self._passed_on(request, upstream, lent=lent)

    async def _passed_on(self, request: web.Request, upstream: HttpUpstream, *, lent: bool) -> web.StreamResponse:
        try:
            parts = self.connections.parts(request) if request.body_exists else None
            headers, query = self.access.passed_on(request.headers), self.access.query_passed_on(request)
            return await self.relay.pass_on(request, upstream, headers, query, parts, lent=lent)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error.__cause__, SlowRequest):
                raise error.__cause__ from None
            if request.transport is None or request.transport.is_closing():
                raise
            return _error(502, f"the upstream does not answer: {type(error).__name__}")

    def _not_here(self, request: web.Request) -> web.Response:
        path = inner_path(request)[:200]
        self._count_refused(path)
        return _error(404, f"{path} is not spoken here: there are {', '.join(DIALECTS.values())}")

    def _count_refused(self, path: str) -> None:
        path = without_ids(message(path))[:200]
        name = path if path in self.past or len(self.past) < 100 else "other"
        self.past[name] = self.past.get(name, 0) + 1

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "model": self.upstream.name})

    async def _stats(self, request: web.Request) -> web.Response:
        with suppress(StoreError, TimeoutError):  # its threads may all be waiting, too
            await asyncio.wait_for(self._from_store(self.store.flush, _COUNTS_S), _COUNTS_S)
        return web.json_response(self.stats())

    def stats(self) -> dict[str, Any]:
        """Calls that went to a model, calls that were stored, and what was not seen; rollouts open, closed and never closed. `rows_waiting`
        are on their way into the store: they are counted as stored."""
        rollouts, in_flight = self.rollouts, self.asked - self.ended
        return {
            "calls": self.asked + self.relay.lm_calls, "stored": self.stored - self.store.dropped_calls, "in_flight": in_flight,
            "rows_waiting": self.store.waiting,
            "unrecorded": self.unrecorded, "passed_through": dict(self.relay.counts), "not_spoken": dict(self.past),
            "open": len(rollouts.open), "closed": rollouts.closed,
            "unclosed": rollouts.unclosed, "model": self.upstream.name,
        }  # fmt: skip

    @property
    def unrecorded(self) -> int:
        """Calls that went to a model and are not in the store."""
        return self.ended - self.stored + self.store.dropped_calls + self.relay.lm_calls


def _choices(dialect: str, body: Mapping[str, Any]) -> int:
    """How many answers a request asks for."""
    if dialect == "gemini":
        return gemini.choices_of(body)
    asked, prompt = body.get("n"), body.get("prompt")
    return asked if isinstance(asked, int) else len(prompt) if isinstance(prompt, list) else 1


def _failure_kind(value: Any) -> FailureKind | None:
    if value is None:
        return None
    try:
        return FailureKind(value)
    except ValueError:
        raise ConfigError(f"failure={value!r} must be one of {', '.join(FailureKind)}") from None


def _text_or_none(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"error={value!r} must be a text")
    return value


def _error(status: int, text: str, *, rollout: str | None = None, headers: Mapping[str, str] | None = None) -> web.Response:
    headers = {**(headers or {}), **({"x-assay-rollout": rollout} if rollout else {})}
    told = {"type": "error", "error": {"message": message(text), "type": "assay_gateway", "code": status}}
    return web.json_response(told, status=status, headers=headers)
