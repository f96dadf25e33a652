"""Scores, caps, NaN and coverage, with the arithmetic shown."""

import functools
import math
from collections.abc import Callable
from typing import Any

import dspy
import pytest
from hypothesis import given, strategies as st

from assay.errors import RubricError, Unscored
from assay.rubrics import Criterion, Essential, Failed, Grade, JudgeSpec, NoGrade, Rubric, checks
from assay.traces import Rollout, ToolCall, Transition

TASK = {"question": "2+2", "answer": "4"}


def gives(value: Any) -> Callable[..., Any]:
    def check(task: Any, prediction: Any, rollout: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    return check


def rubric(*entries: tuple[Any, ...]) -> Rubric:
    """Entries: (weight, grade[, essential])."""
    criteria = [
        Criterion(name=f"c{i}", weight=entry[0], check=gives(entry[1]), essential=entry[2] if len(entry) > 2 else None)
        for i, entry in enumerate(entries)
    ]
    return Rubric("r", criteria)


def value(*entries: tuple[Any, ...]) -> float:
    return rubric(*entries).score(TASK, {"answer": "x"}).value


def test_weights_and_pitfalls_give_the_weighted_score() -> None:
    assert value((4, 1.0), (1, 0.5)) == pytest.approx((4 * 1 + 1 * 0.5) / 5)  # 0.9
    # pitfalls do not enter the divisor
    assert value((4, 0.5), (1, 1.0), (-1, 1.0)) == pytest.approx((4 * 0.5 + 1 - 1) / 5)
    assert value((1, 0.0), (-5, 1.0)) == 0.0  # -5 / 1, clipped


def test_columns_of_a_row_that_a_criterion_or_the_prediction_names_are_expected_outputs() -> None:
    def same(task: Any, prediction: dict[str, Any], rollout: Any) -> bool:
        return bool(task.expected["place"] == prediction["place"])

    order = Criterion(name="order", check=checks.exact, arguments={"field": "order_id"})
    rubric = Rubric("r", [order, Criterion(name="place", check=same)])
    row = {"message": "Where is A-1?", "order_id": "A-1", "place": "Rome"}
    structured = {"inputs": {"message": "?"}, "expected": {"order_id": "A-1", "place": "Rome"}}
    for task in (row, dspy.Example(**row).with_inputs("message"), dspy.Example(**row), structured):
        result = rubric.score(task, {"order_id": "A-2", "place": "Rome"})
        assert (result.value, result.coverage) == (0.5, 1.0), result.feedback
        assert [one.value for one in rubric.score_group(task, [{"order_id": "A-1", "place": "Rome"}])] == [1.0]


def test_an_essential_criterion_caps_the_score() -> None:
    essential = Essential(pass_at=1, cap=0.5)
    assert value((1, 0.9, essential), (9, 1.0)) == 0.5  # (0.9 + 9) / 10 = 0.99, capped
    assert value((1, 1.0, essential), (9, 1.0)) == 1.0
    assert value((9, 0.0, essential), (1, 1.0)) == pytest.approx(0.1)  # a cap does not lift


def test_an_unscored_essential_or_nothing_scored_is_nan() -> None:
    assert math.isnan(value((1, math.nan, Essential()), (9, 1.0)))
    assert math.isnan(value((1, math.nan), (2, None)))
    assert math.isnan(value((1, None), (-1, 0.5)))  # only a pitfall scored: nothing to divide by


@pytest.mark.parametrize("bad", [math.inf, "high", ValueError("boom"), NoGrade("cannot see it")])
def test_invalid_grades_are_nan(bad: Any) -> None:
    result = rubric((1, bad), (1, 1.0)).score(TASK, {"answer": "x"})
    assert result.verdicts[0].grade is None
    assert result.verdicts[0].reason
    assert result.value == 1.0


def test_an_unscored_criterion_is_judged_again_once() -> None:
    tries = []

    def check(task: Any, prediction: Any, rollout: Any) -> float:
        tries.append(1)
        return math.nan if len(tries) == 1 else 1.0

    assert Rubric("r", [Criterion(name="c", check=check)]).score(TASK, {"answer": "x"}).value == 1.0
    assert len(tries) == 2


@pytest.mark.parametrize("prediction", [None, {}, dspy.Prediction(), Failed("no parse"), ValueError("raised")])
def test_the_agents_own_failure_is_zero_with_a_flag(prediction: Any) -> None:
    result = rubric((1, 1.0)).score(TASK, prediction)
    assert result.value == 0.0
    assert result.failed


@given(st.lists(st.tuples(st.floats(-10, 10), st.one_of(st.none(), st.floats(0, 1))), min_size=1, max_size=8))
def test_any_score_is_in_range_or_nan(entries: list[tuple[float, float | None]]) -> None:
    if not any(weight > 0 for weight, _ in entries):
        with pytest.raises(RubricError):
            rubric(*entries)
        return
    score = value(*entries)
    assert math.isnan(score) or 0 <= score <= 1


def test_the_metric_is_a_number_a_bool_or_feedback_and_never_nan() -> None:
    example = dspy.Example(question="2+2", answer="4").with_inputs("question")
    scored, unscored = rubric((1, 0.5)), rubric((1, None))
    assert scored.metric()(example, dspy.Prediction(answer="4")) == 0.5
    assert scored.metric(threshold=0.6)(example, dspy.Prediction(answer="4"), trace=[]) is False
    assert scored.metric(threshold=0.5)(example, dspy.Prediction(answer="4"), trace=[]) is True
    feedback = scored.metric(feedback=True)(example, dspy.Prediction(answer="4"), None, "predict", [])
    assert feedback.score == 0.5
    assert "c0" in feedback.feedback
    with pytest.raises(Unscored):
        unscored.metric()(example, dspy.Prediction(answer="4"))


def test_any_callable_is_a_check_with_a_version() -> None:
    class Fixed:
        def __call__(self, task: Any, prediction: Any, rollout: Any) -> float:
            return 1.0

    def at_least(task: Any, prediction: Any, rollout: Any, least: int) -> bool:
        return prediction["answer"] >= least

    def of(check: Any) -> Rubric:
        return Rubric("r", [Criterion(name="c", check=check)])

    assert of(Fixed()).score({"question": "?"}, {"answer": 1}).value == 1.0
    versions = {
        of(check).version
        for check in (Fixed(), functools.partial(at_least, least=1), functools.partial(at_least, least=2))
    }
    assert len(versions) == 3


def test_step_rewards_are_capped_below_the_answer() -> None:
    def ran(task: Any, prediction: Any, rollout: Any) -> Grade:
        return Grade(value=1.0)

    steps = Rubric(
        "r", [Criterion(name="right", check=gives(1.0)), Criterion(name="ran", weight=0.05, scope="step", check=ran)]
    )
    rollout = Rollout(transitions=[Transition(t=t, model="m", request={}) for t in range(3)])
    task = dspy.Example  # step checks of this test look at nothing
    assert [sum(entry.values()) for entry in steps.step_rewards(task, rollout)] == [0.05, 0.05, 0.05]
    rollout.transitions *= 20  # 60 steps of 0.05 would be 3.0
    assert sum(sum(entry.values()) for entry in steps.step_rewards(task, rollout)) == pytest.approx(0.5)
    assert steps.score(TASK, {"answer": "x"}, rollout).value == 1.0  # step criteria never enter the score


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rubric("r", []), "at least one final criterion"),
        (lambda: rubric((0, 1.0)), "weight above 0"),
        (lambda: rubric((-1, 1.0)), "weight above 0"),
        (lambda: Rubric("r", [Criterion(name="a", check=gives(1))] * 2), "more than one criterion named a"),
        (lambda: Criterion(name="a"), "exactly one of check and judge"),
        (lambda: Criterion(name="a b", check=gives(1)), "must consist of letters, digits and underscores"),
        (lambda: Criterion(name="a", weight=math.nan, check=gives(1)), "finite"),
        (lambda: Criterion(name="a", weight=1e308, check=gives(1)), "finite"),
        (lambda: Criterion(name="a", check=gives(1), arguments={"x": 1}), "has no argument 'x'"),
        (lambda: Criterion(name="a", check="exact"), "check='exact' must be a function"),  # type: ignore[arg-type]
        (lambda: Criterion(name="a", check=gives(1), arguments=["x"]), r"arguments=\['x'\] must be a mapping"),  # type: ignore[arg-type]
        (lambda: Criterion(name="a", check=gives(1), essential=True), "essential=True must be an Essential"),  # type: ignore[arg-type]
        (lambda: JudgeSpec(text="ok?", scale="yes"), "scale='yes' must be a tuple or list of strings"),  # type: ignore[arg-type]
        (lambda: JudgeSpec(text="ok?", scale=(1, 2)), r"scale=\(1, 2\) must be a tuple or list of strings"),  # type: ignore[arg-type]
        (lambda: Criterion(name="a", check=checks.token_use, arguments={"budget": 0}), "budget: must be"),
        (lambda: Criterion(name="a", check=checks.token_use), r"set arguments=\{'budget': …\}"),
        (lambda: Criterion(name="a", check=checks.numeric, arguments={"tolerance": -1}), "tolerance: must be"),
        (lambda: Criterion(name="a", check=checks.numeric, arguments={"tolerance": "abc"}), "tolerance: must be"),
        (lambda: Criterion(name="a", check=checks.one_of, arguments={"values": "red"}), "must be a non-empty list"),
        (lambda: Criterion(name="a", check=checks.contains, arguments={"text": []}), "text=.* must be"),
        (lambda: Criterion(name="a", check=checks.length, arguments={"max_tokens": 0}), "max_tokens: must be"),
        (lambda: Criterion(name="a", check=checks.steps_used, arguments={"budget": 0}), "budget: must be"),
        (lambda: Criterion(name="a", weight=-1, check=gives(1), essential=Essential()), "pitfall"),
        (lambda: Essential(cap=2), "between 0 and 1"),
        (lambda: Essential(cap="1"), "cap='1' must be between 0 and 1"),  # type: ignore[arg-type]
        (lambda: Criterion(name="a", weight="3", check=gives(1)), "weight='3' must be a finite number"),  # type: ignore[arg-type]
        (lambda: Criterion(name=3, check=gives(1)), "must consist of letters"),  # type: ignore[arg-type]
        (lambda: Criterion(name="a", judge="Is it right?"), "judge='Is it right[?]' must be a JudgeSpec"),  # type: ignore[arg-type]
        (lambda: Rubric("r", ["a"]), "criteria must be of type Criterion, got 'a'"),  # type: ignore[list-item]
        (lambda: Rubric("r", [Criterion(name="a", check=gives(1))], step_cap="1"), "step_cap='1' must be"),  # type: ignore[arg-type]
        (lambda: JudgeSpec(text="?", scale=("only",)), "at least two"),
    ],
)
def test_wrong_rubrics_are_refused_with_the_rule(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(RubricError, match=message):
        build()


def test_tool_calls_are_read_from_the_rollout_or_the_steps() -> None:
    from assay.rubrics import load_rubric

    shipped = load_rubric("math_qa")
    calculator = ToolCall(name="calculator", arguments={}, result="4")
    used = Rollout(transitions=[Transition(t=0, model="m", request={}, tools=[calculator])])
    assert shipped.score(TASK, {"answer": "4"}, used).value == 1.0
    assert shipped.score(TASK, {"answer": "4", "steps": []}).value == pytest.approx(4 / 5)  # right, without the tool
    wrong = shipped.score(TASK, {"answer": "5"}, used)  # (0 + 1) / 5 = 0.2, under the cap of 0.5
    assert wrong.value == pytest.approx(0.2)
    assert wrong.capped_by == ("correct",)


@pytest.mark.parametrize(
    "empty", [{"answer": None}, {"answer": " "}, {"answer": "", "steps": [{"tool": "x", "error": None}]}]
)
def test_an_empty_answer_scores_0_whatever_the_other_grades(empty: dict[str, Any]) -> None:
    tidy = Rubric(
        "r", [Criterion(name="right", weight=4, check=checks.exact), Criterion(name="tidy", check=gives(1.0))]
    )
    result = tidy.score({"question": "?", "expected": "4"}, empty)
    assert (result.value, result.failed) == (0.0, "every field of the answer is empty")


def test_an_empty_answer_is_right_if_nothing_is_expected() -> None:
    fields = Rubric("r", [Criterion(name="right", check=checks.fields_match)])
    assert fields.score({"inputs": {"text": "no date"}, "expected": {"date": ""}}, {"date": ""}).value == 1.0


@pytest.mark.parametrize(
    ("check", "with_"),
    [
        (checks.regex, {"pattern": r"\d+"}),
        (checks.contains, {"text": "0"}),
        (checks.one_of, {"values": [0, 1], "field": "answer"}),
    ],
)
def test_the_answer_0_is_an_answer(check: Any, with_: dict[str, Any]) -> None:
    rubric = Rubric("r", [Criterion(name="c", check=check, arguments=with_)])
    assert rubric.score({"question": "?"}, {"answer": 0}).value == 1.0


def test_numpy_numbers_and_truth_values_are_grades() -> None:
    import numpy as np

    for value, grade in ((np.bool_(True), 1.0), (np.float32(0.5), 0.5), (np.int64(1), 1.0), (np.float64("nan"), None)):
        assert rubric((1, value), (1, 1.0)).score(TASK, {"answer": "x"}).verdicts[0].grade == grade


class Ends:
    """Ends the process when it is written or compared."""

    def __repr__(self) -> str:
        raise SystemExit(5)

    __str__ = __repr__


class EndsFloat(float):
    def __ge__(self, other: Any) -> bool:
        raise SystemExit(5)

    __le__ = __ge__


class EndsError(Exception):
    def __str__(self) -> str:
        raise SystemExit(5)


@pytest.mark.parametrize(
    "answer",
    [Ends(), EndsFloat(0.5), Grade(value=EndsFloat(0.5)), Grade(value=1.0, reason=Ends()), EndsError()],
    ids=range(5),
)  # type: ignore[arg-type]
def test_a_check_result_that_exits_the_process_is_unscored(answer: Any) -> None:
    score = rubric((1, answer), (1, 1.0)).score(TASK, {"answer": "x"})
    assert (score.verdicts[0].grade, score.value) == (None, 1.0)
    assert score.verdicts[0].reason


def test_a_check_that_raises_keyboard_interrupt_is_unscored_and_stops_nothing() -> None:
    def check(*_: Any) -> float:
        raise KeyboardInterrupt

    criteria = [Criterion(name="odd", check=check), Criterion(name="fine", check=lambda *_: 1.0)]
    score = Rubric("r", criteria).score(TASK, {"answer": "x"})
    assert (score.verdicts[0].grade, score.value) == (None, 1.0)
    assert "KeyboardInterrupt" in score.verdicts[0].reason


@pytest.mark.parametrize(
    ("kind", "keyword", "message"),
    [
        (Criterion, "chek", r"Criterion\(\) got an unexpected keyword 'chek'.*Did you mean 'check'\?"),
        (Criterion, "with", "'with' is a key of YAML files; in Python it is arguments="),
        (Criterion, "with_", "'with' is a key of YAML files; in Python it is arguments="),
        (JudgeSpec, "txt", r"it takes text, .*Did you mean 'text'\?"),
        (Essential, "pass_ad", r"Did you mean 'pass_at'\?"),
    ],
)
def test_a_misspelt_keyword_is_refused_with_the_nearest(kind: Any, keyword: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kind(**{keyword: "x"})
