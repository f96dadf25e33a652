"""Files that belong to the process that holds their lock.

The operating system releases the lock when the process ends, also after SIGKILL.
"""

import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def own_path(path: Path, ending: str = "") -> Path:
    """A name for a file of this process: with a timestamp and a random part, so that names sort by age."""
    return path.with_name(f"{path.name}.{time.time_ns():020d}-{secrets.token_hex(4)}{ending}")


def opened(path: Path) -> BinaryIO:
    """The locked file, without a buffer. Tries again if another process removed it before it was locked."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: BinaryIO = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115
        if _locked(file) and _is_at(file, path):
            return file
        file.close()


def left_files(path: Path, ending: str = "") -> Iterator[tuple[BinaryIO, Path]]:
    """Files that ended processes left, each locked until the next one, oldest first.

    Args:
        path, ending: as of `own_path`.
    """
    for place in sorted(path.parent.glob(f"{path.name}.*{ending}")):
        with suppress(FileNotFoundError), open(place, "r+b") as file:
            if _locked(file) and _is_at(file, place):
                yield file, place


def remove(file: BinaryIO, path: Path) -> None:
    """Empties, removes and closes a locked file."""
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
