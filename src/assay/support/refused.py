"""What disks and stores of this process did not take: for the report and the exit code of a command."""

import threading
from dataclasses import dataclass, replace

FULL_DISK = "the disk of the store is full"  # begins the reason of a run that it stopped


@dataclass(frozen=True)
class Refused:
    """Counts since the start of the process.

    Attributes:
        rows: rows that a store refused (a full disk), or that still waited for its database when it was closed.
        full_disks: times that a disk was found full; the job is stopped then, and its last rows may still fit.
    """

    rows: int = 0
    full_disks: int = 0

    def since(self, before: "Refused") -> "Refused":
        return Refused(self.rows - before.rows, self.full_disks - before.full_disks)


_lock = threading.Lock()
_refused = Refused()


def refused() -> Refused:
    return _refused


def add_refused_rows(count: int) -> None:
    _add(rows=count)


def note_full_disk() -> None:
    _add(full_disks=1)


def _add(*, rows: int = 0, full_disks: int = 0) -> None:
    global _refused
    with _lock:
        _refused = replace(_refused, rows=_refused.rows + rows, full_disks=_refused.full_disks + full_disks)
