"""Training runs of a program under a small real model, through the trainer's own generation: two calls a rollout."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.datasets import Task
from assay.errors import BudgetExceeded, Cancelled, ConfigError, DataError, Diverged, ModelError
from assay.evaluation import RecordedProgram, Session
from assay.models import Caps, Meter, with_recording
from assay.optimizers.finetuning.comparison import EvalTask
from assay.optimizers.finetuning.engines import TrainerPolicy
from assay.optimizers.finetuning.online import Rollouts
from assay.optimizers.finetuning.policy_gradient import train_policy
from assay.optimizers.finetuning.policy_report import PolicyReport
from assay.optimizers.finetuning.settings import PolicySettings
from assay.programs.agent import WRITTEN_DECISIONS
from assay.reports.training import of_other_seeds, write_report
from assay.traces import Recorder, Store

SMALL = {
    "steps": 4,
    "prompts_per_step": 2,
    "num_generations": 2,
    "per_device_batch_size": 2,
    "max_completion": 8,
    "eval_tasks": 2,
    "lora_r": 2,
    "learning_rate": 1e-2,
    "save_every": 1,
}


class TwoCalls(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draft, self.answer = dspy.Predict("question -> draft"), dspy.Predict("question, draft -> answer")

    def forward(self, question: str) -> Any:
        draft = self.draft(question=question).draft
        return self.answer(question=question, draft=draft)


def letters(task: Any, prediction: Any, rollout: Any) -> float:
    """How many of the first ten letters are one of ten: something that a step can change."""
    return min(1.0, sum(c in "aeiou 0123" for c in str(prediction["answer"])[:10]) / 10)


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


def source(
    model: str, config: PolicySettings, check: Any = letters, store: Store | None = None, name: str = "two"
) -> Rollouts:
    engine, recorder = TrainerPolicy(model, max_completion=config.max_completion), Recorder(store, run_id="r")
    meter = Meter()
    lm = with_recording(engine.lm, meter=meter, observers=[recorder.observe])
    rubric = assay.Rubric("letters", [assay.Criterion(name="letters", check=check)])
    session = Session(lm=lm, rubric=rubric, recorder=recorder, meter=meter, program_name=name)
    tasks = [Task(id=f"t{at}", inputs={"question": f"How much is {at} + 1?"}) for at in range(8)]
    session.register(tasks[:4], "train")
    session.register(tasks[4:6], "val")
    session.register(tasks[6:], "test")
    return Rollouts(
        EvalTask(name, RecordedProgram(TwoCalls(), session, prompt_format="lean"), session, tasks[4:6], tasks[6:]),
        tasks[:4],
        config,
        engine,
    )


def run(
    model: Path, name: str, *, resume: bool = False, check: Any = letters, store: Store | None = None, **settings: Any
) -> PolicyReport:
    config = PolicySettings(**{**SMALL, "model": str(model), **settings})
    return train_policy(source(str(model), config, check, store), name, config, resume=resume)


@pytest.mark.slow
def test_two_call_program_is_trained_and_compared_on_sealed_tasks(tiny_model: Path, tmp_path: Path) -> None:
    written: set[Any] = set()

    def seen(task: Any, prediction: Any, rollout: Any) -> float:
        written.add(dspy.settings.get(WRITTEN_DECISIONS))
        return letters(task, prediction, rollout)

    with Store(tmp_path / "a.db") as store:
        report = run(tiny_model, "two", store=store, evaluate_every=2, check=seen)
        store.flush()
        rollouts = list(store.rollouts(limit=None))
        full = [store.rollout(rollout.id) for rollout in rollouts]
    assert report.steps == 4
    assert written == {True}  # evaluated tasks are sampled like those of the training
    assert report.row_stats.rollouts == 16
    assert report.row_stats.calls + 2 * report.row_stats.left_out["rollouts of zero-variance groups"] == 32
    assert all(len(rollout.transitions) == 2 for rollout in full)
    assert all(call.token_ids and call.logprobs is None for rollout in full for call in rollout.transitions)
    assert {rollout.split for rollout in rollouts if rollout.phase == "train"} == {"train"}
    assert set(report.curves["held_out_sampled"]) == {0, 2, 4}
    assert set(report.curves["entropy"]) == {1, 2, 3, 4}
    assert report.best_step in (2, 4)
    validation = report.validation["two"]
    assert {mode: (part["before"]["n"], part["after"]["n"]) for mode, part in validation.items()} == {
        "greedy": (2, 2),
        "sampled": (2, 2),
    }
    page = (report.path / "training.html").read_text()
    assert "Reward by turn" in page
    assert "http" not in page.split("<body")[-1].replace("http://www.w3.org", "")[-2000:]
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.slow
def test_resumed_run_gives_the_same_curve(tiny_model: Path) -> None:
    uninterrupted = run(tiny_model, "whole", evaluate_every=0)
    config = PolicySettings(**{**SMALL, "model": str(tiny_model), "evaluate_every": 0})
    begun = source(str(tiny_model), config)
    collect = begun.collect

    def stopping(inputs: Any, trainer: Any) -> Any:
        if trainer.state.global_step == 2:
            assert begun.engine.stop is not None
            begun.engine.stop.set()  # as a signal does
        return collect(inputs, trainer)

    begun.collect = stopping  # type: ignore[method-assign]
    with pytest.raises(Cancelled):
        train_policy(begun, "halted", config)
    with pytest.raises(ConfigError, match="had another learning_rate"):
        run(tiny_model, "halted", evaluate_every=0, resume=True, learning_rate=1e-3)
    resumed = run(tiny_model, "halted", evaluate_every=0, resume=True)
    for name in ("reward", "loss", "grad_norm", "entropy"):
        assert resumed.curves[name] == pytest.approx(uninterrupted.curves[name], rel=1e-5, abs=1e-7), name
    assert resumed.row_stats.rollouts == uninterrupted.row_stats.rollouts


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 5], ids=["a checkpoint of that step", "none yet"])
def test_signal_during_rollouts_discards_only_their_step(tiny_model: Path, every: int) -> None:
    made: list[str] = []

    def stopping(task: Any, prediction: Any, rollout: Any) -> float:
        made.append(task.id)
        if len(made) == 9 and begun.engine.stop is not None:  # two steps have four rollouts each
            begun.engine.stop.set()
        return letters(task, prediction, rollout)

    settings = {**SMALL, "model": str(tiny_model), "evaluate_every": 0, "save_every": every}
    begun = source(str(tiny_model), PolicySettings(**settings), stopping)
    with pytest.raises(Cancelled):
        train_policy(begun, "halted", PolicySettings(**settings))
    resumed = train_policy(
        source(str(tiny_model), PolicySettings(**settings), stopping), "halted", PolicySettings(**settings), resume=True
    )
    made[:] = ["-"] * 99
    uninterrupted = train_policy(
        source(str(tiny_model), PolicySettings(**settings), stopping), "whole", PolicySettings(**settings)
    )
    assert resumed.curves["loss"] == pytest.approx(uninterrupted.curves["loss"], rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_held_out_evaluation_is_interruptible_and_does_not_hang(tiny_model: Path) -> None:
    hung = threading.Event()

    def hanging(task: Any, prediction: Any, rollout: Any) -> float:
        if task.id == "t4":  # of val
            hung.wait(30)
        return letters(task, prediction, rollout)

    report = run(tiny_model, "hung", check=hanging, steps=1, evaluate_every=1, rollout_timeout_s=1.5)
    hung.set()
    assert set(report.curves["held_out_greedy"]) == {0, 1}  # of the other task
    begun = source(
        str(tiny_model),
        config := PolicySettings(**{**SMALL, "model": str(tiny_model), "steps": 1, "evaluate_every": 1}),
    )

    def stopping(task: Any, prediction: Any, rollout: Any) -> float:
        if task.id == "t6" and begun.engine.stop is not None:  # of test
            begun.engine.stop.set()
        return letters(task, prediction, rollout)

    begun = source(str(tiny_model), config, stopping)
    with pytest.raises(Cancelled):
        train_policy(begun, "stopped", config)


@pytest.mark.slow
def test_hanging_monitor_rubric_does_not_stop_training(tiny_model: Path) -> None:
    hung = threading.Event()
    config = PolicySettings(
        **{**SMALL, "model": str(tiny_model), "steps": 1, "evaluate_every": 0, "rollout_timeout_s": 3.0}
    )
    begun = source(str(tiny_model), config)
    begun.monitor = assay.Rubric(
        "watches", [assay.Criterion(name="hangs", check=lambda task, prediction, rollout: float(hung.wait(60)))]
    )
    report = train_policy(begun, "watched", config)
    assert not hung.is_set()
    hung.set()
    assert report.steps == 1
    assert "monitor" not in report.curves


@pytest.mark.slow
def test_cap_ends_training_with_a_checkpoint(tiny_model: Path) -> None:
    config = PolicySettings(**{**SMALL, "model": str(tiny_model), "evaluate_every": 0, "save_every": 4})
    begun = source(str(tiny_model), config)
    begun.eval_task.session.meter.caps = Caps(calls=20)  # two steps and a half, of eight calls each
    with pytest.raises(BudgetExceeded):
        train_policy(begun, "capped", config)
    assert Path(".assay/training/capped/checkpoints/checkpoint-2/assay.json").is_file()
    resumed = run(
        tiny_model,
        "capped",
        evaluate_every=0,
        save_every=4,
        per_device_batch_size=1,
        rollout_timeout_s=60.0,
        resume=True,
    )
    uncapped = run(tiny_model, "whole", evaluate_every=0)
    assert resumed.steps == 4
    assert resumed.curves["loss"] == pytest.approx(uncapped.curves["loss"], rel=1e-3, abs=1e-6)
    assert resumed.curves["reward"] == pytest.approx(uncapped.curves["reward"], abs=1e-6)


@pytest.mark.slow
def test_interrupted_evaluation_is_repeated_without_effect_on_training(tiny_model: Path) -> None:
    settings = {**SMALL, "model": str(tiny_model), "evaluate_every": 2, "eval_tasks": 2}
    looks: list[str] = []

    def stopping(task: Any, prediction: Any, rollout: Any) -> float:
        if rollout.phase == "validate":
            looks.append(task.id)
            if len(looks) == 6 and begun.engine.stop is not None:  # four of the first look, greedy and sampled
                begun.engine.stop.set()
        return letters(task, prediction, rollout)

    begun = source(str(tiny_model), PolicySettings(**settings), stopping)
    with pytest.raises(Cancelled):
        train_policy(begun, "halted", PolicySettings(**settings))
    assert Path(".assay/training/halted/checkpoints/checkpoint-2/assay.json").is_file()
    resumed = train_policy(
        source(str(tiny_model), PolicySettings(**settings), stopping), "halted", PolicySettings(**settings), resume=True
    )
    looks[:] = ["-"] * 99
    uninterrupted = train_policy(
        source(str(tiny_model), PolicySettings(**settings), stopping), "whole", PolicySettings(**settings)
    )
    unseen = run(tiny_model, "unseen", evaluate_every=0)
    for name in ("loss", "reward", "held_out_greedy", "held_out_sampled"):
        assert resumed.curves[name] == pytest.approx(uninterrupted.curves[name], rel=1e-5, abs=1e-7), name
    assert set(uninterrupted.curves["held_out_sampled"]) == {0, 2, 4}
    assert unseen.curves["loss"] == pytest.approx(uninterrupted.curves["loss"], rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_resume_requires_identical_training_settings(tiny_model: Path) -> None:
    config = PolicySettings(**{**SMALL, "model": str(tiny_model), "evaluate_every": 0})
    begun = source(str(tiny_model), config)
    collect = begun.collect

    def stopping(inputs: Any, trainer: Any) -> Any:
        begun.engine.stop.set()
        return collect(inputs, trainer)

    begun.collect = stopping  # type: ignore[method-assign]
    with pytest.raises(Cancelled):
        train_policy(begun, "same", config)
    with pytest.raises(ConfigError, match="had another rubric"):
        run(tiny_model, "same", evaluate_every=0, resume=True, check=lambda t, p, r: 0.5)
    with pytest.raises(ConfigError, match="had another program"):
        train_policy(source(str(tiny_model), config, name="three"), "same", config, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost_from", "every"), [(1, 1), (2, 1), (1, 100)], ids=["at once", "later", "seen at the end alone"]
)
def test_weights_that_fail_the_retention_task_are_discarded(tiny_model: Path, lost_from: int, every: int) -> None:
    config = PolicySettings(**{**SMALL, "model": str(tiny_model), "evaluate_every": every})
    begun = source(str(tiny_model), config)
    looks: list[str] = []

    def other(task: Any, prediction: Any, rollout: Any) -> float:
        looks.append(task.id)
        return 1.0 if len(looks) <= 2 * lost_from else 0.0  # two tasks a look

    session = dataclasses.replace(
        begun.eval_task.session, rubric=assay.Rubric("other", [assay.Criterion(name="other", check=other)])
    )
    retention_task = EvalTask(
        "other",
        RecordedProgram(TwoCalls(), session, prompt_format="lean"),
        session,
        begun.eval_task.val,
        begun.eval_task.test,
        trained=False,
    )
    with pytest.raises(ConfigError, match="0 is never"):
        train_policy(begun, "forgets", dataclasses.replace(config, evaluate_every=0), retained=[retention_task])
    if lost_from == 1:
        with pytest.raises(Diverged, match=r"other lost 1.000, and 0.1 may be lost.* none are kept"):
            train_policy(begun, "forgets", config, retained=[retention_task])
        return
    report = train_policy(begun, "forgets", config, retained=[retention_task])
    assert report.stopped is not None
    assert report.best_step == 1
    assert set(report.validation) == {"two", "other"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", place], capture_output=True, check=False
    ).returncode:
        pytest.skip("only who may mount can have a small disk")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "free_mib", [0, 20_000, 40_000, 80_000], ids=["nothing", "half the weights", "no tokenizer", "half the optimizer"]
)
def test_full_disk_loses_no_checkpoint(
    tiny_model: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int
) -> None:
    monkeypatch.setenv("ASSAY_ADAPTERS", str(small_disk / "adapters"))
    config, filled = PolicySettings(**{**SMALL, "model": str(tiny_model), "evaluate_every": 0}), small_disk / "filled"
    begun = source(str(tiny_model), config)
    collect = begun.collect

    def filling(inputs: Any, trainer: Any) -> Any:
        if trainer.state.global_step == 2:
            filled.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - free_mib))
        return collect(inputs, trainer)

    begun.collect = filling  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"the disk is full .* make room, and add resume=True"):
        train_policy(begun, "full", config)
    filled.unlink()
    resumed = run(tiny_model, "full", evaluate_every=0, resume=True)
    monkeypatch.setenv("ASSAY_ADAPTERS", str(small_disk.parent / "adapters"))
    uninterrupted = run(tiny_model, "whole", evaluate_every=0)
    assert resumed.curves["loss"] == pytest.approx(uninterrupted.curves["loss"], rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_hanging_or_nan_rewards_are_excluded(tiny_model: Path) -> None:
    calls = iter(range(10_000))
    hung = threading.Event()

    def odd(task: Any, prediction: Any, rollout: Any) -> float:
        if next(calls) == 0:
            hung.wait(30)
        return float("nan") if task.id == "t1" else letters(task, prediction, rollout)

    report = run(tiny_model, "odd", check=odd, steps=2, evaluate_every=0, rollout_timeout_s=3.0)
    hung.set()
    assert report.row_stats.left_out["rollouts given up after 3 s"] == 1
    assert report.row_stats.left_out["rollouts without a score (the rubric could not decide)"] >= 1
    assert report.steps == 2


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
        steps=2,
        evaluate_every=0,
        **kl,
    )
    assert report.row_stats.rollouts == 8  # one a task
    assert report.row_stats.calls == 16
    assert all(math.isfinite(loss) for loss in report.curves["loss"].values())
    assert any(norm > 0 for norm in report.curves["grad_norm"].values())
    assert "kl" not in report.curves  # it is not in the loss


@pytest.mark.slow
def test_ppo_trains_with_a_value_head(tiny_model: Path) -> None:
    report = run(tiny_model, "valued", algorithm="ppo", value="head", steps=2, evaluate_every=0)
    assert set(report.curves["explained_variance"]) == {1, 2}
    assert any(norm > 0 for norm in report.curves["grad_norm"].values())


@pytest.mark.slow
def test_too_few_tasks_are_refused(tiny_model: Path) -> None:
    with pytest.raises(DataError, match="4 tasks to train on, and a step takes 5"):
        run(tiny_model, "few", prompts_per_step=5, num_generations=2)


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
        "of 2 seeds 1 did, 0 did not, 1 took too few steps"
        in write_report(tmp_path / "page.html", first, others).read_text()
    )
