"""The policy gradient behind DSPy's own `GRPO`: its loop makes the rollouts and hands them over, the trainer waits for them in a thread.

DSPy rebuilds completions from the fields that were read, so these are not always the sampled tokens, and all calls of a rollout earn its one
score. `assay.train` has neither limit.
"""

import math
import queue
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dspy
from dspy.clients.provider import ReinforceJob

from assay.errors import ConfigError, DataError
from assay.models import LanguageModel
from assay.models.adapters import keep_adapter, served_as
from assay.models.embedded import LlamaBackend, PolicyBackend
from assay.optimizers.weights.advantages import ValueMemory, assign_credit
from assay.optimizers.weights.base import Policy, lean_head, load_policy, quiet, tokenizer_sha
from assay.optimizers.weights.config import PolicyConfig, made_of
from assay.optimizers.weights.engines import serve
from assay.optimizers.weights.rows import Row, Trajectory
from assay.optimizers.weights.work import check_free, ready

__all__ = ["TRLReinforceJob"]

_ENDLESS = 10_000  # steps: DSPy's loop says when it ends


class _Ended(Exception):
    """No more data comes."""


class TRLReinforceJob(ReinforceJob):  # type: ignore[misc]
    """Trains an embedded model on the groups that DSPy's `GRPO` hands over; the language model answers with the new weights after each
    step, in place, and at the end it is the model with its adapter.

    Args:
        train_kwargs: fields of `PolicyConfig` (`tasks` is how many groups a step takes), and `name` for the adapter.
    Raises:
        ConfigError: no embedded model, an unknown setting, or there is an adapter of this name.
    """

    def __init__(self, lm: dspy.LM, train_kwargs: Mapping[str, Any] | None = None) -> None:
        super().__init__(lm=lm, train_kwargs=dict(train_kwargs or {}))
        if not isinstance(lm, LanguageModel) or not isinstance(lm.recording.backend, LlamaBackend):
            raise ConfigError(f"{lm.model!r} is no embedded model: make it with assay.get_lm('embedded/…')")
        settings = {**self.train_kwargs, "model": lm.model, "steps": _ENDLESS, "save_every": _ENDLESS}
        settings["group"] = settings.pop("num_generations", settings.get("group", PolicyConfig.group))
        settings.setdefault("micro", settings["group"])
        settings["temperature"] = lm.kwargs.get("temperature") or 1.0
        self.name = str(settings.pop("name", "dspy-grpo"))
        self.config: PolicyConfig = made_of(PolicyConfig, settings, "train_kwargs")
        check_free(self.name)
        self.left_out, self.steps = Counter[str](), 0
        self._given: queue.Queue[list[dict[str, Any]] | None] = queue.Queue()
        self.trainer: Any = None
        self._asks, self._over = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    # -- what DSPy calls

    def initialize(self) -> None:
        """Loads the model; returns when the first data may come."""
        self._folder = Path(tempfile.mkdtemp(prefix="assay-grpo-"))
        self.policy: Policy = load_policy(self.lm.model)
        engine = self.lm.recording
        self._cache, engine.cache = engine.cache, None  # a policy in training is never answered from a cache
        engine.backend = PolicyBackend(self.lm.model)
        self.thread = threading.Thread(target=self._work, daemon=True, name="assay-grpo")
        self.thread.start()
        self._wait()

    def get_status(self) -> dict[str, Any]:
        """DSPy's `GRPOStatus`: `pending_batch_ids` are the groups that the next step takes."""
        pending = range(self.steps * self.config.tasks, (self.steps + 1) * self.config.tasks) if self._asks.is_set() else ()
        return {
            "job_id": self.name, "status": "succeeded" if self._over.is_set() else "running", "current_model": self.lm.model,
            "checkpoints": dict(self.checkpoints), "last_checkpoint": self.last_checkpoint, "pending_batch_ids": list(pending),
        }  # fmt: skip

    status = get_status

    def step(self, train_data: Sequence[Mapping[str, Any]], train_data_format: Any = None) -> None:
        """One optimizer step; returns when the language model answers with the new weights.

        Args:
            train_data: groups of `{"batch_id", "group"}`, a group of `{"messages", "completion", "reward"}`.
        Raises:
            DataError: no group, or a reward that is no number. ConfigError: not in the format `grpo_chat`.
        """
        kind = getattr(train_data_format, "value", train_data_format)
        if kind != "grpo_chat":
            raise ConfigError(f"train_data_format={kind!r} must be 'grpo_chat'")
        if not train_data or not all(given["group"] for given in train_data):
            raise DataError("a step was given no group of completions")
        self._asks.clear()
        self._given.put([dict(given) for given in train_data])
        self._wait()
        self.steps += 1

    def save_checkpoint(self, checkpoint_name: str) -> None:
        """Keeps the adapter as it is now, in PEFT's form, until the job ends."""
        folder = self._folder / "checkpoints" / checkpoint_name
        self.trainer.accelerator.unwrap_model(self.trainer.model).save_pretrained(str(folder))
        self.checkpoints[checkpoint_name], self.last_checkpoint = str(folder), checkpoint_name

    def terminate(self) -> None:
        """Keeps the adapter under its name; the language model is from now on the model with it."""
        self._end()
        try:
            kept = self._folder / "adapter"
            self.trainer.accelerator.unwrap_model(self.trainer.model).save_pretrained(str(kept))
            assert self.policy.embedded is not None
            made = {"config": asdict(self.config), "steps": self.steps, "left_out": dict(self.left_out)}
            made["tokenizer_sha256"] = tokenizer_sha(self.policy.tokenizer)
            adapter = keep_adapter(self.name, kept, base=self.policy.embedded, after=self.policy.merged, made=made)
            self._serve(served_as(adapter))
        finally:
            self._clean()

    def cancel(self) -> None:
        """Ends without keeping anything; the language model is what it was."""
        self._end()
        self._serve(self.lm.model)
        self._clean()

    # -- inside

    def _wait(self) -> None:
        """Until the trainer asks for data; raises what went wrong in it."""
        while not self._asks.wait(0.1):
            if not self.thread.is_alive() and not self._asks.is_set():
                raise self._error or RuntimeError("the trainer ended")

    def _end(self) -> None:
        self._asks.clear()
        self._given.put(None)
        self.thread.join()
        self._over.set()

    def _serve(self, name: str) -> None:
        engine = self.lm.recording
        engine.backend.swap(None)
        engine.backend, engine.model, engine.cache, self.lm.model = LlamaBackend(name), name, self._cache, name

    def _clean(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _work(self) -> None:
        from transformers import TrainerCallback

        from assay.optimizers.weights.policy import make_trainer

        try:
            with quiet(), ready(), lean_head():
                self.trainer = make_trainer(self.policy, self.config, self.config.tasks, self._folder, self._collect, TrainerCallback())
                self.trainer.train()
        except _Ended:
            return
        except BaseException as error:  # it belongs to whoever waits
            self._error = error

    def _collect(self, inputs: list[dict[str, Any]], trainer: Any) -> Any:
        from assay.optimizers.weights.trainer import Batch

        serve(trainer, self.lm.recording.backend, self._folder, self.steps).unlink()
        self._asks.set()
        given = self._given.get()
        if given is None:
            raise _Ended
        batch = [self._trajectory(group, at, one) for group in given for at, one in enumerate(group["group"])]
        return Batch(*assign_credit(batch, self.config, ValueMemory()).given_to(batch, self.left_out))

    def _trajectory(self, group: Mapping[str, Any], at: int, one: Mapping[str, Any]) -> Trajectory:
        reward = float(one["reward"])
        if not math.isfinite(reward):
            raise DataError(f"a completion of group {group['batch_id']} has the reward {reward}: the metric must give a number")
        found, row = Trajectory(group=str(group["batch_id"]), rollout=f"{group['batch_id']}-{at}", rewards=[reward]), self.row_of(one)
        if len(row.prompt_ids) + len(row.completion_ids) > self.config.max_length:
            self.left_out[f"calls of more than {self.config.max_length} tokens"] += 1
        else:
            found.rows.append(row)
        return found

    def row_of(self, one: Mapping[str, Any]) -> Row:
        """The tokens of `{"messages", "completion"}` as the model would have read and written them."""
        prompt = self.policy.tokenizer.apply_chat_template(one["messages"], add_generation_prompt=True, tokenize=True, return_dict=False)
        said = self.policy.tokenizer(one["completion"]["content"], add_special_tokens=False)["input_ids"]
        ids = [*said, self.policy.tokenizer.eos_token_id]
        return Row(turn=0, prompt_ids=list(prompt), completion_ids=ids, trained=[True] * len(ids))
