"""What disks and stores of this process did not take: for the report and the exit code of a command."""

import threading
from dataclasses import astuple, dataclass

FULL_DISK = "the disk of the store is full"  # begins the reason of a run that it stopped


@dataclass(frozen=True)
class Refused:
    """Counts since the start of the process.

    Attributes:
        rows: rows that a store refused (a full disk), or that still waited for its database when it was closed.
        full_disks: times that a disk was found full; the job is stopped then, and its last rows may still fit.
        recovered: rows that earlier processes left in files, and that are in their store now.
    """

    rows: int = 0
    full_disks: int = 0
    recovered: int = 0

    def since(self, before: "Refused") -> "Refused":
        return Refused(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


_lock = threading.Lock()
_refused = Refused()
waiting: dict[str, int] = {}  # rows of other processes that wait in files, by the files' path, for stores opened here


def refused() -> Refused:
    return _refused


def count_refused(*, rows: int = 0, full_disks: int = 0, recovered: int = 0) -> None:
    """Adds to the counts."""
    global _refused
    with _lock:
        _refused = Refused(_refused.rows + rows, _refused.full_disks + full_disks, _refused.recovered + recovered)
