"""Engine under every model of a run: response cache, meter, backend, observers, in this order.

Independent of `dspy.LM`: `assay.models.lm` builds one on it.
"""

import asyncio
import dataclasses
import functools
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dspy
from dspy import lm15
from dspy.utils.exceptions import LMError, LMInvalidRequestError

from assay.errors import LoopStopped
from assay.models.cache import ResponseCache
from assay.models.calls import Call, Observer, failure_of_call, is_refused
from assay.models.codec import (
    pruned,
    request_to_dict,
    response_from_dict,
    response_to_dict,
    stored_response,
    streamable,
    text_of,
)
from assay.models.embedded import LlamaBackend, stopped_loop
from assay.models.entries import Entry, current_entry, entered, seed_of
from assay.models.hosted import CustomBackend, HostedBackend, rough_tokens
from assay.models.ledger import Ledger, Sent
from assay.models.limits import asking_model, uninterrupted
from assay.models.meter import Meter, Reservation
from assay.models.prices import Price, cost_of, price
from assay.models.roles import Endpoint
from assay.models.scope import (
    current_answers,
    current_field,
    current_prices,
    loops_are_text,
    waits_for_servers,
)
from assay.models.thinking import thought_tokens
from assay.models.unrecorded import accounted, went_by
from assay.support.scrubbing import error_text
from assay.support.values import json_text

# -- Tokens of calls: those that a call is expected to take, with their price, and those that a server did not report.


FIRST_ANSWER = 1024  # tokens reserved for the answer of a call without `max_tokens`, until an answer was seen
_FORMAT = 8  # tokens of the chat format per message


def reservation_of(
    backend: Any, model: str, request: Mapping[str, Any], longest: int, own: Price | None = None
) -> Reservation:
    """Tokens of the prompt and `max_tokens`, and their price. An unknown price reserves nothing.

    Args:
        backend: counts the tokens of the prompt; images and other binary parts are not counted.
        request: the canonical lm15 dictionary.
        longest: tokens of the longest answer so far, for a request without `max_tokens`; 0 before the first.
        own: the user's price of the model.
    """
    limit = (request.get("config") or {}).get("max_tokens")
    text = _count(backend, "\n".join(_texts(request)))
    prompt, answer = text + _format_tokens(request), (longest or FIRST_ANSWER) if limit is None else int(limit)
    cost, least = price(model, prompt, answer, own=own), price(model, text, 0, own=own)
    if own is None and isinstance(backend, CustomBackend):
        cost, least = (getattr(backend.engine, "price_usd", value) for value in (cost, least))
    return Reservation(prompt + answer, cost or 0.0, limit is not None, text, least or 0.0)


def counted(backend: Any, request: Mapping[str, Any], response: lm15.Response) -> lm15.Response:
    """The answer with tokens counted by the backend's tokenizer where the server reports none, or 0 of a text."""
    usage, text = response.usage, "\n".join(_strings(response_to_dict(response)["message"]["parts"]))
    if usage.input_tokens and (usage.output_tokens or not text):
        return response
    prompt = usage.input_tokens or _count(backend, "\n".join(_texts(request))) + _format_tokens(request)
    answer = usage.output_tokens or (_count(backend, text) if text else 0)
    return replace(response, usage=replace(usage, input_tokens=prompt, output_tokens=answer))


def _format_tokens(request: Mapping[str, Any]) -> int:
    return _FORMAT * (len(request.get("messages") or ()) + 1)


def _count(backend: Any, text: str) -> int:
    try:
        return int(backend.count_tokens(text))
    except Exception:  # a tokenizer that is not available must not stop a call
        return rough_tokens(text)


def _texts(request: Mapping[str, Any]) -> list[str]:
    """The texts of a request: system prompt, messages, tools and schema, without binary data."""
    schemas = [request.get("tools"), (request.get("config") or {}).get("response_format")]
    return _strings([request.get("system"), request.get("messages")]) + [json_text(part) for part in schemas if part]


