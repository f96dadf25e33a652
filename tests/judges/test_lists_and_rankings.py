"""Lists matched by id, and rankings from comparisons."""

import math
from typing import Any

import dspy
import numpy as np
import pytest
from scripted_judges import LIST, graded, listed

from assay.errors import ConfigError
from assay.judges import (
    ListwiseJudge,
    bradley_terry,
    win_rates,
)
from assay.judges.quality.ranking import pairings
from assay.rubrics import NoGrade
from assay.testing import scripted_lm

OUTPUTS = {"r1": "worst", "r2": "best", "r3": "middle"}


def rank(
    script: Any, *, logprobs: bool = False, outputs: Any = OUTPUTS, judge: ListwiseJudge = LIST
) -> dspy.Prediction:
    with dspy.context(lm=scripted_lm(script, logprobs=logprobs)):
        return judge(task_input="q", outputs=outputs)


# -- lists


def test_lists_are_matched_by_id_in_any_order() -> None:
    for change in (None, lambda lines: lines[::-1], lambda lines: sorted(lines, key=lambda line: line["grade"])):
        ranking = rank(graded(change))
        assert ranking.grades == {"r1": 0.0, "r3": 0.5, "r2": 1.0}
        assert ranking.ranking == ["r2", "r3", "r1"]


def test_a_list_read_from_probabilities_has_no_position_bias() -> None:
    # the model prefers A in every order; averaged over the orders the bias cancels, and the better text wins
    def script(request: Any) -> dict[str, float]:
        worth = {"worst": 1.0, "middle": 2.0, "best": 4.0}
        odds = {letter: worth[text] * (3 if letter == "A" else 1) for letter, text in listed(request).items()}
        return {letter: value / sum(odds.values()) for letter, value in odds.items()}

    judge = ListwiseJudge("Best?", orders=60)
    ranking = rank(script, logprobs=True, judge=judge)
    assert ranking.ranking == ["r2", "r3", "r1"]
    assert sum(ranking.grades.values()) == pytest.approx(1.5)


def test_a_list_requires_two_outputs() -> None:
    with pytest.raises(NoGrade, match="2 to 20"):
        rank(graded(), outputs={"r1": "best"})


# -- rankings


def test_bradley_terry_matches_hand_calculation_and_a_second_implementation() -> None:
    result = bradley_terry([("a", "b", 1)] * 3 + [("a", "b", 0)])
    assert result["a"] > 0 > result["b"]
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    truth = np.array([1.5, 0.5, -0.5, -1.5])
    rows = [
        (i, j, float(rng.random() < 1 / (1 + math.exp(truth[j] - truth[i]))))
        for i in range(4)
        for j in range(4)
        if i != j
        for _ in range(200)
    ]
    mine = bradley_terry(rows)
    design = np.zeros((len(rows), 3))
    for at, (i, j, _) in enumerate(rows):
        if i:
            design[at, i - 1] += 1
        if j:
            design[at, j - 1] -= 1
    model = LogisticRegression(C=1e9, fit_intercept=False).fit(design, [won for _, _, won in rows])
    reference = np.array([0, *model.coef_[0]])
    assert [mine[i] for i in range(4)] == pytest.approx(
        reference - reference.mean(), abs=0.01
    )  # the effect of the prior is that small


def test_an_output_that_always_wins_is_finite_and_uncompared_ones_are_0() -> None:
    result = bradley_terry([("a", "b", 1)] * 50, names=["a", "b", "c"])
    assert math.isfinite(result["a"])
    assert result["c"] == pytest.approx(0.0)
    assert bradley_terry([], names=["a"]) == {"a": 0.0}
    with pytest.raises(ConfigError, match="comparison"):
        bradley_terry([("a", "a", 1)])
    with pytest.raises(ConfigError, match="comparison"):
        bradley_terry([("a", "b", math.nan)])


def test_win_rates_match_hand_calculation() -> None:
    assert win_rates([0.0, 0.0, 0.0]) == pytest.approx([0.5] * 3)
    assert win_rates([math.log(3), 0.0]) == pytest.approx([0.75, 0.25])
    assert win_rates([7.0]) == [0.5]


def test_few_outputs_are_all_compared_and_many_in_rings() -> None:
    assert len(pairings(5)) == 10
    many = pairings(40, rounds=3)
    assert len(many) <= 120
    assert {n for pair_ in many for n in pair_} == set(range(40))
