"""Supervised fine-tuning: LoRA on the answers of good traces with TRL's SFTTrainer.

Keeps the checkpoint with the lowest loss on held-out tasks.
"""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import Cancelled, ConfigError, DataError, ModelError
from assay.evaluation.progress import Progress, default_progress
from assay.models.chat_templates import template_of_tokenizer
from assay.models.lora import find_adapter, served_as
from assay.optimizers.finetuning.base import Policy, fast_bf16, lean_head, load_policy, lora_of, quiet
from assay.optimizers.finetuning.data import TrainingData, completion_row, conversation_rows, read_sft, trained_turns
from assay.optimizers.finetuning.report import SFTReport
from assay.optimizers.finetuning.run_folder import (
    SFT_MEMORY,
    from_first,
    keep_trained,
    last_good,
    model_path,
    rank,
    ready,
    stoppable,
    training_folder,
    training_id,
    working_folder,
    world,
)
from assay.optimizers.finetuning.settings import SFTSettings
from assay.reports.training import TrainingLog
from assay.support.numbers import counted
from assay.support.values import json_value
from assay.traces.export.rendering import RowRenderer

# -- Loss curves of supervised fine-tuning, the alarms they raise, and the end at a loss that is not finite.


_RISEN = 2  # consecutive evaluations above the lowest held-out loss before an alarm


