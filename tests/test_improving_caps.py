"""The caps of an improvement are of all its steps together; `resume` on a job that was never begun begins it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import assay
from assay.errors import BudgetExceeded
from assay.models import Meter
from assay.models.meter import Usage
from assay.optimizers import Evaluation
from assay.optimizers.comparison import Comparison
from assay.optimizers.statistics import Gain
from assay.testing import scripted_lm

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in range(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    return tmp_path


def spending(calls: int) -> Meter:
    return Meter(spent={"search": Usage(calls=calls)})


@pytest.mark.parametrize("resume", [False, True])
def test_caps_are_of_all_steps_together_also_after_a_stop(place: Path, monkeypatch: pytest.MonkeyPatch, resume: bool) -> None:
    given: list[tuple[str, int]] = []

    def compile_program(*_: Any, **options: Any) -> Any:
        given.append(("compile", options["max_calls"]))
        return SimpleNamespace(outcome=SimpleNamespace(winner="one"), artifact=place / "one", meter=spending(30))

    def compare_on(*_: Any, **options: Any) -> Any:
        with options["part"]("gate"):
            given.append(("gate", options["options"]()["max_calls"]))
            options["count"](spending(8), spending(12))
        return Comparison(Evaluation(), Evaluation(), Gain(0.0, -1.0, 1.0, 0), 0), None

    monkeypatch.setattr("assay.improving.compile_program", compile_program)
    monkeypatch.setattr("assay.improving.compare_on", compare_on)
    job: dict[str, Any] = {"rubric": "r.yaml", "data": "data.jsonl", "name": "up", "order": ["prompts"] * 3, "preflight": False}
    with pytest.raises(BudgetExceeded, match="100 calls of the whole improvement"):
        assay.improve("mine.py:Mine", **job, max_calls=100, resume=resume)  # begins it where there is nothing to resume
    assert given == [("compile", 100), ("gate", 70), ("compile", 50), ("gate", 20)]
    given.clear()
    with pytest.raises(BudgetExceeded):
        assay.improve("mine.py:Mine", **job, max_calls=130, resume=True)
    assert given == [("compile", 30)]


def test_resume_begins_what_was_never_begun(place: Path) -> None:
    lm = scripted_lm(lambda request: json.dumps({"answer": "4"}))
    options: dict[str, Any] = {"rubric": "r.yaml", "data": "data.jsonl", "lm": lm, "adapter": "json", "resume": True}
    report = assay.evaluate("mine.py:Mine", **options)
    assert len(report.evaluation) > 5
    again = assay.evaluate("mine.py:Mine", **options)  # it is done: replayed from the response cache
    assert (again.to_dict()["calls"], again.evaluation.mean) == (report.to_dict()["calls"], report.evaluation.mean)
