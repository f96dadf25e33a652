"""Buffers batches that the database does not take at once: a thread writes them, a file holds them if that takes long.

A killed process therefore loses at most what was put in the last second, also while the database is locked, unreachable
or hangs. Does not access a database: the functions that write are arguments.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

from assay.traces.store.spill import Spill
from assay.traces.store.writer import Rows

_WITHIN_S = 0.4  # time that a batch may take before it is put into the file as well


class Keeper:
    """Writes batches in the order they come, through a file while the database is unreachable.

    `behind` is True until the rows left by earlier processes are in the database. They are written first, because a row
    must not be replaced by an older one.

    Args:
        write: writes a batch. True if the database took or refused it, False if the database is unreachable. Must not
            raise.
        write_leftovers: writes the rows left by earlier processes. False if the database is unreachable.
        retry_s: seconds between two attempts while the database is unreachable.
    """

    def __init__(
        self, spill: Spill, write: Callable[[Rows], bool], write_leftovers: Callable[[], bool], *, retry_s: float
    ) -> None:
        self._spill, self._write, self._write_leftovers, self._retry_s = spill, write, write_leftovers, retry_s
        self._job: _Job | None = None
        self._in_hand: Rows = {}
        self.behind = not write_leftovers()
        self._tried = time.monotonic() if self.behind else -retry_s

    @property
    def waiting(self) -> int:
        """Approximate number of accepted rows that are not in the database yet."""
        return sum(map(len, self._in_hand.values())) + self._spill.rows

    @property
    def calls_in_hand(self) -> int:
        """Number of transitions that are neither in the database nor in the file yet."""
        return len(self._in_hand.get("transitions", ()))

    def commit(self, rows: Rows) -> bool:
        """Writes a batch or puts it into the file. True if the database has taken or refused all rows so far."""
        while True:
            self._in_hand = rows
            job = self._job = self._job or self._begun(rows)
            if job is None:
                return True
            if job.rows is not rows and rows and self._spill.put(rows):  # before waiting, so that a kill loses nothing
                rows = self._in_hand = {}
            ended = job.ended.wait(_WITHIN_S)
            if ended:
                self._end(job)
                rows = {} if job.done and job.rows is rows else rows
            if job.rows is rows and rows and self._spill.put(rows):
                job.copied, rows = not ended, {}
            if not rows:
                self._in_hand = {}
                return self._job is None and not self._before
            if ended and not job.done:
                # The file or its disk is full: these rows wait here, later ones in memory.
                time.sleep(self._retry_s)

    @property
    def _before(self) -> bool:
        """Whether other rows must be written first."""
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
        """Writes the rows that wait in files. True if none is left. Tries at most once per `retry_s`."""
        if time.monotonic() - self._tried < self._retry_s:
            return False
        self.behind = self.behind and not self._write_leftovers()
        while not self.behind and (batch := self._spill.first()) is not None:
            if not self._write(batch):
                break
            self._spill.skip()
        if self._before:
            self._tried = time.monotonic()
        return not self._before


class _Job:
    """A function that waits for the database, run in a daemon thread.

    Attributes:
        done: the function's return value; False while it runs.
        copied: the rows were put into the file while the function ran.

    Args:
        rows: the new rows that the function writes; None if it writes rows from files.
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
