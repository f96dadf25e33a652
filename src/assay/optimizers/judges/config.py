"""Settings of the search for a judge."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from assay.errors import ConfigError
from assay.optimizers.prompts.config import optimizer_of
from assay.support.options import Flag, Parse, Settings

_NO_JUDGES = ("knn", "ensemble")  # optimizers whose result is not a judge


class JudgeConfig(Settings):
    """Search."""

    optimizer: Annotated[Any, Flag(path=True), Parse(optimizer_of)] = "auto"
    """Optimizer: auto (prompt forms, demonstrations and calibration), calibrate (calibration alone), or one of assay
    compile, such as gepa, mipro or copro."""
    objective: Literal["accuracy", "kappa", "weighted_kappa", "alpha", "spearman", "brier"] | None = None
    """Measure of agreement to optimize; by default chosen by the kind of the scale."""
    demos: Annotated[int, Ge(1), Le(16)] = 2
    """Number of demonstrations of each label."""

    def check(self) -> None:
        if self.optimizer in ("auto", "calibrate"):
            return
        from assay.optimizers.prompts.teleprompters import OPTIMIZERS, check_optimizer

        if self.optimizer in _NO_JUDGES:
            raise ConfigError(
                f"{self.optimizer} makes another program around the judge; "
                f"take auto, calibrate, or another of {', '.join(OPTIMIZERS)}"
            )
        check_optimizer(self.optimizer)
