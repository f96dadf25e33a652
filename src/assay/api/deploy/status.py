"""Public API for `assay deploy status`, `advance`, `pause`, `resume`, `promote`, `rollback` and `history`."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.api.deploy.advancing import advanced, notify
from assay.api.traces import score_rollouts
from assay.deployment.assignment import CANDIDATE, CHAMPION
from assay.deployment.decisions import RUNNING, Decision, decide
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.events import Hook
from assay.deployment.evidence import mean_of
from assay.deployment.plan import Metric
from assay.deployment.sequences import normal_mixture
from assay.evaluation.progress import Progress
from assay.sources.trust import trusts
from assay.traces import Store

__all__ = ["DeploymentReport", "advance_deployment", "deployment_history", "deployment_status", "order_deployment"]

_PLANNED = 0.25 / 200  # variance at which the shown intervals are narrowest: that of 200 rollouts


@dataclass(frozen=True, kw_only=True)
class DeploymentReport:
    """Where a deployment stands, and the decision that its numbers give now."""

    deployment: Deployment
    decision: Decision
    arms: dict[str, dict[str, float | int | None]]

    def to_dict(self) -> dict[str, Any]:
        found, state = self.deployment, self.deployment.state
        return {
            "deployment": found.id,
            "agent": found.agent,
            "champion": found.champion,
            "candidate": found.candidate,
            "status": state.status,
            "stage": found.plan.steps[state.step].label,
            "step": state.step + 1,
            "steps": len(found.plan.steps),
            "share": found.share,
            "decision": self.decision.action,
            "rule": self.decision.rule,
            "reason": self.decision.reason,
            "requests": dict(self.decision.requests),
            "arms": self.arms,
            "readings": [reading.to_dict() for reading in self.decision.readings],
        }


def deployment_status(
    deployment: str, *, store: str | Path | None = None, now: float | None = None
) -> DeploymentReport:
    """The status of a deployment; nothing is written.

    Args:
        deployment: its id or the first characters of it, or an agent, for its newest one.
        now: seconds since the epoch; by default the present.
    Raises:
        DeploymentError: there is none.
    """
    with Store(store) as opened:
        return _status(Deployments(opened.engine), deployment, time.time() if now is None else now)


def _status(deployments: Deployments, name: str, now: float, decision: Decision | None = None) -> DeploymentReport:
    found = deployments.get(name)
    if decision is None:
        if found.state.status == RUNNING:
            decision = decide(found.plan, found.state, found.id, deployments, now)
        else:
            last = deployments.history(found.id)[-1:]
            decision = Decision(
                action="continue", rule=last[0]["rule"] if last else "status", step=found.state.step,
                reason=last[0]["reason"] if last else f"the deployment is {found.state.status}",
            )  # fmt: skip
    metric = next(metric for metric in found.plan.metrics if metric.success_gain is not None)
    return DeploymentReport(deployment=found, decision=decision, arms=_arms(deployments, found, metric, now))


def _arms(
    deployments: Deployments, found: Deployment, metric: Metric, now: float
) -> dict[str, dict[str, float | int | None]]:
    """Number of values, mean and 95 % confidence sequence of each arm, for the first metric that promotes."""
    cells, arms = deployments.evidence(found.id, metric, now), {}
    for arm in (CHAMPION, CANDIDATE):
        of_arm = [of_stratum[arm] for of_stratum in cells.values()]
        mean, variance, _ = mean_of(of_arm)
        known = math.isfinite(mean)
        width = normal_mixture(variance, alpha=0.05, planned=_PLANNED) if known else math.inf
        low, high = (
            (mean - width, mean + width) if metric.is_amount else (max(0.0, mean - width), min(1.0, mean + width))
        )
        arms[arm] = {
            "n": sum(cell.count for cell in of_arm), "score": mean if known else None, "low": low if known else None,
            "high": high if known else None, "unscored": sum(cell.missing for cell in of_arm),
        }  # fmt: skip
    return arms


@trusts
def advance_deployment(
    deployment: str,
    *,
    rubric: str | Path | None = None,
    dry_run: bool = False,
    hooks: Sequence[Hook] = (),
    store: str | Path | None = None,
    now: float | None = None,
    progress: Progress | None = None,
) -> DeploymentReport:
    """Evaluates a deployment and takes its next step, if there is one to take. Safe to call at any time, by anybody.

    Args:
        rubric: scores rollouts without a score first, and those that a shadow step replays.
        dry_run: writes nothing.
        hooks: told of the decision, in addition to those of the plan.
        now: seconds since the epoch; by default the present.
    Raises:
        DeploymentError: there is no such deployment.
    """
    with Store(store) as opened:
        deployments = Deployments(opened.engine)
        found = deployments.get(deployment)
        moment = time.time() if now is None else now
        if dry_run:
            return _status(deployments, found.id, moment)
        if rubric is not None:
            score_rollouts(rubric, store=store, agent=found.agent, progress=progress)
        decision = advanced(opened, found, rubric=rubric, hooks=hooks, now=moment, progress=progress)
        return _status(deployments, found.id, moment, decision)


def order_deployment(
    deployment: str, action: str, *, reason: str = "", by: str | None = None, store: str | Path | None = None
) -> Deployment:
    """What a person orders.

    Args:
        action: pause, resume, promote or rollback; a rollback also takes back a promotion.
        by: who orders it; by default the user of this process.
    Raises:
        DeploymentError: not possible in the deployment's state.
    """
    with Store(store) as opened:
        deployments = Deployments(opened.engine)
        found = deployments.get(deployment)
        notify(found, deployments.order(found.id, action, reason=reason, by=by))
        return deployments.get(found.id)


def deployment_history(deployment: str, *, store: str | Path | None = None) -> list[dict[str, Any]]:
    """All decisions of a deployment, oldest first: action, rule, reason, numbers, when and by whom."""
    with Store(store) as opened:
        return Deployments(opened.engine).history(deployment)
