"""Upper bound of the loss in a paired comparison, and the number of tasks that a margin requires."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from assay.evaluation.statistics import largest_loss, lossless_tasks


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
