"""The gateway of a job that runs agents written with anything: a language model of this process answers their calls.

Each rollout has an upstream and a key of its own, and its calls are kept in the rollout that the job scores. Does not
run agents.
"""

import asyncio
import contextvars
import copy
import re
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from aiohttp import web
from dspy import lm15
from dspy.utils.exceptions import LMError

from assay.errors import AssayError, FailureKind, LoopStopped, StopRun
from assay.models.calls import Call, failure_of_call
from assay.models.codec import stored_response
from assay.models.entries import Entry, entered
from assay.models.hosted import error_reason
from assay.models.lm import LanguageModel
from assay.models.prices import FREE
from assay.models.roles import is_embedded
from assay.models.scope import looping_answers_as_text
from assay.support.scrubbing import error_text, message
from assay.traces.gateway.access import Access
from assay.traces.gateway.connections import ConnectionLimits, Listener
from assay.traces.gateway.replies import Reply, UpstreamCall, json_reply
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.texts import TextSwap
from assay.traces.gateway.translation import (
    answered,
    as_called,
    chat_request,
    completion_of,
    error_body,
    refused,
    translated,
)
from assay.traces.gateway.upstreams import EmbeddedUpstream
from assay.traces.messages import gemini
from assay.traces.recorder import shown_in
from assay.traces.records import Rollout
from assay.traces.store import Store

T = TypeVar("T")
_MOST_CALLS = 1024  # that wait for the model at once; each has a thread
_START_S = 30.0  # that the gateway may take to listen


