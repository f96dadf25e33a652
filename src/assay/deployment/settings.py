"""Settings of the benchmark pool, of routing, simulated traffic and validation suites. Loads no heavy package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from assay.errors import ConfigError
from assay.support.options import Count, Flag, Positive, Settings, Share


class PoolSettings(Settings):
    """Pool.

    Which rollouts of production become tasks, and what the pool needs before it may be trained on.
    """

    tenants: Annotated[Sequence[str], Flag(name="--tenant")] = ()
    """Tenant whose rollouts are taken; repeatable. Rollouts of other tenants are left out."""

    require_consent: bool = False
    """Only rollouts with recorded consent."""

    task_types: Annotated[Sequence[str], Flag(name="--task-type")] = ()
    """Only rollouts of this task type; repeatable."""

    since_days: Annotated[float, Gt(0)] | None = None
    """Only rollouts that began within this number of days; by default all."""

    max_tasks: Positive = 20_000
    """Maximum number of tasks, divided between the task types; hard and failed ones are kept first."""

    privacy: Literal["auto", "patterns", "names", "off"] = "auto"
    """Anonymization, as in assay export; with names the gate requires that it is verified."""

    privacy_key: Annotated[str | None, Flag(metavar="FILE", path=True)] = None
    """File with the key of the surrogates, made if it is missing; by default loop/pool.key next to the store."""

    min_points: Count = 5000
    """Gate: minimum number of tasks; 0 switches a gate off."""

    min_clean: Share = 0.95
    """Gate: minimum share of rollouts that ended without a failure of a model or judge and are scored."""

    min_task_types: Count = 5
    """Gate: minimum number of task types."""

    against: Annotated[str | None, Flag(metavar="D", path=True)] = None
    """Training data with which the pool is compared: share of task types, length of inputs."""


# -- Routing, see `assay.deployment.routing`.


class PreferenceFields(Settings):
    """Routing."""

    versions: Annotated[Sequence[int], Flag(name="--version", metavar="NUMBER", key=False)] = ()
    """Number of a version; give at least two."""

    floor: Annotated[float, Ge(0), Le(0.5), Flag(key=False)] = 0.05
    """Minimum probability with which a version is chosen."""

    cost_weight: Annotated[float, Ge(0), Flag(key=False)] = 0.0
    """Score that one dollar of a rollout's cost is worth; 0 ignores the cost."""


class Preference(PreferenceFields):
    """Between which versions of an agent is chosen, and how. The versions are stored sorted, each once.

    Rollouts of the last `window_days` count.
    """

    window_days: Annotated[float, Gt(0)] = 30.0

    def check(self) -> None:
        object.__setattr__(self, "versions", tuple(sorted(set(self.versions))))
        if len(self.versions) < 2:
            raise ConfigError("must be at least two versions", field="versions")
        if self.floor * len(self.versions) > 1:
            raise ConfigError(f"{self.floor} of {len(self.versions)} versions is more than 1 in all", field="floor")


# -- Traffic with known truth, for simulated deployments.


class TrafficFields(Settings):
    """Traffic."""

    base: Share = 0.7
    """Success rate of the champion."""

    effect: Annotated[float, Ge(-1)] = 0.0
    """Effect of the candidate, relative to the base rate: -0.25 with base 0.7 is 0.525."""

    users: Annotated[int, Ge(2), Le(10_000_000)] = 1000
    """Number of simulated users."""


class Traffic(TrafficFields):
    """One request a second; a rollout scores 0 or 1.

    Attributes:
        drift: change of the base rate over 5,000 requests, for both arms.
        novelty: gain of the candidate that fades with a half-life of 300 requests, relative to the base rate.
        delay_s: seconds after which a reward of 0 arrives; a reward of 1 takes three times as long.
        missing: share of rollouts without a reward.
        unscored_failures: share of the champion's failures without a reward, besides.
        candidate_unscored_failures: share of the candidate's failures without a reward, besides.
        task_types: their base rates are spread evenly over 0.15 below to 0.15 above the base.
        heavy: exponent of the users' activity: the k-th most active sends a share in proportion to 1 / k to this
            power; 0 makes all equally active.
        user_spread: standard deviation of the users' own rates.
        tasks: number of tasks that come again and again; 0: each is new.
        task_spread: standard deviation of the rates of tasks that come again.
        history: rollouts of the champion recorded before the deployment, which its covariate is fitted on.
    """

    drift: Annotated[float, Ge(-1), Le(1)] = 0.0
    novelty: Annotated[float, Ge(-1)] = 0.0
    delay_s: Annotated[float, Ge(0)] = 0.0
    missing: Annotated[float, Ge(0), Lt(1)] = 0.0
    unscored_failures: Share = 0.0
    candidate_unscored_failures: Share = 0.0
    task_types: Annotated[int, Ge(1), Le(20)] = 3
    heavy: Annotated[float, Ge(0), Le(2)] = 0.5
    user_spread: Annotated[float, Ge(0), Le(0.5)] = 0.1
    tasks: Annotated[int, Ge(0), Le(1_000_000)] = 0
    task_spread: Annotated[float, Ge(0), Le(0.5)] = 0.3
    history: Annotated[int, Ge(0), Le(1_000_000)] = 0

    def check(self) -> None:
        if not self.tasks and self.changed("task_spread"):
            raise ConfigError("would have no effect without `tasks`", field="task_spread")


# -- The validation suite of an agent: tasks and a rubric with thresholds that a candidate must pass before stage 0.


class SuiteThresholds(Settings):
    """Validation suite."""

    threshold: Annotated[Share, Flag(key=False)] = 0.0
    """Mean score on the suite that a candidate must reach."""

    pass_rate: Annotated[Share, Flag(key=False)] = 0.0
    """Share of the suite's tasks that a candidate must pass."""

    pass_at: Annotated[Share, Flag(key=False)] = 0.5
    """Minimum score with which a task of the suite counts as passed."""


class Suite(SuiteThresholds):
    """A validation suite. The candidate runs the val split of its tasks."""

    data: str
    """Tasks."""

    rubric: str
    """Rubric."""


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
