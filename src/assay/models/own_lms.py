"""Models that a program or a metric makes itself: their calls are recorded, counted and capped as those of a job's.

Such a model keeps its settings, retries, callbacks, history and cache. Only its engine is replaced, by one that records
what the model's own engine answers. A run of a method of the user's that calls a model by itself (`forward`,
`__call__`) is a call. An answer from DSPy's cache is recorded as cached and costs nothing.
"""

import asyncio
import copy
import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import dspy
from dspy import lm15

from assay.models.cache import ResponseCache
from assay.models.calls import Observer
from assay.models.codec import response_of
from assay.models.dspy_seam import async_engine_of, engine_of, set_engines
from assay.models.entries import Entry, Opened, current_entry, entered
from assay.models.hosted import CustomBackend, HostedBackend
from assay.models.lm import CLIENT_KEYS, LanguageModel, call_of
from assay.models.meter import Meter
from assay.models.recording import AsyncRecordingEngine, RecordingEngine
from assay.support.scrubbing import add_secrets, fields

_SAMPLING = (
    *("temperature", "max_tokens", "max_completion_tokens", "top_p", "stop", "seed", "presence_penalty"),
    *("frequency_penalty", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "reasoning_effort"),
)
_lock = threading.Lock()
_backends: "weakref.WeakKeyDictionary[Any, tuple[Any, HostedBackend]]" = weakref.WeakKeyDictionary()


def is_observed(lm: Any, by: Observer | None = None) -> bool:
    """Whether the calls of a model are passed to an observer, or to any."""
    engine = engine_of(lm)
    return isinstance(engine, RecordingEngine) and (bool(engine.observers) if by is None else by in engine.observers)


def recorded_call(
    lm: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    observer: Observer,
    meter: Meter,
    cache: ResponseCache | None = None,
) -> Opened:
    """A call of a model whose requests are counted by a meter and passed to an observer.

    Args:
        cache: answers what an earlier process of the run sent in the same rollout.
        kwargs: its client settings (`api_key`, `timeout`) are taken out, because the call's own engine has them.
    """
    engine: RecordingEngine
    if isinstance(lm, LanguageModel):
        recorded = _shared(lm)
        engine = copy.copy(lm.recording)
        engine.meter, engine.observers = meter, (observer,)
        set_engines(recorded, engine, AsyncRecordingEngine(engine))
        return Opened(recorded)
    make: Any = functools.partial(
        RecordingEngine, model=lm.model, cache=cache, meter=meter, observers=(observer,), as_requested=True
    )
    recorded, spec = _shared(lm), engine_of(lm)
    if spec is None and not isinstance(lm, dspy.LM):  # of a class that has no engine
        engine = make(CustomBackend(SimpleNamespace()))
    elif isinstance(spec, str):
        client = {name: kwargs.pop(name) for name in CLIENT_KEYS if name in kwargs}
        if not _has_canonical_form(lm, args, kwargs):
            raise ValueError("the request has no canonical form")
        engine = make(_hosted(lm, client))
        set_engines(recorded, engine, AsyncRecordingEngine(engine))
    else:
        engine = make(CustomBackend(spec))
        own = async_engine_of(lm)
        set_engines(recorded, engine, None if own is None else _Awaiting(engine, own))
    for name in ("forward", "aforward"):
        if _is_users(lm, name):  # it runs with the model itself, and the calls in it are recorded
            setattr(recorded, name, getattr(lm, name))
    _mark_reached()
    entry = Entry(engine.backend, numbered=False)

    def done(result: Any) -> None:
        if not entry.reached:
            engine.answered_elsewhere(_request(lm, args, kwargs), response_of(_name(lm), result))

    return Opened(recorded, lambda: entered(entry), done)


def replaced_call(lm: LanguageModel, args: list[Any], kwargs: dict[str, Any]) -> Opened:
    """A call of another model as one of `lm`. Requests name it; client settings are taken out."""
    for name in [name for name in kwargs if name in CLIENT_KEYS]:
        del kwargs[name]
    args[:] = [_naming(lm.model, value) for value in args]
    kwargs.update({name: _naming(lm.model, value) for name, value in kwargs.items()})
    return call_of(lm, args, kwargs)


def _naming(model: str, value: Any) -> Any:
    return dataclasses.replace(value, model=model) if isinstance(value, lm15.Request) else value


def _shared(lm: Any) -> Any:
    """A copy with the attributes of the model: its history, settings and callbacks are the same objects."""
    recorded = copy.copy(lm)
    recorded.__dict__.update(vars(lm))
    return recorded


