"""Settings of one compile of a judge."""

from dataclasses import dataclass

from assay.errors import ConfigError
from assay.judges.quality.agreement import (
    MEASURES,
)
from assay.optimizers.prompts.teleprompters import OPTIMIZERS, check_optimizer
from assay.support.settings import one_of

_NO_JUDGES = ("knn", "ensemble")  # optimizers whose result is not a judge


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Settings of one compile of a judge.

    Attributes:
        optimizer: `auto` (prompt forms, demonstrations and calibration), `calibrate` (calibration alone), or an
            optimizer of `assay compile` by name.
        objective: agreement measure that is maximised; None chooses by the scale, see `objective_of`.
        demos: demonstrations of each label, 1 to 16.
    """

    optimizer: str = "auto"
    objective: str | None = None
    demos: int = 2

    def __post_init__(self) -> None:
        if self.objective is not None and self.objective not in MEASURES:
            raise ConfigError(f"objective={self.objective!r} {one_of(self.objective, MEASURES)}")
        if not 1 <= self.demos <= 16:
            raise ConfigError(f"demos={self.demos!r} of each label must be between 1 and 16")
        if self.optimizer in _NO_JUDGES:
            raise ConfigError(
                f"{self.optimizer} makes another program around the judge; "
                f"take auto, calibrate, or another of {', '.join(OPTIMIZERS)}"
            )
        if self.optimizer not in ("auto", "calibrate"):
            check_optimizer(self.optimizer)