def _strings(value: Any) -> list[str]:
    """The strings in messages or their parts, without binary data."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [part for key, part in value.items() if key not in ("data", "url", "type", "role")]
    return [text for part in value for text in _strings(part)] if isinstance(value, list | tuple) else []


# -- A complete answer as a stream of events, in pieces that DSPy's listeners can follow.
#
# Does not reduce latency: an answer is counted, stored and cached as a whole before its first piece is sent.


_PIECE = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")


def events_in_pieces(response: lm15.Response) -> Iterator[Any]:
    """Events of an answer, with its text word by word: DSPy detects the end of a field only across pieces."""
    for event in lm15.response_to_events(streamable(response)):
        pieces = (
            _PIECE.findall(event.delta.text)
            if isinstance(event, lm15.StreamDeltaEvent) and isinstance(event.delta, lm15.TextDelta)
            else []
        )
        if not pieces:
            yield event
        for at, piece in enumerate(pieces):
            logprobs = event.delta.logprobs if at == len(pieces) - 1 else ()
            yield dataclasses.replace(event, delta=dataclasses.replace(event.delta, text=piece, logprobs=logprobs))


NOT_KNOWN = 1.0  # marks a missing log-probability, which is never above 0: DSPy accepts no NaN


class ServerRefused(LMError):  # type: ignore[misc]
    """Nothing listens at a model's address. DSPy does not retry this class, see `scope.refusals_end_at_once`."""


