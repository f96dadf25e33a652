"""The settings of commands on the store and on deployments as keywords of their Python functions, for type checkers.

As `options`: each class has the fields of the settings class of the same name, with their types; a test compares them.
"""

from collections.abc import Sequence
from typing import TypedDict


class SimulateOptions(TypedDict, total=False):
    """Settings of `assay.api.deploy.start.simulate_plan`."""

    base: float
    effect: float
    drift: float
    novelty: float
    delay_s: float
    missing: float
    task_types: int
    users: int
    heavy: float
    user_spread: float
    tasks: int
    task_spread: float
    history: int
    plan: str | None
    runs: int
    seed: int
    interval: int
    goal: float | None


class StartOptions(TypedDict, total=False):
    """Settings of `assay.api.deploy.start.start_deployment`."""

    plan: str | None
    goal: float | None
    metrics: Sequence[str]
    suite_data: str | None
    suite_rubric: str | None
    suite_threshold: float
    suite_pass_rate: float
    suite_pass_at: float
    replay: int
    replay_rubric: str | None
    force: bool


class PoolOptions(TypedDict, total=False):
    """Settings of `assay.api.loop.run.collect_pool`."""

    tenants: Sequence[str]
    require_consent: bool
    task_types: Sequence[str]
    since_days: float | None
    max_tasks: int
    privacy: str
    privacy_key: str | None
    min_points: int
    min_clean: float
    min_task_types: int
    against: str | None


class StoredJudgeOptions(TypedDict, total=False):
    """The keywords of `assay.api.deploy.status.advance_deployment` and `assay.deployed` that name a model of judges."""

    trust: bool
    judge_model: str | None
    judge_api_base: str | None
    judge_api_key_env: str | None
    judge_thinking: int | str | None
    price: str | None
