"""One episode of an environment under limits: in a thread of its own, with checked results.

Whatever an environment does wrong (raise, hang, return something else) is an `EnvironmentFailed` with what it did.
Does not choose actions.
"""

import contextvars
import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from assay.datasets import Task
from assay.errors import EnvironmentFailed
from assay.models.failures import stop_in
from assay.models.limits import StoppableThread, current_tool_limit, limited
from assay.programs.environments.base import Environment, EnvironmentStep, InvalidAction
from assay.support.scrubbing import error_text
from assay.traces.listening import run_tool

__all__ = ["Play"]

_TICK_S = 0.2  # after so long a stopped run notices that it was stopped
_ACTION_CHARS = 80  # characters of an action in messages


class _Call:
    """One call in the environment's thread, with its result or error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.context = work, contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.result = self.context.run(self.work)
        except BaseException as error:  # raised again in the waiting thread
            self.error = error
        finally:
            self.done.set()


class _Thread:
    """A daemon thread that makes all calls of one environment.

    It is one thread, because what an environment opens (a connection of `sqlite3`, a browser) belongs to it.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self.abandoned = False
        self._thread = StoppableThread(self._work, "assay-environment")
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()

    def run(self, work: Callable[[], Any], seconds: float) -> _Call | None:
        """The finished call; None if it took longer than `seconds`, and the thread is then abandoned."""
        call = _Call(work)
        self._calls.put(call)
        until = time.monotonic() + seconds
        try:
            while not call.done.wait(max(0.0, min(_TICK_S, until - time.monotonic()))):
                if time.monotonic() >= until:
                    self.abandon()
                    return None
        except BaseException:  # the whole run was stopped
            self.abandon()
            raise
        return call

    def abandon(self) -> None:
        """Stops the thread at the next line of Python that it executes. It makes no calls afterwards."""
        self.abandoned = True
        self._calls.put(None)
        self._thread.stop()

    def end(self) -> None:
        self._calls.put(None)


class Play:
    """One episode. A context manager, which closes the environment.

    Args:
        make: makes the environment, in the thread that uses it.
        timeout_s: of each call of it, in seconds; a run's time limit for tools is also a limit.
    """

    name = "environment"  # of its tool calls in traces

    def __init__(self, make: Callable[[], Environment], timeout_s: float) -> None:
        tool_limit = current_tool_limit()
        self._make, self._limit_s = make, timeout_s if tool_limit is None else min(timeout_s, tool_limit)
        self._subject = str(getattr(make, "__name__", type(make).__name__))
        self._environment: Any = None
        self._thread = _Thread()
        self._failed = False
        self._rewards = 0.0

    def __enter__(self) -> "Play":
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            if self._environment is not None and not self._failed and not self._thread.abandoned:
                self._limited(self._environment.close, "close()")
        except EnvironmentFailed:
            if raised == (None, None, None):  # otherwise the first failure is the one to report
                raise
        finally:
            self._thread.end()

    def reset(self, task: Task) -> EnvironmentStep:
        """Makes the environment and starts its episode.

        Raises:
            EnvironmentFailed: it raised, took too long, or returned something that is no step or is done.
        """
        self._environment = self._limited(self._make, "its constructor")
        if not isinstance(self._environment, Environment):
            kind = type(self._environment).__name__
            raise self._failure(f"is a {kind}: it needs reset(task), step(action) and close()")
        self._subject = type(self._environment).__name__
        first = self._checked(lambda: self._environment.reset(task), "reset(task)")
        if first.done:
            raise self._failure("returned done=True from reset(task): there is nothing to act on")
        return first

    def step(self, action: str) -> EnvironmentStep:
        """Executes an action. It is recorded as a tool call.

        Raises:
            InvalidAction: the environment refused the action.
            EnvironmentFailed: it raised, took too long, or returned something that is no step, or the sum of the
                rewards is not finite.
        """
        short = action if len(action) <= _ACTION_CHARS else f"{action[:_ACTION_CHARS]}…"
        steps: list[EnvironmentStep] = []

        def act() -> str:
            steps.append(self._checked(lambda: self._environment.step(action), f"step({short!r})"))
            return steps[0].observation

        with limited(None):  # the limit is that of this class: a tool over time is the agent's failure
            run_tool(self, {"action": action}, act)
        self._rewards += steps[0].reward
        if not math.isfinite(self._rewards):
            raise self._failure(f"gave rewards that add up to {self._rewards}: keep their sum finite")
        return steps[0]

    def _checked(self, call: Callable[[], Any], what: str) -> EnvironmentStep:
        result = self._limited(call, what)
        if not isinstance(result, EnvironmentStep):
            raise self._failure(f"returned {str(result)[:_ACTION_CHARS]!r} from {what}, which is no EnvironmentStep")
        return result

    def _limited(self, call: Callable[[], Any], what: str) -> Any:
        if self._thread.abandoned:
            raise self._failure(f"was given up, because it gave no result in time; {what} was not called")
        finished = self._thread.run(call, self._limit_s)
        if finished is None:
            raise self._failure(f"gave no result of {what} after {self._limit_s:g} s")
        error = finished.error
        if error is None:
            return finished.result
        if isinstance(error, InvalidAction) and what.startswith("step("):
            raise error
        if isinstance(error, EnvironmentFailed):  # it says itself what went wrong
            self._failed = True
            raise error
        if (stop := stop_in(error)) is not None:
            raise stop from error
        raise self._failure(f"raised {error_text(error)} in {what}") from error

    def _failure(self, what: str) -> EnvironmentFailed:
        self._failed = True
        return EnvironmentFailed(f"the environment {self._subject} {what}")
