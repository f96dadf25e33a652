"""Traffic with known truth, for simulated deployments."""

from dataclasses import dataclass

from assay.errors import ConfigError
from assay.support.settings import Settings, setting


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
