"""Time limits for code that is not assay's: agents, tools, checks and judges. Imports no model.

A limited call runs in a thread of its own, because a thread that hangs can be abandoned, but not terminated. An
exception stops an abandoned thread at the next line of Python that it executes, and is raised again every 5 s until the
thread ends. A call that hangs in C code keeps its thread until that code returns. Code that never releases the
interpreter lock (Python's `re` on a bad pattern) cannot be limited from within the process.

A model call is never interrupted: its answer is paid for. An abandoned thread ends after the model call in progress,
once that is recorded, and makes no further one.
"""

import contextvars
import ctypes
import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, TypeVar

from assay.models.scope import having, pin_place
from assay.support.systems import after_fork

DEFAULT_S = 600.0
LAST_CALLS_S = 30.0  # for the answers to calls in flight when a run is stopped; a second Ctrl-C ends at once
STOP_AGAIN_S = 5.0  # time for the `finally` clauses of an abandoned call
TOOL_SHARE = 0.25  # share of a run's limit: after a tool that hangs, the agent has time for other tools and its answer
T = TypeVar("T")
_limit: ContextVar[float | None] = ContextVar("assay_task_timeout", default=DEFAULT_S)
_tool_limit: ContextVar[float | None] = ContextVar("assay_tool_timeout", default=None)
_idle: "list[_Worker]" = []
after_fork(_idle.clear)  # a forked process has none of these threads


class OverTime(TimeoutError):
    """A call exceeded its limit. `in_model_call`: a model call was in progress; a slow server may be the cause."""

    def __init__(self, subject: str, limit_s: float, *, in_model_call: bool) -> None:
        super().__init__(
            f"{subject} took longer than the limit of {limit_s:g} s"
            + (", while a model was being asked" if in_model_call else "")
        )
        self.in_model_call = in_model_call


class Abandoned(BaseException):
    """Raised in an abandoned thread. A `BaseException`, so that `except Exception` does not catch it."""


class StoppableThread(threading.Thread):
    """A daemon thread that ends when `stop` raises `Abandoned` in it, at the next line of Python that it executes.

    Python addresses a thread by an identifier that the next thread gets once this one has ended. Therefore an exception
    is raised under a lock that this thread takes before it ends.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._open = threading.Lock()
        self._over = False

    def run(self) -> None:
        try:
            super().run()
        except Abandoned:
            pass
        finally:
            self._end()

    def stop(self) -> None:
        """Raise `Abandoned` in this thread, unless it has ended."""
        with self._open:
            if not self._over and self.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(Abandoned))

    def _end(self) -> None:
        while not self._over:
            try:
                with self._open:
                    self._over = True
            except Abandoned:
                continue


class RaisedInside(RuntimeError):
    """Replaces an exception that must not leave its thread: `KeyboardInterrupt`, or one with an unreadable message."""


def _portable(error: BaseException) -> BaseException:
    """The exception in a form that the waiting thread may raise.

    Python raises Ctrl-C in the main thread only. A `KeyboardInterrupt` in the thread of a limited call was therefore
    raised by the call, and must not stop the job. The message is read here because `__str__` is code of the call too.
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
        replacement = RaisedInside(
            f"it raised {type(error).__name__}, whose message cannot be read ({type(unread).__name__})"
        )
        return replacement.with_traceback(error.__traceback__)
    return error


class LimitedCall:
    """One call with a limit. `outer` is the limited call that it runs in, or None."""

    def __init__(self, outer: "LimitedCall | None") -> None:
        self.outer = outer
        self.in_model_call, self.called_model = 0, False  # model calls in progress; whether there was any
        self.abandoned = self.overdue = False  # nobody waits for it any more; because it exceeded its limit


class _Job(LimitedCall):
    """One call in a thread of its own, with its result or error."""

    def __init__(self, call: Callable[[], Any], outer: LimitedCall | None) -> None:
        super().__init__(outer)
        self.call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self.over: OverTime | None = None  # set by `leave`: the waiting thread raises it
        # held until the call finishes; waiting for a lock takes half as long as waiting for an event
        self.running = threading.Lock()
        self.running.acquire()
        self.lock = threading.Lock()
        self.done = False

    def run(self) -> None:
        _job.set(self)
        try:
            self.result = self.call()
        except BaseException as error:  # raised again in the waiting thread
            self.error = _portable(error)

    def finish(self) -> bool:
        """Mark the call as finished; return whether a thread still waits for it."""
        with self.lock:
            self.done = True
            if self.over is None:
                self.running.release()
            return not self.abandoned

    def leave(self, over: OverTime) -> None:
        """Make the waiting thread raise `over` instead of waiting on."""
        with self.lock:
            if not self.done and self.over is None:
                self.over = over
                self.running.release()

    def abandon(self, thread: StoppableThread) -> bool:
        """Stop waiting, and raise `Abandoned` in the thread. Returns False if the call has just finished."""
        with self.lock:
            if self.done:
                return False
            self.abandoned = True
        self._stop(thread)
        threading.Thread(target=self._insist, args=(thread,), name="assay-abandoned", daemon=True).start()
        return True

    def _insist(self, thread: StoppableThread) -> None:
        """Stop the thread again until it ends. Python drops an exception that arrives in a destructor or in the
        callback of a weak reference (one in eight, in a call that validates a schema), and the call may catch it."""
        while True:
            thread.join(STOP_AGAIN_S)
            if not thread.is_alive():
                return
            self._stop(thread)

    def _stop(self, thread: StoppableThread) -> None:
        with self.lock:
            # once done, the thread has the job of somebody else; a model call ends first, see `asking_model`
            if not self.done and not self.in_model_call:
                thread.stop()


