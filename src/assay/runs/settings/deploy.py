"""Settings of `assay deploy` and of `assay registry`."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.deployment.preference_settings import PreferenceFields
from assay.deployment.suites import Suite, SuiteThresholds
from assay.deployment.traffic import Traffic
from assay.errors import ConfigError
from assay.runs.settings.fields import selected
from assay.support.settings import Settings, setting

__all__ = ["RegisterSettings", "RouteSettings", "SimulateSettings", "StartSettings", "SuiteSettings"]


@dataclass(frozen=True, kw_only=True)
class SimulateSettings(Traffic):
    """Settings of `assay.api.deploy.simulate`: the traffic, and how often a plan is run on it."""

    plan: str | None = setting(
        None, "YAML file of the plan; by default shadow, 10 %, 50 % and 95 %, decided by the score.", metavar="FILE",
        file=True,
    )  # fmt: skip
    runs: int = setting(500, "Number of simulated deployments.", ge=1)
    seed: int = setting(0, "Seed of the first simulated deployment; the others use the following seeds.", ge=0)
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
        (), "Additional guard metric and its tolerated relative loss; repeatable.", flag="--metric",
        metavar="NAME:LOSS", many=True,
    )  # fmt: skip
    suite_data: str | None = setting(
        None, "Tasks of the validation suite that the candidate must pass; by default the suite of the agent.",
        metavar="D",
    )  # fmt: skip
    suite_rubric: str | None = setting(None, "Rubric of the validation suite.", metavar="R")
    suite_threshold: float = setting(0.0, "Score that the candidate must reach on the validation suite.", ge=0, le=1)
    suite_pass_rate: float = setting(0.0, "Share of the suite's tasks that the candidate must pass.", ge=0, le=1)
    suite_pass_at: float = setting(0.5, "Minimum score with which a task of the suite counts as passed.", ge=0, le=1)
    force: bool = setting(False, "Deploy a candidate that breaks a compatibility check or the validation suite.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.suite_data is None) != (self.suite_rubric is None):
            raise ConfigError("suite_data and suite_rubric belong together")
        for name in ("suite_threshold", "suite_pass_rate"):
            if getattr(self, name) and self.suite_data is None:
                raise ConfigError(f"{name}={getattr(self, name)!r} would have no effect without suite_data")
        if self.suite_pass_at != 0.5 and not self.suite_data:
            raise ConfigError(f"suite_pass_at={self.suite_pass_at!r} would have no effect without suite_data")

    @property
    def suite(self) -> Suite | None:
        """The suite that is named here."""
        if self.suite_data is None or self.suite_rubric is None:
            return None
        return Suite(
            data=self.suite_data, rubric=self.suite_rubric, threshold=self.suite_threshold,
            pass_rate=self.suite_pass_rate, pass_at=self.suite_pass_at,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RegisterSettings(Settings):
    """Settings of `register`."""

    parent: str | None = selected("Version that the new one was made from, such as support@1.", metavar="VERSION")
    alias: str | None = selected("Alias to set to the new version.")
    tenant: str | None = selected("Tenant that the version belongs to.")


@dataclass(frozen=True, kw_only=True)
class SuiteSettings(SuiteThresholds):
    """Settings of `set_agent_suite`: the validation suite of an agent; without data and rubric it has none."""

    data: str | None = selected("Tasks of the suite: a file or a spec. Their val split is run.", metavar="D")
    rubric: str | None = selected("Rubric of the suite: a YAML file or a shipped name.", metavar="R")


@dataclass(frozen=True, kw_only=True)
class RouteSettings(PreferenceFields):
    """Settings of `set_routing`: between which versions is chosen, and how."""

    remove: bool = setting(False, "Remove the routing: the champion gets all requests again.", project=False)
