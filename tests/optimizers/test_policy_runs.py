"""Training runs of a program under a small real model, through the trainer's own generation: two calls per rollout."""

import dataclasses
import inspect
import json
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import pytest

import assay
from assay.datasets import Task
from assay.errors import BudgetExceeded, Cancelled, ConfigError, Diverged, ModelError
from assay.evaluation import RecordedProgram, Session
from assay.evaluation.failures import Deaths
from assay.models import Caps, Meter, with_recording
from assay.optimizers.finetuning.comparison import EvalTask
from assay.optimizers.finetuning.engines import TrainerPolicy
from assay.optimizers.finetuning.policy_gradient import train_policy
from assay.optimizers.finetuning.report import PolicyReport
from assay.optimizers.finetuning.settings import PolicySettings
from assay.optimizers.finetuning.sources import Rollouts
from assay.programs.agent import WRITTEN_DECISIONS
from assay.traces import Recorder, Store
from assay.traces.store.evaluations import evaluations_of
from assay.traces.store.shares import members_of

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


def source(
    model: str, config: PolicySettings, check: Any = letters, store: Store | None = None, name: str = "two"
) -> Rollouts:
    engine, recorder = TrainerPolicy(model, max_completion=config.max_completion), Recorder(store, run_id="r")
    meter = Meter()
    lm = with_recording(engine.lm, meter=meter, observers=[recorder.observe])
    rubric = assay.Rubric("letters", [assay.Criterion(name="letters", check=check)])
    session = Session(lm=lm, rubric=rubric, recorder=recorder, meter=meter, program_name=name)
    splits = ["train"] * 4 + ["val"] * 2 + ["test"] * 2
    tasks = [
        Task(id=f"t{at}", inputs={"question": f"How much is {at} + 1?"}, split=split) for at, split in enumerate(splits)
    ]
    session.register(tasks)
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


class Suspects:
    """Two tasks were running when the process of the training was killed."""

    def read(self) -> dict[str, list[str]]:
        return {"running": ["t0", "t1"]}

    def write(self, tasks: Any, *, last: bool = False) -> None:
        pass


@pytest.mark.slow
def test_tasks_that_run_alone_after_a_kill_are_answered(tiny_model: Path, tmp_path: Path) -> None:
    config = PolicySettings(
        **{**SMALL, "model": str(tiny_model), "steps": 2, "evaluate_every": 0, "rollout_timeout_s": 20.0}
    )
    with Store(tmp_path / "s.db") as store:
        rollouts = source(str(tiny_model), config, store=store)
        assert rollouts.eval_task is not None
        rollouts.eval_task.session.deaths = Deaths(Suspects())
        assert train_policy(rollouts, "alone", config).steps == 2
        store.flush()
        assert {rollout.status for rollout in store.rollouts()} == {"done"}


