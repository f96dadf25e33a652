"""Settings of the benchmark pool. Loads no heavy package."""

from collections.abc import Sequence
from dataclasses import dataclass

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
