"""A complete `assay.improve` on the embedded model: a step that is kept, and the artifact that results from it."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.errors import AssayError, Cancelled, Diverged
from assay.models.lora.adapters import list_adapters

PROGRAM = """
from typing import Literal

import dspy


class Turning(dspy.Module):
    def __init__(self):
        super().__init__()
        fields = {"place": (str, dspy.InputField()), "turn": (Literal["no", "yes"], dspy.OutputField())}
        self.turn = dspy.Predict(dspy.Signature(fields, "Say yes or no."))

    def forward(self, place):
        return self.turn(place=place)
"""


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.model
def test_weights_that_pass_the_gate_are_adopted_and_served(
    embedded: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(0)
    tasks = [
        {"inputs": {"place": f"{chosen.randint(1, 9999)} Main Street"}, "expected": {"turn": "yes"}} for _ in range(120)
    ]
    Path("turning.py").write_text(PROGRAM)
    Path("turns.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    Path("turn.yaml").write_text(
        "name: turn\ncriteria:\n  - {name: turn, weight: 1, check: 'assay.rubrics.checks:exact', with: {field: turn}}\n"
    )
    job: dict[str, Any] = {
        "rubric": "turn.yaml", "data": "turns.jsonl", "name": "up", "order": ["sft"], "rollouts": 2, "model": embedded,
        "prompt_format": "lean",
        "sft": {"epochs": 4, "batch": 4, "learning_rate": 1e-3, "lora_r": 4}, "parameters": {"temperature": 1.0},
        "sizes": {"train": 16, "gate": 14, "test": 8},
    }  # fmt: skip

    def cut_off(*_: Any, **__: Any) -> None:
        raise Cancelled("at the gate")

    with monkeypatch.context() as patch:  # the adapter is there, and nothing says that the step is done
        patch.setattr("assay.evaluation.comparison.compare", cut_off)
        with pytest.raises(Cancelled):
            assay.improve("turning.py:Turning", **job)
    made = list_adapters()
    report = assay.improve("turning.py:Turning", **job, resume=True, max_calls=100_000)
    assert list_adapters() == made
    step = report.steps[0]
    assert step["kept"], report.steps
    assert step["gate"]["low"] > 0
    assert report.model == f"{embedded}+up-1"
    assert report.test is not None
    assert report.test["after"]["score"] > report.test["before"]["score"] + 0.2
    assert [adapter.name for adapter in list_adapters()] == ["up-1"]
    assert report.artifact is not None
    assert not (own_folder / ".assay" / "improve" / "up").exists()

    def diverging(*_: Any, **__: Any) -> None:
        raise Diverged("the loss was not a finite number")

    with monkeypatch.context() as patch:
        patch.setattr("assay.commands.improve.train_sft", diverging)
        down = assay.improve("turning.py:Turning", **{**job, "name": "down"})
    assert down.steps == [
        {"step": "sft", "kept": False, "gate": None, "note": "the loss was not a finite number", "converged": False}
    ]
    assert down.artifact is not None  # of what there was
    words = [sys.executable, "-m", "assay", "run", str(report.artifact), "place=5 Main Street"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert "yes" in done.stdout, done.stderr


def test_guards_are_checked_before_the_first_step_and_passed_to_the_training(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: dict[str, Any] = {"rubric": "math_qa", "data": "arithmetic:size=60", "order": ["grpo"], "preflight": False}
    other = "classify,classify,words.jsonl"
    for extra, message in (
        ({"retention": ["math_qa,math_qa,arithmetic:size=60"]}, "named twice"),
        ({"retention": ["nothing"]}, "must be PROGRAM,RUBRIC,DATA"),
        ({"monitor": "missing.yaml"}, "missing.yaml"),
        ({"retention": [other], "grpo": {"evaluate_every": 0}}, "evaluate_every=0 evaluates none"),
        ({"monitor": "classify", "order": ["prompts"]}, "monitor: would have no effect"),
    ):
        with pytest.raises(AssayError, match=message):
            assay.improve("math_qa", name="x", **{**job, **extra})
    recorded: dict[str, Any] = {}

    def training(*_: Any, **options: Any) -> None:
        recorded.update(options)
        raise Diverged("far enough")

    monkeypatch.setattr("assay.commands.improve.train", training)
    report = assay.improve("math_qa", name="y", retention=[other], monitor="classify", **job)
    assert (report.steps[0]["note"], report.steps[0]["converged"]) == ("far enough", False)
    assert (recorded["retention"], recorded["monitor"]) == ([other], "classify")
