"""Jobs in daemon threads. At a cap, jobs in progress are waited for; after Ctrl-C they are not.

`ThreadPoolExecutor` waits for them at the end of its `with` block and at the end of the process: for a slow server up
to the time limit of a call.
"""

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from assay.errors import BudgetExceeded, Cancelled

T = TypeVar("T")
Around = Callable[[], AbstractContextManager[Any]]
_MAX_WAIT_S = 0.05  # longest wait in seconds before finished jobs are yielded
_AT_ONCE = 16  # first jobs, each of which is yielded at once: they may show that the others are not worth their calls


def as_finished(
    job: Callable[[int], T], count: int, *, threads: int, around: Around = nullcontext, drop: bool = False
) -> Iterator[tuple[int, T]]:
    """Calls `job(0)` to `job(count - 1)`, `threads` at a time; yields (index, result) as they finish.

    An exception ends the iteration after the jobs finished before it were yielded. At a cap, jobs in progress are
    waited for and yielded too: their calls are answered and paid for. Otherwise they are dropped if the user stopped
    the run or with `drop`, else waited for.

    Args:
        job: called in a copy of the caller's context; what it sets is its own.
        around: entered once in each thread.
        drop: an exception other than a cap does not wait for jobs in progress.
    """
    jobs = _Jobs(job, count, around)
    jobs.start(threads)
    yield from jobs.results(drop=drop)


def in_order(job: Callable[[int], T], count: int, *, threads: int) -> list[T]:
    """The results of `as_finished` in the order of the jobs."""
    results = dict(as_finished(job, count, threads=threads))
    return [results[index] for index in range(count)]


def in_background(job: Callable[[], T]) -> Callable[[], T]:
    """Starts a job; the function that is returned waits for its result."""
    jobs = _Jobs(lambda _: job(), 1, nullcontext)
    jobs.start(1)
    return lambda: next(jobs.results(drop=True))[1]


class _Jobs(Generic[T]):
    """State shared by the threads.

    The collecting thread is woken by the first jobs and once all are done, not by each job: for a program that answers
    immediately, one wake-up per run took as long as recording the run.
    """

    def __init__(self, job: Callable[[int], T], count: int, around: Around) -> None:
        self.job, self.count, self.around = job, count, around
        self.next = iter(range(count))
        self.done: deque[tuple[int, T]] = deque()
        self.failed: BaseException | None = None
        self.stopped = False
        self.finished = threading.Event()
        self.threads: list[threading.Thread] = []

    def start(self, threads: int) -> None:
        for _ in range(min(max(1, threads), self.count)):
            context = contextvars.copy_context()
            self.threads.append(threading.Thread(target=context.run, args=(self._work,), name="assay", daemon=True))
            self.threads[-1].start()

    def results(self, *, drop: bool) -> Iterator[tuple[int, T]]:
        try:
            remaining = self.count
            while remaining:
                self.finished.wait(_MAX_WAIT_S)
                self.finished.clear()
                failed = self.failed  # read first, so that every job that finished before the failure is among `done`
                if isinstance(failed, BudgetExceeded) or not (
                    drop or isinstance(failed, KeyboardInterrupt | Cancelled | None)
                ):
                    for thread in self.threads:
                        thread.join()
                while self.done:
                    yield self.done.popleft()
                    remaining -= 1
                if failed is not None:
                    raise failed
        finally:
            self.stopped = True

    def _work(self) -> None:
        try:
            with self.around():
                for index in self.next:
                    if self.stopped:
                        return
                    self.done.append((index, contextvars.copy_context().run(self.job, index)))
                    if index < _AT_ONCE:
                        self.finished.set()
        except BaseException as error:
            self.failed, self.stopped = self.failed or error, True
        finally:
            self.finished.set()
