"""The lock of a running job, and the time limit of a prediction.

Does not open stores or models.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from assay.errors import ConfigError, ProgramFailed
from assay.models.limits import OverTime, limited, within_limit

T = TypeVar("T")


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Holds the lock of a job, so that it does not run twice at the same time.

    Raises:
        ConfigError: another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"this very job is running already (its lock is {path})") from None
    try:
        yield
    finally:
        lock.release()


def answered_within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a program, within a time limit in seconds.

    Raises:
        ProgramFailed: the limit was exceeded, or the program called `sys.exit()`.
    """
    try:
        with limited(seconds):
            return within_limit(call, "the run")
    except OverTime as error:
        raise ProgramFailed(f"{error}; `task_timeout` allows more") from error
    except SystemExit as error:
        raise ProgramFailed(f"the program ended itself with sys.exit({error.code!r})") from error
