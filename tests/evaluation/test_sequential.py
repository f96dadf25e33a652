"""Sequential comparisons: simulated error rates, levels against published boundaries, required sample sizes."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from assay.errors import ConfigError
from assay.evaluation.statistics import (
    SequentialTest,
    detectable_difference,
    interval_of,
    nominal_levels,
    spread_of,
    tasks_needed,
)


def pairs(discordant: float, gain: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Differences of right or wrong answers: how often the two programs differ, and by how much on the mean."""
    shares = [(discordant + gain) / 2, 1 - discordant, (discordant - gain) / 2]
    return lambda rng, n: rng.choice([1.0, 0.0, -1.0], size=n, p=shares)


def skewed(rng: np.random.Generator, n: int) -> np.ndarray:
    """Mean 0: mostly a small gain, now and then a large loss."""
    return np.where(rng.random(n) < 0.9, 0.1, -0.9) + rng.normal(0, 0.02, n)


def simulated(
    draw: Callable[[np.random.Generator, int], np.ndarray], tasks: int, truth: float, repeats: int = 300
) -> tuple[float, float, float]:
    """Shares of intervals that miss the truth and of gains that are shown, and the mean number of tasks used."""
    rng, rule = np.random.default_rng(0), SequentialTest(tasks=tasks)
    missed, detected, used = 0, 0, 0
    for _ in range(repeats):
        values, done = draw(rng, tasks), list[int]()
        for count in rule.evaluations:
            done.append(count)
            decision = rule.decide(list(values[:count]), done)
            if decision.stop:
                break
        low, high = interval_of(values[: done[-1]], -1.0, 1.0, level=decision.level)
        missed += not low <= truth <= high
        detected += low > 0
        used += done[-1]
    return missed / repeats, detected / repeats, used / repeats


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bootstrap, which costs 10 ms and can only make an interval wider."""
    monkeypatch.setattr("assay.evaluation.statistics.BOOTSTRAP_MIN_LEVEL", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [40, 100])
@pytest.mark.parametrize("discordant", [0.1, 0.5])
def test_repeated_evaluation_without_a_gain_keeps_the_error_rate(tasks: int, discordant: float) -> None:
    missed, detected, used = simulated(pairs(discordant, 0.0), tasks, 0.0)
    assert missed <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 300)
    assert detected <= 0.025 + 2 * math.sqrt(0.025 * 0.975 / 300)
    assert used < 0.9 * tasks


def test_uncorrected_repeated_evaluation_has_a_higher_error_rate() -> None:
    """The check that the simulation can fail: 95 % intervals at each of five evaluations."""
    from scipy import stats

    rng, missed = np.random.default_rng(0), 0
    for _ in range(300):
        values = pairs(0.5, 0.0)(rng, 100)
        missed += any(stats.ttest_1samp(values[:n], 0.0).pvalue < 0.05 for n in (20, 40, 60, 80, 100))
    assert missed / 300 > 0.1


@pytest.mark.slow
def test_rare_large_losses_do_not_increase_the_error_rate() -> None:
    assert simulated(skewed, 100, 0.0)[1] <= 0.03


@pytest.mark.slow
def test_gains_are_detected_with_the_requested_power_and_large_ones_early() -> None:
    spread = math.sqrt(0.3 - 0.15**2)
    tasks = tasks_needed(0.15, spread=spread)
    missed, detected, used = simulated(pairs(0.3, 0.15), tasks, 0.15)
    assert detected >= 0.75
    assert missed <= 0.07
    assert used < 0.9 * tasks
    missed, detected, used = simulated(pairs(0.65, 0.6), 100, 0.6)
    assert detected == 1.0
    assert used <= 40


def test_levels_equal_those_of_the_published_design() -> None:
    # three equal parts, gamma -4: 3.0107, 2.5465, 1.9992, the default design of the R package gsDesign
    from scipy import stats

    boundaries = [stats.norm.isf(level / 2) for level in nominal_levels((1 / 3, 2 / 3, 1.0))]
    assert boundaries == pytest.approx([3.0107, 2.5465, 1.9992], abs=0.002)
    assert nominal_levels((1.0,)) == pytest.approx((0.05,))


def test_task_counts_match_hand_calculation() -> None:
    # (1.960 * sqrt(0.25 + 4 / 215) + 0.8416 * 0.5) / 0.1 = 14.367; 14.367^2 * 1.03 = 212.6; rounded up, and 2
    assert tasks_needed(0.1) == 215
    assert detectable_difference(215) == pytest.approx(0.1, abs=0.001)
    assert detectable_difference(4) == 1.0
    assert tasks_needed(0.2, spread=0.3) < 40
    with pytest.raises(ConfigError, match="difference=0"):
        tasks_needed(0)


def test_spread_of_few_pairs_is_mostly_the_prior() -> None:
    assert spread_of([]) == spread_of([1.0]) == 0.5
    assert spread_of([0.0] * 10) == pytest.approx(math.sqrt(0.125))  # (10 * 0 + 10 * 0.25) / 20
    assert spread_of([0.0] * 990) < 0.06


def test_evaluations_are_at_least_ten_tasks_apart() -> None:
    assert SequentialTest(tasks=12).evaluations == (12,)
    assert SequentialTest(tasks=40).evaluations == (10, 20, 30, 40)
    assert SequentialTest(tasks=300).evaluations == (60, 120, 180, 240, 300)


@pytest.mark.slow
def test_a_comparison_stopped_by_a_cap_has_the_level_of_its_last_evaluation() -> None:
    rule = SequentialTest(tasks=100)
    assert rule.level([57]) < 0.01  # up to the planned size little error probability is spent
    assert rule.level([20, 40, 57]) < rule.level([57])
    assert rule.level([20, 40, 60, 80, 100]) == pytest.approx(0.0428, abs=0.001)
