"""From the probabilities a model gives to probabilities and verdicts that agree with people's.

Applying needs no package beyond the standard library; fitting (`fit`) needs scikit-learn.
"""

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.errors import ConfigError
from assay.rubrics import JudgeSpec, NoGrade

__all__ = ["METHODS", "Calibration", "expected_step", "fit", "place"]

METHODS = ("platt", "isotonic", "probe")
_SMALLEST = 1e-6
_STRENGTHS = (0.03, 0.3, 3.0)  # inverse regularization of the logistic map, chosen by cross-validation
_PROBE_STRENGTHS = (0.003, 0.01, 0.03, 0.1)  # the same for a probe, which has as many inputs as tokens
_COMMON = 0.5  # share of the items whose likely tokens a token must be among to be looked at by a probe
_FEWEST_TOKENS = 8


@dataclass(frozen=True)
class Calibration:
    """A fitted map, and how a verdict is taken from it.

    `platt` is a logistic map of the log-probabilities of all labels: Platt scaling (1999) for two, matrix scaling (Guo et
    al. 2017, arXiv 1706.04599) for more. `isotonic` maps each label's probability by a rising step function and rescales
    (Zadrozny and Elkan 2002). `probe` is a logistic map of the log-probabilities of all tokens that are commonly likely where
    the verdict stands, not only of the scale's words: what a small model knows of a text moves many words that it would
    not choose (a linear probe, Alain and Bengio 2016, arXiv 1610.01644, on the output distribution). `cuts` lie between the
    words of an ordinal or numeric scale, on the expected step; without them the verdict is the likeliest label.
    """

    method: str
    weights: Sequence[Sequence[float]] = ()  # platt, probe: [label][log-probability]
    biases: Sequence[float] = ()
    curves: Sequence[Sequence[Sequence[float]]] = ()  # isotonic: [label] -> (probabilities as read, as calibrated)
    cuts: Sequence[float] = field(default=())
    tokens: Sequence[str] = ()  # probe: what is looked at,
    floors: Sequence[float] = ()  # and its log-probability where it is not among those reported

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"calibration method={self.method!r} must be one of {', '.join(METHODS)}")

    def map(self, reading: Mapping[str, Any], labels: Sequence[str]) -> dict[str, float]:
        """Calibrated probabilities of the labels, summing to one.

        Args:
            reading: probabilities by label; for a probe also `tokens`, log-probabilities by token.
        """
        if self.method in ("platt", "probe"):
            logs = self._logs(reading, labels)
            scores = [bias + math.fsum(w * x for w, x in zip(row, logs, strict=True)) for row, bias in zip(self.weights, self.biases, strict=True)]
            top = max(scores)
            masses = [math.exp(score - top) for score in scores]
        else:
            masses = [max(_SMALLEST, _interpolate(reading[label], *curve)) for label, curve in zip(labels, self.curves, strict=True)]
        total = math.fsum(masses)
        return {label: mass / total for label, mass in zip(labels, masses, strict=True)}

    def _logs(self, reading: Mapping[str, Any], labels: Sequence[str]) -> list[float]:
        if self.method == "platt":
            return [math.log(max(_SMALLEST, reading[label])) for label in labels]
        if "tokens" not in reading:
            raise NoGrade("this judge was calibrated on the probabilities of many tokens, and this model's engine gives none")
        given = reading["tokens"]
        return [given.get(token, floor) for token, floor in zip(self.tokens, self.floors, strict=True)]

    def apply(self, reading: Mapping[str, Any], spec: JudgeSpec) -> tuple[dict[str, float], str]:
        """Calibrated probabilities and the verdict."""
        final = self.map(reading, spec.scale)
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


