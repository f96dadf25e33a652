"""How many of each kind of rollout go into an export: down, up or in between, seeded and in one pass.

A cell is a combination of task type, difficulty and outcome. Its rollouts are drawn without replacement by their order
(selection sampling, Knuth, The Art of Computer Programming 2, 3.4.2, algorithm S), so that only counts are kept in memory.
"""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from assay.errors import ConfigError

__all__ = ["BY", "METHODS", "Balance", "Sampler", "targets"]

METHODS = ("none", "down", "over", "temperature")
BY = ("task_type", "difficulty", "outcome")
Cell = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Args:
    method: `down`: every cell as small as the smallest; `over`: repeated towards the largest, at most `most_copies` times;
        `temperature`: in proportion to n^temperature (1 leaves them, 0 makes them equal), none repeated.
    """

    method: str = "none"
    by: tuple[str, ...] = ("task_type",)
    most_copies: int = 3
    temperature: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"balance={self.method!r} must be one of {', '.join(METHODS)}")
        if not self.by or (unknown := sorted(set(self.by) - set(BY))):
            raise ConfigError(f"balance by {list(self.by) if not self.by else unknown}: it goes by {', '.join(BY)}")
        if self.most_copies < 1:
            raise ConfigError(f"most_copies={self.most_copies!r} must be at least 1")
        if not 0 <= self.temperature <= 1:
            raise ConfigError(f"temperature={self.temperature!r} of the balance must be between 0 and 1")


def targets(counts: Mapping[Cell, int], balance: Balance) -> dict[Cell, int]:
    """How many rollouts, repeats included, each cell is to have."""
    known = {cell: count for cell, count in counts.items() if count > 0}
    if not known or balance.method == "none":
        return known
    if balance.method == "down":
        return dict.fromkeys(known, min(known.values()))
    if balance.method == "over":
        return {cell: min(max(known.values()), balance.most_copies * count) for cell, count in known.items()}
    shares = {cell: count**balance.temperature for cell, count in known.items()}
    whole = min(known[cell] / share for cell, share in shares.items())
    return {cell: min(known[cell], max(1, round(whole * share))) for cell, share in shares.items()}


class Sampler:
    """Says of one rollout after the other how many copies of it are taken: exactly `targets` in all."""

    def __init__(self, counts: Mapping[Cell, int], balance: Balance) -> None:
        self.before, self.after = dict(counts), Counter[Cell]()
        self._ahead, self._rng = dict(counts), random.Random(balance.seed)
        self._wanted = {cell: divmod(target, counts[cell]) for cell, target in targets(counts, balance).items()}
        self._extra = {cell: extra for cell, (_, extra) in self._wanted.items()}

    def take(self, cell: Cell) -> int:
        """Copies of the next rollout of a cell; 0 leaves it out. Rollouts beyond the counted ones are left out."""
        ahead = self._ahead.get(cell, 0)
        if not ahead:
            return 0
        self._ahead[cell] = ahead - 1
        copies = self._wanted[cell][0]
        if self._rng.random() * ahead < self._extra[cell]:
            self._extra[cell] -= 1
            copies += 1
        self.after[cell] += copies
        return copies
