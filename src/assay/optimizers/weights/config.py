"""Settings of a weight update. Refuses what cannot be."""

import math
from dataclasses import dataclass

from assay.errors import ConfigError

__all__ = ["SFTConfig"]


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
        for name in ("epochs", "batch", "rank", "patience", "evaluations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be at least 1")
        if self.max_length < 16:
            raise ConfigError(f"max_length={self.max_length!r} must be at least 16 tokens")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"learning_rate={self.learning_rate!r} must be above 0")
        if not 0 <= self.min_quality <= 1:
            raise ConfigError(f"min_quality={self.min_quality!r} must be between 0 and 1")
        if not 0 <= self.held_out <= 0.5:
            raise ConfigError(f"held_out={self.held_out!r} must be between 0 and 0.5")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed!r} must be at least 0")
