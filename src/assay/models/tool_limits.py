"""Time limit of a tool call inside of a limited run.

A tool stays in the thread of its run, because what an agent opens (a connection of `sqlite3`, a page of Playwright)
often belongs to the thread that opened it. A tool that exceeds its limit is stopped at the next line of Python that
it executes, and its run continues. If it hangs in C code (a socket without a timeout), only the whole run can be
abandoned.
"""

import ctypes
import heapq
import itertools
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import TypeVar

from assay.models.limits import Abandoned, LimitedCall, OverTime, current_tool_limit, innermost, inside, run_of

_GRACE_S = 1.0  # time for a stopped call to execute its next line of Python
T = TypeVar("T")


class ToolOverTime(OverTime):
    """A tool call exceeded its limit. The message is constant, so that a prompt quoting it is found in the cache."""

    def __init__(self, tool: str, limit_s: float) -> None:
        TimeoutError.__init__(self, f"the tool {tool!r} gave no result after {limit_s:g} s")
        self.in_model_call = False


class _Stopped(BaseException):
    """Raised in the thread of a tool call that exceeded its limit; `except Exception` does not catch it."""


class _ToolCall(LimitedCall):
    """A limited tool call in the current thread."""

    def __init__(self, tool: str, seconds: float) -> None:
        super().__init__(innermost())
        self.tool, self.seconds = tool, seconds
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.Lock()
        self._done = self.stopped = False

    def due(self) -> float | None:
        """Stop the call. Returns the seconds after which to call this again; None if nothing is left to do."""
        with self._lock:
            if self._done or self.called_model:  # a tool that calls a model is an agent: it has the run's limit
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
        """Prevent that the call is stopped from now on."""
        abandoned: Abandoned | None = None
        while True:
            try:
                with self._lock:
                    self._done = True
                # An exception that has not been raised yet is raised by the jump back of this loop. Cancelled by None,
                # it would leave Python 3.11 looking for an exception at every step, and profilers hanging.
                for _ in range(2):
                    pass
                break
            except _Stopped:  # raised here, after the tool has returned; at most once
                continue
            except Abandoned as error:
                abandoned = error
        if abandoned is not None:
            raise abandoned


class _Clock:
    """A daemon thread that calls `due` of each call when its time is over. Holds weak references only."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, weakref.ref[_ToolCall]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, call: _ToolCall, seconds: float) -> None:
        entry = (time.monotonic() + seconds, next(self._numbers), weakref.ref(call))
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
                while not self._waiting or (remaining := self._waiting[0][0] - time.monotonic()) > 0:
                    self._changed.wait(min(remaining, threading.TIMEOUT_MAX) if self._waiting else None)
                call = heapq.heappop(self._waiting)[2]()
            if call is not None and (delay_s := call.due()) is not None:
                self.add(call, delay_s)
            call = None  # drops the reference: the next wait may take minutes


_clock = _Clock()


def _new_clock() -> None:
    global _clock
    _clock = _Clock()


os.register_at_fork(after_in_child=_new_clock)  # a forked process has no clock thread


def within_tool_limit(call: Callable[[], T], tool: str) -> T:
    """Result of a tool call, in the current thread.

    Raises:
        ToolOverTime: the call exceeded the current limit of tools.
        BaseException: any exception of the call.
    """
    seconds = current_tool_limit()
    if seconds is None:
        return call()
    limit = _ToolCall(tool, seconds)
    try:
        try:
            with inside(limit):
                _clock.add(limit, seconds)
                return call()
        finally:
            limit.end()
    except _Stopped:
        if not limit.stopped:  # meant for an enclosing tool call
            raise
        limit.end()
        raise ToolOverTime(tool, seconds) from None


async def awaited_within_tool_limit(call: Callable[[], Awaitable[T]], tool: str) -> T:
    """`within_tool_limit` for an asynchronous tool: a task in the caller's loop, cancelled at the limit."""
    seconds = current_tool_limit()
    if seconds is None:
        return await call()
    import asyncio  # imported here: it takes 30 of the 110 ms of `from assay.rubrics import Rubric`

    limit = LimitedCall(innermost())

    async def work() -> T:
        with inside(limit):
            return await call()

    task = asyncio.ensure_future(work())
    try:
        while not (await asyncio.wait({task}, timeout=seconds))[0]:
            if not limit.called_model:
                raise ToolOverTime(tool, seconds)
        return task.result()
    finally:
        task.cancel()
