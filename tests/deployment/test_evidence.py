"""Differences between the arms: strata, units, assignment, and intervals that hold at all times at once."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from assay.deployment.evidence import (
    CANDIDATE,
    CHAMPION,
    Cell,
    arm_of,
    cell_of,
    difference,
    mean_of,
    position,
    probability,
)  # fmt: skip
from assay.deployment.readings import betting, normal_mixture, obrien_fleming
from assay.errors import ConfigError

SALT = "s"


def cell(rate: float, units: int, name: str, each: int = 1) -> Cell:
    """Units with `each` equal values; the first of them have 1, so that their mean is about `rate`."""
    ones = round(rate * units)
    return cell_of([(f"{name}{at}", each, float(each) * (at < ones)) for at in range(units)], salt=SALT)


def test_difference_and_its_variance_are_those_of_two_proportions() -> None:
    estimate = difference({(0, "t"): {CANDIDATE: cell(0.5, 100, "c"), CHAMPION: cell(0.3, 100, "k")}})
    assert estimate.mean == pytest.approx(0.2)
    assert estimate.champion == pytest.approx(0.3)
    # 0.5 * 0.5 / 100 + 0.3 * 0.7 / 100 = 0.0046; units share a bucket now and then
    assert estimate.variance == pytest.approx(0.0046, rel=0.15)


def test_stages_are_not_pooled_while_base_rate_and_share_rise() -> None:
    early = {CANDIDATE: cell(0.6, 50, "a"), CHAMPION: cell(0.6, 450, "b")}
    late = {CANDIDATE: cell(0.8, 250, "c"), CHAMPION: cell(0.8, 250, "d")}
    assert difference({(1, "t"): early, (2, "t"): late}).mean == pytest.approx(0.0)
    pooled = (30 + 200) / 300 - (270 + 200) / 700
    assert pooled > 0.09  # the gain that pooling shows


def test_variance_counts_units_and_not_their_values() -> None:
    once = difference({(0, "t"): {CANDIDATE: cell(0.5, 40, "c"), CHAMPION: cell(0.5, 40, "k")}})
    often = difference({(0, "t"): {CANDIDATE: cell(0.5, 40, "c", 100), CHAMPION: cell(0.5, 40, "k", 100)}})
    assert often.variance == pytest.approx(once.variance)


def test_a_unit_in_two_strata_counts_once() -> None:
    def half(name: str) -> Cell:
        return cell(0.5, 40, name)

    one = difference({(0, "a"): {CANDIDATE: half("c"), CHAMPION: half("k")}})
    same = {CANDIDATE: half("c"), CHAMPION: half("k")}
    both = difference({(0, "a"): same, (0, "b"): same})
    others = difference({(0, "a"): same, (0, "b"): {CANDIDATE: half("x"), CHAMPION: half("y")}})
    assert both.variance == pytest.approx(one.variance)
    assert others.variance < 0.6 * one.variance


def test_equal_values_do_not_give_a_variance_of_zero() -> None:
    estimate = difference({(0, "t"): {CANDIDATE: cell(1.0, 10, "c"), CHAMPION: cell(1.0, 10, "k")}})
    assert estimate.variance >= 2 / 11**2 * 0.99


def test_intervals_need_two_units_in_both_arms() -> None:
    estimate = difference({(0, "t"): {CANDIDATE: cell(1.0, 1, "c"), CHAMPION: cell(1.0, 10, "k")}})
    assert math.isnan(estimate.mean)
    assert estimate.variance == math.inf
    assert math.isnan(mean_of([Cell()])[0])


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_unit_on_the_candidate_stays_there_at_every_larger_share(unit: str, one: float, two: float) -> None:
    low, high = sorted((one, two))
    if arm_of(unit, salt=SALT, share=low) == CANDIDATE:
        assert arm_of(unit, salt=SALT, share=high) == CANDIDATE


def test_positions_are_uniform_and_differ_by_salt() -> None:
    assert 0 <= position("\ud800", SALT) < 1  # a lone surrogate
    positions = np.array([[position(f"u{at}", salt) for at in range(4000)] for salt in ("a", "b")])
    assert abs((positions < 0.1).mean(axis=1) - 0.1).max() < 0.015
    assert abs(np.corrcoef(positions)[0, 1]) < 0.05


def test_propensity_is_that_of_the_arm() -> None:
    assert (probability(CANDIDATE, 0.1), probability(CHAMPION, 0.1)) == (0.1, 0.9)
    with pytest.raises(ConfigError, match="share"):
        arm_of("u", salt=SALT, share=1.5)


# -- confidence sequences


def test_width_of_the_normal_mixture_is_the_worked_one() -> None:
    # I = 100, r = 100 / (2 log 20 + log(1 + 2 log 20)) = 12.60; sqrt(112.60 * log(112.60 / (12.60 * 0.0025))) / 100
    assert normal_mixture(0.01, alpha=0.05, planned=0.01) == pytest.approx(0.3035, abs=1e-4)
    assert normal_mixture(math.inf, alpha=0.05, planned=0.01) == math.inf  # an unknown variance


def test_normal_mixture_covers_the_mean_at_all_times_at_once() -> None:
    random, missed = np.random.default_rng(0), 0
    radius = [normal_mixture(1 / n, alpha=0.1, planned=1 / 200) for n in range(1, 1001)]
    for _ in range(400):
        means = np.cumsum(random.normal(size=1000)) / np.arange(1, 1001)
        missed += bool((np.abs(means) > radius).any())
    assert missed <= 55  # 10 % of 400 and two standard errors; intervals for one time miss in 60 % and more


def test_bounds_of_betting_are_the_worked_ones() -> None:
    # no success in 15: 1 - (0.1445 / 20)^(1 / 15) = 0.280
    assert betting(0, 15, alpha=0.05) == (0.0, pytest.approx(0.2801, abs=1e-4))
    assert betting(0, 0, alpha=0.05) == (0.0, 1.0)
    low, high = betting(15, 15, alpha=0.05)
    assert (low, high) == (pytest.approx(0.7199, abs=1e-4), 1.0)


@pytest.mark.slow
def test_betting_sequence_covers_a_small_rate_at_all_times_at_once() -> None:
    random, missed = np.random.default_rng(1), 0
    for _ in range(100):
        totals = np.cumsum(random.random(300) < 0.1)
        missed += any(
            not low <= 0.1 <= high for low, high in (betting(totals[n - 1], n, alpha=0.1) for n in range(1, 301, 3))
        )
    assert missed <= 16  # 10 % of 100 and two standard errors


@given(st.integers(1, 500), st.floats(0, 1), st.sampled_from([0.01, 0.05, 0.2]))
def test_betting_sequence_contains_the_observed_mean(count: int, share: float, alpha: float) -> None:
    low, high = betting(share * count, count, alpha=alpha)
    assert 0 <= low <= share + 1e-9
    assert share - 1e-9 <= high <= 1


def test_critical_values_of_obrien_and_fleming_are_the_published_ones() -> None:
    # Jennison and Turnbull 2000, table 2.3: C = 2.040 for five evaluations at 5 %
    assert [round(obrien_fleming(k, 5), 2) for k in range(1, 6)] == [4.56, 3.23, 2.63, 2.28, 2.04]
    assert obrien_fleming(1, 1) == pytest.approx(1.96, abs=0.002)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (lambda: normal_mixture(0.0, alpha=0.05, planned=0.01), "must be above 0"),
        (lambda: normal_mixture(0.01, alpha=0.0, planned=0.01), "must be above 0"),
        (lambda: normal_mixture(0.01, alpha=1.0, planned=0.01), "must be above 0"),
        (lambda: normal_mixture(0.01, alpha=0.05, planned=0.0), "must be above 0"),
        (lambda: betting(2, 1, alpha=0.05), "must be between 0 and count"),
        (lambda: betting(-1, 5, alpha=0.05), "must be between 0 and count"),
        (lambda: betting(0, -1, alpha=0.05), "must be between 0 and count"),
        (lambda: obrien_fleming(4, 3), "must be between 1 and evaluations=3"),
    ],
)
def test_impossible_arguments_are_refused(bound: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bound()
