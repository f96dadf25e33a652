"""Status of a deployment, and orders of users. For the command line and the local page; runs no program."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.deployment.assignment import CANDIDATE, CHAMPION
from assay.deployment.decisions import RUNNING, Decision, decide, readings_now
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.events import Hook, Notifier
from assay.deployment.evidence import Arms, difference, mean_of
from assay.deployment.judge_drift import judge_watches
from assay.deployment.plan import Metric
from assay.deployment.readings import stored_reading
from assay.deployment.sequences import normal_mixture
from assay.support.reprs import ReportRepr

_EVENTS = {"promote": "promoted", "rollback": "rolled_back", "pause": "paused", "next": "next", "alarm": "alarm"}
_PLANNED = 0.25 / 200  # variance at which the shown intervals are narrowest: that of 200 rollouts


@dataclass(frozen=True, kw_only=True, repr=False)
class DeploymentReport(ReportRepr):
    """Status of a deployment, and the decision that its numbers give now."""

    deployment: Deployment
    decision: Decision
    arms: dict[str, dict[str, float | int | None]]
    judges: list[dict[str, Any]] = field(default_factory=list)
    variance_removed: float | None = None

    def to_dict(self) -> dict[str, Any]:
        deployment, state = self.deployment, self.deployment.state
        return {
            "deployment": deployment.id,
            "agent": deployment.agent,
            "champion": deployment.champion,
            "candidate": deployment.candidate,
            "status": state.status,
            "stage": deployment.plan.steps[state.step].label,
            "step": state.step + 1,
            "steps": len(deployment.plan.steps),
            "share": deployment.share,
            "decision": self.decision.action,
            "rule": self.decision.rule,
            "reason": self.decision.reason,
            "requests": dict(self.decision.requests),
            "arms": self.arms,
            "readings": [reading.in_units().to_dict() for reading in self.decision.readings],
            "judges": self.judges,
            "variance_removed": self.variance_removed,
        }


def status_of(deployments: Deployments, name: str, now: float, decision: Decision | None = None) -> DeploymentReport:
    """The status of a deployment; nothing is written.

    Args:
        name: its id or the first characters of it, or an agent, for its newest one.
        now: seconds since the epoch.
        decision: that was just taken; by default what the numbers give now.
    Raises:
        DeploymentError: there is none.
    """
    deployment = deployments.get(name)
    if decision is None:
        if deployment.state.status == RUNNING:
            decision = decide(deployment.plan, deployment.state, deployment.id, deployments, now)
        else:
            decision = _last_decision(deployments, deployment, now)
    metric = next(metric for metric in deployment.plan.metrics if metric.success_gain is not None)
    cells = deployments.evidence(deployment.id, metric, now)
    return DeploymentReport(
        deployment=deployment, decision=decision, arms=_arms(metric, cells),
        judges=judge_watches(deployments, deployment), variance_removed=_removed(cells),
    )  # fmt: skip


def _last_decision(deployments: Deployments, deployment: Deployment, now: float) -> Decision:
    """Why a deployment that is not running stands where it does, with the numbers that this was decided on.

    If a person ordered it, or a watch gave an alarm, there are none: then those of its rollouts now.
    """
    state = deployment.state
    rows = [row for row in deployments.history(deployment.id) if row["action"] != "replay"]
    last: Mapping[str, Any] = rows[-1] if rows else {}
    readings = tuple(map(stored_reading, last.get("readings") or ()))
    return Decision(
        action="continue", rule=last.get("rule", "status"), step=state.step,
        reason=last.get("reason", f"the deployment is {state.status}"),
        readings=readings or readings_now(deployment.plan, state, deployment.id, deployments, now),
        requests=(readings and last.get("requests")) or deployments.requests(deployment.id, state.step, now),
    )  # fmt: skip


def _removed(cells: Arms) -> float | None:
    """Share of the variance of the difference that the covariate removed; None without one or without a difference."""
    if not any(cell.shift is not None and cell.shift.any() for of_arm in cells.values() for cell in of_arm.values()):
        return None
    before, after = difference(cells, covariate=False).variance, difference(cells).variance
    return 1 - after / before if math.isfinite(before) else None


def _arms(metric: Metric, cells: Arms) -> dict[str, dict[str, float | int | None]]:
    """Number of values, mean and 95 % confidence sequence of each arm, for the first metric that promotes."""
    arms = {}
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


def notify(deployment: Deployment, decision: Decision, hooks: Sequence[Hook] = ()) -> None:
    """Sends what was decided, after it was written."""
    if decision.action not in _EVENTS:
        return
    notifier = Notifier((*deployment.plan.events, *hooks))
    notifier.notify(
        _EVENTS[decision.action], agent=deployment.agent, deployment=deployment.id, champion=deployment.champion,
        candidate=deployment.candidate, step=decision.step + 1, rule=decision.rule, reason=decision.reason,
    )  # fmt: skip
    notifier.close()


def order(deployments: Deployments, name: str, action: str, *, reason: str = "", by: str | None = None) -> Deployment:
    """Writes an order of a user, and sends it to the hooks of the plan.

    Args:
        action: pause, resume, promote or rollback; a rollback also takes back a promotion.
        by: who orders it; by default the user of this process.
    Raises:
        DeploymentError: not possible in the deployment's state.
    """
    deployment = deployments.get(name)
    notify(deployment, deployments.order(deployment.id, action, reason=reason, by=by))
    return deployments.get(deployment.id)
