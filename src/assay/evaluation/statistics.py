"""Means, paired gains and their intervals. Resampling is seeded: the same scores give the same interval.

It also says how many tasks a comparison needs, and which difference it can show.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from assay.errors import ConfigError

_RESAMPLES = 4999
_AT_ONCE = 500_000  # drawn values in memory
BOOTSTRAP_MIN_LEVEL = 0.005  # smallest level of a bootstrap with so many resamples
FEWEST = 5  # pairs under which no interval is claimed
_ONE_SIDED = 0.05  # error of a one-sided interval


@dataclass(frozen=True)
class Gain:
    """Mean of the paired differences with its interval. With fewer than 5 pairs the interval is all of [-1, 1].

    Attributes:
        level: two-sided error of the interval: 0.05, or less where a comparison may stop early.
    """

    mean: float
    low: float
    high: float
    n: int
    level: float = 0.05

    @property
    def is_gain(self) -> bool:
        """Whether the whole interval is above zero."""
        return self.low > 0

    @classmethod
    def of(cls, data: Mapping[str, Any] | None) -> "Gain | None":
        """What `to_dict` gave; None of None."""
        return None if data is None else cls(**{**data, "mean": math.nan if data["mean"] is None else data["mean"]})

    def to_dict(self) -> dict[str, float | int | None]:
        """For JSON; `level` only where it is not 0.05."""
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in asdict(self).items()
            if key != "level" or value != 0.05
        }


def interval_of(
    values: Sequence[float] | np.ndarray, lowest: float, highest: float, *, level: float = 0.05,
    one_sided: bool = False, bootstrap: bool = True,
) -> tuple[float, float]:  # fmt: skip
    """The interval of the mean of bounded values, of confidence 1 - `level`: for scores, gates, comparisons and tests
    that are stopped early. Its ends do not depend on the order of the values.

    It is the widest of three:

    - the t interval of the values;
    - the t interval with `unseen_pairs(level)` added pairs of values at the ends of the range in the deviation, but not
      in the mean: a large loss on few tasks is often not among those that were run, and the deviation then says nothing
      of it;
    - the BCa bootstrap (Efron 1987, JASA 82:171), which is skewed as the values are. Below a level of 0.005 it has too
      few resamples in its tails and is not used. If all values are equal, the rule of three is used instead: a share of
      -ln(level) / n of the tasks may still differ, by at most the range.

    Args:
        lowest, highest: range of the values.
        one_sided: each end alone has the error `level`, not half of it.
        bootstrap: without it the interval is narrower or the same.
    """
    values = np.sort(np.asarray(values, dtype=float))
    n, added, tail = len(values), [lowest, highest] * unseen_pairs(level), level if one_sided else level / 2
    if n < FEWEST:
        return lowest, highest
    mean, spread = float(values.mean()), max(float(v.std(ddof=1)) for v in (values, np.append(values, added)))
    reach = _student(1 - tail, n - 1) * spread / math.sqrt(n)
    low, high = mean - reach, mean + reach
    if np.ptp(values) == 0:
        share = min(1.0, -math.log(level) / n)
        low, high = min(low, mean - share * (mean - lowest)), max(high, mean + share * (highest - mean))
    elif (
        bootstrap
        and 2 * tail >= BOOTSTRAP_MIN_LEVEL
        and all(map(math.isfinite, ends := _bootstrapped(values, 2 * tail)))
    ):
        low, high = min(low, ends[0]), max(high, ends[1])
    return max(lowest, low), min(highest, high)


def unseen_pairs(level: float) -> int:
    """Pairs of values at the ends of the range that an interval of confidence 1 - `level` adds to the deviation.

    By the rule of three, -ln(level) of n tasks may be of a kind that none of them shows. Half of these are put at each
    end of the range: two pairs at 95 %, three at 99 %.
    """
    return math.ceil(-math.log(level) / 2)


def shows_gain(differences: Sequence[float] | np.ndarray, *, level: float) -> bool:
    """Whether paired differences in [-1, 1] show a mean above zero: the lower end of their one-sided interval of
    confidence 1 - `level` is above it."""
    # The bootstrap takes nearly all of the time and only widens: it is computed where a gain is shown without it.
    return all(
        interval_of(differences, -1.0, 1.0, level=level, one_sided=True, bootstrap=bootstrap)[0] > 0
        for bootstrap in (False, True)
    )


def _student(share: float, freedom: int) -> float:
    """Quantile of Student's t. `scipy.special` takes a third of the memory and time that `scipy.stats` takes."""
    from scipy import special

    return float(special.stdtrit(freedom, share))


