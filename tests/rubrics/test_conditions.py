"""Criteria that count only where another one passed: scores, coverage, groups, step rewards, training credit."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from assay.datasets import Task, make_task
from assay.errors import RubricError
from assay.rubrics import Criterion, Essential, Grade, JudgeSpec, Rubric, checks, lint_rubric, load_rubric
from assay.rubrics.scoring import mean_result
from assay.traces import Rollout, Transition
from assay.traces.credit import Baseline, returns, rewards_of

TASK = make_task({"question": "How many apples?", "answer": "12"})
LONG = "word " * 200


def field(name: str) -> Any:
    def check(task: Any, prediction: Any, rollout: Any) -> Any:
        return prediction[name]

    return check


def graded(name: str, when: str | None = None, **options: Any) -> Criterion:
    """A criterion whose grade is the prediction's field of its name."""
    return Criterion(name=name, check=field(name), when=when, **options)


def rubric(*criteria: Criterion, **options: Any) -> Rubric:
    return Rubric("r", [graded("right", weight=4, essential=Essential(cap=0.5)), *criteria], **options)


def score(scoring: Rubric, **grades: float | None) -> Any:
    return scoring.score(TASK, grades)


def advantages(scores: Sequence[float]) -> list[float]:
    """Of rollouts of one call each, as GRPO credits them."""
    group = [Rollout(score=score, transitions=[Transition(t=0, model="m", request={})]) for score in scores]
    earned = [returns(rewards_of(rollout)) for rollout in group]
    baseline = Baseline()
    for result in earned:
        baseline.add(result)
    return [baseline.advantages(result)[0] for result in earned]


def test_length_does_not_affect_wrong_answers_in_the_shipped_rubric() -> None:
    scoring = load_rubric("math_qa")
    steps = [{"tool": "calculator", "error": None}]
    answers = ("7", "7", f"7 {LONG}", f"7 {LONG}", "12", f"12 {LONG}")
    *scores, brief, long = (scoring.score(TASK, {"answer": answer, "steps": steps}).value for answer in answers)
    # (4*0 + 1*1) / 5; without `when` the long ones lose 1/5 and the group gets +-1.15
    assert scores == [pytest.approx(0.2)] * 4
    assert advantages(scores) == [0.0] * 4
    assert [brief, long] == [1.0, pytest.approx(0.8)]  # (4 + 1 - 1) / 5: among right answers length still counts


def test_a_criterion_counts_only_where_its_condition_passed() -> None:
    scoring = rubric(graded("short", "right"))
    assert score(scoring, right=1.0, short=1.0).value == 1.0  # (4 + 1) / 5
    assert score(scoring, right=1.0, short=0.0).value == pytest.approx(0.8)  # 4 / 5
    result = score(scoring, right=0.0, short=1.0)
    assert (result.value, result.coverage) == (0.0, 1.0)  # (4 * 0) / 5, and not 1 / 5; not to apply is no gap
    assert [verdict.applies for verdict in result.verdicts] == [True, False]
    assert "short (weight 1) counts only where right passes" in result.feedback


def test_an_unscored_condition_leaves_the_criterion_unscored() -> None:
    scoring = Rubric("r", [graded("base"), graded("polite"), graded("kind", "polite", weight=-1)])
    result = score(scoring, base=1.0, polite=None, kind=1.0)
    assert (result.value, result.coverage) == (1.0, pytest.approx(1 / 3))
    assert "polite is unscored" in result.verdicts[2].reason


def test_passing_is_pass_at_of_an_essential_criterion_or_one_half() -> None:
    for essential, expected in (
        (Essential(pass_at=0.9, cap=1), [False, False, False, True]),
        (None, [False, True, True, True]),
    ):
        scoring = Rubric("r", [graded("gate", essential=essential), graded("x", "gate")])
        passes = [score(scoring, gate=grade, x=1.0).verdicts[1].applies for grade in (0.4, 0.5, 0.89, 0.9)]
        assert passes == expected


def test_conditions_may_depend_on_conditions_in_any_order() -> None:
    scoring = Rubric("r", [graded("c", "b"), graded("b", "a"), graded("a")])
    assert score(scoring, a=1.0, b=1.0, c=1.0).value == 1.0
    assert [v.applies for v in score(scoring, a=0.0, b=1.0, c=1.0).verdicts] == [False, False, True]


def test_a_judge_is_not_called_if_its_criterion_does_not_apply() -> None:
    requests = []

    def decide(task: Any, prediction: Any, rollout: Any) -> Grade:
        requests.append(prediction["right"])
        return Grade(value=1.0)

    judged = Criterion(name="clear", judge=JudgeSpec(text="Is it clear?"), when="right")
    scoring = rubric(judged, resolver=lambda criterion: decide)
    for right in (0.0, 1.0):
        score(scoring, right=right)
    assert requests == [1.0]