@dataclass(kw_only=True)
class LossMonitor:
    """Collects the losses. Stops training at a signal or at a loss that is not finite.

    Attributes:
        loss, held_out: mean negative log-likelihood of a completion's token, by step.
        advance: called with the number of steps done.
        log: gets every loss and alarm as it comes.
        alarms: texts by name; each is raised once and names a remedy.
    """

    loss: dict[int, float]
    held_out: dict[int, float]
    stop: threading.Event
    advance: Callable[[int], Any]
    log: TrainingLog | None = None
    alarms: dict[str, str] = field(default_factory=dict)
    diverged: bool = False

    def callback(self) -> Any:
        """The callback for the trainer."""
        from transformers import TrainerCallback

        from assay.optimizers.finetuning.trl_trainer import over_ranks

        monitor = self

        class Callback(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                monitor.advance(state.global_step)
                if monitor.log is not None:
                    monitor.log.begin(state.max_steps)
                for logged in state.log_history:
                    monitor.record(logged)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                monitor.advance(1)
                if any(over_ranks([monitor.stop.is_set()])):
                    control.should_save = control.should_training_stop = True

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                monitor.record({**(logs or {}), "step": state.global_step})
                if monitor.diverged:
                    control.should_training_stop, control.should_save = True, False

        return Callback()

    def record(self, logged: Mapping[str, Any]) -> None:
        """Adds the losses of an entry of the trainer's log."""
        step, values = int(logged["step"]), {}
        for key, curve, name in (("loss", self.loss, "training"), ("eval_loss", self.held_out, "held_out")):
            if key in logged:
                value = float(logged[key])
                self.diverged = self.diverged or not math.isfinite(value)
                if math.isfinite(value):
                    curve[step] = values[f"loss/{name}"] = value
        if "loss/held_out" in values:
            for name, text in self._alarms().items():
                self.alarms.setdefault(name, f"step {step}: {text}")
        if self.log is not None and values:
            self.log.values(step, values, self.alarms)

    def _alarms(self) -> dict[str, str]:
        curve = sorted(self.held_out.items())
        (best, lowest), alarms = min(curve, key=lambda item: item[1]), dict[str, str]()
        last, first = curve[-1][1], curve[0]
        if len(curve) > _RISEN and first == (0, lowest):
            alarms["no_better"] = (
                f"no held-out loss is below the {lowest:.3f} before training: what is learned from these rows does "
                "not carry over to other tasks. Lower `learning_rate=…`, or give more tasks"
            )
        elif best and len([step for step, _ in curve if step > best]) >= _RISEN and last > lowest:
            alarms["overfitting"] = (
                f"the held-out loss rose from {lowest:.3f} at step {best} to {last:.3f}: overfitting. "
                "The weights with the lowest held-out loss are kept. Lower `epochs=…` or `learning_rate=…`, or "
                "give more rows"
            )
        return alarms


# -- Sft.


_PROMPTS = 4  # prompts whose greedy texts are compared between torch and llama.cpp
_MOST_ROWS = 4  # rows of a forward pass at most; the rest of a batch is accumulated


def train_sft(
    source: str | Path,
    name: str,
    config: SFTSettings,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    log: TrainingLog | None = None,
) -> SFTReport:
    """Trains an adapter on an export's rows and keeps it under `name`, to be served as `MODEL+NAME`.

    Writes no run to a store; `assay.train_sft` does.

    Checkpoints are in `.assay/training/NAME` until training ends; `resume` continues from the last one, with the same
    final weights. Of a training that has ended it returns the report.

    Args:
        log: of the run, for its page.
    Raises:
        DataError: the rows cannot be read, or are all too long.
        ConfigError: an adapter of this name exists, or there is nothing to resume.
        Cancelled: a signal came; a checkpoint was written.
        ModelError: the loss or its gradient was not finite before there was any checkpoint, or memory or disk ran out.
    """
    progress = default_progress(progress)
    data = read_sft(source, min_quality=config.min_quality, eval_fraction=config.eval_fraction, seed=config.seed)
    job = {**asdict(config), "data": data.sha256}
    made_from = {"model": model_path(config.model), "export": _folder(data)}
    ended = from_first(_ended(name, config, data) if resume and not rank() else None)
    if ended is not None:
        progress.say(f"the training has ended, and its adapter {name!r} is kept")
        return ended
    with working_folder(name, job, made_from=made_from, resume=resume) as work, ready(SFT_MEMORY):
        return _train(work, name, config, data, resume, progress, log)


def _ended(name: str, config: SFTSettings, data: TrainingData) -> SFTReport | None:
    """The report of the training with these settings and rows that has kept the adapter; None if none has."""
    if training_id(training_folder(name)) is not None:  # its folder is removed at its end
        return None
    try:
        adapter = find_adapter(name)
    except ModelError:
        return None
    if (made := adapter.made).get("data_sha256") != data.sha256 or made.get("config") != json_value(asdict(config)):
        return None
    report = SFTReport.read({**made, "name": served_as(adapter), "path": str(adapter.path)})
    report.config = config
    report.notes.append("resumed after the training: the served model is not compared with torch again")
    return report


def _training_rows(data: TrainingData, policy: Policy, config: SFTSettings) -> tuple[list[Any], list[Any]]:
    """Rows to train on and held-out rows that fit `max_length`."""
    train, evaluated = (
        fitting_rows(rows, policy, config.max_length, data.left_out) for rows in (data.train, data.held_out)
    )
    if not train:
        raise DataError(
            f"no row is left to train on: {dict(data.left_out)}. "
            "Raise `max_length`, or export shorter ones (`assay export sft --without-demos`)"
        )
    return train, evaluated


def _notes(data: TrainingData, evaluated: list[Any]) -> list[str]:
    notes = []
    if data.held_out_tasks:
        unused = (
            f" (by prompt, not by the {counted(data.unused_ids, 'values')} of the column 'task', "
            "which names tasks only in rows of an export)"
        )
        notes.append(
            f"held out for early stopping: {data.held_out_tasks} of {counted(data.tasks, 'tasks')}"
            f"{unused if data.unused_ids else ''}"
        )
    if not evaluated:
        notes.append("no held-out tasks, so there is no loss to choose a checkpoint by: the last weights are kept")
    if data.ungated:
        notes.append("the export did not pass its gates")
    return notes


def _train(
    work: Path,
    name: str,
    config: SFTSettings,
    data: TrainingData,
    resume: bool,
    progress: Progress,
    log: TrainingLog | None,
) -> SFTReport:
    from assay.optimizers.finetuning.trl_trainer import over_ranks

    progress.say(f"loading {config.model} …")
    policy = load_policy(config.model)
    train, evaluated = _training_rows(data, policy, config)
    report = SFTReport(
        None, work, config, rows=len(train), held_out_rows=len(evaluated), tasks=data.tasks, left_out=data.left_out
    )
    report.notes += _notes(data, evaluated)
    with (
        quiet(),
        lean_head(),
        stoppable() as stop,
        progress.bar(f"sft: {len(train)} rows", _steps(len(train), config)) as advance,
    ):
        loss_monitor = LossMonitor(loss=report.loss, held_out=report.held_out_loss, stop=stop, advance=advance, log=log)
        trainer = make_trainer(policy, train, evaluated, config, work / "checkpoints", loss_monitor.callback())
        checkpoint = resume and any((work / "checkpoints").glob("checkpoint-*"))
        trainer.train(resume_from_checkpoint=True if checkpoint else None)
    report.steps, report.alarms = trainer.state.global_step, list(loss_monitor.alarms.values())
    if any(over_ranks([stop.is_set()])):
        raise Cancelled(f"stopped at step {report.steps}, with a checkpoint in {work}")
    if loss_monitor.diverged:
        report.stopped, report.best_step = last_good(trainer, work, report.steps)
    else:
        best = trainer.state.best_model_checkpoint
        report.best_step = int(Path(best).name.rpartition("-")[2]) if best else report.steps
    keep_trained(
        report, trainer, policy, name, work, prompts=[row["prompt"] for row in (evaluated or train)[:_PROMPTS]],
        made_from={"data_sha256": data.sha256, "export": _folder(data)},
    )  # fmt: skip
    return report


def _folder(data: TrainingData) -> str | None:
    return str(data.folder.resolve()) if data.folder else None


def _steps(rows: int, config: SFTSettings) -> int:
    return math.ceil(rows / config.batch) * config.epochs


def fitting_rows(
    rows: Sequence[dict[str, Any]], policy: Policy, most: int, excluded: Counter[str]
) -> list[dict[str, Any]]:
    """Tokens and labels of rows of at most `most` tokens, with their prompt and completion.

    They are rendered for the model's chat template: tools as text if it ignores them. Longer rows are left out, not
    cut: the end of an answer must be learned too.
    """
    fitting, renderer = list[dict[str, Any]](), RowRenderer(template_of_tokenizer(policy.tokenizer))
    for row in rows:
        try:
            tools = row.get("tools")
            tools = (json.loads(tools) if isinstance(tools, str) else tools) or []
            if (reason := _unlearnable(row, tools, renderer)) is not None:
                excluded[f"that cannot be learned from: {reason}"] += 1
                continue
            prompt, completion, tools = renderer.written(row["prompt"], row["completion"], tools)
            parts = (
                list(conversation_rows([*prompt, *completion], tools, policy.tokenizer))
                if row.get("whole")
                else [completion_row(prompt, completion, tools, policy.tokenizer)]
            )
        except Exception as error:  # a template can raise any exception
            excluded[f"that the chat template refuses: {error}"[:200]] += 1
            continue
        short = [part for part in parts if len(part["input_ids"]) <= most]
        fitting += [{"prompt": prompt, "completion": completion, **part} for part in short]
        if long := len(parts) - len(short):
            excluded[f"of more than {most} tokens"] += long
    return fitting


def _unlearnable(row: dict[str, Any], tools: list[Any], renderer: RowRenderer) -> str | None:
    """Why a row (or one assistant turn of a whole conversation) cannot be trained on; None if it can."""
    messages = [*row["prompt"], *row["completion"]]
    turns = trained_turns(messages) if row.get("whole") else []
    pairs = [(messages[:at], [messages[at]]) for at in turns] or [(row["prompt"], row["completion"])]
    return next(
        (reason for prompt, completion in pairs if (reason := renderer.check(prompt, completion, tools)) is not None),
        None,
    )


def to_dataset(rows: list[dict[str, Any]]) -> Any:
    """The data set for TRL, which takes tokens and labels as they are."""
    from datasets import Dataset

    return Dataset.from_list([{name: row[name] for name in ("input_ids", "labels")} for row in rows])


def make_trainer(
    policy: Policy,
    train: list[dict[str, Any]],
    eval_rows: list[dict[str, Any]],
    config: SFTSettings,
    out: Path,
    callback: Any,
) -> Any:
    import torch
    from transformers import EarlyStoppingCallback, PrinterCallback
    from trl import SFTConfig as Arguments, SFTTrainer

    if config.batch % world():
        raise ConfigError(f"`batch={config.batch}` is not divisible among {world()} processes: use a multiple of it")
    share, cuda = config.batch // world(), torch.cuda.is_available()
    per_device = math.gcd(share, _MOST_ROWS)
    every = max(1, _steps(len(train), config) // config.evaluations)
    evaluated: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": every,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    evaluated |= {"greater_is_better": False, "eval_on_start": True}
    arguments = Arguments(
        output_dir=str(out), num_train_epochs=config.epochs, learning_rate=config.learning_rate, seed=config.seed,
        report_to=config.report_to,
        per_device_train_batch_size=per_device, per_device_eval_batch_size=per_device,
        gradient_accumulation_steps=share // per_device,
        max_length=config.max_length, logging_steps=1, logging_nan_inf_filter=False, max_grad_norm=1.0,
        lr_scheduler_type="cosine", warmup_steps=0.05,
        save_strategy="steps", save_steps=every, save_total_limit=2, bf16=fast_bf16(), use_cpu=not cuda,
        gradient_checkpointing=cuda, disable_tqdm=True, **(evaluated if eval_rows else {}),
    )  # fmt: skip
    patience = [EarlyStoppingCallback(early_stopping_patience=config.patience)] if eval_rows else []
    trainer = SFTTrainer(
        model=policy.model,
        args=arguments,
        train_dataset=to_dataset(train),
        eval_dataset=to_dataset(eval_rows) if eval_rows else None,
        processing_class=policy.tokenizer,
        peft_config=lora_of(config.lora_r),
        callbacks=[callback, *patience],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
