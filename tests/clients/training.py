"""Trains TRL on recorded client rollouts, exported and rendered as `assay export sft` and `assay train sft` do."""

import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from client_table import Row
from harness import Client

import assay
from assay.traces.export.settings import Gates

LOOSE = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)


def check_rows(store: Path, model: Path, rows: Sequence[Row], modes: Mapping[str, str], client: Client) -> None:
    """Reports in each row whether its rollouts, with the expected calls and conversations, yield rows with a TRL loss.

    Each call is a row for a model whose chat template renders tools (Qwen3's); whole conversations are rows for one
    whose template ignores them. Then the model takes a step.
    """
    qwen = with_template(model, store.parent / "qwen3")
    problems: dict[str, list[str]] = defaultdict(list)
    for name, folder in (("calls", qwen), ("conversations", model)):
        learned = learned_texts(store, store.parent / f"sft-{name}", folder, whole=name == "conversations")
        for rollout, mode in modes.items():
            expected = len(client.at(mode).outputs) if name == "calls" else client.at(mode).conversations
            if len(learned.get(rollout, ())) != expected:
                problems[mode].append(f"{len(learned.get(rollout, ()))} rows of {name}, not {expected}")
            problems[mode] += [
                f"a row of {name} teaches {text!r}"
                for text in learned.get(rollout, ())
                if not text.replace("<|im_end|>", "").strip()
            ]
    for row in rows:
        row.check("trainable", problems[row.mode] if row.mode in modes.values() else ["no rollout to train on"])


def with_template(model: Path, folder: Path) -> Path:
    """The model with the chat template of Qwen3 that TRL ships for training."""
    import trl
    from transformers import AutoTokenizer

    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return folder


def learned_texts(store: Path, out: Path, model: Path, *, whole: bool) -> dict[str, list[str]]:
    """Texts with a loss, by rollout, after a training step on one of them. Some contain a library's full prompt."""
    import orjson

    with assay.Store(store) as opened:
        opened.flush()
    assay.export("sft", out, store=store, gates=LOOSE, privacy="off", model=str(model), whole=whole)
    rollouts = [orjson.loads(line)["rollout"] for line in (out / "data.jsonl").read_bytes().splitlines()]
    trainer = conversations_trainer(out, model) if whole else calls_trainer(out, model)
    tokenizer = trainer.processing_class
    texts = [tokenizer.decode([token for token in row["labels"] if token != -100]) for row in trainer.train_dataset]
    assert len(texts) == len(rollouts)
    trainer.args.max_steps = 1
    trainer.train()
    texts_by_rollout: dict[str, list[str]] = defaultdict(list)
    for rollout, text in zip(rollouts, texts, strict=True):
        texts_by_rollout[rollout].append(text)
    return texts_by_rollout


def calls_trainer(export: Path, model: Path) -> Any:
    """The trainer that `assay train sft` builds."""
    from transformers import TrainerCallback

    from assay.optimizers.finetuning.base import load_policy
    from assay.optimizers.finetuning.data import read_sft
    from assay.optimizers.finetuning.settings import SFTSettings
    from assay.optimizers.finetuning.sft import fitting_rows, make_trainer

    config = SFTSettings(model=str(model), epochs=1, batch=1, max_length=100_000, eval_fraction=0.0, lora_r=1)
    policy, left = load_policy(str(model)), Counter[str]()
    data = read_sft(export, min_quality=0.8, eval_fraction=0.0, seed=0)
    rows = fitting_rows(data.train, policy, config.max_length, left)
    assert not left + data.left_out
    return make_trainer(policy, rows, [], config, export.parent / "trained", TrainerCallback())


def conversations_trainer(export: Path, model: Path) -> Any:
    """A trainer of TRL with the settings of the export."""
    import yaml
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    config = yaml.safe_load((export / "sft.yaml").read_text())
    rows = load_dataset(
        "json", data_files=str(export / "data.jsonl"), split="train", cache_dir=str(export.parent / "cache")
    )
    arguments = SFTConfig(
        output_dir=str(export.parent / "trained-whole"),
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_length=None,
        per_device_train_batch_size=1,
        assistant_only_loss=config["assistant_only_loss"],
        chat_template_path=str(export / config["chat_template_path"]),
        disable_tqdm=True,
    )
    return SFTTrainer(
        model=str(model), args=arguments, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(model)
    )
