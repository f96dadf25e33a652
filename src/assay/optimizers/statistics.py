"""Means, paired gains and their intervals. Resampling is seeded: the same scores give the same interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy import stats

__all__ = ["Gain", "losing_p", "mean_interval", "paired_gain"]

_RESAMPLES = 4999
_FEWEST = 5  # pairs under which no interval is claimed


@dataclass(frozen=True)
class Gain:
    """Mean of the paired differences with its 95 % interval. With fewer than 5 pairs the interval is all of [-1, 1]."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def is_gain(self) -> bool:
        """Whether the interval lies above zero."""
        return self.low > 0

    def to_dict(self) -> dict[str, float | int | None]:
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(self).items()}


def _interval(values: np.ndarray) -> tuple[float, float]:
    """BCa bootstrap of the mean (Efron 1987, JASA 82:171), percentile where BCa is not defined."""
    if len(values) < _FEWEST:
        return -1.0, 1.0
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    for method in ("BCa", "percentile"):
        rng = np.random.default_rng(0)
        found = stats.bootstrap((values,), np.mean, n_resamples=_RESAMPLES, method=method, rng=rng).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            break
    return float(found.low), float(found.high)


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean of scores in [0, 1]; unscored ones are left out."""
    values = np.array([score for score in scores if not math.isnan(score)])
    low, high = _interval(values)
    return max(0.0, low), min(1.0, high)


def _differences(before: Mapping[str, float], after: Mapping[str, float]) -> np.ndarray:
    pairs = [(before[key], after[key]) for key in sorted(before.keys() & after.keys())]
    return np.array([b - a for a, b in pairs if not (math.isnan(a) or math.isnan(b))])


def paired_gain(before: Mapping[str, float], after: Mapping[str, float]) -> Gain:
    """`after` minus `before` over the tasks scored in both, by task id."""
    differences = _differences(before, after)
    if len(differences) == 0:
        return Gain(math.nan, -1.0, 1.0, 0)
    low, high = _interval(differences)
    return Gain(float(differences.mean()), low, high, len(differences))


def losing_p(leader: Mapping[str, float], other: Mapping[str, float]) -> float:
    """One-sided p-value of `other` being as good as `leader`, by a paired t test; 1 where there is nothing to test."""
    differences = _differences(other, leader)
    if len(differences) < _FEWEST or differences.mean() <= 0:
        return 1.0
    if np.ptp(differences) == 0:
        return 0.0
    return float(stats.ttest_1samp(differences, 0.0, alternative="greater").pvalue)