class AgentUpstream(EmbeddedUpstream):
    """Answers the calls of one rollout with a language model of this process. Must be created in the context of the
    run: calls are counted there.

    Args:
        sample: number of the rollout among those of its task.
        accepts: further names by which the agent may call the model.
        texts: replaced in its requests; None replaces nothing.

    Attributes:
        answered: number of answered calls.
        other_models: models that the agent asked for and that are not served.
        stopped: the cap or signal that ended the job during a call.
    """

    def __init__(
        self, lm: LanguageModel, sample: int, *, accepts: Sequence[str] = (), texts: TextSwap | None = None
    ) -> None:
        backend = lm.recording.backend
        short = re.split("[/:]", lm.model, maxsplit=1)[-1]
        super().__init__(
            lm.model, "", model=short if is_embedded(lm.model) else lm.model, key="", weights=backend.weights,
            adapters=tuple(backend.adapters), price=FREE, tools=bool(backend.supports_function_calling),
        )  # fmt: skip
        self.lm, self.sample, self.names = lm, sample, (lm.model, short, *accepts)
        self.texts, self.answered, self.other_models = texts, 0, set[str]()
        self.stopped: StopRun | None = None
        self._context, self._threads = contextvars.copy_context(), ThreadPoolExecutor(_MOST_CALLS, "assay-agent-call")

    @asynccontextmanager
    async def ask(self, call: UpstreamCall) -> AsyncIterator[Reply]:
        dialect, body = call.dialect, self._sent(call.body)
        if dialect == "gemini":
            body = {**body, "model": gemini.model_in(call.path), "stream": gemini.streams(call.path)}
        if (refusal := self._refusal(dialect, body)) is not None:
            yield json_reply(*refusal)
            return
        try:
            context = self._context.copy()
            work = asyncio.get_running_loop().run_in_executor(self._threads, context.run, self._answer, dialect, body)
            answer = await work
        except StopRun as stop:
            self.stopped = stop
            yield replace(json_reply(503, error_body(f"the job stops: {stop}", "assay_gateway")), unsent=True)
            return
        except (ValueError, TypeError) as unread:  # the engine cannot read the request: another try would fail too
            if isinstance(unread, AssayError):
                raise
            yield json_reply(*invalid(f"the engine of {self.name} cannot read the request: {error_text(unread)}"))
            return
        if answer.completion is None:
            reply = json_reply(answer.status, answer.error)
        else:
            self.answered += 1
            stream = bool(body.get("stream"))
            reply = answered(dialect, answer.completion, self.name, call.query, stream=stream)
        yield replace(reply, call=answer.call, shown_tasks=answer.shown_tasks)

    def _sent(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The request with the new texts."""
        return dict(body) if self.texts is None else self.texts.body(body)

    def answered_body(self, dialect: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._sent(body)

    def _refusal(self, dialect: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if dialect == "completions":
            return invalid("the calls of an agent are answered by chat: call /v1/chat/completions")
        if (refusal := refused(dialect, body, self.names)) is not None:
            if refusal[0] == 404:
                self.other_models.add(str(body.get("model"))[:100])
            return refusal
        if body.get("n") not in (None, 1):
            return invalid(f"n={body['n']!r}: a call of an agent gets one answer; make several calls")
        return None

    def _answer(self, dialect: str, body: Mapping[str, Any]) -> "Answered":
        """The model's answer, counted and capped. Runs in a thread, in the context of the run.

        Raises:
            StopRun: a cap was reached, or the job was cancelled.
            ValueError, TypeError: the engine cannot read the request.
        """
        raise NotImplementedError

    def end(self) -> None:
        """Ends its threads; a call under way is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An answer of a model: a chat completion, or an error with its status.

    Attributes:
        call: how it was counted; None where the gateway's own record says it.
        shown_tasks: keys of the tasks in its demonstrations.
    """

    completion: dict[str, Any] | None = None
    status: int = 200
    error: Any = None
    call: Call | None = None
    shown_tasks: tuple[str, ...] = ()


_STATUS = {FailureKind.TIMEOUT: 504, FailureKind.CONTEXT: 400}
_LEFT_OUT = ("stream", "stream_options", "n")  # of a request: how the answer is sent


class ModelUpstream(AgentUpstream):
    """Answers with any model, as it answers a program: through the response cache, the meter and the ledger of the job.

    The agent's own settings are sent. A temperature of the model, such as that of a search, replaces the agent's.
    """

    def answered_body(self, dialect: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        sent, temperature = self._sent(body), self.lm.kwargs.get("temperature")
        if temperature is None:
            return sent
        if dialect == "gemini":
            return {**sent, "generationConfig": {**(sent.get("generationConfig") or {}), "temperature": temperature}}
        return {**sent, "temperature": temperature}

    def _answer(self, dialect: str, body: Mapping[str, Any]) -> Answered:
        chat = self._chat(dialect, body)
        shown = shown_in({"dialect": "chat", "body": chat})
        try:
            request = lm15.request_from_openai_chat({**chat, "model": self.lm.model})
        except lm15.UnsupportedFeatureError as unknown:
            return Answered(**_error(400, f"this request cannot be sent to {self.name}: {unknown}"))
        calls = list[Call]()  # a request that a server refused because of its schema is sent again without it
        engine = copy.copy(self.lm.recording)
        engine.observers = (calls.append,)  # the gateway records it, as the agent sent it
        entry = Entry(engine.backend, seed=self.lm.kwargs.get("seed"), thinking=self.lm.thinking)
        try:
            with looping_answers_as_text(), entered(entry):
                response = engine.complete(request)
        except StopRun:
            raise
        except (LMError, LoopStopped, OSError) as error:
            status = int(getattr(error, "status", None) or _STATUS.get(failure_of_call(error), 502))
            failed = _error(status, message(error_reason(error)))
            return Answered(**failed, call=calls[-1] if calls else None, shown_tasks=shown)
        made = completion_of(stored_response(response), self.lm.model)
        if is_embedded(self.lm.model):
            made = as_called(made, dialect, dict(body))
        return Answered(completion=made, call=calls[-1] if calls else None, shown_tasks=shown)

    def _chat(self, dialect: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The request as a chat request."""
        embedded = is_embedded(self.lm.model)
        chat = (
            chat_request(dialect, body, self.lm.model, tools=self.tools)
            if embedded
            else translated(dialect, body, self.lm.model)
        )
        dropped = _LEFT_OUT if not embedded or body.get("logprobs") else (*_LEFT_OUT, "logprobs", "top_logprobs")
        chat = {name: value for name, value in chat.items() if name not in dropped and value is not None}
        settings = self.lm.kwargs
        if settings.get("temperature") is not None:
            chat["temperature"] = settings["temperature"]
        if settings.get("max_tokens") is not None and not {"max_tokens", "max_completion_tokens"} & chat.keys():
            chat["max_tokens"] = settings["max_tokens"]
        return chat


def _error(status: int, text: str) -> dict[str, Any]:
    return {"status": status, "error": error_body(text, "assay_gateway")}


def invalid(text: str) -> tuple[int, dict[str, Any]]:
    """Status and body of the error for a request that cannot be answered."""
    return 400, error_body(text, "invalid_request_error")


class _NoRollout(EmbeddedUpstream):
    """Refuses calls that belong to no open rollout."""

    @asynccontextmanager
    async def ask(self, call: UpstreamCall) -> AsyncIterator[Reply]:
        yield json_reply(403, error_body("this call belongs to no open rollout: send the key of one", "assay_gateway"))


@dataclass(frozen=True)
class OpenedRollout:
    """What an agent needs to make the calls of a rollout, and what was seen of them."""

    base_url: str
    api_key: str
    upstream: AgentUpstream


class AgentGateway:
    """A gateway in a thread of its own, on loopback unless another host is given with a key.

    Args:
        model: the model's name.
        key: allows everything, see `Access`; by default nobody has it, and each rollout has its own.
        accepts: further names by which agents may call the model.
    """

    def __init__(
        self, store: Store, model: str, *, host: str = "127.0.0.1", port: int = 0, key: str | None = None,
        names: Sequence[str] = (), accepts: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.model, self.accepts = model, tuple(accepts)
        Access(key, host=host)  # refuses an address that others reach without a key
        upstream = _NoRollout(model, "", model=model, key="")
        self.gateway = Gateway(store, upstream, key=key or secrets.token_urlsafe(24), host=host, names=names)
        self._host, self._port, self._address = host, port, ""
        self._routes: list[Callable[[web.Application], None]] = []
        self._loop = asyncio.new_event_loop()
        self._listener: Listener | None = None

    def __deepcopy__(self, memo: object) -> "AgentGateway":
        return self

    @property
    def address(self) -> str:
        """Base address, without `/v1`. Listens from the first use on."""
        if not self._address:
            threading.Thread(target=self._loop.run_forever, name="assay-agent-gateway", daemon=True).start()
            port = self._call(self._listen())
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
            self._address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        return self._address

    def add_routes(self, add: Callable[[web.Application], None]) -> None:
        """Adds routes, which need the gateway's key; before it listens."""
        self._routes.append(add)

    async def _listen(self) -> int:
        app = self.gateway.app()
        for add in self._routes:
            add(app)
        self._listener = Listener(app, ConnectionLimits(), self.gateway.connections.answered, shutdown_s=0.5)
        try:
            return await self._listener.start(self._host, self._port)
        except OSError as error:
            raise AssayError(f"cannot listen on {self._host}:{self._port}: {error.strerror or error}") from None

    @contextmanager
    def opened(self, rollout: Rollout, upstream: AgentUpstream) -> Iterator[OpenedRollout]:
        """Inside, calls with the rollout's key are answered by `upstream` and kept in the rollout; afterwards
        refused."""
        address = self.address
        live = self._call(self._on_loop(lambda: self.gateway.rollouts.adopt(rollout, upstream)))
        token = self.gateway.access.token(rollout.id)
        try:
            yield OpenedRollout(f"{address}/r/{token}/v1", token, upstream)
        finally:
            self._call(self._on_loop(lambda: self.gateway.rollouts.release(live)))
            upstream.end()

    async def _on_loop(self, function: Callable[[], T]) -> T:
        return function()

    def _call(self, coroutine: Any) -> Any:
        """Result of a coroutine in the gateway's loop. A loop that was closed meanwhile would give none."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_START_S)

    @property
    def late_calls(self) -> int:
        """Number of calls that came after their rollout had ended, and were refused."""
        return self.gateway.rollouts.late_calls

    def close(self) -> None:
        """Stops listening."""
        if self._listener is not None:
            self._call(self._listener.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._listener = None
