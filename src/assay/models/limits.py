"""A time limit on code of others: agents, tools, checks and judges. Imports no model.

The call runs in a thread of its own, because one that hangs can be left but not ended. What is left behind is stopped at the next line of Python
that it reaches; a call that hangs in C code keeps its thread until that returns. Code that holds the interpreter's lock for ever (Python's `re`
on a bad pattern) cannot be limited from within the process.
"""

import contextvars
import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, TypeVar

from assay.errors import ConfigError

__all__ = [
    "DEFAULT_S", "TOOL_SHARE", "Abandoned", "LimitedCall", "OverTime", "RaisedInside", "asking_model", "check_limit", "current_limit",
    "current_tool_limit", "innermost", "inside", "limited", "run_of", "within_limit",
]  # fmt: skip

DEFAULT_S = 600.0
TOOL_SHARE = 0.25  # of a run's limit: after a tool that hangs, the agent has time for others and for its answer
T = TypeVar("T")
_limit: ContextVar[float | None] = ContextVar("assay_task_timeout", default=DEFAULT_S)
_tool_limit: ContextVar[float | None] = ContextVar("assay_tool_timeout", default=None)
_idle: "list[_Worker]" = []
os.register_at_fork(after_in_child=_idle.clear)  # threads do not come along


class OverTime(TimeoutError):
    """A call took longer than its limit. `asking`: a model was being asked at the time, so that it may be the server that is slow."""

    def __init__(self, what: str, limit_s: float, *, asking: bool) -> None:
        super().__init__(f"{what} took longer than the limit of {limit_s:g} s" + (", while a model was being asked" if asking else ""))
        self.asking = asking


class Abandoned(BaseException):
    """Raised in a thread that nobody waits for any more. No `except Exception` holds it."""


class RaisedInside(RuntimeError):
    """Stands for an exception of a limited call that must not leave its thread: a `KeyboardInterrupt`, or one whose message cannot be read."""


def _portable(error: BaseException) -> BaseException:
    """The exception as whoever waits may raise it.

    Python raises Ctrl-C in the main thread alone, so a `KeyboardInterrupt` in a thread of limited calls is the call's own and must not stop the
    job. Messages are read here because `__str__` is the call's code too.
    """
    if isinstance(error, KeyboardInterrupt):
        return RaisedInside("it raised KeyboardInterrupt itself").with_traceback(error.__traceback__)
    try:
        str(error)
        if isinstance(error, SystemExit):
            repr(error.code)
    except Abandoned:
        raise
    except BaseException as unread:
        found = RaisedInside(f"it raised {type(error).__name__}, whose message cannot be read ({type(unread).__name__})")
        return found.with_traceback(error.__traceback__)
    return error


class LimitedCall:
    """One call with a limit, inside of another or of none (`outer`)."""

    def __init__(self, outer: "LimitedCall | None") -> None:
        self.outer = outer
        self.asking, self.asked = 0, False  # models now; any at all


