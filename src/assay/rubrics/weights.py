"""Fits a rubric's weights to human scores by ridge regression with fixed signs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from assay.errors import RubricError
from assay.rubrics.rubric import Rubric
from assay.rubrics.scoring import ScoreResult

__all__ = ["FittedWeights", "fit_weights"]

_STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
_FOLDS = 5
_SUM_PENALTY = 1e3  # penalty that constrains the positive weights to sum to one, because the score divides by their sum


@dataclass(frozen=True)
class FittedWeights:
    """Result of `fit_weights`.

    Args:
        rubric: the rubric with the fitted weights, scaled to the sum of the declared positive weights.
        weights: fitted weights by criterion.
        strength: regularization strength chosen by cross-validation.
        error_declared: RMSE between score and human score with the declared weights.
        error_fitted: cross-validated RMSE with fitted weights.
        n: results used.
    """

    rubric: Rubric
    weights: Mapping[str, float]
    strength: float
    error_declared: float
    error_fitted: float
    n: int


def fit_weights(
    rubric: Rubric, results: Sequence[ScoreResult], human: Sequence[float], *, seed: int = 0
) -> FittedWeights:
    """Fits the weights of the final criteria to human scores.

    Minimizes |human - G·w|² + strength·|w - declared|² by bounded least squares. Each weight keeps the sign of its
    declared weight, and the positive weights sum to one. The strength is chosen by five-fold cross-validation. Caps of
    essential criteria do not change. Results with an unscored criterion are excluded.

    Args:
        results: the rubric's result for each output.
        human: human scores of the same outputs, in [0, 1].
    Raises:
        RubricError: fewer than ten complete results or fewer than two per criterion, a human score outside [0, 1], or
            different numbers of results and human scores.
    Source: ridge regression, Hoerl and Kennard 1970, Technometrics 12:55.
    """
    finals = [c for c in rubric.criteria if c.scope == "final" and c.weight != 0]
    if len(results) != len(human):
        raise RubricError(f"{len(results)} results and {len(human)} human scores: pass one human score per result")
    if invalid := [score for score in human if not 0 <= score <= 1]:
        raise RubricError(f"human scores must be between 0 and 1, found {invalid[0]!r}: divide by the maximum")
    rows = [
        (_grades(r, [c.name for c in finals]), score)
        for r, score in zip(results, human, strict=True)
        if r.failed is None
    ]
    complete = [(grades, score) for grades, score in rows if all(math.isfinite(g) for g in grades)]
    if len(complete) < max(10, 2 * len(finals)):
        raise RubricError(
            f"{len(complete)} complete results are too few to fit {len(finals)} weights: "
            f"score at least {max(10, 2 * len(finals))}"
        )
    x, y = np.array([grades for grades, _ in complete]), np.array([score for _, score in complete])
    total = math.fsum(c.weight for c in finals if c.weight > 0)
    declared = np.array([c.weight / total for c in finals])
    folds = np.random.default_rng(seed).permutation(len(y)) % _FOLDS

    def error(strength: float) -> float:
        gaps = [
            _scores(x[folds == f], _solve(x[folds != f], y[folds != f], declared, strength)) - y[folds == f]
            for f in range(_FOLDS)
        ]
        return float(np.sqrt(np.mean(np.concatenate(gaps) ** 2)))

    errors = {strength: error(strength) for strength in _STRENGTHS}
    best = min(errors, key=errors.__getitem__)
    weights = {c.name: float(w) * total for c, w in zip(finals, _solve(x, y, declared, best), strict=True)}
    before = float(np.sqrt(np.mean((_scores(x, declared) - y) ** 2)))
    return FittedWeights(rubric.reweighted(weights), weights, best, before, errors[best], len(complete))


def _grades(result: ScoreResult, names: Sequence[str]) -> list[float]:
    """Grades as used in the score: 0 for a criterion that does not apply (`when`)."""
    waiting = {verdict.criterion for verdict in result.verdicts if not verdict.applies}
    return [0.0 if name in waiting else result.grades.get(name, math.nan) for name in names]


def _scores(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Scores of complete grades, as computed by `combine`."""
    return np.clip(x @ weights / weights[weights > 0].sum(), 0, 1)


def _solve(x: np.ndarray, y: np.ndarray, declared: np.ndarray, strength: float) -> np.ndarray:
    from scipy.optimize import lsq_linear

    penalty = math.sqrt(strength) * np.eye(len(declared))
    sum_row = _SUM_PENALTY * (declared > 0).astype(float)
    a, b = np.vstack([x, penalty, sum_row]), np.concatenate([y, math.sqrt(strength) * declared, [_SUM_PENALTY]])
    low, high = np.where(declared > 0, 0.0, -np.inf), np.where(declared > 0, np.inf, 0.0)
    weights: np.ndarray = lsq_linear(a, b, bounds=(low, high), method="bvls").x
    return weights
