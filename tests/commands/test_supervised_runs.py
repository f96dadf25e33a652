"""Supervised fine-tuning as a run of the store. Trains a tiny random model."""

import json
from pathlib import Path

import pytest

import assay
from assay.errors import ConfigError
from assay.evaluation import SilentProgress
from assay.reports.training_log import read_training_log
from assay.traces import Store
from assay.traces.store.listing import finished_report, list_runs


def rows(path: Path) -> Path:
    lines = [
        {
            "prompt": [{"role": "user", "content": f"How much is {at} + 1?"}],
            "completion": [{"role": "assistant", "content": f"The answer is {at + 1}."}],
            "task": f"t{at}",
        }
        for at in range(8)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_a_fine_tuning_is_a_run_with_its_curves(tiny_model: Path, own_folder: Path) -> None:
    report = assay.train_sft(
        rows(own_folder / "rows.jsonl"), name="tiny", store=own_folder / "s.db", progress=SilentProgress(),
        model=str(tiny_model), epochs=2, batch=2, lora_r=2, max_length=64, eval_fraction=0.25, evaluations=2,
    )  # fmt: skip
    with Store(own_folder / "s.db") as store:
        (run,) = list_runs(store)
    assert (run["kind"], run["status"]) == ("train", "done")
    assert (run["config"]["algorithm"], run["config"]["adapter_name"]) == ("sft", "tiny")
    log = read_training_log(own_folder / "runs" / run["id"])
    assert log is not None
    assert log.curves == {"loss/training": report.loss, "loss/held_out": report.held_out_loss}
    assert log.steps == report.steps
    assert (finished_report(own_folder / "s.db", run["id"]) or {})["best_step"] == report.best_step


def test_what_is_refused_leaves_no_run(own_folder: Path) -> None:
    path = rows(own_folder / "rows.jsonl")
    for options, message in (
        ({"program": "p.py:P"}, "belong together"),
        ({"evaluation": {"seed": 1}}, "would have no effect"),
        ({"min_quality": 2.0}, "min_quality"),
    ):
        with pytest.raises(ConfigError, match=message):
            assay.train_sft(path, name="x", store=own_folder / "s.db", **options)
    assert not (own_folder / "s.db").exists()
