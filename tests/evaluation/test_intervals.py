"""Statistics: intervals of a mean, bounds of a loss, the tasks that would decide, and gains of judges."""

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from assay.evaluation import Evaluation, mean_interval, paired_gain
from assay.evaluation.comparison import what_would_decide
from assay.evaluation.judged import measure_gain
from assay.evaluation.statistics import (
    SequentialTest,
    fewest_to_accept,
    interval_of,
    largest_loss,
    lossless_tasks,
    tasks_needed,
    unseen_pairs,
)
from assay.judges.labels import Item, Rating
from assay.judges.quality.agreement import Answers
from assay.rubrics import JudgeSpec, ScoreResult


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


def loss(*differences: float) -> float:
    """Of scores that differ so much, `after` minus `before`."""
    before = {str(at): max(0.0, -value) for at, value in enumerate(differences)}
    return largest_loss(before, {str(at): max(0.0, value) for at, value in enumerate(differences)})


def test_no_difference_leaves_the_rule_of_three() -> None:
    assert loss(*[0.0] * 300) == pytest.approx(-math.log(0.05) / 300)
    assert loss(*[-0.5] * 30) == pytest.approx(0.5 + 0.5 * -math.log(0.05) / 30)
    assert loss(*[0.0] * 4) == 1.0
    assert loss() == 1.0
    assert largest_loss(dict.fromkeys("abcdef", math.nan), dict.fromkeys("abcdef", 1.0)) == 1.0


@pytest.mark.parametrize("margin", [0.01, 0.03, 0.2, 0.9])
def test_lossless_tasks_is_the_smallest_number_that_shows_a_margin(margin: float) -> None:
    needed = lossless_tasks(margin)
    assert loss(*[0.0] * needed) <= margin < loss(*[0.0] * (needed - 1))


def test_the_bound_on_the_loss_grows_with_the_number_of_lost_tasks() -> None:
    none, one, two = (loss(*[-1.0] * lost + [0.0] * (100 - lost)) for lost in range(3))
    assert 0.0299 < none < one < two
    assert loss(-1.0, 1.0, *[0.0] * 98) > none  # a win does not reduce the bound that follows from a loss


def share_shown(losing: float, winning: float, tasks: int, margin: float) -> float:
    """How often data with these chances are shown to keep the margin, in 400 draws."""
    chances = [losing, winning, 1 - losing - winning]
    draws = np.random.default_rng(1).multinomial(tasks, chances, 400)
    keeps_margin: dict[tuple[int, ...], bool] = {}
    for lost, won, _ in draws.tolist():
        if (lost, won) not in keeps_margin:
            keeps_margin[lost, won] = loss(*differences(lost, won, tasks)) <= margin
    return sum(keeps_margin[lost, won] for lost, won, _ in draws.tolist()) / len(draws)


def differences(lost: int, won: int, tasks: int) -> Sequence[float]:
    return [-1.0] * lost + [1.0] * won + [0.0] * (tasks - lost - won)


@pytest.mark.slow
@pytest.mark.parametrize(("losing", "winning", "tasks"), [(0.05, 0.0, 80), (0.07, 0.02, 100), (0.1, 0.05, 200)])
def test_a_loss_as_large_as_the_margin_is_seldom_shown_to_keep_it(losing: float, winning: float, tasks: int) -> None:
    # 5 %, or somewhat more where the number of lost tasks takes only a few values, with an error of 2 % in 400 draws
    assert share_shown(losing, winning, tasks, 0.05) <= 0.1
    assert share_shown(0.0, 0.01, tasks, 0.05) > 0.9


def scored(*values: float) -> Evaluation:
    results = {str(at): ScoreResult(value=value) for at, value in enumerate(values)}
    return Evaluation(results=results)


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_a_small_gain_names_the_tasks_that_would_show_it() -> None:
    before, after = scored(*[0.0] * 40), scored(*[1.0] * 4, *[0.0] * 36)
    said = numbers(what_would_decide(before, after, "gate"))
    assert 0.1 in said
    assert said[-1] == said[-3] - 40  # so many more than these
    assert tasks_needed(0.1, spread=0.3) <= said[-3] <= tasks_needed(0.1, spread=0.5)


