"""LM calls of open rollouts that no recorded engine made: counted where the SDKs' transports show them, unknown where nothing can."""

import threading
from collections.abc import Callable
from dataclasses import replace

from assay.models.transports import blind_clients, watch
from assay.traces.missed import NOTHING, Unrecorded

__all__ = ["UnrecordedCalls"]


class UnrecordedCalls:
    """The count of a recorder, or of one of its rollouts, which adds to its recorder's."""

    def __init__(self, before: Unrecorded = NOTHING, *, whole: "UnrecordedCalls | None" = None) -> None:
        self.total, self.whole = before, whole

    def add(self, calls: int) -> None:
        with _lock:
            for count in self._both():
                count.total = replace(count.total, calls=max(0, count.total.calls + calls))

    def hide(self, reason: str) -> None:
        """From now on the count is unknown; the first reason stays."""
        with _lock:
            for count in self._both():
                count.total = replace(count.total, reason=count.total.reason or reason)

    def _both(self) -> "list[UnrecordedCalls]":
        return [self] if self.whole is None else [self, self.whole]

    def opened(self, here: "Callable[[], UnrecordedCalls | None]") -> "UnrecordedCalls":
        """The count of a rollout, until it is `closed`.

        Args:
            here: finds the count of the rollout that is open in a thread or task. Where none is, as in a thread that a program made by
                itself, a call is of the rollout that was opened last.
        """
        global _here
        count = UnrecordedCalls(whole=self)
        with _lock:
            _here = here
            _open.append(count)
        watch(_saw, _hid)
        return count

    def closed(self) -> None:
        with _lock:
            _open.remove(self)
        if (reason := blind_clients()) is not None:
            self.hide(reason)


_lock = threading.Lock()
_open: list[UnrecordedCalls] = []  # of the whole process
_here: Callable[[], UnrecordedCalls | None] = lambda: None  # noqa: E731


def _saw() -> None:
    found = _here() or (_open[-1] if _open else None)
    if found is not None:
        found.add(1)


def _hid(reason: str) -> None:
    """In a thread that belongs to no rollout as far as is known, any of those that are open may have asked for it."""
    found = _here()
    for count in [found] if found is not None else list(_open):
        count.hide(reason)
