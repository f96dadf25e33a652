"""Threads and thread pools that a program makes by itself: each job knows the place that was open where it was started.

DSPy's context does not reach them. Only assay's own values are carried: what a program reads in a thread is what it reads there without assay.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, Token
from functools import wraps
from multiprocessing.pool import ThreadPool
from typing import Any

__all__ = ["accounted_calls", "current_place", "follow", "leave_place", "open_place"]

accounted_calls: ContextVar[int] = ContextVar("assay_accounted", default=0)
_place: ContextVar[Any] = ContextVar("assay_place", default=None)
_NOWHERE = object()  # a job of a pool that was handed in outside of any place, whatever the pool's thread was started for
_OF_THREAD = "_assay_place"
_JOBS = ("apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered")  # each takes `func` first
_lock = threading.Lock()
_following = False


def open_place(place: object) -> Token[Any]:
    """From now on, in this thread or task and in what it starts, `current_place` gives this."""
    return _place.set(place)


def leave_place(token: Token[Any]) -> None:
    _place.reset(token)


def current_place() -> Any:
    """The place of this thread or task, or the one that its thread was started in; None where neither is known."""
    found = _place.get()
    if found is None:
        found = getattr(threading.current_thread(), _OF_THREAD, None)
    return None if found is _NOWHERE else found


def follow() -> None:
    """Carries places into threads that are started, and jobs that are handed to thread pools, from now on; once a process."""
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
    plain = threading.Thread.start

    @wraps(plain)
    def start(thread: threading.Thread) -> None:
        setattr(thread, _OF_THREAD, current_place())
        plain(thread)

    setattr(threading.Thread, "start", start)  # noqa: B010


def _wrap_job(owner: type, name: str) -> None:
    plain = getattr(owner, name)

    @wraps(plain)
    def handed_in(pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_carrying(args[0]), *args[1:])
        elif "func" in kwargs:
            kwargs["func"] = _carrying(kwargs["func"])
        return plain(pool, *args, **kwargs)

    setattr(owner, name, handed_in)


def _carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    found = current_place()
    place, accounted = _NOWHERE if found is None else found, accounted_calls.get()

    def job(*args: Any, **kwargs: Any) -> Any:
        tokens = _place.set(place), accounted_calls.set(accounted)
        try:
            return function(*args, **kwargs)
        finally:
            _place.reset(tokens[0])
            accounted_calls.reset(tokens[1])

    return job
