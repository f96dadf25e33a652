"""Weight training: rows read, trained, resumed and refused. Trains the real small model on CPU."""

import dataclasses
import errno
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.errors import ConfigError, DataError, ModelError
from assay.models import get_lm
from assay.models.lora import list_adapters
from assay.optimizers.finetuning import SFTSettings, read_sft, train_sft
from assay.optimizers.finetuning.run_folder import POLICY_MEMORY, ready
from assay.support.places import MARKER


def row(at: int, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"How much is {at} + 1?"}]
    completion = [{"role": "assistant", "content": f"call: add({at}, 1)"}]
    return {"prompt": prompt, "completion": completion, "task": f"t{at}", "quality": 1.0, **more}


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def read(path: Path, rows: list[Any] | None = None, *, eval_fraction: float = 0.1, seed: int = 0) -> Any:
    """The rows of a file or of an export; of `d.jsonl` in the folder `path` if there are `rows` to be written to it."""
    path = path if rows is None else lines(path / "d.jsonl", rows)
    return read_sft(path, min_quality=0.8, eval_fraction=eval_fraction, seed=seed)


# -- rows


def test_evaluation_tasks_are_excluded_completely_and_reproducibly(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [row(at // 2) for at in range(40)])
    data = read(path, eval_fraction=0.2)
    prompts = [{r["prompt"][0]["content"] for r in part} for part in (data.train, data.held_out)]
    assert (len(data.train), len(data.held_out), data.tasks) == (32, 8, 20)
    assert not prompts[0] & prompts[1]
    assert read(path, eval_fraction=0.2).held_out == data.held_out
    assert read(path, eval_fraction=0.2, seed=1).held_out != data.held_out
    assert read(tmp_path, [row(1)] * 4, eval_fraction=0.5).held_out == []


def test_rejected_rows_are_excluded_and_counted(tmp_path: Path) -> None:
    empty = [{"role": "assistant", "content": " "}]
    qualities = [row(2, quality=0.79), row(4, quality=-1), row(5, quality="good"), row(6, quality=None)]
    data = read(tmp_path, [row(1), *qualities, row(3, completion=empty), ""], eval_fraction=0)
    assert len(data.train) == 2
    assert data.left_out == Counter({"below the quality of 0.8": 3, "with an empty completion": 1})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "it is empty"),
        (["{"], "d.jsonl:1: not JSON"),
        ([row(1), "[]"], "d.jsonl:2: expected a JSON object"),
        ([{"prompt": "text", "completion": "text"}], "'prompt' must be a list of messages"),
        ([row(1, completion=[])], "'completion' must be a list"),
        ([row(1, quality=0.1)], "below the quality of 0.8"),
    ],
)
def test_invalid_training_data_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, rows)


