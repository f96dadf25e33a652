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
from assay.deployment.suite_records import suite_of
from assay.deployment.suites import Suite, SuiteResult
from assay.deployment.traffic import Traffic
from assay.deployment.watches import Watch
from assay.errors import ConfigError, DataError, DeploymentError
from assay.evaluation.progress import Progress
from assay.evaluation.statistics import mean_interval
from assay.judges.quality.drift import AnchorSet
from assay.runs.anchors import ANCHORS
from assay.runs.settings.deploy import StartSettings
from assay.runs.settings.store_options import StartOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.reprs import ReportRepr
from assay.traces import Store

__all__ = ["StartReport", "expected_requests", "start_deployment"]

_RUNS = 40  # simulated deployments for the expected number of requests


@dataclass(frozen=True, kw_only=True, repr=False)
class StartReport(ReportRepr):
    """What `start_deployment` returns.

    Attributes:
        deployment: None if the candidate was only checked (`dry_run`).
        suite: result on the validation suite, which is kept with the deployment; None without one.
        expected: simulated deployments of a candidate that reaches the goal with a margin, and of an equal one.
    """

    deployment: Deployment | None
    checks: Compatibility
    suite: SuiteResult | None
    expected: dict[str, SimulationReport]

    def to_dict(self) -> dict[str, Any]:
        return {
            "deployment": None if self.deployment is None else self.deployment.id,
            "breaks": list(self.checks.breaks),
            "changes": list(self.checks.changes),
            "suite": None if self.suite is None else self.suite.to_dict(),
            "expected": {name: report.to_dict() for name, report in self.expected.items()},
        }


@takes(StartSettings)
@trusts
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
        DeploymentError: the candidate breaks a check (`force=True` deploys it anyway), or cannot be deployed now.
    """
    settings = StartSettings(**options)
    plan = plan_of(settings.plan, settings.goal)
    if settings.metrics:
        plan = replace(plan, metrics=(*plan.metrics, *map(metric_of, settings.metrics)))
    plan = replace(plan, watch=tuple(map(_with_absolute_paths, plan.watch)))
    with Store(store) as opened:
        deployments = Deployments(opened.engine)
        version = deployments.registry.version(candidate)
        champion = deployments.registry.version(version.agent)
        if not dry_run:  # before the validation suite is run and paid for
            deployments.check_idle(version.agent)
            if version.number == champion.number:
                raise DeploymentError(f"{version.name} is already the champion")
        folders = [deployments.registry.folder_of(one) for one in (champion, version)]
        checks = compatibility(*(load_artifact(folder) for folder in folders))
        if checks.breaks and not settings.force:
            raise DeploymentError(
                f"{version.name} breaks what callers of {champion.name} use: {'; '.join(checks.breaks)}. Fix it, or "
                "deploy it anyway with force=True",
                flag="--force",
            )
        suite = settings.suite or suite_of(opened.engine, version.agent)
        result = None if suite is None else _run(suite, str(folders[1]), store, progress)
        if result is not None and result.missed and not settings.force:
            raise DeploymentError(
                f"{version.name} {' and '.join(result.missed)}. Fix it, or deploy it anyway with force=True",
                flag="--force",
            )
        expected = expected_requests(plan)
        checked = {
            "suite": None if result is None else result.to_dict(), "breaks": list(checks.breaks),
            "changes": list(checks.changes), "forced": bool(checks.breaks or (result is not None and result.missed)),
        }  # fmt: skip
        deployment = None if dry_run else deployments.start(candidate, plan, checks=checked)
    return StartReport(deployment=deployment, checks=checks, suite=result, expected=expected)


def _with_absolute_paths(watch: Watch) -> Watch:
    """The watch with absolute paths, because other processes evaluate it.

    Raises:
        ConfigError: the judge of the watch, or its anchors, cannot be read.
    """
    if watch.judge is None:
        return watch
    anchors = Path(watch.judge) / ANCHORS if watch.anchors is None else Path(watch.anchors)
    try:
        AnchorSet.load(anchors)
    except DataError as error:
        raise ConfigError(f"the watch of {watch.name} has no anchors to replay: {error}") from None
    return replace(
        watch, judge=str(Path(watch.judge).absolute()), anchors=watch.anchors and str(Path(watch.anchors).absolute())
    )


def _run(suite: Suite, folder: str, store: str | Path | None, progress: Progress | None) -> SuiteResult:
    report = evaluate(folder, rubric=suite.rubric, data=suite.data, store=store, progress=progress)
    scores = report.evaluation.scores
    return SuiteResult.of(suite, scores, mean_interval(list(scores.values())))


def expected_requests(plan: Plan, *, base: float = 0.7) -> dict[str, SimulationReport]:
    """Simulated deployments of a candidate that is better by twice the goal, and of one that is as good.

    Args:
        base: success rate of the champion.
    """
    goal = max(metric.success_gain or 0.0 for metric in plan.metrics)
    effect = min(2 * max(goal, 0.05), 1 / base - 1)
    simulated = Plan(
        steps=plan.steps,
        metrics=tuple(metric for metric in plan.metrics if metric.success_gain is not None)[:1],
        alpha=plan.alpha, test=plan.test, evaluations=plan.evaluations, max_missing=plan.max_missing,
        covariate=plan.covariate,
    )  # fmt: skip
    instant = replace(
        simulated, steps=tuple(replace(step, hold_s=0.0) for step in simulated.steps),
        metrics=tuple(replace(metric, horizon_s=0.0) for metric in simulated.metrics),
    )  # fmt: skip
    return {
        name: simulate(instant, Traffic(base=base, effect=value), runs=_RUNS)
        for name, value in (("better", effect), ("equal", 0.0))
    }
