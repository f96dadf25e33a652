"""Confidence sequences: worked values, coverage at all times at once, and refusals."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from assay.deployment.readings import betting, normal_mixture, obrien_fleming
from assay.errors import ConfigError


def test_width_of_the_normal_mixture_is_the_worked_one() -> None:
    # I = 100, r = 100 / (2 log 20 + log(1 + 2 log 20)) = 12.60; sqrt(112.60 * log(112.60 / (12.60 * 0.0025))) / 100
    assert normal_mixture(0.01, alpha=0.05, planned=0.01) == pytest.approx(0.3035, abs=1e-4)


def test_normal_mixture_covers_the_mean_at_all_times_at_once() -> None:
    random, missed = np.random.default_rng(0), 0
    radius = [normal_mixture(1 / n, alpha=0.1, planned=1 / 200) for n in range(1, 1001)]
    for _ in range(400):
        means = np.cumsum(random.normal(size=1000)) / np.arange(1, 1001)
        missed += bool((np.abs(means) > radius).any())
    assert missed <= 55  # 10 % of 400 and two standard errors; intervals for one time miss in 60 % and more


def test_unknown_variance_gives_an_infinite_width() -> None:
    assert normal_mixture(math.inf, alpha=0.05, planned=0.01) == math.inf


@pytest.mark.parametrize("values", [(0.0, 0.05, 0.01), (0.01, 0.0, 0.01), (0.01, 1.0, 0.01), (0.01, 0.05, 0.0)])
def test_impossible_arguments_of_the_normal_mixture_are_refused(values: tuple[float, float, float]) -> None:
    variance, alpha, planned = values
    with pytest.raises(ConfigError, match="must be above 0"):
        normal_mixture(variance, alpha=alpha, planned=planned)


def test_bounds_of_betting_are_the_worked_ones() -> None:
    # no success in 15: 1 - (0.1445 / 20)^(1 / 15) = 0.280
    assert betting(0, 15, alpha=0.05) == (0.0, pytest.approx(0.2801, abs=1e-4))
    low, high = betting(15, 15, alpha=0.05)
    assert (low, high) == (pytest.approx(0.7199, abs=1e-4), 1.0)


@pytest.mark.slow
def test_betting_sequence_covers_a_small_rate_at_all_times_at_once() -> None:
    random, missed = np.random.default_rng(1), 0
    for _ in range(200):
        totals = np.cumsum(random.random(300) < 0.1)
        missed += any(
            not low <= 0.1 <= high for low, high in (betting(totals[n - 1], n, alpha=0.1) for n in range(1, 301, 3))
        )
    assert missed <= 28  # 10 % of 200 and two standard errors


@given(st.integers(1, 500), st.floats(0, 1), st.sampled_from([0.01, 0.05, 0.2]))
def test_betting_sequence_contains_the_observed_mean(count: int, share: float, alpha: float) -> None:
    low, high = betting(share * count, count, alpha=alpha)
    assert 0 <= low <= share + 1e-9
    assert share - 1e-9 <= high <= 1


def test_betting_sequence_without_values_has_the_whole_range() -> None:
    assert betting(0, 0, alpha=0.05) == (0.0, 1.0)


@pytest.mark.parametrize(("total", "count"), [(2, 1), (-1, 5), (0, -1)])
def test_impossible_totals_are_refused(total: float, count: float) -> None:
    with pytest.raises(ConfigError, match="must be between 0 and count"):
        betting(total, count, alpha=0.05)


def test_critical_values_of_obrien_and_fleming_are_the_published_ones() -> None:
    # Jennison and Turnbull 2000, table 2.3: C = 2.040 for five evaluations at 5 %
    assert [round(obrien_fleming(k, 5), 2) for k in range(1, 6)] == [4.56, 3.23, 2.63, 2.28, 2.04]
    assert obrien_fleming(1, 1) == pytest.approx(1.96, abs=0.002)


def test_an_evaluation_beyond_the_planned_ones_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be between 1 and evaluations=3"):
        obrien_fleming(4, 3)
