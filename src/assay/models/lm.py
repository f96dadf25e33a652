"""`get_lm`: a `dspy.LM` whose calls are counted, capped, cached and passed to observers.

Its engine (`assay.models.recording`) calls llama.cpp for embedded models, and DSPy's own engine or litellm for others.
"""

import contextlib
import difflib
import functools
import hashlib
import inspect
import math
import numbers
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import dspy
from dspy import lm15

from assay.errors import ConfigError, NoModelFile
from assay.models.cache import ResponseCache
from assay.models.calls import Observer
from assay.models.dspy_seam import public_entries
from assay.models.embedded import LlamaBackend
from assay.models.entries import Entry, Opened, current_entry, entered, wrapped
from assay.models.hosted import CustomBackend, HostedBackend, rough_tokens
from assay.models.meter import Meter
from assay.models.prices import Price
from assay.models.recording import AsyncRecordingEngine, RecordingEngine
from assay.models.roles import Endpoint, is_embedded, with_local_key
from assay.models.thinking import Thinking, ThinkingError
from assay.support.names import nearest

_PROVIDERS = ("anthropic", "azure", "gemini", "hosted_vllm", "lm_studio", "ollama", "ollama_chat", "openai")
_REASONS = "max_completion_tokens"  # DSPy sets it for reasoning models that take no temperature
_ADDRESS = ("api_key", "api_base", "base_url")
_KEYWORDS = (  # of `get_lm`
    "cache", "meter", "observers", "temperature", "max_tokens", "seed", "num_retries", "stop_loops", "thinking",
    "price",
)  # fmt: skip
CLIENT_KEYS = ("api_key", "api_base", "base_url", "timeout", "headers", "extra_headers", "api_version")


class LanguageModel(dspy.LM):  # type: ignore[misc]
    """A `dspy.LM` over a `RecordingEngine`. DSPy's `rollout_id` becomes the sample in the cache key and in the seed.

    Attributes:
        thinking: thinking budget of every call that has none of its own (`lm(…, thinking=256)`).
    """

    thinking: Thinking | None = None

    @property
    def recording(self) -> RecordingEngine:
        engine = self.engine
        assert isinstance(engine, RecordingEngine)
        return engine

    def copy(self, **kwargs: Any) -> "LanguageModel":
        """A copy with other settings; temperature is dropped if the model refuses one.

        Another `model` gets an engine of its own, with the same cache, meter and observers.
        """
        name = kwargs.pop("model", self.model)
        if "thinking" in kwargs:
            kwargs["thinking"] = Thinking.of(kwargs["thinking"])
        if name != self.model:
            engine = self.recording
            generation = {key: self.kwargs[key] for key in ("temperature", "max_tokens", "seed") if key in self.kwargs}
            settings = {**generation, **kwargs}
            other = get_lm(name, cache=engine.cache, meter=engine.meter, observers=engine.observers, **settings)
            other.provider, other.thinking = self.provider, settings.get("thinking", self.thinking)
            return other
        if _REASONS in self.kwargs:
            kwargs.pop("temperature", None)
        copied: LanguageModel = super().copy(**kwargs)
        return copied

    def update_history(self, entry: Any) -> None:
        """Adds a call to the histories of this model and of the calling modules.

        DSPy's history of all calls in the process is left out: it would show each run the calls of the others.
        """
        for owner in (self, *(dspy.settings.caller_modules or ())):
            owner.history.append(entry)
            del owner.history[: -dspy.settings.max_history_size or None]


def call_of(lm: LanguageModel, _: Sequence[Any], kwargs: dict[str, Any]) -> Opened:
    """A call of a model. Where one public method calls another, both are the same call."""
    backend, outer = lm.recording.backend, current_entry.get()
    thinking = Thinking.of(kwargs.pop("thinking", lm.thinking))
    if outer is not None and outer.backend is backend:
        return Opened(lm)
    rollout_id = kwargs.get("rollout_id", lm.kwargs.get("rollout_id"))
    entry = Entry(
        backend,
        seed=lm.kwargs.get("seed"),
        rollout_id=None if rollout_id is None else int(rollout_id),
        thinking=thinking,
        numbered=kwargs.get("rollout_id") is None,
    )
    return Opened(lm, lambda: entered(entry))


