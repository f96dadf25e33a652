"""SIGKILL of a whole PostgreSQL server on this machine, and its processes. Linux only."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def postgres_runs(folder: Path) -> bool:
    """Whether the postmaster of a data folder is alive."""
    return (pid := _postmaster(folder)) is not None and _parent(pid) is not None


def kill_postgres(folder: Path, *, wait_s: float = 10.0) -> None:
    """SIGKILL to the postmaster of a data folder and then to all of its processes; waits until they are gone.

    The postmaster first: it would restart the others after the end of one.
    """
    pid = _postmaster(folder)
    if pid is None:
        return
    children = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _child(entry, pid)]
    for one in (pid, *children):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    end = time.monotonic() + wait_s
    # also until their parent has taken note: what starts the server again may take a zombie for a running one
    while any(Path(f"/proc/{one}").exists() for one in (pid, *children)) and time.monotonic() < end:
        time.sleep(0.01)


def _postmaster(folder: Path) -> int | None:
    try:
        return int((folder / "postmaster.pid").read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return None


def _child(entry: Path, pid: int) -> bool:
    return _parent(int(entry.name)) == pid


def _parent(pid: int) -> int | None:
    """The parent of a process; None if it has ended (a zombie has)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[1])
