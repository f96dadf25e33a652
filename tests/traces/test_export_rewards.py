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


def fill(store: Store, outputs: list[str], scores: list[float]) -> None:
    for n, (output, score) in enumerate(zip(outputs, scores, strict=True)):
        add_rollout(
            store, turn(0, "Sort it.", "Thinking."), turn(1, f"What is {n}?", output), inputs={"q": str(n)},
            expected={"topic": "a", "tone": "b"}, prediction={"topic": "a", "tone": "b"}, score=score,
        )  # fmt: skip
    store.flush()


def rubric_file(folder: Path, *criteria: str) -> Path:
    (path := folder / "r.yaml").write_text("name: r\ncriteria:\n" + "".join(f"- {{{c}}}\n" for c in criteria))
    return path


def test_a_constant_reward_of_answers_with_different_scores_is_refused(store: Store, tmp_path: Path) -> None:
    fill(store, ["[[ ## tone ## ]]\nb"] * 3, [1.0, 0.0, 1.0])  # the field `topic` is of the first call
    rubric = rubric_file(tmp_path, "name: right, check: exact, with: {field: topic}")
    with pytest.raises(DataError, match="stored scores"):
        assay.export("grpo", "out", store=store.url, rubric=rubric, gates=LOOSE)
    assert not Path("out").exists()


def test_a_constant_reward_is_found_where_the_first_answers_have_equal_scores(store: Store, tmp_path: Path) -> None:
    fill(store, ["[[ ## tone ## ]]\nb"] * 30, [1.0] * 25 + [0.0] * 5)
    rubric = rubric_file(tmp_path, "name: right, check: exact, with: {field: topic}")
    with pytest.raises(DataError, match="stored scores"):
        assay.export("grpo", "out", store=store.url, rubric=rubric, gates=LOOSE)


JUDGED = ["name: right, check: exact, with: {field: topic}", "name: kind, judge: 'Is it kind?'"]


@pytest.mark.parametrize(
    ("grades", "refused"),
    [([1.0, 1.0, 1.0], True), ([1.0, 0.0, 1.0], False), ([None, None, None], False), ([1.0, None, 1.0], False)],
)
def test_a_judges_stored_grades_are_part_of_the_reward_that_is_tried(
    store: Store, tmp_path: Path, grades: list[float | None], refused: bool
) -> None:
    for n, (score, grade) in enumerate(zip([1.0, 0.0, 1.0], grades, strict=True)):
        add_rollout(
            store, turn(0, f"What is {n}?", "[[ ## tone ## ]]\nb"), inputs={"q": str(n)}, score=score,
            expected={"topic": "a", "tone": "b"}, prediction={"topic": "a", "tone": "b"},
            verdicts=[Verdict(criterion="kind", grade=grade, reason="r")],
        )  # fmt: skip
    store.flush()
    rubric = rubric_file(tmp_path, *JUDGED)
    if refused:
        with pytest.raises(DataError, match="stored scores"):
            assay.export("grpo", "out", store=store.url, rubric=rubric, gates=LOOSE)
    else:
        assert assay.export("grpo", "out", store=store.url, rubric=rubric, gates=LOOSE).rows


def test_a_constant_reward_of_answers_with_equal_scores_is_exported(store: Store, tmp_path: Path) -> None:
    fill(store, ["[[ ## tone ## ]]\nb"] * 2, [1.0, 1.0])
    rubric = rubric_file(tmp_path, "name: right, check: exact, with: {field: tone}")
    assert assay.export("grpo", "out", store=store.url, rubric=rubric, gates=LOOSE).rows


@pytest.mark.parametrize(
    "criteria",
    [
        ["name: short, check: tool_adoption"],
        ["name: short, check: tool_adoption, essential: {pass_at: 1}", "name: fine, check: exact, with: {field: tone}"],
        ["name: short, check: tool_adoption", "name: long, weight: -1, check: length, with: {max_tokens: 5}"],
    ],
)
def test_a_rubric_that_needs_the_rollout_is_refused(store: Store, tmp_path: Path, criteria: list[str]) -> None:
    fill(store, ["[[ ## tone ## ]]\nb"] * 2, [1.0, 0.0])
    with pytest.raises(DataError, match="rollout"):
        assay.export("grpo", "out", store=store.url, rubric=rubric_file(tmp_path, *criteria), gates=LOOSE)
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
