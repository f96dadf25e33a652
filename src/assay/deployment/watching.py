"""Evaluates the watches of a deployment, also after its promotion: drift, refusals, failures, scores, latency, cost.

A limit counts as passed once a confidence sequence is beyond it, so that the watches may be evaluated at any time.
Rollouts count as independent here. Decides nothing about a gain: `assay.deployment.decisions` does.
"""

import json
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Any

import sqlalchemy as sa

from assay.deployment.decisions import PAUSED, PROMOTED, ROLLED_BACK, RUNNING, Decision
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.drift import Profile, drift
from assay.deployment.judge_drift import judge_alarm
from assay.deployment.plan import Metric
from assay.deployment.rollout_values import columns_of, value_of
from assay.deployment.sequences import betting
from assay.deployment.watches import INPUT_DRIFT, JUDGE_DRIFT, Watch
from assay.traces.store import tables as schema

_ALPHA = 0.01  # of a false alarm of one watch
_COMPARED = 1000  # newest rollouts before and since, for drift
_FEWEST = 100  # of each of them
_ROLLOUTS = schema.rollouts.c


def watches_now(deployments: Deployments, deployment: Deployment, now: float) -> float | None:
    """Since when the candidate is watched, seconds since the epoch; None if it is not."""
    if not deployment.plan.watch:
        return None
    if deployment.state.status == RUNNING:
        return deployment.started_at
    if (
        deployment.state.status != PROMOTED
        or deployments.registry.alias(deployment.agent, "champion") != deployment.candidate
    ):
        return None
    promoted = [row["at"] for row in deployments.history(deployment.id) if row["action"] == "promote"]
    return promoted[-1] if promoted and now - promoted[-1] <= deployment.plan.watch_s else None


def watched(deployments: Deployments, deployment: Deployment, now: float | None = None) -> Decision | None:
    """The first alarm that is due, after it is written; None without one. Safe to call by several processes at once."""
    moment = time.time() if now is None else now
    if (since := watches_now(deployments, deployment, moment)) is None:
        return None
    history = deployments.history(deployment.id)
    acted = {row.get("watch") for row in history}
    for watch in deployment.plan.watch:
        action, key = watch.action, watch.key
        if watch.name == JUDGE_DRIFT:
            called, reason = judge_alarm(history, watch) or (True, None)
            if not called:  # is no evidence about the candidate
                action, key = "alarm", f"{watch.key}: not called"
        elif key in acted:
            continue
        else:
            reason = _beyond(deployments.engine, deployment, watch, since)
        if reason is None or key in acted:
            continue
        if deployment.state.status != RUNNING:
            gone = deployment.champion in deployments.registry.retired(deployment.agent)
            if action == "rollback" and gone:
                reason += f"; not rolled back, because {deployment.agent}@{deployment.champion} is retired"
            action = "alarm" if action == "pause" or gone else action
        status = {"rollback": ROLLED_BACK, "pause": PAUSED}.get(action, deployment.state.status)
        decision = Decision(action=action, rule="watch", reason=reason, step=deployment.state.step, watch=key)
        after = replace(deployment.state, status=status, version=deployment.state.version + 1)
        if deployments.write(deployment.id, decision, deployment.state, after):
            return decision
        return None  # another process has just decided
    return None


def _beyond(engine: sa.Engine, deployment: Deployment, watch: Watch, since: float) -> str | None:
    if watch.name == INPUT_DRIFT:
        return _drifted(engine, deployment, watch, since)
    metric, limit = Metric(name=watch.name), watch.below if watch.above is None else watch.above
    values = _values(engine, deployment, metric, since)
    if not values or limit is None:
        return None
    total: float
    if metric.is_amount:  # whether the median is beyond: exact for every distribution, also with outliers
        total, bound, mean = sum(value > math.log(max(limit, 1e-9)) for value in values), 0.5, math.exp(median(values))
    else:
        total, bound, mean = math.fsum(values), limit, math.fsum(values) / len(values)
    low, high = betting(total, len(values), alpha=2 * _ALPHA)
    what = f"the median of {watch.name}" if metric.is_amount else watch.name
    measured = f"{what} of {deployment.agent}@{deployment.candidate} is {mean:.3{'g' if metric.is_amount else 'f'}}"
    if watch.above is not None and low > bound:
        return f"{measured}, above {watch.above:g} ({len(values)} values)"
    if watch.below is not None and high < bound:
        return f"{measured}, below {watch.below:g} ({len(values)} values)"
    return None


def _values(engine: sa.Engine, deployment: Deployment, metric: Metric, since: float) -> list[float]:
    """The candidate's values, those of amounts as logarithms; without rollouts that have none."""
    query = sa.select(*columns_of(metric)).where(
        _ROLLOUTS.version == f"{deployment.agent}@{deployment.candidate}", _ROLLOUTS.phase == "deployed",
        _ROLLOUTS.started_at >= since, _ROLLOUTS.ended_at.is_not(None),
    )  # fmt: skip
    with engine.connect() as connection:
        values = [value_of(metric, row) for row in connection.execute(query).mappings()]
    return [value for value in values if not math.isnan(value)]


def _drifted(engine: sa.Engine, deployment: Deployment, watch: Watch, since: float) -> str | None:
    """Inputs of the agent since then against those before; a difference must also be more than sampling noise."""
    from scipy import stats

    before = _profile(engine, deployment, _ROLLOUTS.started_at < deployment.started_at)
    now = _profile(engine, deployment, _ROLLOUTS.started_at >= since)
    if min(len(before.lengths), len(now.lengths)) < _FEWEST or watch.above is None:
        return None
    change = drift(before, now) or {}
    kinds = sorted(before.types.keys() | now.types.keys())
    table = [[profile.types[kind] for kind in kinds] for profile in (before, now)]
    p = float(stats.chi2_contingency(table).pvalue) if len(kinds) > 1 else 1.0
    distance, length = change["distance"], change["length"]
    if distance > watch.above and p < _ALPHA / 10:
        new = f"; new: {', '.join(change['new_task_types'])}" if change["new_task_types"] else ""
        return f"task types differ from those before by {distance:.2f}, above {watch.above:g}{new}"
    if length["ks"] > watch.above and length["p"] < _ALPHA / 10:
        return (
            f"lengths of inputs differ from those before by {length['ks']:.2f}, above {watch.above:g}: the median was "
            f"{length['before']:g} characters and is {length['now']:g}"
        )
    return None


def _profile(engine: sa.Engine, deployment: Deployment, when: Any) -> Profile:
    query = (
        sa.select(_ROLLOUTS.task_type, _ROLLOUTS.inputs_json)
        .where(
            _ROLLOUTS.version.startswith(f"{deployment.agent}@", autoescape=True), _ROLLOUTS.phase == "deployed", when
        )
        .order_by(_ROLLOUTS.started_at.desc())
        .limit(_COMPARED)
    )
    profile = Profile()
    with engine.connect() as connection:
        rows: Iterable[Any] = connection.execute(query)
        for kind, inputs in rows:
            profile.add(str(kind), json.loads(inputs))
    return profile
