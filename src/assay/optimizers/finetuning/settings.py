"""Settings of a weight update, with their checks. Does not import torch, trl or dspy."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from assay.errors import ConfigError
from assay.models.defaults import DEFAULT_MODEL
from assay.support.presets import apply_preset
from assay.support.settings import LARGEST_SEED, Settings, nearest, setting, settings_of

T = TypeVar("T", bound=Settings)

ALGORITHMS = ("grpo", "reinforce++", "reinforce++-turn", "ppo", "rloo")
LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")  # of TRL's GRPOConfig, by name
RETURNS = ("to_go", "episode", "step", "uniform")  # of `assay.traces.credit`, which loads numpy
# settings of the machine, not of the training: they may change at --resume
_MACHINE = ("per_device_batch_size", "rollout_timeout_s", "report_to")
_BY_SEQUENCE = ("luspo", "vespo")  # losses that take one advantage a call
_UNUSED = {"cispo": ("epsilon",), "sapo": ("epsilon", "epsilon_high"), "vespo": ("epsilon", "epsilon_high")}
_REPORT_TO = "Where to report the curves: tensorboard, trackio or wandb."


@dataclass(frozen=True, kw_only=True)
class SFTSettings(Settings):
    """Settings of a warm-up by supervised fine-tuning. LoRA's alpha is twice its rank."""

    model: str = setting(
        DEFAULT_MODEL, "Model to train, embedded or of the hub; adapters in its name are merged first."
    )
    min_quality: float = setting(0.8, "Lowest rating or score of a row to train on.", ge=0, le=1)
    epochs: int = setting(3, "Maximum number of epochs.", ge=1)
    learning_rate: float = setting(2e-4, "Learning rate of AdamW.", gt=0)
    batch: int = setting(8, "Rows per optimizer step.", ge=1)
    lora_r: int = setting(16, "Rank of the LoRA matrices.", ge=1)
    max_length: int = setting(
        2048, "Maximum number of tokens of a row; longer rows are left out and counted, never truncated.", ge=16
    )
    eval_fraction: float = setting(0.1, "Share of the tasks that is held out for early stopping.", ge=0, le=0.5)
    patience: int = setting(2, "Evaluations without a lower held-out loss after which training stops.", ge=1)
    evaluations: int = setting(6, "Number of evaluations over the whole training.", ge=1)
    seed: int = setting(0, "Seed of the random number generators.", ge=0, le=LARGEST_SEED)
    report_to: str = setting("none", _REPORT_TO)


