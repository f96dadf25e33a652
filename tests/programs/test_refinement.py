"""Outer-loop refinement: halting, the best round, its rewards, and the verifiers that are refused."""

import json
from typing import Any

import dspy
import pytest

import assay
from assay.programs import Refine
from assay.programs.parameters import review_rounds
from assay.rubrics import Criterion, Grade, Rubric
from assay.rubrics.steps import refinement_gain
from assay.testing import scripted_lm
from assay.traces.recorder import Recorder
from assay.traces.records import Rollout


def answering(*answers: str) -> Any:
    """A model that gives these answers in turn, the last one for ever."""
    queue = list(answers)

    def script(request: Any) -> str:
        answer = queue.pop(0) if len(queue) > 1 else queue[0]
        return json.dumps({"answer": answer})

    return scripted_lm(script)


def by_length(task: Any, prediction: dict[str, Any], rollout: Any) -> Grade:
    """Probability 0.1 for each letter of the answer."""
    return Grade(value=min(1.0, len(prediction["answer"]) / 10), reason="longer is better")


def run(lm: Any, verifier: Any = by_length, depth: int = 10, **options: Any) -> Any:
    refine = Refine(dspy.Predict("question -> answer"), verifier, **options)
    refine.set_parameters({"reasoning_depth": depth})
    with dspy.context(lm=lm):
        return refine(question="why?")


def test_reasoning_depth_sets_the_rounds() -> None:
    assert [review_rounds(depth) for depth in range(1, 11)] == [0, 0, 0, 0, 0, 1, 1, 2, 2, 3]
    for depth, calls in ((5, 1), (6, 2), (8, 3), (10, 4)):
        lm = answering("a", "bb", "ccc", "dddd", "eeeee")
        assert len(run(lm, depth=depth).rounds) == lm.scripted.calls == calls


def test_the_best_round_is_returned_not_the_last() -> None:
    result = run(answering("aaa", "bbbbb", "c", "dd"))
    assert result.answer == "bbbbb"
    assert [entry["probability"] for entry in result.rounds] == [0.3, 0.5, 0.1, 0.2]
    assert result.rounds[0]["gain"] is None
    assert [entry["gain"] for entry in result.rounds[1:]] == pytest.approx([0.2, -0.4, -0.3])


def test_a_verifier_that_always_accepts_causes_no_round() -> None:
    lm = answering("a", "b")
    assert run(lm, verifier=lambda *_: True).answer == "a"
    assert lm.scripted.calls == 1


def test_an_unchanged_answer_ends_the_rounds() -> None:
    lm = answering("a", "a ", "bb")
    result = run(lm)
    assert lm.scripted.calls == 2
    assert result.rounds[-1]["reason"] == "unchanged"


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        (lambda *_: None, "could not decide"),
        (lambda *_: 7, "not a grade between 0 and 1"),
        (lambda *_: "yes", "the verifier returned 'yes', not a grade between 0 and 1"),
        (lambda *_: [0.5], "not a grade between 0 and 1"),
        (lambda *_: 1 / 0, "the verifier failed: ZeroDivisionError"),
    ],
)
def test_an_undecided_verifier_keeps_the_answer_and_spends_nothing(verifier: Any, reason: str) -> None:
    lm = answering("a", "b")
    result = run(lm, verifier=verifier)
    assert (result.answer, lm.scripted.calls) == ("a", 1)
    assert result.rounds[0]["probability"] is None
    assert reason in result.rounds[0]["reason"]


def test_a_revision_that_fails_keeps_the_best_answer() -> None:
    lm = scripted_lm(lambda request: json.dumps({"answer": "a"}) if "draft" not in str(request) else "nonsense")
    result = run(lm)
    assert result.answer == "a"
    assert "the revision failed" in result.rounds[-1]["reason"]


def test_each_round_is_a_call_with_its_gain_as_reward() -> None:
    recorder = Recorder()
    lm = answering("aaa", "bbbbb", "c")
    lm = scripted_lm(lm.scripted.script, observers=[recorder.observe])
    refine = Refine(dspy.Predict("question -> answer"), by_length)
    refine.set_parameters({"reasoning_depth": 8})
    with dspy.context(lm=lm), recorder.active(), recorder.rollout(Rollout()) as rollout:
        rollout.prediction = dict(refine(question="why?").items())
    rubric = Rubric(
        "gains",
        [
            Criterion(name="right", weight=1, check=lambda *_: True),
            Criterion(name="gain", weight=1, scope="step", check=refinement_gain),
            Criterion(name="loss", weight=-1, scope="step", check=refinement_gain, arguments={"losses": True}),
        ],
    )
    rewards = rubric.step_rewards(assay.Task(id="1", inputs={"question": "why?"}), rollout)
    assert [entry["calls"] for entry in rollout.prediction["rounds"]] == [[0, 1], [1, 2], [2, 3]]
    assert rewards == [{}, {"gain": pytest.approx(0.2), "loss": 0.0}, {"gain": 0.0, "loss": pytest.approx(-0.4)}]


class TwoPredictors(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dspy.Predict("question -> thought"), dspy.Predict("question, thought -> answer")

    def forward(self, question: str) -> Any:
        return self.second(question=question, thought=self.first(question=question).thought)


def test_a_program_of_several_predictors_is_refined_by_its_signature() -> None:
    refine = Refine(TwoPredictors(), by_length, signature="question -> answer")
    lm = scripted_lm(lambda request: json.dumps({"thought": "t", "answer": "a"}))
    with dspy.context(lm=lm):
        assert refine(question="why?").answer == "a"
