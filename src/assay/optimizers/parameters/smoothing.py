"""What trials are worth, seen together: a trial's own mean is half luck, its neighbours know more. Chooses nothing."""

import warnings
from collections.abc import Sequence

import numpy as np

from assay.optimizers.parameters.space import Point, Space

__all__ = ["smoothed"]

_FEWEST = 10  # trials; under it their own means stand
_NOISE = 1e-4  # least variance of a task's value


def smoothed(points: Sequence[Point], values: Sequence[Sequence[float]], space: Space) -> list[float]:
    """The expected score of each trial: the posterior mean of a Gaussian process (Matérn 5/2; Rasmussen and Williams 2006, ch. 2)
    over where the trials stand in the space, whose noise is the variance of a task's value over the tasks that a trial ran.

    Args:
        values: by trial, its tasks' values; trials that were pruned count with what they ran, and no trial is without one.
    Returns:
        One number a trial; with fewer than ten trials, or where all are alike, their means.
    """
    means = np.array([np.mean(own) for own in values])
    spread = float(means.std()) if len(means) else 0.0
    if len(means) < _FEWEST or spread < 1e-9:
        return [float(mean) for mean in means]
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    counts = np.array([len(own) for own in values])
    noise = max(float(np.average([np.var(own) for own in values], weights=counts)), _NOISE)
    kernel = ConstantKernel(1.0, (1e-2, 10.0)) * Matern(0.5, (0.05, 5.0), nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=noise / counts / spread**2)
    places, centre = np.array([_place(point, space) for point in points]), float(means.mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length at the edge of its range is an answer
        fitted = process.fit(places, (means - centre) / spread)
    return [float(mean) for mean in fitted.predict(places) * spread + centre]


def _place(point: Point, space: Space) -> list[float]:
    """Coordinates in [0, 1]: the parameters, what does nothing in the middle, then one a program."""
    parameters = [space.place(name, point.parameters[name]) if name in space.searched(point.program) else 0.5 for name in space.ranges]
    return [*parameters, *([float(point.program == program) for program in space.programs] if len(space.programs) > 1 else [])]
