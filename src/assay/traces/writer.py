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


class Writer:
    """Takes rows from any thread, in order.

    Putting one costs an append: no lock is taken, and nobody is woken but a writer that has nothing at all to do. Waking it for each row took a
    third of an evaluation's time.

    Args:
        commit: writes a batch; it must not raise.
    """

    def __init__(self, commit: Callable[[Rows], None]) -> None:
        self._commit = commit
        self._waiting: deque[Any] = deque()  # (table, key, row), an event to set once all before it is committed, or None: the end
        self._some = threading.Event()
        self._hurry = threading.Event()  # a batch is full, or somebody waits for it
        self._thread = threading.Thread(target=self._write_forever, name="assay-store", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, table: str, key: Any, row: Any) -> None:
        self._add((table, key, row))
        if len(self._waiting) >= _BATCH:
            self._hurry.set()
            while len(self._waiting) > _MOST and self.alive:
                time.sleep(0.01)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything put before is committed; False where that took too long."""
        done = threading.Event()
        self._add(done)
        self._hurry.set()
        return done.wait(timeout_s)

    def end(self) -> None:
        """The thread ends once everything put before is committed."""
        self._add(None)
        self._hurry.set()

    def _add(self, item: Any) -> None:
        self._waiting.append(item)
        if not self._some.is_set():
            self._some.set()

    def _write_forever(self) -> None:
        last: Any = ()
        while last is not None:
            self._some.wait()
            self._hurry.wait(_INTERVAL_S)
            rows, last = self._next_batch()
            self._commit(rows)
            if isinstance(last, threading.Event):
                last.set()

    def _next_batch(self) -> tuple[Rows, Any]:
        """What has been put, up to a batch or to where somebody waits; and the last of it."""
        self._some.clear()  # before it looks: what is added from now on sets it again
        self._hurry.clear()
        rows: Rows = {}
        item: Any = ()
        for _ in range(_BATCH):
            if not self._waiting:
                return rows, item
            item = self._waiting.popleft()
            if not isinstance(item, tuple):
                break
            table, key, row = item
            rows.setdefault(table, {})[key] = row
        if self._waiting:
            self._some.set()
            self._hurry.set()
        return rows, item
