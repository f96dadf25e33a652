"""Pairs in both orders, juries, cascades, and their files."""

import json
import math
from pathlib import Path
from typing import Any

import dspy
import pytest
from scripted_judges import prompt_field

from assay.deployment import load_artifact, save_artifact
from assay.errors import ConfigError, RubricError
from assay.judges import (
    Calibration,
    Cascade,
    Item,
    Judge,
    Jury,
    PairwiseJudge,
    PointwiseJudge,
    Rating,
    reliability_weights,
)
from assay.rubrics import JudgeSpec, NoGrade, load_rubric
from assay.runs.loading import load_judge
from assay.testing import scripted_lm

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


def prefers(text: str, strength: float = 0.8) -> Any:
    def script(request: Any) -> dict[str, float]:
        first = prompt_field(request, "output_a") == text
        return {
            "a": strength if first else 1 - strength - 0.05,
            "b": 1 - strength - 0.05 if first else strength,
            "tie": 0.05,
        }

    return script


def test_a_pair_is_judged_in_both_orders() -> None:
    lm = scripted_lm(prefers("good"), logprobs=True)
    with dspy.context(lm=lm):
        result, turned = (
            PairwiseJudge()(task_input="q", output_a=a, output_b=b) for a, b in (("good", "bad"), ("bad", "good"))
        )
    assert (result.verdict, turned.verdict, lm.scripted.calls) == ("a", "b", 4)
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


def test_unanimous_samples_have_full_confidence() -> None:
    verdict = pair(
        PairwiseJudge(samples=3, reading="text"),
        lambda r: json.dumps({"verdict": "a" if '"good"' in r.messages[-1].text.split("output_b")[0] else "b"}),
        logprobs=False,
    )
    assert (verdict.verdict, verdict.confidence) == ("a", 1.0)


def test_calibration_removes_position_bias() -> None:
    # the model prefers the first position by odds of 3; uncorrected, every pair is a tie
    def leaning(request: Any) -> dict[str, float]:
        first = prompt_field(request, "output_a") == "good"
        return {"a": 0.85 if first else 0.55, "b": 0.1 if first else 0.4, "tie": 0.05}

    assert pair(PairwiseJudge(), leaning).verdict == "tie"
    undo = Calibration("platt", weights=[[1, 0, 0], [0, 1, 0], [0, 0, 1]], biases=[-1.2, -9.0, 0.0])
    verdict = pair(PairwiseJudge(calibration=undo), leaning)
    assert (verdict.verdict, verdict.orders) == ("a", ("a", "b"))


def test_a_calibration_learns_from_both_orders() -> None:
    reading = {"given": {"a": 0.7, "tie": 0.1, "b": 0.2}, "swapped": {"a": 0.5, "tie": 0.1, "b": 0.4}}
    assert PairwiseJudge().fit_rows(reading, {"a": 0.75, "tie": 0.25}) == [
        (reading["given"], {"a": 0.75, "tie": 0.25}),
        (reading["swapped"], {"b": 0.75, "tie": 0.25}),
    ]


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


def test_members_use_their_own_models() -> None:
    lm, strong = (
        scripted_lm(lambda r: {"no": 0.55, "yes": 0.45}, logprobs=True),
        scripted_lm(lambda r: {"no": 0.05, "yes": 0.95}, logprobs=True),
    )
    lm.recording.siblings["strong/one", None, None] = strong
    cascade = Cascade(PointwiseJudge("Good?"), PointwiseJudge("Good?", model="strong/one"))
    with dspy.context(lm=lm):
        assert cascade(task_input="q", output="x").verdict == "yes"
    assert (lm.scripted.calls, strong.scripted.calls) == (1, 1)


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


def test_a_criterion_may_be_a_judge(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("text: Kind?\n")
    (tmp_path / "r.yaml").write_text(
        "name: r\ncriteria:\n- {name: clear, judge: 'Clear?'}\n- {name: kind, judge: {use: one.yaml}}\n"
    )
    assert [load_judge(f"{tmp_path}/r.yaml:{name}").spec.text for name in ("clear", "kind")] == ["Clear?", "Kind?"]
    with pytest.raises(RubricError, match="judge criteria: clear, kind"):
        load_judge(f"{tmp_path}/r.yaml:other")


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


@pytest.mark.parametrize("name", ["sentimnt", "some/folder/sentimnt"])
def test_an_unknown_judge_is_refused_with_the_shipped_ones(name: str) -> None:
    with pytest.raises(RubricError, match=r"better_answer, reports_problem, .*Did you mean 'sentiment'"):
        load_judge(name)


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
