"""Criteria that got worse behind a gain of the score."""

from typing import Any

import dspy

import assay
from assay.evaluation import Evaluation
from assay.evaluation.comparison import Comparison, losses_behind_gain
from assay.evaluation.statistics import paired_gain
from assay.rubrics import Criterion, Rubric, ScoreResult
from assay.testing import scripted_lm
from assay.traces.records import Verdict


def evaluation(*, correct: list[float | None], abstained: list[float | None], long: list[float]) -> Evaluation:
    made = Evaluation()
    for at, (right, kept, length) in enumerate(zip(correct, abstained, long, strict=True)):
        grades = (("correct", right, 1.0), ("abstained", kept, 1.0), ("long", length, -1.0))
        verdicts = tuple(Verdict(criterion=name, grade=grade, weight=weight) for name, grade, weight in grades)
        made.results[f"t{at}"] = ScoreResult(value=right if right is not None else kept or 0.0, verdicts=verdicts)
    return made


def compared(before: Evaluation, after: Evaluation) -> Comparison:
    return Comparison(before, after, paired_gain(before.scores, after.scores), planned=40)


HALF: list[float | None] = [1.0] * 14 + [0.0] * 6
NONE: list[float | None] = [None] * 20
SHORT = [0.0] * 40


def test_a_loss_that_may_be_chance_is_not_named() -> None:
    before = evaluation(correct=HALF + NONE, abstained=[*NONE, *[0.0] * 20], long=SHORT)
    after = evaluation(correct=[*HALF[1:], 0.0, *NONE], abstained=[*NONE, *[1.0] * 20], long=SHORT)
    assert losses_behind_gain(compared(before, after), "gate") == []
    assert losses_behind_gain(compared(Evaluation(), Evaluation()), "gate") == []


def test_a_compile_run_names_what_its_winner_lost(tmp_path: Any) -> None:
    """With demonstrations the model writes everything right and much too long."""

    def script(request: Any) -> str:
        shown = len(request.messages) > 1
        return "[[ ## answer ## ]]\n" + ("blue " * 30 if shown else "red")

    rubric = Rubric(
        "colours",
        [
            Criterion(name="right", check=lambda task, made, rollout: float("blue" in made["answer"]), weight=3),
            Criterion(name="short", check=lambda task, made, rollout: float(len(made["answer"]) < 20), weight=1),
        ],
    )
    report = assay.compile(
        dspy.Predict("question -> answer"), rubric=rubric, optimizer="labeled", lm=scripted_lm(script),
        data=[{"question": f"Colour {n}?", "answer": "blue"} for n in range(60)],
        sizes={"train": 8, "val": 6, "gate": 12, "test": 12}, store=tmp_path / "a.db", out=tmp_path / "artifact",
        prompt_format="chat", progress=None, preflight=False,
    )  # fmt: skip
    assert report.outcome.replaces
    lost = [note for note in report.outcome.notes if "the score rose, but 'short' fell from 1.00 to 0.00" in note]
    assert [note.split(":")[0] for note in lost] == ["gate", "test"]
