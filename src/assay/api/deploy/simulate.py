"""Public API for `assay deploy simulate`: how often a plan decides rightly, on traffic with known truth."""

from dataclasses import fields, replace
from typing import Unpack

from assay.deployment.plan import Plan, default_plan, load_plan
from assay.deployment.simulation import SimulationReport, simulate
from assay.deployment.traffic import Traffic
from assay.evaluation.progress import Progress, default_progress
from assay.runs.settings.deploy import SimulateSettings
from assay.runs.settings.store_options import SimulateOptions
from assay.support.keywords import takes


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