def test_judges_that_compare_see_only_the_outputs_that_passed() -> None:
    observed = []

    class Listwise:
        def __call__(self, *_: Any) -> Grade:
            return Grade(value=0.0)

        def grade_group(self, task: Task, outputs: Sequence[Any], rollouts: Any) -> list[Grade]:
            observed.append([output["name"] for output in outputs])
            return [Grade(value=1.0) for _ in outputs]

    best = Criterion(name="best", judge=JudgeSpec(text="Which is best?"), when="right")
    outputs = [{"name": name, "right": right} for name, right in (("a", 1.0), ("b", 0.0), ("c", 1.0))]
    results = rubric(best, resolver=lambda criterion: Listwise()).score_group(TASK, outputs)
    assert observed == [["a", "c"]]
    assert [result.value for result in results] == [1.0, 0.0, 1.0]


def test_an_essential_criterion_that_does_not_apply_caps_nothing() -> None:
    source_right = graded("source_right", "has_source", essential=Essential(cap=0))
    scoring = Rubric("r", [graded("has_source", weight=0), graded("clear"), source_right])
    assert score(scoring, has_source=0.0, clear=1.0, source_right=0.0).value == 0.5  # 1 / 2, not capped
    assert score(scoring, has_source=1.0, clear=1.0, source_right=0.0).value == 0.0


def test_step_criteria_may_depend_on_final_ones_and_on_each_other() -> None:
    def brief(task: Any, prediction: Any, rollout: Any) -> float:
        return 1.0

    def even(task: Any, prediction: Any, rollout: Any) -> float:
        return float(prediction["transition"].t % 2 == 0)

    step = {"scope": "step", "weight": 0.1}
    scoring = rubric(
        Criterion(name="brief", check=brief, when="right", **step),
        Criterion(name="even", check=even, **step),
        Criterion(name="only_even", check=brief, when="even", **step),
    )
    for right, expected in (
        (1.0, [{"brief": 0.1, "even": 0.1, "only_even": 0.1}, {"brief": 0.1, "even": 0.0}]),
        (0.0, [{"even": 0.1, "only_even": 0.1}, {"even": 0.0}]),
    ):
        rollout = Rollout(
            prediction={"right": right}, transitions=[Transition(t=t, model="m", request={}) for t in range(2)]
        )
        assert scoring.step_rewards(TASK, rollout) == expected  # its check is run
        rollout.verdicts = list(scoring.score(TASK, rollout.prediction, rollout).verdicts)
        assert scoring.step_rewards(TASK, rollout) == expected  # its verdict is taken
    failed = Rollout(transitions=[Transition(t=0, model="m", request={})])
    assert scoring.step_rewards(TASK, failed) == [{"even": 0.1, "only_even": 0.1}]  # nothing is known of the outcome


def test_means_are_over_the_runs_to_which_the_criterion_applied() -> None:
    scoring = rubric(graded("short", "right"))
    results = [score(scoring, right=right, short=1.0) for right in (0.0, 1.0)]
    assert mean_result(results).grades["short"] == 1.0
    assert math.isnan(mean_result(results[:1]).grades["short"])


@pytest.mark.parametrize(
    ("criteria", "message"),
    [
        ([graded("x", "rihgt")], "names no criterion.*Did you mean 'right'"),
        ([graded("x", "x")], "is part of a cycle"),
        ([graded("x", "y"), graded("y", "x")], "x -> y -> x"),
        ([graded("x", weight=-1), graded("y", "x")], "is a pitfall"),
        ([graded("x", scope="step"), graded("y", "x")], "has scope 'step'"),
    ],
)
def test_wrong_conditions_are_refused(criteria: list[Criterion], message: str) -> None:
    with pytest.raises(RubricError, match=message):
        rubric(*criteria)


def test_a_file_names_a_condition_and_its_errors_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    text = (
        "name: r\ncriteria:\n  - {name: right, check: exact}\n"
        "  - {name: long, weight: -1, check: length, with: {max_tokens: 5}, when: WHEN}\n"
    )
    file.write_text(text.replace("WHEN", "right"))
    with_when = load_rubric(file)
    assert with_when.criteria[1].when == "right"
    assert with_when.score({"question": "q", "answer": "a"}, {"answer": LONG}).value == 0.0
    file.write_text(text.replace("WHEN", "wrong"))
    with pytest.raises(RubricError, match=r"r\.yaml:4: .*when='wrong' names no criterion"):
        load_rubric(file)
    file.write_text(text.replace(", when: WHEN", ""))
    assert load_rubric(file).version != with_when.version
    assert [(finding.criterion, finding.rule) for finding in lint_rubric(load_rubric(file))] == [("long", "condition")]


def test_lint_names_the_essential_criterion_to_use_as_condition() -> None:
    findings = lint_rubric(rubric(Criterion(name="slow", weight=-1, check=checks.token_use, arguments={"budget": 10})))
    assert [finding.text.endswith("add `when: right`") for finding in findings] == [True]
