"""Public API for `assay deploy simulate`: how often a plan decides rightly, on traffic with known truth."""

from dataclasses import fields, replace
from typing import Unpack

from assay.deployment.plan import Plan, default_plan, load_plan
from assay.deployment.simulation import SimulationReport, simulate
from assay.deployment.traffic import Traffic
from assay.evaluation.progress import Progress, SilentProgress
from assay.runs.arguments import takes
from assay.runs.settings.deploy import SimulateSettings
from assay.runs.settings.options import SimulateOptions

__all__ = ["simulate_plan"]


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
    plan = _plan(settings)
    with (progress or SilentProgress()).bar("simulated deployments", settings.runs) as advance:
        return simulate(
            plan, traffic, runs=settings.runs, seed=settings.seed, interval=settings.interval, on_run=advance
        )


def _plan(settings: SimulateSettings) -> Plan:
    if settings.plan is None:
        return default_plan(gain=0.1 if settings.goal is None else settings.goal)
    plan = load_plan(settings.plan)
    if settings.goal is None:
        return plan
    metrics = [
        replace(metric, success_gain=settings.goal) if metric.success_gain is not None else metric
        for metric in plan.metrics
    ]
    return replace(plan, metrics=tuple(metrics))
