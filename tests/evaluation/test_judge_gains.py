"""The gain of one judge over another, by which the gate of a judge's compile decides."""

import numpy as np
import pytest

from assay.evaluation.judged import measure_gain
from assay.evaluation.statistics import interval_of
from assay.judges.labels import Item, Rating
from assay.judges.quality.agreement import Answers
from assay.rubrics import JudgeSpec

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
