"""The working folder of a training: lock, signals, out-of-memory and disk errors, check of the served adapter.

Shared by supervised fine-tuning and policy gradient training.
"""

import ctypes
import errno
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from assay.errors import AssayError, ConfigError, Diverged, MissingExtra, ModelError
from assay.models.embedded import LlamaBackend
from assay.models.lora import Adapter, adapter_home, keep_adapter, served_as
from assay.optimizers.finetuning.base import Policy, tokenizer_sha
from assay.support.names import check_name
from assay.support.places import check_claimable, claim_folder, remove_folder
from assay.support.values import json_value
from assay.traces.records import new_id

Messages = list[dict[str, Any]]
T = TypeVar("T")
_TOKENS = 32  # length of the greedy texts compared between torch and llama.cpp


def rank() -> int:
    """Rank of this process; 0 for the first one, and without distributed training."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """Number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_all() -> None:
    """Barrier over all processes that train together."""
    if world() > 1:
        _together().wait_for_everyone()


def from_first(value: T) -> T:
    """The value of the first of the processes that train together, in all of them; each must call this."""
    if world() == 1:
        return value
    from accelerate.utils import broadcast_object_list

    _together()
    values = [value]
    broadcast_object_list(values)
    return values[0]


def _together() -> Any:
    """The processes that train together, connected. Without a GPU accelerate connects only those that ask for CPUs."""
    import torch
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available())


def training_folder(name: str) -> Path:
    """The working folder of the training that makes the adapter `name`."""
    return adapter_home().parent / "training" / check_name(name, plain=True)


def model_path(model: str) -> str:
    """A model's name; of a folder its absolute path."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def check_free(name: str) -> None:
    """Raises ConfigError if an adapter of this name exists, or its working folder holds files of others."""
    check_claimable(training_folder(name), _job(name))
    if (adapter_home() / name).exists():
        raise ConfigError(f"there is an adapter {name!r} in {adapter_home()}: take another name, or remove that one")


def remove_training(name: str) -> None:
    """Removes the working folder of the training of an adapter."""
    remove_folder(training_folder(name), _job(name))


def remove_abandoned(name: str) -> None:
    """As `remove_training`. Raises ConfigError if a process is training it."""
    with _alone(name):
        remove_training(name)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Holds the file lock of a training."""
    work = training_folder(name)
    work.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{work}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"another process is training {name!r}; wait for it, or take another name") from None
    try:
        yield
    finally:
        lock.release()


def _job(name: str) -> str:
    return f"training {name}"


@contextmanager
def working_folder(
    name: str,
    job: Mapping[str, Any],
    *,
    made_from: Mapping[str, Any],
    resume: bool,
    last: str = "trainer_state.json",
) -> Iterator[Path]:
    """The working folder of the training that makes the adapter `name`, under a file lock.

    With `resume` the training continues from the newest complete checkpoint. Checkpoints left incomplete by a kill or a
    full disk are removed.

    Args:
        job: identifies the training; only the same job can be resumed.
        made_from: model, export and data subjects of the training, by which an erasure finds the folder.
        last: file of a checkpoint that is written last; a checkpoint without it is incomplete.
    Raises:
        ConfigError: an adapter of this name exists, another process trains it, there is nothing to resume, or the job
            differs.
    """
    work = training_folder(name)
    if rank():  # the first process holds the lock; the others wait until the folder is ready
        wait_for_all()
        if not (work / "job.json").is_file():
            raise ConfigError(
                f"{work} is not there on every machine: share one folder over all of them, "
                "and name it in ASSAY_ADAPTERS"
            )
        yield work
        return
    with _alone(name):
        if not (resume and (work / "job.json").exists()):
            check_free(name)
        _prepare(work, json_value(job, placeholders=True), made_from, resume, last)
        if (training := training_id(work)) is not None:  # kept by this training, but killed before its report
            remove_folder(adapter_home() / name, training)
        check_free(name)
        wait_for_all()
        yield work