def _hosted(lm: Any, client: Mapping[str, Any]) -> HostedBackend:
    """The backend of a model. It is kept with the model, because it keeps connections."""
    if client:
        return HostedBackend(lm.copy(**client))
    settings = [lm.model, lm.model_type, lm.engine, {key: lm.kwargs.get(key) for key in CLIENT_KEYS}]
    with _lock:
        known, backend = _backends.get(lm, (None, None))
        if backend is None or known != settings:
            backend = HostedBackend(lm)
            _backends[lm] = settings, backend
        return backend


class _Awaiting(AsyncRecordingEngine):
    """The asynchronous counterpart of a custom engine, recorded."""

    def __init__(self, engine: RecordingEngine, own: Any) -> None:
        super().__init__(engine)
        self.own = own

    async def complete(self, request: lm15.Request) -> lm15.Response:
        _mark_reached()
        engine = copy.copy(self.engine)
        engine.backend = _awaiting(self.own.complete, self.engine.backend)
        return await asyncio.to_thread(engine.complete, request)


def _awaiting(complete: Callable[[Any], Any], like: Any = None) -> Any:
    """A backend that runs a coroutine function in the current event loop, for calls from other threads."""
    loop = asyncio.get_running_loop()
    backend = CustomBackend(like.engine) if like is not None else CustomBackend(SimpleNamespace())
    price = getattr(backend.engine, "price_usd", None)
    backend.engine = SimpleNamespace(
        complete=lambda request: asyncio.run_coroutine_threadsafe(complete(request), loop).result(), price_usd=price
    )
    return backend


def run_recorded(
    lm: Any,
    method: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    observer: Observer,
    meter: Meter,
) -> Any:
    """Result of a method of the user's that calls a model by itself: a call that is counted by a meter and passed to
    an observer. The method runs with the model itself, which may count in it."""
    answers: list[Any] = []

    def complete(_: Any) -> lm15.Response:
        answers.append(method(lm, *args, **kwargs))
        return response_of(_name(lm), answers[-1])

    engine = _engine_of_run(lm, CustomBackend(SimpleNamespace(complete=complete)), observer, meter)
    engine.complete(_request(lm, args, kwargs))
    return answers[-1]


async def arun_recorded(
    lm: Any,
    method: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    observer: Observer,
    meter: Meter,
) -> Any:
    """As `run_recorded`, of a coroutine function."""
    answers: list[Any] = []

    async def complete(_: Any) -> lm15.Response:
        answers.append(await method(lm, *args, **kwargs))
        return response_of(_name(lm), answers[-1])

    engine = _engine_of_run(lm, _awaiting(complete), observer, meter)
    await asyncio.to_thread(engine.complete, _request(lm, args, kwargs))
    return answers[-1]


def _engine_of_run(lm: Any, backend: Any, observer: Observer, meter: Meter) -> RecordingEngine:
    _mark_reached()
    keys: list[str] = []
    fields(dict(getattr(lm, "kwargs", None) or {}), removed=keys)
    add_secrets(*keys)
    return RecordingEngine(backend, model=_name(lm), meter=meter, observers=(observer,), as_requested=True)


def _mark_reached() -> None:
    """The call that this code runs in leads to another one, which is recorded."""
    if (entry := current_entry.get()) is not None:
        entry.reached = True


def _name(lm: Any) -> str:
    return str(getattr(lm, "model", type(lm).__name__))


def _is_users(lm: Any, name: str) -> bool:
    """Whether a method is the user's and not DSPy's."""
    method = getattr(lm, name, None)
    return method is not None and str(getattr(method, "__module__", "")).partition(".")[0] != "dspy"


def _request(lm: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> lm15.Request:
    """The request of a call, as far as it can be told from its arguments and the model's settings."""
    given = args[0] if args else kwargs.get("request") or kwargs.get("prompt")
    if isinstance(given, lm15.Request):
        return given
    messages = (args[1] if len(args) > 1 else kwargs.get("messages")) or [{"role": "user", "content": str(given)}]
    settings = {**(getattr(lm, "kwargs", None) or {}), **kwargs}
    body = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
    if inspect.isclass(body.get("response_format")):
        del body["response_format"]
    for options in (body, {}):
        try:
            return lm15.request_from_openai_chat({"model": _name(lm), "messages": messages, **options})
        except Exception:  # settings of the user's own, or messages of another shape
            continue
    return lm15.Request(model=_name(lm), messages=(lm15.Message.user(str(messages)),))


def _has_canonical_form(lm: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether DSPy can pass the call to an engine such as ours; else it has litellm send it as it is."""
    given = args[0] if args else kwargs.get("request") or kwargs.get("prompt")
    if isinstance(given, lm15.Request) or not kwargs.get("messages"):
        return True
    try:
        lm15.request_from_openai_chat({"model": lm.model, "messages": kwargs["messages"]})
    except Exception:
        return False
    return True
