"""Pairs in both orders, lists, juries, cascades, their files, and rankings; in rubrics they score groups."""

import json
import math
import re
from pathlib import Path
from typing import Any

import dspy
import numpy as np
import pytest

from assay.deployment import load_artifact, save_artifact
from assay.errors import ConfigError, RubricError
from assay.jobs.loading import load_judge
from assay.judges import (
    Calibration,
    Cascade,
    Item,
    Judge,
    Jury,
    ListwiseJudge,
    PairwiseJudge,
    PointwiseJudge,
    Rating,
    bradley_terry,
    reliability_weights,
    resolver,
)
from assay.rubrics import Criterion, JudgeSpec, NoGrade, Rubric, load_rubric
from assay.testing import scripted_lm


def prompt_field(request: Any, name: str) -> str:
    """The text of a named field of the request, without its fence."""
    return str(json.loads(re.search(rf'{name}: ("(?:[^"\\]|\\.)*")', request.messages[-1].text)[1]))


def listed(request: Any) -> dict[str, str]:
    """Letter -> text, as shown."""
    return {m[1]: json.loads(m[2]) for m in re.finditer(r'\b([A-T]): ("(?:[^"\\]|\\.)*")', request.messages[-1].text)}


def graded(change: Any = None) -> Any:
    grades = {"best": "yes", "middle": "partly", "worst": "no"}

    def script(request: Any) -> str:
        lines = [{"id": letter, "grade": grades[text]} for letter, text in listed(request).items()]
        return json.dumps({"grades": change(lines) if change else lines})

    return script


LIST = ListwiseJudge({"text": "Good?", "scale": ["no", "partly", "yes"]})


MOODS = JudgeSpec(text="Which mood?", scale=("negative", "neutral", "positive"))


class Saying(Judge):
    """Returns the given words with a probability; raises a given failure."""

    def __init__(self, verdict: Any, p: float | None = None, spec: JudgeSpec = MOODS) -> None:
        super().__init__(spec, shows=("output",))
        self.verdict, self.p = verdict, p

    def read(self, values: Any) -> Any:
        if isinstance(self.verdict, Exception):
            raise self.verdict
        if self.p is None:
            return None, self.verdict
        rest = (1 - self.p) / (len(self.labels) - 1)
        return {label: self.p if label == self.verdict else rest for label in self.labels}, None


def pair(
    judge: PairwiseJudge, script: Any, *, logprobs: bool = True, a: str = "good", b: str = "bad"
) -> dspy.Prediction:
    with dspy.context(lm=scripted_lm(script, logprobs=logprobs)):
        return judge(task_input="q", output_a=a, output_b=b)


def test_a_pair_is_judged_in_both_orders() -> None:
    def prefers_good(request: Any) -> dict[str, float]:
        first = prompt_field(request, "output_a") == "good"
        return {"a": 0.8 if first else 0.15, "b": 0.15 if first else 0.8, "tie": 0.05}

    result, turned = (pair(PairwiseJudge(), prefers_good, a=a, b=b) for a, b in (("good", "bad"), ("bad", "good")))
    assert (result.verdict, turned.verdict) == ("a", "b")
    assert result.orders == ("a", "b")
    assert result.probabilities == pytest.approx({"a": 0.8, "tie": 0.05, "b": 0.15})
    assert result.value == pytest.approx(1 - turned.value)


@pytest.mark.parametrize("logprobs", [True, False])
def test_an_inconsistent_pair_is_a_tie(logprobs: bool) -> None:
    always_first = (
        (lambda request: {"a": 0.9, "b": 0.1}) if logprobs else (lambda request: json.dumps({"verdict": "a"}))
    )
    verdict = pair(PairwiseJudge(), always_first, logprobs=logprobs)
    assert (verdict.verdict, verdict.orders) == ("tie", ("a", "a"))
    assert verdict.value == pytest.approx(0.5)


