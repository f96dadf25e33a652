"""Training runs of a program under a small real model: rewards, estimators, engines, several processes."""

import json
import math
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from two_call_training import letters, run

from assay.errors import DataError
from assay.optimizers.finetuning.report import PolicyReport
from assay.optimizers.finetuning.settings import PolicySettings
from assay.reports.training import of_other_seeds, write_training

PROGRAM = """
import dspy


class TwoCalls(dspy.Module):
    def __init__(self):
        super().__init__()
        self.draft, self.answer = dspy.Predict("question -> draft"), dspy.Predict("question, draft -> answer")

    def forward(self, question):
        return self.answer(question=question, draft=self.draft(question=question).draft)


def letters(task, prediction, rollout):
    return min(1.0, sum(c in "aeiou 0123" for c in str(prediction["answer"])[:10]) / 10)
"""


@pytest.mark.slow
def test_hanging_or_nan_rewards_are_excluded(tiny_model: Path) -> None:
    calls = iter(range(10_000))
    hung = threading.Event()

    def odd(task: Any, prediction: Any, rollout: Any) -> float:
        if next(calls) == 0:
            hung.wait(120)
        return float("nan") if task.id == "t1" else letters(task, prediction, rollout)

    report = run(tiny_model, "odd", check=odd, steps=2, evaluate_every=0, rollout_timeout_s=10.0)
    hung.set()
    assert report.row_stats.left_out["rollouts given up after 10 s"] == 1
    assert report.row_stats.left_out["rollouts without a score (the rubric could not decide)"] >= 1
    assert report.steps == 2


@pytest.mark.slow
def test_an_answer_may_end_with_any_token_that_the_model_names(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "chat"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    ends = [2, *range(3, config["vocab_size"], 2)]  # the tokenizer names only the first
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    report = run(model, "ends", steps=1, evaluate_every=0, max_completion=16)
    assert report.curves["cut_off"][1] == 0


@pytest.mark.chaos
@pytest.mark.slow
def test_slow_engine_does_not_abandon_rollouts(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import GRPOTrainer

    original = GRPOTrainer._generate_single_turn

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        time.sleep(1.1)
        return original(self, *args, **options)

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", slow)
    report = run(tiny_model, "slow", steps=1, evaluate_every=0, rollout_timeout_s=1.0)
    assert report.row_stats.left_out["rollouts given up after 1 s"] == 0
    assert report.validation["two"]["greedy"]["after"]["n"] == 2


@pytest.mark.slow
def test_zero_variance_rewards_are_reported_and_change_nothing(tiny_model: Path) -> None:
    report = run(tiny_model, "flat", check=lambda t, p, r: 0.0, evaluate_every=0)
    assert report.row_stats.calls == 0
    assert report.row_stats.left_out["rollouts of zero-variance groups"] == 16
    assert any("zero variance" in alarm for alarm in report.alarms)
    assert report.validation["two"]["greedy"]["gain"]["mean"] == 0


@pytest.mark.slow
def test_reinforce_trains_on_single_rollouts_with_kl_in_the_reward(tiny_model: Path) -> None:
    kl = {"kl_in_reward": True, "beta": 0.1}
    report = run(
        tiny_model,
        "single",
        algorithm="reinforce++",
        num_generations=1,
        prompts_per_step=4,
        steps=1,
        evaluate_every=0,
        **kl,
    )
    assert report.row_stats.rollouts == 4  # one a task
    assert report.row_stats.calls == 8
    assert all(math.isfinite(loss) for loss in report.curves["loss"].values())
    assert any(norm > 0 for norm in report.curves["grad_norm"].values())
    assert "kl" not in report.curves  # it is not in the loss


@pytest.mark.slow
def test_ppo_trains_with_a_value_head(tiny_model: Path) -> None:
    report = run(tiny_model, "valued", algorithm="ppo", value="head", steps=1, evaluate_every=0)
    assert set(report.curves["explained_variance"]) == {1}
    assert any(norm > 0 for norm in report.curves["grad_norm"].values())


@pytest.mark.slow
def test_too_few_tasks_are_refused(tiny_model: Path) -> None:
    with pytest.raises(DataError, match="4 tasks to train on, and a step takes 5"):
        run(tiny_model, "few", prompts_per_step=5, num_generations=2)


@pytest.mark.tutorial
@pytest.mark.slow
def test_two_processes_train_one_program(tiny_model: Path) -> None:
    Path("two.py").write_text(PROGRAM)
    Path("letters.yaml").write_text(
        'name: letters\ncriteria:\n  - {name: letters, weight: 1, check: "two.py:letters"}\n'
    )
    Path("tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"How much is {at} + 1?", "answer": str(at + 1)}) + "\n" for at in range(40))
    )
    words = [
        "train", "rloo", "two.py:TwoCalls", "--rubric", "letters.yaml", "--data", "tasks.jsonl", "--name", "both",
        "--model", str(tiny_model),
        "--prompt-format", "lean", "--steps", "2", "--prompts-per-step", "2", "--num-generations", "4",
        "--per-device-batch-size", "2", "--lora-r", "2", "--max-completion", "8",
        "--evaluate-every", "1", "--eval-tasks", "2", "--val-size", "2", "--test-size", "2", "--json",
    ]  # fmt: skip
    Path("two.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: false\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "assay", *words, "--accelerate-config", "two.yaml"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["steps"] == 2
    assert report["rollouts"] == 16  # of both
    assert set(report["curves"]["held_out_greedy"]) == {"0", "1", "2"}
    assert Path(report["path"]).is_dir()
    assert Path(".assay/rank-1/assay.db").exists()


def test_page_reports_converged_seeds(tmp_path: Path) -> None:
    first = PolicyReport(
        "embedded/x+a+b", tmp_path, PolicySettings(model="embedded/x+a"), validation={}, converged=True
    ).to_dict()
    repeated = {**first, "converged": None, "config": {**first["config"], "seed": 1, "model": "embedded/x+c"}}
    longer = {**first, "config": {**first["config"], "seed": 2, "steps": 99}}
    warm_up = {"config": {"model": "embedded/x"}, "loss": {}}
    others = of_other_seeds(first, [first, repeated, longer, warm_up])
    assert others == [repeated]
    assert (
        "of 2 seeds 1 converged, 0 did not, 1 took too few steps"
        in write_training(tmp_path / "page.html", first, others).read_text()
    )
