"""Settings of `assay deploy`."""

from dataclasses import dataclass

from assay.deployment.traffic import Traffic
from assay.support.settings import setting

__all__ = ["SimulateSettings"]


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
