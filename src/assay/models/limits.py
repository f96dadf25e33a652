"""A time limit on code of others: agents, tools, checks and judges. Imports no model.

The call runs in a thread of its own, because one that hangs can be left but not ended. What is left behind is stopped at the next line of Python
that it reaches; a call that hangs in C code keeps its thread until that returns. Code that holds the interpreter's lock for ever (Python's `re`
on a bad pattern) cannot be limited from within the process.
"""

import contextvars
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["DEFAULT_S", "Abandoned", "OverTime", "asking_model", "current_limit", "limited", "within_limit"]

DEFAULT_S = 600.0
T = TypeVar("T")
_limit: ContextVar[float | None] = ContextVar("assay_task_timeout", default=DEFAULT_S)
_idle: "list[_Worker]" = []
os.register_at_fork(after_in_child=_idle.clear)  # threads do not come along


class OverTime(TimeoutError):
    """A call took longer than its limit. `asking`: a model was being asked at the time, so that it may be the server that is slow."""

    def __init__(self, what: str, limit_s: float, *, asking: bool) -> None:
        super().__init__(f"{what} took longer than the limit of {limit_s:g} s" + (", while a model was being asked" if asking else ""))
        self.asking = asking


class Abandoned(BaseException):
    """Raised in a thread that nobody waits for any more. No `except Exception` holds it."""


class _Job:
    """One call and what came of it."""

    def __init__(self, call: Callable[[], Any], outer: "_Job | None") -> None:
        self.call, self.outer = call, outer
        self.result: Any = None
        self.error: BaseException | None = None
        self.asking = 0
        self.done, self.lock = threading.Event(), threading.Lock()
        self.abandoned = False

    def run(self) -> None:
        _job.set(self)
        try:
            self.result = self.call()
        except BaseException as error:  # it belongs to whoever waits
            self.error = error

    def finish(self) -> bool:
        """Whether somebody still waits."""
        with self.lock:
            self.done.set()
            return not self.abandoned

    def abandon(self, thread: threading.Thread) -> bool:
        """Stops waiting. False where it has just finished."""
        with self.lock:
            if self.done.is_set():
                return False
            self.abandoned = True
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
        return True


_job: ContextVar[_Job | None] = ContextVar("assay_limited_job", default=None)


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


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Inside, `within_limit` gives a call so many seconds; None for ever."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


def current_limit() -> float | None:
    """Seconds that a call has here."""
    return _limit.get()


def within_limit(call: Callable[[], T], what: str) -> T:
    """What a call gives. It sees the context variables of its caller, and sets its own.

    Args:
        what: was called, for the message.
    Raises:
        OverTime: it took longer than the limit that is open here.
        BaseException: whatever it raises.
    """
    seconds = _limit.get()
    if seconds is None:
        return call()
    job = _Job(call, _job.get())
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.jobs.put((contextvars.copy_context(), job))
    try:
        job.done.wait(seconds)
    except BaseException:  # the user stops the run: nobody waits for the call
        job.abandon(worker.thread)
        raise
    if job.abandon(worker.thread):
        raise OverTime(what, seconds, asking=job.asking > 0)
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
        one.asking += 1
    try:
        yield
    finally:
        for one in jobs:
            one.asking -= 1
