"""Settings of the benchmark pool. Loads no heavy package."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from assay.errors import ConfigError
from assay.support.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class PoolSettings(Settings):
    """Which rollouts of production become tasks, and what the pool needs before it may be trained on.

    Attributes:
        min_points, min_clean, min_task_types: gates; 0 switches one off.
    """

    tenants: Sequence[str] = setting(
        (), "Tenant whose rollouts are taken; repeatable. Rollouts of other tenants are left out.", flag="--tenant",
        many=True,
    )  # fmt: skip
    require_consent: bool = setting(False, "Only rollouts with recorded consent.")
    task_types: Sequence[str] = setting(
        (), "Only rollouts of this task type; repeatable.", flag="--task-type", many=True
    )
    since_days: float | None = setting(
        None, "Only rollouts that began within this number of days; by default all.", gt=0
    )
    max_tasks: int = setting(
        20_000, "Maximum number of tasks, divided between the task types; hard and failed ones are kept first.", ge=1
    )
    privacy: str = setting(
        "auto", "Anonymization, as in assay export; with names the gate requires that it is verified.",
        choices=("auto", "patterns", "names", "off"),
    )  # fmt: skip
    privacy_key: str | None = setting(
        None, "File with the key of the surrogates, made if it is missing; by default loop/pool.key next to the store.",
        metavar="FILE", file=True,
    )  # fmt: skip
    min_points: int = setting(5000, "Gate: minimum number of tasks.", ge=0)
    min_clean: float = setting(
        0.95, "Gate: minimum share of rollouts that ended without a failure of a model or judge and are scored.",
        ge=0, le=1,
    )  # fmt: skip
    min_task_types: int = setting(5, "Gate: minimum number of task types.", ge=0)
    against: str | None = setting(
        None, "Training data with which the pool is compared: share of task types, length of inputs.", metavar="D",
        file=True,
    )  # fmt: skip


# -- Settings of a routing preference. Loads no heavy package; `assay.deployment.routing` computes with them.


@dataclass(frozen=True, kw_only=True)
class PreferenceFields(Settings):
    """Fields of a preference; the command line has them too, but may leave out the versions.

    Attributes:
        cost_weight: 0 ignores the cost.
    """

    versions: Sequence[int] = setting(
        (), "Number of a version; give at least two.", flag="--version", metavar="NUMBER", many=True
    )
    floor: float = setting(0.05, "Minimum probability with which a version is chosen.", ge=0, le=0.5)
    cost_weight: float = setting(0.0, "Score that one dollar of a rollout's cost is worth.", ge=0)
    window_days: float = setting(30.0, "Number of most recent days whose rollouts count.", gt=0)


@dataclass(frozen=True, kw_only=True)
class Preference(PreferenceFields):
    """Between which versions of an agent is chosen, and how. The versions are stored sorted, each once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "versions", tuple(sorted(set(self.versions))))
        if len(self.versions) < 2:
            raise ConfigError("a preference needs at least two versions")
        if self.floor * len(self.versions) > 1:
            raise ConfigError(f"floor={self.floor!r} of {len(self.versions)} versions is more than 1 in all")


# -- Traffic with known truth, for simulated deployments.