def test_export_of_another_kind_or_modified_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="has no manifest"):
        read(tmp_path)
    lines(tmp_path / "data.jsonl", [row(1)])
    sft = {"format": 1, "kind": "sft", "files": {}, "passed": True}
    for manifest, message in (
        ({**sft, "kind": "grpo"}, "is an export of grpo"),
        ({**sft, "format": 9}, "Update assay"),
        ({**sft, "files": {"data.jsonl": {"sha256": "0"}}}, "was changed after the export"),
        ({"kind": "sft"}, "cannot be read as the manifest of an export: KeyError"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(DataError, match=message):
            read(tmp_path)


# -- training


@pytest.mark.slow
def test_errors_of_memory_and_disk_name_the_setting_and_others_are_unchanged() -> None:
    import torch
    from safetensors import SafetensorError

    for failure, message in (
        (MemoryError(), "memory ran out: lower per_device_batch_size"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory ran out: lower per_device_batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "memory ran out"),
        (torch.OutOfMemoryError("in any words"), "memory ran out"),
        (OSError(errno.ENOMEM, "in any words"), "memory ran out"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full.*The last whole checkpoint is kept"),
        (OSError(errno.EDQUOT, "in any words"), "the disk is full"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), "the disk is full"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (Exception("No space left on device (os error 28)"), "the disk is full"),  # as tokenizers raises it
    ):
        with pytest.raises(ModelError, match=message), ready(POLICY_MEMORY):
            raise failure
    with pytest.raises(ModelError, match="memory ran out"), ready(POLICY_MEMORY):
        torch.empty(10**15)  # more than any machine has
    for other in (RuntimeError("another"), ValueError("a task about being out of memory"), KeyError("(os error 28)")):
        with pytest.raises(type(other)) as raised, ready(POLICY_MEMORY):
            raise other
        assert raised.value is other


@pytest.mark.tutorial
@pytest.mark.slow
def test_warm_up_learns_a_format_and_is_served(embedded: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [row(at) for at in range(20)])
    settings = SFTSettings(epochs=2, batch=4, max_length=128, lora_r=4, learning_rate=4e-3, evaluations=1)
    report = train_sft(path, "adds", settings)
    held_out = [report.held_out_loss[step] for step in sorted(report.held_out_loss)]
    assert held_out[-1] < 0.3 * held_out[0]
    answers = [get_lm(name, cache=None)("How much is 407 + 1?", temperature=0.0)[0] for name in (embedded, report.name)]
    assert "call: add(407, 1)" not in str(answers[0])
    assert "call: add(407, 1)" in str(answers[1])


@pytest.mark.slow
def test_a_second_warm_up_begins_where_the_first_one_ended(small_embedded: str, tmp_path: Path) -> None:
    long = row(99, prompt=[{"role": "user", "content": "long " * 500}])
    path = lines(tmp_path / "d.jsonl", [row(at) for at in range(16)] + [long])
    settings = SFTSettings(model=small_embedded, epochs=4, max_length=256, lora_r=4, learning_rate=3e-2, evaluations=1)
    first = train_sft(path, "adds", settings)
    losses = [first.held_out_loss[step] for step in sorted(first.held_out_loss)]
    assert losses[-1] < 0.8 * losses[0]
    assert first.best_step == min(first.held_out_loss, key=lambda step: (first.held_out_loss[step], step))
    assert first.left_out == {"of more than 256 tokens": 1}
    assert first.agreement == 1.0
    assert not (tmp_path / ".assay" / "training" / "adds").exists()
    with pytest.raises(ConfigError, match="there is an adapter 'adds'"):
        train_sft(path, "adds", settings)
    second = train_sft(path, "more", dataclasses.replace(settings, model=first.name, epochs=1))
    assert second.name == f"{small_embedded}+adds+more"
    assert second.held_out_loss[0] == pytest.approx(min(losses), rel=0.1)


@pytest.mark.chaos
@pytest.mark.slow
def test_warm_up_killed_after_storing_its_adapter_resumes_to_the_same(
    embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Exits the process without clean-up, as SIGKILL does."""

    def killed(*_: Any) -> None:
        raise Killed

    path = lines(tmp_path / "d.jsonl", [row(at) for at in range(6)])
    config = SFTSettings(epochs=1, batch=2, lora_r=2, max_length=64, evaluations=1, eval_fraction=0.2)
    uninterrupted = train_sft(path, "whole", config)
    with monkeypatch.context() as patch:
        patch.setattr("assay.optimizers.finetuning.run_folder.report_agreement", killed)
        with pytest.raises(Killed):
            train_sft(path, "cut", config)
    marker = Path(".assay/adapters/cut", MARKER)
    training = marker.read_text()
    marker.write_text("another")
    with pytest.raises(ConfigError, match="there is an adapter 'cut'"):
        train_sft(path, "cut", config, resume=True)
    marker.write_text(training)
    resumed = train_sft(path, "cut", config, resume=True)
    for name in ("loss", "held_out_loss", "steps", "agreement"):
        assert getattr(resumed, name) == getattr(uninterrupted, name)
    weights = [Path(f".assay/adapters/{name}/adapter_model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_nan_loss_keeps_the_last_finite_weights(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = lines(tmp_path / "d.jsonl", [row(at) for at in range(40)]), str(tiny_model)
    import torch
    from trl import SFTTrainer

    original = SFTTrainer.compute_loss

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options)
        bad = self.model.training and self.state.global_step >= 3
        return result * torch.nan if bad and not isinstance(result, tuple) else result

    monkeypatch.setattr(SFTTrainer, "compute_loss", broken)
    report = train_sft(path, "cut", SFTSettings(model=model, epochs=2, max_length=128, lora_r=4, evaluations=9))
    assert report.stopped is not None
    assert "was not a finite number at step 4" in report.stopped
    assert report.best_step == 3
    assert np.isfinite(find_weights(report.path)).all()
    with pytest.raises(ModelError, match="lower learning_rate"):
        train_sft(path, "none", SFTSettings(model=model, epochs=1, max_length=128, lora_r=4, evaluations=1))


def find_weights(path: Path) -> np.ndarray:
    from safetensors.numpy import load_file

    return np.concatenate([value.ravel() for value in load_file(str(path / "adapter_model.safetensors")).values()])


def test_missing_checkpoint_and_too_long_rows_are_reported(model_name: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [row(at) for at in range(4)])
    with pytest.raises(ConfigError, match="nothing to resume"):
        train_sft(path, "x", SFTSettings(), resume=True)
    with pytest.raises(DataError, match="of more than 16 tokens"):
        train_sft(path, "x", SFTSettings(max_length=16))
    with pytest.raises(ModelError, match="cannot be loaded for training"):
        train_sft(path, "x", SFTSettings(model=str(tmp_path / "no-model")))
    assert list_adapters() == []


def test_spellings_of_a_held_out_task_are_held_out(tmp_path: Path) -> None:
    rows = [
        {**row(at), "task": f"{at}{spelling}", "prompt": [{"role": "user", "content": text}]}
        for at in range(20)
        for spelling, text in (("a", f"How far is town {at}?"), ("b", f"how far is TOWN {at}? "))
    ]
    data = read(tmp_path, rows, eval_fraction=0.2)
    train, held_out = (
        {part["prompt"][0]["content"].lower().strip() for part in parts} for parts in (data.train, data.held_out)
    )
    assert not train & held_out
    assert (data.tasks, len(data.held_out)) == (20, 8)


@pytest.mark.parametrize(
    ("categories", "more"),
    [
        (["math", "code"], {}),
        ([f"kind {at}" for at in range(40)], {}),
        (["math", "code"], {"rollout": 3}),
        (["math", "code"], {"rollout": "r1", "split": "train"}),
    ],
    ids=["two", "forty", "beside a rollout", "beside a rollout and a split"],
)
def test_column_task_of_other_files_holds_out_no_category(tmp_path: Path, categories: list[str], more: Any) -> None:
    rows = [row(at, task=categories[at % len(categories)], **more) for at in range(200)]
    data = read(tmp_path, rows)
    assert (data.tasks, data.held_out_tasks, len(data.held_out), data.unused_ids) == (200, 20, 20, len(categories))
    learned = {rows[int(part["prompt"][0]["content"].split()[3])]["task"] for part in data.train}
    assert learned == set(categories)


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                               {"from": "gpt", "value": "a"}]},
            [said("system", "s"), said("user", "q"), said("assistant", "a")],
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0},
                               {"from": "human", "value": "r"}, {"from": "gpt", "value": "b"}], "system": "s"},
            [said("system", "s"), said("user", "q"), said("assistant", "a", weight=0), said("user", "r"),
             said("assistant", "b")],
        ),
        ({"conversations": [said("user", "q"), said("assistant", "a")]}, [said("user", "q"), said("assistant", "a")]),
        ({"messages": [said("user", "q"), said("assistant", "a")], "system": "s"},
         [said("system", "s"), said("user", "q"), said("assistant", "a")]),
        ({"prompt": [said("user", "q")], "completion": [said("assistant", "a")], "system": "s"},
         [said("system", "s"), said("user", "q"), said("assistant", "a")]),
        ({"instruction": "i", "input": "x", "output": "a", "system": ""},
         [said("user", "i\n\nx"), said("assistant", "a")]),
        ({"instruction": "i", "input": "", "output": "a", "text": "B"}, [said("user", "i"), said("assistant", "a")]),
        ({"instruction": "i", "output": "a", "system": "s"},
         [said("system", "s"), said("user", "i"), said("assistant", "a")]),
    ],
)  # fmt: skip
def test_common_formats_of_peoples_files_are_read(
    tmp_path: Path, given: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    data = read(tmp_path, [given], eval_fraction=0)
    assert [[*row["prompt"], *row["completion"]] for row in data.train] == [messages]


@pytest.mark.parametrize(
    "given",
    [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{}"}]},
        {"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "a"}]},
        {"conversations": []},
        {"instruction": "i", "input": ["x"], "output": "a"},
        {"instruction": "i", "output": "a", "history": [["q", "a"]]},
        {"instruction": "i", "context": "c", "response": "a"},
        {"messages": [{"role": None, "content": "q"}, said("assistant", "a")]},
        {"messages": [{"role": "user", "content": 3}, said("assistant", "a")]},
        {"text": "q"},
    ],
)
def test_rows_that_would_lose_something_are_refused_by_line(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"d\.jsonl:1: "):
        read(tmp_path, [given], eval_fraction=0)


def test_prompts_of_one_exported_task_are_held_out_together(tmp_path: Path) -> None:
    rows = [row(at, task=f"t{at // 4}", rollout=f"r{at // 4}", t=at % 4) for at in range(80)]
    data = read(tmp_path, rows)
    assert (data.tasks, data.held_out_tasks, len(data.held_out), data.unused_ids) == (20, 2, 8, 0)