def _inherited(name: str) -> Any:
    """A public method of DSPy's class, looked up at each call: it may have been wrapped since."""
    plain = getattr(dspy.LM, name)

    @functools.wraps(plain)
    def call(lm: LanguageModel, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(LanguageModel, lm), name)(*args, **kwargs)

    @functools.wraps(plain)
    async def acall(lm: LanguageModel, /, *args: Any, **kwargs: Any) -> Any:
        return await getattr(super(LanguageModel, lm), name)(*args, **kwargs)

    return acall if inspect.iscoroutinefunction(plain) else call


for _name in public_entries(dspy.BaseLM):
    setattr(LanguageModel, _name, wrapped(_inherited(_name), call_of))


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
    stop_loops: bool = False,
    thinking: Any = None,
    price: Any = None,
    **client: Any,
) -> LanguageModel:
    """A language model by name.

    Args:
        name: `embedded/NAME`, a GGUF file as `embedded:FILE`, or any name that DSPy and litellm know (`openai/…`,
            `anthropic/…`, `ollama_chat/…`).
        cache: answers repeated requests; None calls the model every time.
        meter: counts and caps calls; None counts without a cap.
        temperature: dropped for models that refuse one (OpenAI's reasoning models), as is `max_tokens`.
        max_tokens: per answer; default 512 for an embedded model, the provider's own limit for others.
        seed: seed of the run. If the engine takes seeds, each call gets one derived from it, its sample and its
            messages.
        num_retries: number of retries of a failed call.
        stop_loops: stop an embedded model as soon as its text repeats itself, see `assay.models.loops`. llama.cpp then
            reports token ids incompletely, so leave it off where calls are recorded for training. Without it a loop
            ends at `max_tokens`. In both cases the call fails with `LoopStopped`.
        thinking: thinking budget of every call: a `Thinking`, tokens, an effort word, `off` or `auto`.
        price: US dollars for a million tokens of prompt and answer, as `0.15,0.60` or two numbers. By default litellm's
            price, to which `litellm.register_model` adds.
        client: `api_base`, `api_key`, `timeout` and others, for hosted models. A server on this machine or in a private
            network needs no key.
    Raises:
        ConfigError: the name has no known provider, a number is out of range, or `client` is set for an embedded model.
        TypeError: a misspelt keyword.
        ModelError: an embedded model that is unknown, not pulled, or whose file does not match its sha256.
        MissingExtra: the `embedded` extra is not installed.
    """
    _check_client(name, client)
    _check_numbers(temperature, max_tokens, num_retries, seed)
    if price is not None and is_embedded(name):
        raise ConfigError(f"price would have no effect on {name}, which runs in this process and costs nothing")
    backend: LlamaBackend | HostedBackend
    if name.endswith(".gguf") and not is_embedded(name):
        raise NoModelFile(f"{name!r} is a model file: name it embedded:{name}")
    if is_embedded(name):
        backend, max_tokens = LlamaBackend(name), max_tokens or 512
        backend.stops_loops = stop_loops
    elif stop_loops:
        raise ConfigError(f"stop_loops works for embedded models only: the answers of {name} arrive complete")
    else:
        _require_provider(name)
        # the API with log-probabilities, whichever a version of DSPy chooses by itself
        hosted = dspy.LM(name, cache=False, num_retries=0, **{"model_type": "chat", **with_local_key(name, client)})
        if _REASONS in hosted.kwargs:
            temperature = max_tokens = None
        backend = HostedBackend(hosted)
    engine = RecordingEngine(backend, model=name, cache=cache, meter=meter, observers=observers, price=Price.of(price))
    engine.client = {key: client[key] for key in _ADDRESS if client.get(key)}
    generation: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    if seed is not None and "seed" in engine.supported_params:
        generation["seed"] = seed
    return _over(engine, name, Thinking.of(thinking), num_retries=num_retries, **generation)


