"""The gateway's HTTP server: records agents that use OpenAI chat or Responses, Anthropic messages or Gemini.

Requests and answers pass through unchanged, streamed or not; afterwards they become transitions of rollouts. Calls that
could not be recorded are counted. Keys are never stored. Permissions are in `assay.traces.gateway.access`, handlers of
rollouts in `assay.traces.gateway.routes`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from assay.errors import AssayError, ConfigError, FailureKind, StoreError, UnknownRollout
from assay.models.calls import failure_of_call
from assay.models.roles import is_embedded
from assay.support.scrubbing import add_secrets, error_text, message
from assay.support.values import json_text
from assay.traces.gateway import MAX_BODY_MB
from assay.traces.gateway.access import LOOPBACK, Access, Caller, Refused
from assay.traces.gateway.calls import Call, Turns, requested_choices, sent
from assay.traces.gateway.connections import Connections, SlowRequest
from assay.traces.gateway.proxy import LoopCounts, LoopWatch, limit_of, pass_on
from assay.traces.gateway.relay import BackgroundCalls, Relay, inner_path, named_path, without_ids
from assay.traces.gateway.replies import Reply, UpstreamCall, error_response
from assay.traces.gateway.requests import json_body, parsed_or_none, sent_secrets
from assay.traces.gateway.routes import FLUSH_S, AgentRoutes, AgentRunner, RolloutRoutes, StagedTexts, StoreAccess
from assay.traces.gateway.sessions import Live, LiveRollouts
from assay.traces.gateway.sharing import EVERY_S, Sharing
from assay.traces.gateway.texts import TextSwap
from assay.traces.gateway.upstreams import (
    EmbeddedUpstream,
    HttpUpstream,
    LitellmUpstream,
    unanswered_text,
    upstream_of,
)
from assay.traces.messages import gemini
from assay.traces.messages.dialects import DIALECTS, dialect_at
from assay.traces.store import Store

_LOG = logging.getLogger("assay.gateway")
_GATEWAY_PATHS = ("/agents", "/assay", "/feedback", "/health", "/metrics", "/reward", "/close")  # never passed on
# Path prefixes of Azure OpenAI, before the dialect's own path without /v1.
_AZURE = ("/openai/deployments/{deployment}", "/openai/v1", "/openai")
_STATUS = {FailureKind.TIMEOUT: 504, FailureKind.CONTEXT: 400}  # status of a failed call by its kind; 502 for others
_NOT_RECORDED = (
    f"is not a recorded call. Recorded are POST requests to {', '.join(DIALECTS.values())}: check the base URL. "
    "Other requests are passed on only with the gateway's key, or with your own key for the upstream"
)
_COUNTS_S = 0.5  # seconds that a request for the counts waits for the store
Upstream = HttpUpstream | LitellmUpstream


class Gateway:
    """Proxy between agents and a model, which writes what it passes on to a store.

    Args:
        upstream: answers the calls of new rollouts; `serve_model` replaces it while agents run.
        key: key that callers must send; required if `host` is not loopback. Without one, calls from this machine need
            no key, and a generated key protects everything else (`access.key`).
        host: address the server listens on.
        names: further host names that requests may address, see `Access`.
        idle_s: seconds without a call after which a rollout ends, see `LiveRollouts`.
        max_body: largest request body, in bytes.
        receive_s: seconds in which a request's body must arrive, see `ConnectionLimits`.
        loops: for answers that repeat themselves: `alarm` records it, `stop` also ends the stream, `off` does nothing.
        agents: deployed agents by name, which `POST /agents/NAME` runs.
        texts: of registered agents that run elsewhere, by name; they are replaced in the agents' requests.
        one_server: models set over HTTP (`POST /assay/model`) are models of the upstream's server.
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
        max_body: int = MAX_BODY_MB << 20,
        receive_s: float = 60.0,
        one_server: bool = False,
        loops: str = "alarm",
        agents: Mapping[str, AgentRunner] | None = None,
        texts: Mapping[str, StagedTexts] | None = None,
    ) -> None:
        self.access = Access(key, host=host, names=names)
        add_secrets(self.access.key)
        self.store, self.upstream, self.max_body = store, upstream, max_body
        self.one_server, self.loops = one_server, LoopCounts(loops)
        self.rollouts = LiveRollouts(store, run_id=run_id, idle_s=idle_s)
        self.started = self.ended = self.stored = self.refused = 0
        self.failed = 0  # calls that ended with an error
        self.refused_paths: dict[str, int] = {}  # refused path -> number of requests
        self.connections, self.relay = Connections(receive_s, max_body), Relay()
        self._background = BackgroundCalls()
        self._upstreams: list[Upstream] = [upstream]
        self._turns = Turns()
        self._several = False  # open rollouts have other upstreams than new ones
        self._store_access = StoreAccess()
        self._sharing = Sharing(self.rollouts, self._store_access)
        self._routes = RolloutRoutes(
            self.rollouts, self.access, self.connections, self._store_access, lambda: self.upstream
        )
        self._texts = dict(texts or {})
        self._agents = AgentRoutes(agents or {}, self._texts, self.connections, self.stats)
        store.never_wait()
        # Handlers that an agent may use; all others need the gateway's key.
        self._agent_handlers: set[Any] = {self._models, self._count_tokens, self._agents.run}

    def app(self) -> web.Application:
        """An aiohttp application; `web.run_app` or any runner serves it."""
        app = web.Application(client_max_size=self.max_body, middlewares=[self._guard])
        for dialect, path in DIALECTS.items():
            call = self._call_of(dialect)
            self._agent_handlers.add(call)
            for prefix in ("", "/r/{rollout}"):
                if dialect == "gemini":
                    app.router.add_post(prefix + gemini.ROUTE, call)
                    continue
                app.router.add_post(prefix + path, call)
                app.router.add_post(prefix + path.removeprefix("/v1"), call)
                for azure in _AZURE if dialect != "messages" else ():
                    app.router.add_post(prefix + azure + path.removeprefix("/v1"), call)
        for prefix in ("", "/r/{rollout}"):
            for path in ("/v1/models", "/models"):
                app.router.add_get(prefix + path, self._models)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count_tokens)
        self._routes.add_to(app)
        self._agents.add_to(app)
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
                    await self._sharing.drop_ended()
                    self.rollouts.sweep()
                    self._several = any(live.upstream is not self.upstream for live in self.rollouts.open.values())
                    await self._settle()
                except Exception as error:  # the next sweep must still run
                    _LOG.error("idle rollouts could not be ended: %s: %s", type(error).__name__, error)

        async def looking() -> None:
            while True:
                await asyncio.sleep(EVERY_S)
                await self._sharing.look()

        await self._sharing.arrive()
        tasks = [asyncio.create_task(sweeping()), asyncio.create_task(looking())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sharing.drop_ended()
        self.rollouts.sweep(all_of_them=True)
        await self._sharing.leave()
        for upstream in self._upstreams:
            await upstream.close()
        self._store_access.shutdown()

    async def _settle(self) -> None:
        """Drops ended rollouts from memory once their rows are in the database."""
        written = {rollout_id: live.rollout.ended_at for rollout_id, live in self.rollouts.ended.items()}
        if written:
            with suppress(StoreError):
                await self._store_access.call(self.store.flush, FLUSH_S)
                self.rollouts.settled(written)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Checks permissions and turns exceptions into error responses."""
        try:
            self._admit(request)
            return await handler(request)
        except Refused as error:
            return error_response(error.status, str(error))
        except ConfigError as error:
            return error_response(422, str(error))
        except UnknownRollout as error:
            return error_response(404, str(error))
        except StoreError as error:
            return error_response(503, str(error), headers={"Retry-After": "5"})
        except AssayError as error:
            return error_response(500, str(error))
        except web.HTTPRequestEntityTooLarge:
            return error_response(413, f"the body is larger than {self.max_body >> 20} MB; --max-body-mb raises it")
        except SlowRequest as error:
            return error_response(408, str(error), headers={"Connection": "close"})
        except web.RequestPayloadError as error:
            return error_response(400, f"the body cannot be read: {error}")
        except (ConnectionError, asyncio.CancelledError):
            raise
        except web.HTTPException as error:
            return error_response(error.status, error.reason)
        except Exception as error:
            text = error_text(error, sent_secrets(request))
            _LOG.error("%s %s: %s", request.method, message(inner_path(request)), text)
            return error_response(500, text[:300])
        finally:
            self.connections.mark_answered(request)

    def _admit(self, request: web.Request) -> None:
        """Raises `Refused` if the request's host, origin or key does not permit it."""
        self.access.check_host(request.headers.get("Host", ""))
        if (origin := request.headers.get("Origin")) and urlsplit(origin).hostname not in LOOPBACK and self.access.open:
            # Without a key any page could use the gateway through the user's browser.
            raise Refused(403, f"a page of {origin!r} may not use this gateway")
        caller = self.access.caller(request)
        handler = request.match_info.handler
        if handler == self._health:
            return
        if handler in self._agent_handlers or handler == self._other:
            self.access.may_call(caller)
        else:
            self.access.may_manage(caller)

    def _call_of(self, dialect: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def call(request: web.Request) -> web.StreamResponse:
            return await self._call(dialect, request)

        return call

    async def _call(self, dialect: str, request: web.Request, raw: bytes | None = None) -> web.StreamResponse:
        """Sends and records an LM call.

        Args:
            raw: its body if it was read already, because its path is not the dialect's own.
        """
        path = named_path(request) if raw is not None or "/openai/" in request.path else ""
        raw = await self.connections.body(request) if raw is None else raw
        body = json_body(raw)
        caller = self.access.caller(request)
        streams = gemini.streams(request.path)
        in_path = {"model": gemini.model_in(request.path), "stream": streams} if dialect == "gemini" else {}
        path = named_path(request) if in_path else path
        # An agent with a rollout's token must not choose its task and group by headers.
        headers = request.headers if caller.rollout is None else {}
        call = Call(self.rollouts, dialect, request, body, path, in_path, headers)
        upstream = await self._upstream_of(request, caller, call)
        if self._texts and (swapped := await self._with_texts(call, request, body)) is not None:
            body, raw = swapped, json_text(swapped).encode()
        passed = call.passed
        passed.watch = LoopWatch(dialect, self.loops.action, limit_of(body))
        self.started += 1
        try:
            passed_headers, query = self.access.passed_on(request.headers), self.access.query_passed_on(request)
            asking = upstream.ask(UpstreamCall(dialect, body, raw, passed_headers, query, path))
            before = partial(self._sharing.catch_up, call, upstream) if self._sharing.met else None
            async with sent(asking, self._turns, partial(call.begin, upstream), before) as reply:
                return await pass_on(
                    request, reply, passed, call.rollout_id, partial(self._end, call, request), self._turns.record,
                    self._sharing.written, choices=requested_choices(dialect, body), streams=streams,
                )  # fmt: skip
        except AssayError as error:  # such as a missing package: the caller gets the message
            passed.fail(str(error), FailureKind.MODEL)
            raise
        except (ConnectionResetError, asyncio.CancelledError):
            passed.client_left = True
            passed.fail("the client went away before the answer was complete", FailureKind.CAP)
            raise
        except Exception as error:  # any failure of the upstream; not all client errors of aiohttp are OSErrors
            kind = failure_of_call(error)
            passed.fail(error_text(error, passed.secrets), kind)
            if passed.response is None:
                text = unanswered_text(upstream, error)
                return error_response(_STATUS.get(kind, 502), text, rollout=call.rollout_id)
            if isinstance(error, ConnectionError):
                raise
            raise ConnectionResetError(error_text(error, passed.secrets)) from error
        finally:
            self._end(call, request)

    def _end(self, call: Call, request: web.Request) -> None:
        """Stores a call that has ended; ends its rollout if the client wants that, before the answer is complete."""
        self._keep(call)
        ends = request.headers.get("x-assay-end", "0").lower() not in ("", "0", "false", "no")
        if ends and call.rollout_id in self.rollouts.open:
            self.rollouts.close(call.rollout_id)

    def _keep(self, call: Call) -> None:
        if not call.passed.recorded:
            if call.passed.unsent:
                self.started -= 1
                call.drop()
                return
            self.ended += 1
            self.stored += call.keep()
            self.failed += call.passed.error is not None
            self._background.add(call)
            self.loops.add(call.passed.watch, stopped=call.passed.failure is FailureKind.LOOP)

    async def _upstream_of(self, request: web.Request, caller: Caller, call: Call) -> Upstream:
        """The upstream that answers a call.

        The call's rollout is named by token, header, path or key. The conversation is searched here only if rollouts
        have different upstreams; otherwise this waits until the call was sent.
        """
        name = self.access.rollout_named(request, caller)
        if name is not None:
            if len(name) > 200:
                raise ConfigError("a rollout's name may have at most 200 characters")
            stored = await self._routes.stored(name)
            by_token = caller.rollout is not None and not caller.has_key
            if by_token and (self.rollouts.was_ended(name, stored) or await self._sharing.was_ended(name)):
                raise Refused(403, "the rollout of this token has ended: open a new one, or use the gateway's key")
            call.of(self.rollouts.named(name, self.upstream, stored), name, reopens=not by_token)
        elif self._several or self._texts:
            try:
                await self._sharing.catch_up(call, self.upstream)
                call.of(self.rollouts.of_conversation(call.client_request(), self.upstream))
            except Exception as error:  # of a request that cannot be read: it is sent all the same
                _LOG.error("the conversation of a call is not known: %s", error_text(error, call.passed.secrets))
        upstream: Upstream = self.upstream if call.live is None else call.live.upstream
        return upstream

    async def _with_texts(self, call: Call, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """The request with the texts of the version that its rollout is assigned; None if nothing changes."""
        live = call.live
        if live is None:
            return None
        if live.texts is None and (texts := next((one for one in self._texts.values() if one.are_in(body)), None)):
            user = body.get("user") or live.rollout.data_subject
            unit = request.headers.get("x-assay-unit") or (user if isinstance(user, str) else "") or live.rollout.id
            await self._assign(live, texts, unit)
        if live.texts is None:
            return None
        new = live.texts.body(body)
        return None if all(new[name] is value for name, value in body.items()) else new

    async def _assign(self, live: Live, texts: StagedTexts, unit: str) -> None:
        """Gives a rollout the texts of one version for its life: of the first that a gateway stored."""
        swap, fields = await self._texts_of(live, texts, unit)
        kept = await self._sharing.claim(live, fields) if fields else fields
        for name, value in kept.items():
            setattr(live.rollout, name, value)
        is_own = kept.get("version") == fields.get("version")
        if not is_own:
            swap, _ = await self._texts_of(live, texts, unit)
        if live.texts is None:  # another call of the rollout may have been first
            live.texts = swap
            if fields and is_own:
                texts.count(fields)

    async def _texts_of(self, live: Live, texts: StagedTexts, unit: str) -> tuple[TextSwap, Mapping[str, Any]]:
        try:
            assigned: tuple[TextSwap, Mapping[str, Any]] = await self._store_access.call(
                texts.assigned, live.rollout, unit, waits=False
            )
            return assigned
        except Exception as error:  # such as of a store that is away: the rollout is no part of a comparison
            _LOG.warning("a rollout gets the champion's texts: %s", error_text(error))
            swap, fields = texts.of_champion()
            return swap, {} if live.rollout.version else fields

    async def _serve_model(self, request: web.Request) -> web.Response:
        body = json_body(await self.connections.body(request))
        name = body.get("model")
        if not isinstance(name, str) or not name:
            raise ConfigError('name the model: {"model": "embedded/smollm2-135m"}')
        first = self._upstreams[0]
        if self.one_server and isinstance(first, HttpUpstream) and not is_embedded(name):
            # A model of the same server.
            upstream: Upstream = replace(first, name=name, model=name.removeprefix("openai/"), _session=None)
        else:
            # By name alone: a caller must not choose the server's address.
            upstream = await asyncio.to_thread(upstream_of, name)
        self.serve_model(upstream)
        served = {"model": upstream.name, "weights": upstream.weights, "adapters": list(upstream.adapters)}
        return web.json_response(served)

    def serve_model(self, upstream: Upstream) -> None:
        """Sets the model or adapter for new rollouts. Open rollouts keep theirs."""
        self.upstream = upstream
        self._upstreams.append(upstream)
        self._several = True

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if isinstance(self.upstream, LitellmUpstream | EmbeddedUpstream):
            return web.json_response(self.upstream.models())
        return await self._passed_on(request, self.upstream, lent=True)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        if isinstance(self.upstream, LitellmUpstream):
            return self._unsupported_path(request)
        return await self._passed_on(request, self.upstream, lent=True)

    async def _other(self, request: web.Request) -> web.StreamResponse:
        """Passes any other request on, if the caller may send it to the upstream."""
        path, upstream, caller = inner_path(request), self.upstream, self.access.caller(request)
        if path == "/" or path.startswith(_GATEWAY_PATHS):
            return self._unsupported_path(request)
        raw = await self._json_of(request)
        body = None if raw is None else parsed_or_none(raw)
        if raw is not None and (dialect := dialect_at(path, body)) is not None:
            return await self._call(dialect, request, raw)
        if isinstance(upstream, LitellmUpstream):
            return self._unsupported_path(request)
        call = self._background.call_of(request)
        if call is not None and isinstance(call.upstream, HttpUpstream) and caller.rollout in (None, call.rollout_id):
            return await self._passed_on(request, call.upstream, lent=True, see=self._background.see)
        headers, query = self.access.passed_on(request.headers), self.access.query_passed_on(request)
        if not self.relay.may_pass(
            upstream, path, headers, query, lent=caller.has_key, token=caller.rollout is not None
        ):
            self._count_refused(path)
            raise Refused(403, f"{request.method} {path[:100]} {_NOT_RECORDED}")
        return await self._passed_on(request, upstream, lent=caller.has_key, raw=raw)

    async def _json_of(self, request: web.Request) -> bytes | None:
        """The body of a request at an unknown path that may be an LM call; None for another, which is not read."""
        is_json = request.method == "POST" and "json" in request.content_type
        is_small = request.content_length is not None and request.content_length <= self.max_body
        return await self.connections.body(request) if is_json and is_small else None

    async def _passed_on(
        self,
        request: web.Request,
        upstream: HttpUpstream,
        *,
        lent: bool,
        raw: bytes | None = None,
        see: Callable[[web.Request, Reply, bytes], None] | None = None,
    ) -> web.StreamResponse:
        """Passes a request on.

        Args:
            raw: its body if it was read already.
            see: as in `Relay.pass_on`.
        """
        try:
            parts: Any = raw
            if raw is None and request.body_exists:
                parts = self.connections.parts(request)
            headers, query = self.access.passed_on(request.headers), self.access.query_passed_on(request)
            seen = None if see is None else partial(see, request)
            return await self.relay.pass_on(request, upstream, headers, query, parts, lent=lent, see=seen)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error.__cause__, SlowRequest):
                raise error.__cause__ from None
            if request.transport is None or request.transport.is_closing():
                raise
            return error_response(502, unanswered_text(upstream, error))

    def _unsupported_path(self, request: web.Request) -> web.Response:
        path = inner_path(request)[:200]
        self._count_refused(path)
        return error_response(404, f"{path} is not supported here: supported are {', '.join(DIALECTS.values())}")

    def _count_refused(self, path: str) -> None:
        path = without_ids(message(path))[:200]
        name = path if path in self.refused_paths or len(self.refused_paths) < 100 else "other"
        self.refused_paths[name] = self.refused_paths.get(name, 0) + 1

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "model": self.upstream.name})

    async def _stats(self, request: web.Request) -> web.Response:
        with suppress(StoreError, TimeoutError):  # its threads may all be busy
            async with asyncio.timeout(_COUNTS_S):
                await self._store_access.call(self.store.flush, _COUNTS_S)
        return web.json_response(self.stats())

    def stats(self) -> dict[str, Any]:
        """Counts of LM calls (sent to a model, stored, unrecorded), of other requests, and of rollouts.

        Rows that wait for the database (`rows_waiting`) are counted as stored.
        """
        return {
            "calls": self.started + self.relay.lm_calls,
            "stored": self.stored - self.store.dropped_calls,
            "in_flight": self.started - self.ended,
            "rows_waiting": self.store.waiting,
            "loops": self.loops.to_dict(),
            "unrecorded": self.unrecorded,
            "passed_through": dict(self.relay.counts),
            "refused_paths": dict(self.refused_paths),
            "open": len(self.rollouts.open),
            "closed": self.rollouts.closed,
            "unclosed": self.rollouts.unclosed,
            "model": self.upstream.name,
        }

    @property
    def unrecorded(self) -> int:
        """Number of calls that went to a model and are not in the store."""
        return self.ended - self.stored + self.store.dropped_calls + self.relay.lm_calls