def fit(
    method: str, raw: Sequence[Mapping[str, Any]], shares: Sequence[Mapping[str, float]], labels: Sequence[str], *, seed: int = 0
) -> Calibration | None:
    """A map from readings to the shares of people who gave each label; None where these readings do not allow the method.

    Disagreeing raters are not voted away: each item counts for every label with the share of its raters who gave it.

    Args:
        raw: readings, one an item: probabilities by label, and `tokens` where the engine gave more.
        shares: shares of the raters by label, summing to one, in the same order.
    Raises:
        ConfigError: fewer than two labels were given by people: nothing can be told apart.
    """
    import numpy as np
    from sklearn.isotonic import IsotonicRegression

    y = np.array([[share.get(label, 0.0) for label in labels] for share in shares])
    if (y.sum(axis=0) > 0).sum() < 2:
        raise ConfigError(f"people gave only one of the labels {list(labels)}: there is nothing to calibrate against")
    if method == "probe":
        return _probe(raw, y, seed)
    x = np.array([[max(_SMALLEST, item[label]) for label in labels] for item in raw])
    if method == "isotonic":
        curves = []
        for column in range(len(labels)):
            fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(x[:, column], y[:, column])
            curves.append([fitted.X_thresholds_.tolist(), fitted.y_thresholds_.tolist()])
        return Calibration("isotonic", curves=curves)
    weights, biases = _logistic(np.log(x), y, _STRENGTHS, seed)
    return Calibration("platt", weights=weights.tolist(), biases=biases.tolist())


def _probe(raw: Sequence[Mapping[str, Any]], y: Any, seed: int) -> Calibration | None:
    import numpy as np

    given = [item.get("tokens") or {} for item in raw]
    counts = Counter(token for tokens in given for token in tokens)
    tokens = sorted(token for token, count in counts.items() if count >= _COMMON * len(given))
    if len(tokens) < _FEWEST_TOKENS:
        return None
    x = np.array([[entry.get(token, math.nan) for token in tokens] for entry in given])
    floors = np.nanmin(x, axis=0)  # an unreported token is at most as likely as the least likely seen
    x = np.where(np.isnan(x), floors, x)
    mean, spread = x.mean(axis=0), np.maximum(x.std(axis=0), _SMALLEST)
    weights, biases = _logistic((x - mean) / spread, y, _PROBE_STRENGTHS, seed)
    weights = weights / spread
    return Calibration("probe", weights=weights.tolist(), biases=(biases - weights @ mean).tolist(), tokens=tokens, floors=floors.tolist())


def _logistic(x: Any, y: Any, strengths: Sequence[float], seed: int) -> tuple[Any, Any]:
    """Multinomial logistic regression on soft labels; its strength by the likelihood of held-out items."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    count, modes = y.shape[1], y.argmax(axis=1)

    def fitted(rows: Any, strength: float) -> Any:
        kept = (weight := y[rows].ravel()) > 0
        solver = "newton-cholesky" if x.shape[1] <= 16 else "lbfgs"
        model = LogisticRegression(C=strength, max_iter=500, solver=solver)
        return model.fit(np.repeat(x[rows], count, axis=0)[kept], np.tile(np.arange(count), len(rows))[kept], sample_weight=weight[kept])

    sizes = np.bincount(modes)[np.unique(modes)]

    def loss(strength: float) -> float:
        total = 0.0
        for train, held in StratifiedKFold(min(5, *sizes), shuffle=True, random_state=seed).split(x, modes):
            model = fitted(train, strength)
            guess = np.full((len(held), count), _SMALLEST)
            guess[:, model.classes_] = model.predict_proba(x[held])
            total -= float((y[held] * np.log(np.maximum(guess, _SMALLEST))).sum())
        return total

    enough = len(sizes) > 1 and min(sizes) >= 2
    model = fitted(np.arange(len(x)), min(strengths, key=loss) if enough else strengths[0])
    weights, biases = np.zeros((count, x.shape[1])), np.full(count, math.log(_SMALLEST))
    if len(model.classes_) == 2:  # scikit-learn keeps one row for two classes
        low, high = model.classes_
        weights[high], biases[low], biases[high] = model.coef_[0], 0.0, model.intercept_[0]
    else:
        weights[model.classes_], biases[model.classes_] = model.coef_, model.intercept_
    return weights, biases
