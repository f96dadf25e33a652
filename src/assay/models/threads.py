"""Propagates the context of a run into the threads and thread pools that its program creates.

These are assay's own context variables, such as the place of the recorder and the sample, and DSPy's settings as the
run configures them (`settings_for_threads`), in place of those of `dspy.configure`. A program's own context variables,
and what it sets with `dspy.context`, have the same values in a thread as without assay.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import wraps
from multiprocessing.pool import ThreadPool
from typing import Any

from assay.models.scope import current_repeats, current_sample, having

accounted_calls: ContextVar[int] = ContextVar("assay_accounted", default=0)
_place: ContextVar[Any] = ContextVar("assay_place", default=None)
# marks a job that was submitted outside of any place, whatever the pool's thread was started for
_NOWHERE = object()
_settings: ContextVar[Mapping[str, Any] | None] = ContextVar("assay_settings", default=None)
_CARRIED: tuple[ContextVar[Any], ...] = (accounted_calls, current_sample, current_repeats, _settings)
_OF_THREAD = "_assay_place"
_JOBS = (  # methods of `ThreadPool` whose first argument is `func`
    "apply_async",
    "map",
    "map_async",
    "starmap",
    "starmap_async",
    "imap",
    "imap_unordered",
)
_lock = threading.Lock()
_following = False


def open_place(place: object) -> Token[Any]:
    """Set the value of `current_place` for this thread or task, and for what it starts."""
    return _place.set(place)


def leave_place(token: Token[Any]) -> None:
    """Undo `open_place`."""
    _place.reset(token)


def current_place() -> Any:
    """Place of this thread or task, or else the one that its thread was started in; None if neither is known."""
    place = _place.get()
    if place is None:
        place = getattr(threading.current_thread(), _OF_THREAD, None)
    return None if place is _NOWHERE else place


def pin_place() -> None:
    """Keep the current place, also that there is none, in this context, for a thread that outlives the place in which
    it was started."""
    _place.set(_place_or_nowhere())


def _place_or_nowhere() -> object:
    current = current_place()
    return _NOWHERE if current is None else current


def settings_for_threads() -> AbstractContextManager[object]:
    """Inside, threads start with DSPy's current settings, as they would with those of `dspy.configure`."""
    import dspy

    return having(_settings, dict(dspy.settings.config))


def follow() -> None:
    """Install the propagation for threads started and jobs submitted from now on; once per process."""
    global _following
    with _lock:
        if _following:
            return
        _following = True
        _wrap_start()
        _wrap_job(ThreadPoolExecutor, "submit")
        for name in _JOBS:
            _wrap_job(ThreadPool, name)


def _wrap_start() -> None:
    original = threading.Thread.start

    @wraps(original)
    def start(thread: threading.Thread) -> None:
        setattr(thread, _OF_THREAD, current_place())
        if _settings.get() is not None:
            setattr(thread, "run", _carrying(thread.run))  # noqa: B010
        original(thread)

    setattr(threading.Thread, "start", start)  # noqa: B010


def _wrap_job(owner: type, name: str) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def submit(pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_carrying(args[0]), *args[1:])
        elif "func" in kwargs:
            kwargs["func"] = _carrying(kwargs["func"])
        return original(pool, *args, **kwargs)

    setattr(owner, name, submit)


def _carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    values = [(_place, _place_or_nowhere()), *((variable, variable.get()) for variable in _CARRIED)]
    if (settings := _settings.get()) is not None:
        function = _with_settings(function, settings)

    def job(*args: Any, **kwargs: Any) -> Any:
        tokens = [(variable, variable.set(value)) for variable, value in values]
        try:
            return function(*args, **kwargs)
        finally:
            for variable, token in tokens:
                variable.reset(token)

    return job


def _with_settings(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    import dspy

    def job(*args: Any, **kwargs: Any) -> Any:
        with dspy.context(**settings):
            return function(*args, **kwargs)

    return job
