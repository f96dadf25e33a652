"""Settings of a weight update, with their checks. Does not import torch, trl or dspy."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le

from assay.errors import ConfigError
from assay.models.roles import DEFAULT_MODEL
from assay.support.names import nearest, one_of
from assay.support.options import (
    EXPERT,
    Count,
    Flag,
    Positive,
    Seconds,
    Seed,
    Settings,
    Share,
    apply_preset,
    options_of,
)

T = TypeVar("T", bound=Settings)

ALGORITHMS = ("grpo", "reinforce++", "reinforce++-turn", "ppo", "rloo")
# settings of the machine, not of the training: they may change at --resume
_MACHINE = ("per_device_batch_size", "rollout_timeout_s", "report_to")
_BY_SEQUENCE = ("luspo", "vespo")  # losses that take one advantage a call
_UNUSED = {"cispo": ("epsilon",), "sapo": ("epsilon", "epsilon_high"), "vespo": ("epsilon", "epsilon_high")}
_Rate = Annotated[float, Gt(0)]
_Weight = Annotated[float, Ge(0)]
_Length = Annotated[int, Ge(16)]


class SFTSettings(Settings):
    """Weight update by supervised fine-tuning.

    LoRA's alpha is twice its rank.
    """

    model: str = DEFAULT_MODEL
    """Model to train, embedded or of the hub; adapters in its name are merged first."""
    min_quality: Share = 0.8
    """Lowest rating or score of a row to train on."""
    epochs: Positive = 3
    """Maximum number of epochs."""
    learning_rate: _Rate = 2e-4
    """Learning rate of AdamW."""
    batch: Positive = 8
    """Rows per optimizer step."""
    lora_r: Positive = 16
    """Rank of the LoRA matrices."""
    max_length: _Length = 2048
    """Maximum number of tokens of a row; longer rows are left out and counted, never truncated."""
    eval_fraction: Annotated[float, Ge(0), Le(0.5), EXPERT] = 0.1
    """Share of the tasks that is held out for early stopping."""
    patience: Annotated[Positive, EXPERT] = 2
    """Evaluations without a lower held-out loss after which training stops."""
    evaluations: Annotated[Positive, EXPERT] = 6
    """Number of evaluations over the whole training."""
    seed: Seed = 0
    """Seed of the random number generators."""
    report_to: str = "none"
    """Where to report the curves: tensorboard, trackio or wandb."""


class PolicySettings(Settings):
    """Weight update by policy gradient.

    Every `iterations`-th step makes `prompts_per_step` times `num_generations` new rollouts. Rows are padded to whole
    batches with masked rows, which do not change the losses `dapo`, `cispo` and `vespo`.

    The ratio is clipped to [1 - epsilon, 1 + epsilon_high]. `cispo` limits the weight of a token to epsilon_high
    itself, by default 5 (arXiv 2510.13786); `sapo` and `vespo` have no clipping. `kl_in_reward` subtracts beta times
    the KL of each token (k1 estimate) from its reward, as in REINFORCE++ (arXiv 2501.03262), instead of adding it
    to the loss (k3 estimate, TRL).
    """

    algorithm: Annotated[str, Flag(name="--method", path=True)] = "grpo"
    """Where advantages come from, or a .toml file of settings such as optimizers/grpo.toml. grpo: each call's
    return against its group's mean at the same turn, over the group's deviation; rloo: against the mean of the
    others of its group, unscaled; reinforce++: returns normalised over all tokens of the batch, without groups;
    reinforce++-turn: against the batch's mean at the same turn, over the batch's deviation; ppo: generalised
    advantages over the turns, from a fitted value."""
    model: str = DEFAULT_MODEL
    """Model to train; adapters in its name are merged first."""
    steps: Positive = 30
    """Number of optimizer steps."""
    prompts_per_step: Positive = 4
    """Number of tasks in each step."""
    num_generations: Positive = 6
    """Rollouts of each task, at least 2; reinforce++ takes 1 too."""
    iterations: Annotated[Positive, EXPERT] = 1
    """Number of optimizer steps on the same rollouts."""
    learning_rate: _Rate = 2e-4
    """Constant learning rate of AdamW."""
    lora_r: Positive = 16
    """Rank of the LoRA matrices."""
    temperature: Annotated[float, Ge(0.1), Le(2)] = 1.0
    """Sampling temperature of the rollouts, and of the distribution that is trained."""
    loss: Literal["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """TRL's loss_type."""
    epsilon: Annotated[Share | None, EXPERT] = None
    """Lower clip of the ratio: 1 minus this; 0.2 by default."""
    epsilon_high: Annotated[Annotated[float, Ge(0), Le(10)] | None, EXPERT] = None
    """Upper clip of the ratio: 1 plus this, 0.28 by default; with `loss` cispo this itself, 5 by default."""
    beta: _Weight = 0.01
    """Weight of the KL penalty to the model before training; 0 disables it and saves a forward pass."""
    kl_in_reward: Annotated[bool, EXPERT] = False
    """Put the KL penalty (beta) into each token's reward, not into the loss; for reinforce++."""
    value: Annotated[Literal["features", "head"], EXPERT] = "features"
    """Value function: a regression on features of the rollout, or a linear head on the model's hidden state; for
    ppo."""
    returns: Literal["to_go", "episode", "step", "uniform"] = "to_go"
    """How the reward of a rollout is credited to its calls."""
    discount: Share = 1.0
    """Discount factor of later rewards."""
    gae_lambda: Annotated[Share, EXPERT] = 0.95
    """Decay of the generalised advantages over turns; for ppo."""
    scale: Annotated[bool, EXPERT] = True
    """Divide advantages by their deviation; for grpo and reinforce++-turn."""
    step_weight: _Weight = 1.0
    """Weight of step rewards in the return."""
    outcome_weight: Annotated[_Weight, EXPERT] = 1.0
    """Weight of the rubric's score in the return."""
    per_device_batch_size: Annotated[Count, Flag(job=False)] = 0
    """Rollouts that each process passes through the model at a time; 0 chooses two, or one if the rollouts of a step
    cannot be divided by two."""
    max_length: _Length = 2048
    """Maximum number of tokens of a call, prompt and completion; longer calls are not trained on."""
    max_completion: Positive = 128
    """Maximum number of tokens of an answer."""
    max_grad_norm: Annotated[float, Gt(0), EXPERT] = 1.0
    """Norm to which gradients are clipped."""
    rollout_timeout_s: Annotated[Seconds, Flag(metavar="SECONDS", job=False)] = 120.0
    """Seconds after which a rollout is abandoned and left out."""
    evaluate_every: Count = 10
    """Steps between evaluations on held-out tasks; 0 evaluates only before and after."""
    eval_tasks: Positive = 16
    """Number of held-out tasks (of val) in each evaluation."""
    save_every: Annotated[Positive, EXPERT] = 5
    """Steps between checkpoints."""
    max_score_drop: Share = 0.1
    """Score that a retention task may lose before training stops."""
    samples_every: Annotated[Count, EXPERT] = 10
    """Steps between sample rollouts in the report."""
    vllm: Literal["none", "colocate", "server"] = "none"
    """Generate rollouts with vLLM on a GPU: in the training processes (colocate) or on a server."""
    seed: Seed = 0
    """Seed of the random number generators."""
    report_to: Annotated[str, Flag(job=False)] = "none"
    """Where to report the curves: tensorboard, trackio or wandb."""

    def __post_init__(self) -> None:
        apply_preset(self, "algorithm", PolicySettings)
        super().__post_init__()

    def check(self) -> None:
        if self.algorithm not in ALGORITHMS:
            wrong = one_of(self.algorithm, ALGORITHMS, other="a .toml file")
            raise ConfigError(f"{self.algorithm!r} {wrong}", field="algorithm")
        least = 1 if self.algorithm.startswith("reinforce++") else 2
        if self.num_generations < least:
            raise ConfigError(f"must be at least {least}, not {self.num_generations}", field="num_generations")
        self.shared_out(1)
        self._check_loss()
        self._check_algorithm()
        if not self.step_weight and not self.outcome_weight:
            raise ConfigError("`step_weight` and `outcome_weight` are both 0: nothing would be rewarded")

    def _check_loss(self) -> None:
        if unused := [name for name in _UNUSED.get(self.loss, ()) if getattr(self, name) is not None]:
            raise ConfigError(f"would have no effect: the loss {self.loss} has none", field=unused[0])
        if self.algorithm == "reinforce++" and self.loss in _BY_SEQUENCE:
            raise ConfigError(
                f"{self.loss} takes one advantage a call, and reinforce++ has one a token", field="loss",
                hint="Use dapo, grpo, bnpo, dr_grpo or cispo",
            )  # fmt: skip

    def _check_algorithm(self) -> None:
        unused = {
            "returns": self.algorithm == "ppo",  # it takes generalised advantages
            "gae_lambda": self.algorithm != "ppo",
            "value": self.algorithm != "ppo",
            "scale": self.algorithm in ("rloo", "ppo", "reinforce++"),
        }
        if names := self.changed(*(name for name, is_unused in unused.items() if is_unused)):
            raise ConfigError(f"would have no effect on {self.algorithm}", field=names[0])
        if self.kl_in_reward and (self.algorithm != "reinforce++" or not self.beta):
            raise ConfigError("needs `algorithm` reinforce++ and a `beta` above 0", field="kl_in_reward")

    @property
    def rollout_steps(self) -> int:
        """Number of steps that make new rollouts."""
        return math.ceil(self.steps / self.iterations)

    @property
    def clip(self) -> tuple[float, float]:
        """TRL's `epsilon` and `epsilon_high`."""
        high = 5.0 if self.loss == "cispo" else 0.28
        return (0.2 if self.epsilon is None else self.epsilon, high if self.epsilon_high is None else self.epsilon_high)

    def of_what(self) -> dict[str, Any]:
        """Settings that a resumed training must have unchanged: all but those of the machine.

        `bnpo` takes its mean over the batch of a device, so with it the size of that batch must not change either.
        """
        also_fixed = ("per_device_batch_size",) if self.loss == "bnpo" else ()
        return {key: value for key, value in asdict(self).items() if key not in _MACHINE or key in also_fixed}

    def shared_out(self, processes: int) -> tuple[int, int]:
        """Rollouts per forward pass in each process, and the number of passes in a step.

        Raises:
            ConfigError: the rollouts of a step cannot be divided evenly.
        """
        rollouts = self.prompts_per_step * self.num_generations
        batch = self.per_device_batch_size or (1 if rollouts % (2 * processes) else 2)
        if rollouts % (batch * processes):
            raise ConfigError(
                f"{batch} must divide the {rollouts} rollouts of a step (`prompts_per_step` times `num_generations`)"
                + (f", shared out to {processes} processes: change one of the three" if processes > 1 else ""),
                field="per_device_batch_size",
            )
        return batch, rollouts // (batch * processes)


def settings_from(kind: type[T], values: Mapping[str, Any], argument: str) -> T:
    """The settings as `kind`.

    Raises:
        ConfigError: `kind` has no such setting, or a value is out of its range.
    """
    listed: Any = kind
    accepted = options_of(listed)
    if unknown := sorted(values.keys() - accepted.keys()):
        near = nearest(unknown[0], accepted)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(accepted)}"
        raise ConfigError(f"{argument}: {kind.__name__} has no setting {', '.join(map(repr, unknown))}; {hint}")
    return kind(**values)
