"""What trials are worth, seen together: a trial's own mean is half luck, its neighbours know more. Chooses nothing."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from assay.optimizers.parameters.space import Point, Space

__all__ = ["Expected", "smoothed"]

_FEWEST = 10  # trials; under it their own means stand
_NOISE = 1e-4  # least variance of a run's luck
_ROUNDS = 20


@dataclass(frozen=True)
class Expected:
    """Of a trial: the mean of its own tasks, as if it had run all of them, that mean's standard error, and what is expected of it."""

    own: float
    error: float
    mean: float


def smoothed(points: Sequence[Point], values: Sequence[Mapping[str, float]], space: Space) -> list[Expected]:
    """What each trial is worth: the posterior mean of a Gaussian process (Matérn 5/2; Rasmussen and Williams 2006, ch. 2) over where
    the trials stand in the space.

    All trials run the same tasks, so what is hard for all of them is no luck: a trial's mean and the noise around it are those of
    the additive model value = trial + task + luck, fitted by least squares. A trial that was pruned counts with what it ran.

    Args:
        values: by trial, each of its tasks' values; no trial is without one.
    Returns:
        One a trial; with fewer than ten trials, or where all are alike, what is expected is its own mean.
    """
    own, luck = _means(values)
    counts = np.array([len(trial) for trial in values])
    errors = np.sqrt(luck / np.maximum(counts, 1))
    spread = float(own.std()) if len(own) else 0.0
    means = own if len(own) < _FEWEST or spread < 1e-9 else _posterior(points, own, errors, spread, space)
    return [Expected(float(at), float(error), float(mean)) for at, error, mean in zip(own, errors, means, strict=True)]


def _means(values: Sequence[Mapping[str, float]]) -> tuple[np.ndarray, float]:
    """Each trial's mean as if it had run all tasks, and the variance of what neither trial nor task explains."""
    names = sorted({task for trial in values for task in trial})
    table = np.array([[trial.get(task, np.nan) for task in names] for trial in values]).reshape(len(values), len(names))
    ran = ~np.isnan(table)
    filled, trials, tasks = np.where(ran, table, 0.0), np.zeros(len(values)), np.zeros(len(names))
    for _ in range(_ROUNDS):  # backfitting: each effect is the mean of what the other leaves
        trials = (filled - tasks * ran).sum(axis=1) / np.maximum(ran.sum(axis=1), 1)
        tasks = (filled - trials[:, None] * ran).sum(axis=0) / np.maximum(ran.sum(axis=0), 1)
        tasks -= tasks.mean() if len(tasks) else 0.0
    left = np.where(ran, table - trials[:, None] - tasks, 0.0)
    free = ran.sum() - len(values) - len(names) + 1
    return trials, max(float((left**2).sum() / free) if free > 0 else _NOISE, _NOISE)


def _posterior(points: Sequence[Point], own: np.ndarray, errors: np.ndarray, spread: float, space: Space) -> np.ndarray:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    kernel = ConstantKernel(1.0, (1e-2, 10.0)) * Matern(0.5, (0.05, 5.0), nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=(errors / spread) ** 2)
    places, centre = np.array([_place(point, space) for point in points]), float(own.mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length at the edge of its range is an answer
        fitted = process.fit(places, (own - centre) / spread)
    return np.asarray(fitted.predict(places) * spread + centre)


def _place(point: Point, space: Space) -> list[float]:
    """Coordinates in [0, 1]: the parameters, what does nothing in the middle, then one a program."""
    parameters = [space.place(name, point.parameters[name]) if name in space.searched(point.program) else 0.5 for name in space.ranges]
    return [*parameters, *([float(point.program == program) for program in space.programs] if len(space.programs) > 1 else [])]
