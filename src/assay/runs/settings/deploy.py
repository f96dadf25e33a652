"""Settings of `assay deploy` and of `assay registry`."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.deployment.traffic import Traffic
from assay.errors import ConfigError
from assay.runs.settings.fields import selected
from assay.support.settings import Settings, setting

__all__ = ["RegisterSettings", "SimulateSettings", "StartSettings"]


@dataclass(frozen=True, kw_only=True)
class SimulateSettings(Traffic):
    """Settings of `assay.api.deploy.simulate`: the traffic, and how often a plan is run on it."""

    plan: str | None = setting(
        None, "YAML file of the plan; by default shadow, 10 %, 50 % and 95 %, decided by the score.", metavar="FILE",
        file=True,
    )  # fmt: skip
    runs: int = setting(500, "Number of simulated deployments.", ge=1)
    seed: int = setting(0, "Seed of the first one; the others have the following ones.", ge=0)
    interval: int = setting(50, "Requests between two evaluations.", ge=1)
    goal: float | None = setting(
        None, "Relative gain that the candidate must reach; 0.1 by default, or that of the plan.", ge=0
    )


@dataclass(frozen=True, kw_only=True)
class StartSettings(Settings):
    """Settings of `assay.api.deploy.start`: the plan, and the checks before it."""

    plan: str | None = setting(
        None, "YAML file of the plan; by default shadow, 10 %, 50 % and 95 %, decided by the score.", metavar="FILE",
        file=True,
    )  # fmt: skip
    goal: float | None = setting(
        None, "Relative gain that the candidate must reach; 0.1 by default, or that of the plan.", ge=0
    )
    metrics: Sequence[str] = setting(
        (), "Further metric that guards, with the relative loss that is tolerated; repeatable.", flag="--metric",
        metavar="NAME:LOSS", many=True,
    )  # fmt: skip
    suite_data: str | None = setting(None, "Tasks of the validation suite that the candidate must pass.", metavar="D")
    suite_rubric: str | None = setting(None, "Rubric of the validation suite.", metavar="R")
    suite_threshold: float = setting(0.0, "Score that the candidate must reach on the validation suite.", ge=0, le=1)
    force: bool = setting(False, "Deploy a candidate that breaks a compatibility check or the validation suite.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.suite_data is None) != (self.suite_rubric is None):
            raise ConfigError("suite_data and suite_rubric belong together")
        if self.suite_threshold and self.suite_data is None:
            raise ConfigError(f"suite_threshold={self.suite_threshold!r} would have no effect without suite_data")


@dataclass(frozen=True, kw_only=True)
class RegisterSettings(Settings):
    """Settings of `register`."""

    parent: str | None = selected("Version from which it was made, such as support@1.", metavar="VERSION")
    alias: str | None = selected("Let this alias name it.")
    tenant: str | None = selected("Tenant that it belongs to.")
