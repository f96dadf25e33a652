"""The interval of a mean: against scipy's own bootstrap and quantiles, in any order, and with losses that are rare."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from assay.evaluation import mean_interval, paired_gain
from assay.evaluation.statistics import SequentialTest, fewest_to_accept, interval_of, unseen_pairs


def by_scipy(values: np.ndarray, lowest: float, highest: float, pairs: int) -> tuple[float, float]:
    """The widest of bootstrap, t interval, and t interval with added pairs of values at the ends of the range."""
    sample = np.sort(values)
    result = stats.bootstrap(
        (sample,), np.mean, n_resamples=4999, method="BCa", confidence_level=0.95, rng=np.random.default_rng(0)
    )
    spread = max(sample.std(ddof=1), np.append(sample, [lowest, highest] * pairs).std(ddof=1))
    reach = stats.t.ppf(0.975, len(sample) - 1) * spread / len(sample) ** 0.5
    low = min(result.confidence_interval.low, sample.mean() - reach)
    high = max(result.confidence_interval.high, sample.mean() + reach)
    return max(lowest, low), min(highest, high)


@pytest.mark.parametrize(
    "values", [[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0], np.random.default_rng(1).random(40) ** 3, [-1.0, 1.0] * 3]
)
def test_intervals_are_the_widest_of_scipys(values: list[float]) -> None:
    sample = np.array(values)
    assert interval_of(sample, -1.0, 1.0) == pytest.approx(by_scipy(sample, -1.0, 1.0, 2), abs=1e-10)


def test_the_added_pairs_grow_as_the_level_falls() -> None:
    # -ln(level) / 2: 1.15, 1.50, 2.30, 3.45, 4.61
    assert [unseen_pairs(level) for level in (0.1, 0.05, 0.01, 0.001, 0.0001)] == [2, 2, 3, 4, 5]


def test_a_single_large_value_of_many_has_an_interval() -> None:
    low, high = interval_of(np.array([0.0] * 9 + [1.0]), 0.0, 1.0)
    assert 0.0 <= low < 0.1 < high <= 1.0


@pytest.mark.parametrize("values", [[1.0] * 9 + [0.0], [0.1, 0.35, 0.35, 0.7, 0.9, 1.0], [0.0, 0.5, 0.5, 1.0, 1.0]])
def test_an_interval_does_not_depend_on_the_order_of_the_values(values: list[float]) -> None:
    rng = np.random.default_rng(0)
    orders = [rng.permutation(values).tolist() for _ in range(12)]
    assert len({mean_interval(order) for order in orders}) == 1
    before = [dict.fromkeys(map(str, rng.permutation(len(values))), 0.5) for _ in range(2)]
    gains = {
        (gain.low, gain.high)
        for order, side in itertools.product(orders[:3], before)
        for gain in [paired_gain(side, dict(zip(map(str, range(len(order))), order, strict=True)))]
    }
    assert len(gains) == 1


# share of tasks with a loss, the gain of the others, the loss: 97 % slightly positive beside 3 % -0.7 (mean 0), ...
PATTERNS = {"3 % -0.7": (0.03, 0.7 * 0.03 / 0.97, -0.7), "10 % -0.9": (0.1, 0.1, -0.9), "5 % -1": (0.05, 0.05, -1.0)}


@pytest.mark.parametrize("tasks", [8, 20, 40, 100])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_rare_large_losses_are_seldom_accepted(pattern: str, tasks: int) -> None:
    """The exact probability, over the number of losses."""
    share, gain, loss = PATTERNS[pattern]
    before, accepted = dict.fromkeys(map(str, range(tasks)), 1.0), 0.0
    for losses in range(tasks + 1):
        differences = [loss] * losses + [gain] * (tasks - losses)
        if math.fsum(differences) <= 0:
            break
        after = {str(at): 1.0 + difference for at, difference in enumerate(differences)}
        accepted += float(stats.binom.pmf(losses, tasks, share)) * paired_gain(before, after).is_gain
    assert accepted <= 0.03


def test_stopped_tests_use_the_same_interval() -> None:
    rule = SequentialTest(tasks=40)
    few = [0.03] * 20  # equal small gains: a rare loss would not have been seen
    assert rule.decide(few, [10, 20]).why != "decided"
    assert rule.decide([1.0] * 20, [10, 20]).why == "decided"


def test_a_gain_of_moderate_size_is_still_shown() -> None:
    # mean 0.2, deviation 0.5: gains of 1, ties and losses of -1 with 24.5 %, 71 % and 4.5 %
    rng, shown = np.random.default_rng(0), 0
    before = dict.fromkeys(map(str, range(60)), 0.0)
    for _ in range(400):
        values = rng.choice([1.0, 0.0, -1.0], size=60, p=[0.245, 0.71, 0.045])
        if values.mean() > 0.1:  # no smaller mean is shown
            shown += paired_gain(before, dict(zip(before, values.tolist(), strict=True)), level=0.05).is_gain
    assert shown / 400 >= 0.75


def test_the_fewest_tasks_that_can_show_a_gain() -> None:
    fewest = fewest_to_accept()
    best = [paired_gain(dict.fromkeys(map(str, range(n)), 0.0), dict.fromkeys(map(str, range(n)), 1.0)).is_gain
            for n in (fewest - 1, fewest)]  # fmt: skip
    assert best == [False, True]
