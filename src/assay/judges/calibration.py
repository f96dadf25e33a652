"""Calibration of a judge's probabilities to human labels.

Applying a calibration needs only the standard library; fitting (`fit`) needs scikit-learn.
"""

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.errors import ConfigError
from assay.rubrics import JudgeSpec, NoGrade
from assay.support.names import one_of

METHODS = ("platt", "isotonic", "probe")
_SMALLEST = 1e-6
_STRENGTHS = (0.03, 0.3, 3.0)  # candidates for the inverse regularization strength of the logistic regression
_PROBE_STRENGTHS = (0.003, 0.01, 0.03, 0.1)  # the same for a probe, which has one input per token
_COMMON = 0.5  # a probe uses the tokens that are reported for at least this share of the items
_FEWEST_TOKENS = 8


@dataclass(frozen=True)
class Calibration:
    """A fitted calibration and the rule for its verdict.

    - `platt`: logistic regression on the log-probabilities of all labels. Platt scaling (1999) for two labels, matrix
      scaling (Guo et al. 2017, arXiv 1706.04599) for more.
    - `isotonic`: a monotone function per label, followed by normalization (Zadrozny and Elkan 2002).
    - `probe`: logistic regression on the log-probabilities of all tokens that are common at the verdict's position, not
      only of the labels. What a small model knows about a text also changes the probabilities of other tokens (a linear
      probe, Alain and Bengio 2016, arXiv 1610.01644, on the output distribution).

    `cuts` are thresholds between the labels of an ordinal or numeric scale, on the expected step. Without them the
    verdict is the most probable label.
    """

    method: str
    weights: Sequence[Sequence[float]] = ()  # platt, probe: [label][log-probability]
    biases: Sequence[float] = ()
    curves: Sequence[Sequence[Sequence[float]]] = ()  # isotonic: [label] -> (probabilities as read, as calibrated)
    cuts: Sequence[float] = field(default=())
    tokens: Sequence[str] = ()  # probe: its input tokens
    floors: Sequence[float] = ()  # probe: log-probability of each token if it is not reported

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"calibration method={self.method!r} {one_of(self.method, METHODS)}")

    def map(self, reading: Mapping[str, Any], labels: Sequence[str]) -> dict[str, float]:
        """Returns calibrated probabilities of the labels; they sum to one.

        Args:
            reading: probabilities by label; for a probe also `tokens`, log-probabilities by token.
        Raises:
            NoGrade: a probe needs `tokens` and the reading has none.
        """
        if self.method in ("platt", "probe"):
            logs = self._logs(reading, labels)
            scores = [
                bias + math.fsum(w * x for w, x in zip(row, logs, strict=True))
                for row, bias in zip(self.weights, self.biases, strict=True)
            ]
            top = max(scores)
            masses = [math.exp(score - top) for score in scores]
        else:
            masses = [
                max(_SMALLEST, _interpolate(reading[label], *curve))
                for label, curve in zip(labels, self.curves, strict=True)
            ]
        total = math.fsum(masses)
        return {label: mass / total for label, mass in zip(labels, masses, strict=True)}

    def _logs(self, reading: Mapping[str, Any], labels: Sequence[str]) -> list[float]:
        if self.method == "platt":
            return [math.log(max(_SMALLEST, reading[label])) for label in labels]
        if "tokens" not in reading:
            raise NoGrade("this judge's calibration needs token probabilities, and this model's engine returns none")
        logs = reading["tokens"]
        return [logs.get(token, floor) for token, floor in zip(self.tokens, self.floors, strict=True)]

    def apply(self, reading: Mapping[str, Any], spec: JudgeSpec) -> tuple[dict[str, float], str]:
        """Returns calibrated probabilities and the verdict."""
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
    """Expected position on the scale, in the units of `spec.steps`."""
    return math.fsum(p * step for p, step in zip(probabilities, spec.steps, strict=True))


def place(step: float, cuts: Sequence[float], spec: JudgeSpec) -> str:
    """The label whose interval between the cuts contains a position."""
    return spec.scale[bisect.bisect_right(list(cuts), step)]


