"""Settings of one compile of prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.errors import ConfigError
from assay.optimizers.budget import Decisions
from assay.optimizers.prompts.teleprompters import check_optimizer, shows_demos

_DEMOS = 16


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Settings of one compile.

    Attributes:
        optimizer: `auto`, or a DSPy optimizer by name.
        threshold: score in (0, 1] from which a run is a success to learn from.
        demos: most demonstrations that a predictor shows, 1 to 64.
        test: report on the test split. False keeps it sealed, for a job that reports on it itself.
        settings: arguments of the named optimizer; they override assay's.
        token_margin: expected loss of score in [0, 1) that is accepted for fewer prompt tokens; see
            `assay.optimizers.prompts.candidates.best_with_fewest_tokens`.
        thinking_margin: score that a thinking policy, or the halting of a `Refine` program, is shown on val to cost
            at most, in [0, 1); None fits none, see `assay.optimizers.prompts.thinking.fitted_policy`.
    """

    optimizer: str = "auto"
    threshold: float = 0.8
    demos: int = _DEMOS
    test: bool = True
    decisions: Decisions = field(default_factory=Decisions)
    settings: Mapping[str, Any] = field(default_factory=dict)
    token_margin: float = 0.01
    thinking_margin: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold={self.threshold!r} must be above 0 and at most 1")
        if not 0 <= self.token_margin < 1:
            raise ConfigError(
                f"token_margin={self.token_margin!r} must be at least 0 and below 1: "
                "how much expected score fewer tokens may cost"
            )
        if not 1 <= self.demos <= 64:
            raise ConfigError(f"demos={self.demos!r} must be between 1 and 64")
        check_optimizer(self.optimizer, self.settings)
        if self.demos != _DEMOS and not shows_demos(self.optimizer):
            raise ConfigError(
                f"demos={self.demos!r} would have no effect on optimizer={self.optimizer!r}: it adds no demonstrations "
                "or has its own settings for them (optimizer_settings)",
                flag="--optimizer-set NAME=VALUE",
            )
