"""`assay compile` and `assay evaluate`: splits, paired gains, undecided criteria, failures in the report."""

import math
from pathlib import Path
from typing import Any

import dspy
import pytest
from compile_scripted import DATA, compile_it, scripted_session, student_of_examples

import assay
from assay.datasets import load_splits
from assay.errors import RubricError
from assay.evaluation import RecordedProgram, evaluate, paired_gain
from assay.programs import MathQA
from assay.rubrics import Criterion, JudgeSpec, Rubric, checks
from assay.testing import scripted_lm


@pytest.mark.slow
def test_rollouts_have_the_split_of_their_task(tmp_path: Path) -> None:
    sizes = {"train": 12, "val": 6, "gate": 12, "test": 5}
    compile_it("auto", tmp_path, sizes=sizes)
    splits = load_splits(DATA, inputs=["question"], limits=sizes)
    splits.unseal()
    where = {task.id: name for name in ("train", "val", "gate", "test") for task in getattr(splits, name)}
    with assay.Store(tmp_path / ".assay" / "a.db") as store:
        values = {
            (rollout.split, where[rollout.task_id]) for rollout in store.rollouts() if rollout.source == "program"
        }
    assert values == {(name, name) for name in ("train", "val", "gate", "test")}


def test_paired_gain_matches_hand_calculation() -> None:
    before = {str(i): 0.0 for i in range(20)}
    after = {str(i): float(i % 2) for i in range(20)}
    gain = paired_gain(before, after)
    assert gain.mean == 0.5
    # 10 zeros, 10 ones and two added pairs of -1 and 1: sum 10, squares 14, (14 - 10^2 / 24) / 23 = 0.4275 = 0.6539^2;
    # t(0.975, 19) = 2.093; 2.093 * 0.6539 / sqrt(20) = 0.306
    assert gain.low == pytest.approx(0.194, abs=0.001)
    assert gain.high == pytest.approx(0.806, abs=0.001)
    assert paired_gain(before, {**after, "0": math.nan}).n == 19
    assert not paired_gain({"a": 0.0}, {"a": 1.0}).is_gain  # one pair proves nothing


def test_more_than_ten_failed_runs_do_not_end_an_evaluation() -> None:
    session = scripted_session(lambda request: "no json at all")
    with session.context():
        evaluation = evaluate(RecordedProgram(MathQA(), session), load_splits(DATA).val[:15], session)
    assert evaluation.report()["failed"] == 15
    assert evaluation.mean == 0.0


def test_undecided_criteria_and_failure_reasons_are_reported(tmp_path: Path) -> None:
    def boom(task: Any, prediction: Any, rollout: Any) -> bool:
        raise RuntimeError("the ruler broke")

    class Broken(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.predict = dspy.Predict("question -> answer")

        def forward(self, question: str) -> Any:
            raise KeyError("boom")

    half = Rubric("half", [Criterion(name="right", check=boom), Criterion(name="any", check=checks.numeric)])
    options: dict[str, Any] = {
        "data": DATA,
        "lm": scripted_lm(student_of_examples),
        "sizes": {"val": 4},
        "store": tmp_path / "a.db",
    }
    with pytest.raises(RubricError, match=r"'right' could not be graded on any of the first 3 tasks .*the ruler broke"):
        assay.evaluate("math_qa", rubric=half, **options)
    line = boom.__code__.co_firstlineno + 1
    report = assay.evaluate("math_qa", rubric=half, preflight=False, **options).to_dict()["result"]
    assert report["undecided"] == {
        "right": {"n": 4, "of": 4, "reason": f"RuntimeError: the ruler broke (test_compile_measures.py:{line})"}
    }
    assert report["coverage"] == 0.0
    failed = assay.evaluate(Broken(), rubric="math_qa", preflight=False, **options).to_dict()["result"]
    assert (failed["failed"], failed["why_failed"], failed["score"]) == (4, "KeyError: 'boom'", 0.0)


def test_judge_calls_are_stored_in_rollouts_of_the_judged_task(tmp_path: Path) -> None:
    rubric = Rubric(
        "r",
        [Criterion(name="right", check=checks.numeric), Criterion(name="nice", judge=JudgeSpec(text="Is it nice?"))],
    )

    def judging(request: Any) -> Any:
        return '{"verdict": "yes"}' if "Is it nice?" in str(request) else student_of_examples(request)

    assay.evaluate(
        "math_qa", rubric=rubric, data=DATA, lm=scripted_lm(judging), sizes={"val": 3}, store=tmp_path / "a.db"
    )
    with assay.Store(tmp_path / "a.db") as store:
        runs = {r.task_id for r in store.rollouts() if r.source == "program"}
        judged = [store.rollout(r.id) for r in store.rollouts() if r.source == "judge"]
    assert {r.task_id for r in judged} == runs
    assert {r.split for r in judged} == {"val"}
    assert all(r.transitions and r.prediction["verdict"] == "yes" for r in judged)
