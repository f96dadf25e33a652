"""Which rollout is open here: in this thread or task, where its thread was started, or alone in the process. Stores nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dspy

from assay.datasets.tasks import content_hash
from assay.models.threads import current_place, leave_place, open_place
from assay.traces.listening import is_told_here, listeners
from assay.traces.records import Rollout
from assay.traces.unrecorded import UnrecordedCalls

__all__ = ["OpenRollout", "current_rollout", "missed_here", "open_here", "opened", "others_open"]

_KEY = "assay_rollout"
_open: list["OpenRollout"] = []  # of the whole process


class OpenRollout:
    """A rollout that is open, as DSPy's settings carry it, and the threads that its program starts."""

    __slots__ = ("_content", "listeners", "missed", "rollout")

    def __init__(self, rollout: Rollout, missed: UnrecordedCalls | None = None, content: str | None = None) -> None:
        self.rollout, self.missed, self._content = rollout, missed, content
        self.listeners: tuple[Any, ...] = ()

    @property
    def content(self) -> str:
        """The content hash of its inputs; empty where it has none."""
        if self._content is None:
            self._content = content_hash(self.rollout.inputs) if self.rollout.inputs else ""
        return self._content


@contextmanager
def opened(place: OpenRollout) -> Iterator[None]:
    """Within: it is open here, and in what is started here."""
    place.listeners = listeners()
    token = open_place(place)
    _open.append(place)
    try:
        with dspy.context(**{_KEY: place}):
            yield
    finally:
        _open.remove(place)
        leave_place(token)


def open_here() -> OpenRollout | None:
    """What is open in this thread or task. Where DSPy's context has not come, as in a thread that a program started, what is open where
    that was done."""
    found = dspy.settings.get(_KEY)
    if found is None and not is_told_here():
        found = current_place()
    return found if isinstance(found, OpenRollout) else None


def others_open() -> list[OpenRollout]:
    """In a thread of which nothing is known: all rollouts that are open. None where DSPy's context says that this is outside of any."""
    return [] if is_told_here() else list(_open)


def current_rollout() -> Rollout | None:
    """The rollout that is open in this thread or task, or where its thread was started."""
    found = open_here()
    return None if found is None else found.rollout


def missed_here() -> UnrecordedCalls | None:
    found = open_here()
    return None if found is None else found.missed
