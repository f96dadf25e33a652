"""Files that hold rows while the database is unreachable. The next process that opens the store reads leftover files.

A file belongs to the process that holds its lock. The operating system releases the lock when the process ends, also
after SIGKILL. Does not write to a database: returns the rows in the order they were put.
"""

import hashlib
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import orjson

from assay.traces.store.writer import Rows

_ENDING = ".spill"


def spill_path(url: str) -> Path:
    """Path of a store's spill files without their ending: next to an SQLite file, else in `.assay/spill`."""
    if url.startswith("sqlite:///"):
        return Path(url.removeprefix("sqlite:///"))
    return Path(".assay", "spill", hashlib.sha256(url.encode()).hexdigest()[:16]).absolute()


class Spill:
    """A file of batches that wait until the database takes them.

    Args:
        path: the file without its ending; a timestamp and a random part are added, so that names sort by age.
        most: maximum size in bytes.
    """

    def __init__(self, path: Path, most: int) -> None:
        self.path = path.with_name(f"{path.name}.{time.time_ns():020d}-{secrets.token_hex(4)}{_ENDING}")
        self.most, self.rows = most, 0
        self._size = self._read = 0  # bytes written, and read back
        self._sizes: deque[tuple[int, int]] = deque()  # bytes and rows of each batch
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()  # one thread puts batches, another takes them

    def put(self, rows: Rows) -> bool:
        """Adds a batch; False if it exceeds `most` or the disk refuses the write."""
        entries = [(table, key, row) for table, by_key in rows.items() for key, row in by_key.items()]
        line = orjson.dumps(entries) + b"\n"
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
        """The locked file. Tries again if another process removed the empty file before it was locked."""
        while self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file: BinaryIO = open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115
            if _locked(file) and _is_at(file, self.path):
                self._file = file
            else:
                file.close()
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
        return _as_rows(line)

    def skip(self) -> None:
        """Drops the oldest batch. The file is removed with the last one."""
        with self._lock:
            if not self._sizes:
                return
            size, rows = self._sizes.popleft()
            self._read, self.rows = self._read + size, self.rows - rows
            if not self._sizes and self._file is not None:
                _remove(self._file, self.path)
                self._file, self._size, self._read = None, 0, 0

    def leave(self) -> None:
        """Closes the file and its lock, so that the next process that opens the store can read it."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def leftover_batches(path: Path) -> Iterator[Iterator[Rows]]:
    """Batches left by ended processes, by file, oldest first. A file is removed once all its batches were read."""
    for spill in sorted(path.parent.glob(f"{path.name}.*{_ENDING}")):
        with suppress(FileNotFoundError), open(spill, "r+b") as file:
            if _locked(file) and _is_at(file, spill):
                yield _of_file(file, spill)


def _of_file(file: BinaryIO, path: Path) -> Iterator[Rows]:
    for line in file:
        if line.endswith(b"\n"):  # the last one may be incomplete
            yield _as_rows(line)
    _remove(file, path)


def _remove(file: BinaryIO, path: Path) -> None:
    file.truncate(0)  # first: Windows cannot remove an open file, and its rows must not be read twice
    with suppress(OSError):
        path.unlink()
    file.close()


def _locked(file: BinaryIO) -> bool:
    """Locks a file; False if another process holds the lock."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(1 << 60)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            file.seek(0)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _as_rows(line: bytes) -> Rows:
    rows: Rows = {}
    for table, key, row in orjson.loads(line):
        rows.setdefault(table, {})[tuple(key) if isinstance(key, list) else key] = row
    return rows
