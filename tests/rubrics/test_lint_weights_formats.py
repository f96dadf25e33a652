"""Lint, weights from human scores, rubrics of other tools, and the reward function of TRL's trainers."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.errors import RubricError
from assay.rubrics import (
    Criterion,
    Essential,
    Grade,
    JudgeSpec,
    NotApplicable,
    Rubric,
    fit_weights,
    lint_rubric,
    load_rubric,
    points_rubric,
)


def asks(text: str, name: str = "a", **options: Any) -> Criterion:
    return Criterion(name=name, judge=JudgeSpec(text=text), **options)


def always(task: Any, prediction: Any, rollout: Any, **_: Any) -> float:
    return 1.0


# -- lint


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Is it clear and correct?", "compound"),
        ("Is it clear? Is it short?", "compound"),
        ("Is it clear, correct, concise?", "compound"),
        ("Is it polite or brief?", "compound"),
        ("Was the right tool called?", "unseen"),
        ("Did it use the calculator?", "unseen"),
        ("Does it match the reference?", "unseen"),
        ("Is it the gold label?", "unseen"),
        ("Does it agree with the reference answer?", "unseen"),
        ("Do the previous steps lead there?", "unseen"),
        ("Is it better than the other outputs?", "unseen"),
        ("Is {answer} right?", "unseen"),
        ("Is it clear?", None),
        ("Does it weigh the pros and cons?", None),
        ("Is the difference between cats and dogs named?", None),
        ("Is the band named?", None),
        ("Is it right or not?", None),
        ("Are there one or more sources?", None),
    ],
)
def test_an_unsuitable_question_is_reported(text: str, rule: str | None) -> None:
    assert [finding.rule for finding in lint_rubric(Rubric("r", [asks(text)]))] == ([rule] if rule else [])


def test_the_question_of_a_referenced_judge_is_checked_if_it_can_be_read() -> None:
    rubric = Rubric("r", [Criterion(name="a", judge=JudgeSpec(use="mood.yaml"))])
    assert lint_rubric(rubric) == []
    assert [finding.rule for finding in lint_rubric(rubric, used=lambda name: "Is it clear and right?")] == ["compound"]


def test_duplicate_and_ineffective_criteria_are_reported() -> None:
    rubric = Rubric(
        "r",
        [
            asks("Is the answer easy to understand for a child?", "a", weight=50),
            asks("Is the answer easy to understand for children?", "b", weight=50),
            Criterion(name="c", check=always, arguments={}, weight=50),
            Criterion(name="d", check=always, weight=50),
            Criterion(name="e", check=lambda t, p, r: 1, weight=0.1),
            Criterion(name="f", check=lambda t, p, r: 1, weight=0.1, essential=Essential()),
        ],
    )
    findings = {finding.criterion: finding.rule for finding in lint_rubric(rubric)}
    assert findings == {"b": "duplicate", "d": "duplicate", "e": "weight"}


def test_shipped_rubrics_have_no_findings() -> None:
    for name in ("math_qa", "classify", "extract"):
        assert lint_rubric(load_rubric(name)) == []


# -- weights


def graded_rubric(**weights: float) -> Rubric:
    return Rubric(
        "r",
        [Criterion(name=name, weight=weight, check=lambda t, p, r, n=name: p[n]) for name, weight in weights.items()],
    )


def results_of(rubric: Rubric, rows: Any) -> list[Any]:
    return [
        rubric.score({"question": "q"}, dict(zip([c.name for c in rubric.criteria], map(float, row), strict=True)))
        for row in rows
    ]


def test_unconstrained_weights_agree_with_a_second_implementation() -> None:
    """Signs not at work, and the sum held by elimination: the closed form of ridge towards the declared weights."""
    declared = graded_rubric(a=1, b=3)
    rows = np.random.default_rng(2).random((60, 2))
    human = [0.6 * a + 0.4 * b for a, b in rows]
    fitted = fit_weights(declared, results_of(declared, rows), human)
    x, y, start = rows[:, 0] - rows[:, 1], np.array(human) - rows[:, 1], 0.25
    w = (x @ y + 2 * fitted.strength * start) / (x @ x + 2 * fitted.strength)  # a = w, b = 1 - w
    assert fitted.weights["a"] / 4 == pytest.approx(w, abs=1e-4)


def test_a_criterion_that_does_not_apply_is_not_a_zero() -> None:
    """Human scores are the rubric's own with other weights, so the fit can be exact."""

    def grade(task: Any, prediction: Any, rollout: Any, name: str = "") -> float:
        if name in prediction["skipped"]:
            raise NotApplicable("nothing to grade")
        return float(prediction[name])

    def rubric(**weights: float) -> Rubric:
        return Rubric(
            "r", [Criterion(name=n, weight=w, check=grade, arguments={"name": n}) for n, w in weights.items()]
        )

    declared, truth = rubric(a=1, b=1, c=1, d=-1), rubric(a=1.8, b=0.9, c=0.3, d=-0.5)
    rng = np.random.default_rng(3)
    outputs = [
        {
            **dict(zip("abcd", rng.random(4) * [0.9, 0.9, 0.9, 0.3] + [0.1, 0.1, 0.1, 0], strict=True)),
            "skipped": skipped,
        }
        for skipped in ["", "a", "b", "bd", "cd", ""] * 20
    ]
    task = {"question": "q"}
    human = [truth.score(task, output).value for output in outputs]
    inside = [i for i, value in enumerate(human) if 0 < value < 1]
    fitted = fit_weights(declared, [declared.score(task, outputs[i]) for i in inside], [human[i] for i in inside])
    assert fitted.weights == pytest.approx({"a": 1.8, "b": 0.9, "c": 0.3, "d": -0.5}, abs=0.03)
    assert fitted.error_fitted < 0.01 < fitted.error_declared


