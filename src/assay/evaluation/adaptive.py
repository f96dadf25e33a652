"""Promotion by a sealed gate that answers an optimizer again and again: few looks, one bit each.

An optimizer such as a coding agent submits one text after another, and chooses each by what the earlier answers showed.
A test of 5 % for each submission, or a threshold on a released score, promotes a text without a gain sooner or later.
This rule bounds the probability that any text is promoted without a gain over the champion, whatever is submitted.

A submission is compared with the champion on val first (`passes_screen`). If val shows a gain, the submission takes a
look at gate: on all tasks, paired, one-sided, without an early stop. The answer is yes or no; no score is released.
Look k of L, after j promotions, has the level

    alpha / L * v[j] / C(k - 1, j),    v = 0.8, 0.15, 0.05

After L looks, or as many promotions as v has entries, the gate is used up, and a new one is needed.

Why it holds: the optimizer knows of gate only the answers so far. Given these, its next submission and the champion are
chosen without gate, as if they had been fixed before, so a look errs with its level. Of the histories before look k,
C(k - 1, j) have j promotions, so by the union bound over all looks at which any optimizer can arrive, the error is

    sum over k, j of C(k - 1, j) * alpha / L * v[j] / C(k - 1, j) = alpha / L * sum over k of sum(v) = alpha.

Val has other tasks than gate: overfitting val wastes looks and adds no error. Rare large losses are covered by the
rule of all intervals here (`assay.evaluation.statistics.unseen_pairs`), at the level of the look. The bound is as good
as the interval of a look: if every submission gains 0.1 on 90 % of 300 tasks and loses 0.9 on the others, 6 % of runs
promote one, as a look at 0.4 % accepts 0.52 % of such texts (`benchmarks/results/2026-11-30-referee.md`).

Does not run programs, and does not know who looked before: `assay.jobs.referee` does.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from assay.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

ALPHA = 0.05  # probability of any promotion without a gain
LOOKS = 10
_SHARES = (0.8, 0.15, 0.05)  # of a look's error, by the number of promotions before it
MOST_PROMOTIONS = len(_SHARES)
SCREEN_LEVEL = 0.05  # one-sided, of the comparison on val
RECOMMENDED_TASKS = 100  # of gate; fewer find only gains of about 0.2 (`benchmarks/referee.py`)


def look_level(look: int, promotions: int, *, looks: int = LOOKS, alpha: float = ALPHA) -> float:
    """One-sided level of a look, in (0, alpha).

    Worked: look 1 of 10: 0.005 * 0.8 / C(0, 0) = 0.004. Look 3 after one promotion: 0.005 * 0.15 / C(2, 1) = 0.000375.

    Args:
        look: its number, from 1 to `looks`.
        promotions: number of promotions before it, at most `look - 1`.
    Raises:
        ConfigError: the gate is used up.
    """
    if not 1 <= look <= looks or not 0 <= promotions < min(look, MOST_PROMOTIONS):
        raise ConfigError(
            f"look {look} after {promotions} promotions is not one of {looks} looks with at most {MOST_PROMOTIONS} "
            "promotions: the gate is used up, and a decision needs other gate tasks"
        )
    return alpha / looks * _SHARES[promotions] / math.comb(look - 1, promotions)


def passes_screen(differences: "Sequence[float] | np.ndarray") -> bool:
    """Whether val shows a gain over the champion, so that a look at gate is worth its price.

    Args:
        differences: paired differences of scores on val, candidate minus champion, in [-1, 1].
    """
    from assay.evaluation.statistics import shows_gain

    return shows_gain(differences, level=SCREEN_LEVEL)


def fewest_gate_tasks(looks: int = LOOKS) -> int:
    """Tasks of gate from which on the first look can promote at all: a text that gains 1 on every task."""
    from assay.evaluation.statistics import FEWEST, shows_gain

    level = look_level(1, 0, looks=looks)
    return next(n for n in itertools.count(FEWEST) if shows_gain([1.0] * n, level=level))


@dataclass(kw_only=True)
class AdaptiveGate:
    """The looks at one gate. Not thread-safe: a look depends on all answers before it.

    Args:
        looks: number of looks in all.
        answers: of the looks so far, in their order: whether the text was promoted.
    """

    looks: int = LOOKS
    answers: list[bool] = field(default_factory=list)

    @property
    def promotions(self) -> int:
        return sum(self.answers)

    @property
    def used_up(self) -> bool:
        """Whether no look is left."""
        return len(self.answers) >= self.looks or self.promotions >= MOST_PROMOTIONS

    @property
    def level(self) -> float:
        """One-sided level of the next look.

        Raises:
            ConfigError: no look is left.
        """
        return look_level(len(self.answers) + 1, self.promotions, looks=self.looks)

    def look(self, differences: "Sequence[float] | np.ndarray") -> bool:
        """Whether the candidate is promoted. Counts the look.

        Args:
            differences: paired differences on all gate tasks, candidate minus champion, in [-1, 1].
        Raises:
            ConfigError: no look is left.
        """
        from assay.evaluation.statistics import shows_gain

        promoted = shows_gain(differences, level=self.level)
        self.answers.append(promoted)
        return promoted
