"""Routing preferences: of several versions that passed their gates, the measured quality per task type decides.

Thompson sampling by its probabilities (Thompson 1933; Agrawal and Goyal 2012): a version gets the probability that it
is the best one, and at least a floor. The probabilities are computed from the store, and units are assigned by their
hash, so that the propensity of a rollout is known exactly. An active deployment overrides it.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from assay.deployment.assignment import position
from assay.deployment.flags import write_flag
from assay.deployment.preference_settings import Preference
from assay.deployment.registry import Registry
from assay.errors import DeploymentError
from assay.traces.store import tables as schema

ROUTED = "routed"  # arm of a rollout that a preference assigned
_FLAG = "route"
_DRAWS = 4000


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Measured scores of a version on a task type: their number, sum, and the mean cost of a rollout."""

    count: int = 0
    total: float = 0.0
    cost_usd: float = 0.0


def set_preference(
    engine: sa.Engine, agent: str, preference: Preference | None, *, why: str = "", by: str | None = None
) -> None:
    """Sets the preference of an agent; None removes it.

    Raises:
        DeploymentError: there is no such version, or one of them was never the champion: it has passed no gate.
    """
    registry = Registry(engine)
    registry.version(f"{agent}@1")
    passed = {change.number for change in registry.alias_history(agent) if change.alias == "champion"}
    for number in () if preference is None else preference.versions:
        version = registry.version(f"{agent}@{number}")
        if number not in passed:
            raise DeploymentError(f"{version.name} was never the champion: deploy it first (assay deploy start)")
    write_flag(engine, agent, _FLAG, None if preference is None else asdict(preference), why=why, by=by)


def preference_of(flags: Mapping[str, Any]) -> Preference | None:
    """The preference in the flags of an agent."""
    return None if (stored := flags.get(_FLAG)) is None else Preference(**stored)


def qualities(
    engine: sa.Engine, agent: str, preference: Preference, *, now: float | None = None
) -> dict[str, dict[int, Quality]]:
    """Measured quality in production by task type and version."""
    rollouts, calls = schema.rollouts.c, schema.transitions.c
    cost: Any = sa.literal(0.0)
    if preference.cost_weight:
        cost = sa.select(sa.func.sum(calls.cost_usd)).where(calls.rollout_id == rollouts.id).scalar_subquery()
    since = (time.time() if now is None else now) - 86400 * preference.window_days
    names = {f"{agent}@{number}": number for number in preference.versions}
    each = (
        sa.select(rollouts.version, rollouts.task_type, rollouts.score, cost.label("cost"))
        .where(
            rollouts.started_at >= since, rollouts.version.in_(names), rollouts.phase == "deployed",
            rollouts.score.is_not(None),
        )
        .subquery()
    )  # fmt: skip
    columns = each.c
    query = sa.select(
        columns.version, columns.task_type, sa.func.count(), sa.func.sum(columns.score),
        sa.func.avg(sa.func.coalesce(columns.cost, 0.0)),
    ).group_by(columns.version, columns.task_type)  # fmt: skip
    qualities: dict[str, dict[int, Quality]] = {}
    with engine.connect() as connection:
        for version, kind, count, total, spent in connection.execute(query):
            quality = Quality(count=int(count), total=float(total), cost_usd=float(spent))
            qualities.setdefault(str(kind), {})[names[version]] = quality
    return qualities


def probabilities(preference: Preference, measured: Mapping[int, Quality]) -> dict[int, float]:
    """Probability of each version on one task type; they add up to 1.

    Scores in [0, 1] count as that share of a success (Agrawal and Goyal 2012, section 3, without the coin). The draws
    have a fixed seed: the same numbers give the same probabilities on every machine.
    """
    import numpy as np

    random, draws = np.random.default_rng(0), []
    for number in preference.versions:
        seen = measured.get(number, Quality())
        values = random.beta(1 + seen.total, 1 + max(0.0, seen.count - seen.total), _DRAWS)
        draws.append(values - preference.cost_weight * seen.cost_usd)
    best = np.bincount(np.argmax(draws, axis=0), minlength=len(draws)) / _DRAWS
    free = 1 - preference.floor * len(draws)
    return {n: preference.floor + free * float(p) for n, p in zip(preference.versions, best, strict=True)}


def choice(unit: str, task_type: str, shares: Mapping[int, float], *, salt: str) -> int:
    """The version of a unit. It changes only if the probabilities do, and then for as few units as possible.

    Args:
        unit: digest, see `assay.deployment.assignment.unit_digest`.
        salt: of the agent.
    """
    place, number = position(unit, f"{salt}\0{task_type}"), 0
    for number, share in shares.items():  # noqa: B007 - the last one where rounding leaves a rest
        place -= share
        if place < 0:
            break
    return number
