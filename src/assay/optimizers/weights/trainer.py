"""TRL's GRPOTrainer on the LM calls of agents: one method overridden, and one that trims padding and keeps means those of real rows.
Imports torch and TRL.

Stock GRPO trains on one completion a rollout. Here `collect` gives the rows of a batch of rollouts, one an LM call and as many as there
were, each with its advantage; loss, clipping, KL, optimizer, checkpoints and trackers are TRL's. On rollouts of one call it is stock GRPO.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.attention import SDPBackend, sdpa_kernel
from trl import GRPOTrainer
from trl.trainer.utils import pad, use_adapter

from assay.optimizers.weights.rows import Row

__all__ = ["Batch", "TransitionTrainer", "over_ranks"]

_SHORT = 512  # tokens up to which plain attention beats the fused one on CPUs: a fifth of a step at 100 tokens


@dataclass
class Batch:
    """Rows of this process, with numbers for the log. `flat` are rows of groups without spread: they count in the mean, and go through
    the model only where there is a KL to be taken of them."""

    rows: list[Row]
    flat: Sequence[Row] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


def over_ranks(items: Sequence[Any]) -> list[Any]:
    """The items of all processes, in the order of their ranks."""
    return list(gather_object(list(items)))


class TransitionTrainer(GRPOTrainer):  # type: ignore[misc]
    """Args:
    collect: called with the inputs of this process (each task as often as it has rollouts) and the trainer; gives the rows.
    by_token: a row's advantage is its return, to be normalised over all tokens of the batch (REINFORCE++).
    kl_in_reward: weight of each token's KL to the reference in its reward; with `by_token`.
    """

    def __init__(
        self, *args: Any, collect: Callable[[list[dict[str, Any]], "TransitionTrainer"], Batch], by_token: bool = False, kl_in_reward: float = 0.0,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self._collect, self._by_token, self._kl_in_reward = collect, by_token, kl_in_reward
        super().__init__(*args, reward_funcs=_scored_elsewhere, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.mark()
        batch = self._collect(inputs, self)
        mode = "train" if self.model.training else "eval"
        for name, value in batch.metrics.items():
            self._metrics[mode][name].append(value)
        rows, flat = (batch.rows, list(batch.flat)) if not self.beta else ([*batch.rows, *batch.flat], [])
        self._filled = bool(rows)
        parts = self.args.steps_per_generation if mode == "train" else 1
        most = max(over_ranks([len(rows)]))  # every process takes part in as many passes
        fill = max(parts, math.ceil(most / parts) * parts) - len(rows)
        blank = Row(turn=0, prompt_ids=[self._tokenizer.pad_token_id], completion_ids=[self._tokenizer.pad_token_id], trained=[False])
        known = bool(rows) and all(row.logprobs is not None for row in rows)
        return self._tensors([*rows, *[blank] * fill], old=all(over_ranks([known or not rows])), flat=flat)

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

    def _pad(self, parts: Sequence[torch.Tensor], value: float, side: str) -> torch.Tensor:
        padded: torch.Tensor = pad(list(parts), padding_value=value, padding_side=side).to(self.accelerator.device)
        return padded

    def _tensors(self, rows: Sequence[Row], *, old: bool, flat: Sequence[Row]) -> dict[str, Any]:
        out = {**self._padded(rows), "advantages": torch.tensor([row.advantage for row in rows], device=self.accelerator.device)}
        mask = out["completion_mask"] * out["tool_mask"]
        out["num_items_in_batch"] = self.accelerator.gather(mask.sum() + sum(sum(row.trained) for row in flat)).sum()
        self._share: Any = 1.0  # of the loss, where rows that do not go through the model count in its mean, or blank ones must not
        self._by_part = self.loss_type == "bnpo" and len(rows) > self.args.steps_per_generation
        if self._by_part:  # a mean over the tokens of each part
            self._share = self.accelerator.gather(mask.sum()).sum() / out["num_items_in_batch"].clamp(min=1)
        elif self.loss_type not in ("dapo", "cispo", "vespo"):  # a mean over rows (parts of one row), some of which are blank
            live = self.accelerator.gather(mask.any(dim=1).sum() + len(flat)).float().mean().clamp(min=1 / self.accelerator.num_processes)
            self._share = len(rows) / live
        with torch.no_grad():
            if old:
                out["old_per_token_logps"] = self._pad([torch.tensor(row.logprobs or [0.0] * len(row.completion_ids)) for row in rows], 0.0, "right")
            elif self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations):
                out["old_per_token_logps"] = self._logprobs(self.model, out)
            if self.beta:
                out["ref_per_token_logps"] = self._reference(out)
            if self._by_token:
                kl = self._logprobs(self.model, out) - self._reference(out) if self._kl_in_reward else torch.zeros_like(mask, dtype=torch.float)
                earned = token_returns(rows, kl * mask, self._kl_in_reward)
                out["advantages"] = normalised(earned, mask, lambda sums: self.accelerator.reduce(sums, reduction="sum"))
        return out

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Without the columns that are padding in all rows of this part: TRL pads all parts to the longest row of the whole, and one
        answer that ran on would cost as much as all others together. The loss is TRL's; where it is a mean over rows, blank ones do not count
        and those of flat groups do."""
        trimmed, known = _trimmed(inputs), {name: len(values) for name, values in self._metrics["train"].items()}
        width = trimmed["prompt_ids"].size(1) + trimmed["completion_ids"].size(1)
        plain = model.device.type == "cpu" and width <= _SHORT and not self.args.gradient_checkpointing  # which works out again, out of here
        with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
            loss = super()._compute_loss(model, trimmed) * self._share * (self._parts_to_live(inputs) if self._by_part else 1)
        if self._filled and not (inputs["completion_mask"] * inputs["tool_mask"]).any():  # a part of blanks alone has no entropy to tell of
            for name, values in self._metrics["train"].items():
                del values[known.get(name, 0) :]
        return loss

    def _parts_to_live(self, inputs: dict[str, Any]) -> Any:
        """Parts of a step over those that are not of blanks alone: TRL has shuffled the rows, and divides the loss by all of them."""
        parts = self._buffered_inputs or [inputs]
        live = sum((part["completion_mask"] * part["tool_mask"]).any().float() for part in parts)
        return len(parts) / self.accelerator.gather(live).mean().clamp(min=1 / self.accelerator.num_processes)

    def mark(self) -> None:
        """Notes the random numbers of now, between two steps."""
        self._random = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def rewind(self) -> None:
        """Random numbers as they were marked, when the rollouts of a step or a look began: a checkpoint of then."""
        torch.set_rng_state(self._random[0])
        if self._random[1]:
            torch.cuda.set_rng_state_all(self._random[1])

    def logprobs_of(self, rows: Sequence[Row], *, size: int = 8) -> list[list[float]]:
        """Log-probabilities of the rows' tokens under the weights as they are, at the temperature that is trained at."""
        found: list[list[float]] = []
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            with torch.no_grad():
                odds = self._logprobs(self.model, self._padded(part))
            found += [line[: len(row.completion_ids)] for line, row in zip(odds.float().tolist(), part, strict=True)]
        return found

    def hidden_of(self, rows: Sequence[Row], *, size: int = 8) -> list[list[float]]:
        """The last hidden state at the end of each row's prompt, `[row][dimension]`."""
        found: list[list[float]] = []
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
            found += out.hidden_states[-1][:, -1].float().tolist()
        return found

    def _reference(self, out: dict[str, Any]) -> torch.Tensor:
        if self.ref_model is not None:
            return self._logprobs(self.ref_model, out)
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logprobs(self.model, out)

    def _logprobs(self, model: Any, out: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1)
        mask = torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1)
        size = max(1, len(ids) // self.args.steps_per_generation)
        found: torch.Tensor = self._get_per_token_logps_and_entropies(model, ids, mask, out["completion_ids"].size(1), batch_size=size)[0]
        return found


def token_returns(rows: Sequence[Row], kl: torch.Tensor, weight: float) -> torch.Tensor:
    """What each token is credited with, `[row][token]`: its call's return, less the weighted KL of it and of all tokens of its rollout after it.

    Source: REINFORCE++ (arXiv 2501.03262), eq. 4 and 5, with the tokens of later calls as later tokens.
    """
    earned = torch.tensor([row.advantage for row in rows], device=kl.device)[:, None].expand(kl.shape).clone()
    if not weight:
        return earned
    totals = kl.sum(dim=1)
    later = torch.stack(
        [
            sum((totals[at] for at, other in enumerate(rows) if other.rollout == row.rollout and other.turn > row.turn), totals.new_zeros(()))
            for row in rows
        ]
    )
    return earned - weight * (kl.flip(1).cumsum(1).flip(1) + later[:, None])


def normalised(earned: torch.Tensor, mask: torch.Tensor, summed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Less the mean and over the standard deviation of all trained tokens of the batch, over all processes; 0 where nothing is trained.

    Source: REINFORCE++ (arXiv 2501.03262), eq. 6. Tokens that all earned the same get exactly 0.
    """
    kept = mask.bool()
    values = earned[kept].double()
    count, total = summed(torch.tensor([float(len(values)), float(values.sum())], device=earned.device, dtype=torch.double)).tolist()
    mean = total / max(1.0, count)
    square = float(summed(((values - mean) ** 2).sum().reshape(1))[0])
    if square <= 1e-18 * max(1.0, count):
        return torch.zeros_like(earned)
    return torch.where(kept, (earned - mean) / math.sqrt(square / count + 1e-8), torch.zeros_like(earned))


_OF_COMPLETIONS = ("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps")


def _trimmed(inputs: Mapping[str, Any]) -> dict[str, Any]:
    prompt = max(1, int(inputs["prompt_mask"].sum(dim=1).max()))
    completion = max(1, int(inputs["completion_mask"].sum(dim=1).max()))
    by_token = {*_OF_COMPLETIONS, *(["advantages"] if inputs["advantages"].dim() == 2 else [])}
    out = {name: value[:, :completion] if name in by_token else value for name, value in inputs.items()}
    return {**out, "prompt_ids": inputs["prompt_ids"][:, -prompt:], "prompt_mask": inputs["prompt_mask"][:, -prompt:]}


def _scored_elsewhere(completions: Sequence[Any], **_: Any) -> list[float]:
    """Stands where TRL wants a reward function."""
    raise RuntimeError("rollouts are scored by their rubric")
