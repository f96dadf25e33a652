"""The thread that writes a store's rows in batches, at least every 0.25 s.

Does not access a database: a function that commits a batch is passed to it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from assay.support.places import files_of, left_files, opened_own, own_path, remove_own

Rows = dict[str, dict[Any, Any]]  # by table and key; the latest of a key
Owner = tuple[str, ...]  # lease of the job of the rows and its holder's token, then those that it is a part of

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


# -- Files that hold rows while the database is unreachable. The next process that opens the store reads leftover files.
#
# Does not write to a database: returns the rows in the order they were put.


_ENDING = ".spill"


def spill_path(file: Path | None, store_id: str) -> Path:
    """Path of a store's spill files without their ending: next to an SQLite file, else in `.assay/spill` by the
    store's own id, as its address or password may change."""
    return Path(".assay", "spill", store_id).absolute() if file is None else file.resolve()


class Spill:
    """A file of batches that wait until the database takes them.

    Args:
        path: the file without what `own_path` adds.
        most: maximum size in bytes.

    `owner` is stored with each batch that is added from then on.
    """

    def __init__(self, path: Path, most: int) -> None:
        self.path = own_path(path, _ENDING)
        self.most, self.rows = most, 0
        self.owner: Owner | None = None
        self._size = self._read = 0  # bytes written, and read back
        self._sizes: deque[tuple[int, int]] = deque()  # bytes and rows of each batch
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()  # one thread puts batches, another takes them

    def put(self, rows: Rows) -> bool:
        """Adds a batch; False if it exceeds `most` or the disk refuses the write."""
        entries = [(table, key, row) for table, by_key in rows.items() for key, row in by_key.items()]
        line = b"%d %b\n" % (len(entries), orjson.dumps([self.owner, entries]))
        with self._lock:
            if self._size + len(line) > self.most:
                return False
            try:
                file = self._opened()
                file.seek(self._size)  # overwrites a batch that a full disk cut off
                view = memoryview(line)
                while view:
                    view = view[file.write(view) :]
            except OSError:
                return False
            self._size += len(line)
            self._sizes.append((len(line), len(entries)))
            self.rows += len(entries)
        return True

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = opened_own(self.path)
        return self._file

    def first(self) -> Rows | None:
        """The oldest batch; None if there is none."""
        with self._lock:
            if not self._sizes or self._file is None:
                return None
            self._file.seek(self._read)
            line = b""
            while len(line) < self._sizes[0][0] and (part := self._file.read(self._sizes[0][0] - len(line))):
                line += part
        return _as_rows(line)[1]

    def skip(self) -> None:
        """Drops the oldest batch. The file is removed with the last one."""
        with self._lock:
            if not self._sizes:
                return
            size, rows = self._sizes.popleft()
            self._read, self.rows = self._read + size, self.rows - rows
            if not self._sizes and self._file is not None:
                remove_own(self._file, self.path)
                self._file, self._size, self._read = None, 0, 0

    def leave(self) -> None:
        """Closes the file and its lock, so that the next process that opens the store can read it."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def leftover_batches(path: Path) -> Iterator[Iterator[tuple[Owner | None, Rows]]]:
    """Batches left by ended processes and whose they are, by file, oldest first. A file is removed once all its batches
    were read."""
    for file, spill in left_files(path, _ENDING):
        yield _of_file(file, spill)


def rows_waiting(path: Path, *, but: Path) -> int:
    """Number of rows in a store's files, also of processes that run.

    Args:
        but: a file that is not counted.
    """
    rows = 0
    for spill in files_of(path, _ENDING):
        with suppress(FileNotFoundError), spill.open("rb") as file:
            rows += 0 if spill == but else sum(int(line.partition(b" ")[0]) for line in file if line.endswith(b"\n"))
    return rows


def _of_file(file: BinaryIO, path: Path) -> Iterator[tuple[Owner | None, Rows]]:
    for line in file:
        if line.endswith(b"\n"):  # the last one may be incomplete
            yield _as_rows(line)
    remove_own(file, path)


def _as_rows(line: bytes) -> tuple[Owner | None, Rows]:
    owner, entries = orjson.loads(line.partition(b" ")[2])
    rows: Rows = {}
    for table, key, row in entries:
        rows.setdefault(table, {})[tuple(key) if isinstance(key, list) else key] = row
    return (None if owner is None else tuple(owner)), rows


# -- Buffers batches that the database does not take at once: a thread writes them, a file holds them if that takes
# long.
#
# A killed process therefore loses at most what was put in the last second, also while the database is locked,
# unreachable or hangs. Does not access a database: the functions that write are arguments.


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
