"""The time limit of a tool call inside of a limited run.

A tool stays in the thread of its run, because what an agent opens (a connection of `sqlite3`, a page of Playwright) often belongs to the thread
that opened it. Beyond its limit it is stopped at the next line of Python that it reaches, and its run goes on. Where it reaches none, because it
hangs in C code (a socket without a timeout), nothing but its run can be left.
"""

import asyncio
import ctypes
import heapq
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from assay.models.limits import LimitedCall, OverTime, current_tool_limit, innermost, inside, run_of

__all__ = ["ToolOverTime", "awaited_within_tool_limit", "within_tool_limit"]

_GRACE_S = 1.0  # for a call that was stopped to reach its next line of Python
T = TypeVar("T")


class ToolOverTime(OverTime):
    """A tool call took longer than its limit. The message is the same each time, so that a prompt that quotes it is found in the cache."""

    def __init__(self, tool: str, limit_s: float) -> None:
        TimeoutError.__init__(self, f"the tool {tool!r} gave no result after {limit_s:g} s")
        self.asking = False


class _Stopped(BaseException):
    """Raised in the thread of a tool call whose time is over. No `except Exception` holds it."""


class _ToolCall(LimitedCall):
    """A tool call in this thread."""

    def __init__(self, tool: str, seconds: float) -> None:
        super().__init__(innermost())
        self.tool, self.seconds = tool, seconds
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.Lock()
        self._done = self.stopped = False

    def due(self) -> float | None:
        """Stops it. Returns the seconds after which this is to be called again, None where nothing is left to do."""
        with self._lock:
            if self._done or self.asked:  # a tool that asks a model is an agent itself: the limit of the run holds for it
                return None
            if not self.stopped:
                self.stopped = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, ctypes.py_object(_Stopped))
                return _GRACE_S
        run = run_of(self)
        if run is not None:
            run.leave(ToolOverTime(self.tool, self.seconds))
        return None

    def end(self) -> None:
        """From now on it is not stopped any more."""
        while True:
            try:
                with self._lock:
                    self._done = True
                    if self.stopped:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, None)  # where it has not been raised yet
                return
            except _Stopped:  # it comes once, here after the tool has returned
                continue


class _Clock:
    """A daemon thread that calls `due` of each call when its time is over."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, _ToolCall]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, call: _ToolCall, seconds: float) -> None:
        entry = (time.monotonic() + seconds, next(self._numbers), call)
        with self._changed:
            heapq.heappush(self._waiting, entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="assay-tool-limits", daemon=True)
                self._thread.start()
            elif self._waiting[0] is entry:
                self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting or (left := self._waiting[0][0] - time.monotonic()) > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX) if self._waiting else None)
                call = heapq.heappop(self._waiting)[2]
            if (again := call.due()) is not None:
                self.add(call, again)


_clock = _Clock()


def _new_clock() -> None:
    global _clock
    _clock = _Clock()


os.register_at_fork(after_in_child=_new_clock)  # threads do not come along


def within_tool_limit(call: Callable[[], T], tool: str) -> T:
    """What a tool call gives, in this thread.

    Raises:
        ToolOverTime: it took longer than the limit of tools that is open here.
        BaseException: whatever it raises.
    """
    seconds = current_tool_limit()
    if seconds is None:
        return call()
    this = _ToolCall(tool, seconds)
    try:
        try:
            with inside(this):
                _clock.add(this, seconds)
                return call()
        finally:
            this.end()
    except _Stopped:
        if not this.stopped:  # it is meant for a tool that called this one
            raise
        this.end()
        raise ToolOverTime(tool, seconds) from None


async def awaited_within_tool_limit(call: Callable[[], Awaitable[T]], tool: str) -> T:
    """The same of an asynchronous tool: it runs in the loop of its caller, as a task that is cancelled beyond the limit."""
    seconds = current_tool_limit()
    if seconds is None:
        return await call()
    this = LimitedCall(innermost())

    async def work() -> T:
        with inside(this):
            return await call()

    task = asyncio.ensure_future(work())
    try:
        while not (await asyncio.wait({task}, timeout=seconds))[0]:
            if not this.asked:
                raise ToolOverTime(tool, seconds)
        return task.result()
    finally:
        task.cancel()
