"""The pages of staged rollouts: the list, one deployment, and the confirmation of orders."""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from markupsafe import Markup

from assay.deployment.decisions import PAUSED, PROMOTED, RUNNING
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.readings import stated
from assay.deployment.watching import order, status_of
from assay.errors import ConfigError, DeploymentError, StoreError
from assay.reports.charts import interval_bar
from assay.traces.store import Store, tables as schema
from assay.traces.store.leases import present
from assay.web.rendering import View
from assay.web.runs import RUNNING_S

_ROWS, _DECISIONS = 100, 200
COUNTED = 50_000  # rollouts of a deployment up to which its metrics are computed at once
_WAITING_S = 20
_ORDERS = {
    "pause": ("Pause", "The share stays as it is, and no step is taken until the deployment is resumed."),
    "resume": ("Resume", "Steps are taken again when the numbers allow it."),
    "promote": ("Promote", "All units get the candidate now, and it becomes the champion."),
    "rollback": ("Roll back", "All units get the champion now."),
}


def deployments_view(store: Store) -> View:
    """Deployments, newest first."""
    deployments = Deployments(store.engine).all(limit=_ROWS + 1)
    return View(
        template="deployments.html",
        title="Deployments",
        values={"deployments": deployments[:_ROWS], "left_out": len(deployments) > _ROWS},
        part="deployments_part.html",
        every_s=_WAITING_S,
    )


def deployment_view(store: Store, name: str, query: Mapping[str, str], *, store_flag: str | None) -> View:
    """One deployment: stage, share, metrics with their confidence sequences, decisions, and what may be ordered.

    Raises:
        StoreError: there is no such deployment.
    """
    deployments = Deployments(store.engine)
    deployment = _deployment(deployments, name)
    counts = query.get("count") == "all" or _rollouts(store, deployment.id) <= COUNTED
    report = status_of(deployments, deployment.id, present(store.engine)) if counts else None
    history = deployments.history(deployment.id)
    store_option = "" if store_flag is None else f" --store {shlex.quote(store_flag)}"
    return View(
        template="deployment.html",
        title=f"Deployment of {deployment.agent}",
        values={
            "deployment": deployment,
            "steps": [
                {
                    "label": f"{step.label}, decides" if step.decides else step.label,
                    "share": step.share,
                    "is_current": place == deployment.state.step,
                }
                for place, step in enumerate(deployment.plan.steps)
            ],
            "decision": report,
            "arms": {} if report is None else report.arms,
            "requests": {} if report is None else report.requests,
            "metrics": [] if report is None else list(_metrics(report.readings)),
            "history": list(reversed(history))[:_DECISIONS],
            "orders": [(action, *_ORDERS[action]) for action in _possible(deployment)],
            "commands": list(_commands(deployment, store_option)),
        },
        part="deployment_part.html",
        every_s=RUNNING_S if counts and deployment.state.status == RUNNING else 0,
    )


def _commands(deployment: Deployment, store_option: str) -> Iterator[tuple[str, str]]:
    yield "Show it in a terminal", f"assay deploy status {deployment.id}{store_option}"
    if deployment.state.status == RUNNING:
        yield "Take its next step, if the numbers allow it", f"assay deploy advance {deployment.id}{store_option}"


def confirm_view(store: Store, name: str, action: str) -> View:
    """What an order would do, with the button that gives it.

    Raises:
        ConfigError: the order is not possible in the deployment's state.
        StoreError: there is no such deployment.
    """
    deployment = _deployment(Deployments(store.engine), name)
    if action not in _possible(deployment):
        raise ConfigError(f"deployment {deployment.id} is {deployment.state.status}: {action[:20]!r} is not possible")
    label, effect = _ORDERS[action]
    if action == "rollback" and deployment.state.status == PROMOTED:
        effect = "The promotion is taken back: the former champion gets all units again."
    return View(
        template="confirm.html",
        title=f"{label}: {deployment.agent}",
        values={"deployment": deployment, "action": action, "label": label, "effect": effect},
    )


def give_order(store: Store, name: str, form: Mapping[str, Any]) -> Deployment:
    """Gives an order that was confirmed.

    Args:
        form: `action`, `reason`, and in `decided` the number of decisions that the person has seen.
    Raises:
        ConfigError: something was decided since, or the order is not possible.
        StoreError: there is no such deployment.
    """
    deployments = Deployments(store.engine)
    deployment = _deployment(deployments, name)
    if str(form.get("decided", "")) != str(deployment.state.version):
        raise ConfigError("something was decided since this page was loaded: reload the deployment")
    reason = " ".join(str(form.get("reason", "")).replace("\0", "").split())[:500]
    try:
        return order(deployments, deployment.id, str(form.get("action", "")), reason=reason)
    except DeploymentError as error:
        raise ConfigError(str(error)) from error


def _deployment(deployments: Deployments, name: str) -> Deployment:
    try:
        return deployments.get(name.replace("\0", ""))
    except DeploymentError as error:
        raise StoreError(str(error)) from error


def _possible(deployment: Deployment) -> tuple[str, ...]:
    """The orders that its state allows."""
    possible = {RUNNING: ("promote", "pause", "rollback"), PAUSED: ("promote", "resume", "rollback")}
    return possible.get(deployment.state.status, ("rollback",) if deployment.state.status == PROMOTED else ())


def _rollouts(store: Store, deployment: str) -> int:
    """Number of rollouts of a deployment, counted up to one more than `COUNTED`."""
    table = schema.rollouts
    some = sa.select(table.c.deployment).where(table.c.deployment == deployment).limit(COUNTED + 1).subquery()
    with store.engine.connect() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one())


@dataclass(frozen=True, kw_only=True)
class _MetricRow:
    """A metric as the decision saw it; None for what is not known."""

    name: str
    champion: float | None
    candidate: float | None
    gain: float | None
    low: float | None
    high: float | None
    counts: Mapping[str, int]
    missing: Mapping[str, int]
    stated: str
    bar: Markup


def _metrics(readings: Any) -> Iterator[_MetricRow]:
    for reading in readings:
        gain, low, high, champion, candidate = (
            value if math.isfinite(value) else None
            for value in (reading.gain, reading.low, reading.high, reading.champion, reading.candidate)
        )
        ends = [abs(value) for value in (gain, low, high) if value is not None]
        yield _MetricRow(
            name=reading.metric, champion=champion, candidate=candidate, gain=gain, low=low, high=high,
            counts=reading.counts, missing=reading.missing, stated=stated(reading.missing_by),
            bar=interval_bar(gain, low, high, reach=min(1.0, 1.2 * max(ends, default=1.0)) or 1.0),
        )  # fmt: skip