class RecordingEngine:
    """The engine under every model of a run: cache, meter, backend, observers, in this order."""

    def __init__(
        self,
        backend: LlamaBackend | HostedBackend,
        *,
        model: str,
        cache: ResponseCache | None = None,
        meter: Meter | None = None,
        observers: Sequence[Observer] = (),
        price: Price | None = None,
        as_requested: bool = False,
    ) -> None:
        self.backend, self.model, self.cache, self.price = backend, model, cache, price
        self.meter, self.observers = meter or Meter(), tuple(observers)
        self.as_requested = as_requested  # requests are sent as they are, for models that are not a job's
        self.siblings: dict[tuple[str, Any, Endpoint | None], dspy.LM] = {}
        self.client: dict[str, Any] = {}  # address and key, in memory only; judges' models at the same server use them

    @property
    def address(self) -> str | None:
        """Address of the model's server; None for the provider's own and for embedded models."""
        address = self.client.get("api_base") or self.client.get("base_url")
        return str(address) if address else None

    def __deepcopy__(self, memo: object) -> "RecordingEngine":
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("supports_") or name == "supported_params":
            return getattr(self.backend, name)
        raise AttributeError(name)

    def complete(self, request: lm15.Request) -> lm15.Response:
        return uninterrupted(lambda: self._complete(request)) if self.observers else self._complete(request)

    def _complete(self, request: lm15.Request) -> lm15.Response:
        entry = self._entry()
        if entry is None:  # of no public method that is known
            with entered(Entry(self.backend)) as entry:
                return self._as_sampled(request, entry)
        return self._as_sampled(request, entry)

    def _entry(self) -> Entry | None:
        """The call of a public method of the model that this request belongs to."""
        entry = current_entry.get()
        return entry if entry is not None and entry.backend is self.backend else None

    def _as_sampled(self, request: lm15.Request, entry: Entry) -> lm15.Response:
        """An answer to the request with the thinking budget of its entry, as a sample with a seed of its own."""
        entry.reached = True
        if self.as_requested:
            return self._replayed_or_called(request, request_to_dict(request))
        if entry.thinking is not None and not entry.thinking.is_auto:
            request = self.backend.with_thinking(request, entry.thinking)
        fields = request_to_dict(request)
        temperature = self.backend.sampling.get("temperature", request.config.temperature)
        with entry.completion(lambda: [self.address, fields], repeated=temperature != 0) as sample:
            seed = entry.seed if request.config.seed is None else request.config.seed
            if seed is not None:
                seed = seed_of(seed, sample, fields)
                request = dataclasses.replace(request, config=dataclasses.replace(request.config, seed=seed))
                fields = {**fields, "config": {**fields.get("config", {}), "seed": seed}}
            return self._of_sample(request, fields, sample)

    def _replayed_or_called(self, request: lm15.Request, fields: dict[str, Any]) -> lm15.Response:
        """An answer to a request of a model that is not a job's. It is sent unless an earlier process of the run sent
        it in the same rollout: its answer is then in the cache, as that of no other call."""
        ledger = self.meter.ledger
        if self.cache is None or ledger is None:
            return self._call(request, fields, "")
        identity = {"rollout": ledger.owner(), "address": getattr(self.backend, "address", ""), "request": fields}
        call = self.cache.key(identity, weights="", adapters=(), sample=None)
        number = ledger.repeats.next(call)
        key = self.cache.key({"call": call}, weights="", adapters=(), sample=number)
        try:
            return self._cached_or_called(self.cache, request, fields, key)
        except BaseException:
            ledger.repeats.unanswered(call, number)
            raise

    def _of_sample(self, request: lm15.Request, fields: dict[str, Any], sample: int | None) -> lm15.Response:
        if self.cache is None:
            return self._call(request, fields, "")
        weights, field = self.backend.weights or getattr(self.backend, "address", ""), current_field.get()
        identity = fields if field is None else {**fields, "alternatives_of": field}
        key = self.cache.key(identity, weights=weights, adapters=self.backend.adapters, sample=sample)
        if (answers := current_answers.get()) is not None:
            answers.append(functools.partial(self.cache.remove, key))
        with self.cache.locks.of(key):  # identical concurrent requests are sent once
            return self._cached_or_called(self.cache, request, fields, key)

    def _cached_or_called(
        self, cache: ResponseCache, request: lm15.Request, fields: dict[str, Any], key: str
    ) -> lm15.Response:
        record = cache.get(key)
        return self._call(request, fields, key) if record is None else self._cached(record, fields, key)

    def _cached(self, record: dict[str, Any], fields: dict[str, Any], key: str) -> lm15.Response:
        """An answer from the response cache. If this rollout paid for it before a kill, it is recorded so."""
        response, replayed = response_from_dict(record["response"]), self.meter.replayed(key)
        cost = 0.0 if replayed is None else record.get("cost_usd", replayed.cost_usd)
        if replayed is not None and (prices := current_prices.get()) is not None:
            prices.append(cost or 0.0)
        looped = stopped_loop(response, record.get("loop"))
        self._notify(
            fields,
            response,
            ids=record["token_ids"],
            error=looped,
            cached=replayed is None,
            started=time.time(),
            latency_ms=record.get("latency_ms", 0.0),
            cost_usd=cost,
        )
        if looped is not None and not loops_are_text.get():
            raise looped
        return response

    def answered_elsewhere(self, request: lm15.Request, response: lm15.Response) -> None:
        """Record an answer that another cache gave: it costs nothing."""
        self.meter.replayed(uuid.uuid4().hex)
        self._notify(
            request_to_dict(request),
            response,
            ids=_token_ids(response),
            cached=True,
            started=time.time(),
        )

    def _call(self, request: lm15.Request, fields: dict[str, Any], key: str) -> lm15.Response:
        """An answer of the model. A request whose schema is refused is sent again without it, as another call."""
        backend = self.backend
        if not isinstance(backend, HostedBackend) or self.as_requested:
            return self._send(request, fields, key)
        request = backend.fitting(request)
        try:
            return self._send(request, fields, key)
        except LMInvalidRequestError as error:
            plainer = backend.plainer(request, error)
            if plainer is None:
                raise
        response = self._send(plainer, fields, key)
        backend.without_schemas()
        return response

    def _send(self, request: lm15.Request, fields: dict[str, Any], key: str) -> lm15.Response:
        """An answer of the model, counted before the request is sent."""
        if isinstance(self.backend, HostedBackend):
            self.backend.load()
        reserved = (
            reservation_of(self.backend, self.model, fields, self.meter.longest_answer, self.price)
            if self.meter.reserves
            else None
        )
        with asking_model(), self.meter.sending(key, reserved) as sent:
            return self._answer(sent, request, fields, key)

    def _answer(self, sent: Sent, request: lm15.Request, fields: dict[str, Any], key: str) -> lm15.Response:
        started, clock = time.time(), time.perf_counter()
        response: lm15.Response | None = None
        cost: float | None = None
        error: BaseException | None = None
        try:
            if not self.observers:
                went_by()
            with accounted():
                response, cost = self.backend.complete(request)
            response = counted(self.backend, fields, response)
            cost = cost_of(self.backend, self.model, response.usage, cost, own=self.price)
            response = pruned(response, current_field.get())
            if (error := stopped_loop(response)) is not None and not loops_are_text.get():
                raise error
        except BaseException as failure:
            error = failure
            if is_refused(failure):
                self.meter.connected(False)
                if not waits_for_servers.get():
                    raise ServerRefused(str(failure)) from failure
            raise
        else:
            self.meter.connected(True)
        finally:  # a failed call may have a cost too
            usage, ids = response.usage if response is not None else lm15.Usage(), _token_ids(response)
            latency_ms = (time.perf_counter() - clock) * 1000
            if self.cache is not None and response is not None:  # before settling: a paid answer is never lost
                self.cache.put(
                    key,
                    request=fields,
                    record={
                        "response": stored_response(response),
                        "token_ids": ids,
                        "latency_ms": latency_ms,
                        "cost_usd": cost,
                        **({"loop": str(error)} if isinstance(error, LoopStopped) else {}),
                    },
                )
            self.meter.settle(
                sent,
                prompt_tokens=usage.input_tokens,
                completion_tokens=usage.output_tokens,
                cost_usd=cost,
                failed=response is None,
            )
            if (prices := current_prices.get()) is not None:
                prices.append(cost or 0.0)
            self._notify(
                fields,
                response,
                ids=ids,
                error=error,
                started=started,
                latency_ms=latency_ms,
                cost_usd=cost,
            )
        return response

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        return events_in_pieces(self.complete(request))

    def close(self) -> None:
        pass

    def _notify(
        self,
        request: dict[str, Any],
        response: lm15.Response | None,
        *,
        ids: list[int] | None,
        started: float,
        latency_ms: float = 0.0,
        cost_usd: float | None = 0.0,
        cached: bool = False,
        error: BaseException | None = None,
    ) -> None:
        """Pass the call to all observers."""
        if not self.observers:
            return
        usage = response.usage if response is not None else lm15.Usage()
        call = Call(
            model=self.model,
            weights=self.backend.weights,
            adapters=self.backend.adapters,
            request=self._sampled(request),
            response=stored_response(response, logprobs=False) if response is not None else None,
            output=text_of(response),
            error=None if error is None else error_text(error),
            failure=None if error is None else failure_of_call(error),
            cached=cached,
            constrained="response_format" in request.get("config", {}),
            prompt_tokens=usage.input_tokens,
            completion_tokens=usage.output_tokens,
            thinking_tokens=self._thinking_tokens(request, response),
            token_ids=None if ids is None else tuple(ids),
            logprobs=_logprobs(response),
            latency_ms=latency_ms,
            cost_usd=cost_usd,
            started_at=started,
        )
        for observer in self.observers:
            observer(call)

    def _sampled(self, request: dict[str, Any]) -> dict[str, Any]:
        """The request with the temperature that the backend samples at where it overrides the request's.

        A training on recorded calls reads it.
        """
        if (temperature := self.backend.sampling.get("temperature")) is None:
            return request
        return {**request, "config": {**request.get("config", {}), "temperature": temperature}}

    def _thinking_tokens(self, request: dict[str, Any], response: lm15.Response | None) -> int | None:
        """As the engine reports them; else those of the thought field, which are part of the answer."""
        if response is None or response.usage.reasoning_tokens is not None:
            return None if response is None else response.usage.reasoning_tokens
        tokens = [token.token for token in response.logprobs or ()]
        return thought_tokens(request, text_of(response), tokens, self.backend.count_tokens)


