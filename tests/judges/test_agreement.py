"""Agreement of raters and judges worked out by hand and against a second implementation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from labelled_items import item
from sklearn.metrics import cohen_kappa_score

from assay.judges.quality.agreement import MEASURES, AgreementTable, Answers, agreement, ceiling
from assay.rubrics import JudgeSpec

YES_NO = JudgeSpec(text="?", scale=("no", "yes"))
THREE = JudgeSpec(text="?", scale=("bad", "fair", "good"))


def answers(*verdicts: str | None, spec: JudgeSpec = YES_NO) -> Answers:
    return Answers(verdicts, [math.nan if v is None else float(spec.scale.index(v)) for v in verdicts])


def test_kappa_matches_hand_calculation() -> None:
    # judge yes yes no no, raters yes no no no: agree 3/4; chance: yes 1/2 * 1/4 + no 1/2 * 3/4 = 1/2;
    # (3/4 - 1/2) / (1/2) = 0.5
    measures = agreement(
        answers("yes", "yes", "no", "no"),
        [item(1, "yes"), item(2, "no"), item(3, "no"), item(4, "no")],
        YES_NO,
        intervals=False,
    )
    assert measures.values["accuracy"] == 0.75
    assert measures.values["kappa"] == pytest.approx(0.5)


def test_disagreeing_raters_are_counted_by_their_shares() -> None:
    # judge yes on (yes, yes, no), no on (no): cells yes/yes 2/3, yes/no 1/3, no/no 1. agree (2/3 + 1) / 2 = 5/6;
    # chance: yes 1/2 * 1/3 + no 1/2 * 2/3 = 1/2; kappa (5/6 - 1/2) / (1/2) = 2/3
    measures = agreement(answers("yes", "no"), [item(1, "yes", "yes", "no"), item(2, "no")], YES_NO, intervals=False)
    assert measures.values["kappa"] == pytest.approx(2 / 3)
    assert measures.values["accuracy"] == 1.0


@given(st.lists(st.tuples(st.sampled_from(THREE.scale), st.sampled_from(THREE.scale)), min_size=5, max_size=60))
@settings(deadline=None, max_examples=50)
def test_kappa_agrees_with_a_second_implementation(pairs: list[tuple[str, str]]) -> None:
    judge, human = zip(*pairs, strict=True)
    measures = agreement(
        answers(*judge, spec=THREE), [item(n, label) for n, label in enumerate(human)], THREE, intervals=False
    )
    if len(set(human)) < 2:
        assert measures.values["kappa"] is None
        return
    assert measures.values["kappa"] == pytest.approx(cohen_kappa_score(judge, human, labels=list(THREE.scale)))
    assert measures.values["weighted_kappa"] == pytest.approx(
        cohen_kappa_score(judge, human, labels=list(THREE.scale), weights="quadratic")
    )


def test_undefined_measures_are_none_with_a_reason() -> None:
    single_class = agreement(answers("yes", "no"), [item(1, "yes"), item(2, "yes")], YES_NO, intervals=False)
    assert single_class.values["kappa"] is None
    assert "only one label" in single_class.why["kappa"]
    nominal = JudgeSpec(text="?", scale=("red", "green"), kind="nominal")
    unordered = agreement(
        answers("red", "green", spec=nominal), [item(1, "red"), item(2, "green")], nominal, intervals=False
    )
    assert unordered.values["weighted_kappa"] is None
    assert unordered.why["spearman"] == "the scale has no order"
    nothing = agreement(answers(None, None), [item(1, "yes"), item(2, "no")], YES_NO)
    assert (nothing.n, nothing.unscored) == (0, 2)
    assert set(nothing.values.values()) == {None}


def test_a_constant_judge_has_kappa_0_and_a_perfect_judge_1() -> None:
    items = [item(n, "yes" if n % 2 else "no") for n in range(40)]
    constant = agreement(answers(*["yes"] * 40), items, YES_NO)
    assert constant.values["kappa"] == 0.0
    right = [i.modes[0] for i in items]
    perfect = agreement(answers(*right), items, YES_NO)
    assert [perfect.values[name] for name in ("accuracy", "kappa", "alpha")] == [1.0, 1.0, 1.0]
    assert perfect.intervals["kappa"] == (1 - 3 / 40, 1.0)  # the rule of three
    assert set(agreement(answers(*right[:10]), items[:10], YES_NO).intervals.values()) == {None}  # too few


def test_intervals_have_their_nominal_coverage() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(60):  # a judge that is right 3 times of 4 on balanced labels: kappa 0.5
        truth = rng.integers(0, 2, 100)
        verdict = np.where(rng.random(100) < 0.75, truth, 1 - truth)
        measures = agreement(
            answers(*[YES_NO.scale[v] for v in verdict]),
            [item(n, YES_NO.scale[t]) for n, t in enumerate(truth)],
            YES_NO,
        )
        low, high = measures.intervals["kappa"] or (0, 0)
        covered += low <= 0.5 <= high
    assert covered >= 52  # 95 % of 60 is 57


def test_the_ceiling_compares_each_rater_with_the_others() -> None:
    agreed = [item(n, *["yes" if n % 2 else "no"] * 3) for n in range(30)]
    assert ceiling(agreed, YES_NO).values["kappa"] == 1.0
    alone = ceiling([item(1, "yes")], YES_NO)
    assert alone.values["kappa"] is None
    assert alone.why["kappa"] == "no item has two raters"


@pytest.mark.parametrize("kind", ["nominal", "ordinal", "numeric"])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=20, max_size=40))
@settings(deadline=None, max_examples=20)
def test_resampled_measures_equal_those_of_the_libraries(kind: str, pairs: list[tuple[int, int]]) -> None:
    spec = JudgeSpec(text="?", scale=("1", "2", "4"), kind=kind)
    judge, human = zip(*pairs, strict=True)
    table = AgreementTable(
        answers(*[spec.scale[i] for i in judge], spec=spec),
        [item(n, spec.scale[i]) for n, i in enumerate(human)],
        spec,
    )
    for name in MEASURES:
        value, _ = table.measure(name)
        if value is not None:
            assert table.resampled(name, np.arange(len(pairs))[None])[0] == pytest.approx(value), name


@pytest.mark.parametrize("kind", ["nominal", "ordinal", "numeric"])
def test_alpha_is_krippendorffs_and_weights_disagreeing_raters_by_their_shares(kind: str) -> None:
    import krippendorff

    rng, spec = np.random.default_rng(1), JudgeSpec(text="?", scale=("1", "2", "4", "8"), kind=kind)
    truth = rng.integers(0, 4, 200)
    text = np.where(rng.random(200) < 0.6, truth, rng.integers(0, 4, 200))
    answers = Answers([spec.scale[label] for label in text], [spec.steps[label] for label in text])
    raters = [item(at, spec.scale[label]) for at, label in enumerate(truth)]
    level = {"nominal": "nominal", "ordinal": "ordinal", "numeric": "interval"}[kind]
    steps = np.array(spec.steps)
    known = krippendorff.alpha(reliability_data=np.stack([steps[text], steps[truth]]), level_of_measurement=level)
    assert agreement(answers, raters, spec, intervals=False).values["alpha"] == pytest.approx(known, abs=1e-12)
    # two raters that differ: as if each rating were an item of half the weight
    other = rng.integers(0, 4, 200)
    both = [item(at, spec.scale[one], spec.scale[two]) for at, (one, two) in enumerate(zip(truth, other, strict=True))]
    soft = agreement(answers, both, spec, intervals=False).values["alpha"]
    doubled = krippendorff.alpha(
        reliability_data=np.stack([np.tile(steps[text], 2), np.concatenate([steps[truth], steps[other]])]),
        level_of_measurement=level,
    )
    assert soft == pytest.approx(doubled, abs=0.005)  # they differ by the correction for few items


def test_brier_and_ceiling_agree_with_second_implementations() -> None:
    from sklearn.metrics import brier_score_loss

    rng = np.random.default_rng(2)
    spec = JudgeSpec(text="?", scale=("no", "yes"))
    text, truth = rng.random(80), rng.integers(0, 2, 80)
    answers = Answers([spec.scale[int(p > 0.5)] for p in text], text.tolist(), [{"no": 1 - p, "yes": p} for p in text])
    items = [item(at, spec.scale[label]) for at, label in enumerate(truth)]
    brier = agreement(answers, items, spec, intervals=False).values["brier"]
    assert brier == pytest.approx(2 * brier_score_loss(truth, text))  # over both labels: twice that of one
    rated = rng.integers(0, 2, (50, 3))
    items = [item(at, *(spec.scale[label] for label in row)) for at, row in enumerate(rated)]
    credit, table = [], np.zeros((2, 2))
    for row in rated:  # each in turn against the other two, who may differ
        for out in range(3):
            others = [int(row[k]) for k in range(3) if k != out]
            credit.append(others.count(row[out]) / 2 if others[0] != others[1] else float(others[0] == row[out]))
            for other in others:
                table[row[out], other] += 0.5
    human = ceiling(items, spec)
    assert human.values["accuracy"] == pytest.approx(np.mean(credit))
    labels = [(a, b) for a in range(2) for b in range(2)]
    kappa = cohen_kappa_score(
        [a for a, _ in labels], [b for _, b in labels], sample_weight=[table[pair] for pair in labels]
    )
    assert human.values["kappa"] == pytest.approx(kappa)
