"""TRL's GRPOTrainer on the LM calls of agents. Imports torch and TRL.

Stock GRPO trains on one completion per rollout. Here `collect` returns the rows of a batch of rollouts: one per LM
call, each with its advantage. Loss, clipping, KL, optimizer, checkpoints and trackers are those of TRL. Two methods are
overridden: one takes the rows from `collect`, the other trims padding and excludes blank rows from means. With one call
per rollout the result is that of stock GRPO.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.attention import SDPBackend, sdpa_kernel
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad, use_adapter

from assay.optimizers.finetuning.rows import Row

_SHORT = 512  # tokens up to which plain attention is faster than fused on CPUs: by a fifth of a step at 100 tokens


@dataclass
class Batch:
    """Rows of this process, with metrics for the log.

    `flat` are rows of zero-variance groups: they count in the mean, and go through the model only with a
    KL term.
    """

    rows: list[Row]
    flat: Sequence[Row] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


def over_ranks(items: Sequence[Any]) -> list[Any]:
    """The items of all processes, in the order of their ranks."""
    return list(gather_object(list(items)))


class TransitionTrainer(GRPOTrainer):
    """TRL's GRPO trainer on rows with advantages of their own, such as those of single turns.

    Args:
        collect: called with the inputs of this process (each task once per rollout) and the trainer; returns the rows.
        by_token: a row's advantage is its return, which is normalised over all tokens of the batch (REINFORCE++).
        kl_in_reward: weight of each token's KL to the reference model in its reward; requires `by_token`.
    """

    args: GRPOConfig
    model: Any

    def __init__(
        self,
        *,
        collect: Callable[[list[dict[str, Any]], "TransitionTrainer"], Batch],
        by_token: bool = False,
        kl_in_reward: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self._collect, self._by_token, self._kl_in_reward = collect, by_token, kl_in_reward
        super().__init__(reward_funcs=_scored_elsewhere, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.mark()
        batch = self._collect(inputs, self)
        mode = "train" if self.model.training else "eval"
        for name, value in batch.metrics.items():
            self._metrics[mode][name].append(value)
        rows, flat = (batch.rows, list(batch.flat)) if not self.beta else ([*batch.rows, *batch.flat], [])
        self._filled = bool(rows)
        parts = self._parts if mode == "train" else 1
        passes = max(over_ranks([len(rows)]))  # every process must run the same number of passes
        fill = max(parts, math.ceil(passes / parts) * parts) - len(rows)
        blank = Row(
            turn=0,
            prompt_ids=[self._tokenizer.pad_token_id],
            completion_ids=[self._tokenizer.pad_token_id],
            trained=[False],
        )
        has_logprobs = bool(rows) and all(row.logprobs is not None for row in rows)
        return self._tensors([*rows, *[blank] * fill], old=all(over_ranks([has_logprobs or not rows])), flat=flat)

    def _padded(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Tokens and masks of rows, prompts to the left, completions to the right."""
        word = self._tokenizer.pad_token_id
        prompts = [torch.tensor(row.prompt_ids) for row in rows]
        completions = [torch.tensor(row.completion_ids) for row in rows]
        chosen = [torch.tensor(row.trained, dtype=torch.long) for row in rows]

        return {
            "prompt_ids": self._pad(prompts, word, "left"),
            "prompt_mask": self._pad([torch.ones_like(part) for part in prompts], 0, "left"),
            "completion_ids": self._pad(completions, word, "right"),
            "completion_mask": self._pad([torch.ones_like(part) for part in completions], 0, "right"),
            "tool_mask": self._pad(chosen, 0, "right"),
        }

    def _pad(self, parts: Sequence[torch.Tensor], value: int, side: str) -> torch.Tensor:
        padded: torch.Tensor = pad(list(parts), padding_value=value, padding_side=side).to(self.accelerator.device)
        return padded

    def _tensors(self, rows: Sequence[Row], *, old: bool, flat: Sequence[Row]) -> dict[str, Any]:
        out = {
            **self._padded(rows),
            "advantages": torch.tensor([row.advantage for row in rows], device=self.accelerator.device),
        }
        mask = out["completion_mask"] * out["tool_mask"]
        out["num_items_in_batch"] = self.accelerator.gather(mask.sum() + sum(sum(row.trained) for row in flat)).sum()
        # factor of the loss: corrects its mean for flat rows, which skip the model, and for blank rows
        self._share: Any = 1.0
        self._by_part = self.loss_type == "bnpo" and len(rows) > self._parts
        if self._by_part:  # a mean over the tokens of each part
            self._share = self.accelerator.gather(mask.sum()).sum() / out["num_items_in_batch"].clamp(min=1)
        elif self.loss_type not in ("dapo", "cispo", "vespo"):  # a mean over rows, some of which are blank
            live = (
                self.accelerator.gather(mask.any(dim=1).sum() + len(flat))
                .float()
                .mean()
                .clamp(min=1 / self.accelerator.num_processes)
            )
            self._share = len(rows) / live
        with torch.no_grad():
            if old:
                out["old_per_token_logps"] = self._pad(
                    [torch.tensor(row.logprobs or [0.0] * len(row.completion_ids)) for row in rows], 0, "right"
                )
            elif self.args.gradient_accumulation_steps % (self._parts * self.num_iterations):
                out["old_per_token_logps"] = self._logprobs(self.model, out)
            if self.beta:
                out["ref_per_token_logps"] = self._reference(out)
            if self._by_token:
                kl = (
                    self._logprobs(self.model, out) - self._reference(out)
                    if self._kl_in_reward
                    else torch.zeros_like(mask, dtype=torch.float)
                )
                earned = token_returns(rows, kl * mask, self._kl_in_reward)
                out["advantages"] = normalised(
                    earned, mask, lambda sums: self.accelerator.reduce(sums, reduction="sum")
                )
        return out

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """TRL's loss, without columns that are padding in all rows of this part.

        TRL pads all parts to the longest row of the batch, so that one long answer would cost as much as all others
        together. In a mean over rows, blank rows do not count and rows of zero-variance groups do.
        """
        trimmed, logged = _trimmed(inputs), {name: len(values) for name, values in self._metrics["train"].items()}
        width = trimmed["prompt_ids"].size(1) + trimmed["completion_ids"].size(1)
        # gradient checkpointing recomputes the attention outside of this context
        use_eager = model.device.type == "cpu" and width <= _SHORT and not self.args.gradient_checkpointing
        with sdpa_kernel(SDPBackend.MATH) if use_eager else nullcontext():
            loss = (
                super()._compute_loss(model, trimmed)  # type: ignore[no-untyped-call]
                * self._share
                * (self._parts_to_live(inputs) if self._by_part else 1)
            )
        # a part with only blank rows must not log an entropy
        if self._filled and not (inputs["completion_mask"] * inputs["tool_mask"]).any():
            for name, values in self._metrics["train"].items():
                del values[logged.get(name, 0) :]
        return loss

    def _parts_to_live(self, inputs: dict[str, Any]) -> Any:
        """Number of parts of a step, divided by the number of parts with a row that is not blank.

        TRL has shuffled the rows, and divides the loss by the number of all parts.
        """
        parts = self._buffered_inputs or [inputs]
        live = sum((part["completion_mask"] * part["tool_mask"]).any().float() for part in parts)
        return len(parts) / self.accelerator.gather(live).mean().clamp(min=1 / self.accelerator.num_processes)

    @property
    def _parts(self) -> int:
        """Number of parts of a step. TRL sets it where it is not given."""
        parts = self.args.steps_per_generation
        return 1 if parts is None else parts

    def mark(self) -> None:
        """Saves the random state between two steps."""
        self._random = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def rewind(self) -> None:
        """Restores the random state of `mark`, from before the rollouts of a step or an evaluation."""
        torch.set_rng_state(self._random[0])
        if self._random[1]:
            torch.cuda.set_rng_state_all(self._random[1])

    def logprobs_of(self, rows: Sequence[Row], *, size: int = 8) -> list[list[float]]:
        """Log-probabilities of the rows' tokens under the current weights, at the training temperature."""
        logprobs: list[list[float]] = []
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            with torch.no_grad():
                odds = self._logprobs(self.model, self._padded(part))
            logprobs += [line[: len(row.completion_ids)] for line, row in zip(odds.float().tolist(), part, strict=True)]
        return logprobs

    def hidden_of(self, rows: Sequence[Row], *, size: int = 8) -> list[list[float]]:
        """The last hidden state at the end of each row's prompt, `[row][dimension]`."""
        states: list[list[float]] = []
        for at in range(0, len(rows), size):
            part = self._padded(rows[at : at + size])
            ids, mask = part["prompt_ids"], part["prompt_mask"]
            with torch.no_grad():
                out = self.model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
                    output_hidden_states=True,
                    logits_to_keep=1,
                )
            states += out.hidden_states[-1][:, -1].float().tolist()
        return states

    def _reference(self, out: dict[str, Any]) -> torch.Tensor:
        if self.ref_model is not None:
            return self._logprobs(self.ref_model, out)
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logprobs(self.model, out)

    def _logprobs(self, model: Any, out: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
        mask = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
        size = max(1, len(ids) // self._parts)
        logprobs: torch.Tensor = self._get_per_token_logps_and_entropies(
            model, ids, mask, out["completion_ids"].size(1), batch_size=size
        )[0]
        return logprobs


def token_returns(rows: Sequence[Row], kl: torch.Tensor, weight: float) -> torch.Tensor:
    """Return of each token, `[row][token]`: its call's return minus the weighted KL of it and of all later tokens.

    Later tokens are those of the same rollout.

    Source: REINFORCE++ (arXiv 2501.03262), eq. 4 and 5, with the tokens of later calls as later tokens.
    """
    earned = torch.tensor([row.advantage for row in rows], device=kl.device)[:, None].expand(kl.shape).clone()
    if not weight:
        return earned
    totals = kl.sum(dim=1)
    later = torch.stack(
        [
            sum(
                (totals[at] for at, other in enumerate(rows) if other.rollout == row.rollout and other.turn > row.turn),
                totals.new_zeros(()),
            )
            for row in rows
        ]
    )
    return earned - weight * (kl.flip(1).cumsum(1).flip(1) + later[:, None])


def normalised(
    earned: torch.Tensor, mask: torch.Tensor, summed: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Returns minus their mean, divided by their standard deviation; 0 for tokens that are not trained.

    Mean and deviation are over all trained tokens of the batch and all processes.

    Source: REINFORCE++ (arXiv 2501.03262), eq. 6. Equal returns give exactly 0.
    """
    trained = mask.bool()
    values = earned[trained].double()
    count, total = summed(
        torch.tensor([float(len(values)), float(values.sum())], device=earned.device, dtype=torch.double)
    ).tolist()
    mean = total / max(1.0, count)
    square = float(summed(((values - mean) ** 2).sum().reshape(1))[0])
    if square <= 1e-18 * max(1.0, count):
        return torch.zeros_like(earned)
    return torch.where(trained, (earned - mean) / math.sqrt(square / count + 1e-8), torch.zeros_like(earned))


_OF_COMPLETIONS = ("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps")


def _trimmed(inputs: Mapping[str, Any]) -> dict[str, Any]:
    prompt = max(1, int(inputs["prompt_mask"].sum(dim=1).max()))
    completion = max(1, int(inputs["completion_mask"].sum(dim=1).max()))
    by_token = {*_OF_COMPLETIONS, *(["advantages"] if inputs["advantages"].dim() == 2 else [])}
    out = {name: value[:, :completion] if name in by_token else value for name, value in inputs.items()}
    return {**out, "prompt_ids": inputs["prompt_ids"][:, -prompt:], "prompt_mask": inputs["prompt_mask"][:, -prompt:]}


def _scored_elsewhere(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Placeholder for the reward function that TRL requires."""
    raise RuntimeError("rollouts are scored by their rubric")
