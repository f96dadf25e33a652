"""Figures of an agent's tool use, each with a 95 % interval, for every report of a program with tools.

Adoption and abstention are reported next to each other: adoption alone can be gained by calling a tool on every task.
Does not call a model.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from assay.datasets import Task
from assay.evaluation.metrics import TaskRun
from assay.evaluation.statistics import interval_of
from assay.rubrics import NoGrade
from assay.rubrics.tools import (
    abstention_when_not,
    adoption_when_needed,
    argument_exactness,
    made_calls,
    recovery_after_error,
)
from assay.traces import Rollout

_GRADED = {
    "adoption_when_needed": adoption_when_needed,
    "abstention_when_not": abstention_when_not,
    "argument_exactness": argument_exactness,
    "recovery_after_error": recovery_after_error,
}
TOOL_FIGURES = (*_GRADED, "calls_per_task")


def figures_of(task: Task, rollout: Rollout) -> dict[str, float]:
    """The figures of one run that apply to its task: grades in [0, 1], and the number of tool calls.

    A run that failed without an answer counts with the calls that it made.
    """
    prediction = dict(rollout.prediction or {})
    figures: dict[str, float] = {}
    for name, check in _GRADED.items():
        try:
            figures[name] = check(task, prediction, rollout).value
        except NoGrade:
            continue
    calls = made_calls(prediction, rollout)
    return figures if calls is None else {**figures, "calls_per_task": float(len(calls))}


def tool_use(runs: Sequence[TaskRun]) -> dict[str, dict[str, float | int]] | None:
    """`mean`, `low`, `high` and number of tasks `n` of each figure that was measured; None if none was.

    Several runs of one task count with their mean.
    """
    by_task: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in TOOL_FIGURES}
    for run in runs:
        for name, value in run.tool_figures.items():
            if name in by_task and math.isfinite(value):
                by_task[name][run.task_id].append(value)
    report = {name: _summary(values, name) for name, values in by_task.items() if values}
    return report or None


def _summary(by_task: Mapping[str, Sequence[float]], name: str) -> dict[str, Any]:
    values = np.array([math.fsum(runs) / len(runs) for runs in by_task.values()])
    most = float(values.max()) + 1 if name == "calls_per_task" else 1.0  # the largest number of calls is not known
    low, high = interval_of(values, 0.0, most)
    return {"mean": float(values.mean()), "low": low, "high": high, "n": len(values)}
