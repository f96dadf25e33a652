"""Anchors replayed, CUSUM, PSI, and means that a few labels correct."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from hypothesis import given, strategies as st

from assay.errors import DataError
from assay.judges.quality.drift import Anchor, AnchorSet, Cusum, compare, corrected_mean, population_stability_index

MADE = {"model": "m1", "prompt": "p1"}


def frozen(values: list[float | None], noise: float = 0.0) -> AnchorSet:
    anchors = [Anchor({"output": str(at)}, value, "yes") for at, value in enumerate(values)]
    return AnchorSet(MADE, noise, anchors, repeated=len(anchors), flips=0)


def test_cusum_alarms_at_the_tabulated_rate() -> None:
    rng = np.random.default_rng(0)

    def run(shift: float, most: int) -> int:
        chart = Cusum(sigma=1.0)
        return next((n for n in range(1, most) if chart.update(rng.normal(shift, 1))), most)

    quiet, moved = [run(0.0, 5000) for _ in range(60)], [run(1.0, 500) for _ in range(200)]
    assert 300 < np.mean(quiet) < 700  # Montgomery: 465 in control for slack 0.5, limit 5
    assert np.mean(moved) == pytest.approx(10.4, abs=1.0)


@pytest.mark.parametrize("n", [20, 60, 200])
def test_an_unchanged_noisy_judge_rarely_raises_an_alarm(n: int) -> None:
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(200):
        truth = rng.uniform(0.2, 0.8, n)
        first, second = (truth + rng.normal(0, 0.1, n) for _ in range(2))
        alarms += bool(compare(frozen(list(first), noise=0.1 * math.sqrt(2)), list(second), MADE)["alarms"])
    assert alarms <= 8  # the expected rate is one in a hundred


def test_a_small_shift_of_all_verdicts_is_detected_and_its_cause_named() -> None:
    values = [0.3 + 0.01 * at for at in range(40)]
    comparison = compare(frozen(values, noise=0.02), [value + 0.04 for value in values], {**MADE, "model": "m2"})
    assert "CUSUM" in comparison["alarms"][0]
    assert " Changed: model." in comparison["alarms"][0]
    assert comparison["changed"] == {"model": ["m1", "m2"]}
    unnamed = compare(frozen(values), [1 - value for value in values], MADE)
    assert any("check the model server" in alarm for alarm in unnamed["alarms"])


def test_lost_verdicts_raise_an_alarm_and_are_not_zero() -> None:
    comparison = compare(frozen([0.5] * 30), [0.5] * 20 + [None] * 10, MADE)
    assert comparison["mean_difference"] == 0.0
    assert "10 of 30 anchors are now unscored" in comparison["alarms"][0]
    nothing = compare(frozen([0.5] * 30), [None] * 30, MADE)
    assert nothing["mean_difference"] is None


def test_anchor_sets_are_stored_and_loaded_unchanged(tmp_path: Path) -> None:
    anchors = AnchorSet(MADE, 0.01, [Anchor({"output": "ü\u2028"}, None, None)], repeated=30, flips=2)
    anchors.save(tmp_path / "a" / "anchors.json")
    assert AnchorSet.load(tmp_path / "a" / "anchors.json") == anchors
    for text in ("", "[]", "{}", '{"format": 2, "made_by": {}, "noise": 0, "anchors": [{"x": 1}]}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(DataError, match="is not an anchor set"):
            AnchorSet.load(tmp_path / "bad.json")
    for other in (1, 99):
        (tmp_path / "other.json").write_text(json.dumps({"format": other}))
        with pytest.raises(DataError, match=f"format {other}"):
            AnchorSet.load(tmp_path / "other.json")


# -- corrected means


def test_a_biased_judge_is_corrected_and_the_interval_has_its_coverage() -> None:
    rng = np.random.default_rng(0)
    covered, widths, alone = 0, [], []
    for _ in range(400):
        truth = rng.binomial(1, 0.4, 1100).astype(float)
        judge = np.clip(0.25 + 0.6 * truth + rng.normal(0, 0.1, 1100), 0, 1)  # kind by far: mean 0.49
        estimate = corrected_mean(truth[:100], judge[:100], judge[100:])
        covered += estimate.low <= 0.4 <= estimate.high
        widths.append(estimate.high - estimate.low)
        alone.append(2 * 1.959964 * truth[:100].std(ddof=1) / 10)
        assert abs(estimate.verdicts_alone - 0.4) > 0.05
    assert 0.92 <= covered / 400 <= 0.98
    assert np.mean(widths) < 0.6 * np.mean(alone)  # the verdicts are informative


def test_corrected_means_refuse_invalid_input() -> None:
    with pytest.raises(DataError, match="at least 20"):
        corrected_mean([1.0] * 19, [1.0] * 19, [1.0, 1.0])
    with pytest.raises(DataError, match="at least 20"):
        corrected_mean([1.0] * 20, [1.0] * 21, [1.0, 1.0])
    with pytest.raises(DataError, match="finite"):
        corrected_mean([1.0, math.nan] * 10, [1.0] * 20, [1.0, 1.0])


# -- second implementations, written from the definitions and not from the code


@given(
    st.lists(st.floats(0, 1), min_size=20, max_size=60),
    st.lists(st.floats(0, 1), min_size=20, max_size=60),
    st.integers(2, 8),
)
def test_psi_agrees_with_a_second_implementation(before: list[float], after: list[float], bins: int) -> None:
    ordered = sorted(before)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    edges = sorted({quantile(k / bins) for k in range(1, bins)})

    def shares(values: list[float]) -> list[float]:
        counts = [0.5] * (len(edges) + 1)
        for value in values:
            counts[sum(edge <= value for edge in edges)] += 1
        return [count / sum(counts) for count in counts]

    known = sum((q - p) * math.log(q / p) for p, q in zip(shares(before), shares(after), strict=True))
    psi = population_stability_index(before, after, bins=bins)
    # a value that stands on an edge by a rounding error may be counted on its other side
    reference = np.quantile(before, np.linspace(0, 1, bins + 1)[1:-1])
    on_edge = any(0 < abs(value - edge) < 1e-9 for edge in (*edges, *reference) for value in (*before, *after))
    assert on_edge or psi == pytest.approx(known, rel=1e-9, abs=1e-12)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=40))
def test_cusum_agrees_with_its_closed_form(values: list[float]) -> None:
    """The recursion max(0, S + x - k) is the largest sum of a tail of x - k."""
    chart = Cusum(sigma=0.5, slack=0.5, limit=1e9)
    for value in values:
        chart.update(value)
    steps = [value / 0.5 for value in values]
    tails = [
        sum(sign * x - 0.5 for x in steps[start:end])
        for sign in (1, -1)
        for end in range(1, len(steps) + 1)
        for start in range(end)
    ]
    assert chart.peak == pytest.approx(max(0.0, *tails), abs=1e-9)


def test_a_corrected_mean_has_minimum_variance() -> None:
    from scipy import optimize

    rng = np.random.default_rng(3)
    truth = rng.random(400)
    judged = np.clip(truth + rng.normal(0, 0.2, 400), 0, 1)
    human, verdicts, others = truth[:60], judged[:60], judged[60:]

    def mean_at(weight: float, y: np.ndarray, f: np.ndarray, g: np.ndarray) -> float:
        return float(weight * g.mean() + (y - weight * f).mean())

    def variance(weight: float) -> float:
        pooled = np.concatenate([verdicts, others]).var(ddof=1)
        covariance = np.cov(human, verdicts)[0, 1]
        return float(
            weight**2 * pooled / len(others)
            + (human.var(ddof=1) - 2 * weight * covariance + weight**2 * pooled) / len(human)
        )

    estimate = corrected_mean(human.tolist(), verdicts.tolist(), others.tolist())
    best = optimize.minimize_scalar(variance, bounds=(0, 1), method="bounded", options={"xatol": 1e-10})
    assert estimate.weight == pytest.approx(best.x, abs=1e-5)
    assert estimate.mean == pytest.approx(mean_at(best.x, human, verdicts, others), abs=1e-6)
    draws = []
    for _ in range(4000):  # the bootstrap of the same estimate
        rows, more = rng.integers(0, 60, 60), rng.integers(0, len(others), len(others))
        draws.append(mean_at(estimate.weight, human[rows], verdicts[rows], others[more]))
    low, high = np.percentile(draws, [2.5, 97.5])
    reach = (estimate.high - estimate.low) / 2
    assert reach == pytest.approx(max((high - low) / 2, 3 / 60), rel=0.1)


# -- verdicts of few levels


def replayed(before: list[float], after: list[float], *, repeated: int = 60, flips: int = 0) -> dict[str, Any]:
    anchors = AnchorSet(
        MADE, math.sqrt(flips / repeated), [Anchor({"output": str(at)}, value, "x") for at, value in enumerate(before)],
        repeated=repeated, flips=flips,
    )  # fmt: skip
    return compare(anchors, after, MADE)


def flipped(values: list[float], count: int) -> list[float]:
    return [1 - value if at < count else value for at, value in enumerate(values)]


def test_flips_in_one_direction_and_many_flips_raise_an_alarm() -> None:
    ones, mixed = [1.0] * 60, [float(at % 2) for at in range(60)]
    one_way = replayed(ones, flipped(ones, 6))  # 2 · 0.5^6 = 0.031
    assert one_way["alarms"]
    assert one_way["flips"] == {"n": 6, "rises": 0, "falls": 6, "direction": pytest.approx(0.03125), "rate": ANY}
    assert replayed(mixed, flipped(mixed, 12))["alarms"]
    assert not replayed(mixed, flipped(mixed, 12), flips=10)["alarms"]  # a judge that is as noisy by itself


@pytest.mark.parametrize(("levels", "noise"), [(2, 0.0), (2, 0.02), (2, 0.1), (5, 0.05)])
def test_a_stable_judge_of_few_levels_raises_an_alarm_in_at_most_a_twentieth_of_replays(
    levels: int, noise: float
) -> None:
    rng = np.random.default_rng(0)

    def answers(truth: Any) -> list[float]:
        moved = (truth + rng.integers(1, levels, len(truth))) % levels
        return [float(value) for value in np.where(rng.random(len(truth)) < noise, moved, truth) / (levels - 1)]

    alarms, runs = 0, 100
    for _ in range(runs):
        truth = rng.integers(0, levels, 60)
        first, second = answers(truth), answers(truth)
        flips = sum(a != b for a, b in zip(first, second, strict=True))
        alarms += bool(replayed(first, answers(truth), flips=flips)["alarms"])
    assert alarms <= 0.05 * runs + 4  # two standard errors