def _bootstrapped(values: np.ndarray, level: float) -> tuple[float, float]:
    """BCa interval of the mean (Efron 1987, JASA 82:171), as `scipy.stats.bootstrap` computes it with the same seed.

    Returns:
        NaN at an end that the resamples do not have.
    """
    from scipy import special

    n, rng, means = len(values), np.random.default_rng(0), np.empty(_RESAMPLES)
    at_once = max(1, _AT_ONCE // n)  # rows of a matrix that stays small; the stream of draws is the same
    for start in range(0, _RESAMPLES, at_once):
        rows = min(at_once, _RESAMPLES - start)
        means[start : start + rows] = values[rng.integers(0, n, (rows, n))].mean(axis=1)
    mean = values.mean()
    below = (np.count_nonzero(means < mean) + np.count_nonzero(means <= mean)) / (2 * _RESAMPLES)
    # A mean without one value differs from the mean of all by (mean - value) / (n - 1).
    influence = values - mean
    acceleration = (influence**3).sum() / (6 * (influence**2).sum() ** 1.5)
    bias, tail = float(special.ndtri(below)), float(special.ndtri(level / 2))
    ends = [bias + edge / (1 - acceleration * edge) for edge in (bias + tail, bias - tail)]
    if not all(map(math.isfinite, ends)):
        return math.nan, math.nan
    low, high = np.quantile(means, special.ndtr(ends))
    return float(low), float(high)


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean of scores in [0, 1]; unscored ones are left out."""
    return interval_of([score for score in scores if not math.isnan(score)], 0.0, 1.0)


def differences_of(before: Mapping[str, float], after: Mapping[str, float]) -> np.ndarray:
    """`after` minus `before` of the tasks scored in both, by task id."""
    pairs = [(before[key], after[key]) for key in sorted(before.keys() & after.keys())]
    return np.array([b - a for a, b in pairs if not (math.isnan(a) or math.isnan(b))])


def paired_gain(before: Mapping[str, float], after: Mapping[str, float], *, level: float = 0.05) -> Gain:
    """`after` minus `before` over the tasks scored in both, by task id.

    Args:
        level: error of the interval; below 0.05 for one of several interim analyses, see `assay.evaluation.statistics`.
    """
    differences = differences_of(before, after)
    if len(differences) == 0:
        return Gain(math.nan, -1.0, 1.0, 0, level)
    low, high = interval_of(differences, -1.0, 1.0, level=level)
    return Gain(float(differences.mean()), low, high, len(differences), level)


def mean_difference(differences: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean of paired differences without bounds, such as tokens, with a 95 % t interval; none under 5 pairs."""
    values = np.array(differences, dtype=float)
    if len(values) < FEWEST:
        return (float(values.mean()) if len(values) else math.nan), None, None
    reach = _student(0.975, len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    mean = float(values.mean())
    return mean, mean - reach, mean + reach


def largest_loss(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Upper end of the one-sided 95 % interval of the paired loss, `before` minus `after`, in [-1, 1].

    If it is at most a margin that was declared before, `after` is shown to be no more than the margin worse
    (non-inferiority). Where all differences are equal, a share of 3 / n of the tasks may still lose everything (the
    rule of three). With fewer than 5 pairs nothing is shown: 1.0.

    Worked: no score differs on 300 tasks: 2.996 / 300 = 0.00999.
    """
    differences = differences_of(before, after)
    if len(differences) < FEWEST:
        return 1.0
    if np.ptp(differences) == 0:
        mean = float(differences[0])
        return min(1.0, -math.log(_ONE_SIDED) / len(differences)) * (mean + 1) - mean
    return -interval_of(differences, -1.0, 1.0, level=_ONE_SIDED, one_sided=True)[0]


def lossless_tasks(margin: float) -> int:
    """Tasks that `largest_loss` needs for a margin in (0, 1] if no score differs: -ln(0.05) / margin, at least 5.

    Worked: margin 0.01, 2.996 / 0.01 = 299.6, so 300 tasks.
    """
    return max(FEWEST, math.ceil(-math.log(_ONE_SIDED) / margin))


def losing_evidence(leader: Mapping[str, float], other: Mapping[str, float], *, order: Sequence[str]) -> float:
    """Evidence against `other` being as good as `leader`: an e-value, valid at every interim check.

    It is the wealth of a bet on the paired differences in [-1, 1], averaged over several bet sizes. If `other` is as
    good, it ever reaches 1 / alpha with probability at most alpha, however often it is checked and whatever the
    distribution of the scores.
    Source: Waudby-Smith and Ramdas 2024, JRSS B 86:1 (betting); Ville's inequality.

    Args:
        order: task ids in the order of their evaluation.
    """
    keys = [key for key in order if key in leader and key in other]
    differences = np.array(
        [leader[key] - other[key] for key in keys if not (math.isnan(leader[key]) or math.isnan(other[key]))]
    )
    bets = np.linspace(0.1, 0.9, 9)
    return float(np.prod(1 + bets[:, None] * differences[None, :], axis=1).mean()) if len(differences) else 1.0


# -- Group sequential tests of paired comparisons: when to stop early, and how many tasks are needed.
#
# The error of 5 % is spent over the interim analyses by a spending function (Lan and DeMets 1983, Biometrika 70:659) of
# the family of Hwang, Shih and DeCani (1990, Stat Med 9:1439). The reported interval is the repeated confidence
# interval (Jennison and Turnbull 1989, JRSS B 51:305): all intervals of one comparison contain the true value
# simultaneously with at least 95 % probability, whenever the comparison stops. Does not run programs:
# `assay.evaluation.comparison` does.


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


def tasks_needed(difference: float, *, spread: float = WORST_SPREAD) -> int:
    """Tasks with which a paired comparison shows a true `difference` with probability `POWER`.

    The smallest number whose `detectable_difference` is at most that.

    Worked: difference 0.1, spread 0.5: 215 tasks.

    Args:
        difference: of mean scores, in (0, 1].
        spread: standard deviation of the paired differences, see `spread_of`.
    """
    if not 0 < difference <= 1:
        raise ConfigError(f"`difference={difference!r}` must be above 0 and at most 1")

    def shows(tasks: int) -> bool:
        return detectable_difference(tasks, spread=spread) <= difference

    return bisect.bisect_left(range(_MOST_TASKS), True, lo=FEWEST, key=shows)


def detectable_difference(tasks: int, *, spread: float = WORST_SPREAD) -> float:
    """The true difference of mean scores that a comparison of `tasks` pairs shows with probability `POWER`.

    (z(1 - ALPHA / 2) * s + z(POWER) * spread) / sqrt(n), with n 2 tasks less for the t distribution and 3 % less for
    the interim analyses, and s the deviation with the pairs of values that `interval_of` adds: s^2 = spread^2 + 2 k /
    tasks, k = `unseen_pairs(ALPHA)`. In (0, 1]; fewer than 5 tasks cannot show any difference: 1.0.

    Worked: 215 tasks, spread 0.5: s^2 = 0.25 + 4 / 215, s = 0.518; (1.960 * 0.518 + 0.842 * 0.5) * sqrt(1.03 / 213) =
    0.0999.
    """
    if tasks < FEWEST:
        return 1.0
    from scipy import special

    widened = math.sqrt(spread**2 + 2 * unseen_pairs(ALPHA) / tasks)
    reach = float(special.ndtri(1 - ALPHA / 2)) * widened + float(special.ndtri(POWER)) * spread
    return min(1.0, reach * math.sqrt(_INFLATION / (tasks - 2)))


@functools.cache
def fewest_to_accept() -> int:
    """Tasks from which on a comparison can show a gain at all: with fewer not even if every task goes from 0 to 1.

    With n tasks the interval's lower end is 1 - t(1 - ALPHA / 2, n - 1) * s / sqrt(n), with s the deviation of n values
    of 1 and the added pairs. Six at 95 %.
    """
    return next(n for n in itertools.count(FEWEST) if interval_of([1.0] * n, -1.0, 1.0, level=ALPHA)[0] > 0)


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
    from scipy import special

    levels: list[float] = []
    grid, density = np.zeros(1), np.ones(1)
    before, used = 0.0, 0.0
    for fraction in fractions:
        step, allowed = math.sqrt(fraction - before), spent(fraction, alpha) - used
        low, high = 0.0, 12.0
        for _ in range(60):  # bisection: the chance of crossing now falls as the boundary rises
            middle = (low + high) / 2
            edge = middle * math.sqrt(fraction)
            beyond = special.ndtr((grid - edge) / step) + special.ndtr((-edge - grid) / step)
            crossed = float((density * beyond).sum())
            low, high = (middle, high) if crossed > allowed else (low, middle)
        edge = high * math.sqrt(fraction)
        ahead = np.linspace(-edge, edge, _GRID)
        weights = np.full(_GRID, ahead[1] - ahead[0])
        weights[[0, -1]] /= 2
        moves = np.exp(-(((ahead[None, :] - grid[:, None]) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
        density = (density[:, None] * moves).sum(axis=0) * weights
        grid, before, used = ahead, fraction, spent(fraction, alpha)
        levels.append(2 * float(special.ndtr(-high)))
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
        from scipy import special

        spread = max(float(values.std(ddof=1)), math.sqrt(self.difference * (1 - self.difference)))
        aim = max(self.difference, detectable_difference(self.tasks, spread=spread))
        moved = float(values.mean()) / spread * math.sqrt(len(values)) * math.sqrt(fraction)
        drift = aim / spread * math.sqrt(len(values) / fraction)
        critical = float(special.ndtri(1 - ALPHA / 2)) + 0.05
        return float(special.ndtr((moved + drift * (1 - fraction) - critical) / math.sqrt(1 - fraction)))
