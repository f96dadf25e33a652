"""One call through a gateway: sent first, recorded while the upstream works.

Removing secrets from the request, finding its rollout by its conversation and encoding it as JSON take time that grows
with the conversation. They run after the request was sent, so that the caller does not wait for them.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web

from assay.datasets.tasks import task_key
from assay.models.prices import FREE, Price
from assay.support.scrubbing import error_text
from assay.support.values import json_text
from assay.traces.gateway.proxy import Passed
from assay.traces.gateway.replies import Reply, readable
from assay.traces.gateway.requests import ClientRequest, is_constrained, sent_secrets, storable
from assay.traces.gateway.sessions import Live, LiveRollouts
from assay.traces.gateway.upstreams import EmbeddedUpstream, answering_model, requested_model
from assay.traces.messages import gemini
from assay.traces.messages.chaining import unfinished
from assay.traces.messages.dialects import Answer
from assay.traces.records import Transition, check_agent_name
from assay.traces.store.rows import as_json

_WRITES = 2  # event loop iterations in which a request is written to an open connection
_LOG = logging.getLogger("assay.gateway")


class Turns:
    """Records one call per iteration of the event loop, so that data is forwarded between two records.

    Recording a hundred calls at once would delay the first tokens of all answers.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._made = False  # whether a record was made in this iteration of the event loop

    async def record(self, record: Callable[[], None], *, later: int = 0) -> None:
        """Calls `record` in turn, at least `later` iterations later; at once if the task is cancelled meanwhile."""
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
async def sent(
    asking: AbstractAsyncContextManager[Reply],
    turns: Turns,
    meanwhile: Callable[[], None],
    before: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[Reply]:
    """The answer of an upstream. Calls `meanwhile` exactly once, after the request was sent, also if it fails.

    Args:
        before: awaited before `meanwhile`, after the request was sent.
    """
    async with AsyncExitStack() as stack:
        sending = asyncio.create_task(stack.enter_async_context(asking))
        try:
            try:
                if before is not None:
                    for _ in range(_WRITES):
                        await asyncio.sleep(0)
                    await before()
            finally:
                await turns.record(meanwhile, later=0 if before is not None else _WRITES)
            reply = await sending
        except BaseException:
            sending.cancel()
            await asyncio.wait([sending])
            raise
        yield reply


class Call:
    """A call from its request to its record.

    Args:
        path: path of its address if it differs from the dialect's own.
        in_path: fields of the request that are in the path instead of the body.
        naming: headers that name the rollout's task and group; empty if the caller may not set them.
    Raises:
        ConfigError: the header `x-assay-agent` is not a name.
    """

    def __init__(
        self,
        rollouts: LiveRollouts,
        dialect: str,
        request: web.Request,
        body: dict[str, Any],
        path: str,
        in_path: dict[str, Any],
        naming: Mapping[str, str],
    ) -> None:
        self._rollouts, self._dialect, self._request, self._body = rollouts, dialect, request, body
        self._path, self._in_path, self._naming = path, in_path, naming
        agent = readable(request.headers.get("x-assay-agent", ""))
        self._agent = check_agent_name(agent, "x-assay-agent") if agent else ""
        self._began, self._clock = rollouts.store.clock.now(), time.perf_counter()
        self.passed = Passed()
        self.passed.secrets = sent_secrets(request)
        self.live: Live | None = None
        self._named: str | None = None
        self._reopens = True
        self._client_request: ClientRequest | None = None
        self._transition: Transition | None = None
        self._text: str | None = None

    @property
    def rollout_id(self) -> str:
        """Id of the rollout it belongs to; "" until it is known."""
        return "" if self.live is None else self.live.rollout.id

    def client_request(self) -> ClientRequest:
        """The request without secrets. Computed once."""
        if self._client_request is None:
            beginning = self._rollouts.beginnings.of(self._dialect, self._body)
            body = storable(self._body, self.passed.secrets, checked=beginning.known if beginning is not None else 0)
            # The cached digests are of the original messages: of no use if a secret was removed from one of them.
            unchanged = beginning is not None and body["messages"] is self._body["messages"]
            chain = beginning.chain if beginning is not None and unchanged else ()
            self._client_request = ClientRequest(self._dialect, body, self._request.headers, chain)
            if beginning is not None and unchanged:
                self._rollouts.beginnings.keep(beginning, self._client_request.chain)
        return self._client_request

    def of(self, live: Live, name: str | None = None, *, reopens: bool = True) -> None:
        """Sets the rollout of the call. To be called before `begin`.

        Args:
            name: the name by which the call refers to the rollout; None if it does not name it.
            reopens: whether the rollout is reopened if it ends before the call is noted; else the call is added to the
                ended rollout.
        """
        self.live, self._named, self._reopens = live, name, reopens

    def begin(self, upstream: Any) -> None:
        """Begins the record of a call. A call that cannot be read is still forwarded, and counted as unrecorded."""
        try:
            self._begin(upstream)
        except Exception as error:
            _LOG.error("a call could not be noted: %s", error_text(error, self.passed.secrets))

    def _begin(self, upstream: Any) -> None:
        """Finds the rollout of the call unless it is set, and begins the record."""
        client_request = self.client_request()
        live = self.live = self._rollout(client_request, upstream)
        used, body, constrained = live.upstream, client_request.body, is_constrained(self._body)
        model = used.named or requested_model({**body, **self._in_path}, self._path)
        if not live.rollout.model:
            live.rollout.model = model
            self._rollouts.put_beginning(live, "model")
        if isinstance(used, EmbeddedUpstream):
            body, constrained = used.answered_body(self._dialect, body), constrained or client_request.insists
        if live.texts is not None:
            body = live.texts.body(body)  # as it was sent
        request = {"dialect": self._dialect, **self._in_path, "body": body}
        turn = self._rollouts.register_call(live, client_request, self._began)
        self._transition = Transition(
            t=turn, id=None if live.adopted else str(live.calls[turn]), model=model, weights=used.weights,
            adapters=tuple(used.adapters), request=request, started_at=self._began, agent=self._agent,
            constrained=constrained,
        )  # fmt: skip
        self._text = as_json(request)

    def _rollout(self, client_request: ClientRequest, upstream: Any) -> Live:
        if self.live is None:
            return self._rollouts.of_conversation(client_request, upstream)
        live = self.live
        if self._named is not None:
            if self._reopens and live.rollout.id not in self._rollouts.open:  # ended a moment ago
                live = self._rollouts.named(self._named, upstream, live.rollout)
                live.texts = self.live.texts  # with which it was sent
            self._describe(live, client_request)
        return live

    def _describe(self, live: Live, client_request: ClientRequest) -> None:
        """Sets task, group and inputs of a named rollout from its first call, where the client did not send them."""
        rollout = live.rollout
        by_key = ("", task_key(rollout.inputs))
        if live.turns or rollout.task_id not in by_key:
            return
        if "inputs" not in live.released:
            rollout.inputs = rollout.inputs or {"prompt": client_request.prompt}
        rollout.task_id = self._naming.get("x-assay-task", "")[:1000] or task_key(rollout.inputs)
        if rollout.group_id in by_key:
            rollout.group_id = self._naming.get("x-assay-group", "")[:1000] or rollout.task_id
        self._rollouts.put_beginning(live, "task_id", "group_id", "inputs", at=self._began)

    def drop(self) -> None:
        """Forgets a call that was not sent."""
        self.passed.recorded = True
        if self.live is not None and self._transition is not None:
            self.live.turns_in_flight.discard(self._transition.t)

    def keep(self) -> bool:
        """Stores a call that has ended as a transition. An answer that cannot be read is stored as text with an error.

        Returns:
            Whether the transition was stored.
        """
        live, transition, passed = self.live, self._transition, self.passed
        passed.recorded = True
        if live is None or transition is None:
            return False
        answer = self._answer(passed, live, transition)
        if not live.upstream.named and (name := answering_model(transition.response)) is not None:
            if live.rollout.model == transition.model != name:
                live.rollout.model = name
                self._rollouts.put_beginning(live, "model")
            transition.model = name
        again = not 400 <= passed.status < 500 or passed.status in (408, 409, 429)
        try:
            self._rollouts.answered(
                live, transition, self.client_request(), *answer, again=again, request_json=self._text
            )
        except Exception as error:  # the caller has its answer; the call is counted as unrecorded
            _LOG.error("a call could not be stored: %s", error_text(error, passed.secrets))
            return False
        return True

    def _answer(self, passed: Passed, live: Live, transition: Transition) -> tuple[Answer | None, str | None]:
        """Writes the answer into the transition, with its latency and cost. Returns as `Passed.answer`."""
        transition.latency_ms = (time.perf_counter() - self._clock) * 1000
        answer = passed.answer(self._dialect, transition)
        if passed.call is None:
            transition.cost_usd = _cost(live.upstream.price, transition)
        transition.shown_tasks = passed.shown_tasks
        return answer

    @property
    def upstream(self) -> Any:
        """The upstream that answers it; None until its rollout is known."""
        return None if self.live is None else self.live.upstream

    @property
    def background_id(self) -> str:
        """The id of its background response that goes on; "" if there is none."""
        body = (self._transition.response or {}).get("body") if self._transition is not None else None
        is_open = isinstance(body, Mapping) and self._dialect == "responses" and unfinished(body)
        return str(body.get("id") or "") if is_open and self._body.get("background") and body is not None else ""

    def complete(self, body: Mapping[str, Any]) -> None:
        """Stores the call again with its background response, if that has ended.

        Args:
            body: the response as it was read later.
        """
        live, transition = self.live, self._transition
        if live is None or transition is None:
            return
        live.touched = time.monotonic()
        if unfinished(body):
            return
        passed = Passed()
        passed.status, passed.secrets, passed.parts = 200, self.passed.secrets, [json_text(body).encode()]
        answer = self._answer(passed, live, transition)
        try:
            self._rollouts.completed(live, transition, self.client_request(), *answer, request_json=self._text)
        except Exception as error:  # the caller has its answer; the call stays unfinished
            _LOG.error("a background response could not be stored: %s", error_text(error, passed.secrets))


def _cost(price: Price | None, transition: Transition) -> float | None:
    """Dollars of a call; None if its price or its tokens are not known."""
    counts = (transition.prompt_tokens, transition.completion_tokens)
    if price is None or (counts == (None, None) and price != FREE):
        return None
    return price.cost(counts[0] or 0, counts[1] or 0)


def requested_choices(dialect: str, body: Mapping[str, Any]) -> int:
    """Number of choices that a request asks for."""
    if dialect == "gemini":
        return gemini.choices_of(body)
    choices, prompt = body.get("n"), body.get("prompt")
    return choices if isinstance(choices, int) else len(prompt) if isinstance(prompt, list) else 1
