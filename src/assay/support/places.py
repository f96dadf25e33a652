"""Files and folders: found out before the work whether one exists or can be written; folders that belong to one job.

Folders are removed with what is in them here only. A folder belongs to a job if it was made by `claim_folder`, which
writes the job's id to a file in it, or is inside such a folder. Every other folder is left as it is: it may be the
user's.

A file can belong to the process that holds its lock. The operating system releases it when the process ends, also after
SIGKILL.
"""

import errno
import glob
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from assay.errors import ConfigError, WriteFailed
from assay.support.names import nearest

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


def no_such_file(path: str | Path) -> str:
    """Error message about a missing file, with the nearest name in its folder."""
    return f"no such file: {path}{similar_name(Path(path))}"


def similar_name(path: Path) -> str:
    """Hint with an existing file whose name is similar to a missing one; empty without one."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    near = nearest(path.name, names)
    return f". Did you mean {str(path.parent / near)!r}?" if near else ""


def check_writable(path: str | Path, argument: str, *, inputs: Iterable[object] = ()) -> None:
    """Makes the file's folder where it is missing. Writes nothing to the file.

    Args:
        argument: name of the argument that names the file, for the message.
        inputs: what the call reads. Only paths of existing files are compared with `path`; other values are ignored.
    Raises:
        ConfigError: the file cannot be written, or is one of `inputs`.
    """
    place = Path(path)
    if any(_is_same(place, value) for value in inputs):
        raise ConfigError(f"`{argument}={str(path)!r}` is read, so it is not overwritten. Name another file")
    try:
        if place.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place.parent).close()  # `os.access` allows a superuser what the system does not
        elif not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"`{argument}={str(path)!r}` cannot be written: {reason}. Name another file") from None


def check_new_file(path: str | Path, argument: str, *, inputs: Iterable[object] = ()) -> None:
    """As `check_writable`, for a result: an existing file is refused. A device or a pipe may exist."""
    check_writable(path, argument, inputs=inputs)
    if Path(path).is_file():
        raise ConfigError(f"`{argument}={str(path)!r}` already exists and is not overwritten. Name another file")


@contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """A file to write to, which replaces `path` at the end. After an exception, `path` is as it was before.

    Raises:
        ConfigError: nothing can be written there: the folder is missing, or write-protected.
        WriteFailed: it could not be written to its end, for instance because the disk is full.
    """
    place = Path(path).absolute()
    scratch = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        yield scratch
        scratch.replace(place)
    except OSError as error:
        kind = ConfigError if error.errno in _NOT_THERE else WriteFailed
        raise kind(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file that is never there in part; raises as `writing`."""
    with writing(path) as scratch:
        scratch.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def is_other_file(path: str | Path, ending: str) -> bool:
    """Whether a file exists whose name does not have this ending, so that a report must not replace it."""
    return Path(path).is_file() and not str(path).lower().endswith(ending)


def _is_same(place: Path, value: object) -> bool:
    try:
        return isinstance(value, str | Path) and place.samefile(value)
    except (OSError, ValueError):  # one of them does not exist, or `value` is not a path
        return False


MARKER = ".assay-job"


def check_claimable(folder: Path, job: str) -> None:
    """Raises `ConfigError` if a folder holds anything that this job has not made."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{folder} exists and is not a folder: remove it, or take another name")
    if folder.is_dir() and any(folder.iterdir()) and owner_of(folder) != job:
        raise ConfigError(
            f"{folder} holds files that this job has not made, and nothing of it is removed: move it, or take another "
            "name"
        )


def claim_folder(folder: Path, job: str) -> None:
    """Makes an empty folder that belongs to a job. What an earlier process of the same job left there is removed.

    Raises:
        ConfigError: the folder holds anything that this job has not made.
    """
    check_claimable(folder, job)
    remove_folder(folder, job)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text(job, encoding="utf-8")  # first, so that a job that is killed can clean up


def remove_folder(folder: Path, job: str) -> None:
    """Removes a folder of a job with what is in it. Does nothing if the folder is not the job's, or missing."""
    if owner_of(folder) == job:
        shutil.rmtree(folder, ignore_errors=True)


def owner_of(folder: Path) -> str | None:
    """The job in the nearest marker at or above a folder; None without one, or behind a symbolic link."""
    if ".." in folder.parts:
        return None
    for place in (folder, *folder.parents):
        marker = place / MARKER
        if place.is_symlink() or marker.is_symlink():
            return None
        if marker.is_file():
            return marker.read_text(encoding="utf-8", errors="replace")
    return None


# -- Files that belong to the process that holds their lock.


def own_path(path: Path, ending: str = "") -> Path:
    """A name for a file of this process: with a timestamp and a random part, so that names sort by age."""
    return path.with_name(f"{path.name}.{time.time_ns():020d}-{os.urandom(4).hex()}{ending}")


def opened_own(path: Path) -> BinaryIO:
    """The locked file, without a buffer. Tries again if another process removed it before it was locked."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: BinaryIO = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115
        if _locked(file) and _is_at(file, path):
            return file
        file.close()


def files_of(path: Path, ending: str = "") -> list[Path]:
    """Files of all processes, oldest first; arguments as of `own_path`."""
    return sorted(path.parent.glob(f"{glob.escape(path.name)}.*{ending}"))


def left_files(path: Path, ending: str = "") -> Iterator[tuple[BinaryIO, Path]]:
    """Files that ended processes left, each locked until the next one, oldest first.

    Args:
        path, ending: as of `own_path`.
    """
    for place in files_of(path, ending):
        with suppress(FileNotFoundError), open(place, "r+b") as file:
            if _locked(file) and _is_at(file, place):
                yield file, place


def remove_own(file: BinaryIO, path: Path) -> None:
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
