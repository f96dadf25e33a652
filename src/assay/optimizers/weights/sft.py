"""The warm-up: LoRA on the answers of good traces, by TRL's SFTTrainer, to the checkpoint that held-out tasks like best."""

import json
import math
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import Cancelled, ConfigError, DataError
from assay.models.adapters import keep_adapter, served_as
from assay.models.chattemplates import template_of_tokenizer
from assay.optimizers.session import Progress
from assay.optimizers.weights.base import Policy, fast_bf16, lean_head, load_policy, lora_of, quiet, tokenizer_sha
from assay.optimizers.weights.config import SFTConfig
from assay.optimizers.weights.data import TrainingData, read_sft
from assay.optimizers.weights.labels import completion_row, conversation_rows
from assay.optimizers.weights.work import last_good, rank, ready, save_adapter, stoppable, told_agreement, training_id, working_folder, world
from assay.reprs import Shown
from assay.traces.rendering import RowRenderer

__all__ = ["SFTReport", "train_sft"]

_PROMPTS = 4  # whose greedy texts are compared between torch and llama.cpp
_MICRO = 4  # rows of a forward pass at most; the rest of a batch is accumulated


@dataclass(repr=False)
class SFTReport(Shown):
    """What `train_sft` did. `name` is the model to serve (None where the base is none of ours: `path` then holds PEFT's folder).

    `loss` and `held_out_loss` are mean negative log-likelihoods a completion token, by step; `agreement` is the share of held-out
    prompts that torch and the served GGUF continue with the same greedy text.
    """

    name: str | None
    path: Path
    config: SFTConfig
    rows: int
    held_out_rows: int
    tasks: int
    left_out: Counter[str]
    steps: int
    loss: dict[int, float] = field(default_factory=dict)
    held_out_loss: dict[int, float] = field(default_factory=dict)
    best_step: int | None = None
    agreement: float | None = None
    stopped: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "left_out": dict(self.left_out)}


def train_sft(source: str | Path, name: str, config: SFTConfig, *, resume: bool = False, progress: Progress | None = None) -> SFTReport:
    """Trains an adapter on an export's rows and keeps it under `name`, to be served as `MODEL+NAME`.

    Checkpoints lie in `.assay/training/NAME` until it is done; `resume` continues from the last one, to the same weights.

    Raises:
        DataError: the rows cannot be read, or are all too long.
        ConfigError: there is an adapter of this name, or nothing to resume.
        Cancelled: a signal came; a checkpoint was written.
        ModelError: the loss was no number before there was any checkpoint, or memory or disk ran out.
    """
    shown = progress or Progress()
    data = read_sft(source, min_quality=config.min_quality, held_out=config.held_out, seed=config.seed)
    with working_folder(name, {**asdict(config), "data": data.sha256}, resume=resume) as work, ready():
        return _train(work, name, config, data, resume, shown)


