"""The policy gradient behind DSPy's own `GRPO`: its loop makes the rollouts and hands them over, the trainer waits for them in a thread.

DSPy rebuilds completions from the fields that were read, so these are not always the sampled tokens, and all calls of a rollout earn its one
score. `assay.train` has neither limit.
"""

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
from dspy.clients.provider import ReinforceJob

from assay.errors import AssayError, ConfigError, DataError, ModelError
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
_SETTINGS = frozenset({
    "name", "algorithm", "tasks", "num_generations", "learning_rate", "rank", "loss", "epsilon", "epsilon_high", "beta", "scale", "max_length",
    "max_grad_norm", "seed",
})  # fmt: skip
_batches = itertools.count()  # one for all jobs: DSPy's GRPO remembers over its compiles which ones it has filled


class _Ended(Exception):
    """No more data comes."""


class TRLReinforceJob(ReinforceJob):  # type: ignore[misc]
    """Trains an embedded model on the groups that DSPy's `GRPO` hands over; the language model answers with the new weights after each
    step, in place, and at the end it is the model with its adapter.

    While it trains, the language model has no cache and no seed (all rollouts of an example would be the same), and a temperature of 1
    where it had none.

    Args:
        train_kwargs: `name` for the adapter; `tasks`, how many groups a step takes (DSPy makes one for each example, predictor and
            invocation); and of `PolicyConfig`: algorithm, learning_rate, rank, loss, epsilon, epsilon_high, beta, scale, max_length,
            max_grad_norm, seed.
    Raises:
        ConfigError: no embedded model, one that answers greedily, an unknown setting, or there is an adapter of this name.
    """

    def __init__(self, lm: dspy.LM, train_kwargs: Mapping[str, Any] | None = None) -> None:
        super().__init__(lm=lm, train_kwargs=dict(train_kwargs or {}))
        if not isinstance(lm, LanguageModel) or not isinstance(lm.recording.backend, LlamaBackend):
            raise ConfigError(f"{lm.model!r} is no embedded model: make it with assay.get_lm('embedded/…')")
        if unknown := sorted(self.train_kwargs.keys() - _SETTINGS):
            raise ConfigError(f"train_kwargs: {unknown} would have no effect; there are {', '.join(sorted(_SETTINGS))}")
        temperature = lm.kwargs.get("temperature")
        if temperature == 0:
            raise ConfigError("the language model has temperature 0: all rollouts of an example would be the same")
        settings = {**self.train_kwargs, "model": lm.model, "steps": _ENDLESS, "save_every": _ENDLESS}
        settings["temperature"] = 1.0 if temperature is None else temperature
        self.name = str(settings.pop("name", "dspy-grpo"))
        self.config: PolicyConfig = made_of(PolicyConfig, settings, "train_kwargs")
        if self.config.algorithm == "ppo":
            raise ConfigError("algorithm='ppo' needs the calls of whole rollouts, which DSPy's GRPO does not hand over: use assay.train")
        check_free(self.name)
        self.left_out, self.steps, self.pending = Counter[str](), 0, list[int]()
        self._given: queue.Queue[list[Trajectory] | None] = queue.Queue()
        self.trainer: Any = None
        self._asks, self._over = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    # -- what DSPy calls

    def initialize(self) -> None:
        """Loads the model; returns when the first data may come."""
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
        """DSPy's `GRPOStatus`: `pending_batch_ids` are the groups that the next step takes."""
        return {
            "job_id": self.name, "status": "succeeded" if self._over.is_set() else "running", "current_model": self.lm.model,
            "checkpoints": dict(self.checkpoints), "last_checkpoint": self.last_checkpoint,
            "pending_batch_ids": list(self.pending) if self._asks.is_set() else [],
        }  # fmt: skip

    status = get_status

    def step(self, train_data: Sequence[Mapping[str, Any]], train_data_format: Any = None) -> None:
        """One optimizer step; returns when the language model answers with the new weights.

        Args:
            train_data: groups of `{"batch_id", "group"}`, a group of `{"messages", "completion", "reward"}`.
        Raises:
            DataError: no group, or a reward that is no number; the job goes on. ConfigError: not in the format `grpo_chat`.
        """
        kind = getattr(train_data_format, "value", train_data_format)
        if kind != "grpo_chat":
            raise ConfigError(f"train_data_format={kind!r} must be 'grpo_chat'")
        if not train_data or not all(given["group"] for given in train_data):
            raise DataError("a step was given no group of completions")
        batch = [self._trajectory(given["batch_id"], at, one) for given in train_data for at, one in enumerate(given["group"])]
        self._asks.clear()
        self._given.put(batch)
        self._wait()
        self.steps += 1

    def save_checkpoint(self, checkpoint_name: str) -> None:
        """Keeps the adapter as it is now, in PEFT's form, until the job ends."""
        self.checkpoints[checkpoint_name] = str(self._saved(Path("checkpoints") / checkpoint_name))
        self.last_checkpoint = checkpoint_name

    def terminate(self) -> None:
        """Keeps the adapter under its name; the language model is from now on the model with it.

        Raises:
            ModelError: it could not be kept; the error says where it lies, and the language model is what it was.
        """
        self._end()
        kept = self._saved(Path("adapter"))
        assert self.policy.embedded is not None
        made = {"config": asdict(self.config), "steps": self.steps, "left_out": dict(self.left_out)}
        made["tokenizer_sha256"] = tokenizer_sha(self.policy.tokenizer)
        try:
            adapter = keep_adapter(self.name, kept, base=self.policy.embedded, after=self.policy.merged, made=made)
        except (AssayError, OSError) as error:
            self._removed.detach()
            self._serve(self.lm.model)
            raise ModelError(f"the adapter could not be kept as {self.name!r} ({error}); it lies in {kept}, in PEFT's form") from error
        self._serve(served_as(adapter))
        self._removed()

    def cancel(self) -> None:
        """Ends without keeping anything; the language model is what it was."""
        self._end()
        self._serve(self.lm.model)
        self._removed()

    # -- inside

    def _saved(self, where: Path) -> Path:
        folder = self._folder / where
        self.trainer.accelerator.unwrap_model(self.trainer.model).save_pretrained(str(folder))
        return folder

    def _wait(self) -> None:
        """Until the trainer asks for data; where it failed, the language model is what it was, and its error is raised."""
        while not self._asks.wait(0.1):
            if not self.thread.is_alive() and not self._asks.is_set():
                self.cancel()
                raise self._error or RuntimeError("the trainer ended")

    def _end(self) -> None:
        self._asks.clear()
        self._given.put(None)
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

        from assay.optimizers.weights.making import make_trainer

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
        self.pending = [next(_batches) for _ in range(self.config.tasks)]
        self._asks.set()
        batch = self._given.get()
        if batch is None:
            raise _Ended
        return Batch(*assign_credit(batch, self.config, ValueMemory()).given_to(batch, self.left_out))

    def _trajectory(self, group: int, at: int, one: Mapping[str, Any]) -> Trajectory:
        reward = float(one["reward"])
        if not math.isfinite(reward):
            raise DataError(f"a completion of group {group} has the reward {reward}: the metric must give a number")
        found, row = Trajectory(group=str(group), rollout=f"{group}-{at}", rewards=[reward]), self.row_of(one)
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
