"""DSPy provider that trains with TRL: `lm.provider = TRLProvider()`.

For DSPy's own `BootstrapFinetune`, `BetterTogether` and `GRPO`.
"""

import hashlib
import itertools
import math
import queue
import shutil
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dspy

from assay.errors import AssayError, ConfigError, DataError, ModelError
from assay.models import LanguageModel
from assay.models.embedded import LlamaBackend, PolicyBackend
from assay.models.lora import keep_adapter, served_as
from assay.optimizers.finetuning.base import Policy, lean_head, load_policy, quiet, tokenizer_sha
from assay.optimizers.finetuning.engines import serve
from assay.optimizers.finetuning.rows import Row, Trajectory, ValueMemory, assign_credit
from assay.optimizers.finetuning.run_folder import check_free, ready
from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings, settings_from
from assay.optimizers.finetuning.sft import train_sft
from assay.support.names import check_name
from assay.support.values import json_text

# -- Policy gradient training for DSPy's own `GRPO`: DSPy makes the rollouts, the trainer waits for them in a thread.
#
# Two limits that `assay.train` does not have: DSPy rebuilds completions from their parsed fields, so that they are not
# always the sampled tokens; and all calls of a rollout get its one score.


_ENDLESS = 10_000  # steps: DSPy's loop decides when training ends
_SETTINGS = frozenset({
    "name", "algorithm", "prompts_per_step", "num_generations", "learning_rate", "lora_r", "loss", "epsilon",
    "epsilon_high", "beta", "scale", "max_length", "max_grad_norm", "seed",
})  # fmt: skip
_batches = itertools.count()  # shared by all jobs: DSPy's GRPO keeps the ids of used batches between compiles


class _Ended(Exception):
    """Raised in the trainer's thread when DSPy hands over no more data."""


