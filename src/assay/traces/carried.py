"""Demonstrations of a program that was loaded from an artifact: recorded with each call that shows them.

`load_artifact` sets them on the program. Whatever runs the program inside an open rollout calls `note_carried`, so that
the recorder searches the prompts of that rollout, and of no other, for them.
"""

from typing import Any

from assay.traces.places import current_open_rollout
from assay.traces.shown import Carried

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