def _prepare(work: Path, job: Mapping[str, Any], made_from: Mapping[str, Any], resume: bool, last: str) -> None:
    job_file = work / "job.json"
    if resume:
        if not job_file.exists():
            raise ConfigError(f"there is nothing to resume in {work}: leave `resume=True` out")
        before = json.loads(job_file.read_text(encoding="utf-8"))
        if changed := sorted(key for key in job if before.get(key) != job[key]):
            raise ConfigError(
                f"the training in {work} has another {', '.join(changed)}: "
                "resume with the same settings, or start again without `resume=True`"
            )
        for folder in (work / "checkpoints").glob("checkpoint-*"):
            try:
                json.loads((folder / last).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                remove_folder(folder, _job(work.name))
        for folder in work.glob("policy-*"):
            remove_folder(folder, _job(work.name))
        return
    claim_folder(work, _job(work.name))
    job_file.write_text(json.dumps({**job, "training": new_id(), "made_from": dict(made_from)}), encoding="utf-8")


def training_id(work: Path) -> str | None:
    """The id of the training in this folder; None if the folder has none."""
    try:
        training: str | None = json.loads((work / "job.json").read_text(encoding="utf-8")).get("training")
    except (OSError, ValueError):
        return None
    return training


def save_adapter(trainer: Any, folder: Path) -> None:
    """Writes the trained adapter with PEFT. Every process must call it: sharded weights are gathered."""
    # get_state_dict needs DeepSpeed's engine to gather sharded weights; PEFT cannot read them from it
    wrapped = getattr(trainer, "deepspeed", None) or trainer.model
    state = trainer.accelerator.get_state_dict(wrapped) if world() > 1 else None
    if not rank():
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(str(folder), state_dict=state)
    wait_for_all()


def last_good(trainer: Any, work: Path, step: int) -> tuple[str, int]:
    """Restores the last good checkpoint after a loss or gradient that was not finite.

    Returns:
        A message for the report, and the step of the checkpoint.
    Raises:
        Diverged: there is no checkpoint.
    """
    checkpoints = sorted(
        (work / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2])
    )
    if not checkpoints:
        raise Diverged(
            f"the loss or its gradient was not a finite number at step {step}, before any checkpoint: lower "
            "`learning_rate`"
        )
    checkpoint = Path(trainer.state.best_model_checkpoint or checkpoints[-1])
    restored(trainer.model, checkpoint)
    message = (
        f"the loss or its gradient was not a finite number at step {step}; the weights are those of {checkpoint.name}. "
        "A lower `learning_rate` may allow it to continue"
    )
    return message, int(checkpoint.name.rpartition("-")[2])


def restored(model: Any, folder: Path) -> None:
    """Puts an adapter's weights, as PEFT wrote them, into the model."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    sharded = [part for part in model.parameters() if part.requires_grad and hasattr(part, "ds_id")]  # by ZeRO-3
    with _gathered(sharded) if sharded else nullcontext():
        set_peft_model_state_dict(model, load_file(str(folder / "adapter_model.safetensors")))


def _gathered(parts: Sequence[Any]) -> AbstractContextManager[None]:
    """Inside: parameters gathered from DeepSpeed's shards. At exit those of the first process are sharded again."""
    import deepspeed

    gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(list(parts), modifier_rank=0)
    return gathered


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Inside: SIGINT and SIGTERM set the event, which the trainer checks after every step."""
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


SFT_MEMORY = "start a new run with `batch=2` or `batch=1`, then with a lower `max_length`, then with a lower `lora_r`"
POLICY_MEMORY = (
    "lower `per_device_batch_size`, which may change with `resume=True`; then start a new run with a lower "
    "`max_length`, then with a lower `lora_r`"
)


@contextmanager
def ready(less_memory: str) -> Iterator[None]:
    """Adds advice to errors where memory or disk ran out; frees the model. Raises MissingExtra without peft and trl.

    Args:
        less_memory: how a user makes this kind of training need less memory.
    """
    try:
        import peft  # noqa: F401
        import trl  # noqa: F401
    except ImportError as error:
        raise MissingExtra(str(error.name), "train") from error
    try:
        yield
    except AssayError:
        raise
    except Exception as error:  # safetensors and tokenizers raise their own types if a write fails
        match _ran_out(error) or _ran_out_by_text(error):
            case "memory":
                raise ModelError(f"memory ran out: {less_memory}") from error
            case "disk":
                raise ModelError(
                    f"the disk is full ({str(error)[:200]}). The last whole checkpoint is kept: "
                    "make room, and add `resume=True`"
                ) from error
        raise
    finally:
        gc.collect()  # trainer and model refer to each other: without it the next training would add its memory
        if sys.platform == "linux":  # glibc keeps what was freed, here 8 of 12 GB; after a step it is needed again
            with suppress(AttributeError):  # musl has no such function
                ctypes.CDLL(None).malloc_trim(0)


def _ran_out(error: Exception) -> str | None:
    """`memory` or `disk` if the error's class or errno says that it ran out."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "memory"
    number = error.errno if isinstance(error, OSError) else None
    return {errno.ENOMEM: "memory", errno.ENOSPC: "disk", errno.EDQUOT: "disk"}.get(number or 0)


