"""Differences between the arms: strata, units, and assignment."""

import math

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
    unit_weight,
)
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


@given(st.integers(1, 10**6))
def test_weight_of_a_unit_rises_and_stays_below_twenty(count: int) -> None:
    assert unit_weight(count) <= unit_weight(count + 1) <= 20


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_unit_on_the_candidate_stays_there_at_every_larger_share(unit: str, one: float, two: float) -> None:
    low, high = sorted((one, two))
    if arm_of(unit, salt=SALT, share=low) == CANDIDATE:
        assert arm_of(unit, salt=SALT, share=high) == CANDIDATE


def test_positions_are_uniform_and_differ_by_salt() -> None:
    positions = np.array([[position(f"u{at}", salt) for at in range(4000)] for salt in ("a", "b")])
    assert abs((positions < 0.1).mean(axis=1) - 0.1).max() < 0.015
    assert abs(np.corrcoef(positions)[0, 1]) < 0.05


def test_a_unit_of_a_megabyte_or_with_lone_surrogates_has_a_position() -> None:
    assert 0 <= position("x" * 2**20, SALT) < 1
    assert 0 <= position("\ud800", SALT) < 1


def test_propensity_is_that_of_the_arm() -> None:
    assert (probability(CANDIDATE, 0.1), probability(CHAMPION, 0.1)) == (0.1, 0.9)
    with pytest.raises(ConfigError, match="share"):
        arm_of("u", salt=SALT, share=1.5)
