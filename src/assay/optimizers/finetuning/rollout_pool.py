"""Runs rollouts in threads with a time limit. Does not train, and knows no engine."""

import contextvars
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from assay.datasets import Task
from assay.errors import Cancelled
from assay.evaluation.session import RecordedProgram, Session
from assay.models.limits import giving_up, limited
from assay.programs.foreign.tasks import RunnerLost

Run = tuple[RecordedProgram, Task]
CHECK_S = 0.1  # interval of the timeout checks while rollouts run
_ATTEMPTS = 3  # runs of a task whose runner is lost each time

place_in_pool: contextvars.ContextVar[int] = contextvars.ContextVar("assay_place", default=0)


class TimeoutPool:
    """Runs calls in at most `size` daemon threads at a time.

    A call that exceeds `timeout_s` is abandoned: it keeps its thread, and a new thread takes its place.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], size: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.queued = list(reversed(list(enumerate(calls))))
        self.results: dict[int, Any] = {}
        self.errors: list[BaseException] = []
        self.began: dict[int, float] = {}
        self.abandoned: set[int] = set()
        self.count = len(calls)
        self.changed = threading.Condition()
        self.size = min(size, len(calls))

    def start(self) -> None:
        for _ in range(self.size):
            self._hire()

    def _hire(self) -> None:
        threading.Thread(
            target=contextvars.copy_context().run, args=(self._work,), daemon=True, name="assay-rollouts"
        ).start()

    def _work(self) -> None:
        while True:
            with self.changed:
                if not self.queued or self.errors:
                    return
                at, call = self.queued.pop()
                self.began[at] = time.monotonic()
            place_in_pool.set(at)
            result, error = None, None
            try:
                with giving_up(lambda at=at: self.timeout_s if at in self.abandoned else None):  # type: ignore[misc]
                    result = call()
            except BaseException as failure:  # raised again in the waiting thread, by `check_calls`
                error = failure
            with self.changed:
                self.began.pop(at, None)
                late = at in self.abandoned
                if not late:
                    if error is not None:
                        self.errors.append(error)
                    self.results[at] = result
                self.changed.notify_all()
            if late:
                return

    @property
    def active(self) -> int:
        """Number of running calls, without the abandoned ones."""
        return len(self.began)

    @property
    def done(self) -> bool:
        return bool(self.errors) or len(self.results) == self.count

    def check_calls(self, stop: threading.Event | None) -> None:
        """Abandons calls that exceed the limit; raises the error of a failed call. Call it with `changed` held."""
        if stop is not None and stop.is_set():
            self.queued.clear()
            raise Cancelled("stopped by a signal")
        if self.errors:
            raise self.errors[0]
        now = time.monotonic()
        for at in [at for at, since in self.began.items() if now - since > self.timeout_s]:
            del self.began[at]
            self.abandoned.add(at)
            self.results[at] = None
            self._hire()

    def waited(self, seconds: float) -> None:
        """Excludes seconds spent waiting for the engine from all time limits. Call it with `changed` held."""
        self.began = {at: since + seconds for at, since in self.began.items()}

    def ordered(self) -> list[Any | None]:
        return [self.results[at] for at in range(self.count)]

    def finished(self, stop: threading.Event | None) -> list[Any | None]:
        """Runs all calls. Returns their results in order; None for a call that took longer than `timeout_s`.

        Raises:
            Cancelled: `stop` was set.
        """
        self.start()
        with self.changed:
            while True:
                self.check_calls(stop)
                if self.done:
                    return self.ordered()
                self.changed.wait(CHECK_S)


def calls_of(runs: Sequence[Run], session: Session) -> list[Callable[[], Any]]:
    """The runs as calls. A run whose runner is lost is made again, as another rollout."""

    def call(recorded: RecordedProgram, task: Task) -> Any:
        # no limit here: the pool has its own, which excludes the time spent waiting for the engine
        with session.context(), limited(None):
            for _ in range(_ATTEMPTS):
                run = recorded.run(task)
                if not isinstance(run.error, RunnerLost):
                    break
            return run

    return [functools.partial(call, *run) for run in runs]
