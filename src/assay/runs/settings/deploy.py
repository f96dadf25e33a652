"""Settings of `assay deploy` and of `assay registry`."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.deployment.settings import PreferenceFields, Suite, SuiteThresholds, Traffic
from assay.errors import ConfigError
from assay.runs.settings.fields import repeated, selected
from assay.runs.settings.traces import StoredJudgeSettings
from assay.support.settings import LARGEST_SEED, Settings, setting, settings_of

_THRESHOLDS = tuple(settings_of(SuiteThresholds))


@dataclass(frozen=True, kw_only=True)
class SimulateSettings(Traffic):
    """Settings of `assay.api.deploy.start`: the traffic, and how often a plan is run on it."""

    plan: str | None = setting(
        None, "YAML file of the plan; by default shadow, 10 %, 50 % and 95 %, decided by the score.", metavar="FILE",
        file=True,
    )  # fmt: skip
    runs: int = setting(500, "Number of simulated deployments.", ge=1)
    seed: int = setting(
        0, "Seed of the first simulated deployment; the others use the following seeds.", ge=0, le=LARGEST_SEED
    )
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
    suite_threshold: float = repeated(SuiteThresholds, "threshold")
    suite_pass_rate: float = repeated(SuiteThresholds, "pass_rate")
    suite_pass_at: float = repeated(SuiteThresholds, "pass_at")
    replay: int = setting(
        3, "Recorded rollouts of the champion that the candidate runs before the start, to compare its outputs with "
        "the recorded ones; 0 for none. With --dry-run also a trial of the shadow step.", ge=0, le=10_000,
    )  # fmt: skip
    replay_rubric: str | None = setting(
        None, "Rubric that scores these replays; its judges need models of their own.", metavar="R"
    )
    force: bool = setting(False, "Deploy a candidate that breaks a compatibility check or the validation suite.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.suite_data is None) != (self.suite_rubric is None):
            raise ConfigError("suite_data and suite_rubric belong together")
        if self.suite_data is None and (changed := self.changed(*(f"suite_{name}" for name in _THRESHOLDS))):
            raise ConfigError(f"{changed[0]}={getattr(self, changed[0])!r} would have no effect without suite_data")
        if self.replay_rubric is not None and not self.replay:
            raise ConfigError(f"replay_rubric={self.replay_rubric!r} would have no effect with replay=0")

    @property
    def suite(self) -> Suite | None:
        """The suite that is named here."""
        if self.suite_data is None or self.suite_rubric is None:
            return None
        thresholds = {name: getattr(self, f"suite_{name}") for name in _THRESHOLDS}
        return Suite(data=self.suite_data, rubric=self.suite_rubric, **thresholds)


@dataclass(frozen=True, kw_only=True)
class AdvanceSettings(StoredJudgeSettings):
    """Settings of `advance_deployment`: the model of the judges that score rollouts."""


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
    remove: bool = setting(False, "Remove the suite: candidates run without one.", project=False)


@dataclass(frozen=True, kw_only=True)
class RouteSettings(PreferenceFields):
    """Settings of `set_routing`: between which versions is chosen, and how."""

    remove: bool = setting(False, "Remove the routing: the champion gets all requests again.", project=False)
