"""The standard error of a process, in a file of limited size of which the end is kept."""

import os
import tempfile
from contextlib import suppress
from typing import BinaryIO

__all__ = ["StandardError"]

_MOST_BYTES = 1 << 20
_CHARS = 500  # of the end


class StandardError:
    """A file for a process to write to. Its owner calls `shorten` now and then while the process runs."""

    def __init__(self) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__, or with this object
        self._before = b""  # the end of what was removed from the file
        with suppress(ModuleNotFoundError):  # Windows: the file then keeps its size, as holes
            import fcntl

            # the process writes at the file's end, wherever that is after the file was emptied
            flags = fcntl.fcntl(self.file, fcntl.F_GETFL)
            fcntl.fcntl(self.file, fcntl.F_SETFL, flags | os.O_APPEND)

    def __enter__(self) -> "StandardError":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def shorten(self) -> None:
        """Empties a file that has become too large."""
        if os.fstat(self.file.fileno()).st_size > _MOST_BYTES:
            self._before = self._end()
            os.ftruncate(self.file.fileno(), 0)

    def tail(self) -> str:
        """The last characters that were written, at most 500."""
        return self._end().decode("utf-8", "replace").strip()[-_CHARS:]

    def _end(self) -> bytes:
        most = 4 * _CHARS  # bytes of so many characters
        size = os.fstat(self.file.fileno()).st_size
        read = os.pread(self.file.fileno(), most, max(0, size - most))
        return (self._before + read)[-most:]
