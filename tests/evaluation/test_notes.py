"""Notes on runs whose score hides something, criteria that got worse behind a gain, and progress in a notebook."""

from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.evaluation import Evaluation
from assay.evaluation.comparison import Comparison, losses_behind_gain
from assay.evaluation.metrics import TaskRun, run_notes
from assay.evaluation.statistics import paired_gain
from assay.programs import Refine
from assay.rubrics import Criterion, Rubric, ScoreResult
from assay.testing import scripted_lm
from assay.traces.records import Verdict
from assay.traces.thinking import ThinkingUse


def thought(tokens: int | None, budget: int) -> TaskRun:
    share = (tokens or 0) / budget if budget else None
    use = ThinkingUse(tokens=tokens, after_stable=0, budget=budget, budget_share=share, loops=0, tokens_saved=0)
    return TaskRun(task_id="t", score=1.0, thinking=use)


def test_runs_above_their_budget_are_counted_with_the_largest_share() -> None:
    (note,) = run_notes([thought(100, 32), thought(64, 32), thought(8, 32), thought(500, 0)])
    assert note.startswith("2 of 3 runs thought more than their budget")
    assert "up to 312 % of it" in note


def broken(task: Any, prediction: Any, rollout: Any) -> float:
    return float(prediction["reply"])


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (6, "could not grade 5 of 5 answers, which were therefore not revised; the commonest reason: the verifier "),
        (3, "no answer is revised: there are rounds from reasoning_depth 6 and max_steps 2 on, and the program has "),
    ],
)
def test_an_evaluation_says_why_answers_were_not_revised(tmp_path: Path, depth: int, expected: str) -> None:
    refine = Refine(dspy.Predict("question -> answer"), broken)
    refine.set_parameters({"reasoning_depth": depth})
    report = assay.evaluate(
        refine,
        rubric=assay.Rubric("r", [assay.Criterion(name="right", check=assay.rubrics.checks.exact)]),
        data=[{"question": f"q{at}", "answer": "a"} for at in range(40)],
        lm=scripted_lm(lambda request: '{"answer": "a"}'),
        store=tmp_path / "s.db",
        sizes={"val": 5},
    )
    assert any(expected in note for note in report.to_dict()["notes"])
    if depth == 6:
        assert "KeyError: 'reply'" in " ".join(report.notes)


def answer(question: str) -> str:
    return "4"


def test_step_criteria_of_an_agent_without_recorded_calls_are_named_as_unscored(tmp_path: Path) -> None:
    """Its model is not that of the job, which was never called."""
    (tmp_path / "r.yaml").write_text(
        "name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n"
        "- {name: ran, scope: step, weight: 0.1, check: 'assay.rubrics.steps:tool_executed'}\n"
    )
    data = [{"question": f"{n} + {4 - n}", "answer": "4", "split": "val"} for n in range(4)]
    report = assay.evaluate(
        answer, rubric=tmp_path / "r.yaml", data=data, lm=scripted_lm(lambda _: "x"), store=tmp_path / "s.db"
    ).to_dict()
    (note,) = [note for note in report["notes"] if "scope step" in note]
    assert note.startswith("the criteria of scope step (ran) are unscored")
    assert "assay traces score" in note
    assert report["model"] is None
    with assay.Store(tmp_path / "s.db") as store:
        assert {rollout.model for rollout in store.rollouts()} == {""}


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
