"""The rules of Nim, and generated games, `nim:size=&seed=&sticks=&most=&skill=`.

In this Nim two players take 1 to `most` sticks in turn, and whoever takes the last stick wins. A player wins who always
leaves a multiple of `most + 1`.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.datasets.specs import Row, number_of, options_of, share_of
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


def rows(query: str) -> Iterator[Row]:
    """Tasks of Nim in which the agent moves first and can win.

    Options: `size`, `seed`, `sticks` (`LOW-HIGH`, default `5-15`), `most` (3), `skill` (0.5, the share of the
    opponent's moves that are the best ones; the others are drawn).

    Raises:
        DataError: an unknown option, or a value out of range.
    """
    options = options_of(query, ("size", "seed", "sticks", "most", "skill"), "nim")
    size, seed = number_of(options, "size", 500, at_least=1), number_of(options, "seed", 0)
    most, skill = number_of(options, "most", 3, at_least=1), share_of(options, "skill", 0.5)
    low, _, high = options.get("sticks", "5-15").partition("-")
    try:
        first, last = int(low), int(high or low)
    except ValueError:
        raise DataError(f"nim: sticks must be LOW-HIGH, got {options['sticks']!r}") from None
    NimRules(last, most), NimRules(first, most)
    if not (starts := [sticks for sticks in range(first, last + 1) if best_take(sticks, most) is not None]):
        raise DataError(f"nim: no number of sticks in {first}-{last} can be won with most={most}")
    rng = random.Random(f"nim/{seed}")
    for at in range(size):
        sticks = rng.choice(starts)
        yield (
            f"nim:{at + 1}",
            {
                "inputs": {"sticks": sticks, "most": most, "skill": skill, "seed": rng.randrange(2**31)},
                "task_type": f"{sticks} sticks",
            },
        )
