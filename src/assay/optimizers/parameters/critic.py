"""The adjuster's critic: expected score at any parameters, from all episodes so far. Does not choose parameters."""

import warnings
from dataclasses import dataclass

import numpy as np

_LENGTH = (0.15, 2.0)  # of the kernel, in shares of a parameter's range
_VARIANCE = (0.005, 0.5)  # of scores over the space


@dataclass(frozen=True)
class Estimates:
    """Posterior of the score at each place: `mean[place]` and standard deviation `error[place]`."""

    mean: np.ndarray
    error: np.ndarray


class Critic:
    """A Gaussian process over the parameters' places, with an RBF kernel of one length scale.

    Source: Rasmussen and Williams 2006, ch. 2.

    An episode's score is a mean over a few dozen tasks, with a standard error of about 0.07. The scores of episodes at
    similar parameters reduce that error by a factor of two to three.

    Args:
        places: `[episode][parameter]`, each in [0, 1] of its range; at least two episodes.
        scores: overall scores in [0, 1].
        runs: scored runs behind each score.

    Attributes:
        evidence: log marginal likelihood of the scores.
    """

    def __init__(self, places: np.ndarray, scores: np.ndarray, runs: np.ndarray) -> None:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel

        self._centre = float(scores.mean())
        # Laplace's rule: an episode of only right answers still has sampling noise
        smoothed = (scores * runs + 1) / (runs + 2)
        self._process = GaussianProcessRegressor(
            ConstantKernel(0.05, _VARIANCE) * RBF(0.5, _LENGTH), alpha=smoothed * (1 - smoothed) / runs + 1e-4
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length at a bound is a valid fit
            self._process.fit(places, scores - self._centre)
        self.evidence = float(self._process.log_marginal_likelihood_value_)

    def at(self, places: np.ndarray) -> Estimates:
        """Posterior at `places[i][parameter]`."""
        mean, error = self._process.predict(places, return_std=True)
        return Estimates(mean + self._centre, error)
