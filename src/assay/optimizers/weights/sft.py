"""The warm-up: LoRA on the completions of good traces, by TRL's SFTTrainer, to the checkpoint that held-out tasks like best."""

import errno
import json
import math
import shutil
import signal
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from assay.errors import Cancelled, ConfigError, DataError, MissingExtra, ModelError
from assay.models.adapters import Adapter, adapter_home, check_name, keep_adapter, served_as
from assay.models.embedded import server_url
from assay.optimizers.session import Progress
from assay.optimizers.weights.base import Policy, load_policy, quiet, tokenizer_sha
from assay.optimizers.weights.config import SFTConfig
from assay.optimizers.weights.data import TrainingData, read_sft

__all__ = ["SFTReport", "train_sft"]

_PROMPTS = 4  # whose greedy texts are compared between torch and llama.cpp
_TOKENS = 32
_MICRO = 4  # rows of a forward pass at most; the rest of a batch is accumulated


@dataclass
class SFTReport:
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

    Checkpoints lie in `.assay/training/NAME` until it is done; `resume` goes on from the last one, to the same weights.

    Raises:
        DataError: the rows cannot be read, or are all too long.
        ConfigError: there is an adapter of this name, or nothing to resume.
        Cancelled: a signal came; a checkpoint was written.
        ModelError: the loss was no number before there was any checkpoint, or memory or disk ran out.
    """
    shown = progress or Progress()
    if (adapter_home() / check_name(name)).exists():
        raise ConfigError(f"there is an adapter {name!r} in {adapter_home()}: take another name, or remove that one")
    data = read_sft(source, min_quality=config.min_quality, held_out=config.held_out, seed=config.seed)
    job = {**asdict(config), "data": data.sha256}
    work = adapter_home().parent / "training" / name
    work.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{work}.lock", timeout=0):
            _prepare(work, job, resume)
            return _train(work, name, config, data, resume, shown)
    except Timeout:
        raise ConfigError(f"another process is training {name!r}; wait for it, or take another name") from None


def _prepare(work: Path, job: dict[str, Any], resume: bool) -> None:
    told = work / "job.json"
    if resume:
        if not told.exists():
            raise ConfigError(f"there is nothing to resume in {work}: leave --resume out")
        before = json.loads(told.read_text(encoding="utf-8"))
        if changed := sorted(key for key in job if before.get(key) != job[key]):
            raise ConfigError(f"what was begun in {work} had another {', '.join(changed)}: resume with the same, or begin anew without --resume")
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    told.write_text(json.dumps(job), encoding="utf-8")


def _train(work: Path, name: str, config: SFTConfig, data: TrainingData, resume: bool, shown: Progress) -> SFTReport:
    shown.say(f"loading {config.model} …")
    policy = load_policy(config.model)
    train, held_out = (_fitting(rows, policy, config.max_length, data.left_out) for rows in (data.train, data.held_out))
    if not train:
        raise DataError(f"no row is left to train on: {dict(data.left_out)}. Raise --max-length, or export shorter ones (--without-demos)")
    report = SFTReport(None, work, config, len(train), len(held_out), data.tasks, data.left_out, 0)
    if not held_out:
        report.notes.append("one task alone, or none held out: nothing says when to stop, and the last weights are taken")
    if data.ungated:
        report.notes.append("the export did not pass its gates")
    with quiet(), _ready(), _stoppable() as stop, shown.bar(f"sft: {len(train)} rows", _steps(len(train), config)) as advance:
        watch = _Watch(report, stop, advance)
        trainer = _trainer(policy, train, held_out, config, work / "checkpoints", watch.callback())
        checkpoint = resume and any((work / "checkpoints").glob("checkpoint-*"))
        trainer.train(resume_from_checkpoint=True if checkpoint else None)
    report.steps = trainer.state.global_step
    if stop.is_set():
        raise Cancelled(f"stopped at step {report.steps}, with a checkpoint in {work}")
    if watch.diverged:
        _back_to_the_last_good(trainer, work, report)
    best = trainer.state.best_model_checkpoint
    report.best_step = int(Path(best).name.rpartition("-")[2]) if best else report.steps
    kept = work / "adapter"
    trainer.save_model(str(kept))
    made = {**report.to_dict(), "data_sha256": data.sha256, "tokenizer_sha256": tokenizer_sha(policy.tokenizer)}
    if policy.embedded is None:
        report.path = kept
        report.notes.append(f"{config.model} is no embedded model: the adapter stays in PEFT's form, for vLLM or transformers")
        return report
    adapter = keep_adapter(name, kept, base=policy.embedded, after=policy.merged, made=made)
    report.name, report.path = served_as(adapter), adapter.path
    report.agreement = _agreement(trainer, policy, adapter, (held_out or train)[:_PROMPTS])
    shutil.rmtree(work, ignore_errors=True)
    return report


def _steps(rows: int, config: SFTConfig) -> int:
    return math.ceil(rows / config.batch) * config.epochs


def _fitting(rows: Sequence[dict[str, Any]], policy: Policy, most: int, left: Counter[str]) -> list[dict[str, Any]]:
    """Rows of at most so many tokens; none is cut, since the end of an answer is what is to be learned."""
    found = []
    for row in rows:
        try:
            ids = policy.tokenizer.apply_chat_template([*row["prompt"], *row["completion"]], tokenize=True, return_dict=True)["input_ids"]
        except Exception as error:  # templates are programs, and refuse in ways of their own
            left[f"that the chat template refuses: {error}"[:200]] += 1
            continue
        if len(ids) > most:
            left[f"of more than {most} tokens"] += 1
        else:
            found.append(row)
    return found


def _trainer(policy: Policy, train: list[dict[str, Any]], held_out: list[dict[str, Any]], config: SFTConfig, out: Path, callback: Any) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import EarlyStoppingCallback, PrinterCallback
    from trl import SFTConfig as Arguments
    from trl import SFTTrainer

    micro, cuda = math.gcd(config.batch, _MICRO), torch.cuda.is_available()
    every = max(1, _steps(len(train), config) // config.evaluations)
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": every, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    evaluated |= {"greater_is_better": False, "eval_on_start": True}
    arguments = Arguments(
        output_dir=str(out), num_train_epochs=config.epochs, learning_rate=config.learning_rate, seed=config.seed, report_to=config.report_to,
        per_device_train_batch_size=micro, per_device_eval_batch_size=micro, gradient_accumulation_steps=config.batch // micro,
        max_length=config.max_length, logging_steps=1, logging_nan_inf_filter=False, max_grad_norm=1.0, lr_scheduler_type="cosine", warmup_steps=0.05,
        save_strategy="steps", save_steps=every, save_total_limit=2, bf16=cuda and torch.cuda.is_bf16_supported(), use_cpu=not cuda,
        gradient_checkpointing=cuda, disable_tqdm=True, **(evaluated if held_out else {}),
    )  # fmt: skip
    lora = LoraConfig(r=config.rank, lora_alpha=2 * config.rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    patience = [EarlyStoppingCallback(early_stopping_patience=config.patience)] if held_out else []
    trainer = SFTTrainer(
        model=policy.model, args=arguments, train_dataset=Dataset.from_list(train), eval_dataset=Dataset.from_list(held_out) if held_out else None,
        processing_class=policy.tokenizer, peft_config=lora, callbacks=[callback, *patience],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


class _Watch:
    """Tells what happens, and stops for a signal or a loss that is no number."""

    def __init__(self, report: SFTReport, stop: threading.Event, advance: Any) -> None:
        self.report, self.stop, self.advance, self.diverged = report, stop, advance, False

    def callback(self) -> Any:
        from transformers import TrainerCallback

        watch = self

        class Callback(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch.advance(state.global_step)
                for logged in state.log_history:
                    watch.see(logged)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch.advance(1)
                if watch.stop.is_set():
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


def _back_to_the_last_good(trainer: Any, work: Path, report: SFTReport) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    found = sorted((work / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not found:
        raise ModelError(f"the loss was no number at step {report.steps}, before any checkpoint: lower --learning-rate")
    good = Path(trainer.state.best_model_checkpoint or found[-1])
    set_peft_model_state_dict(trainer.model, load_file(str(good / "adapter_model.safetensors")))
    report.stopped = f"the loss was no number at step {report.steps}; the weights are those of {good.name}. A lower --learning-rate may go on"


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """Signals that would kill are an event meanwhile; the trainer looks at it after every step."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {kind: signal.signal(kind, lambda *_: stop.set()) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def _ready() -> Iterator[None]:
    """Says which knob to turn where memory or disk run out."""
    try:
        import peft  # noqa: F401
        import trl  # noqa: F401
    except ImportError as error:
        raise MissingExtra(str(error.name), "train") from error
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        text = str(error)
        if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text.lower():
            raise ModelError("memory ran out: lower --max-length first, then --batch or --rank") from error
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ModelError(f"the disk is full: {text}. The last whole checkpoint stands; make room and add --resume") from error
        raise


def _agreement(trainer: Any, policy: Policy, adapter: Adapter, rows: Sequence[dict[str, Any]]) -> float:
    """The share of prompts that the trained model in torch and the served one continue alike, greedily."""
    import torch

    url, same = server_url(served_as(adapter)), 0
    model = trainer.model.eval()
    for row in rows:
        ids = policy.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True).to(model.device)
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=_TOKENS, do_sample=False, pad_token_id=policy.tokenizer.pad_token_id)
        ours = policy.tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        body = {"messages": row["prompt"], "temperature": 0.0, "max_tokens": _TOKENS}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            theirs = json.load(answer)["choices"][0]["message"]["content"]
        same += ours.strip() == (theirs or "").strip()
    return same / len(rows)
