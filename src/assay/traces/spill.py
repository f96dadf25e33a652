"""Rows that wait in a file while the database is away. One file a store and process; what a process leaves is taken up by the next one.

Does not write to a database: it gives the rows back in the order they came.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson

from assay.traces.writer import Rows

__all__ = ["Spill", "left_over"]

_ENDING = ".spill"
_NOBODY = 0  # in place of the process where it has left the file


class Spill:
    """Args:
    path: the file without its ending; the process and its number are added.
    most: bytes that it may have.
    """

    def __init__(self, path: Path, most: int) -> None:
        self.path = path.with_name(f"{path.name}.{os.getpid()}-{id(self):x}{_ENDING}")
        self.most, self.rows = most, 0
        self._size = self._read = 0  # bytes written, and read back

    def put(self, rows: Rows) -> bool:
        """Adds a batch; False where it does not fit, or the disk does not take it."""
        told = [(table, key, row) for table, of in rows.items() for key, row in of.items()]
        line = orjson.dumps(told) + b"\n"
        if self._size + len(line) > self.most:
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.seek(self._size)  # over the half of a batch that a full disk took
                file.write(line)
        except OSError:
            return False
        self._size += len(line)
        self.rows += len(told)
        return True

    def batches(self) -> Iterator[Rows]:
        """The batches in their order. One is gone when the next one is asked for."""
        if not self.rows:
            return
        with open(self.path, "rb") as file:
            file.seek(self._read)
            while self._read < self._size and (line := file.readline()):
                rows, count = _as_rows(line)
                yield rows
                self.rows, self._read = self.rows - count, file.tell()
        self.path.unlink(missing_ok=True)
        self._size = self._read = self.rows = 0

    def leave(self) -> None:
        """The process does not come back to it: the next one that opens the store may take it up."""
        if self.rows:
            self.path.rename(self.path.with_name(self.path.name.replace(f".{os.getpid()}-", f".{_NOBODY}-")))


def left_over(path: Path) -> Iterator[Iterator[Rows]]:
    """Rows of processes that are gone, by file; a file is removed when all of its batches were taken."""
    for found in sorted(path.parent.glob(f"{path.name}.*{_ENDING}")):
        process = found.name.removeprefix(f"{path.name}.").partition("-")[0]
        taken = found.with_name(f"{found.name}.{os.getpid()}.taken")
        if process.isdigit() and not _lives(int(process)):
            try:
                found.rename(taken)  # one process alone takes it up
            except OSError:
                continue
            yield _of_file(taken, found)


def _of_file(taken: Path, name: Path) -> Iterator[Rows]:
    whole = False
    try:
        with open(taken, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # the last one may be half a batch
                    yield _as_rows(line)[0]
        whole = True
    finally:
        if whole:
            taken.unlink(missing_ok=True)
        else:
            taken.rename(name)


def _as_rows(line: bytes) -> tuple[Rows, int]:
    rows: Rows = {}
    told = orjson.loads(line)
    for table, key, row in told:
        rows.setdefault(table, {})[tuple(key) if isinstance(key, list) else key] = row
    return rows, len(told)


def _lives(process: int) -> bool:
    if process == _NOBODY:
        return False
    if sys.platform == "win32":  # there a signal 0 would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
