"""Training by a curriculum: the steps take tasks of its stages, evaluations those of the current one."""

import json
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.traces import Store

SMALL: dict[str, Any] = {
    "steps": 4,
    "prompts_per_step": 2,
    "num_generations": 2,
    "per_device_batch_size": 2,
    "max_completion": 8,
    "eval_tasks": 2,
    "lora_r": 2,
    "learning_rate": 1e-2,
    "save_every": 1,
    "evaluate_every": 1,
}
PROGRAM = """
import dspy

class Ask(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.ask(question=question)

def letters(task, prediction, rollout):
    return min(1.0, sum(c in "aeiou 0123" for c in str(prediction["answer"])[:10]) / 10)

def passed(task, prediction, rollout):
    # a val task of the first stage is right, one of the second is not
    if rollout.split == "val":
        return 1.0 if task.metadata["level"] == 1 else 0.0
    return letters(task, prediction, rollout)

def half_scored(task, prediction, rollout):
    # of the three val tasks of a stage, one is unscored and the others are right
    if rollout.split == "val":
        return 1.0 if int(task.inputs["question"].split()[3]) % 8 == 2 else float("nan")
    return letters(task, prediction, rollout)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(PROGRAM)
    rows = [
        {
            "inputs": {"question": f"How much is {at} + {level}?"},
            "expected": {"answer": "x"},
            "metadata": {"level": level},
            "split": ("train", "train", "val", "test")[at % 4],
        }
        for level in (1, 2, 3)
        for at in range(12)
    ]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'p.py:passed'}\n")
    stages = [f"  - {{name: level{level}, data: d.jsonl, where: {{level: {level}}}}}\n" for level in (1, 2, 3)]
    Path("cur.yaml").write_text("replay: 0.5\nstages:\n" + "".join(stages))


def train(model: Path, name: str, **options: Any) -> Any:
    return assay.train(
        "p.py:Ask", rubric="r.yaml", curriculum="cur.yaml", name=name, model=str(model), preflight=False,
        store=f"{name}.db", prompt_format="lean", **{**SMALL, **options},
    )  # fmt: skip


@pytest.mark.slow
def test_training_follows_the_stages_and_reports_their_order(tiny_model: Path) -> None:
    report = train(tiny_model, "staged")
    data = report.to_dict()
    stages = {row["name"]: row["status"] for row in data["curriculum"]["stages"]}
    assert stages == {"level1": "passed", "level2": "not passed", "level3": "not reached"}
    # the evaluation before the first step passes level 1
    assert data["curriculum"]["events"][0]["kind"] == "passed"
    assert [event["stage"] for event in data["curriculum"]["events"]] == ["level1", *["level2"] * 4]
    assert report.curves["held_out_greedy"][0] == 1.0
    assert report.curves["held_out_greedy"][4] == 0.0
    assert report.best_step == 4  # the level-1 score is not a reason to go back to weights of that stage
    order = data["curriculum"]["order"]
    assert len(order) == 8
    with Store("staged.db") as store:
        rollouts = list(store.rollouts())
        run = rollouts[0].run_id
    trained = {(r.task_id, r.metadata["curriculum_stage"]) for r in rollouts if r.phase == "train"}
    assert trained == {(entry["task"], entry["stage"]) for entry in order}
    assert {r.split for r in rollouts if r.phase == "train"} == {"train"}
    assert {r.split for r in rollouts if r.phase == "validate"} == {"val"}
    assert any("stage 'level2' was not passed" in note for note in report.notes)
    path = data["curriculum"]["path"]
    assert Path(path).resolve() == Path("runs", run, "curriculum.json").resolve()
    assert json.loads(Path(path).read_text()) == data["curriculum"]


@pytest.mark.chaos
@pytest.mark.slow
def test_a_resumed_training_takes_the_same_tasks(tiny_model: Path) -> None:
    whole = train(tiny_model, "whole")
    with pytest.raises(assay.errors.BudgetExceeded):
        train(tiny_model, "halted", max_calls=26)
    resumed = train(tiny_model, "halted", resume=True)
    assert {**resumed.curriculum, "path": ""} == {**whole.curriculum, "path": ""}
    assert resumed.curves["reward"] == pytest.approx(whole.curves["reward"], abs=1e-6)


@pytest.mark.slow
def test_a_stage_with_unscored_val_tasks_is_not_passed_and_retention_tasks_have_no_stages(tiny_model: Path) -> None:
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'p.py:half_scored'}\n")
    other = [{"inputs": {"question": f"other {at}"}, "split": ("val", "test")[at % 2]} for at in range(4)]
    Path("other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    Path("kept.yaml").write_text("name: kept\ncriteria:\n- {name: right, check: 'p.py:letters'}\n")
    report = train(
        tiny_model, "gaps", steps=1, eval_tasks=3, retention=["p.py:Ask,kept.yaml,other.jsonl"], max_score_drop=1.0
    )
    assert report.curriculum["stages"][0]["status"] == "not passed"
    assert {event["score"] for event in report.curriculum["events"]} == {None}
    assert report.curves["held_out_greedy"] == {0: 1.0, 1: 1.0}
    assert sum(name.startswith("retained_") for name in report.curves) == 1
    with Store("gaps.db") as store:
        evaluated = [r for r in store.rollouts() if r.inputs["question"].startswith("other")]
    assert {r.split for r in evaluated} == {"val", "test"}


@pytest.mark.slow
def test_a_stage_smaller_than_a_step_is_refused(tiny_model: Path) -> None:
    with pytest.raises(assay.errors.DataError, match="6 tasks in the smallest stage to train on, and a step takes 8"):
        train(tiny_model, "small", prompts_per_step=8)
