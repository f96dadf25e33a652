"""Propagates the current place of the recorder into threads and thread pools that a program creates.

DSPy's context is not propagated to them. Only assay's own values are: a program's own context variables have the same
values in a thread as without assay.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, Token
from functools import wraps
from multiprocessing.pool import ThreadPool
from typing import Any

__all__ = ["accounted_calls", "current_place", "follow", "leave_place", "open_place", "pin_place"]

accounted_calls: ContextVar[int] = ContextVar("assay_accounted", default=0)
_place: ContextVar[Any] = ContextVar("assay_place", default=None)
# marks a job that was submitted outside of any place, whatever the pool's thread was started for
_NOWHERE = object()
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
    _place.reset(token)
    """Undo `open_place`."""


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
    place, accounted = _place_or_nowhere(), accounted_calls.get()

    def job(*args: Any, **kwargs: Any) -> Any:
        tokens = _place.set(place), accounted_calls.set(accounted)
        try:
            return function(*args, **kwargs)
        finally:
            _place.reset(tokens[0])
            accounted_calls.reset(tokens[1])

    return job