def _check_client(model: Any, client: Mapping[str, Any]) -> None:
    """Refuses a keyword that is almost one of `get_lm`, and any for an embedded model. Others are the provider's."""
    if not isinstance(model, str):
        raise ConfigError(f"name={model!r} must be a string: embedded/NAME, embedded:FILE.gguf or PROVIDER/NAME")
    known = (*_KEYWORDS, *CLIENT_KEYS)
    for name in client.keys() - set(known):
        if near := difflib.get_close_matches(name, known, 1, 0.85):  # vLLM's min_tokens is not a misspelt max_tokens
            raise TypeError(f"get_lm() got an unexpected keyword {name!r}. Did you mean {near[0]!r}?")
    if is_embedded(model) and (unused := sorted(key for key, value in client.items() if value is not None)):
        raise ConfigError(f"{', '.join(unused)} would have no effect on {model}, which runs in this process")


def _check_numbers(temperature: Any, max_tokens: Any, num_retries: Any, seed: Any) -> None:
    is_number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if temperature is not None and not (is_number and 0 <= temperature < math.inf):
        raise ConfigError(f"`temperature={temperature!r}` must be a finite number at least 0, or None")
    for name, value, least in (("max_tokens", max_tokens, 1), ("num_retries", num_retries, 0), ("seed", seed, 0)):
        if name != "num_retries" and value is None:
            continue
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
            raise ConfigError(f"`{name}={value!r}` must be an integer at least {least}")


def _over(engine: RecordingEngine, name: str, thinking: Thinking | None, **settings: Any) -> LanguageModel:
    lm = LanguageModel(name, engine=engine, async_engine=AsyncRecordingEngine(engine), cache=False, **settings)
    lm.thinking = thinking
    return lm


def _require_provider(name: str) -> None:
    provider = name.partition("/")[0]
    if "/" in name and provider in _PROVIDERS:  # litellm, which knows all of them, takes seconds to import
        return
    if not has_provider(name):
        near = nearest(provider, ("embedded", *_PROVIDERS)) if "/" in name else None
        raise ConfigError(
            f"model {name!r} names no provider: write openai/{name} for an OpenAI-compatible server at `api_base`, "
            "embedded/NAME, or PROVIDER/NAME (anthropic/…, ollama_chat/…)."
            + (f" Did you mean {name.replace(provider, near, 1)!r}?" if near else "")
        )


def has_provider(name: str) -> bool:
    """Whether a provider is known for a model's name. For names of models made in Python this has no meaning."""
    if is_embedded(name):
        return True
    import litellm

    if name.partition("/")[0] in {entry["provider"] for entry in litellm.custom_provider_map}:
        return True  # litellm's own table learns them at the first call
    before = litellm.suppress_debug_info
    litellm.suppress_debug_info = True  # else litellm prints advice to standard output
    try:
        litellm.get_llm_provider(name)
    except Exception:  # the class of litellm's exception differs between versions
        return False
    finally:
        litellm.suppress_debug_info = before
    return True


def lm_over(backend: Any, name: str, *, max_tokens: int = 512, seed: int | None = None) -> LanguageModel:
    """A language model over an existing backend: without cache and caps, until `with_recording` adds them."""
    engine = RecordingEngine(backend, model=name)
    generation: dict[str, Any] = {"max_tokens": max_tokens}
    if seed is not None and "seed" in engine.supported_params:
        generation["seed"] = seed
    return _over(engine, name, None, num_retries=0, **generation)