@pytest.fixture(scope="module")
def two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A whole training: its report, its store, and whether each scored rollout wrote its decisions."""
    folder, written = tmp_path_factory.mktemp("two"), set[Any]()

    def seen(task: Any, prediction: Any, rollout: Any) -> float:
        written.add(dspy.settings.get(WRITTEN_DECISIONS))
        return letters(task, prediction, rollout)

    with pytest.MonkeyPatch.context() as patch, Store(folder / "a.db") as store:
        patch.chdir(folder)
        report = run(tiny_model, "two", store=store, evaluate_every=2, check=seen)
        store.flush()
    return SimpleNamespace(report=report, store=folder / "a.db", written=written)


@pytest.mark.slow
def test_two_call_program_is_trained_and_compared_on_sealed_tasks(two: SimpleNamespace, tmp_path: Path) -> None:
    report = two.report
    with Store(two.store) as store:
        rollouts = list(store.rollouts(limit=None))
        full = [store.rollout(rollout.id) for rollout in rollouts]
        conditions = [one.condition for one in evaluations_of(store, rollouts[0].run_id, split="test")]
    assert report.steps == 4
    assert two.written == {True}  # evaluated tasks are sampled like those of the training
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
    counts = {mode: (part["before"]["n"], part["after"]["n"]) for mode, part in validation.items()}
    assert counts == {"greedy": (2, 2), "sampled": (2, 2)}
    assert conditions == ["before, greedy", "after, greedy", "before, sampled", "after, sampled"]
    assert {tuple(part["runs"]) for part in validation.values()} == {(rollouts[0].run_id,) * 2}
    sent = report.write_page(tmp_path / "sent.html", store=two.store).read_text()
    assert sent.count("<h3>Every task, the worst change first</h3>") == 2
    page = (two.store.parent / report.path / "training.html").read_text()
    assert "Reward by turn" in page
    assert "http" not in page.split("<body")[-1].replace("http://www.w3.org", "")[-2000:]
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.slow
def test_cap_ends_training_with_a_checkpoint(two: SimpleNamespace, tiny_model: Path) -> None:
    config = PolicySettings(**{**SMALL, "model": str(tiny_model), "evaluate_every": 0, "save_every": 4})
    begun = source(str(tiny_model), config)
    begun.eval_task.session.meter.caps = Caps(calls=20)  # two steps and a half, of eight calls each
    with pytest.raises(BudgetExceeded):
        train_policy(begun, "capped", config)
    assert Path(".assay/training/capped/checkpoints/checkpoint-2/assay.json").is_file()
    machine = {"save_every": 4, "per_device_batch_size": 1, "rollout_timeout_s": 60.0}  # another one may go on
    resumed = run(tiny_model, "capped", evaluate_every=0, resume=True, **machine)
    assert resumed.steps == 4
    # evaluations, which the other had, change nothing
    assert resumed.curves["loss"] == pytest.approx(two.report.curves["loss"], rel=1e-3, abs=1e-6)
    assert resumed.curves["reward"] == pytest.approx(two.report.curves["reward"], abs=1e-6)


# -- rewards and algorithms


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
def test_zero_variance_rewards_change_nothing_and_an_answer_may_end_with_any_token_that_the_model_names(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "chat"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    ends = [2, *range(3, config["vocab_size"], 2)]  # the tokenizer names only the first
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    report = run(model, "flat", check=lambda t, p, r: 0.0, steps=3, evaluate_every=0, max_completion=16)
    assert report.row_stats.calls == 0
    assert report.row_stats.left_out["rollouts of zero-variance groups"] == 12
    assert any("zero variance" in alarm for alarm in report.alarms)
    assert report.validation["two"]["greedy"]["gain"]["mean"] == 0
    assert report.curves["cut_off"][1] == 0


@pytest.mark.slow
def test_reinforce_trains_on_single_rollouts_with_kl_in_the_reward(tiny_model: Path) -> None:
    settings = {"num_generations": 1, "prompts_per_step": 4, "kl_in_reward": True, "beta": 0.1}
    report = run(tiny_model, "single", algorithm="reinforce++", steps=1, evaluate_every=0, **settings)
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
    config = PolicySettings(**{**SMALL, "model": str(tiny_model), "steps": 3, "evaluate_every": every})
    begun = source(str(tiny_model), config)
    evaluated: list[str] = []

    def other(task: Any, prediction: Any, rollout: Any) -> float:
        evaluated.append(task.id)
        return 1.0 if len(evaluated) <= 2 * lost_from else 0.0  # two tasks per evaluation

    rubric = assay.Rubric("other", [assay.Criterion(name="other", check=other)])
    session = dataclasses.replace(begun.eval_task.session, rubric=rubric)
    program, tasks = RecordedProgram(TwoCalls(), session, prompt_format="lean"), begun.eval_task
    retention_task = EvalTask("other", program, session, tasks.val, tasks.test, trained=False)
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


@pytest.mark.tutorial
@pytest.mark.slow
def test_two_processes_train_one_program(tiny_model: Path) -> None:
    parts = "\n\n".join(map(inspect.getsource, (TwoCalls, letters)))
    Path("two.py").write_text(f"from typing import Any\n\nimport dspy\n\n\n{parts}")
    Path("letters.yaml").write_text("name: letters\ncriteria:\n- {name: letters, check: 'two.py:letters'}\n")
    Path("tasks.jsonl").write_text(
        "".join(json.dumps({"question": f"How much is {at} + 1?", "answer": str(at + 1)}) + "\n" for at in range(40))
    )
    words = [
        "train", "rloo", "two.py:TwoCalls", "--rubric", "letters.yaml", "--data", "tasks.jsonl", "--name", "both",
        "--model", str(tiny_model),
        "--prompt-format", "lean", "--steps", "2", "--prompts-per-step", "2", "--num-generations", "4",
        "--per-device-batch-size", "2", "--lora-r", "2", "--max-completion", "8",
        "--evaluate-every", "1", "--eval-tasks", "2", "--val-size", "2", "--test-size", "2", "--json",
        "--max-calls", "500",
    ]  # fmt: skip
    Path("two.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: false\n"
    )
    command = [sys.executable, "-m", "assay", *words, "--accelerate-config", "two.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["steps"] == 2
    assert report["rollouts"] == 16  # of both
    assert set(report["curves"]["held_out_greedy"]) == {"0", "1", "2"}
    assert Path(report["path"]).is_dir()
    with Store() as store:
        trained = [rollout for rollout in store.rollouts() if rollout.phase == "train"]
        first, second = sorted({rollout.run_id for rollout in trained}, key=len)
        assert len(trained) == 16
        assert len({rollout.group_id for rollout in trained}) == 4
        assert second.startswith(f"{first}.rank-1-")
        assert {status for _, status in store.runs(first.rpartition("-")[0])} == {"done"}
        (member,) = members_of(store.engine, first)  # of the caps
    assert member.run_id == second
    assert member.usage is not None
    assert member.calls == member.usage.calls == 16
    assert not list(Path(".assay").glob("rank-*"))


# -- stops, hangs and full disks


def stopping_source(model: Path, config: PolicySettings, when: Callable[[Any], bool]) -> Any:
    """Rollouts that are told to stop when a rollout of `when` is scored."""

    def check(task: Any, prediction: Any, rollout: Any) -> float:
        if when(rollout) and begun.engine.stop is not None:
            begun.engine.stop.set()
        return letters(task, prediction, rollout)

    begun = source(str(model), config, check)
    return begun


@pytest.mark.chaos
@pytest.mark.slow
def test_held_out_evaluation_is_interruptible_and_does_not_hang(tiny_model: Path) -> None:
    hung = threading.Event()

    def hanging(task: Any, prediction: Any, rollout: Any) -> float:
        if task.id == "t4":  # of val
            hung.wait(120)
        return letters(task, prediction, rollout)

    report = run(tiny_model, "hung", check=hanging, steps=1, evaluate_every=1, rollout_timeout_s=10.0)
    hung.set()
    assert set(report.curves["held_out_greedy"]) == {0, 1}  # of the other task
    config = PolicySettings(**{**SMALL, "model": str(tiny_model), "steps": 1, "evaluate_every": 1})
    with pytest.raises(Cancelled):
        train_policy(stopping_source(tiny_model, config, lambda rollout: rollout.task_id == "t6"), "stopped", config)


@pytest.mark.chaos
@pytest.mark.slow
def test_interrupted_evaluation_is_repeated_without_effect_on_training(tiny_model: Path) -> None:
    settings = {**SMALL, "evaluate_every": 2, "eval_tasks": 2}
    config = PolicySettings(**settings, model=str(tiny_model))
    count = iter(range(999))  # the first evaluation has four rollouts, greedy and sampled
    begun = stopping_source(tiny_model, config, lambda rollout: rollout.phase == "validate" and next(count) == 5)
    with pytest.raises(Cancelled):
        train_policy(begun, "halted", config)
    assert Path(".assay/training/halted/checkpoints/checkpoint-2/assay.json").is_file()
    resumed = train_policy(stopping_source(tiny_model, config, lambda _: False), "halted", config, resume=True)
    uninterrupted = run(tiny_model, "whole", **settings)
    for name in ("loss", "reward", "held_out_greedy", "held_out_sampled"):
        assert resumed.curves[name] == pytest.approx(uninterrupted.curves[name], rel=1e-5, abs=1e-7), name
    assert set(uninterrupted.curves["held_out_sampled"]) == {0, 2, 4}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", place]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
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