def _ran_out_by_text(error: Exception) -> str | None:
    """The same, from the error's text.

    Neither class nor errno distinguishes these errors (torch 2.13, safetensors 0.8): torch's CPU allocator, its file
    writer and a CUDA context that cannot start raise a bare RuntimeError; SafetensorError and tokenizers have the
    system's error number in their text only. The text only selects the advice; the error is raised in any case.
    """
    from safetensors import SafetensorError

    if isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "out of memory" in str(error)):
        return "memory"
    if isinstance(error, RuntimeError) and "inline_container" in str(error) and "unexpected pos" in str(error):
        return "disk"
    from_rust = isinstance(error, SafetensorError) or type(error) is Exception  # tokenizers
    return "disk" if from_rust and f"os error {errno.ENOSPC}" in str(error) else None


def keep_trained(
    report: Any, trainer: Any, policy: Policy, name: str, work: Path, *, prompts: Sequence[Messages],
    made_from: Mapping[str, Any],
) -> None:  # fmt: skip
    """Keeps the trained adapter under its name, to be served, and compares it with torch.

    The adapter of a model that is not embedded stays in PEFT's folder. Every process must call it.

    Args:
        report: gets `name`, `path`, `agreement` and notes; is stored with the adapter.
        prompts: of which the greedy texts are compared.
        made_from: provenance that is stored with the adapter.
    """
    report.path = work / "adapter"
    save_adapter(trainer, report.path)
    if rank():
        return
    if policy.embedded is None:
        report.notes.append(
            f"{policy.name} is not an embedded model: the adapter stays in PEFT's format, for vLLM or transformers"
        )
        return
    origin = {
        **report.to_dict(), **made_from, "tokenizer_sha256": tokenizer_sha(policy.tokenizer),
        "training": training_id(work),
    }  # fmt: skip
    adapter = keep_adapter(name, report.path, base=policy.embedded, after=policy.merged, made=origin)
    report.name, report.path = served_as(adapter), adapter.path
    report.agreement = report_agreement(trainer, policy, adapter, prompts, report.notes)
    remove_training(name)


def report_agreement(
    trainer: Any, policy: Policy, adapter: Adapter, prompts: Sequence[Messages], notes: list[str]
) -> float | None:
    """Share of prompts, in [0, 1], that torch and the served model continue with the same greedy text.

    None without prompts, or with a note if the comparison failed: the adapter is kept in any case.
    """
    if not prompts:
        return None
    try:
        share = greedy_agreement(trainer, policy, adapter, prompts)
    except (AssayError, OSError) as error:
        notes.append(f"not compared with torch: {error}")
        return None
    if share < 0.5:
        notes.append(
            f"only {round(share * len(prompts))} of {len(prompts)} greedy texts are the same as in torch: "
            "what is served may not be what was trained"
        )
    return share


def greedy_agreement(trainer: Any, policy: Policy, adapter: Adapter, prompts: Sequence[Messages]) -> float:
    """Share of prompts, in [0, 1], that both continue with the same greedy text."""
    import torch

    served, tokenizer, model = LlamaBackend(served_as(adapter)), policy.tokenizer, trainer.model.eval()
    inputs = tokenizer.apply_chat_template(
        [list(prompt) for prompt in prompts],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
    ).to(model.device)
    with torch.no_grad():
        outputs = model.generate(**inputs, max_new_tokens=_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    same = 0
    for prompt, text in zip(prompts, texts, strict=True):
        body = {"messages": prompt, "temperature": 0.0, "max_tokens": _TOKENS}
        served_text = served.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        same += text.strip() == (served_text or "").strip()
    return same / len(prompts)
