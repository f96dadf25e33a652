"""The gateway of a training: the model in training answers the calls of agents that were written with anything.

Each rollout has an upstream of its own, which samples as the training does, and calls are kept in the rollout that the
training scores. Does not run agents.
"""

import asyncio
import contextvars
import hashlib
import re
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from aiohttp import web

from assay.errors import AssayError, ModelError, StopRun
from assay.models.limits import asking_model
from assay.models.lm import LanguageModel
from assay.models.prices import FREE
from assay.models.roles import is_embedded
from assay.models.unrecorded import accounted
from assay.support.scrubbing import error_text
from assay.support.values import json_text
from assay.traces.gateway.access import Access
from assay.traces.gateway.connections import ConnectionLimits, Listener
from assay.traces.gateway.replies import Reply, UpstreamCall, json_reply
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.translation import answered, as_called, chat_request, error_body, refused
from assay.traces.gateway.upstreams import EmbeddedUpstream
from assay.traces.messages import gemini
from assay.traces.records import Rollout
from assay.traces.store import Store

T = TypeVar("T")
_MOST_CALLS = 1024  # that wait for the model at once; each has a thread
_START_S = 30.0  # that the gateway may take to listen
# Fields of a chat request that reach the model if its engine knows them. How it samples is the training's own: the
# policy is updated as the distribution that it was sampled from.
_ALWAYS = ("messages", "model")
_OPTIONAL = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "stop")
_SAMPLING = ("temperature", "top_p")
# A caller's settings that have no effect, in the names of all dialects.
_IGNORED = frozenset((*_SAMPLING, "topP", "top_k", "topK", "min_p", "seed", "presence_penalty", "frequency_penalty"))


class _ChatBackend(Protocol):
    """What the backend of a model in training has besides: llama.cpp's or the trainer's."""

    adapters: Sequence[str]
    chat_fields: frozenset[str]  # fields of a chat request that it supports, of those in `_OPTIONAL`

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to a chat request, as of OpenAI's API."""