@pytest.mark.parametrize("after", [[0.5] * 40, [0.25] * 40])
def test_without_a_gain_it_names_the_gain_that_the_tasks_would_have_shown(after: list[float]) -> None:
    said = numbers(what_would_decide(scored(*[0.5] * 40), scored(*after), "val"))
    assert said[0] == 40
    assert 0 < said[1] < 1


YES_NO = JudgeSpec(text="?", scale=("no", "yes"))
TEN = JudgeSpec(text="?", scale=tuple("0123456789"), kind="numeric")


def items(steps: np.ndarray, spec: JudgeSpec) -> list[Item]:
    return [
        Item(id=str(at), fields={"output": "x"}, ratings=(Rating(rater="r", label=spec.scale[step]),))
        for at, step in enumerate(steps)
    ]


def answers(steps: np.ndarray, spec: JudgeSpec) -> Answers:
    return Answers([spec.scale[step] for step in steps], [float(step) for step in steps])


def gain(name: str, truth: np.ndarray, before: np.ndarray, after: np.ndarray, spec: JudgeSpec = YES_NO) -> dict:
    return measure_gain(name, answers(before, spec), answers(after, spec), items(truth, spec), spec)


def test_the_gain_in_accuracy_has_the_interval_of_scores() -> None:
    rng = np.random.default_rng(0)
    truth, before, after = (rng.integers(0, 2, 60) for _ in range(3))
    differences = (after == truth).astype(float) - (before == truth)
    measured = gain("accuracy", truth, before, after)
    assert measured["mean"] == pytest.approx(differences.mean())
    assert (measured["low"], measured["high"]) == pytest.approx(interval_of(differences, -1.0, 1.0))


@pytest.mark.parametrize("name", ["weighted_kappa", "alpha", "spearman"])
@pytest.mark.parametrize("n", [20, 40])
def test_rare_large_losses_are_not_accepted(name: str, n: int) -> None:
    rng, accepted, runs = np.random.default_rng(0), 0, 60
    for _ in range(runs):
        truth = rng.integers(0, 10, n)
        # one step off on half of the items, against right but for the other end on one in thirty
        before = np.where(rng.random(n) < 0.5, np.where(truth == 9, 8, truth + 1), truth)
        after = np.where(rng.random(n) < 1 / 30, np.where(truth < 5, 9, 0), truth)
        accepted += (gain(name, truth, before, after, TEN)["low"] or -1) > 0
    assert accepted <= 0.03 * runs + 2


@pytest.mark.parametrize("name", ["accuracy", "kappa"])
def test_a_clear_gain_is_accepted(name: str) -> None:
    rng, accepted, runs = np.random.default_rng(0), 0, 20
    for _ in range(runs):
        truth = rng.integers(0, 2, 60)
        before, after = (np.where(rng.random(60) < right, truth, 1 - truth) for right in (0.6, 0.95))
        accepted += (gain(name, truth, before, after)["low"] or -1) > 0
    assert accepted >= 0.9 * runs


def test_equal_verdicts_show_no_gain_and_no_loss() -> None:
    truth = np.arange(40) % 2
    measured = gain("kappa", truth, truth, truth)
    assert measured["mean"] == 0
    assert measured["low"] < 0 < measured["high"]


def test_a_measure_that_depends_on_a_single_item_has_no_interval() -> None:
    truth = np.array([1] + [0] * 39)  # without the first item, all labels are equal
    measured = gain("kappa", truth, 1 - truth, truth)
    assert measured["mean"] is not None
    assert measured["low"] is None


def test_few_items_have_no_interval() -> None:
    truth = np.arange(10) % 2
    measured = gain("kappa", truth, np.ones(10, dtype=int), truth)
    assert (measured["mean"], measured["low"]) == (1.0, None)


def test_a_gain_is_paired_over_the_items_that_both_judged() -> None:
    truth = np.arange(60) % 2
    yes = answers(np.ones(60, dtype=int), YES_NO)
    some = Answers([*yes.verdicts[:58], None, None], yes.places)
    measured = measure_gain("accuracy", some, answers(truth, YES_NO), items(truth, YES_NO), YES_NO)
    assert measured["n"] == 58
    assert measured["mean"] == pytest.approx(0.5)
    assert measured["low"] is not None
    assert measured["low"] > 0.25