def _train(work: Path, name: str, config: SFTConfig, data: TrainingData, resume: bool, shown: Progress) -> SFTReport:
    from assay.optimizers.weights.trainer import over_ranks

    shown.say(f"loading {config.model} …")
    policy = load_policy(config.model)
    train, held_out = (_fitting(rows, policy, config.max_length, data.left_out) for rows in (data.train, data.held_out))
    if any("labels" in row for row in (*train, *held_out)):
        train, held_out = _alike(train, policy), _alike(held_out, policy)
    if not train:
        raise DataError(f"no row is left to train on: {dict(data.left_out)}. Raise --max-length, or export shorter ones (--without-demos)")
    report = SFTReport(None, work, config, len(train), len(held_out), data.tasks, data.left_out, 0)
    if not held_out:
        report.notes.append("one task alone, or none held out: nothing says when to stop, and the last weights are taken")
    if data.ungated:
        report.notes.append("the export did not pass its gates")
    with quiet(), lean_head(), stoppable() as stop, shown.bar(f"sft: {len(train)} rows", _steps(len(train), config)) as advance:
        watch = _Watch(report, stop, advance)
        trainer = _trainer(policy, train, held_out, config, work / "checkpoints", watch.callback())
        checkpoint = resume and any((work / "checkpoints").glob("checkpoint-*"))
        trainer.train(resume_from_checkpoint=True if checkpoint else None)
    report.steps = trainer.state.global_step
    if any(over_ranks([stop.is_set()])):
        raise Cancelled(f"stopped at step {report.steps}, with a checkpoint in {work}")
    if watch.diverged:
        report.stopped, report.best_step = last_good(trainer, work, report.steps)
    else:
        best = trainer.state.best_model_checkpoint
        report.best_step = int(Path(best).name.rpartition("-")[2]) if best else report.steps
    kept = report.path = work / "adapter"
    save_adapter(trainer, kept)
    if rank():
        return report
    made = {
        **report.to_dict(),
        "data_sha256": data.sha256,
        "export": str(data.folder.resolve()) if data.folder else None,
        "tokenizer_sha256": tokenizer_sha(policy.tokenizer),
        "training": training_id(work),
    }
    if policy.embedded is None:
        report.notes.append(f"{config.model} is no embedded model: the adapter stays in PEFT's form, for vLLM or transformers")
        return report
    adapter = keep_adapter(name, kept, base=policy.embedded, after=policy.merged, made=made)
    report.name, report.path = served_as(adapter), adapter.path
    prompts = [row["prompt"] for row in (held_out or train)[:_PROMPTS]]
    report.agreement = told_agreement(trainer, policy, adapter, prompts, report.notes)
    shutil.rmtree(work, ignore_errors=True)
    return report


def _steps(rows: int, config: SFTConfig) -> int:
    return math.ceil(rows / config.batch) * config.epochs


def _fitting(rows: Sequence[dict[str, Any]], policy: Policy, most: int, left: Counter[str]) -> list[dict[str, Any]]:
    """Rows of at most so many tokens, in the form that the model's chat template shows: tools in text where it ignores them. Whole
    conversations have their tokens and labels with them.

    None is cut, since the end of an answer is what is to be learned.
    """
    found, renderer = list[dict[str, Any]](), RowRenderer(template_of_tokenizer(policy.tokenizer))
    for row in rows:
        try:
            tools = row.get("tools")
            tools = (json.loads(tools) if isinstance(tools, str) else tools) or []
            if (reason := _unlearnable(row, tools, renderer)) is not None:
                left[f"that cannot be learned from: {reason}"] += 1
                continue
            said, tools = renderer.messages([*row["prompt"], *row["completion"]], tools), renderer.tools(tools)
            at = len(said) - len(row["completion"])
            row = {**row, "prompt": said[:at], "completion": said[at:], "tools": json.dumps(tools or None, ensure_ascii=False)}
            if row.get("whole"):
                parts = [{**row, **tokens} for tokens in conversation_rows(said, tools, policy.tokenizer)]
                lengths = [len(part["input_ids"]) for part in parts]
            else:
                ids = policy.tokenizer.apply_chat_template(said, tools=tools or None, tokenize=True, return_dict=True)["input_ids"]
                parts, lengths = [row], [len(ids)]
        except Exception as error:  # templates are programs, and refuse in ways of their own
            left[f"that the chat template refuses: {error}"[:200]] += 1
            continue
        found += [part for part, length in zip(parts, lengths, strict=True) if length <= most]
        if long := sum(length > most for length in lengths):
            left[f"of more than {most} tokens"] += long
    return found


def _unlearnable(row: dict[str, Any], tools: list[Any], renderer: RowRenderer) -> str | None:
    """Why a model cannot be trained on a row: of a whole conversation, why on one of the assistant's turns."""
    said = [*row["prompt"], *row["completion"]]
    turns = [at for at, message in enumerate(said) if at and message["role"] == "assistant"] if row.get("whole") else []
    asked = [(said[:at], [said[at]]) for at in turns] or [(row["prompt"], row["completion"])]
    return next((reason for prompt, completion in asked if (reason := renderer.check(prompt, completion, tools)) is not None), None)


