"""`get_lm`: a `dspy.LM` whose every call is counted, capped, cached and shown to observers.

One engine stands under DSPy: it looks in the response cache, asks the meter, calls the backend (llama.cpp, or
DSPy's own engine and litellm for any other name), and tells the observers, in threads and async alike.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import dspy
from dspy import lm15
from dspy._vendor.lm15.serde import request_to_dict, response_from_dict
from dspy.utils.exceptions import LMError, LMInvalidRequestError

from assay.errors import ModelError
from assay.models.alternatives import pruned
from assay.models.answers import kept_response, text_of
from assay.models.cache import ResponseCache
from assay.models.calls import Call, Observer
from assay.models.embedded import LlamaBackend
from assay.models.failures import failure_of_call, is_refused
from assay.models.hosted import HostedBackend
from assay.models.ledger import Ledger
from assay.models.limits import asking_model
from assay.models.meter import Meter
from assay.models.roles import Endpoint, is_embedded, with_local_key
from assay.models.scope import current_field, current_prices, current_sample, sample_scope, waits_for_servers
from assay.models.streaming import events_in_pieces
from assay.models.transports import accounted, went_by
from assay.scrubbing import said

__all__ = [
    "LanguageModel",
    "RecordingEngine",
    "bill_answered",
    "count_tokens",
    "get_lm",
    "has_provider",
    "lm_over",
    "sibling",
    "supports",
    "with_recording",
]

_REASONS = "max_completion_tokens"  # how DSPy marks a model that reasons by itself and takes no temperature
_ADDRESS = ("api_key", "api_base", "base_url")
_CLIENT_KEYS = ("api_key", "api_base", "base_url", "timeout", "headers", "extra_headers", "api_version")
NOT_KNOWN = 1.0  # stands for a log-probability, which is never above 0: DSPy takes no NaN


class ServerRefused(LMError):  # type: ignore[misc]
    """Nothing listens at a model's address. Of no class that DSPy tries again, see `assay.models.scope.refusals_end_at_once`."""


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
    ) -> None:
        self.backend, self.model, self.cache = backend, model, cache
        self.meter, self.observers = meter or Meter(), tuple(observers)
        self.siblings: dict[tuple[str, Any, Endpoint | None], LanguageModel] = {}
        self.client: dict[str, Any] = {}  # address and key, in memory alone: models named by a judge are asked there too

    @property
    def address(self) -> str | None:
        """Address of the model's server; None for the provider's own and for embedded models."""
        found = self.client.get("api_base") or self.client.get("base_url")
        return str(found) if found else None

    def __deepcopy__(self, memo: object) -> "RecordingEngine":
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("supports_") or name == "supported_params":
            return getattr(self.backend, name)
        raise AttributeError(name)

    def complete(self, request: lm15.Request) -> lm15.Response:
        asked, sample = request_to_dict(request), current_sample.get()
        if self.cache is None:
            return self._asked(request, asked, "", sample)
        weights, field = self.backend.weights or getattr(self.backend, "address", ""), current_field.get()
        whole = asked if field is None else {**asked, "alternatives_of": field}
        key = self.cache.key(whole, weights=weights, adapters=self.backend.adapters, sample=sample)
        with self.cache.locks.of(key):  # asked twice at once, it is made once
            record = self.cache.get(key)
            return self._asked(request, asked, key, sample) if record is None else self._cached(record, asked, key, sample)

    def _cached(self, record: dict[str, Any], asked: dict[str, Any], key: str, sample: int | None) -> lm15.Response:
        """An answer from the response cache. Where this rollout paid for it before the process was killed it is recorded as it was then."""
        response, replayed = response_from_dict(record["response"]), self.meter.replayed(key)
        cost = 0.0 if replayed is None else record.get("cost_usd", replayed.cost_usd)
        if replayed is not None and (prices := current_prices.get()) is not None:
            prices.append(cost or 0.0)
        self._tell(
            asked, response, ids=record["token_ids"], cached=replayed is None, sample=sample, started=time.time(),
            latency_ms=record.get("latency_ms", 0.0), cost_usd=cost,
        )  # fmt: skip
        return response

    def _asked(self, request: lm15.Request, asked: dict[str, Any], key: str, sample: int | None) -> lm15.Response:
        """An answer of the model. A server that refuses a schema is asked again without, which is a call of its own."""
        backend = self.backend
        if not isinstance(backend, HostedBackend):
            return self._made(request, asked, key, sample)
        request = backend.fitting(request)
        try:
            return self._made(request, asked, key, sample)
        except LMInvalidRequestError as error:
            plainer = backend.plainer(request, error)
            if plainer is None:
                raise
        answered = self._made(plainer, asked, key, sample)
        backend.without_schemas()
        return answered

    def _made(self, request: lm15.Request, asked: dict[str, Any], key: str, sample: int | None) -> lm15.Response:
        """An answer of the model, counted before it is asked for."""
        sent, started, clock = self.meter.reserve(key), time.time(), time.perf_counter()
        answered: lm15.Response | None = None
        cost: float | None = None
        error: BaseException | None = None
        try:
            if not self.observers:
                went_by()
            with accounted(), asking_model():
                answered, cost = self.backend.complete(request)
            answered = pruned(answered, current_field.get())
        except BaseException as failure:
            error = failure
            if not waits_for_servers.get() and is_refused(failure):
                raise ServerRefused(str(failure)) from failure
            raise
        finally:  # what a call cost is counted also when it failed
            usage, ids = answered.usage if answered is not None else lm15.Usage(), _token_ids(answered)
            latency_ms = (time.perf_counter() - clock) * 1000
            if self.cache is not None and answered is not None:  # before it is settled: an answer that is paid for is never lost
                self.cache.put(
                    key, asked=asked, record={"response": kept_response(answered), "token_ids": ids, "latency_ms": latency_ms, "cost_usd": cost}
                )
            self.meter.settle(
                sent, prompt_tokens=usage.input_tokens, completion_tokens=usage.output_tokens, cost_usd=cost, failed=answered is None
            )  # fmt: skip
            if (prices := current_prices.get()) is not None:
                prices.append(cost or 0.0)
            self._tell(asked, answered, ids=ids, error=error, sample=sample, started=started, latency_ms=latency_ms, cost_usd=cost)
        return answered

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        return events_in_pieces(self.complete(request))

    def close(self) -> None:
        pass

    def _tell(
        self,
        request: dict[str, Any],
        response: lm15.Response | None,
        *,
        ids: list[int] | None,
        sample: int | None,
        started: float,
        latency_ms: float = 0.0,
        cost_usd: float | None = 0.0,
        cached: bool = False,
        error: BaseException | None = None,
    ) -> None:
        if not self.observers:
            return
        usage = response.usage if response is not None else lm15.Usage()
        call = Call(
            model=self.model,
            weights=self.backend.weights,
            adapters=self.backend.adapters,
            request=request,
            response=kept_response(response, logprobs=False) if response is not None else None,
            text=text_of(response),
            error=None if error is None else said(error),
            failure=None if error is None else failure_of_call(error),
            cached=cached,
            constrained="response_format" in request.get("config", {}),
            prompt_tokens=usage.input_tokens,
            completion_tokens=usage.output_tokens,
            thinking_tokens=usage.reasoning_tokens,
            token_ids=None if ids is None else tuple(ids),
            logprobs=_logprobs(response),
            latency_ms=latency_ms,
            cost_usd=cost_usd,
            started_at=started,
            sample=sample,
        )
        for observer in self.observers:
            observer(call)


