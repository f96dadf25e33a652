"""Expected score of each candidate, from few scored tasks of many candidates. Does not call a model.

A score is modelled as the candidate's quality, plus the task's difficulty, plus noise. The quality is a Gaussian
process over the features of the candidates, so scores of one candidate inform about similar ones. Scores in [0, 1];
higher is better.
Source: Rasmussen and Williams 2006, chapters 2 and 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CONSTANT = 0.3  # deviation of the common level of all candidates
_SCALES = (0.5, 1.0, 2.0)  # factors of the kernel's deviations; the one with the highest likelihood is used
_TASK_SHARE = 0.35  # share of the scores' variance that is due to the task's difficulty
_LEAST_VARIANCE = 0.02  # of a score, so that a candidate with equal scores so far is not taken as certain


@dataclass(frozen=True)
class Score:
    """One scored run: index of the candidate, key of the task, score."""

    candidate: int
    task: str
    score: float


@dataclass(frozen=True)
class Posterior:
    """Mean and covariance of the candidates' qualities: `mean[candidate]`, `covariance[candidate, candidate]`."""

    mean: np.ndarray
    covariance: np.ndarray

    def draws(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`draws[draw, candidate]`, none above 1: a score cannot be."""
        values, vectors = np.linalg.eigh((self.covariance + self.covariance.T) / 2)
        root = vectors * np.sqrt(np.clip(values, 0.0, None))
        drawn = self.mean + rng.standard_normal((count, len(self.mean))) @ root.T
        return np.asarray(np.minimum(drawn, 1.0))


def posterior(scores: Sequence[Score], kernel: np.ndarray) -> Posterior:
    """The posterior of all candidates in the kernel, those without a score included.

    Args:
        kernel: prior covariance of the candidates' qualities, without their common level.
    """
    from scipy.linalg import cho_factor, cho_solve

    count = len(kernel)
    if not scores:
        return Posterior(np.full(count, 0.5), kernel + _CONSTANT**2)
    candidates = np.array([score.candidate for score in scores])
    tasks = np.unique([score.task for score in scores], return_inverse=True)[1]
    values = np.array([score.score for score in scores])
    center = float(values.mean())
    variance = max(_LEAST_VARIANCE, float(values.var()))
    same_task = (tasks[:, None] == tasks[None, :]) * (_TASK_SHARE * variance)
    noise = np.eye(len(values)) * ((1 - _TASK_SHARE) * variance)
    best: tuple[float, Posterior] | None = None
    for scale in _SCALES:
        prior = kernel * scale**2 + _CONSTANT**2
        factor = cho_factor(prior[np.ix_(candidates, candidates)] + same_task + noise, lower=True)
        solved = cho_solve(factor, values - center)
        likelihood = -0.5 * float((values - center) @ solved) - float(np.log(np.diag(factor[0])).sum())
        if best is None or likelihood > best[0]:
            across = prior[:, candidates]
            best = likelihood, Posterior(center + across @ solved, prior - across @ cho_solve(factor, across.T))
    assert best is not None
    return best[1]
