"""One call through a gateway: sent first, and recorded while the upstream works.

What an upstream needs is known at once. All else (taking secrets out of the request, finding its rollout by its conversation, writing it as JSON)
takes longer the longer the conversation is, and is done when the request is on its way, so that the caller does not wait for it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web

from assay.scrubbing import said
from assay.traces.conversation import Asked
from assay.traces.live import Live, LiveRollouts
from assay.traces.passing import Passed, is_constrained, sent_secrets, storable
from assay.traces.records import Transition
from assay.traces.rows import as_json
from assay.traces.upstreams import EmbeddedUpstream, Reply, answering_model, asked_model

__all__ = ["Call", "Turns", "sent"]

_WRITES = 2  # turns of the event loop in which a request is written to a connection that is there
_LOG = logging.getLogger("assay.gateway")


class Turns:
    """Recording, one call after another: between two of them the event loop passes on whatever has come. A hundred at once would keep the first
    words of all answers waiting."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._made = False  # whether a record was made in this turn of the event loop

    async def record(self, record: Callable[[], None], *, later: int = 0) -> None:
        """Calls it in turn, some turns of the event loop later; at once where its call is cancelled meanwhile."""
        try:
            for _ in range(later):
                await asyncio.sleep(0)
            async with self._lock:
                while self._made:
                    await asyncio.sleep(0)
        finally:
            self._made = True
            asyncio.get_running_loop().call_soon(self._turn)
            record()

    def _turn(self) -> None:
        self._made = False


@asynccontextmanager
async def sent(asking: AbstractAsyncContextManager[Reply], turns: Turns, meanwhile: Callable[[], None]) -> AsyncIterator[Reply]:
    """The answer of an upstream; `meanwhile` is called once when the request is on its way, and in any case."""
    async with AsyncExitStack() as stack:
        sending = asyncio.create_task(stack.enter_async_context(asking))
        try:
            await turns.record(meanwhile, later=_WRITES)
            reply = await sending
        except BaseException:
            sending.cancel()
            await asyncio.wait([sending])
            raise
        yield reply


class Call:
    """A call from its request to its record.

    Args:
        path: of its address, where that is not the dialect's own; `in_path` what it says beside the body.
        told: headers that may say what a rollout is compared with; empty where the caller may not.
    """

    def __init__(
        self, rollouts: LiveRollouts, dialect: str, request: web.Request, body: dict[str, Any], path: str, in_path: dict[str, Any],
        told: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._rollouts, self._dialect, self._request, self._body, self._told = rollouts, dialect, request, body, told
        self._path, self._in_path = path, in_path
        self._began, self._clock = time.time(), time.perf_counter()
        self.passed = Passed()
        self.passed.secrets = sent_secrets(request)
        self.live: Live | None = None
        self._named: str | None = None
        self._reopens = True
        self._asked: Asked | None = None
        self._transition: Transition | None = None
        self._text: str | None = None

    @property
    def rollout_id(self) -> str:
        """Of the rollout it belongs to, "" while that is not known."""
        return "" if self.live is None else self.live.rollout.id

    def asked(self) -> Asked:
        """The request without secrets."""
        if self._asked is None:
            self._asked = Asked(self._dialect, storable(self._body, self.passed.secrets), self._request.headers)
        return self._asked

    def of(self, live: Live, name: str | None = None, *, reopens: bool = True) -> None:
        """Says which rollout the call belongs to, before `begin`.

        Args:
            reopens: whether the rollout is opened again if it ends before the call is noted; else the call is added to the ended one.
        """
        self.live, self._named, self._reopens = live, name, reopens

    def begin(self, upstream: Any) -> None:
        """Notes a call that is made; finds its rollout where that is not known."""
        asked = self.asked()
        live = self.live = self._rollout(asked, upstream)
        used = live.upstream
        model = used.named or asked_model({**asked.body, **self._in_path}, self._path)
        if not live.rollout.model:
            live.rollout.model = model
            self._rollouts.put(live)
        self._transition = Transition(
            t=self._rollouts.asked(live, asked), model=model, weights=used.weights, adapters=tuple(used.adapters),
            request={"dialect": self._dialect, **self._in_path, "body": asked.body}, started_at=self._began,
            constrained=is_constrained(self._body) or (asked.insists and isinstance(used, EmbeddedUpstream)),
        )  # fmt: skip
        self._text = as_json(self._transition.request)

    def _rollout(self, asked: Asked, upstream: Any) -> Live:
        if self.live is None:
            return self._rollouts.of_conversation(asked, upstream)
        live = self.live
        if self._named is not None:
            if self._reopens and live.rollout.id not in self._rollouts.open:  # ended a moment ago
                live = self._rollouts.named(self._named, upstream, live.rollout)
            self._describe(live, asked)
        return live

    def _describe(self, live: Live, asked: Asked) -> None:
        """What the first call of a rollout that was named says of it."""
        if live.rollout.task_id or live.turns:
            return
        live.rollout.task_id = self._told.get("x-assay-task", "")[:1000]
        live.rollout.group_id = self._told.get("x-assay-group", "")[:1000] or live.rollout.task_id
        if "inputs" not in live.let_go:
            live.rollout.inputs = live.rollout.inputs or {"prompt": asked.prompt}
        self._rollouts.put(live)

    def keep(self) -> bool:
        """A call that has ended becomes a transition; whether it is in the store. What cannot be read of it is kept as text with an error, never
        dropped."""
        live, transition, passed = self.live, self._transition, self.passed
        passed.kept = True
        if live is None or transition is None:
            return False
        transition.latency_ms = (time.perf_counter() - self._clock) * 1000
        answer, response_id = passed.answer(self._dialect, transition)
        transition.cost_usd = live.upstream.price_usd
        if not live.upstream.named and (name := answering_model(transition.response)) is not None:
            live.rollout.model = name if live.rollout.model == transition.model else live.rollout.model
            transition.model = name
        try:
            again = not 400 <= passed.status < 500 or passed.status in (408, 409, 429)
            self._rollouts.answered(live, transition, self.asked(), answer, response_id, again=again, request_json=self._text)
        except Exception as error:  # the caller has its answer; the audit will say that this one is missing
            _LOG.error("a call could not be stored: %s", said(error, passed.secrets))
            return False
        return True
