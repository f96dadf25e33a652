"""The interval of a mean against scipy's own bootstrap and quantiles."""

import numpy as np
import pytest
from scipy import stats

from assay.evaluation.statistics import interval_of


@pytest.mark.parametrize("values", [[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0], np.random.default_rng(1).random(40) ** 3])
def test_intervals_are_the_wider_of_scipys(values: list[float]) -> None:
    sample = np.array(values)
    result = stats.bootstrap(
        (sample,), np.mean, n_resamples=4999, method="BCa", confidence_level=0.95, rng=np.random.default_rng(0)
    )
    reach = stats.t.ppf(0.975, len(sample) - 1) * sample.std(ddof=1) / len(sample) ** 0.5
    low = min(result.confidence_interval.low, sample.mean() - reach)
    high = max(result.confidence_interval.high, sample.mean() + reach)
    assert interval_of(sample, -9.0, 9.0) == pytest.approx((low, high), abs=1e-10)


def test_a_single_large_value_of_many_has_an_interval() -> None:
    low, high = interval_of(np.array([0.0] * 9 + [1.0]), 0.0, 1.0)
    assert 0.0 <= low < 0.1 < high <= 1.0
