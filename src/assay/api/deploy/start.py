"""Public API for `assay deploy start`: checks a candidate, and starts its rollout."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

from assay.api.deploy.replay import Rehearsal, rehearse, replay_rubric
from assay.commands.evaluate import evaluate
from assay.deployment.artifact import load_artifact
from assay.deployment.compatibility import Compatibility, compatibility
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.plan import Plan, Watch, default_plan, load_plan, metric_of
from assay.deployment.registry import Version, suite_of
from assay.deployment.settings import Suite, SuiteResult, Traffic
from assay.deployment.simulation import SimulationReport, simulate
from assay.errors import ConfigError, DataError, DeploymentError
from assay.evaluation.progress import Progress, default_progress
from assay.evaluation.statistics import mean_interval
from assay.judges.quality.drift import AnchorSet
from assay.runs.anchors import ANCHORS
from assay.runs.settings.deploy import SimulateSettings, StartSettings
from assay.runs.settings.store_options import SimulateOptions, StartOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.reprs import ReportRepr
from assay.traces import Store

# -- Public API for `assay deploy simulate`: how often a plan decides rightly, on traffic with known truth.


@takes(SimulateSettings)
def simulate_plan(*, progress: Progress | None = None, **options: Unpack[SimulateOptions]) -> SimulationReport:
    """Simulates deployments with the assignment and the decisions of production.

    Args:
        options: see `SimulateSettings`.
    Raises:
        ConfigError: a setting or the plan's file breaks a rule.
    """
    settings = SimulateSettings(**options)
    traffic = Traffic(**{field.name: getattr(settings, field.name) for field in fields(Traffic)})
    plan = plan_of(settings.plan, settings.goal)
    with default_progress(progress).bar("simulated deployments", settings.runs) as advance:
        return simulate(
            plan, traffic, runs=settings.runs, seed=settings.seed, interval=settings.interval, on_run=advance
        )


def plan_of(path: str | None, goal: float | None) -> Plan:
    """The plan in a file, or the default one, with another goal if there is one."""
    if path is None:
        return default_plan(gain=0.1 if goal is None else goal)
    plan = load_plan(path)
    if goal is None:
        return plan
    metrics = [
        replace(metric, success_gain=goal) if metric.success_gain is not None else metric for metric in plan.metrics
    ]
    return replace(plan, metrics=tuple(metrics))


# -- Start.


_RUNS = 40  # simulated deployments for the expected number of requests
_TOTAL = 300_000  # requests of all of them, enough for the default plan: a longer plan has fewer runs


@dataclass(frozen=True, kw_only=True, repr=False)
class StartReport(ReportRepr):
    """What `start_deployment` returns.

    Attributes:
        deployment: None if the candidate was only checked (`dry_run`).
        breaks, changes: what of the champion's interface the candidate breaks, and what else changes.
        unchecked: what could not be compared, and why.
        replays: recorded rollouts that the candidate ran, compared with the recorded answers.
        not_tried: with `dry_run`, what the deployment itself would do first and was not tried.
        suite: result on the validation suite, which is kept with the deployment; None without one.
        expected: simulated deployments of a candidate that reaches the goal with a margin, and of an equal one.
    """

    deployment: Deployment | None
    breaks: tuple[str, ...]
    changes: tuple[str, ...]
    unchecked: tuple[str, ...]
    replays: Rehearsal
    not_tried: tuple[str, ...]
    suite: SuiteResult | None
    expected: dict[str, SimulationReport]

    def to_dict(self) -> dict[str, Any]:
        return {
            "deployment": None if self.deployment is None else self.deployment.id,
            "breaks": list(self.breaks),
            "changes": list(self.changes),
            "unchecked": list(self.unchecked),
            "replays": self.replays.to_dict(),
            "not_tried": list(self.not_tried),
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
        dry_run: checks, replays and estimates only.
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
        if version.note is not None:
            default_progress(progress).say(f"note: {version.note}")
        folders = [deployments.registry.folder_of(one) for one in (champion, version)]
        measure = replay_rubric(settings.replay_rubric)
        checks = compatibility(*(load_artifact(folder) for folder in folders))
        _refuse_broken(checks.breaks, version, champion, settings)
        replays = rehearse(
            deployments, champion, version, count=settings.replay, rubric=measure, store=store, progress=progress
        )
        declared = () if replays.answered else checks.outputs or ()
        breaks = (*checks.breaks, *replays.breaks, *declared)
        _refuse_broken(breaks, version, champion, settings)
        suite = settings.suite or suite_of(opened.engine, version.agent)
        result = None if suite is None else _run(suite, str(folders[1]), store, progress)
        if result is not None and result.missed and not settings.force:
            raise DeploymentError(
                f"{version.name} {' and '.join(result.missed)}. Fix it, or deploy it anyway with force=True",
                flag="--force",
            )
        report = StartReport(
            deployment=None, breaks=breaks, changes=(*checks.changes, *replays.changes),
            unchecked=_unchecked(checks, replays), replays=replays, not_tried=_not_tried(plan, replays),
            suite=result, expected=expected_requests(plan),
        )  # fmt: skip
        if dry_run:
            return report
        return replace(report, not_tried=(), deployment=deployments.start(candidate, plan, checks=_kept(report)))


def _refuse_broken(breaks: Sequence[str], version: Version, champion: Version, settings: StartSettings) -> None:
    """Raises `DeploymentError` if something breaks, and a deployment is not forced."""
    if breaks and not settings.force:
        raise DeploymentError(
            f"{version.name} breaks what callers of {champion.name} use: {'; '.join(breaks)}. Fix it, or "
            "deploy it anyway with force=True",
            flag="--force",
        )


def _unchecked(checks: Compatibility, replays: Rehearsal) -> tuple[str, ...]:
    """What is not known of the outputs."""
    reasons = list(replays.unchecked)
    if not replays.answered and checks.outputs is None:
        asked = "no recorded rollout was replayed" if not replays.wanted else "no replay has an answer"
        reasons.append(f"outputs: not compared, because a program without predictors declares none, and {asked}")
    return tuple(reasons)


def _not_tried(plan: Plan, replays: Rehearsal) -> tuple[str, ...]:
    """The steps that a dry run does not take."""
    shadow, live = plan.steps[0].shadow, [step.label for step in plan.steps if not step.shadow]
    scored = "" if replays.gain is not None else ", unscored"
    of_shadow = (
        f"the shadow step: it replays {plan.steps[0].requests} recorded rollouts, {replays.n} were replayed{scored} "
        "(--replay N --replay-rubric R tries more)"
    )
    missing = shadow and (replays.n < plan.steps[0].requests or replays.gain is None)
    return (*([of_shadow] if missing else []), f"live traffic: the steps {', '.join(live)} are simulated only")


def _kept(report: StartReport) -> dict[str, Any]:
    """The checks, as the first row of the history has them."""
    missed = report.suite is not None and bool(report.suite.missed)
    fields = report.to_dict()
    kept = {name: fields[name] for name in ("suite", "breaks", "changes", "unchecked", "replays")}
    return {**kept, "forced": bool(report.breaks) or missed}


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

    A plan with many requests is simulated in fewer runs, each cut off after 50,000 requests.

    Args:
        base: success rate of the champion.
    """
    goal = max(metric.success_gain or 0.0 for metric in plan.metrics)
    effect = min(2 * max(goal, 0.05), 1 / base - 1)
    simulated = Plan(
        steps=plan.steps,
        metrics=tuple(metric for metric in plan.metrics if metric.success_gain is not None)[:1],
        alpha=plan.alpha, test=plan.test, evaluations=plan.evaluations, max_missing=plan.max_missing,
        missing=plan.missing, covariate=plan.covariate,
    )  # fmt: skip
    instant = replace(
        simulated, steps=tuple(replace(step, hold_s=0.0) for step in simulated.steps),
        metrics=tuple(replace(metric, horizon_s=0.0) for metric in simulated.metrics),
    )  # fmt: skip
    return {
        name: simulate(instant, Traffic(base=base, effect=value), runs=_RUNS, total_requests=_TOTAL)
        for name, value in (("better", effect), ("equal", 0.0))
    }
