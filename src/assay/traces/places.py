"""Finds the open rollout of a thread or task, of the place where its thread was started, or of the process.

Does not access the store.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dspy

from assay.datasets.tasks import task_key
from assay.models.scope import current_place, leave_place, open_place, repeats_numbered
from assay.models.unrecorded import UnrecordedCalls
from assay.traces.listening import has_listeners, listeners
from assay.traces.records import Rollout, check_agent_name
from assay.traces.shown import Carried

# -- Names of the agents of a rollout, for programs in which several act, such as a planner and a solver.
#
# Does not run agents. A call is recorded with the name that is current when it is made.


_AGENT = "assay_agent"


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Inside, LM calls are recorded as those of the agent `name`; the innermost name counts.

    The name is stored in DSPy's settings, which DSPy copies to its worker threads and async tasks. A thread that the
    program starts itself must enter the context again.

    Args:
        name: 1 to 64 characters that can be printed.
    Raises:
        ConfigError: another name.
    """
    with dspy.context(**{_AGENT: check_agent_name(name)}):
        yield


def current_agent() -> str:
    """Name of the agent that acts in this thread or task; "" without one."""
    name = dspy.settings.get(_AGENT)
    return name if isinstance(name, str) else ""


# -- Places.


_KEY = "assay_rollout"
_open: list["OpenRollout"] = []  # in this process


class OpenRollout:
    """An open rollout, stored in DSPy's settings and inherited by the threads that its program starts.

    Args:
        rollout: Its record, or a function that returns it when the first call is made.
    """

    __slots__ = ("_key", "_rollout", "carried", "listeners", "missed", "own_calls", "recorder")

    def __init__(
        self,
        rollout: Rollout | Callable[[], Rollout],
        missed: UnrecordedCalls | None = None,
        key: str | None = None,
        *,
        recorder: object = None,
    ) -> None:
        self._rollout, self.missed, self._key, self.recorder = rollout, missed, key, recorder
        self.listeners: tuple[Any, ...] = ()
        self.own_calls = 0  # calls of models that the program made itself
        # demonstrations of the loaded programs that run in it, see `assay.traces.places`
        self.carried: tuple[Carried, ...] = ()

    @property
    def rollout(self) -> Rollout:
        return self._rollout() if callable(self._rollout) else self._rollout

    @property
    def key(self) -> str:
        """Key of its task; empty without inputs."""
        if self._key is None:
            self._key = task_key(self.rollout.inputs)
        return self._key


class Outside(OpenRollout):
    """The place of the calls of a recorder that are made outside any rollout."""

    __slots__ = ()


@contextmanager
def opened(place: OpenRollout, *, counts: bool = True) -> Iterator[None]:
    """Open the rollout in this thread or task and in those started inside the context. Its equal calls are numbered.

    Args:
        counts: `others_open` and `rollouts_of` return it.
    """
    place.listeners = listeners()
    token = open_place(place)
    if counts:
        _open.append(place)
    try:
        with dspy.context(**{_KEY: place}), repeats_numbered():
            yield
    finally:
        if counts:
            _open.remove(place)
        leave_place(token)


@contextmanager
def opened_outside(place: Outside) -> Iterator[None]:
    """Make it the place of this thread or task, and of those started inside, unless a rollout is open."""
    if dspy.settings.get(_KEY) is not None:
        yield
        return
    place.listeners = listeners()
    token = open_place(place)
    try:
        yield
    finally:
        leave_place(token)


def current_open_rollout() -> OpenRollout | None:
    """The open rollout of this thread or task, or the place outside of rollouts if it is known.

    In a thread without DSPy's context, such as one that a program started, it is that of the place where the thread was
    started.
    """
    place = dspy.settings.get(_KEY)
    if place is None:
        place = current_place()
        if has_listeners() and not isinstance(place, Outside):  # outside, whatever its thread was started for
            return None
    return place if isinstance(place, OpenRollout) else None


def others_open(recorder: object) -> list[OpenRollout]:
    """All open rollouts of a recorder, for a thread of unknown origin. Empty if DSPy's context is known here."""
    # A rollout of another recorder of the process, such as one that was abandoned at its time limit, made no call of
    # this recorder's engines.
    return [] if has_listeners() else rollouts_of(recorder)


def rollouts_of(recorder: object) -> list[OpenRollout]:
    """All open rollouts of a recorder."""
    return [place for place in _open.copy() if place.recorder is recorder]


def current_rollout() -> Rollout | None:
    """The open rollout of this thread or task, or of the place where its thread was started."""
    place = current_open_rollout()
    return None if place is None or isinstance(place, Outside) else place.rollout


def current_missed_calls() -> UnrecordedCalls | None:
    """Counter of unrecorded calls of the open rollout, or of those outside any rollout."""
    place = current_open_rollout()
    return None if place is None else place.missed


# -- Demonstrations of a program that was loaded from an artifact: recorded with each call that shows them.
#
# `load_artifact` sets them on the program. Whatever runs the program inside an open rollout calls `note_carried`, so
# that the recorder searches the prompts of that rollout, and of no other, for them.


_ATTRIBUTE = "_assay_carried"


def set_carried(program: Any, carried: Carried) -> None:
    """Set the demonstrations of a loaded program. Its copies have them too."""
    setattr(program, _ATTRIBUTE, carried)


def carried_by(program: Any) -> Carried:
    """Demonstrations of a loaded program; none if it was not loaded from an artifact."""
    carried = getattr(program, _ATTRIBUTE, None)
    return carried if isinstance(carried, Carried) else Carried()


def note_carried(program: Any) -> None:
    """Search the prompts of the open rollout for the demonstrations of a program that is about to run in it."""
    carried, place = carried_by(program), current_open_rollout()
    if place is not None and carried.tasks and carried not in place.carried:
        place.carried = (*place.carried, carried)
