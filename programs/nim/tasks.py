"""Generated games of Nim, `nim:size=&seed=&sticks=&most=&skill=`."""

import random
from collections.abc import Iterator

from assay.datasets.specs import Row, number_of, options_of, share_of
from assay.errors import DataError

from .rules import NimRules, best_take


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