def sibling(lm: Any, name: str, endpoint: Endpoint | None = None) -> LanguageModel:
    """Another model by name, with the cache, meter, observers and seed of `lm` if it has them.

    Args:
        endpoint: its address and key; None: those of `lm`.
    Raises:
        ConfigError: the environment variable with its key is not set.
    """
    if not isinstance(lm, LanguageModel):
        return get_lm(name, **(endpoint.client(name) if endpoint else {}))
    engine, seed = lm.recording, lm.kwargs.get("seed")
    if name == engine.model and endpoint is not None and endpoint.client(name).items() <= engine.client.items():
        return lm
    key = (name, seed, endpoint)
    if key not in engine.siblings:
        client: dict[str, Any] = endpoint.client(name) if endpoint else {} if is_embedded(name) else engine.client
        engine.siblings[key] = get_lm(
            name,
            cache=engine.cache,
            meter=engine.meter,
            observers=engine.observers,
            seed=seed,
            temperature=0.1,
            price=engine.price if name == engine.model else None,
            **client,
        )
    return engine.siblings[key]


def with_recording(
    lm: dspy.LM,
    *,
    cache: ResponseCache | None = None,
    meter: Meter | None = None,
    observers: Sequence[Observer] = (),
    price: Any = None,
) -> LanguageModel:
    """A recorded version of any `dspy.LM`: same model, client and generation settings, through `RecordingEngine`.

    Args:
        price: as for `get_lm`; by default that of `lm`.
    """
    if isinstance(lm, LanguageModel):
        backend, price = lm.recording.backend, lm.recording.price if price is None else price
    elif isinstance(lm.engine, str):
        backend = HostedBackend(lm)
    else:
        backend = CustomBackend(lm.engine)  # type: ignore[assignment]
    engine = RecordingEngine(
        backend, model=lm.model, cache=cache, meter=meter, observers=observers, price=Price.of(price)
    )
    engine.client = (
        lm.recording.client
        if isinstance(lm, LanguageModel)
        else {key: lm.kwargs[key] for key in _ADDRESS if lm.kwargs.get(key)}
    )
    generation = {key: value for key, value in lm.kwargs.items() if key not in CLIENT_KEYS}
    thinking = getattr(lm, "thinking", None)
    return _over(engine, lm.model, thinking, model_type=lm.model_type, num_retries=lm.num_retries, **generation)


def check_thinking(lm: LanguageModel, thinking: Thinking | None) -> None:
    """Refuses a budget that the model's engine cannot honour. May ask a server what it is; calls no model.

    Raises:
        ThinkingError: the reason.
    """
    if thinking is None or thinking.is_auto:
        return
    apply = getattr(lm.recording.backend, "with_thinking", None)
    if apply is None:
        raise ThinkingError(thinking.value, f": the engine of {lm.model} takes no budget")
    apply(lm15.Request(model=lm.model, messages=(lm15.Message.user("hello"),)), thinking)


def supports(lm: Any, feature: str) -> bool:
    """Whether the model's engine accepts a request parameter (`logprobs`, `seed`, `response_format`, …)."""
    return feature in getattr(lm, "supported_params", ())


# by hash of the text: the prompts themselves would be most of a run's memory

# -- Counts of tokens by the engine of a model, cached.


_COUNTS = 16_384  # token counts kept per backend
# Per backend, so that counts end with it.
_counts: WeakKeyDictionary[Any, OrderedDict[bytes, int]] = WeakKeyDictionary()


def _count(backend: Any, text: str) -> int:
    counts = _counts.setdefault(backend, OrderedDict())
    key = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
    if (count := counts.get(key)) is None:
        count = counts[key] = int(backend.count_tokens(text))
        if len(counts) > _COUNTS:
            with contextlib.suppress(KeyError):  # another thread removed the last one
                counts.popitem(last=False)
    return count


def count_tokens(lm: Any, text: str) -> int:
    """Number of tokens of `text` by the model's tokenizer; one token per four characters if there is none."""
    if not isinstance(lm, LanguageModel):
        return rough_tokens(text)
    try:
        return _count(lm.recording.backend, text)
    except Exception:  # an unavailable tokenizer must not stop an agent; the docstring states the fallback
        return rough_tokens(text)
