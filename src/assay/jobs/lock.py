"""The lease of a running job, and the time limit of a prediction.

Does not open stores or models.
"""

import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from filelock import FileLock, Timeout

from assay.errors import ConfigError, ProgramFailed
from assay.models.limits import OverTime, limited, within_limit
from assay.traces.store.leases import Lease, acquire, held_by

T = TypeVar("T")


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LEASE_S = 30.0  # without a sign of life, after which another machine may take a job over


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Holds a lock that other processes of this machine respect.

    Raises:
        Timeout: another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    lock.acquire(timeout=0)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def job_lease(engine: sa.Engine, store_id: str, home: Path, key: str, *, to_help: str = "") -> Iterator[Lease]:
    """Holds the lease of a job in its store, so that it runs once at a time on all machines.

    A file in the store's folder has the token of the lease and the machine that holds it. Who gets the lock of that
    file on the same machine knows that the process which wrote it has ended, and takes its lease over at once. Another
    machine waits until it has run out: it may see the folder and not its locks.

    Args:
        store_id: of the store, as other stores in the folder may have the same job.
        to_help: how another process can help the job, for the message.
    Raises:
        ConfigError: another process runs the job.
    """
    name, file = f"job:{key}", home / "runs" / f"{key}-{store_id[:8]}.lock"
    with ExitStack() as locked:
        try:
            locked.enter_context(exclusive_lock(file))
            held = file.with_suffix(".lease")
            token, _, machine = held.read_text(encoding="utf-8").partition("\n") if held.is_file() else ("", "", "")
            lease = acquire(engine, name, _LEASE_S, ended=token if machine == this_machine() else None)
        except Timeout:
            lease = None
        if lease is None:
            raise ConfigError(
                f"this very job is running already on {held_by(engine, name) or 'this machine'}: wait until it has "
                f"ended{f', or {to_help}' if to_help else ''}. Of a machine that is gone a job can be resumed "
                f"{_LEASE_S:g} s after its last sign of life"
            )
        held.write_text(f"{lease.token}\n{this_machine()}", encoding="utf-8")
        with lease:
            yield lease


def this_machine() -> str:
    """Tells this machine from others, and from itself before it was started again."""
    try:
        started = _BOOT.read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        started = f"{uuid.getnode():x}"
    return f"{socket.gethostname()} {started}"


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
