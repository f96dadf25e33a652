"""Fits a rubric's weights to human scores by ridge regression with fixed signs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from assay.errors import RubricError
from assay.rubrics.criteria import Criterion
from assay.rubrics.rubric import Rubric
from assay.rubrics.scoring import ScoreResult, waits

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
    essential criteria do not change. Results with an unscored criterion are excluded. A criterion that does not apply
    to a result is in neither the sum nor the divisor of its score; the fit sets its grade to the human score, which
    gives the same residual times the applicable weight.

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
    rows = [(_grades(r, finals, rubric), score) for r, score in zip(results, human, strict=True) if r.failed is None]
    complete = [(grades, score) for grades, score in rows if grades is not None]
    if len(complete) < max(10, 2 * len(finals)):
        raise RubricError(
            f"{len(complete)} complete results are too few to fit {len(finals)} weights: "
            f"score at least {max(10, 2 * len(finals))}"
        )
    x, y = (
        np.array([grades for grades, _ in complete]),
        np.array([score for _, score in complete]),
    )  # NaN: not applicable
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


def _grades(result: ScoreResult, finals: Sequence[Criterion], rubric: Rubric) -> list[float] | None:
    """Grades as used in the score: 0 if `when` did not pass, NaN if the criterion does not apply.

    None if one is unscored, or no criterion with a positive weight applies, which leaves no score.
    """
    by_name = {verdict.criterion: verdict for verdict in result.verdicts}
    grades: list[float] = []
    for criterion in finals:
        verdict = by_name.get(criterion.name)
        if verdict is None or (verdict.applies and verdict.grade is None):
            return None
        if verdict.grade is not None:
            grades.append(verdict.grade)
        else:
            grades.append(0.0 if waits(criterion, rubric.criteria, by_name) else math.nan)
    applicable = [c for c, grade in zip(finals, grades, strict=True) if c.weight > 0 and math.isfinite(grade)]
    return grades if applicable else None


def _scores(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Scores of grades, as computed by `combine`. Shape (results,)."""
    positive = np.where(weights > 0, weights, 0)
    divisors = np.isfinite(x) @ positive
    values = np.nan_to_num(x) @ weights
    return np.clip(np.divide(values, divisors, out=np.zeros(len(x)), where=divisors > 0), 0, 1)


def _solve(x: np.ndarray, y: np.ndarray, declared: np.ndarray, strength: float) -> np.ndarray:
    from scipy.optimize import lsq_linear

    x = np.where(np.isfinite(x), x, np.where(declared > 0, y[:, None], 0.0))
    penalty = math.sqrt(strength) * np.eye(len(declared))
    sum_row = _SUM_PENALTY * (declared > 0).astype(float)
    a, b = np.vstack([x, penalty, sum_row]), np.concatenate([y, math.sqrt(strength) * declared, [_SUM_PENALTY]])
    low, high = np.where(declared > 0, 0.0, -np.inf), np.where(declared > 0, np.inf, 0.0)
    weights: np.ndarray = lsq_linear(a, b, bounds=(low, high), method="bvls").x
    return weights