class TRLReinforceJob(dspy.Provider().ReinforceJob):  # type: ignore[misc]
    """Trains an embedded model on the groups that DSPy's `GRPO` hands over.

    The language model is updated in place: it answers with the new weights after each step, and is the model with its
    adapter at the end. During training it has no cache and no seed, since all rollouts of an example would be the same,
    and a temperature of 1 if none was set.

    Args:
        train_kwargs: `name` of the adapter; `prompts_per_step`, the number of groups in a step (DSPy makes one for each
            example, predictor and invocation); and these of `PolicySettings`: algorithm, num_generations,
            learning_rate, lora_r, loss, epsilon, epsilon_high, beta, scale, max_length, max_grad_norm, seed.
    Raises:
        ConfigError: the model is not embedded or has temperature 0, a setting is unknown, or an adapter of this name
            exists.
    """

    def __init__(self, lm: dspy.LM, train_kwargs: Mapping[str, Any] | None = None) -> None:
        super().__init__(lm=lm, train_kwargs=dict(train_kwargs or {}))
        if not isinstance(lm, LanguageModel) or not isinstance(lm.recording.backend, LlamaBackend):
            raise ConfigError(f"{lm.model!r} is not an embedded model: create it with assay.get_lm('embedded/…')")
        if unknown := sorted(self.train_kwargs.keys() - _SETTINGS):
            raise ConfigError(f"train_kwargs: {unknown} would have no effect; there are {', '.join(sorted(_SETTINGS))}")
        temperature = lm.kwargs.get("temperature")
        if temperature == 0:
            raise ConfigError("the language model has temperature 0: all rollouts of an example would be the same")
        settings = {**self.train_kwargs, "model": lm.model, "steps": _ENDLESS, "save_every": _ENDLESS}
        settings["temperature"] = 1.0 if temperature is None else temperature
        self.name = str(settings.pop("name", "dspy-grpo"))
        self.config: PolicySettings = settings_from(PolicySettings, settings, "train_kwargs")
        if self.config.algorithm == "ppo":
            raise ConfigError(
                "algorithm='ppo' needs the calls of whole rollouts, which DSPy's GRPO does not hand over: "
                "use assay.train"
            )
        check_free(self.name)
        self.left_out, self.steps, self.pending = Counter[str](), 0, list[int]()
        self._batches_in: queue.Queue[list[Trajectory] | None] = queue.Queue()
        self.trainer: Any = None
        self._data_requested, self._over = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    # -- what DSPy calls

    def initialize(self) -> None:
        """Loads the model; returns when the trainer is ready for data."""
        self.policy: Policy = load_policy(self.lm.model)
        self._folder = Path(tempfile.mkdtemp(prefix="assay-grpo-"))
        self._removed = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        engine = self.lm.recording
        self._before = (engine.cache, dict(self.lm.kwargs))
        engine.cache = None
        self.lm.kwargs["temperature"] = self.config.temperature
        self.lm.kwargs.pop("seed", None)
        engine.backend = PolicyBackend(self.lm.model)
        self.thread = threading.Thread(target=self._work, daemon=True, name="assay-grpo")
        self.thread.start()
        self._wait()

    def get_status(self) -> dict[str, Any]:
        """DSPy's `GRPOStatus`; `pending_batch_ids` are the groups of the next step."""
        return {
            "job_id": self.name,
            "status": "succeeded" if self._over.is_set() else "running",
            "current_model": self.lm.model,
            "checkpoints": dict(self.checkpoints),
            "last_checkpoint": self.last_checkpoint,
            "pending_batch_ids": list(self.pending) if self._data_requested.is_set() else [],
        }

    status = get_status

    def step(self, train_data: Sequence[Mapping[str, Any]], train_data_format: Any = None) -> None:
        """One optimizer step; returns when the language model answers with the new weights.

        Args:
            train_data: groups of `{"batch_id", "group"}`, a group of `{"messages", "completion", "reward"}`.
        Raises:
            DataError: there is no group, or a reward is not finite. The job continues.
            ConfigError: the format is not `grpo_chat`.
        """
        kind = getattr(train_data_format, "value", train_data_format)
        if kind != "grpo_chat":
            raise ConfigError(f"train_data_format={kind!r} must be 'grpo_chat'")
        if not train_data or not all(group["group"] for group in train_data):
            raise DataError("a step was given no group of completions")
        batch = [
            self._trajectory(group["batch_id"], at, completion)
            for group in train_data
            for at, completion in enumerate(group["group"])
        ]
        self._data_requested.clear()
        self._batches_in.put(batch)
        self._wait()
        self.steps += 1

    def save_checkpoint(self, checkpoint_name: str) -> None:
        """Saves the current adapter in PEFT's format, until the job ends."""
        check_name(checkpoint_name, "checkpoint_name")
        self.checkpoints[checkpoint_name] = str(self._saved(Path("checkpoints") / checkpoint_name))
        self.last_checkpoint = checkpoint_name

    def terminate(self) -> None:
        """Ends the job and keeps the adapter under its name; the language model then has the adapter.

        Raises:
            ModelError: the adapter could not be kept. The message has the path of PEFT's folder; the language model is
                the one from before.
        """
        self._end()
        saved = self._saved(Path("adapter"))
        assert self.policy.embedded is not None
        provenance = {"config": asdict(self.config), "steps": self.steps, "left_out": dict(self.left_out)}
        provenance["tokenizer_sha256"] = tokenizer_sha(self.policy.tokenizer)
        try:
            adapter = keep_adapter(
                self.name, saved, base=self.policy.embedded, after=self.policy.merged, made=provenance
            )
        except (AssayError, OSError) as error:
            self._removed.detach()
            self._serve(self.lm.model)
            raise ModelError(
                f"the adapter could not be kept as {self.name!r} ({error}); it is in {saved}, in PEFT's format"
            ) from error
        self._serve(served_as(adapter))
        self._removed()

    def cancel(self) -> None:
        """Ends the job and keeps nothing; the language model is the one from before."""
        self._end()
        self._serve(self.lm.model)
        self._removed()

    # -- inside

    def _saved(self, where: Path) -> Path:
        folder = self._folder / where
        self.trainer.accelerator.unwrap_model(self.trainer.model).save_pretrained(str(folder))
        return folder

    def _wait(self) -> None:
        """Waits until the trainer asks for data. If it failed, cancels the job and raises the trainer's error."""
        while not self._data_requested.wait(0.1):
            if not self.thread.is_alive() and not self._data_requested.is_set():
                self.cancel()
                raise self._error or RuntimeError("the trainer ended")

    def _end(self) -> None:
        self._data_requested.clear()
        self._batches_in.put(None)
        self.thread.join()
        self._over.set()

    def _serve(self, name: str) -> None:
        engine = self.lm.recording
        if isinstance(engine.backend, PolicyBackend):
            engine.backend.swap(None)
        engine.backend, engine.model, self.lm.model = LlamaBackend(name), name, name
        engine.cache, self.lm.kwargs = self._before

    def _work(self) -> None:
        from transformers import TrainerCallback

        from assay.optimizers.finetuning.policy_gradient import make_trainer

        try:
            with quiet(), ready("lower `max_length`, then `lora_r`"), lean_head():
                self.trainer = make_trainer(
                    self.policy,
                    self.config,
                    self.config.prompts_per_step,
                    self._folder,
                    self._collect,
                    TrainerCallback(),
                )
                self.trainer.train()
        except _Ended:
            return
        except BaseException as error:  # raised again in the waiting thread, by `_wait`
            self._error = error

    def _collect(self, inputs: list[dict[str, Any]], trainer: Any) -> Any:
        from assay.optimizers.finetuning.trl_trainer import Batch

        serve(trainer, self.lm.recording.backend, self._folder, self.steps).unlink()
        self.pending = [next(_batches) for _ in range(self.config.prompts_per_step)]
        self._data_requested.set()
        batch = self._batches_in.get()
        if batch is None:
            raise _Ended
        return Batch(*assign_credit(batch, self.config, ValueMemory()).apply_to(batch, self.left_out))

    def _trajectory(self, group: int, at: int, completion: Mapping[str, Any]) -> Trajectory:
        reward = float(completion["reward"])
        if not math.isfinite(reward):
            raise DataError(f"a completion of group {group} has the reward {reward}: the metric must give a number")
        trajectory, row = (
            Trajectory(group=str(group), rollout=f"{group}-{at}", rewards=[reward]),
            self.row_of(completion),
        )
        if len(row.prompt_ids) + len(row.completion_ids) > self.config.max_length:
            self.left_out[f"calls of more than {self.config.max_length} tokens"] += 1
        else:
            trajectory.rows.append(row)
        return trajectory

    def row_of(self, sample: Mapping[str, Any]) -> Row:
        """The tokens of `{"messages", "completion"}` in the model's chat template."""
        prompt = self.policy.tokenizer.apply_chat_template(
            sample["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        completion = self.policy.tokenizer(sample["completion"]["content"], add_special_tokens=False)["input_ids"]
        ids = [*completion, self.policy.tokenizer.eos_token_id]
        return Row(turn=0, prompt_ids=list(prompt), completion_ids=ids, trained=[True] * len(ids))


# -- Provider.


class TRLProvider(dspy.Provider):  # type: ignore[misc]
    """Fine-tunes embedded models with TRL. The result is a language model with the adapter.

    `train_kwargs` are fields of `SFTSettings` (for `lm.reinforce`: of `PolicySettings`), and `name` for the adapter (by
    default derived from the data).
    """

    def __init__(self) -> None:
        super().__init__()
        self.finetunable = self.reinforceable = True
        self.ReinforceJob = TRLReinforceJob

    @staticmethod
    def is_provider_model(model: str) -> bool:
        return model.startswith("embedded/")

    @staticmethod
    def finetune(
        job: dspy.TrainingJob,
        model: str,
        train_data: Sequence[Mapping[str, Any]],
        train_data_format: Any,
        train_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Trains on chat messages. Returns the name of the model with the adapter.

        Raises:
            ConfigError: the data is not in the chat format, or a setting is unknown.
        """
        kind = getattr(train_data_format, "value", train_data_format)
        if kind != "chat":
            raise ConfigError(f"train_data_format={kind!r} must be 'chat': dspy.ChatAdapter makes it")
        text = "".join(json_text(dict(row)) + "\n" for row in train_data)
        settings = {"model": model, **(train_kwargs or {})}
        name = str(settings.pop("name", f"dspy-{hashlib.sha256(f'{settings}{text}'.encode()).hexdigest()[:12]}"))
        config = settings_from(SFTSettings, settings, "train_kwargs")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            path.write_text(text, encoding="utf-8")
            report = train_sft(path, name, config)
        return report.name or str(report.path)