def test_too_few_or_invalid_scores_are_refused() -> None:
    rubric = graded_rubric(a=1, b=1)
    results = results_of(rubric, [[0.5, 0.5]] * 12)
    with pytest.raises(RubricError, match="between 0 and 1"):
        fit_weights(rubric, results, [5.0] * 12)
    with pytest.raises(RubricError, match="one human score per result"):
        fit_weights(rubric, results, [0.5])
    with pytest.raises(RubricError, match="too few"):
        fit_weights(rubric, results[:5], [0.5] * 5)
    unscored = [rubric.score({"question": "q"}, {"a": 1.0, "b": None})] * 12
    with pytest.raises(RubricError, match="0 complete results"):
        fit_weights(rubric, unscored, [0.5] * 12)


# -- formats


VERIFIERS = """
[[criteria]]
name = "cites sources"
text = "Does the answer cite its sources?"
weight = 2

[[criteria]]
name = "tone"
text = "How kind is the tone?"
choices = ["rude", "neutral", "kind"]
"""


def test_a_verifiers_criteria_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(VERIFIERS)
    rubric = load_rubric(tmp_path / "r.toml")
    assert [(c.name, c.weight, c.judge.scale) for c in rubric.criteria if c.judge] == [
        ("cites_sources", 2.0, ("no", "yes")), ("tone", 1.0, ("rude", "neutral", "kind")),
    ]  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps({"criteria": [{"name": "a", "text": "Good?"}]}))
    assert load_rubric(tmp_path / "r.json").criteria[0].judge == JudgeSpec(text="Good?")


def test_healthbench_points_become_weights(tmp_path: Path) -> None:
    entries = [
        {"criterion": "Names the dose", "points": 7, "tags": ["x"]},
        {"criterion": "Is unsafe", "points": -5},
        {"criterion": "Is kind", "points": 3},
    ]
    (tmp_path / "r.json").write_text(json.dumps({"prompt": [], "rubrics": entries}))
    grades = {"c1": 1.0, "c2": 1.0, "c3": 0.0}
    rubric = load_rubric(tmp_path / "r.json", resolver=lambda c: lambda t, p, r: Grade(value=grades[c.name]))
    # HealthBench: 2 of 10 points
    assert rubric.score({"question": "q"}, {"answer": "x"}).value == pytest.approx((7 - 5) / 10)
    assert points_rubric(entries).criteria[1].weight == -5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.toml", "criteria = 3", "a list of criteria"),
        ("r.toml", "[[criteria", "cannot be read"),
        ("r.json", "[]", "a list of criteria"),
        ("r.json", '{"criteria": [{"name": "a", "text": "t", "weight": -1}]}', "must be greater than or equal to 0"),
        ("r.json", '{"criteria": [{"name": "a", "text": "t", "choices": ["yes", "yes"]}]}', "two different labels"),
        ("r.json", '{"criteria": [{"name": "a", "text": "t", "prompt": "p"}]}', "Did you mean 'text'"),
        ("r.json", '{"criteria": [{"name": "a", "text": "t"}, {"name": "a", "text": "t"}]}', "more than one criterion"),
        ("r.json", '[{"criterion": "a", "points": 0}]', "a number != 0"),
        ("r.json", '[{"criterion": "a", "points": -1}]', "weight above 0"),
        ("r.json", '[{"criterion": "a", "points": NaN}]', "finite"),
        ("no.json", None, "no such file"),
    ],
)
def test_invalid_files_are_refused_with_the_reason(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RubricError, match=message):
        load_rubric(tmp_path / name)


# -- rewards


def test_group_judges_score_a_group_in_one_call() -> None:
    class Longest:
        def __call__(self, *_: Any) -> float:
            return math.nan

        def grade_group(self, task: Any, predictions: Any, rollouts: Any) -> list[Any]:
            best = max(len(p["answer"]) for p in predictions)
            return [Grade(value=len(p["answer"]) / best) for p in predictions]

    reward = Rubric("r", [Criterion(name="a", check=Longest())]).trl_reward(group=True)
    result = asyncio.run(reward(["p", "q", "p", "q"], ["xx", "x", "xxxx", "xx"], completion_ids=[[1]] * 4))
    assert result == [0.5, 0.5, 1.0, 1.0]
