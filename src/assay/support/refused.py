"""What the disk or a store of this process did not take: for the report and the exit code of a command."""

import threading

__all__ = ["add_refused_rows", "disk_was_full", "forget_refused", "note_full_disk", "refused_rows"]

_lock = threading.Lock()
_rows = 0
_full = False


def refused_rows() -> int:
    """Rows that a store refused (a full disk), or that still waited for its database when it was closed."""
    return _rows


def add_refused_rows(count: int) -> None:
    global _rows
    with _lock:
        _rows += count


def disk_was_full() -> bool:
    """Whether a job was stopped, or a file of it not written, because a disk was full."""
    return _full


def note_full_disk() -> None:
    global _full
    _full = True


def forget_refused() -> None:
    """Start again, for another command of this process."""
    global _rows, _full
    with _lock:
        _rows, _full = 0, False
