"""The thread that writes a store's rows in batches, at least every 0.25 s.

Does not access a database: a function that commits a batch is passed to it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

Rows = dict[str, dict[Any, Any]]  # by table and key; the latest of a key

_BATCH = 500  # rows per transaction
_INTERVAL_S = 0.25
_MOST = 50_000  # waiting rows from which `put` blocks
_LARGE = 16 << 10  # bytes from which a row's size is counted: counting takes a lock, which costs more than a small row
MAX_WAITING_BYTES = 128 << 20  # of waiting large rows from which `put` blocks
BATCH_BYTES = 32 << 20
_RETRY_S = 0.5  # seconds between tries while the database is unreachable


class Writer:
    """Takes rows from any thread, in order.

    Putting a row costs an append: it takes no lock and wakes the thread only if the queue was empty. Waking it for each
    row took a third of an evaluation's time.

    Args:
        commit: writes a batch; must not raise. False means that the database is unreachable and the rows are kept
            elsewhere; it is then called again, with an empty batch if no rows wait, until it returns True.
        refuse: called with the table's name of a row that is dropped because the queue is full; None: `put` blocks.
        away: whether the database is unreachable at the start.
    """

    def __init__(
        self, commit: Callable[[Rows], bool], refuse: Callable[[str], None] | None = None, *, unreachable: bool = False
    ) -> None:
        self._commit, self.refuse, self._unreachable = commit, refuse, unreachable
        self._bytes, self._lock = 0, threading.Lock()
        self._flushes: list[threading.Event] = []  # to be set once the database is reachable again
        # Each item: (table, key, row, size), an event to set once all items before it are committed, or None to end.
        self._waiting: deque[Any] = deque()
        self._some = threading.Event()
        self._hurry = threading.Event()  # a batch is full, or `flush` or `end` waits
        self._thread = threading.Thread(target=self._write_forever, name="assay-store", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, table: str, key: Any, row: Any, *, size: int = 0) -> None:
        """Adds a row; blocks while the queue is full, unless `refuse` is given.

        Args:
            size: approximate bytes of the row; 0 if it is small.
        """
        if self.refuse is not None and self._full:
            self.refuse(table)
            return
        if size > _LARGE:
            with self._lock:
                self._bytes += size
        self._add((table, key, row, size))
        if len(self._waiting) >= _BATCH or self._bytes > BATCH_BYTES:
            self._hurry.set()
            while self.refuse is None and self._full and self.alive:
                time.sleep(0.01)

    @property
    def _full(self) -> bool:
        return len(self._waiting) > _MOST or self._bytes > MAX_WAITING_BYTES

    @property
    def waiting(self) -> int:
        """Number of rows in the queue; events of `flush` are in it too."""
        return sum(isinstance(item, tuple) for item in self._waiting.copy())

    @property
    def calls_waiting(self) -> int:
        """Number of transitions in the queue."""
        return sum(isinstance(item, tuple) and item[0] == "transitions" for item in self._waiting.copy())

    def flush(self, timeout_s: float) -> bool:
        """Waits until all rows put before are committed; False after `timeout_s`."""
        committed = threading.Event()
        self._add(committed)
        self._hurry.set()
        return committed.wait(timeout_s)

    def end(self, timeout_s: float = 0.0) -> bool:
        """Ends the thread once all rows put before are committed; True if it ended within `timeout_s`."""
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
            self._some.wait(_RETRY_S if self._unreachable else None)
            self._hurry.wait(_INTERVAL_S)
            rows, last = self._next_batch()
            if isinstance(last, threading.Event):
                self._flushes.append(last)
            self._unreachable = not self._commit(rows)
            while not self._unreachable and self._flushes:
                self._flushes.pop().set()

    def _next_batch(self) -> tuple[Rows, Any]:
        """The next batch, up to its size limits or the next event, and the last item taken."""
        self._some.clear()  # before the queue is read, so that a row added meanwhile sets it again
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
            if large > BATCH_BYTES:
                break
        if large:
            with self._lock:
                self._bytes -= large
        if self._waiting:
            self._some.set()
            self._hurry.set()
        return rows, item
