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
    steps = {"steps": 3, "prompts_per_step": 2, "num_generations": 2, "save_every": 1, "evaluate_every": 1}
    sizes = {"lora_r": 2, "max_length": 256, "max_completion": 8, "eval_tasks": 2, "sizes": {"val": 2, "test": 2}}
    machine = {"threads": 1, "rollout_timeout_s": 60.0 if resume else 120.0}  # it is the same training
    return train(
        "p.py:Sums", rubric="r.yaml", data="arithmetic:terms=2-2&digits=1-1&size=40", name="a", model=str(model),
        prompt_format="lean", resume=resume, test=False, **steps, **sizes, **machine,
    )  # fmt: skip


def stored_rollouts(folder: Path) -> dict[str, Any]:
    with Store(folder / ".assay" / "assay.db") as store:
        rollouts = [store.rollout(row.id) for row in store.rollouts()]
    return {
        r.id: (r.run_id, r.phase, r.group_id, r.status, r.score, [call.output for call in r.transitions])
        for r in rollouts
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
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    weights = Path(".assay/training/a/adapter/adapter_model.safetensors")
    assert (whole / weights).read_bytes() == (cut / weights).read_bytes()
    assert stored_rollouts(cut) == stored_rollouts(whole)
    assert len(stored_rollouts(cut)) == 12 + 4 * 2 * 2  # four evaluations of two tasks, greedy and sampled