class _Job(LimitedCall):
    """One call in a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], Any], outer: LimitedCall | None) -> None:
        super().__init__(outer)
        self.call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self.over: OverTime | None = None  # why it is left, where somebody else says so
        self.running = threading.Lock()  # held until it has finished: waiting for a lock costs half of waiting for an event
        self.running.acquire()
        self.lock = threading.Lock()
        self.done = self.abandoned = False

    def run(self) -> None:
        _job.set(self)
        try:
            self.result = self.call()
        except BaseException as error:  # it belongs to whoever waits
            self.error = _portable(error)

    def finish(self) -> bool:
        """Whether somebody still waits."""
        with self.lock:
            self.done = True
            if self.over is None:
                self.running.release()
            return not self.abandoned

    def leave(self, over: OverTime) -> None:
        """Whoever waits for it raises this instead."""
        with self.lock:
            if not self.done and self.over is None:
                self.over = over
                self.running.release()

    def abandon(self, thread: threading.Thread) -> bool:
        """Stops waiting. False where it has just finished."""
        with self.lock:
            if self.done:
                return False
            self.abandoned = True
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
        return True


_job: ContextVar[LimitedCall | None] = ContextVar("assay_limited_job", default=None)


def innermost() -> LimitedCall | None:
    """The limited call that this is inside of."""
    return _job.get()


@contextmanager
def inside(call: LimitedCall) -> Iterator[None]:
    """Inside, this is the innermost limited call."""
    token = _job.set(call)
    try:
        yield
    finally:
        _job.reset(token)


def run_of(call: LimitedCall) -> _Job | None:
    """The call in a thread of its own that this one is inside of."""
    found = call.outer
    while found is not None and not isinstance(found, _Job):
        found = found.outer
    return found


class _Worker:
    """A daemon thread that runs one job after another; it ends after one that was abandoned."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[contextvars.Context, _Job]] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="assay-limited", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            while True:
                context, job = self.jobs.get()
                context.run(job.run)
                wanted = job.finish()
                del context, job  # nothing of it is held while there is nothing to do
                if not wanted:
                    return
                _idle.append(self)
        except Abandoned:  # a moment after it had finished
            return


def check_limit(seconds: float) -> None:
    """Raises `ConfigError` where a setting `task_timeout` is no limit."""
    if not 0 < seconds < math.inf:
        raise ConfigError(f"task_timeout={seconds!r} must be a number of seconds above 0", flag="--task-timeout")


@contextmanager
def limited(seconds: float | None, *, tools_of: float | None = None) -> Iterator[None]:
    """Inside, `within_limit` gives a call so many seconds; None for ever.

    Args:
        tools_of: the limit whose share a tool call has, where the run itself has none; by default `seconds`.
    """
    whole = seconds if tools_of is None else tools_of
    token, tools = _limit.set(seconds), _tool_limit.set(None if whole is None else whole * TOOL_SHARE)
    try:
        yield
    finally:
        _limit.reset(token)
        _tool_limit.reset(tools)


def current_limit() -> float | None:
    """Seconds that a call has here."""
    return _limit.get()


def current_tool_limit() -> float | None:
    """Seconds that a tool call has here; None outside of `limited`."""
    return _tool_limit.get()


def within_limit(call: Callable[[], T], what: str) -> T:
    """What a call gives. It sees the context variables of its caller, and sets its own.

    Args:
        what: was called, for the message.
    Raises:
        OverTime: it took longer than the limit that is open here.
        RaisedInside: it raised `KeyboardInterrupt`, or an exception whose message cannot be read.
        BaseException: whatever else it raises.
    """
    seconds = _limit.get()
    if seconds is None:
        return call()
    return _apart(call, seconds, lambda job: OverTime(what, seconds, asking=job.asking > 0))


def _apart(call: Callable[[], T], seconds: float, late: Callable[[_Job], OverTime | None]) -> T:
    """What a call in a thread of its own gives.

    Args:
        late: told after `seconds`, and each time that they have passed again: what to raise, or None to wait on.
    """
    job = _Job(call, _job.get())
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.jobs.put((contextvars.copy_context(), job))
    over = None
    try:
        while over is None and not job.running.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            over = late(job)
    except BaseException:  # the user stops the run: nobody waits for the call
        job.abandon(worker.thread)
        raise
    over = over or job.over
    if over is not None and job.abandon(worker.thread):
        raise over
    if job.error is not None:
        try:
            raise job.error
        finally:
            job.error = None  # its traceback holds this frame
    found: T = job.result
    return found


@contextmanager
def asking_model() -> Iterator[None]:
    """Inside, a model is asked on behalf of the limited calls that are open here."""
    jobs, job = [], _job.get()
    while job is not None:
        jobs.append(job)
        job = job.outer
    for one in jobs:
        one.asking, one.asked = one.asking + 1, True
    try:
        yield
    finally:
        for one in jobs:
            one.asking -= 1
