"""Group sequential tests of paired comparisons: when to stop early, and how many tasks are needed.

The error of 5 % is spent over the interim analyses by a spending function (Lan and DeMets 1983, Biometrika 70:659) of
the family of Hwang, Shih and DeCani (1990, Stat Med 9:1439). The reported interval is the repeated confidence interval
(Jennison and Turnbull 1989, JRSS B 51:305): all intervals of one comparison contain the true value simultaneously with
at least 95 % probability, whenever the comparison stops.
Does not run programs: `assay.evaluation.comparison` does.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assay.errors import ConfigError
from assay.evaluation.statistics import FEWEST, interval_of, unseen_pairs

ALPHA = 0.05  # two-sided error of all evaluations together
POWER = 0.8
# Standard deviation of paired differences that is assumed without data; 0.3 to 0.6 is usual for right or wrong.
WORST_SPREAD = 0.5
LEAST_SPREAD = 0.3
_GAMMA = -4.0  # of the spending function: little error is spent early, so the last evaluation loses almost no power
_EVALUATIONS = 5
_FIRST = 10  # pairs under which nothing is decided early
_INFLATION = 1.03  # tasks that a sequential design needs more, for this spending function and up to 5 evaluations
_FUTILE = 0.2  # conditional power below which a comparison stops
_GRID = 2001
_MOST_TASKS = 10**9  # that `tasks_needed` answers


def tasks_needed(difference: float, *, spread: float = WORST_SPREAD, power: float = POWER, alpha: float = ALPHA) -> int:
    """Tasks with which a paired comparison shows a true `difference` with probability `power`.

    The smallest number whose `detectable_difference` is at most that.

    Worked: difference 0.1, spread 0.5: 215 tasks.

    Args:
        difference: of mean scores, in (0, 1].
        spread: standard deviation of the paired differences, see `spread_of`.
        power: in (0, 1).
    """
    if not 0 < difference <= 1:
        raise ConfigError(f"difference={difference!r} must be above 0 and at most 1")

    def shows(tasks: int) -> bool:
        return detectable_difference(tasks, spread=spread, power=power, alpha=alpha) <= difference

    return bisect.bisect_left(range(_MOST_TASKS), True, lo=FEWEST, key=shows)


def detectable_difference(
    tasks: int, *, spread: float = WORST_SPREAD, power: float = POWER, alpha: float = ALPHA
) -> float:
    """The true difference of mean scores that a comparison of `tasks` pairs shows with probability `power`.

    (z(1 - alpha / 2) * s + z(power) * spread) / sqrt(n), with n 2 tasks less for the t distribution and 3 % less for
    the interim analyses, and s the deviation with the pairs of values that `interval_of` adds: s^2 = spread^2 + 2 k /
    tasks, k = `unseen_pairs(alpha)`. In (0, 1]; fewer than 5 tasks cannot show any difference: 1.0.

    Worked: 215 tasks, spread 0.5: s^2 = 0.25 + 4 / 215, s = 0.518; (1.960 * 0.518 + 0.842 * 0.5) * sqrt(1.03 / 213) =
    0.0999.
    """
    if tasks < FEWEST:
        return 1.0
    from scipy import special

    widened = math.sqrt(spread**2 + 2 * unseen_pairs(alpha) / tasks)
    reach = float(special.ndtri(1 - alpha / 2)) * widened + float(special.ndtri(power)) * spread
    return min(1.0, reach * math.sqrt(_INFLATION / (tasks - 2)))


@functools.cache
def fewest_to_accept(*, alpha: float = ALPHA) -> int:
    """Tasks from which on a comparison can show a gain at all: with fewer not even if every task goes from 0 to 1.

    With n tasks the interval's lower end is 1 - t(1 - alpha / 2, n - 1) * s / sqrt(n), with s the deviation of n values
    of 1 and the added pairs. Six at 95 %.
    """
    return next(n for n in itertools.count(FEWEST) if interval_of([1.0] * n, -1.0, 1.0, level=alpha)[0] > 0)


def spread_of(differences: Sequence[float]) -> float:
    """Standard deviation of paired differences, from other tasks than those that are to be compared.

    Ten pairs with `WORST_SPREAD` are added, because the deviation of a few pairs is imprecise.
    """
    values = np.array(differences, dtype=float)
    if len(values) < 2:
        return WORST_SPREAD
    return float(math.sqrt((len(values) * values.var() + 10 * WORST_SPREAD**2) / (len(values) + 10)))


def spent(fraction: float, alpha: float = ALPHA) -> float:
    """Cumulative error that may be spent once this fraction of the tasks is evaluated."""
    return alpha * (1 - math.exp(-_GAMMA * min(1.0, fraction))) / (1 - math.exp(-_GAMMA))


@functools.lru_cache(maxsize=256)
def nominal_levels(fractions: tuple[float, ...], alpha: float = ALPHA) -> tuple[float, ...]:
    """The two-sided level of each evaluation, so that all together err with `alpha`.

    Source: the recursion of Armitage, McPherson and Rowe (1969, JRSS A 132:235), which carries the density of the sums
    that have not crossed the boundary from one evaluation to the next, on a grid.

    Args:
        fractions: shares of the tasks that are evaluated by then, rising, the last one 1.
    """
    from scipy import stats

    levels: list[float] = []
    grid, density = np.zeros(1), np.ones(1)
    before, used = 0.0, 0.0
    for fraction in fractions:
        step, allowed = math.sqrt(fraction - before), spent(fraction, alpha) - used
        low, high = 0.0, 12.0
        for _ in range(60):  # bisection: the chance of crossing now falls as the boundary rises
            middle = (low + high) / 2
            edge = middle * math.sqrt(fraction)
            crossed = float(
                (density * (stats.norm.sf((edge - grid) / step) + stats.norm.cdf((-edge - grid) / step))).sum()
            )
            low, high = (middle, high) if crossed > allowed else (low, middle)
        edge = high * math.sqrt(fraction)
        ahead = np.linspace(-edge, edge, _GRID)
        weights = np.full(_GRID, ahead[1] - ahead[0])
        weights[[0, -1]] /= 2
        density = (density[:, None] * stats.norm.pdf((ahead[None, :] - grid[:, None]) / step) / step).sum(
            axis=0
        ) * weights
        grid, before, used = ahead, fraction, spent(fraction, alpha)
        levels.append(2 * float(stats.norm.sf(high)))
    return tuple(levels)


@dataclass(frozen=True)
class Decision:
    """The result of one interim analysis. `level` is the error of its interval; `why` is empty if it continues."""

    stop: bool
    level: float
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class SequentialTest:
    """When a paired comparison is evaluated, and when it stops.

    Args:
        tasks: maximum number of tasks.
        difference: true difference that the test is planned for; with few tasks the larger one that they can show.
        futility: also stop if the difference is unlikely to be shown. It costs a little power and adds no error.
    """

    tasks: int
    difference: float = 0.1
    futility: bool = True

    @property
    def evaluations(self) -> tuple[int, ...]:
        """Numbers of tasks after which it is evaluated; the last is all of them."""
        count = max(1, min(_EVALUATIONS, self.tasks // _FIRST))
        return tuple(math.ceil(self.tasks * k / count) for k in range(1, count + 1))

    def level(self, done: Sequence[int]) -> float:
        """The level of the last evaluation.

        Args:
            done: number of tasks at each evaluation, including one that a cap cut short.
        """
        return nominal_levels(tuple(min(1.0, count / self.tasks) for count in done))[-1]

    def decide(self, differences: Sequence[float], done: Sequence[int]) -> Decision:
        """Whether to stop after `done[-1]` tasks.

        Args:
            differences: paired differences of the tasks scored so far.
            done: number of tasks at each evaluation so far, this one included.
        """
        level = self.level(done)
        if done[-1] >= self.tasks:
            return Decision(True, level)
        values = np.array(differences, dtype=float)
        if len(values) < _FIRST:
            return Decision(False, level)
        low, high = interval_of(values, -1.0, 1.0, level=level)
        if low > 0 or high < 0:
            return Decision(True, level, "decided")
        if self.futility and self._chance(values, done[-1] / self.tasks) < _FUTILE:
            return Decision(True, level, "futile")
        return Decision(False, level)

    def _chance(self, values: np.ndarray, fraction: float) -> float:
        """Conditional power: the probability of showing the difference at the end, if it is true for the remaining
        tasks.

        Source: Lan, Simon and Halperin 1982, Commun Stat C 1:207.
        """
        from scipy import stats

        spread = max(float(values.std(ddof=1)), math.sqrt(self.difference * (1 - self.difference)))
        aim = max(self.difference, detectable_difference(self.tasks, spread=spread))
        moved = float(values.mean()) / spread * math.sqrt(len(values)) * math.sqrt(fraction)
        drift = aim / spread * math.sqrt(len(values) / fraction)
        critical = float(stats.norm.ppf(1 - ALPHA / 2)) + 0.05
        return float(stats.norm.sf((critical - moved - drift * (1 - fraction)) / math.sqrt(1 - fraction)))
