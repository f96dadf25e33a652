"""The covariate of a deployment: what is known of a rollout's value before the candidate has live traffic.

From recorded rollouts of the champion and from the replays of the shadow step: how their task and their unit scored. A
live rollout's value less its covariate has a smaller variance, and the difference of the arms the same expectation,
because nothing of the covariate depends on the assignment (CUPED, Deng et al. 2013). It is fitted on these rollouts
alone and does not change while the deployment runs, so the confidence sequences stay valid however often they are read.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import sqlalchemy as sa

from assay.deployment.plan import Metric
from assay.deployment.rollout_values import SHADOW, columns_of, value_of
from assay.traces.store.tables import rollouts

FEWEST = 100  # recorded rollouts below which there is no covariate
_LEAST = 10.0  # explained share of their variance times their number that is no chance: about the square of a t value
_FOLDS = 5
_SHRINKAGES = (1.0, 3.0, 10.0, 30.0)  # number of values at which half of a task's or unit's mean counts
_RECORDED = 5000  # rollouts of the champion that the covariate is fitted on, at most
_RECENT_S = 90 * 86_400.0  # of this long before the deployment: older users and tasks say less, and cost a scan
_MOST_FIXED = 32  # covariates in memory, of at most some 10,000 numbers each


@dataclass(frozen=True, kw_only=True)
class Known:
    """Values that were measured before the first live step. Tasks and units are numbers from 0.

    Attributes:
        values, tasks, units, kinds: of each row; `kinds` is the task type.
        replayed: whether the row is a replay on the candidate. These count for their task alone.
    """

    values: np.ndarray
    tasks: np.ndarray
    units: np.ndarray
    kinds: np.ndarray
    replayed: np.ndarray


class Effects(NamedTuple):
    """What tasks and units add to a value, by their number."""

    tasks: np.ndarray
    units: np.ndarray


@dataclass(frozen=True)
class Covariate:
    """Expected deviation of a rollout's value from the mean of its task type, by task and unit."""

    tasks: Mapping[str, float] = field(default_factory=dict)
    units: Mapping[str, float] = field(default_factory=dict)

    def of(self, task: str, unit: str) -> float:
        """0 for a task and a unit that were not seen before."""
        return self.tasks.get(task, 0.0) + self.units.get(unit, 0.0)


_FIXED: dict[tuple[str, str], Covariate] = {}


def recorded_covariate(
    engine: sa.Engine, deployment: str, metric: Metric, *, champion: str, before: float, fixed: bool
) -> Covariate:
    """The covariate of a deployment: from the champion's newest rollouts of the 90 days before it started, and from its
    replays.

    Args:
        champion: name of the version.
        before: when the deployment started; seconds since the epoch.
        fixed: whether the shadow step is over: then it does not change, and is read once by each process.
    """
    if (deployment, metric.name) in _FIXED:
        return _FIXED[deployment, metric.name]
    columns = rollouts.c
    of_row = (columns.task_id, columns.unit, columns.task_type, columns.phase, *columns_of(metric))
    recorded = (
        sa.select(*of_row)
        .where(columns.version == champion, columns.phase == "deployed", columns.ended_at <= before)
        .where(columns.started_at.between(before - _RECENT_S, before))
        .order_by(columns.started_at.desc())
        .limit(_RECORDED)
    )
    replayed = sa.select(*of_row).where(
        columns.deployment == deployment, columns.phase == SHADOW, columns.status.in_(("done", "failed"))
    )
    rows = []
    with engine.connect() as connection:
        for query in (recorded, replayed):
            for row in connection.execute(query).mappings():
                if row["task_id"] and not math.isnan(value := value_of(metric, row)):
                    rows.append((row["task_id"], row["unit"] or "", row["task_type"], value, row["phase"] == SHADOW))
    covariate = covariate_of(rows)
    if fixed:
        while len(_FIXED) >= _MOST_FIXED:
            _FIXED.pop(next(iter(_FIXED)), None)
        _FIXED[deployment, metric.name] = covariate
    return covariate