def fit(
    method: str,
    raw: Sequence[Mapping[str, Any]],
    shares: Sequence[Mapping[str, float]],
    labels: Sequence[str],
    *,
    seed: int = 0,
) -> Calibration | None:
    """Fits a calibration from readings to the raters' shares of each label.

    Disagreement is kept: an item counts for every label with the share of its raters who chose it.

    Args:
        raw: one reading per item: probabilities by label, and `tokens` if the engine reported more.
        shares: label -> share of the raters, summing to one, in the same order.
    Returns:
        The calibration; None if too few tokens were reported for a probe.
    Raises:
        ConfigError: the raters used fewer than two labels.
    """
    import numpy as np
    from sklearn.isotonic import IsotonicRegression

    y = np.array([[share.get(label, 0.0) for label in labels] for share in shares])
    if (y.sum(axis=0) > 0).sum() < 2:
        raise ConfigError(
            f"the human labels contain only one of {list(labels)}; a calibration needs at least two different labels"
        )
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

    reported = [item.get("tokens") or {} for item in raw]
    counts = Counter(token for tokens in reported for token in tokens)
    tokens = sorted(token for token, count in counts.items() if count >= _COMMON * len(reported))
    if len(tokens) < _FEWEST_TOKENS:
        return None
    x = np.array([[entry.get(token, math.nan) for token in tokens] for entry in reported])
    floors = np.nanmin(x, axis=0)  # an unreported token is at most as likely as the least likely seen
    x = np.where(np.isnan(x), floors, x)
    mean, spread = x.mean(axis=0), np.maximum(x.std(axis=0), _SMALLEST)
    weights, biases = _logistic((x - mean) / spread, y, _PROBE_STRENGTHS, seed)
    weights = weights / spread
    return Calibration(
        "probe",
        weights=weights.tolist(),
        biases=(biases - weights @ mean).tolist(),
        tokens=tokens,
        floors=floors.tolist(),
    )


def _logistic(x: Any, y: Any, strengths: Sequence[float], seed: int) -> tuple[Any, Any]:
    """Multinomial logistic regression on soft labels. The strength is chosen by cross-validated likelihood."""
    import numpy as np
    from scipy.special import softmax
    from sklearn import config_context
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    count, modes = y.shape[1], y.argmax(axis=1)

    def fitted(rows: Any, strength: float) -> Any:
        positive = (weight := y[rows].ravel()) > 0
        solver = "newton-cholesky" if x.shape[1] <= 16 else "lbfgs"
        model = LogisticRegression(C=strength, max_iter=500, solver=solver)
        # a search fits thousands of small models: scikit-learn's checks of input and parameters take half of the time
        with config_context(assume_finite=True, skip_parameter_validation=True):
            return model.fit(
                np.repeat(x[rows], count, axis=0)[positive],
                np.tile(np.arange(count), len(rows))[positive],
                sample_weight=weight[positive],
            )

    def probabilities(model: Any, rows: Any) -> Any:
        scores = x[rows] @ model.coef_.T + model.intercept_
        return softmax(np.hstack([np.zeros_like(scores), scores]) if scores.shape[1] == 1 else scores, axis=1)

    sizes = np.bincount(modes)[np.unique(modes)]

    def loss(strength: float) -> float:
        total = 0.0
        for train, test in StratifiedKFold(min(5, *sizes), shuffle=True, random_state=seed).split(x, modes):
            model = fitted(train, strength)
            guess = np.full((len(test), count), _SMALLEST)
            guess[:, model.classes_] = probabilities(model, test)
            total -= float((y[test] * np.log(np.maximum(guess, _SMALLEST))).sum())
        return total

    enough = len(sizes) > 1 and min(sizes) >= 2
    model = fitted(np.arange(len(x)), min(strengths, key=loss) if enough else strengths[0])
    weights, biases = np.zeros((count, x.shape[1])), np.full(count, math.log(_SMALLEST))
    if len(model.classes_) == 2:  # scikit-learn stores one row for two classes
        low, high = model.classes_
        weights[high], biases[low], biases[high] = model.coef_[0], 0.0, model.intercept_[0]
    else:
        weights[model.classes_], biases[model.classes_] = model.coef_, model.intercept_
    return weights, biases