class AsyncRecordingEngine:
    """`RecordingEngine` for DSPy's async calls; the work runs in a thread with the caller's context."""

    def __init__(self, engine: RecordingEngine) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: object) -> "AsyncRecordingEngine":
        return self

    async def complete(self, request: lm15.Request) -> lm15.Response:
        return await asyncio.to_thread(self.engine.complete, request)

    async def stream(self, request: lm15.Request) -> Any:
        for event in events_in_pieces(await self.complete(request)):
            yield event

    async def aclose(self) -> None:
        pass


def bill_answered(ledger: Ledger, cache: ResponseCache) -> int:
    """Settle the calls of a killed process whose answers are in the response cache; return their number.

    The other unsettled calls were never answered: if they are sent again, they count as repeated.
    """
    billed = 0
    for sent in ledger.unsettled():
        record = cache.get(sent.key.hex())
        if record is None:
            continue
        usage = response_from_dict(record["response"]).usage
        cost = record.get("cost_usd")
        before = dataclasses.replace(sent)
        sent.settle(
            prompt_tokens=usage.input_tokens, completion_tokens=usage.output_tokens, cost_usd=cost, failed=False
        )
        ledger.settled(sent, before)
        billed += 1
    return billed


def _logprobs(response: lm15.Response | None) -> tuple[float, ...] | None:
    """Log-probabilities of the sampled tokens; None if the engine returned only the tokens (`NOT_KNOWN`)."""
    logprobs = tuple(token.logprob for token in response.logprobs) if response is not None and response.logprobs else ()
    return logprobs if logprobs and max(logprobs) < NOT_KNOWN else None


def _token_ids(response: lm15.Response | None) -> list[int] | None:
    """Ids of the sampled tokens, from the raw replies of llama.cpp and vLLM; None if any is missing.

    For a character that takes several tokens, llama.cpp reports only the last one.
    """
    if response is None or not response.logprobs:
        return None
    raw = (response.provider_data or {}).get("choices") or [{}]
    content = ((raw[0] or {}).get("logprobs") or {}).get("content") or []
    ids = [int(token["id"]) for token in content if "id" in token]
    sampled = response.usage.output_tokens
    return ids if len(ids) == len(response.logprobs) and sampled in (None, len(ids)) else None