class PolicyUpstream(EmbeddedUpstream):
    """Answers the calls of one rollout with a language model of this process, and counts them in its meter.

    Temperature, seed and length limit are the model's; a caller may only lower the limit. Must be created in the
    context of the run: calls are counted there.

    Args:
        sample: number of the rollout among those of its task; part of the seed of each call.
        accepts: further names by which the agent may call the model.

    Attributes:
        answered: number of answered calls.
        other_models: models that the agent asked for and that are not served.
        stopped: the cap or signal that ended the training during a call.
    """

    def __init__(self, lm: LanguageModel, sample: int, *, accepts: Sequence[str] = ()) -> None:
        backend = lm.recording.backend
        short = re.split("[/:]", lm.model, maxsplit=1)[-1]
        super().__init__(
            lm.model, "", model=short if is_embedded(lm.model) else lm.model, key="", weights=backend.weights,
            adapters=tuple(backend.adapters), price=FREE, tools=bool(backend.supports_function_calling),
        )  # fmt: skip
        self.lm, self.sample, self.names = lm, sample, (lm.model, short, *accepts)
        self.answered, self.other_models = 0, set[str]()
        self.stopped: StopRun | None = None
        self._asked = Counter[bytes]()
        self._context, self._threads = contextvars.copy_context(), ThreadPoolExecutor(_MOST_CALLS, "assay-policy")

    @property
    def _backend(self) -> _ChatBackend:
        return cast(_ChatBackend, self.lm.recording.backend)

    @asynccontextmanager
    async def ask(self, call: UpstreamCall) -> AsyncIterator[Reply]:
        dialect, body = call.dialect, call.body
        if dialect == "gemini":
            body = {**body, "model": gemini.model_in(call.path), "stream": gemini.streams(call.path)}
        if (refusal := self._refusal(dialect, body)) is not None:
            yield json_reply(*refusal)
            return
        chat = self._sampled(chat_request(dialect, body, self.model or self.name, tools=self.tools))
        if unknown := sorted(chat.keys() & {*_OPTIONAL} - self._backend.chat_fields):
            message = f"the engine of {self.name} cannot answer a request with {', '.join(unknown)}: leave it out"
            yield json_reply(*_invalid(message))
            return
        try:
            context = self._context.copy()
            reply = await asyncio.get_running_loop().run_in_executor(self._threads, context.run, self._answer, chat)
        except StopRun as stop:
            self.stopped = stop
            yield json_reply(503, error_body(f"the training stops: {stop}", "assay_gateway"))
            return
        except (ValueError, TypeError) as unread:  # the engine cannot read the request: another try would fail too
            if isinstance(unread, AssayError):
                raise
            yield json_reply(*_invalid(f"the engine of {self.name} cannot read the request: {error_text(unread)}"))
            return
        if "choices" not in reply:
            error = reply.get("error", reply)
            yield json_reply(int(error.get("code") or 400) if isinstance(error, dict) else 400, reply)
            return
        self.answered += 1
        completion = as_called(reply, dialect, body)
        yield answered(dialect, completion, self.name, call.query, stream=bool(body.get("stream")))

    def _refusal(self, dialect: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if dialect == "completions":
            return _invalid("a policy in training answers chat: call /v1/chat/completions")
        if (refusal := refused(dialect, body, self.names)) is not None:
            if refusal[0] == 404:
                self.other_models.add(str(body.get("model"))[:100])
            return refusal
        if body.get("n") not in (None, 1):
            return _invalid(f"n={body['n']!r}: a policy in training gives one answer a call; make several calls")
        return None

    def _sampled(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """The request with the settings that the training samples with."""
        request = {name: chat[name] for name in (*_ALWAYS, *_OPTIONAL) if chat.get(name) not in (None, [])}
        settings, limit = self.lm.kwargs, chat.get("max_tokens") or chat.get("max_completion_tokens")
        most = int(settings["max_tokens"])
        request["max_tokens"] = min(limit, most) if isinstance(limit, int) and limit > 0 else most
        request |= {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
        if settings.get("seed") is not None:
            request["seed"] = self._seed(settings["seed"], chat["messages"])
        return request

    def answered_body(self, dialect: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request with the settings that are sampled with, in place of the caller's.

        A training on recorded calls reads their temperature.
        """
        sampled = {**self.lm.kwargs, **self.lm.recording.backend.sampling}
        settings = {name: sampled[name] for name in _SAMPLING if sampled.get(name) is not None}
        if dialect == "gemini":
            settings = {"topP" if name == "top_p" else name: value for name, value in settings.items()}
            config = body.get("generationConfig")
            config = config if isinstance(config, dict) else {}
            return {**body, "generationConfig": _without_settings(config) | settings}
        return _without_settings(body) | settings

    def _seed(self, seed: int, messages: Any) -> int:
        """A seed of the call's own, as `LanguageModel` derives it; one more for the same messages is another sample."""
        identity = json_text([seed, self.sample, messages], sort_keys=True).encode("utf-8", "replace")
        digest = hashlib.sha256(identity).digest()
        self._asked[digest] += 1
        return (int.from_bytes(digest[:4], "big") + self._asked[digest]) % (1 << 31)

    def _answer(self, chat: dict[str, Any]) -> dict[str, Any]:
        """The model's reply, counted. Runs in a thread, in the context of the run."""
        backend, meter = self._backend, self.lm.recording.meter
        if tuple(backend.adapters) != self.adapters:
            raise ModelError("the weights that this rollout began with are no longer served")
        reply = dict[str, Any]()
        with asking_model(), meter.sending() as sent:
            try:
                with accounted():
                    reply = backend.chat(chat)
            finally:
                usage = reply.get("usage") or {}
                meter.settle(
                    sent, prompt_tokens=usage.get("prompt_tokens"), completion_tokens=usage.get("completion_tokens"),
                    cost_usd=0.0, failed="choices" not in reply,
                )  # fmt: skip
        return reply

    def end(self) -> None:
        """Ends its threads; a call under way is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


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
    upstream: PolicyUpstream


class PolicyGateway:
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

    def __deepcopy__(self, memo: object) -> "PolicyGateway":
        return self

    @property
    def address(self) -> str:
        """Base address, without `/v1`. Listens from the first use on."""
        if not self._address:
            threading.Thread(target=self._loop.run_forever, name="assay-policy-gateway", daemon=True).start()
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
    def opened(self, rollout: Rollout, lm: LanguageModel) -> Iterator[OpenedRollout]:
        """Inside, calls with the rollout's key are answered by `lm` and kept in the rollout; afterwards refused."""
        address, upstream = self.address, PolicyUpstream(lm, rollout.sample, accepts=self.accepts)
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


def _invalid(message: str) -> tuple[int, dict[str, Any]]:
    return 400, error_body(message, "invalid_request_error")


def _without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _IGNORED}