_job: ContextVar[LimitedCall | None] = ContextVar("assay_limited_job", default=None)


def innermost() -> LimitedCall | None:
    """The innermost limited call that the current code runs in; None outside."""
    return _job.get()


def inside(call: LimitedCall) -> AbstractContextManager[LimitedCall | None]:
    """Inside, `call` is the innermost limited call."""
    return having(_job, call)


def run_of(call: LimitedCall) -> _Job | None:
    """The enclosing call that runs in a thread of its own; None if there is none."""
    outer = call.outer
    while outer is not None and not isinstance(outer, _Job):
        outer = outer.outer
    return outer


class _Worker:
    """A daemon thread that runs one job after another, and ends after an abandoned one."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[contextvars.Context, _Job]] = SimpleQueue()
        self.thread = StoppableThread(self._work, "assay-limited")
        self.thread.start()

    def _work(self) -> None:
        while True:
            context, job = self.jobs.get()
            context.run(job.run)
            reusable = job.finish()
            del context, job  # an idle thread holds no references
            if not reusable:
                return
            _idle.append(self)


_given_up: ContextVar[Callable[[], float | None]] = ContextVar("assay_given_up", default=lambda: None)


def given_up() -> float | None:
    """The limit in seconds that the pool gave up this run at; None while a result is waited for.

    For runs that wait for something outside of Python, and can end it.
    """
    return _given_up.get()()


def giving_up(asked: Callable[[], float | None]) -> AbstractContextManager[object]:
    """Inside, `given_up` calls `asked`."""
    return having(_given_up, asked)


@contextmanager
def limited(seconds: float | None, *, tools_of: float | None = None) -> Iterator[None]:
    """Inside, `within_limit` limits calls to `seconds`; None is not a limit.

    Args:
        tools_of: limit of the run, of which a tool call gets the share `TOOL_SHARE`; None: `seconds`.
    """
    run_limit = seconds if tools_of is None else tools_of
    with having(_limit, seconds), having(_tool_limit, None if run_limit is None else run_limit * TOOL_SHARE):
        yield


def current_limit() -> float | None:
    """Limit of a call made here, in seconds; None is not a limit."""
    return _limit.get()


def current_tool_limit() -> float | None:
    """Limit of a tool call made here, in seconds; None outside of `limited`."""
    return _tool_limit.get()


def within_limit(call: Callable[[], T], subject: str) -> T:
    """Result of a call under the current limit. The call shares the context variables of its caller.

    Args:
        subject: name of the call for the error message.
    Raises:
        OverTime: the call exceeded the limit.
        RaisedInside: it raised `KeyboardInterrupt`, or an exception whose message cannot be read.
        BaseException: any other exception of the call.
    """
    seconds = _limit.get()
    if seconds is None:
        return call()
    return _in_thread(call, seconds, lambda job: OverTime(subject, seconds, in_model_call=job.in_model_call > 0))


def _in_thread(call: Callable[[], T], seconds: float, late: Callable[[_Job], OverTime | None]) -> T:
    """Result of a call in a thread of its own.

    Args:
        late: called every `seconds` until the call finishes; returns the exception to raise, or None to wait on.
    """
    job = _Job(call, _job.get())
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    context = contextvars.copy_context()
    context.run(pin_place)
    worker.jobs.put((context, job))
    over = None
    try:
        while over is None and not job.running.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            over = late(job)
    except BaseException:  # the user stops the run: no thread waits for the call
        job.abandon(worker.thread)
        raise
    over = over or job.over
    if over is not None and job.abandon(worker.thread):
        job.overdue = True
        raise over
    if job.error is not None:
        try:
            raise job.error
        finally:
            job.error = None  # its traceback refers to this frame
    result: T = job.result
    return result


def uninterrupted(call: Callable[[], T]) -> T:
    """Result of a model call, in another thread if this is the main one: Ctrl-C raises an exception in the main
    thread, and the call has to end all the same."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    return _in_thread(call, threading.TIMEOUT_MAX, lambda job: None)


_asking_lock = threading.Lock()


@contextmanager
def asking_model() -> Iterator[None]:
    """Inside, a model call is in progress on behalf of all enclosing limited calls.

    Raises:
        Abandoned: at either end, if one of them was abandoned.
    """
    jobs = list(_enclosing(_job.get()))
    leave_if_abandoned()
    with _asking_lock:
        for open_job in jobs:
            open_job.in_model_call, open_job.called_model = open_job.in_model_call + 1, True
    try:
        yield
    finally:
        with _asking_lock:
            for open_job in jobs:
                open_job.in_model_call -= 1
    leave_if_abandoned()


def is_overdue(call: LimitedCall | None) -> bool:
    """Whether a limited call, or one around it, exceeded its limit."""
    return any(outer.overdue for outer in _enclosing(call))


def leave_if_abandoned() -> None:
    """Raise `Abandoned` in a call that nobody waits for any more."""
    if any(outer.abandoned for outer in _enclosing(_job.get())):
        raise Abandoned


def _enclosing(call: LimitedCall | None) -> Iterator[LimitedCall]:
    """A limited call and those around it."""
    while call is not None:
        yield call
        call = call.outer


# -- Time limit of a tool call inside of a limited run.
#
# A tool stays in the thread of its run, because what an agent opens (a connection of `sqlite3`, a page of Playwright)
# often belongs to the thread that opened it. A tool that exceeds its limit is stopped at the next line of Python that
# it executes, and its run continues. If it hangs in C code (a socket without a timeout), only the whole run can be
# abandoned.


_GRACE_S = 1.0  # time for a stopped call to execute its next line of Python


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


after_fork(_new_clock)  # a forked process has no clock thread


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
