"""Balancing of an export by downsampling, oversampling or a temperature.

A cell is a combination of task type, difficulty and outcome. Rollouts of a cell are sampled without replacement, in
one pass and with a seed (selection sampling, Knuth, The Art of Computer Programming 2, 3.4.2, algorithm S). Only
counts are kept in memory.
"""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from assay.errors import ConfigError
from assay.support.settings import one_of

__all__ = ["BY", "METHODS", "Balance", "Sampler", "targets"]

METHODS = ("none", "down", "over", "temperature")
BY = ("task_type", "difficulty", "outcome")
Cell = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Settings of the balancing.

    Args:
        method: `none`; `down` reduces every cell to the size of the smallest; `over` repeats rollouts up to the size
            of the largest cell; `temperature` samples in proportion to n^temperature without repetition.
        by: Properties that define a cell: any of `task_type`, `difficulty`, `outcome`.
        most_copies: Maximum number of copies of a rollout with `over`.
        temperature: Exponent in [0, 1]: 1 keeps the proportions, 0 makes the cells equal.
        seed: Seed of the sampling.
    """

    method: str = "none"
    by: tuple[str, ...] = ("task_type",)
    most_copies: int = 3
    temperature: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"balance={self.method!r} {one_of(self.method, METHODS)}")
        if not self.by or (unknown := sorted(set(self.by) - set(BY))):
            raise ConfigError(f"by={list(self.by) if not self.by else unknown} must be one or more of {', '.join(BY)}")
        if self.most_copies < 1:
            raise ConfigError(f"most_copies={self.most_copies!r} must be at least 1")
        if not 0 <= self.temperature <= 1:
            raise ConfigError(f"temperature={self.temperature!r} of the balance must be between 0 and 1")


def targets(counts: Mapping[Cell, int], balance: Balance) -> dict[Cell, int]:
    """Number of rollouts in each cell after balancing, copies included.

    Args:
        counts: Number of rollouts in each cell before balancing.
    """
    nonempty = {cell: count for cell, count in counts.items() if count > 0}
    if not nonempty or balance.method == "none":
        return nonempty
    if balance.method == "down":
        return dict.fromkeys(nonempty, min(nonempty.values()))
    if balance.method == "over":
        return {cell: min(max(nonempty.values()), balance.most_copies * count) for cell, count in nonempty.items()}
    shares = {cell: count**balance.temperature for cell, count in nonempty.items()}
    scale = min(nonempty[cell] / share for cell, share in shares.items())
    return {cell: min(nonempty[cell], max(1, round(scale * share))) for cell, share in shares.items()}


class Sampler:
    """Decides for one rollout at a time how many copies are exported. The totals are exactly `targets`.

    Args:
        counts: Number of rollouts in each cell that will be passed to `take`.
    """

    def __init__(self, counts: Mapping[Cell, int], balance: Balance) -> None:
        self.before, self.after = dict(counts), Counter[Cell]()
        self._ahead, self._rng = dict(counts), random.Random(balance.seed)
        self._quotas = {cell: divmod(target, counts[cell]) for cell, target in targets(counts, balance).items()}
        self._extra = {cell: extra for cell, (_, extra) in self._quotas.items()}

    def take(self, cell: Cell) -> int:
        """Number of copies of the next rollout of a cell.

        Returns:
            0 if the rollout is left out, also if the cell has had all its counted rollouts.
        """
        remaining = self._ahead.get(cell, 0)
        if not remaining:
            return 0
        self._ahead[cell] = remaining - 1
        copies = self._quotas[cell][0]
        if self._rng.random() * remaining < self._extra[cell]:
            self._extra[cell] -= 1
            copies += 1
        self.after[cell] += copies
        return copies