def _alike(rows: Sequence[dict[str, Any]], policy: Policy) -> list[dict[str, Any]]:
    """Rows that all have tokens and labels, for where some have: TRL takes a data set of one form."""
    return [row if "labels" in row else {**row, **completion_row(row["prompt"], row["completion"], json.loads(row["tools"]) or [], policy.tokenizer)}
            for row in rows]  # fmt: skip


def _dataset(rows: list[dict[str, Any]]) -> Any:
    """Rows as TRL reads them. Messages stay JSON: as Arrow structs each tool call would get the arguments of all others, as null."""
    from datasets import Dataset

    if rows and "labels" in rows[0]:
        return Dataset.from_list([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
    return Dataset.from_list(rows, on_mixed_types="use_json")


def _trainer(policy: Policy, train: list[dict[str, Any]], held_out: list[dict[str, Any]], config: SFTConfig, out: Path, callback: Any) -> Any:
    import torch
    from transformers import EarlyStoppingCallback, PrinterCallback
    from trl import SFTConfig as Arguments
    from trl import SFTTrainer

    if config.batch % world():
        raise ConfigError(f"batch={config.batch} cannot be shared out to {world()} processes: give a multiple")
    share, cuda = config.batch // world(), torch.cuda.is_available()
    micro = math.gcd(share, _MICRO)
    every = max(1, _steps(len(train), config) // config.evaluations)
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": every, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    evaluated |= {"greater_is_better": False, "eval_on_start": True}
    arguments = Arguments(
        output_dir=str(out), num_train_epochs=config.epochs, learning_rate=config.learning_rate, seed=config.seed, report_to=config.report_to,
        per_device_train_batch_size=micro, per_device_eval_batch_size=micro, gradient_accumulation_steps=share // micro,
        max_length=config.max_length, logging_steps=1, logging_nan_inf_filter=False, max_grad_norm=1.0, lr_scheduler_type="cosine", warmup_steps=0.05,
        save_strategy="steps", save_steps=every, save_total_limit=2, bf16=fast_bf16(), use_cpu=not cuda,
        gradient_checkpointing=cuda, disable_tqdm=True, **(evaluated if held_out else {}),
    )  # fmt: skip
    patience = [EarlyStoppingCallback(early_stopping_patience=config.patience)] if held_out else []
    trainer = SFTTrainer(
        model=policy.model, args=arguments, train_dataset=_dataset(train), eval_dataset=_dataset(held_out) if held_out else None,
        processing_class=policy.tokenizer, peft_config=lora_of(config.rank), callbacks=[callback, *patience],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


class _Watch:
    """Tells what happens, and stops for a signal or a loss that is no number."""

    def __init__(self, report: SFTReport, stop: threading.Event, advance: Any) -> None:
        self.report, self.stop, self.advance, self.diverged = report, stop, advance, False

    def callback(self) -> Any:
        from transformers import TrainerCallback

        from assay.optimizers.weights.trainer import over_ranks

        watch = self

        class Callback(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch.advance(state.global_step)
                for logged in state.log_history:
                    watch.see(logged)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch.advance(1)
                if any(over_ranks([watch.stop.is_set()])):
                    control.should_save = control.should_training_stop = True

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                watch.see({**(logs or {}), "step": state.global_step})
                if watch.diverged:
                    control.should_training_stop, control.should_save = True, False

        return Callback()

    def see(self, logged: dict[str, Any]) -> None:
        for key, curve in (("loss", self.report.loss), ("eval_loss", self.report.held_out_loss)):
            if key in logged:
                value = float(logged[key])
                self.diverged = self.diverged or not math.isfinite(value)
                if math.isfinite(value):
                    curve[int(logged["step"])] = value
