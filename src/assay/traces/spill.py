"""Rows that wait in a file while the database is away. One file a store; what a process leaves is taken up by the next one.

A file belongs to the process that holds its lock, which the system takes back when a process ends, however it ends. Does not write to a
database: it gives the rows back in the order they came.
"""

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

from assay.traces.writer import Rows

__all__ = ["Spill", "left_over"]

_ENDING = ".spill"


class Spill:
    """Args:
    path: the file without its ending; the time and a random part are added, so that files are taken up in their order.
    most: bytes that it may have.
    """

    def __init__(self, path: Path, most: int) -> None:
        self.path = path.with_name(f"{path.name}.{time.time_ns():020d}-{secrets.token_hex(4)}{_ENDING}")
        self.most, self.rows = most, 0
        self._size = self._read = 0  # bytes written, and read back
        self._sizes: deque[tuple[int, int]] = deque()  # bytes and rows of each batch
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()  # one thread puts batches, another one takes them

    def put(self, rows: Rows) -> bool:
        """Adds a batch; False where it does not fit, or the disk does not take it."""
        told = [(table, key, row) for table, of in rows.items() for key, row in of.items()]
        line = orjson.dumps(told) + b"\n"
        with self._lock:
            if self._size + len(line) > self.most:
                return False
            try:
                file = self._opened()
                file.seek(self._size)  # over the half of a batch that a full disk took
                view = memoryview(line)
                while view:
                    view = view[file.write(view) :]
            except OSError:
                return False
            self._size += len(line)
            self._sizes.append((len(line), len(told)))
            self.rows += len(told)
        return True

    def _opened(self) -> BinaryIO:
        """The file, locked, and the one of that name: another process may have taken up and removed an empty one before it was locked."""
        while self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file: BinaryIO = open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115
            if _locked(file) and _is_at(file, self.path):
                self._file = file
            else:
                file.close()
        return self._file

    def first(self) -> Rows | None:
        """The oldest batch; None where none waits."""
        with self._lock:
            if not self._sizes or self._file is None:
                return None
            self._file.seek(self._read)
            line = b""
            while len(line) < self._sizes[0][0] and (part := self._file.read(self._sizes[0][0] - len(line))):
                line += part
        return _as_rows(line)

    def skip(self) -> None:
        """The oldest batch is not needed any more. The file is removed with the last one."""
        with self._lock:
            if not self._sizes:
                return
            size, rows = self._sizes.popleft()
            self._read, self.rows = self._read + size, self.rows - rows
            if not self._sizes and self._file is not None:
                _remove(self._file, self.path)
                self._file, self._size, self._read = None, 0, 0

    def leave(self) -> None:
        """The process does not come back to it: the next one that opens the store may take it up."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def left_over(path: Path) -> Iterator[Iterator[Rows]]:
    """Rows of processes that are gone, by file, oldest first; a file is removed when all of its batches were taken."""
    for found in sorted(path.parent.glob(f"{path.name}.*{_ENDING}")):
        with suppress(FileNotFoundError), open(found, "r+b") as file:
            if _locked(file) and _is_at(file, found):
                yield _of_file(file, found)


def _of_file(file: BinaryIO, path: Path) -> Iterator[Rows]:
    for line in file:
        if line.endswith(b"\n"):  # the last one may be half a batch
            yield _as_rows(line)
    _remove(file, path)


def _remove(file: BinaryIO, path: Path) -> None:
    file.truncate(0)  # first: where it cannot be removed while it is open, nothing is taken twice
    with suppress(OSError):
        path.unlink()
    file.close()


def _locked(file: BinaryIO) -> bool:
    """Takes the lock of a file; False where another process has it."""
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