def test_calibration_removes_position_bias() -> None:
    # the model prefers the first position by odds of 3; uncorrected, every pair is a tie
    def leaning(request: Any) -> dict[str, float]:
        first = prompt_field(request, "output_a") == "good"
        return {"a": 0.85 if first else 0.55, "b": 0.1 if first else 0.4, "tie": 0.05}

    assert pair(PairwiseJudge(), leaning).verdict == "tie"
    undo = Calibration("platt", weights=[[1, 0, 0], [0, 1, 0], [0, 0, 1]], biases=[-1.2, -9.0, 0.0])
    verdict = pair(PairwiseJudge(calibration=undo), leaning)
    assert (verdict.verdict, verdict.orders) == ("a", ("a", "b"))


def test_the_majority_decides_and_failed_members_do_not_vote() -> None:
    jury = Jury([Saying("positive", 0.6), Saying("positive", 0.5), Saying("negative", 0.9), Saying(NoGrade("cannot"))])
    verdict = jury(output="x")
    assert (verdict.verdict, verdict.confidence) == ("positive", pytest.approx(2 / 3))
    assert (
        Jury([Saying("positive", 0.6), Saying("negative", 0.9)])(output="x").verdict == "negative"
    )  # equal: the one with higher confidence
    assert (
        Jury([Saying("positive"), Saying("negative")])(output="x").verdict == "negative"
    )  # equal in everything: the lower grade
    with pytest.raises(NoGrade, match="1 of 3 members"):
        Jury([Saying("positive"), Saying(NoGrade("cannot")), Saying(ValueError("broken"))])(output="x")


def test_a_jury_votes_by_median_or_mean() -> None:
    members = [Saying("negative", 0.9), Saying("neutral", 0.5), Saying("positive", 0.9), Saying("positive", 0.9)]
    assert Jury(members[:3], how="median")(output="x").verdict == "neutral"
    assert Jury(members, how="mean")(output="x").verdict == "positive"
    assert Jury(members, how="median", weights=[9, 1, 1, 1])(output="x").verdict == "negative"
    with pytest.raises(ConfigError, match="nominal"):
        Jury([Saying("negative", spec=JudgeSpec(text="?", scale=MOODS.scale, kind="nominal"))], how="median")
    with pytest.raises(ConfigError, match="one scale"):
        Jury([Saying("negative"), Saying("no", spec=JudgeSpec(text="?"))])
    with pytest.raises(ConfigError, match="weights"):
        Jury(members, weights=[1, -1, 0, 0])


def test_reliability_weights_match_hand_calculation() -> None:
    items = [Item(id=str(i), fields={}, ratings=(Rating(rater="r", label="yes" if i % 2 else "no"),)) for i in range(8)]
    truth = ["yes" if i % 2 else "no" for i in range(8)]
    three_of_four = [*truth[:6], "no" if truth[6] == "yes" else "yes", "no" if truth[7] == "yes" else "yes"]
    weights = reliability_weights([three_of_four, ["no"] * 8, [None] * 8], items, labels=2)
    agreed = (6 + 0.5) / 9
    assert weights[0] == pytest.approx(math.log(agreed / (1 - agreed)))
    assert weights[1:] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert reliability_weights([["no"] * 8], items, labels=2) == [1.0]  # all at chance: alike


def test_the_second_judge_decides_if_the_first_is_unsure() -> None:
    second = Saying("negative", 0.99)
    assert Cascade(Saying("positive", 0.9), second, least=0.7)(output="x").verdict == "positive"
    for unsure in (Saying("positive", 0.6), Saying("positive"), Saying(NoGrade("cannot"))):
        assert Cascade(unsure, second, least=0.7)(output="x").verdict == "negative"
    with pytest.raises(NoGrade):
        Cascade(Saying("positive", 0.6), Saying(NoGrade("cannot either")))(output="x")
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Cascade(second, second, least=1.5)