@dataclass(frozen=True, kw_only=True)
class PolicySettings(Settings):
    """Settings of a weight update by policy gradient.

    Every `iterations`-th step makes `prompts_per_step` times `num_generations` new rollouts. Rows are padded to whole
    batches with masked rows, which do not change the losses `dapo`, `cispo` and `vespo`.

    The ratio is clipped to [1 - epsilon, 1 + epsilon_high]. `cispo` limits the weight of a token to epsilon_high
    itself, by default 5 (arXiv 2510.13786); `sapo` and `vespo` have no clipping. `kl_in_reward` subtracts beta times
    the KL of each token (k1 estimate) from its reward, as in REINFORCE++ (arXiv 2501.03262), instead of adding it
    to the loss (k3 estimate, TRL).
    """

    algorithm: str = setting("grpo", "Where advantages come from.", choices=ALGORITHMS)
    model: str = setting(DEFAULT_MODEL, "Model to train; adapters in its name are merged first.")
    steps: int = setting(30, "Number of optimizer steps.", ge=1)
    prompts_per_step: int = setting(4, "Number of tasks in each step.", ge=1)
    num_generations: int = setting(6, "Rollouts of each task, at least 2; reinforce++ takes 1 too.", ge=1)
    iterations: int = setting(1, "Number of optimizer steps on the same rollouts.", ge=1)
    learning_rate: float = setting(2e-4, "Constant learning rate of AdamW.", gt=0)
    lora_r: int = setting(16, "Rank of the LoRA matrices.", ge=1)
    temperature: float = setting(
        1.0, "Sampling temperature of the rollouts, and of the distribution that is trained.", ge=0.1, le=2
    )
    loss: str = setting("dapo", "TRL's loss_type.", choices=LOSSES)
    epsilon: float | None = setting(None, "Lower clip of the ratio: 1 minus this; 0.2 by default.", ge=0, le=1)
    epsilon_high: float | None = setting(
        None,
        "Upper clip of the ratio: 1 plus this, 0.28 by default; with --loss cispo this itself, 5 by default.",
        ge=0,
        le=10,
    )
    beta: float = setting(
        0.01, "Weight of the KL penalty to the model before training; 0 disables it and saves a forward pass.", ge=0
    )
    kl_in_reward: bool = setting(
        False, "Put the KL penalty (beta) into each token's reward, not into the loss; for reinforce++."
    )
    value: str = setting(
        "features",
        "Value function: a regression on features of the rollout, or a linear head on the model's hidden state; "
        "for ppo.",
        choices=("features", "head"),
    )
    returns: str = setting("to_go", "How the reward of a rollout is credited to its calls.", choices=RETURNS)
    discount: float = setting(1.0, "Discount factor of later rewards.", ge=0, le=1)
    gae_lambda: float = setting(0.95, "Decay of the generalised advantages over turns; for ppo.", ge=0, le=1)
    scale: bool = setting(
        True,
        "Divide advantages by their deviation; for grpo and reinforce++-turn.",
        flag="--no-scale",
        flag_help="Do not divide advantages by their deviation; for grpo and reinforce++-turn.",
    )
    step_weight: float = setting(1.0, "Weight of step rewards in the return.", ge=0)
    outcome_weight: float = setting(1.0, "Weight of the rubric's score in the return.", ge=0)
    per_device_batch_size: int = setting(
        0,
        "Rollouts that each process passes through the model at a time; 0 chooses two, or one if the rollouts of a "
        "step cannot be divided by two.",
        ge=0,
        job=False,
    )
    max_length: int = setting(
        2048, "Maximum number of tokens of a call, prompt and completion; longer calls are not trained on.", ge=16
    )
    max_completion: int = setting(128, "Maximum number of tokens of an answer.", ge=1)
    max_grad_norm: float = setting(1.0, "Norm to which gradients are clipped.", gt=0)
    rollout_timeout_s: float = setting(
        120.0, "Seconds after which a rollout is abandoned and left out.", gt=0, job=False
    )
    evaluate_every: int = setting(
        10, "Steps between evaluations on held-out tasks; 0 evaluates only before and after.", ge=0
    )
    eval_tasks: int = setting(16, "Number of held-out tasks (of val) in each evaluation.", ge=1)
    save_every: int = setting(5, "Steps between checkpoints.", ge=1)
    max_score_drop: float = setting(0.1, "Score that a retention task may lose before training stops.", ge=0, le=1)
    samples_every: int = setting(10, "Steps between sample rollouts in the report.", ge=0)
    vllm: str = setting(
        "none",
        "Generate rollouts with vLLM on a GPU: in the training processes (colocate) or on a server.",
        choices=("none", "colocate", "server"),
    )
    seed: int = setting(0, "Seed of the random number generators.", ge=0, le=LARGEST_SEED)
    report_to: str = setting("none", _REPORT_TO, job=False)

    def __post_init__(self) -> None:
        apply_preset(self, "algorithm", PolicySettings)
        super().__post_init__()
        least = 1 if self.algorithm.startswith("reinforce++") else 2
        if self.num_generations < least:
            raise ConfigError(f"num_generations={self.num_generations!r} must be at least {least}")
        self.shared_out(1)
        self._check_loss()
        self._check_algorithm()
        if not self.step_weight and not self.outcome_weight:
            raise ConfigError("step_weight and outcome_weight are both 0: nothing would be rewarded")

    def _check_loss(self) -> None:
        if unused := [name for name in _UNUSED.get(self.loss, ()) if getattr(self, name) is not None]:
            raise ConfigError(f"{' and '.join(unused)} would have no effect: the loss {self.loss} has none")
        if self.algorithm == "reinforce++" and self.loss in _BY_SEQUENCE:
            raise ConfigError(
                f"loss={self.loss!r} takes one advantage a call, and reinforce++ has one a token: "
                "use dapo, grpo, bnpo, dr_grpo or cispo"
            )

    def _check_algorithm(self) -> None:
        if self.algorithm == "ppo" and self.returns != "to_go":
            raise ConfigError(
                f"returns={self.returns!r} would have no effect: ppo takes generalised advantages (gae_lambda)"
            )
        if self.algorithm != "ppo" and self.gae_lambda != 0.95:
            raise ConfigError(f"gae_lambda={self.gae_lambda!r} would have no effect on {self.algorithm}")
        if self.algorithm in ("rloo", "ppo", "reinforce++") and not self.scale:
            raise ConfigError(f"scale=False would have no effect on {self.algorithm}")
        if self.kl_in_reward and (self.algorithm != "reinforce++" or not self.beta):
            raise ConfigError("kl_in_reward=True needs algorithm='reinforce++' and beta > 0")
        if self.value != "features" and self.algorithm != "ppo":
            raise ConfigError(f"value={self.value!r} would have no effect on {self.algorithm}: only ppo has a value")

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
                f"per_device_batch_size={batch!r} must divide the {rollouts} rollouts of a step "
                "(prompts_per_step times num_generations)"
                + (f", shared out to {processes} processes: change one of the three" if processes > 1 else "")
            )
        return batch, rollouts // (batch * processes)


def settings_from(kind: type[T], values: Mapping[str, Any], argument: str) -> T:
    """The settings as `kind`.

    Raises:
        ConfigError: `kind` has no such setting, or a value is out of its range.
    """
    accepted = settings_of(kind)
    if unknown := sorted(values.keys() - accepted.keys()):
        near = nearest(unknown[0], accepted)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(accepted)}"
        raise ConfigError(f"{argument}: {kind.__name__} has no setting {', '.join(map(repr, unknown))}; {hint}")
    return kind(**values)
