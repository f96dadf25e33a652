"""Promotion by a gate that answers an adaptive optimizer: levels, looks and rare losses."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from assay.errors import ConfigError
from assay.evaluation.adaptive import (
    ALPHA,
    MOST_PROMOTIONS,
    AdaptiveGate,
    fewest_gate_tasks,
    look_level,
    passes_screen,
)
from assay.evaluation.statistics import interval_of, shows_gain, unseen_pairs


@pytest.mark.parametrize("looks", [1, 4, 10])
def test_the_levels_of_all_histories_add_up_to_the_error(looks: int) -> None:
    total = 0.0
    for answers in itertools.product([False, True], repeat=looks):
        for look in range(looks):
            before = answers[:look]
            if sum(before) < MOST_PROMOTIONS:
                # each history before the look is counted once for every way to continue it
                total += look_level(look + 1, sum(before), looks=looks) / 2 ** (looks - look)
    assert total <= ALPHA + 1e-12
    if looks > MOST_PROMOTIONS:  # the first looks cannot follow as many promotions, and spend less
        assert total > 0.8 * ALPHA


def test_the_levels_are_those_worked_out_by_hand() -> None:
    assert look_level(1, 0) == pytest.approx(0.05 / 10 * 0.8)
    assert look_level(7, 0) == pytest.approx(0.004)  # C(6, 0) = 1
    assert look_level(3, 1) == pytest.approx(0.05 / 10 * 0.15 / 2)  # C(2, 1) = 2
    assert look_level(10, 2) == pytest.approx(0.05 / 10 * 0.05 / 36)  # C(9, 2) = 36


def test_a_gate_is_used_up_after_its_looks_or_three_promotions() -> None:
    gate = AdaptiveGate(looks=2)
    assert [gate.look([0.0] * 40), gate.look([0.0] * 40), gate.used_up] == [False, False, True]
    with pytest.raises(ConfigError, match="used up"):
        gate.look([1.0] * 40)
    promoting = AdaptiveGate()
    assert [promoting.look([1.0] * 100) for _ in range(3)] == [True] * 3
    assert (promoting.promotions, promoting.used_up, len(promoting.answers)) == (3, True, 3)


def test_a_look_needs_more_after_a_promotion() -> None:
    values = [1.0] * 12 + [-1.0] * 2 + [0.0] * 26  # mean 0.25
    first, later = AdaptiveGate(), AdaptiveGate(answers=[True, False])
    assert later.level < first.level
    assert (first.look(values), later.look(values)) == (False, False)
    values = [1.0] * 16 + [-1.0] * 2 + [0.0] * 22  # mean 0.35: t = 3.2 of 39 degrees, shown at 0.004 and not at 0.0004
    assert (AdaptiveGate().look(values), AdaptiveGate(answers=[True, False]).look(values)) == (True, False)


def test_looks_and_gates_have_one_rule_for_rare_losses() -> None:
    values = np.array([0.1] * 40)
    for level in (0.004, 0.000375):
        low = interval_of(values, -1.0, 1.0, level=level, one_sided=True, bootstrap=False)[0]
        padded = np.append(values, [-1.0, 1.0] * unseen_pairs(level)).std(ddof=1)
        by_t = 0.1 - stats.t.ppf(1 - level, 39) * padded / math.sqrt(40)
        by_three = 0.1 - min(1.0, -math.log(level) / 40) * 1.1  # equal values: the rule of three
        assert low == pytest.approx(min(by_t, by_three))


@pytest.mark.parametrize(("tasks", "most"), [(40, 0.001), (100, 0.003), (300, 0.006)])
def test_a_look_seldom_accepts_rare_large_losses(tasks: int, most: float) -> None:
    """Exact: the number of losses is binomial. 90 % of the tasks gain 0.1 and the others lose 0.9: a mean of 0."""

    def accepted(losses: int) -> bool:
        values = [-0.9] * losses + [0.1] * (tasks - losses)
        return interval_of(values, -1.0, 1.0, level=0.004, one_sided=True, bootstrap=False)[0] > 0

    error = sum(stats.binom.pmf(losses, tasks, 0.1) for losses in range(tasks) if accepted(losses))
    assert error <= most


def test_the_screen_takes_a_gain_on_val_and_nothing_less() -> None:
    assert passes_screen([1.0] * 20 + [0.0] * 20)
    assert not passes_screen([0.0] * 40)
    assert not passes_screen([1.0, -1.0] * 20)
    assert not passes_screen([1.0] * 4)  # fewer than 5 pairs show nothing


def test_fewer_tasks_than_a_look_needs_cannot_promote() -> None:
    least = fewest_gate_tasks()
    assert shows_gain([1.0] * least, level=0.004)
    assert not shows_gain([1.0] * (least - 1), level=0.004)
    assert least == 12
