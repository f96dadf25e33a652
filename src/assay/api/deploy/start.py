"""Public API for `assay deploy start`: checks a candidate, and starts its rollout."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from assay.api.deploy.simulate import plan_of
from assay.api.evaluate import evaluate
from assay.deployment.artifact import load_artifact
from assay.deployment.compatibility import Compatibility, compatibility
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.plan import Plan, metric_of
from assay.deployment.simulation import SimulationReport, simulate
from assay.deployment.traffic import Traffic
from assay.errors import DeploymentError
from assay.evaluation.progress import Progress
from assay.runs.settings.deploy import StartSettings
from assay.runs.settings.store_options import StartOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.traces import Store

__all__ = ["StartReport", "expected_requests", "start_deployment"]

_RUNS = 40  # simulated deployments for the expected number of requests


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """What `start_deployment` returns.

    Attributes:
        deployment: None if the candidate was only checked (`dry_run`).
        suite: score of the validation suite; None without one.
        expected: simulated deployments of a candidate that reaches the goal with a margin, and of an equal one.
    """

    deployment: Deployment | None
    checks: Compatibility
    suite: float | None
    expected: dict[str, SimulationReport]

    def to_dict(self) -> dict[str, Any]:
        return {
            "deployment": None if self.deployment is None else self.deployment.id,
            "breaks": list(self.checks.breaks),
            "changes": list(self.checks.changes),
            "suite": self.suite,
            "expected": {name: report.to_dict() for name, report in self.expected.items()},
        }


@trusts
@takes(StartSettings)
def start_deployment(
    candidate: str,
    *,
    store: str | Path | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **options: Unpack[StartOptions],
) -> StartReport:
    """Starts the staged rollout of a version, after its checks.

    Args:
        candidate: `AGENT@NUMBER` or `AGENT@ALIAS`.
        dry_run: checks and estimates only.
        options: see `StartSettings`.
    Raises:
        DeploymentError: the candidate breaks a check (`force=True` deploys it nevertheless), or cannot be deployed now.
    """
    settings = StartSettings(**options)
    plan = plan_of(settings.plan, settings.goal)
    if settings.metrics:
        plan = replace(plan, metrics=(*plan.metrics, *map(metric_of, settings.metrics)))
    with Store(store) as opened:
        deployments = Deployments(opened.engine)
        version = deployments.registry.version(candidate)
        champion = deployments.registry.version(version.agent)
        folders = [deployments.registry.folder_of(one) for one in (champion, version)]
        checks = compatibility(*(load_artifact(folder) for folder in folders))
        if checks.breaks and not settings.force:
            raise DeploymentError(
                f"{version.name} breaks what callers of {champion.name} use: {'; '.join(checks.breaks)}. Mend it, or "
                "deploy it nevertheless with force=True",
                flag="--force",
            )
        suite = _suite(settings, str(folders[1]), store, progress)
        if suite is not None and not suite >= settings.suite_threshold and not settings.force:
            raise DeploymentError(
                f"{version.name} scores {suite:.3f} on the validation suite, {settings.suite_threshold:g} is needed. "
                "Mend it, or deploy it nevertheless with force=True",
                flag="--force",
            )
        expected = expected_requests(plan)
        deployment = None if dry_run else deployments.start(candidate, plan)
    return StartReport(deployment=deployment, checks=checks, suite=suite, expected=expected)


def _suite(settings: StartSettings, folder: str, store: str | Path | None, progress: Progress | None) -> float | None:
    if settings.suite_data is None or settings.suite_rubric is None:
        return None
    report = evaluate(folder, rubric=settings.suite_rubric, data=settings.suite_data, store=store, progress=progress)
    return float(report.evaluation.mean)


def expected_requests(plan: Plan, *, base: float = 0.7) -> dict[str, SimulationReport]:
    """Simulated deployments of a candidate that is better by twice the goal, and of one that is as good.

    Args:
        base: success rate of the champion.
    """
    goal = max(metric.success_gain or 0.0 for metric in plan.metrics)
    effect = min(2 * max(goal, 0.05), 1 / base - 1)
    shown = Plan(
        steps=plan.steps,
        metrics=tuple(metric for metric in plan.metrics if metric.success_gain is not None)[:1],
        alpha=plan.alpha, test=plan.test, evaluations=plan.evaluations, max_missing=plan.max_missing,
    )  # fmt: skip
    instant = replace(
        shown, steps=tuple(replace(step, hold_s=0.0) for step in shown.steps),
        metrics=tuple(replace(metric, horizon_s=0.0) for metric in shown.metrics),
    )  # fmt: skip
    return {
        name: simulate(instant, Traffic(base=base, effect=value), runs=_RUNS)
        for name, value in (("better", effect), ("equal", 0.0))
    }