@dataclass(frozen=True, kw_only=True)
class Traffic(Settings):
    """Simulated traffic with known truth. One request a second; a rollout scores 0 or 1.

    Attributes:
        effect: of the candidate, relative to the base rate: -0.25 with base 0.7 is 0.525.
        drift: by how much the base rate rises over 5,000 requests, for both arms.
        novelty: gain of the candidate that fades with a half-life of 300 requests, relative to the base rate.
        delay_s: after which a reward of 0 arrives; a reward of 1 takes three times as long.
        missing: share of rollouts whose reward never arrives.
        unscored_failures: share of the champion's rewards of 0 that never arrive, besides.
        candidate_unscored_failures: the same of the candidate.
        task_types: their base rates are spread evenly over `base` - 0.15 to `base` + 0.15.
        users: units; the k-th most active sends a share of requests in proportion to 1 / k^`heavy`. Their own rates
            differ with a standard deviation of `user_spread`.
        tasks: number of tasks that come again, whose own rates differ with a standard deviation of `task_spread`.
        history: rollouts of the champion before the deployment.
    """

    base: float = setting(0.7, "Success rate of the champion.", ge=0, le=1)
    effect: float = setting(0.0, "Effect of the candidate, relative to the base rate.", ge=-1)
    drift: float = setting(0.0, "Change of the base rate over 5,000 requests.", ge=-1, le=1)
    novelty: float = setting(0.0, "Gain of the candidate that fades, relative to the base rate.", ge=-1)
    delay_s: float = setting(
        0.0, "Seconds after which a reward of 0 arrives; a reward of 1 takes three times as long.", ge=0
    )
    missing: float = setting(0.0, "Share of rollouts without a reward.", ge=0, lt=1)
    unscored_failures: float = setting(0.0, "Share of the champion's failures without a reward, besides.", ge=0, le=1)
    candidate_unscored_failures: float = setting(
        0.0, "Share of the candidate's failures without a reward, besides.", ge=0, le=1
    )
    task_types: int = setting(3, "Number of simulated task types.", ge=1, le=20)
    users: int = setting(1000, "Number of simulated users.", ge=2, le=10_000_000)
    heavy: float = setting(0.5, "Exponent of the users' activity; 0 makes all equally active.", ge=0, le=2)
    user_spread: float = setting(0.1, "Standard deviation of the users' own rates.", ge=0, le=0.5)
    tasks: int = setting(0, "Number of tasks that come again and again; 0: each is new.", ge=0, le=1_000_000)
    task_spread: float = setting(0.3, "Standard deviation of the rates of tasks that come again.", ge=0, le=0.5)
    history: int = setting(
        0, "Rollouts of the champion recorded before the deployment, which its covariate is fitted on.", ge=0,
        le=1_000_000,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks and self.changed("task_spread"):
            raise ConfigError(f"task_spread={self.task_spread!r} would have no effect without tasks")


# -- The validation suite of an agent: tasks and a rubric with thresholds that a candidate must pass before stage 0.
#
# Does not store it (`assay.deployment.registry`) or run it (`assay.api.deploy.start`).


@dataclass(frozen=True, kw_only=True)
class SuiteThresholds(Settings):
    """What a candidate must reach on a validation suite."""

    threshold: float = setting(0.0, "Mean score on the suite that a candidate must reach.", ge=0, le=1)
    pass_rate: float = setting(0.0, "Share of the suite's tasks that a candidate must pass.", ge=0, le=1)
    pass_at: float = setting(0.5, "Minimum score with which a task of the suite counts as passed.", ge=0, le=1)


@dataclass(frozen=True, kw_only=True)
class Suite(SuiteThresholds):
    """A validation suite. The candidate runs the val split of its tasks."""

    data: str = setting(help="Tasks.")
    rubric: str = setting(help="Rubric.")


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """How a candidate did on the suite; kept with its deployment.

    Attributes:
        score: mean over the scored tasks, with its 95 % interval; NaN without one.
        pass_rate: share of all tasks that were scored and reached `pass_at`.
        missed: the thresholds that were not reached; empty if it passed.
    """

    suite: Suite
    score: float
    low: float
    high: float
    n: int
    unscored: int
    pass_rate: float
    missed: tuple[str, ...]

    @classmethod
    def of(cls, suite: Suite, scores: Mapping[str, float], interval: tuple[float, float]) -> "SuiteResult":
        """From the scores by task id; NaN where unscored."""
        scored = [value for value in scores.values() if value == value]
        mean = sum(scored) / len(scored) if scored else float("nan")
        passed = sum(value >= suite.pass_at for value in scored) / len(scores) if scores else 0.0
        missed = []
        if not mean >= suite.threshold:
            missed.append(f"scores {mean:.3f} on the validation suite, {suite.threshold:g} is needed")
        if passed < suite.pass_rate:
            missed.append(f"passes {passed:.1%} of the validation suite's tasks, {suite.pass_rate:.1%} are needed")
        return cls(
            suite=suite, score=mean, low=interval[0], high=interval[1], n=len(scores),
            unscored=len(scores) - len(scored), pass_rate=passed, missed=tuple(missed),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        values = {name: value if value == value else None for name, value in vars(self).items()}
        return {**values, "suite": asdict(self.suite), "missed": list(self.missed)}
