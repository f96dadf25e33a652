"""Checks of plans: how many were feasible, and whether that of one call was."""

from collections.abc import Mapping
from typing import Any

from assay.datasets import Task
from assay.rubrics import Grade, NoGrade
from assay.rubrics.environments import episode_steps, written_by
from assay.traces import Rollout

__all__ = ["feasible_plans", "plan_feasible"]


def feasible_plans(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Share of the actions whose `info` has a true `feasible`; a refused action is not feasible."""
    steps = episode_steps(prediction)
    feasible = [False if step.get("error") is not None else _feasible(step) for step in steps]
    if not feasible or None in feasible:
        raise NoGrade("a step has no 'feasible' in its info")
    return Grade(
        value=feasible.count(True) / len(feasible), reason=f"{feasible.count(False)} of {len(feasible)} plans failed."
    )


def plan_feasible(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Scope `step`: grade 1 if the plan that the call wrote was feasible, 0 if it failed or was refused."""
    steps = written_by(prediction, rollout)
    return Grade.of(all(_feasible(step) for step in steps))


def _feasible(step: Mapping[str, Any]) -> bool | None:
    info = step.get("info")
    value = info.get("feasible") if isinstance(info, Mapping) else None
    return value if isinstance(value, bool) else None
