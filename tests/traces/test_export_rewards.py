"""Rewards that say nothing are refused: at the export, and at the first call of the reward."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from export_rows import LOOSE, add_rollout, store as store, turn

import assay
from assay.errors import DataError, RubricError
from assay.rubrics import Criterion, Grade, JudgeSpec, NotApplicable, Rubric
from assay.rubrics.checks import exact, steps_used
from assay.traces import Store
from assay.traces.records import Verdict

TONE = "[[ ## tone ## ]]\nb"


def fill(store: Store, scores: list[float], grades: list[float | None] | None = None) -> None:
    """Answers with the field `tone` of their last call alone, and grades of a judge."""
    for n, score in enumerate(scores):
        fields = {"topic": "a", "tone": "b"}
        verdicts = [Verdict(criterion="kind", grade=grades[n], reason="r")] if grades else []
        add_rollout(
            store, turn(0, "Sort it.", "Thinking."), turn(1, f"What is {n}?", TONE), inputs={"q": str(n)}, score=score,
            expected=fields, prediction=fields, verdicts=verdicts,
        )  # fmt: skip
    store.flush()


def exported(store: Store, *criteria: str) -> int:
    """Rows of an export with a rubric of these criteria."""
    Path("r.yaml").write_text("name: r\ncriteria:\n" + "".join(f"- {{{c}}}\n" for c in criteria))
    return assay.export("grpo", "out", store=store.url, rubric="r.yaml", gates=LOOSE).rows


TOPIC, KIND = "name: right, check: exact, with: {field: topic}", "name: kind, judge: 'Is it kind?'"


@pytest.mark.parametrize(
    ("criteria", "scores", "grades", "refused"),
    [
        ([TOPIC], [1.0, 0.0, 1.0], None, True),
        ([TOPIC], [1.0] * 25 + [0.0] * 5, None, True),  # the first answers have equal scores
        ([TOPIC.replace("topic", "tone")], [1.0, 1.0], None, False),
        ([TOPIC, KIND], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0], True),  # a judge's stored grades are part of the reward
        ([TOPIC, KIND], [1.0, 0.0, 1.0], [1.0, 0.0, 1.0], False),
        ([TOPIC, KIND], [1.0, 0.0, 1.0], [None, None, None], False),
        ([TOPIC, KIND], [1.0, 0.0, 1.0], [1.0, None, 1.0], False),
    ],
)
def test_a_constant_reward_of_answers_with_different_scores_is_refused(
    store: Store, criteria: list[str], scores: list[float], grades: list[float | None] | None, refused: bool
) -> None:
    fill(store, scores, grades)
    if not refused:
        assert exported(store, *criteria)
        return
    with pytest.raises(DataError, match="stored scores"):
        exported(store, *criteria)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "criteria",
    [
        ["name: short, check: tool_adoption"],
        ["name: short, check: tool_adoption, essential: {pass_at: 1}", "name: fine, check: exact, with: {field: tone}"],
        ["name: short, check: tool_adoption", "name: long, weight: -1, check: length, with: {max_tokens: 5}"],
    ],
)
def test_a_rubric_that_needs_the_rollout_is_refused(store: Store, criteria: list[str]) -> None:
    fill(store, [1.0, 0.0])
    with pytest.raises(DataError, match="rollout"):
        exported(store, *criteria)
    assert not Path("out").exists()


def rewarded(rubric: Rubric, completions: list[str], **columns: Any) -> list[float | None]:
    return asyncio.run(rubric.trl_reward()(["p"] * len(completions), completions, **columns))


@pytest.mark.parametrize(
    ("criterion", "columns"),
    [
        (Criterion(name="right", check=exact, arguments={"field": "label"}), {"answer": ["a", "b"]}),
        (Criterion(name="short", check=steps_used, arguments={"budget": 2}), {"answer": ["a", "b"]}),
        (Criterion(name="odd", check=lambda task, prediction: None), {}),
    ],
)
def test_a_criterion_that_no_column_decides_is_an_error_of_the_first_call(
    criterion: Criterion, columns: dict[str, Any]
) -> None:
    rubric = Rubric("r", [criterion, Criterion(name="fine", check=lambda prediction: 1.0)])
    with pytest.raises(RubricError, match=criterion.name):
        rewarded(rubric, ["a", "b"], **columns)


def test_a_judge_without_a_model_is_an_error_of_the_first_call() -> None:
    criteria = [Criterion(name="kind", judge=JudgeSpec(text="Kind?")), Criterion(name="a", check=exact)]
    with pytest.raises(assay.AssayError, match="judge_model"):
        rewarded(Rubric("r", criteria), ["a"], answer=["a"])


def test_the_mean_grade_of_each_criterion_goes_to_the_log_of_trl() -> None:
    def sometimes(task: Any, prediction: Any) -> Grade:
        if prediction["answer"] == "b":
            raise NotApplicable("not for b")
        return Grade(value=0.5)

    logged: dict[str, float] = {}
    rubric = Rubric("r", [Criterion(name="right", check=exact), Criterion(name="half", check=sometimes)])
    rewarded(rubric, ["a", "b"], answer=["a", "a"], log_metric=logged.__setitem__)
    assert logged == {"r/right": 0.5, "r/half": 0.5}
