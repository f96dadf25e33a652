"""From the probabilities a model gives to probabilities and verdicts that agree with people's.

Applying needs no package beyond the standard library; fitting (`fit`) needs scikit-learn.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.errors import ConfigError, MissingExtra
from assay.rubrics import JudgeSpec

__all__ = ["METHODS", "Calibration", "expected_step", "fit", "place"]

METHODS = ("platt", "isotonic")
_SMALLEST = 1e-6
_STRENGTHS = (0.03, 0.3, 3.0)  # inverse regularization of the logistic map, chosen by cross-validation


@dataclass(frozen=True)
class Calibration:
    """A fitted map, and how a verdict is taken from it.

    `platt` is a logistic map of the log-probabilities of all labels: Platt scaling (1999) for two, matrix scaling (Guo et
    al. 2017, arXiv 1706.04599) for more. `isotonic` maps each label's probability by a rising step function and rescales
    (Zadrozny and Elkan 2002). `cuts` lie between the words of an ordinal or numeric scale, on the expected step; without
    them the verdict is the likeliest label.
    """

    method: str
    weights: Sequence[Sequence[float]] = ()  # platt: [label][log-probability]
    biases: Sequence[float] = ()
    curves: Sequence[Sequence[Sequence[float]]] = ()  # isotonic: [label] -> (probabilities as read, as calibrated)
    cuts: Sequence[float] = field(default=())

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"calibration method={self.method!r} must be one of {', '.join(METHODS)}")

    def map(self, raw: Mapping[str, float]) -> dict[str, float]:
        """Calibrated probabilities of the same labels, summing to one."""
        if self.method == "platt":
            logs = [math.log(max(_SMALLEST, p)) for p in raw.values()]
            scores = [bias + math.fsum(w * x for w, x in zip(row, logs, strict=True)) for row, bias in zip(self.weights, self.biases, strict=True)]
            top = max(scores)
            masses = [math.exp(score - top) for score in scores]
        else:
            masses = [max(_SMALLEST, _interpolate(p, *curve)) for p, curve in zip(raw.values(), self.curves, strict=True)]
        total = math.fsum(masses)
        return {label: mass / total for label, mass in zip(raw, masses, strict=True)}

    def apply(self, raw: Mapping[str, float], spec: JudgeSpec) -> tuple[dict[str, float], str]:
        """Calibrated probabilities and the verdict."""
        final = self.map(raw)
        if self.cuts:
            return final, place(expected_step(list(final.values()), spec), self.cuts, spec)
        return final, max(final, key=lambda label: final[label])


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    at = bisect.bisect_left(xs, x)
    if at == 0:
        return ys[0]
    if at == len(xs):
        return ys[-1]
    share = (x - xs[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at - 1] + share * (ys[at] - ys[at - 1])


def expected_step(probabilities: Sequence[float], spec: JudgeSpec) -> float:
    """The mean place on the scale, in its own units."""
    return math.fsum(p * step for p, step in zip(probabilities, spec.steps, strict=True))


def place(step: float, cuts: Sequence[float], spec: JudgeSpec) -> str:
    """The word of the scale between whose cuts a place lies."""
    return spec.scale[bisect.bisect_right(list(cuts), step)]


def fit(method: str, raw: Sequence[Mapping[str, float]], shares: Sequence[Mapping[str, float]], *, seed: int = 0) -> Calibration:
    """A map from probabilities as read to the shares of people who gave each label.

    Disagreeing raters are not voted away: each item counts for every label with the share of its raters who gave it.

    Args:
        raw: probabilities by label, one mapping an item.
        shares: shares of the raters by label, summing to one, in the same order.
    Raises:
        MissingExtra: scikit-learn is not installed.
        ConfigError: fewer than two labels were given by people: nothing can be told apart.
    """
    try:
        import numpy as np
        from sklearn.isotonic import IsotonicRegression
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedKFold
    except ImportError as error:
        raise MissingExtra("scikit-learn", "judges") from error
    labels = list(raw[0])
    x = np.array([[max(_SMALLEST, item[label]) for label in labels] for item in raw])
    y = np.array([[share.get(label, 0.0) for label in labels] for share in shares])
    if (y.sum(axis=0) > 0).sum() < 2:
        raise ConfigError(f"people gave only one of the labels {labels}: there is nothing to calibrate against")
    if method == "isotonic":
        curves = []
        for column in range(len(labels)):
            fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(x[:, column], y[:, column])
            curves.append([fitted.X_thresholds_.tolist(), fitted.y_thresholds_.tolist()])
        return Calibration("isotonic", curves=curves)

    logs, classes = np.log(x), np.arange(len(labels))

    def logistic(rows: Any, strength: float) -> Any:
        repeated = np.repeat(logs[rows], len(labels), axis=0)
        kept = (weight := y[rows].ravel()) > 0
        return LogisticRegression(C=strength, max_iter=200, solver="newton-cholesky").fit(
            repeated[kept], np.tile(classes, len(rows))[kept], sample_weight=weight[kept]
        )

    def loss(strength: float) -> float:
        folds, total = StratifiedKFold(min(5, *np.bincount(y.argmax(axis=1))[np.unique(y.argmax(axis=1))]), shuffle=True, random_state=seed), 0.0
        for train, held in folds.split(logs, y.argmax(axis=1)):
            model = logistic(train, strength)
            guess = np.full((len(held), len(labels)), _SMALLEST)
            guess[:, model.classes_] = model.predict_proba(logs[held])
            total -= float((y[held] * np.log(np.maximum(guess, _SMALLEST))).sum())
        return total

    enough = min(np.bincount(y.argmax(axis=1))[np.unique(y.argmax(axis=1))]) >= 2 and len(np.unique(y.argmax(axis=1))) > 1
    model = logistic(np.arange(len(x)), min(_STRENGTHS, key=loss) if enough else _STRENGTHS[0])
    weights, biases = np.zeros((len(labels), len(labels))), np.full(len(labels), math.log(_SMALLEST))
    if len(model.classes_) == 2:  # scikit-learn keeps one row for two classes
        low, high = model.classes_
        weights[high], biases[low], biases[high] = model.coef_[0], 0.0, model.intercept_[0]
    else:
        weights[model.classes_], biases[model.classes_] = model.coef_, model.intercept_
    return Calibration("platt", weights=weights.tolist(), biases=biases.tolist())
