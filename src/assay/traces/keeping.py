"""Keeps what a database does not take at once: writes batches in a thread of its own, and puts them into a file where that takes longer.

So a process that is killed loses what was put in the last second and no more, also where its database is locked, away, or hangs. Knows no
database: it is given what writes.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

from assay.traces.spill import Spill
from assay.traces.writer import Rows

__all__ = ["Keeper"]

_WITHIN_S = 0.4  # that a batch may take before it goes into the file too


class Keeper:
    """`behind` while what earlier processes left is not in the database; it comes before all else: a row must not be replaced by an older one.

    Args:
        write: writes a batch; whether the database took it, or refused it. False: it is away. It must not raise.
        take_left: writes what earlier processes left; False: the database is away.
        retry_s: between tries while the database is away.
    """

    def __init__(self, spill: Spill, write: Callable[[Rows], bool], take_left: Callable[[], bool], *, retry_s: float) -> None:
        self._spill, self._write, self._take_left, self._retry_s = spill, write, take_left, retry_s
        self._job: _Job | None = None
        self._in_hand = 0
        self.behind = not take_left()
        self._tried = time.monotonic() if self.behind else -retry_s

    @property
    def waiting(self) -> int:
        """Rows that were given and are not in the database yet, about."""
        return self._in_hand + self._spill.rows

    def commit(self, rows: Rows) -> bool:
        """Takes a batch: writes it, or puts it into the file. Returns whether all that was given so far is in the database, or was refused by it."""
        while True:
            self._in_hand = sum(map(len, rows.values()))
            job = self._job = self._job or self._begun(rows)
            if job is None:
                return True
            if job.rows is not rows and rows and self._spill.put(rows):  # first: it is safe there
                rows, self._in_hand = {}, 0
            ended = job.ended.wait(_WITHIN_S)
            if ended:
                self._end(job)
                rows = {} if job.done and job.rows is rows else rows
            if job.rows is rows and rows and self._spill.put(rows):
                job.copied, rows = not ended, {}
            if not rows:
                self._in_hand = 0
                return self._job is None and not self._before
            if ended and not job.done:
                time.sleep(self._retry_s)  # the file is full, or its disk: these rows wait here, and those behind them in memory

    @property
    def _before(self) -> bool:
        """Whether there is something that must be written first."""
        return self.behind or bool(self._spill.rows)

    def _begun(self, rows: Rows) -> "_Job | None":
        if self._before:
            return _Job(self._drained)
        return _Job(partial(self._write, rows), rows) if rows else None

    def _end(self, job: "_Job") -> None:
        self._job = None
        if job.done and job.copied:
            self._spill.skip()

    def _drained(self) -> bool:
        """Whether nothing waits in files any more. The database is not asked more often than every `retry_s`."""
        if time.monotonic() - self._tried < self._retry_s:
            return False
        self.behind = self.behind and not self._take_left()
        while not self.behind and (batch := self._spill.first()) is not None:
            if not self._write(batch):
                break
            self._spill.skip()
        if self._before:
            self._tried = time.monotonic()
        return not self._before


class _Job:
    """Something that waits for the database, in a thread that nobody has to wait for. `done`: what it returned.

    Args:
        rows: those that it writes, where they came just now. `copied`: they were put into the file meanwhile.
    """

    def __init__(self, function: Callable[[], bool], rows: Rows | None = None) -> None:
        self._function, self.rows = function, rows
        self.copied = self.done = False
        self.ended = threading.Event()
        threading.Thread(target=self._run, name="assay-store-write", daemon=True).start()

    def _run(self) -> None:
        try:
            self.done = self._function()
        finally:
            self.ended.set()