class AsyncRecordingEngine:
    """The same engine for DSPy's async calls; the work runs in a thread with the caller's context."""

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


class LanguageModel(dspy.LM):  # type: ignore[misc]
    """A `dspy.LM` over a `RecordingEngine`. DSPy's `rollout_id` becomes the sample of the cache key and of the seed."""

    def __call__(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        samples, kwargs = self._samples(kwargs)
        found = []
        for sample in samples:
            with sample_scope(sample):
                found.append(super().__call__(prompt, messages=messages, **self._seeded(kwargs, prompt, messages)))
        return found[0] if len(found) == 1 else _together(found)

    async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        samples, kwargs = self._samples(kwargs)
        found = []
        for sample in samples:
            with sample_scope(sample):
                found.append(await super().acall(prompt, messages=messages, **self._seeded(kwargs, prompt, messages)))
        return found[0] if len(found) == 1 else _together(found)

    def _samples(self, kwargs: dict[str, Any]) -> tuple[list[int | None], dict[str, Any]]:
        """The sample of each completion that is asked for (`n`), and what each call is made with: the engine makes one completion a call."""
        n, first = kwargs.get("n", self.kwargs.get("n")), self._sample(kwargs)
        if isinstance(n, bool) or not isinstance(n, int) or n < 2:
            return [first], kwargs
        base = ((first or 0) + 1) * 1_000_003
        return [first, *(base + number for number in range(1, n))], {**kwargs, "n": 1}

    @property
    def recording(self) -> RecordingEngine:
        engine = self._engine_spec
        assert isinstance(engine, RecordingEngine)
        return engine

    def copy(self, **kwargs: Any) -> "LanguageModel":
        """With other settings; a temperature is left out where the model refuses one. Another embedded model comes with its own engine, over
        the same cache, meter and observers."""
        name = kwargs.pop("model", self.model)
        if name != self.model:
            engine, generation = self.recording, {key: self.kwargs[key] for key in ("temperature", "max_tokens", "seed") if key in self.kwargs}
            other = get_lm(name, cache=engine.cache, meter=engine.meter, observers=engine.observers, **{**generation, **kwargs})
            other.provider = self.provider
            return other
        if _REASONS in self.kwargs:
            kwargs.pop("temperature", None)
        copied: LanguageModel = super().copy(**kwargs)
        return copied

    def _sample(self, kwargs: dict[str, Any]) -> int | None:
        own = kwargs.get("rollout_id", self.kwargs.get("rollout_id"))
        outer = current_sample.get()
        if own is None or outer is None:
            return outer if own is None else int(own)
        return outer * 1_000_003 + int(own)

    def _seeded(self, kwargs: dict[str, Any], prompt: Any, messages: Any) -> dict[str, Any]:
        """Every call has a seed of its own, by its sample and what it asks, so that a seeded run replays and no two calls share their luck:
        under one seed an engine draws the same numbers for every prompt, and a run's tasks fail together."""
        seed = kwargs.get("seed", self.kwargs.get("seed"))
        if seed is None:
            return kwargs
        asked = json.dumps([seed, self._sample(kwargs), prompt, messages], sort_keys=True, default=str)
        digest = hashlib.sha256(asked.encode("utf-8", "replace")).digest()
        return {**kwargs, "seed": int.from_bytes(digest[:4], "big") >> 1}


def _together(found: list[list[Any]]) -> list[Any]:
    """Completions of several calls as DSPy gives those of one: all are texts, or all are mappings."""
    outputs = [output for outputs in found for output in outputs]
    if any(isinstance(output, dict) for output in outputs):
        return [output if isinstance(output, dict) else {"text": output} for output in outputs]
    return outputs


def get_lm(
    name: str,
    *,
    cache: ResponseCache | None = None,
    meter: Meter | None = None,
    observers: Sequence[Observer] = (),
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    num_retries: int = 3,
    **client: Any,
) -> LanguageModel:
    """A language model by name.

    Args:
        name: `embedded/NAME`, a GGUF file as `embedded:FILE`, or any name DSPy and litellm know (`openai/…`, `anthropic/…`, `ollama_chat/…`).
        cache: answers repeated requests; None asks the model every time.
        meter: counts and caps; None counts without a cap.
        temperature: left out for models that refuse one (OpenAI's reasoning models), and so is `max_tokens`.
        max_tokens: of an answer; by default 512 for an embedded model, the provider's own limit for others.
        seed: of the run; each call is sent one that is derived from it, its sample and its messages, where the engine takes one.
        client: `api_base`, `api_key`, `timeout` and the like, for hosted models. A server on this machine or network needs no key.
    Raises:
        ModelError: an embedded model that is unknown, not pulled, or not what its sha256 says.
        MissingExtra: the `embedded` extra is not installed.
    """
    backend: LlamaBackend | HostedBackend
    if name.endswith(".gguf") and not is_embedded(name):
        raise ModelError(f"a model file is named embedded:{name}")
    if is_embedded(name):
        backend, max_tokens = LlamaBackend(name), max_tokens or 512
    else:
        hosted = dspy.LM(name, cache=False, num_retries=0, **with_local_key(name, client))
        if _REASONS in hosted.kwargs:
            temperature = max_tokens = None
        backend = HostedBackend(hosted)
    engine = RecordingEngine(backend, model=name, cache=cache, meter=meter, observers=observers)
    engine.client = {key: client[key] for key in _ADDRESS if client.get(key)}
    generation: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    if seed is not None and "seed" in engine.supported_params:
        generation["seed"] = seed
    return LanguageModel(name, engine=engine, async_engine=AsyncRecordingEngine(engine), cache=False, num_retries=num_retries, **generation)


def has_provider(name: str) -> bool:
    """Whether `get_lm` knows who serves a model of this name; a model that was made in Python has a name of any kind."""
    if is_embedded(name):
        return True
    import litellm

    try:
        litellm.get_llm_provider(name)
    except Exception:  # its own exception class differs between versions
        return False
    return True


def lm_over(backend: Any, name: str, *, max_tokens: int = 512, seed: int | None = None) -> LanguageModel:
    """A language model over a backend that is at hand: uncached, unmetered, until a run records it (`with_recording`)."""
    engine = RecordingEngine(backend, model=name)
    generation: dict[str, Any] = {"max_tokens": max_tokens}
    if seed is not None and "seed" in engine.supported_params:
        generation["seed"] = seed
    return LanguageModel(name, engine=engine, async_engine=AsyncRecordingEngine(engine), cache=False, num_retries=0, **generation)


def sibling(lm: Any, name: str, endpoint: Endpoint | None = None) -> LanguageModel:
    """Another model, by name, that shares the cache, meter and observers of `lm` where it has them, and its seed.

    Args:
        endpoint: its address and key; those of `lm` where None.
    Raises:
        ConfigError: the variable that holds its key is not set.
    """
    if not isinstance(lm, LanguageModel):
        return get_lm(name, **(endpoint.client(name) if endpoint else {}))
    engine, seed = lm.recording, lm.kwargs.get("seed")
    if name == engine.model and endpoint is not None and endpoint.client(name).items() <= engine.client.items():
        return lm
    key = (name, seed, endpoint)
    if key not in engine.siblings:
        client: dict[str, Any] = endpoint.client(name) if endpoint else {} if is_embedded(name) else engine.client
        engine.siblings[key] = get_lm(name, cache=engine.cache, meter=engine.meter, observers=engine.observers, seed=seed, temperature=0.1, **client)
    return engine.siblings[key]


def with_recording(
    lm: dspy.LM, *, cache: ResponseCache | None = None, meter: Meter | None = None, observers: Sequence[Observer] = ()
) -> LanguageModel:
    """Somebody's own `dspy.LM`, recorded: same model, client and generation settings, through our engine."""
    if isinstance(lm, LanguageModel):
        backend = lm.recording.backend
    elif isinstance(lm.engine, str):
        backend = HostedBackend(lm)
    else:
        backend = _CustomBackend(lm.engine)  # type: ignore[assignment]
    engine = RecordingEngine(backend, model=lm.model, cache=cache, meter=meter, observers=observers)
    engine.client = lm.recording.client if isinstance(lm, LanguageModel) else {key: lm.kwargs[key] for key in _ADDRESS if lm.kwargs.get(key)}
    generation = {key: value for key, value in lm.kwargs.items() if key not in _CLIENT_KEYS}
    return LanguageModel(
        lm.model,
        model_type=lm.model_type,
        engine=engine,
        async_engine=AsyncRecordingEngine(engine),
        cache=False,
        num_retries=lm.num_retries,
        **generation,
    )


class _CustomBackend:
    """Somebody's own DSPy engine."""

    weights = ""
    adapters: tuple[str, ...] = ()
    concurrency = 4

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.weights = getattr(engine, "weights", "")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("supports_"):
            return bool(getattr(self.engine, name, False))
        if name == "supported_params":
            return frozenset(getattr(self.engine, name, ()) or ())
        raise AttributeError(name)

    def complete(self, request: lm15.Request) -> tuple[lm15.Response, float | None]:
        return self.engine.complete(request), getattr(self.engine, "price_usd", None)

    def count_tokens(self, text: str) -> int:
        counter = getattr(self.engine, "count_tokens", None)
        return int(counter(text)) if counter else _rough_tokens(text)


def bill_answered(ledger: Ledger, cache: ResponseCache) -> int:
    """Settles the calls that a killed process had made and whose answers are in the response cache; returns how many.

    The others never answered: where they are sent again they count as repeated.
    """
    billed = 0
    for sent in ledger.unsettled():
        record = cache.get(sent.key.hex())
        if record is None:
            continue
        usage = response_from_dict(record["response"]).usage
        cost = record.get("cost_usd")
        sent.settle(prompt_tokens=usage.input_tokens, completion_tokens=usage.output_tokens, cost_usd=cost, failed=False)
        ledger.settled(sent)
        billed += 1
    return billed


def supports(lm: Any, feature: str) -> bool:
    """Whether the model's engine takes a request parameter (`logprobs`, `seed`, `response_format`, …)."""
    return feature in getattr(lm, "supported_params", ())


def _rough_tokens(text: str) -> int:
    return (len(text) + 3) // 4


_COUNTS = 16_384
_counts: WeakKeyDictionary[Any, OrderedDict[bytes, int]] = WeakKeyDictionary()  # by hash: the prompts themselves would be most of a run's memory


def _count(backend: Any, text: str) -> int:
    known, key = _counts.setdefault(backend, OrderedDict()), hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
    if (found := known.get(key)) is None:
        found = known[key] = int(backend.count_tokens(text))
        if len(known) > _COUNTS:
            with contextlib.suppress(KeyError):  # another thread took the last one
                known.popitem(last=False)
    return found


def count_tokens(lm: Any, text: str) -> int:
    """Tokens of `text` by the model's own tokenizer; four characters a token where there is none at hand."""
    if not isinstance(lm, LanguageModel):
        return _rough_tokens(text)
    try:
        return _count(lm.recording.backend, text)
    except Exception:  # a tokenizer that cannot be had must not stop an agent; the rule of thumb is documented
        return _rough_tokens(text)


def _logprobs(response: lm15.Response | None) -> tuple[float, ...] | None:
    """Of the sampled tokens; None where the engine told the tokens alone (`NOT_KNOWN`)."""
    found = tuple(token.logprob for token in response.logprobs) if response is not None and response.logprobs else ()
    return found if found and max(found) < NOT_KNOWN else None


def _token_ids(response: lm15.Response | None) -> list[int] | None:
    """Ids of the sampled tokens, from llama.cpp's and vLLM's raw answers; None where the engine gives none, or not all: of a letter that several
    tokens make up llama.cpp tells the last one alone."""
    if response is None or not response.logprobs:
        return None
    raw = (response.provider_data or {}).get("choices") or [{}]
    content = ((raw[0] or {}).get("logprobs") or {}).get("content") or []
    ids = [int(token["id"]) for token in content if "id" in token]
    made = response.usage.output_tokens
    return ids if len(ids) == len(response.logprobs) and made in (None, len(ids)) else None
