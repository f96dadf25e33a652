"""The rules of Nim.

In this Nim two players take 1 to `most` sticks in turn, and whoever takes the last stick wins. A player wins who always
leaves a multiple of `most + 1`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import DataError

_MOST_STICKS = 60


@dataclass(frozen=True)
class NimRules:
    """One game: how many sticks there are at first, and how many a player may take at most.

    Raises:
        DataError: a number out of range.
    """

    sticks: int
    most: int = 3

    def __post_init__(self) -> None:
        for name, value, low, high in (("sticks", self.sticks, 1, _MOST_STICKS), ("most", self.most, 1, 9)):
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise DataError(f"nim: {name}={value!r} must be an integer from {low} to {high}")

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> "NimRules":
        """The rules in the inputs of a task."""
        return cls(inputs.get("sticks", 0), inputs.get("most", 3))

    def is_legal(self, taken: object, left: int) -> bool:
        """Whether a player may take so many of the sticks that are left."""
        return isinstance(taken, int) and not isinstance(taken, bool) and 1 <= taken <= min(self.most, left)


def best_take(left: int, most: int) -> int | None:
    """The number of sticks that wins; None if the position is lost."""
    return left % (most + 1) or None


def nim_problem(rules: NimRules, own: Sequence[Any], opponent: Sequence[Any]) -> tuple[bool, str]:
    """Replays a game in which the first player moves first.

    Args:
        own: moves of the first player, in order.
        opponent: moves of the other one, each after the move with the same number; None for no move.
    Returns:
        Whether the first player won, and what was against the rules ("" if nothing was).
    """
    left = rules.sticks
    for at, taken in enumerate(own):
        if not rules.is_legal(taken, left):
            return False, f"the agent took {taken!r} of {left} sticks"
        left -= int(taken)
        reply = opponent[at] if at < len(opponent) else None
        if left == 0:
            return (True, "") if reply is None else (False, "the opponent moved after the end")
        if reply is None:
            return False, "" if at == len(own) - 1 else "the opponent left out a move"
        if not rules.is_legal(reply, left):
            return False, f"the opponent took {reply!r} of {left} sticks, at most {rules.most} are allowed"
        left -= int(reply)
        if left == 0 and at < len(own) - 1:
            return False, "the agent moved after the end"
    return False, ""
