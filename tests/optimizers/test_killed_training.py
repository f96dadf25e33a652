"""A policy training that is killed and resumed gives the weights, curves and rollouts of an uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest

from assay.commands.train import train
from assay.optimizers.finetuning.sources import Rollouts
from assay.traces import Store
from rigs.chaos import PROGRAM, SPREAD


class Killed(BaseException):
    """Exits the process without clean-up, as SIGKILL does."""


def trained(folder: Path, model: Path, patch: pytest.MonkeyPatch, *, resume: bool = False) -> Any:
    folder.mkdir(exist_ok=True)
    patch.chdir(folder)
    Path("p.py").write_text(PROGRAM)
    Path("checks.py").write_text(SPREAD)
    Path("r.yaml").write_text("name: spread\ncriteria:\n- {name: spread, check: 'checks.py:spread'}\n")
    settings: dict[str, Any] = {
        "steps": 3,
        "prompts_per_step": 2,
        "num_generations": 2,
        "lora_r": 2,
        "max_length": 256,
        "max_completion": 8,
        "save_every": 1,
    }
    settings["rollout_timeout_s"] = 60.0 if resume else 120.0  # of the machine: it is the same training
    return train(
        "p.py:Sums", rubric="r.yaml", data="arithmetic:terms=2-2&digits=1-1&size=40", name="a", model=str(model),
        prompt_format="lean", threads=1,
        resume=resume, sizes={"val": 2, "test": 2}, evaluate_every=1, eval_tasks=2, test=False, **settings,
    )  # fmt: skip


def checkpoint_state(folder: Path) -> dict[str, Any]:
    with Store(folder / ".assay" / "assay.db") as store:
        return {
            r.id: (
                r.run_id,
                r.phase,
                r.group_id,
                r.status,
                r.score,
                [t.output for t in store.rollout(r.id).transitions],
            )
            for r in store.rollouts()
        }


@pytest.mark.slow
def test_resumed_training_equals_an_uninterrupted_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = trained(tmp_path / "whole", tiny_model, monkeypatch)
    collect, calls = Rollouts.collect, []

    def killed(self: Rollouts, *arguments: Any) -> Any:
        collected = collect(self, *arguments)
        calls.append(self)
        if len(calls) == 2:  # the rollouts of the second step are made, its weights are not
            raise Killed
        return collected

    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "collect", killed)
        with pytest.raises(Killed):
            trained(tmp_path / "cut", tiny_model, monkeypatch)
    resumed = trained(tmp_path / "cut", tiny_model, monkeypatch, resume=True)
    for name in ("loss", "reward", "held_out_greedy", "held_out_sampled"):
        assert resumed.curves[name] == uninterrupted.curves[name], name
    assert resumed.row_stats.rollouts == uninterrupted.row_stats.rollouts == 12
    files = [
        folder / ".assay" / "training" / "a" / "adapter" / "adapter_model.safetensors"
        for folder in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert checkpoint_state(tmp_path / "cut") == checkpoint_state(tmp_path / "whole")
    assert (
        len(checkpoint_state(tmp_path / "cut")) == 12 + 4 * 2 * 2
    )  # four evaluations of two tasks, greedy and sampled
