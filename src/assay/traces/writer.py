"""The thread that writes a store's rows in batches, at least every quarter of a second. It knows no database: it is given what commits."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Rows", "Writer"]

Rows = dict[str, dict[Any, Any]]  # by table and key; the latest of a key

_BATCH = 500  # rows a transaction
_INTERVAL_S = 0.25
_MOST = 50_000  # rows that may wait before those who put them do
_LARGE = 16 << 10  # bytes of a row from which on its size counts: a lock for each row would cost more than the row
_MOST_BYTES = 128 << 20  # of large rows that may wait
_BATCH_BYTES = 32 << 20
_RETRY_S = 0.5  # between tries while the database is away


class Writer:
    """Takes rows from any thread, in order.

    Putting one costs an append: no lock is taken, and nobody is woken but a writer that has nothing at all to do. Waking it for each row took a
    third of an evaluation's time.

    Args:
        commit: takes a batch; it must not raise. False: the database is away, and what has been put so far waits elsewhere. It is then called
            again, if need be without rows, until it returns True.
        away: whether it is away already.
        refuse: what is called with a row that cannot wait any more, because too many do; None: who puts it waits.
    """

    def __init__(self, commit: Callable[[Rows], bool], refuse: Callable[[str], None] | None = None, *, away: bool = False) -> None:
        self._commit, self.refuse, self._away = commit, refuse, away
        self._bytes, self._lock = 0, threading.Lock()
        self._flushes: list[threading.Event] = []  # to be set once the database is back
        self._waiting: deque[Any] = deque()  # (table, key, row, size), an event to set once all before it is committed, or None: the end
        self._some = threading.Event()
        self._hurry = threading.Event()  # a batch is full, or somebody waits for it
        self._thread = threading.Thread(target=self._write_forever, name="assay-store", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, table: str, key: Any, row: Any, *, size: int = 0) -> None:
        """Args:
        size: bytes of the row, about, where it may be large.
        """
        if self.refuse is not None and self._full:
            self.refuse(table)
            return
        if size > _LARGE:
            with self._lock:
                self._bytes += size
        self._add((table, key, row, size))
        if len(self._waiting) >= _BATCH or self._bytes > _BATCH_BYTES:
            self._hurry.set()
            while self.refuse is None and self._full and self.alive:
                time.sleep(0.01)

    @property
    def _full(self) -> bool:
        return len(self._waiting) > _MOST or self._bytes > _MOST_BYTES

    @property
    def waiting(self) -> int:
        """Rows that were put and not taken yet."""
        return len(self._waiting)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything put before is committed; False where that took too long."""
        done = threading.Event()
        self._add(done)
        self._hurry.set()
        return done.wait(timeout_s)

    def end(self, timeout_s: float = 0.0) -> bool:
        """The thread ends once everything put before is committed; whether it has after so long."""
        self._add(None)
        self._hurry.set()
        self._thread.join(timeout_s)
        return not self.alive

    def _add(self, item: Any) -> None:
        self._waiting.append(item)
        if not self._some.is_set():
            self._some.set()

    def _write_forever(self) -> None:
        last: Any = ()
        while last is not None:
            self._some.wait(_RETRY_S if self._away else None)
            self._hurry.wait(_INTERVAL_S)
            rows, last = self._next_batch()
            if isinstance(last, threading.Event):
                self._flushes.append(last)
            self._away = not self._commit(rows)
            while not self._away and self._flushes:
                self._flushes.pop().set()

    def _next_batch(self) -> tuple[Rows, Any]:
        """What has been put, up to a batch or to where somebody waits; and the last of it."""
        self._some.clear()  # before it looks: what is added from now on sets it again
        self._hurry.clear()
        rows: Rows = {}
        item: Any = ()
        large = 0
        for _ in range(_BATCH):
            if not self._waiting:
                break
            item = self._waiting.popleft()
            if not isinstance(item, tuple):
                break
            table, key, row, size = item
            rows.setdefault(table, {})[key] = row
            large += size if size > _LARGE else 0
            if large > _BATCH_BYTES:
                break
        if large:
            with self._lock:
                self._bytes -= large
        if self._waiting:
            self._some.set()
            self._hurry.set()
        return rows, item
