"""Settings of a weight update. Refuses what cannot be."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from assay.errors import ConfigError
from assay.traces.credit import RETURNS

__all__ = ["ALGORITHMS", "LOSSES", "PolicyConfig", "SFTConfig", "made_of"]

T = TypeVar("T")

ALGORITHMS = ("grpo", "reinforce++", "reinforce++-turn", "ppo", "rloo")
VALUES = ("features", "head")
_HOW = ("micro", "rollout_timeout_s", "report_to")  # of a machine, not of what is trained: they may change at --resume
_BY_SEQUENCE = ("luspo", "vespo")  # losses that take one advantage a call
LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")  # of TRL's GRPOConfig, by name
_UNUSED = {"cispo": ("epsilon",), "sapo": ("epsilon", "epsilon_high"), "vespo": ("epsilon", "epsilon_high")}


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Settings of a warm-up by supervised fine-tuning.

    Args:
        model: `embedded/NAME` with adapters that are merged before (`+NAME`), or a model of the hub or a folder.
        min_quality: least quality of a row, in [0, 1].
        epochs: at most; training ends earlier where the held-out loss has not fallen for `patience` evaluations.
        batch: rows an optimizer step.
        rank: of the LoRA matrices; alpha is twice that.
        max_length: tokens of a row; longer ones are left out and counted, never cut.
        held_out: share of the tasks whose rows are not trained on, in [0, 0.5].
        report_to: a tracker of transformers' by name: tensorboard, trackio, wandb.
    """

    model: str = "embedded/smollm2-135m"
    min_quality: float = 0.8
    epochs: int = 3
    learning_rate: float = 2e-4
    batch: int = 8
    rank: int = 16
    max_length: int = 2048
    held_out: float = 0.1
    patience: int = 2
    evaluations: int = 6
    seed: int = 0
    report_to: str = "none"

    def __post_init__(self) -> None:
        _at_least(self, 1, "epochs", "batch", "rank", "patience", "evaluations")
        _at_least(self, 16, "max_length")
        _at_least(self, 0, "seed")
        _between(self, 0, 1, "min_quality")
        _between(self, 0, 0.5, "held_out")
        _above_zero(self, "learning_rate")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Settings of a weight update by policy gradient.

    Args:
        algorithm: where advantages come from, see `assay.optimizers.weights.advantages`.
        model: what is trained; adapters in its name are merged before, and are what the KL term holds the policy to.
        steps: optimizer steps; each takes `tasks` times `num_generations` rollouts, or every `iterations`-th does.
        num_generations: rollouts of a task; at least 2, and with `reinforce++` and `reinforce++-turn`, whose baseline is the batch's, at least 1.
        temperature: of the rollouts, and of the distribution that is trained.
        loss: TRL's `loss_type`. Rows are padded to whole batches with masked ones, which `dapo`, `cispo` and `vespo` do not notice.
        epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high], by default [0.8, 1.28]; `cispo` cuts the weight of a
            token at epsilon_high itself, by default 5 (arXiv 2510.13786). `sapo` and `vespo` have neither.
        beta: weight of the KL to the model as it was before (k3 estimate of TRL); costs a forward pass; 0 leaves it out.
        kl_in_reward: takes beta times the KL of each token (k1 estimate) from its reward, as the REINFORCE++ paper does, and not from the loss; of
            `reinforce++` alone.
        value: of `ppo`: `features`, a ridge regression on where a rollout stands, or `head`, one on the model's last hidden state at the end of
            each call's prompt as well (a linear value head, fitted in closed form).
        returns: how a call is credited, see `assay.traces.credit.returns`; `episode` gives all calls of a rollout the same.
        scale: divides advantages by a deviation (of `grpo` and `reinforce++-turn`).
        step_weight, outcome_weight: of step rewards and of the rubric's score in the rewards.
        micro: rollouts whose calls go through the model at once in a process; memory grows with it, speed on a CPU does not. 0: two, or one
            where the rollouts cannot be shared out so.
        max_length: tokens of a call, prompt and completion; longer ones are not trained on.
        max_completion: tokens of an answer.
        rollout_timeout_s: seconds after which a rollout is given up and left out.
        evaluate_every: steps between looks at the held-out tasks; 0 looks at the ends alone.
        held_out: tasks of `val` that are looked at, greedily and sampled.
        save_every: steps between checkpoints.
        forget: how much of its score on a retained task type the policy may lose before training stops.
        report_to: a tracker of transformers' by name: tensorboard, trackio, wandb.
    """

    algorithm: str = "grpo"
    model: str = "embedded/smollm2-135m"
    steps: int = 30
    tasks: int = 4
    num_generations: int = 6
    iterations: int = 1
    learning_rate: float = 2e-4
    rank: int = 16
    temperature: float = 1.0
    loss: str = "dapo"
    epsilon: float | None = None
    epsilon_high: float | None = None
    beta: float = 0.01
    kl_in_reward: bool = False
    value: str = "features"
    returns: str = "to_go"
    discount: float = 1.0
    gae_lambda: float = 0.95
    scale: bool = True
    step_weight: float = 1.0
    outcome_weight: float = 1.0
    micro: int = 0
    max_length: int = 2048
    max_completion: int = 128
    max_grad_norm: float = 1.0
    rollout_timeout_s: float = 120.0
    evaluate_every: int = 10
    held_out: int = 16
    save_every: int = 5
    forget: float = 0.1
    samples_every: int = 10
    vllm: str = "none"
    seed: int = 0
    report_to: str = "none"

    def __post_init__(self) -> None:
        for name, known in (
            ("algorithm", ALGORITHMS),
            ("value", VALUES),
            ("loss", LOSSES),
            ("returns", RETURNS),
            ("vllm", ("none", "colocate", "server")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")
        _at_least(self, 1 if self.algorithm.startswith("reinforce++") else 2, "num_generations")
        _at_least(self, 1, "steps", "tasks", "iterations", "rank", "max_completion", "held_out", "save_every")
        _at_least(self, 16, "max_length")
        _at_least(self, 0, "micro", "evaluate_every", "samples_every", "seed", "beta", "step_weight", "outcome_weight")
        _between(self, 0, 1, "discount", "gae_lambda", "forget")
        if unused := [name for name in _UNUSED.get(self.loss, ()) if getattr(self, name) is not None]:
            raise ConfigError(f"{' and '.join(unused)} would have no effect: the loss {self.loss} has none")
        for name, most in (("epsilon", 1), ("epsilon_high", 10)):
            if getattr(self, name) is not None:
                _between(self, 0, most, name)
        _between(self, 0.1, 2, "temperature")
        _above_zero(self, "learning_rate", "max_grad_norm", "rollout_timeout_s")
        self.shared_out(1)
        if self.algorithm == "ppo" and self.returns != "to_go":
            raise ConfigError(f"returns={self.returns!r} would have no effect: ppo takes generalised advantages (gae_lambda)")
        if self.algorithm != "ppo" and self.gae_lambda != 0.95:
            raise ConfigError(f"gae_lambda={self.gae_lambda!r} would have no effect on {self.algorithm}")
        if self.algorithm in ("rloo", "ppo", "reinforce++") and not self.scale:
            raise ConfigError(f"scale=False would have no effect on {self.algorithm}")
        if self.kl_in_reward and (self.algorithm != "reinforce++" or not self.beta):
            raise ConfigError("kl_in_reward=True goes with algorithm='reinforce++' and a beta above 0")
        if self.algorithm == "reinforce++" and self.loss in _BY_SEQUENCE:
            raise ConfigError(
                f"loss={self.loss!r} takes one advantage a call, and reinforce++ has one a token: use dapo, grpo, bnpo, dr_grpo or cispo"
            )
        if self.value != "features" and self.algorithm != "ppo":
            raise ConfigError(f"value={self.value!r} would have no effect on {self.algorithm}: only ppo has a value")
        if not self.step_weight and not self.outcome_weight:
            raise ConfigError("step_weight and outcome_weight are both 0: nothing would be rewarded")

    @property
    def clip(self) -> tuple[float, float]:
        """TRL's `epsilon` and `epsilon_high`."""
        high = 5.0 if self.loss == "cispo" else 0.28
        return (0.2 if self.epsilon is None else self.epsilon, high if self.epsilon_high is None else self.epsilon_high)

    def of_what(self) -> dict[str, Any]:
        """What a resumed training must share: all but settings of a machine. The mean of `bnpo` is by parts, so its `micro` is among it."""
        return {key: value for key, value in asdict(self).items() if key not in _HOW or (key, self.loss) == ("micro", "bnpo")}

    def shared_out(self, processes: int) -> tuple[int, int]:
        """Rollouts that go through the model at once in each process, and how often in a step.

        Raises:
            ConfigError: the rollouts of a step cannot be shared out so.
        """
        rollouts = self.tasks * self.num_generations
        micro = self.micro or (1 if rollouts % (2 * processes) else 2)
        if rollouts % (micro * processes):
            raise ConfigError(
                f"micro={micro!r} must divide the {rollouts} rollouts of a step (tasks times num_generations)"
                + (f", shared out to {processes} processes: change tasks, num_generations or micro" if processes > 1 else "")
            )
        return micro, rollouts // (micro * processes)


def made_of(kind: type[T], settings: Mapping[str, Any], what: str) -> T:
    """The settings as `kind`.

    Raises:
        ConfigError: one that `kind` does not have, or a value out of its range.
    """
    try:
        return kind(**settings)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}; there are the fields of {kind.__name__}, and name") from error


def _at_least(config: Any, least: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{name}={value!r} must be at least {least}")


def _between(config: Any, low: float, high: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(f"{name}={value!r} must be between {low} and {high}")


def _above_zero(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value!r} must be above 0")
