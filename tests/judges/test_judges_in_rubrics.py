"""Judges of several outputs or criteria in rubrics."""

import json
import math
from pathlib import Path
from typing import Any

import dspy
import pytest
from scripted_judges import LIST, graded, prompt_field

from assay.errors import RubricError
from assay.judges import (
    Cascade,
    Jury,
    PairwiseJudge,
    PointwiseJudge,
    resolver,
)
from assay.rubrics import Criterion, JudgeSpec, Rubric, load_rubric
from assay.testing import scripted_lm


def rubric_of(judge: Any, lm: Any, **options: Any) -> Rubric:
    criteria = [
        Criterion(name="better", judge=JudgeSpec(use="judge")),
        Criterion(name="short", check=lambda t, p, r: len(p["answer"]) < 10),
    ]
    return Rubric("r", criteria, resolver=resolver(lm, lambda _: judge), **options)


@pytest.mark.parametrize(
    "judge",
    [PairwiseJudge(), Jury([PairwiseJudge(), PairwiseJudge()]), Cascade(PairwiseJudge(), PairwiseJudge())],
    ids=lambda judge: type(judge).__name__,
)
def test_a_group_is_scored_by_pairs(judge: Any) -> None:
    worth = {"best": 4, "middle": 2, "worst": 1}

    def script(request: Any) -> dict[str, float]:
        a, b = (worth[prompt_field(request, name)] for name in ("output_a", "output_b"))
        return {"a": a / (a + b) - 0.01, "b": b / (a + b), "tie": 0.01}

    lm = scripted_lm(script, logprobs=True)
    rubric = rubric_of(judge, lm)
    answers = [{"answer": "worst"}, {"answer": "best"}, None, {"answer": "middle"}]
    results = rubric.score_group({"question": "q"}, answers)
    grades = [result.grades["better"] for result in results]
    assert grades[1] > grades[3] > grades[0]
    assert (results[2].value, results[2].failed) == (0.0, "the agent gave no answer")
    assert results[1].grades["short"] == 1.0
    alone = rubric.score({"question": "q"}, {"answer": "best"})
    assert math.isnan(alone.grades["better"])
    assert "score_group" in alone.feedback
    with dspy.context(lm=lm):
        assert judge(task_input="q", output_a="best", output_b="worst").orders == ("a", "b")


def test_a_group_is_scored_by_list_and_unnamed_outputs_are_unscored() -> None:
    lm = scripted_lm(graded(lambda lines: [line for line in lines if line["grade"] != "partly"]))
    results = rubric_of(LIST, lm).score_group(
        {"question": "q"}, [{"answer": text} for text in ("worst", "best", "middle")]
    )
    assert [result.grades["better"] for result in results[:2]] == [0.0, 1.0]
    assert math.isnan(results[2].grades["better"])


def test_a_failed_group_judge_leaves_the_group_unscored() -> None:
    lm = scripted_lm(lambda request: dspy.lm15.ServerError("down"))
    results = rubric_of(LIST, lm).score_group({"question": "q"}, [{"answer": "best"}, {"answer": "worst"}])
    assert all(math.isnan(result.grades["better"]) for result in results)
    with pytest.raises(RubricError, match="one rollout"):
        rubric_of(LIST, lm).score_group({"question": "q"}, [{"answer": "x"}], [])


TWO = (
    "name: r\njudging: {how}\ncriteria:\n- {{name: clear, weight: 3, judge: 'Is it clear?'}}\n"
    "- {{name: kind, weight: 1, judge: 'Is it kind?', scale: [no, partly, yes]}}\n"
    "- {{name: rude, weight: -1, judge: 'Is it rude?'}}\n"
)


def test_all_criteria_are_judged_in_one_call(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(TWO.format(how="together"))
    lm = scripted_lm(lambda request: json.dumps({"clear": "yes", "kind": "partly", "rude": "no"}), price_usd=0.03)
    result = load_rubric(tmp_path / "r.yaml").with_resolver(resolver(lm)).score({"question": "q"}, {"answer": "x"})
    assert result.grades == {"clear": 1.0, "kind": 0.5, "rude": 0.0}
    assert (result.value, lm.scripted.calls) == (pytest.approx(3.5 / 4), 1)
    assert result.cost_usd == pytest.approx(0.03)


def test_an_unusable_call_is_repeated_once_and_left_unscored(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(TWO.format(how="together"))
    lm = scripted_lm(lambda request: "no idea", price_usd=0.01)
    result = load_rubric(tmp_path / "r.yaml").with_resolver(resolver(lm)).score({"question": "q"}, {"answer": "x"})
    assert math.isnan(result.value)
    assert result.cost_usd == pytest.approx(0.01 * lm.scripted.calls)


def test_a_criterion_named_like_a_judged_field_is_refused() -> None:
    rubric = Rubric("r", [Criterion(name="output", judge=JudgeSpec(text="Is it clear?"))], judging="together")
    with pytest.raises(RubricError, match="names of the judge's inputs"):
        rubric.with_resolver(resolver(scripted_lm(lambda request: "")))


def test_the_judging_setting_is_checked() -> None:
    judged = Criterion(name="a", judge=JudgeSpec(text="?"))
    with pytest.raises(RubricError, match="each, together, overall"):
        Rubric("r", [judged], judging="all")
    with pytest.raises(RubricError, match="weight above 0"):
        Rubric(
            "r",
            [Criterion(name="c", check=lambda t, p, r: 1), Criterion(name="a", weight=-1, judge=JudgeSpec(text="?"))],
            judging="overall",
        )
    with pytest.raises(RubricError, match="essential"):
        Rubric("r", [Criterion(name="a", judge=JudgeSpec(use="x"))], judging="overall")
    with pytest.raises(RubricError, match="one by one"):
        Rubric(
            "r",
            [Criterion(name="a", judge=JudgeSpec(use="x"))],
            judging="together",
            resolver=resolver(scripted_lm(str), lambda _: PointwiseJudge("?")),
        )
