"""Chance-corrected agreement of a judge with raters, with intervals, and agreement of the raters with each other.

Statistics are computed with scikit-learn and SciPy; a test compares alpha with the package krippendorff. An undefined
measure is None with a reason, never 0.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay.errors import ConfigError
from assay.judges.labels import Item
from assay.rubrics import JudgeSpec

MEASURES = ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman", "brier")
_RESAMPLES = 500
_MAX_INDICES = 2_000_000  # resampling indices in memory at once
FEWEST = 20  # minimum number of items for an interval
_RATERS = 4  # maximum number of raters per item used for the ceiling


@dataclass(frozen=True)
class Answers:
    """A judge's verdicts on items, in order.

    Args:
        verdicts: labels; None for an unscored item.
        places: expected steps on the scale (without probabilities, the verdict's step); NaN for an unscored item.
        probabilities: label -> probability; None if the engine gave none.
        orders: the two verdicts of a pair by position; None for a pointwise judge.
    """

    verdicts: Sequence[str | None]
    places: Sequence[float]
    probabilities: Sequence[Mapping[str, float] | None] = ()
    orders: Sequence[tuple[str, str] | None] = ()


@dataclass(frozen=True)
class Agreement:
    """Measures with 95 % bootstrap intervals over items. An undefined measure is None, with the reason in `why`."""

    n: int
    unscored: int
    values: Mapping[str, float | None]
    intervals: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.values,
            "n": self.n,
            "unscored": self.unscored,
            "intervals": dict(self.intervals),
            "undefined": dict(self.why),
        }


def objective_of(spec: JudgeSpec) -> str:
    """Returns the objective for compiling a judge.

    Cohen's kappa for a binary or nominal scale, quadratic-weighted kappa for an ordinal one, Spearman's rank
    correlation for a numeric one.
    """
    if spec.kind == "numeric":
        return "spearman"
    return "weighted_kappa" if spec.kind == "ordinal" and len(spec.scale) > 2 else "kappa"


class AgreementTable:
    """Scored items as arrays, one row per item: the verdict's index, its position, and the raters' shares by label."""

    def __init__(
        self, answers: Answers, items: Sequence[Item], spec: JudgeSpec, weights: Sequence[float] | None = None
    ) -> None:
        if not len(answers.verdicts) == len(answers.places) == len(items):
            raise ConfigError(
                f"{len(answers.verdicts)} verdicts and {len(answers.places)} places for {len(items)} items: "
                "pass one of each per item"
            )
        scored = [i for i, verdict in enumerate(answers.verdicts) if verdict is not None]
        index, self.spec = {label: i for i, label in enumerate(spec.scale)}, spec
        self.verdicts = np.array([index[str(answers.verdicts[i])] for i in scored], dtype=int)
        self.places = np.array([answers.places[i] for i in scored], dtype=float)
        self.shares = _shares([items[i] for i in scored], index)
        self.weights = np.ones(len(scored)) if weights is None else np.array([weights[i] for i in scored])
        self.gaps = np.full(len(scored), math.nan)  # squared distance of probabilities and shares
        for row, i in enumerate(scored if any(p is not None for p in answers.probabilities) else []):
            if (probabilities := answers.probabilities[i]) is not None:
                self.gaps[row] = sum(
                    (probabilities[label] - share) ** 2
                    for label, share in zip(spec.scale, self.shares[row], strict=True)
                )
        self.unscored = len(items) - len(scored)
        modes = (
            np.isclose(self.shares, self.shares.max(axis=1, keepdims=True))
            if len(scored)
            else np.zeros_like(self.shares)
        )
        # 1 if the verdict is the label that most raters chose; with k tied labels, each of them counts 1 / k
        self.right = modes[np.arange(len(modes)), self.verdicts] / np.maximum(1, modes.sum(axis=1))

    @functools.cached_property
    def _codes(self) -> tuple[np.ndarray, np.ndarray]:
        human = self.shares @ np.array(self.spec.steps)
        return np.unique(self.places, return_inverse=True)[1], np.unique(human, return_inverse=True)[1]

    def measure(self, name: str) -> tuple[float | None, str]:
        """Returns the measure over all items, or None and why it is undefined."""
        rows = np.arange(len(self.verdicts))
        if not len(rows):
            return None, "no item is scored"
        if name in ("weighted_kappa", "spearman") and self.spec.kind == "nominal":
            return None, "the scale has no order"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # undefined values are returned as NaN and reported as such
            value, reason = _FUNCTIONS[name](self, rows)
        return (None, reason) if not math.isfinite(value) else (value, "")

    def resampled(self, name: str, draws: np.ndarray) -> np.ndarray:
        """Returns the measure for each row of `draws` (item indices); NaN where it is undefined."""
        if name == "spearman":
            judge, human = (_ranks(codes, draws) for codes in self._codes)
            judge, human = judge - judge.mean(axis=1, keepdims=True), human - human.mean(axis=1, keepdims=True)
            covariance, judge_square, human_square = (
                np.einsum("bi,bi->b", a, b) for a, b in ((judge, human), (judge, judge), (human, human))
            )
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.asarray(covariance / np.sqrt(judge_square * human_square))
        if name == "brier":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return np.asarray(np.nanmean(self.gaps[draws], axis=1))
        if name == "accuracy":
            if np.ptp(self.weights) == 0:
                return np.asarray(self.right[draws].mean(axis=1))
            right = self.right[draws] * self.weights[draws]
            return right.sum(axis=1) / self.weights[draws].sum(axis=1)
        counts = np.stack([np.bincount(row, minlength=len(self.verdicts)) for row in draws]) * self.weights
        cells = (self._chosen[:, :, None] * self.shares[:, None, :]).reshape(len(self.shares), -1)
        tables = (counts @ cells).reshape(len(draws), self.shares.shape[1], -1)
        return _alphas(tables, self.spec) if name == "alpha" else kappas(tables, quadratic=name == "weighted_kappa")

    def without_each(self, name: str) -> np.ndarray:
        """Returns the measure without each item in turn; NaN where it is undefined."""
        rows = np.arange(len(self.verdicts))
        at_once = max(1, _MAX_INDICES // len(rows))
        return np.concatenate(
            [
                self.resampled(name, np.array([np.delete(rows, row) for row in rows[start : start + at_once]]))
                for start in range(0, len(rows), at_once)
            ]
        )

    def accuracy(self, rows: np.ndarray) -> tuple[float, str]:
        return float(np.average(self.right[rows], weights=self.weights[rows])), ""

    def kappa(self, rows: np.ndarray, weights: str | None = None) -> tuple[float, str]:
        """Cohen's kappa on these items in [-1, 1], and why it is NaN; `weights` is None or `quadratic`."""
        from sklearn.metrics import cohen_kappa_score

        count, table = self.shares.shape[1], self._crossed(rows)
        if (table.sum(axis=0) > 0).sum() < 2:
            return math.nan, "the raters used only one label, so all agreement may be chance"
        judge, human = np.divmod(np.arange(count * count), count)
        return float(
            cohen_kappa_score(judge, human, labels=list(range(count)), weights=weights, sample_weight=table.ravel())
        ), "undefined"

    def weighted_kappa(self, rows: np.ndarray) -> tuple[float, str]:
        return self.kappa(rows, "quadratic")

    @functools.cached_property
    def _chosen(self) -> np.ndarray:
        """One-hot verdicts."""
        one_hot: np.ndarray = np.eye(self.shares.shape[1])[self.verdicts]
        return one_hot

    def _crossed(self, rows: np.ndarray) -> np.ndarray:
        """Contingency table of verdict and human label; an item with disagreement counts by the raters' shares."""
        table: np.ndarray = self._chosen[rows].T @ (self.shares[rows] * self.weights[rows][:, None])
        return table

    def alpha(self, rows: np.ndarray) -> tuple[float, str]:
        """Krippendorff's alpha with the judge and the raters as two coders.

        An item with disagreement counts for each label by the raters' shares. With one label per item, the value equals
        that of the package krippendorff.
        """
        table = self._crossed(rows)
        if ((table.sum(axis=0) + table.sum(axis=1)) > 0).sum() < 2:
            return math.nan, "only one label was used"
        return float(_alphas(table[None], self.spec)[0]), "undefined"

    def brier(self, rows: np.ndarray) -> tuple[float, str]:
        """Mean squared distance of the judge's probabilities and the raters' shares, summed over labels.

        In [0, 2], lower is better; over verdicts with probabilities. Source: Brier 1950, Monthly Weather Review 78:1.
        """
        finite = np.isfinite(self.gaps[rows])
        return (
            (float(self.gaps[rows][finite].mean()), "") if finite.any() else (math.nan, "no verdict has probabilities")
        )

    def spearman(self, rows: np.ndarray) -> tuple[float, str]:
        from scipy import stats

        human = self.shares[rows] @ np.array(self.spec.steps)
        if np.ptp(human) == 0 or np.ptp(self.places[rows]) == 0:
            return math.nan, f"{'the raters' if np.ptp(human) == 0 else 'the judge'} put every item in one place"
        return float(stats.spearmanr(self.places[rows], human).statistic), "undefined"


_FUNCTIONS: dict[str, Callable[[AgreementTable, np.ndarray], tuple[float, str]]] = {
    "accuracy": AgreementTable.accuracy,
    "kappa": AgreementTable.kappa,
    "weighted_kappa": AgreementTable.weighted_kappa,
    "alpha": AgreementTable.alpha,
    "spearman": AgreementTable.spearman,
    "brier": AgreementTable.brier,
}


def oriented(name: str, value: float) -> float:
    """Returns a measure's value with higher is better: the Brier score is negated."""
    return -value if name == "brier" else value


def kappas(tables: np.ndarray, *, quadratic: bool = False) -> np.ndarray:
    """Returns Cohen's kappa of many tables, `tables[b][verdict][human label]`; NaN if the raters used only one label.

    One minus the ratio of observed to expected distance (Cohen 1968, Psychological Bulletin 70:213). Equals
    scikit-learn's value; vectorized, 500 resamples take 1/500 of its time.
    """
    count = tables.shape[-1]
    steps = np.arange(count)
    distance = (steps[:, None] - steps) ** 2 if quadratic else 1.0 - np.eye(count)
    total = tables.sum(axis=(1, 2))
    expected = np.einsum("bi,bj,ij->b", tables.sum(axis=2), tables.sum(axis=1), distance)
    several = (tables.sum(axis=1) > 0).sum(axis=1) > 1
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(several, 1 - np.einsum("bij,ij->b", tables, distance) * total / expected, math.nan)


def _alphas(tables: np.ndarray, spec: JudgeSpec) -> np.ndarray:
    """Krippendorff's alpha of two coders without missing values, of many tables (Krippendorff 2004, chapter 11)."""
    coincidences = tables + tables.transpose(0, 2, 1)
    margins, steps = coincidences.sum(axis=2), np.array(spec.steps)
    if spec.kind == "nominal":
        distance = np.broadcast_to(1.0 - np.eye(len(steps)), coincidences.shape)
    elif spec.kind == "numeric":
        distance = np.broadcast_to((steps[:, None] - steps) ** 2, coincidences.shape)
    else:  # squared number of values between two ranks, with half of both ends
        upto = np.cumsum(margins, axis=1) - margins / 2
        distance = (upto[:, :, None] - upto[:, None, :]) ** 2
    total = margins.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 - (coincidences * distance).sum(axis=(1, 2)) * (total - 1) / np.einsum(
            "bi,bj,bij->b", margins, margins, distance
        )


def _draws(rows: int) -> Iterator[np.ndarray]:
    """Item indices of 500 bootstrap resamples, in batches that limit memory."""
    rng, part = np.random.default_rng(0), max(1, min(_RESAMPLES, _MAX_INDICES // rows))
    for start in range(0, _RESAMPLES, part):
        yield rng.integers(0, rows, (min(part, _RESAMPLES - start), rows))


def _ranks(codes: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Mean ranks within each resample, from the rank of each distinct value. Counting avoids sorting every resample."""
    drawn = codes[draws]
    counts = np.stack([np.bincount(row, minlength=int(codes.max()) + 1) for row in drawn])
    return np.asarray(np.take_along_axis(np.cumsum(counts, axis=1) - (counts - 1) / 2, drawn, axis=1))


def _shares(items: Sequence[Item], index: Mapping[str, int]) -> np.ndarray:
    """Shares of the raters by label, one row per item."""
    cells = [(row, index[rating.label]) for row, item in enumerate(items) for rating in item.ratings]
    counts = np.zeros((len(items), len(index)))
    if cells:
        np.add.at(counts, tuple(np.array(cells).T), 1.0)
    shares: np.ndarray = counts / np.maximum(1.0, counts.sum(axis=1, keepdims=True))
    return shares


def _percentiles(values: np.ndarray, rows: int) -> tuple[float, float] | None:
    """Middle 95 % of a measure over resamples of `rows` items; None if it is undefined in more than a tenth of them.

    If all values are equal, the interval is 3 / rows to either side (rule of three).
    """
    finite = values[np.isfinite(values)]
    if len(finite) < 0.9 * len(values):
        return None
    low, high = (float(value) for value in np.percentile(finite, [2.5, 97.5]))
    if low == high:
        return max(-1.0, low - 3 / rows), min(1.0, high + 3 / rows)
    return low, high


def agreement(
    answers: Answers,
    items: Sequence[Item],
    spec: JudgeSpec,
    *,
    intervals: bool = True,
    weights: Sequence[float] | None = None,
    measures: Sequence[str] = MEASURES,
) -> Agreement:
    """Computes the measures of agreement between a judge's verdicts and human labels.

    The raters of an item share its weight equally. Intervals are percentiles of 500 bootstrap resamples of the items;
    None below 20 items.

    Args:
        weights: weight of each item; equal by default.
        measures: names of the measures to compute; the values of others are left out.
    """
    table = AgreementTable(answers, items, spec, weights)
    results = {name: table.measure(name) for name in measures}
    ranges: dict[str, tuple[float, float] | None] = dict.fromkeys(measures)
    if intervals and len(table.verdicts) >= FEWEST:
        defined = [name for name, (value, _) in results.items() if value is not None]
        parts = [{name: table.resampled(name, draws) for name in defined} for draws in _draws(len(table.verdicts))]
        ranges |= {
            name: _percentiles(np.concatenate([part[name] for part in parts]), len(table.verdicts)) for name in defined
        }
    undefined = {name: reason for name, (value, reason) in results.items() if value is None}
    return Agreement(
        len(table.verdicts), table.unscored, {name: value for name, (value, _) in results.items()}, ranges, undefined
    )


def ceiling(items: Sequence[Item], spec: JudgeSpec, *, seed: int = 0, measures: Sequence[str] = MEASURES) -> Agreement:
    """Human ceiling: each rater (up to four per item) is compared, like a judge, with the item's other raters.

    Args:
        measures: as for `agreement`.
    """
    rng = np.random.default_rng(seed)
    verdicts, rest, weights = [], [], []
    for item in items:
        if len(item.ratings) < 2:
            continue
        chosen = rng.permutation(len(item.ratings))[:_RATERS]
        for left_out in chosen:
            remaining = tuple(rating for i, rating in enumerate(item.ratings) if i != left_out)
            verdicts.append(item.ratings[left_out].label)
            rest.append(Item(id=item.id, fields=item.fields, ratings=remaining))
            weights.append(1 / len(chosen))
    if not verdicts:
        reason = "no item has two raters"
        return Agreement(0, 0, dict.fromkeys(measures), dict.fromkeys(measures), dict.fromkeys(measures, reason))
    steps = dict(zip(spec.scale, spec.steps, strict=True))
    answers = Answers(verdicts, [steps[v] for v in verdicts])
    return agreement(answers, rest, spec, weights=weights, intervals=False, measures=measures)
