"""The figures of a card, worked out by hand and against a second implementation."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats
from sklearn.calibration import calibration_curve

from assay.judges.labels import Item, Rating
from assay.judges.quality.agreement import Answers, agreement, ceiling
from assay.judges.quality.card import calibration_error, partial_correlation, reliability_card
from assay.rubrics import JudgeSpec

SPEC = JudgeSpec(text="?", scale=("bad", "fair", "good"))
PAIRS = JudgeSpec(text="?", scale=("a", "tie", "b"))
rng = np.random.default_rng(0)


def items(labels: Sequence[str], outputs: Sequence[str] = (), **columns: Sequence[Any]) -> list[Item]:
    return [
        Item(
            id=str(at),
            fields={"output": outputs[at] if outputs else "text"},
            ratings=(Rating(rater="r", label=label),),
            columns={name: values[at] for name, values in columns.items()},
        )
        for at, label in enumerate(labels)
    ]


def answers(verdicts: Sequence[str], spec: JudgeSpec = SPEC, **more: Any) -> Answers:
    return Answers(list(verdicts), [float(spec.scale.index(verdict)) for verdict in verdicts], **more)


def card(judged: Answers, rated: Sequence[Item], spec: JudgeSpec = SPEC, **more: Any) -> dict[str, Any]:
    measures, human_ceiling = agreement(judged, rated, spec, intervals=False), ceiling(rated, spec)
    return reliability_card(judged, rated, spec, agreement=measures, ceiling=human_ceiling, objective="kappa", **more)


@given(st.integers(0, 10_000), st.integers(20, 60))
@settings(deadline=None, max_examples=50)
def test_partial_rank_correlation_agrees_with_two_other_methods(seed: int, n: int) -> None:
    drawn = np.random.default_rng(seed)
    control = drawn.normal(size=n)
    x, y = control + drawn.normal(size=n), drawn.integers(0, 4, size=n) - control.round()
    rho = partial_correlation(x, y, control)
    ranks = np.corrcoef([stats.rankdata(values) for values in (x, y, control)])
    formula = (ranks[0, 1] - ranks[0, 2] * ranks[1, 2]) / math.sqrt((1 - ranks[0, 2] ** 2) * (1 - ranks[1, 2] ** 2))
    precision = np.linalg.inv(ranks)
    assert rho == pytest.approx(formula, abs=1e-9)
    assert rho == pytest.approx(-precision[0, 1] / math.sqrt(precision[0, 0] * precision[1, 1]), abs=1e-6)


def test_length_preferred_by_raters_is_no_length_bias() -> None:
    human = ["bad", "fair", "good"] * 20
    texts = ["x" * (10 * SPEC.scale.index(label) + 3) for label in human]
    fair = card(answers(human), items(human, texts))
    assert fair["length_bias"]["rho"] == pytest.approx(0, abs=1e-9)  # it agrees with raters, who prefer long texts
    shuffled = ["x" * int(length) for length in rng.integers(1, 300, 60)]
    longer = ["good" if len(text) > 200 else "fair" if len(text) > 100 else "bad" for text in shuffled]
    biased = card(answers(longer), items(human, shuffled))
    assert biased["length_bias"]["low"] > 0.5
    assert any("correlates with the length" in alarm for alarm in biased["alarms"])


def test_verbosity_bias_matches_hand_calculation() -> None:
    human = ["bad", "fair"] * 15
    plain, padded = answers(human), answers(["fair", "fair"] * 15)
    # half of the items rise by one of two steps: 0.25 of the scale; deviation 0.25·sqrt(30/29)
    report = card(plain, items(human), padded=(plain, padded))["verbosity_bias"]
    reach = stats.t.ppf(0.975, 29) * 0.25 * math.sqrt(30 / 29) / math.sqrt(30)
    assert (report["mean"], report["high"] - report["mean"]) == (pytest.approx(0.25), pytest.approx(reach))


def test_self_preference_matches_hand_calculation() -> None:
    human = ["fair"] * 80
    verdicts, models = [], []
    for at in range(80):
        models.append("own" if at % 2 else "other")
        verdicts.append(
            "good" if at % 4 == 1 else "fair"
        )  # half of its own outputs are graded one of two steps too high
    report = card(answers(verdicts), items(human, model=models), model="own")["self_preference"]
    assert report["mean"] == pytest.approx(0.25)
    assert report["low"] > 0
    assert card(answers(verdicts), items(human, model=models), model="neither")["self_preference"] is None
    pairs = ["tie"] * 40
    first = ["own" if at % 2 else "other" for at in range(40)]
    second = ["other" if at % 2 else "own" for at in range(40)]
    judged_pairs = answers(["a" if at % 2 else "b" for at in range(40)], PAIRS)
    assert card(judged_pairs, items(pairs, model_a=first, model_b=second), PAIRS, model="own")["self_preference"][
        "mean"
    ] == pytest.approx(0.5)


def test_flips_and_position_bias_match_hand_calculation() -> None:
    orders = [("a", "a"), ("a", "b"), ("tie", "tie"), ("b", "b"), None]  # by position: the first text is named a
    report = card(answers(["tie", "a", "tie", "tie", "a"], PAIRS, orders=orders), items(["a"] * 5), PAIRS)
    assert report["position_flip_rate"] == 2 / 4
    assert report["prefers_first"] == 3 / 6


def test_the_smallest_detectable_difference_has_its_power() -> None:
    verdicts = ["bad"] * 50 + ["good"] * 50
    least = card(answers(verdicts), items(verdicts))["smallest_difference"]
    error = np.array([0.0] * 50 + [1.0] * 50).std(ddof=1) * math.sqrt(2 / 100)
    assert 1 - stats.norm.cdf(1.959964 - least / error) == pytest.approx(0.8, abs=1e-3)


def test_calibration_error_agrees_with_a_second_implementation() -> None:
    sure = rng.uniform(0.5, 1, 400)
    text = rng.random(400) < sure**2
    judged = Answers(["yes"] * 400, [1.0] * 400, [{"no": 1 - p, "yes": p} for p in sure])
    error, points = calibration_error(judged, items(["yes" if right else "no" for right in text]))
    share, confidence = calibration_curve(text, sure, n_bins=10)
    assert [point["share"] for point in points] == pytest.approx(list(share))
    assert [point["confidence"] for point in points] == pytest.approx(list(confidence))
    counts = np.histogram(sure, np.linspace(0, 1, 11))[0]
    assert error == pytest.approx(float((counts[counts > 0] * abs(share - confidence)).sum() / 400))


def test_the_card_has_the_probability_mass_of_the_scale_and_warns_if_it_is_low() -> None:
    labels = ["good", "bad"] * 15
    report = card(answers(labels), items(labels), masses=[0.02, 0.04])
    assert report["mass"] == {"mean": pytest.approx(0.03), "lowest": 0.02}
    assert any("only 3% of its probability" in alarm for alarm in report["alarms"])
    assert card(answers(labels), items(labels))["mass"] is None
    assert not any("probability" in alarm for alarm in card(answers(labels), items(labels), masses=[0.5])["alarms"])
