"""Training runs of a program under a small real model, through the trainer's own generation: two calls per rollout."""

import dataclasses
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
from two_call_training import SMALL, TwoCalls, letters, run, source

import assay
from assay.errors import BudgetExceeded, Cancelled, ConfigError, Diverged, ModelError
from assay.evaluation import RecordedProgram
from assay.models import Caps
from assay.optimizers.finetuning.comparison import EvalTask
from assay.optimizers.finetuning.policy_gradient import train_policy
from assay.optimizers.finetuning.settings import PolicySettings
from assay.programs.agent import WRITTEN_DECISIONS
from assay.traces import Store
from assay.traces.store.evaluations import evaluations_of


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
    temperatures = {
        (rollout.phase, call.request["config"].get("temperature")) for rollout in full for call in rollout.transitions
    }
    assert {at for phase, at in temperatures if phase == "train"} == {None}  # the program sets none
    assert {at for phase, at in temperatures if phase == "test"} == {None, 0.0}
    assert set(report.curves["held_out_sampled"]) == {0, 2, 4}
    assert set(report.curves["entropy"]) == {1, 2, 3, 4}
    assert report.best_step in (2, 4)
    validation = report.validation["two"]
    assert {mode: (part["before"]["n"], part["after"]["n"]) for mode, part in validation.items()} == {
        "greedy": (2, 2),
        "sampled": (2, 2),
    }
    with Store(tmp_path / "a.db") as store:
        conditions = [one.condition for one in evaluations_of(store, rollouts[0].run_id, split="test")]
    assert conditions == ["before, greedy", "after, greedy", "before, sampled", "after, sampled"]
    assert {tuple(part["runs"]) for part in validation.values()} == {(rollouts[0].run_id,) * 2}
    sent = report.write_page(tmp_path / "sent.html", store=tmp_path / "a.db").read_text()
    assert sent.count("<h3>Every task, the worst change first</h3>") == 2
    page = (report.path / "training.html").read_text()
    assert "Reward by turn" in page
    assert "http" not in page.split("<body")[-1].replace("http://www.w3.org", "")[-2000:]
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.chaos
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


@pytest.mark.chaos
@pytest.mark.slow
def test_held_out_evaluation_is_interruptible_and_does_not_hang(tiny_model: Path) -> None:
    hung = threading.Event()

    def hanging(task: Any, prediction: Any, rollout: Any) -> float:
        if task.id == "t4":  # of val
            hung.wait(120)
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


@pytest.mark.chaos
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


@pytest.mark.chaos
@pytest.mark.slow
def test_interrupted_evaluation_is_repeated_without_effect_on_training(tiny_model: Path) -> None:
    settings = {**SMALL, "model": str(tiny_model), "evaluate_every": 2, "eval_tasks": 2}
    evaluated: list[str] = []

    def stopping(task: Any, prediction: Any, rollout: Any) -> float:
        if rollout.phase == "validate":
            evaluated.append(task.id)
            if (
                len(evaluated) == 6 and begun.engine.stop is not None
            ):  # four of the first evaluation, greedy and sampled
                begun.engine.stop.set()
        return letters(task, prediction, rollout)

    begun = source(str(tiny_model), PolicySettings(**settings), stopping)
    with pytest.raises(Cancelled):
        train_policy(begun, "halted", PolicySettings(**settings))
    assert Path(".assay/training/halted/checkpoints/checkpoint-2/assay.json").is_file()
    resumed = train_policy(
        source(str(tiny_model), PolicySettings(**settings), stopping), "halted", PolicySettings(**settings), resume=True
    )
    evaluated[:] = ["-"] * 99
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
    for changed in ({"learning_rate": 1e-3}, {"check": lambda t, p, r: 0.5}):
        with pytest.raises(ConfigError, match=r"has another (learning_rate|rubric)"):
            run(tiny_model, "same", evaluate_every=0, resume=True, **changed)
    with pytest.raises(ConfigError, match="has another program"):
        train_policy(source(str(tiny_model), config, name="three"), "same", config, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(("lost_from", "every"), [(2, 1), (1, 100)], ids=["later", "seen at the end alone"])
def test_weights_that_fail_the_retention_task_are_discarded(tiny_model: Path, lost_from: int, every: int) -> None:
    config = PolicySettings(**{**SMALL, "model": str(tiny_model), "evaluate_every": every})
    begun = source(str(tiny_model), config)
    evaluated: list[str] = []

    def other(task: Any, prediction: Any, rollout: Any) -> float:
        evaluated.append(task.id)
        return 1.0 if len(evaluated) <= 2 * lost_from else 0.0  # two tasks per evaluation

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
    with pytest.raises(ConfigError, match="evaluate_every=0 evaluates none"):
        train_policy(begun, "forgets", dataclasses.replace(config, evaluate_every=0), retained=[retention_task])
    if lost_from == 1:
        with pytest.raises(Diverged, match=r"other lost 1.000, and 0.1 may be lost.* no weights are kept"):
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


@pytest.mark.chaos
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
