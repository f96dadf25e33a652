"""Expected scores of trials, smoothed over similar parameters. Does not choose a trial."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from assay.optimizers.parameters.space import Point, Space

_FEWEST = 10  # trials; with fewer, their own means are used
_NOISE = 1e-4  # smallest variance of a run's sampling noise
_ROUNDS = 20


@dataclass(frozen=True)
class Expected:
    """Of a trial: its own mean, adjusted for the tasks it did not run, the standard error, and the smoothed mean."""

    adjusted: float
    error: float
    mean: float


def smoothed_scores(points: Sequence[Point], values: Sequence[Mapping[str, float]], space: Space) -> list[Expected]:
    """Expected score of each trial: posterior mean of a Gaussian process over the space.

    Source: Rasmussen and Williams 2006, ch. 2; kernel Matérn 5/2. All trials run the same tasks, so the difficulty of a
    task is not noise: means and noise are those of the additive model value = trial + task + noise, fitted by least
    squares. A pruned trial counts with the tasks it ran.

    Args:
        values: by trial, the value of each task; no trial is empty.
    Returns:
        One per trial. With fewer than ten trials, or where all means are equal, each has its own mean.
    """
    adjusted, noise = _means(values)
    counts = np.array([len(trial) for trial in values])
    errors = np.sqrt(noise / np.maximum(counts, 1))
    spread = float(adjusted.std()) if len(adjusted) else 0.0
    means = (
        adjusted if len(adjusted) < _FEWEST or spread < 1e-9 else _posterior(points, adjusted, errors, spread, space)
    )
    return [
        Expected(float(at), float(error), float(mean)) for at, error, mean in zip(adjusted, errors, means, strict=True)
    ]


def _means(values: Sequence[Mapping[str, float]]) -> tuple[np.ndarray, float]:
    """Each trial's mean, adjusted for missing tasks, and the residual variance of the additive model."""
    names = sorted({task for trial in values for task in trial})
    table = np.array([[trial.get(task, np.nan) for task in names] for trial in values]).reshape(len(values), len(names))
    ran = ~np.isnan(table)
    filled, trials, tasks = np.where(ran, table, 0.0), np.zeros(len(values)), np.zeros(len(names))
    for _ in range(_ROUNDS):  # backfitting: each effect is the mean of what the other leaves
        trials = (filled - tasks * ran).sum(axis=1) / np.maximum(ran.sum(axis=1), 1)
        tasks = (filled - trials[:, None] * ran).sum(axis=0) / np.maximum(ran.sum(axis=0), 1)
        tasks -= tasks.mean() if len(tasks) else 0.0
    residuals = np.where(ran, table - trials[:, None] - tasks, 0.0)
    free = ran.sum() - len(values) - len(names) + 1
    return trials, max(float((residuals**2).sum() / free) if free > 0 else _NOISE, _NOISE)


def _posterior(
    points: Sequence[Point], adjusted: np.ndarray, errors: np.ndarray, spread: float, space: Space
) -> np.ndarray:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    kernel = ConstantKernel(1.0, (1e-2, 10.0)) * Matern(0.5, (0.05, 5.0), nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=(errors / spread) ** 2)
    places, centre = np.array([_place(point, space) for point in points]), float(adjusted.mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length at a bound is a valid fit
        fitted = process.fit(places, (adjusted - centre) / spread)
    return np.asarray(fitted.predict(places) * spread + centre)


def _place(point: Point, space: Space) -> list[float]:
    """Coordinates in [0, 1]: the parameters (0.5 for one without effect in the program), then one per program."""
    parameters = [
        space.place(name, point.parameters[name]) if name in space.searched(point.program) else 0.5
        for name in space.ranges
    ]
    return [
        *parameters,
        *([float(point.program == program) for program in space.programs] if len(space.programs) > 1 else []),
    ]