def test_the_second_judge_decides_if_the_first_fails() -> None:
    assert Cascade(Saying(TimeoutError("slow")), Saying("positive", 0.9))(output="x").verdict == "positive"
    assert Jury([Saying(TimeoutError("slow")), Saying("positive", 0.9)])(output="x").verdict == "positive"
    with pytest.raises(ConfigError):
        Cascade(Saying(ConfigError("no model")), Saying("positive", 0.9))(output="x")


def test_a_jury_is_saved_and_loaded_unchanged(tmp_path: Path) -> None:
    jury = Jury(
        [PointwiseJudge(MOODS, style="letters"), Cascade(PointwiseJudge(MOODS), PairwiseLike(MOODS))],
        how="mean",
        weights=[1, 2],
    )
    jury.members[0].decide.demos = [{"output": '"x"', "verdict": "neutral"}]
    folder = save_artifact(
        tmp_path / "j",
        jury,
        {"program": "assay.judges:Jury", "settings": {"adapter": None, "parameters": {}}},
        splits={},
        report="",
    )
    loaded = load_artifact(folder).program
    assert (loaded.how, loaded.weights, loaded.members[0].style) == ("mean", (1, 2), "letters")
    assert loaded.members[0].decide.demos[0]["verdict"] == "neutral"
    assert load_judge(folder).labels == MOODS.scale


class PairwiseLike(PointwiseJudge):
    """A user's own judge inside a cascade."""


def test_judges_are_loaded_from_files(tmp_path: Path) -> None:
    (tmp_path / "pairs.yaml").write_text("text: Which is better?\ncompare: pairs\n")
    (tmp_path / "list.yaml").write_text("text: Which is best?\ncompare: list\norders: 2\n")
    (tmp_path / "one.yaml").write_text("text: Good?\nmodel: openai/some\n")
    (tmp_path / "jury.yaml").write_text("jury: {members: [one.yaml, one.yaml], how: mean}\n")
    (tmp_path / "cascade.yaml").write_text("cascade: {first: one.yaml, second: jury.yaml, least: 0.6}\n")
    assert load_judge(tmp_path / "pairs.yaml").labels == ("a", "tie", "b")
    assert load_judge(tmp_path / "list.yaml").orders == 2
    cascade = load_judge(tmp_path / "cascade.yaml")
    assert isinstance(cascade, Cascade)
    assert isinstance(cascade.second, Jury)
    assert cascade.second.members[0].model == "openai/some"


def test_a_compiled_judge_next_to_a_rubric_goes_before_the_shipped_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: mood, judge: {use: sentiment}}\n")

    def used() -> str:
        (criterion,) = load_rubric(tmp_path / "r.yaml").criteria
        assert criterion.judge is not None
        return criterion.judge.use

    assert load_judge(used()).labels == load_judge("sentiment").labels == ("negative", "neutral", "positive")
    (tmp_path / "sentiment").mkdir()
    assert used() != str(tmp_path / "sentiment")  # another folder, such as one of data
    (tmp_path / "sentiment" / "manifest.json").write_text("{}")
    assert used() == str(tmp_path / "sentiment")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jury: {members: []}", "at least 1 entry"),
        ("jury: {members: [nothere.yaml]}", "nothere.yaml"),
        ("jury: {members: [l.yaml]}", "is a listwise judge"),
        ("text: x\njury: {members: [p.yaml]}", "has no other settings"),
        ("cascade: {first: p.yaml, second: p.yaml, least: 2}", "less than or equal to 1"),
        ("compare: list\ntext: x\nstyle: letters", "does not support style"),
        ("text: x\norders: 3", "compare: list"),
        ("text: x\ncompare: pairs\nscale: [a, b]", "three labels"),
    ],
)
def test_invalid_judge_files_are_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "l.yaml").write_text("text: x\ncompare: list\n")
    (tmp_path / "p.yaml").write_text("text: x\n")
    (tmp_path / "j.yaml").write_text(text)
    with pytest.raises(RubricError, match=message):
        load_judge(tmp_path / "j.yaml")


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
