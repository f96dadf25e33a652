"""What holds while a job runs: its lock, and signals that cancel its meter. Does not open stores or models."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from assay.errors import ConfigError, ProgramFailed
from assay.models import Meter
from assay.models.limits import OverTime, limited, within_limit

__all__ = ["answered_within", "cancelled_by_signals", "only_one"]

T = TypeVar("T")


@contextmanager
def cancelled_by_signals(meter: Meter) -> Iterator[None]:
    """Ctrl-C and SIGTERM also cancel the meter: threads that are at work end at their next call to a model, so that whoever
    waits for them, DSPy's own pools included, does not wait for all that they still had to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def cancel(number: int, frame: Any) -> None:
        meter.cancel()
        if callable(before[number]):
            before[number](number, frame)
        else:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, cancel)
    try:
        yield
    finally:
        for caught in before:
            signal.signal(caught, before[caught])


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Held while a job runs, so that the same job does not run twice at once."""
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
    """A program's answer, within a time limit; what would end the whole process is the program's failure."""
    try:
        with limited(seconds):
            return within_limit(call, "the run")
    except OverTime as error:
        raise ProgramFailed(f"{error}; task_timeout allows more", flag="--task-timeout") from error
    except SystemExit as error:
        raise ProgramFailed(f"the program ended itself with sys.exit({error.code!r})") from error
