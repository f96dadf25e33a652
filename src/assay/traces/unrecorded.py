"""Counts unrecorded LM calls of open rollouts: calls that no recorded engine made.

They are counted in the transports of the SDKs. The count is unknown if a client cannot be observed.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from assay.models.transports import blind_clients, watch
from assay.traces.missed import NOTHING, Unrecorded


class UnrecordedCalls:
    """Count of a recorder, or of one of its rollouts.

    Args:
        before: Initial count.
        parent: Count of the recorder, to which the count of a rollout is added.
    """

    def __init__(self, before: Unrecorded = NOTHING, *, parent: "UnrecordedCalls | None" = None) -> None:
        self.total, self.parent = before, parent

    def add(self, calls: int) -> None:
        with _lock:
            for count in self._both():
                count.total = replace(count.total, calls=max(0, count.total.calls + calls))

    def hide(self, reason: str) -> None:
        """Mark the count as unknown. The first reason is kept."""
        with _lock:
            for count in self._both():
                count.total = replace(count.total, reason=count.total.reason or reason)

    def _both(self) -> "list[UnrecordedCalls]":
        return [self] if self.parent is None else [self, self.parent]

    def opened(self, current_count: "Callable[[], UnrecordedCalls | None]") -> "UnrecordedCalls":
        """Start the count of a rollout; it ends with `closed`.

        Args:
            current_count: Returns the count of the open rollout of the current thread or task. If there is none, as in
                a thread that a program started, a call is assigned to the rollout that was opened last.
        """
        count = UnrecordedCalls(parent=self)
        with _lock:
            _open.append(count)
        watch_calls(current_count)
        return count

    def closed(self) -> None:
        with _lock:
            _open.remove(self)
        if (reason := blind_clients()) is not None:
            self.hide(reason)


_lock = threading.Lock()
_open: list[UnrecordedCalls] = []  # in this process
_current_count: Callable[[], UnrecordedCalls | None] = lambda: None  # noqa: E731


def watch_calls(current_count: "Callable[[], UnrecordedCalls | None]") -> None:
    """Count the calls of all clients from now on, also in threads that are started from now on.

    Args:
        current_count: As for `UnrecordedCalls.opened`.
    """
    global _current_count
    _current_count = current_count
    watch(_count_call, _hide_count)


def _count_call() -> None:
    count = _current_count() or (_open[-1] if _open else None)
    if count is not None:
        count.add(1)


def _hide_count(reason: str) -> None:
    """Mark the count of the open rollout as unknown, or of all open rollouts in a thread of unknown origin."""
    current = _current_count()
    for count in [current] if current is not None else list(_open):
        count.hide(reason)