def covariate_of(rows: Sequence[tuple[str, str, str, float, bool]]) -> Covariate:
    """The covariate from rows of task, unit, task type, value and whether it is a replay; empty where it explains
    nothing."""
    (tasks, task_codes), (units, unit_codes), (kinds, _) = (
        _numbered([row[0] for row in rows]), _numbered([row[1] for row in rows]), _numbered([row[2] for row in rows])
    )  # fmt: skip
    values, replayed = np.array([row[3] for row in rows], dtype=float), np.array([row[4] for row in rows], dtype=bool)
    known = Known(values=values, tasks=tasks, units=units, kinds=kinds, replayed=replayed)
    effects = fitted(known, tasks=len(task_codes), units=len(unit_codes))
    if effects is None:
        return Covariate()
    return Covariate(
        {name: float(effects.tasks[at]) for name, at in task_codes.items()},
        {name: float(effects.units[at]) for name, at in unit_codes.items()},
    )


def _numbered(names: Sequence[str]) -> tuple[np.ndarray, dict[str, int]]:
    """Names as numbers from 0, and the number of each name."""
    codes: dict[str, int] = {}
    return np.array([codes.setdefault(name, len(codes)) for name in names], dtype=int), codes


def fitted(known: Known, *, tasks: int, units: int) -> Effects | None:
    """Effects of tasks and units by least squares; None with too few rows, or where they explain too little.

    The two predictors of a recorded value are the means of its task and of its unit in the other folds, as deviations
    from the mean of the task type and arm, shrunk by n / (n + k). The k that explain most are used; weights are not
    negative. Each value is predicted without its own fold, as live values will be.

    Args:
        tasks, units: how many there are.
    """
    recorded = ~known.replayed
    if int(recorded.sum()) < FEWEST:
        return None
    deviations = _deviations(known)
    own = deviations[recorded]
    whole = float(own @ own)
    if whole <= 1e-9 * len(own):
        return None
    folds = np.full(len(recorded), -1)
    folds[recorded] = np.random.default_rng(0).integers(0, _FOLDS, len(own))
    of_tasks = _FoldSums(known.tasks, deviations, folds, tasks)
    of_units = _FoldSums(known.units[recorded], own, folds[recorded], units)
    best = _best(of_tasks, of_units, own)
    if (1 - best.left / whole) * len(own) < _LEAST:
        return None
    (weight_of_tasks, weight_of_units), (k_tasks, k_units) = best.weights, best.shrinkages
    return Effects(
        tasks=weight_of_tasks * of_tasks.total / (of_tasks.count + k_tasks),
        units=weight_of_units * of_units.total / (of_units.count + k_units),
    )


class _FoldSums:
    """Sums of deviations by task or unit, and those of all folds but the own one for each recorded value."""

    def __init__(self, numbers: np.ndarray, values: np.ndarray, folds: np.ndarray, size: int) -> None:
        self.total, self.count = _sums(numbers, values, size)
        own = folds >= 0
        in_fold, counts = _sums(numbers[own] * _FOLDS + folds[own], values[own], size * _FOLDS)
        at = numbers[own] * _FOLDS + folds[own]
        self.others = self.total[numbers[own]] - in_fold[at]
        self.number = self.count[numbers[own]] - counts[at]


@dataclass(frozen=True)
class _Fit:
    left: float
    weights: tuple[float, float]
    shrinkages: tuple[float, float]


def _best(tasks: _FoldSums, units: _FoldSums, values: np.ndarray) -> _Fit:
    """The fit that leaves the smallest sum of squares."""
    from scipy import optimize

    fits = []
    for of_task, of_unit in itertools.product(_SHRINKAGES, repeat=2):
        design = np.stack([tasks.others / (tasks.number + of_task), units.others / (units.number + of_unit)], axis=1)
        weights, norm = optimize.nnls(design, values)
        fits.append(_Fit(float(norm) ** 2, (float(weights[0]), float(weights[1])), (of_task, of_unit)))
    return min(fits, key=lambda fit: fit.left)


def _deviations(known: Known) -> np.ndarray:
    """Values less the mean of their task type, recorded and replayed ones apart."""
    groups = 2 * known.kinds + known.replayed
    total, count = _sums(groups, known.values, int(groups.max()) + 1)
    return known.values - (total / np.maximum(count, 1))[groups]


def _sums(numbers: np.ndarray, values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum and count of values by number."""
    return np.bincount(numbers, values, minlength=size), np.bincount(numbers, minlength=size).astype(float)
