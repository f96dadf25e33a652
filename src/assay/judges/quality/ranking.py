"""Rankings from pairwise comparisons: Bradley-Terry strengths. Calls no model."""

import itertools
import random
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from assay.errors import ConfigError

Name = TypeVar("Name", bound=Hashable)
_PRIOR = 0.1  # precision of the Gaussian prior; keeps the strength of an output that won or lost everything finite
_ALL = 8  # up to this number of outputs every pair is compared


def pairings(count: int, *, seed: int = 0, rounds: int = 4) -> list[tuple[int, int]]:
    """Returns the pairs of `count` outputs to compare.

    Every pair up to 8 outputs; beyond that, `rounds` rings in a seeded order, with two comparisons per output and ring.
    """
    if count <= _ALL:
        return list(itertools.combinations(range(count), 2))
    rng, chosen = random.Random(seed), set()
    for _ in range(rounds):
        ring = rng.sample(range(count), count)
        chosen |= {(min(a, b), max(a, b)) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)}
    return sorted(chosen)


def bradley_terry(comparisons: Iterable[tuple[Name, Name, float]], *, names: Sequence[Name] = ()) -> dict[Name, float]:
    """Fits strengths s with P(i beats j) = 1 / (1 + exp(s_j - s_i)) and mean 0.

    Penalized maximum likelihood with a Gaussian prior of precision 0.1, by Newton's method (the loss is convex).

    Example: a beats b in three of four comparisons; without a prior s_a - s_b = log 3.

    Args:
        comparisons: (first, second, outcome): 1 if the first won, 0 if it lost, 0.5 for a tie; values between are soft
            verdicts.
        names: all names, also those without a comparison.
    Returns:
        name -> strength, in the order of `names`, then of first occurrence.
    Raises:
        ConfigError: an outcome outside [0, 1], or a name compared with itself.
    Source: Bradley and Terry 1952, Biometrika 39:324.
    """
    rows = list(comparisons)
    mentioned = dict.fromkeys([*names, *(name for a, b, _ in rows for name in (a, b))])
    index = {name: at for at, name in enumerate(mentioned)}
    for a, b, outcome in rows:
        if a == b or not 0 <= outcome <= 1:
            raise ConfigError(f"a comparison must be (name, other name, outcome in [0, 1]); got {(a, b, outcome)!r}")
    strengths = np.zeros(len(index))
    if not rows:
        return dict.fromkeys(index, 0.0)
    first, second = np.array([index[a] for a, _, _ in rows]), np.array([index[b] for _, b, _ in rows])
    won = np.array([row[2] for row in rows])
    for _ in range(50):
        p = 1 / (1 + np.exp(strengths[second] - strengths[first]))
        gradient, spread = -_PRIOR * strengths, p * (1 - p)
        np.add.at(gradient, first, won - p)
        np.add.at(gradient, second, p - won)
        hessian = _PRIOR * np.eye(len(index))
        for rows_at, columns_at, sign in (
            (first, first, 1),
            (second, second, 1),
            (first, second, -1),
            (second, first, -1),
        ):
            np.add.at(hessian, (rows_at, columns_at), sign * spread)
        step = np.linalg.solve(hessian, gradient)
        strengths += step
        if np.abs(step).max() < 1e-9:
            break
    return dict(zip(index, (strengths - strengths.mean()).tolist(), strict=True))


def win_rates(strengths: Sequence[float]) -> list[float]:
    """Mean probability in [0, 1] of each being preferred to one of the others; 0.5 for a single one."""
    s = np.array(strengths, dtype=float)
    if len(s) < 2:
        return [0.5] * len(s)
    beats = 1 / (1 + np.exp(s[None, :] - s[:, None]))
    rates: list[float] = ((beats.sum(axis=1) - 0.5) / (len(s) - 1)).tolist()
    return rates
