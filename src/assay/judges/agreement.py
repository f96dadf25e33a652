"""Agreement of a judge with people, corrected for chance, with intervals; and how far people agree with each other.

The statistics are scikit-learn's and scipy's; alpha is held against the package krippendorff by a test. A measure that is
undefined is None with a reason, never 0.
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

__all__ = ["MEASURES", "Agreement", "Answers", "agreement", "calibration_error", "ceiling", "measure_gain", "objective_of", "oriented"]

MEASURES = ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman", "brier")
_RESAMPLES = 500
_AT_ONCE = 2_000_000  # indices held at once
_FEWEST = 20  # items under which no interval is claimed
_RATERS = 4  # of one item that take the judge's place for the ceiling


@dataclass(frozen=True)
class Answers:
    """A judge's verdicts on items: `verdicts[i]` is None and `places[i]` NaN where it gave none.

    `places` are expected steps on the scale (the verdict's own step without probabilities); `probabilities[i]` is None where
    the engine gave none. `orders[i]` are a pair's two verdicts as shown, None for a judge of one output.
    """

    verdicts: Sequence[str | None]
    places: Sequence[float]
    probabilities: Sequence[Mapping[str, float] | None] = ()
    orders: Sequence[tuple[str, str] | None] = ()


@dataclass(frozen=True)
class Agreement:
    """Each measure with its 95 % bootstrap interval over items; None where it is undefined, with the reason in `why`."""

    n: int
    unscored: int
    values: Mapping[str, float | None]
    intervals: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**self.values, "n": self.n, "unscored": self.unscored, "intervals": dict(self.intervals), "undefined": dict(self.why)}


def objective_of(spec: JudgeSpec) -> str:
    """The measure a judge is compiled for: Cohen's kappa for two words or none ordered, quadratic-weighted kappa for an
    ordered scale, Spearman's rank correlation for a numeric one."""
    if spec.kind == "numeric":
        return "spearman"
    return "weighted_kappa" if spec.kind == "ordinal" and len(spec.scale) > 2 else "kappa"


class _Table:
    """The items that have a verdict, as arrays. Row i: the verdict's index, the raters' shares, their mean step."""

    def __init__(self, answers: Answers, items: Sequence[Item], spec: JudgeSpec, weights: Sequence[float] | None = None) -> None:
        if not len(answers.verdicts) == len(answers.places) == len(items):
            raise ConfigError(f"{len(answers.verdicts)} verdicts and {len(answers.places)} places for {len(items)} items: they must be as many")
        known = [i for i, verdict in enumerate(answers.verdicts) if verdict is not None]
        index, self.spec = {label: i for i, label in enumerate(spec.scale)}, spec
        self.verdicts = np.array([index[str(answers.verdicts[i])] for i in known], dtype=int)
        self.places = np.array([answers.places[i] for i in known], dtype=float)
        self.shares = _shares([items[i] for i in known], index)
        self.weights = np.ones(len(known)) if weights is None else np.array([weights[i] for i in known])
        self.gaps = np.full(len(known), math.nan)  # of probabilities to shares, where there are any
        for row, i in enumerate(known if any(p is not None for p in answers.probabilities) else []):
            if (given := answers.probabilities[i]) is not None:
                self.gaps[row] = sum((given[label] - share) ** 2 for label, share in zip(spec.scale, self.shares[row], strict=True))
        self.unscored = len(items) - len(known)
        level = np.isclose(self.shares, self.shares.max(axis=1, keepdims=True)) if len(known) else np.zeros_like(self.shares)
        # 1 where the verdict is the label most raters gave; of labels that are level each counts its part
        self.right = level[np.arange(len(level)), self.verdicts] / np.maximum(1, level.sum(axis=1))

    @functools.cached_property
    def _codes(self) -> tuple[np.ndarray, np.ndarray]:
        people = self.shares @ np.array(self.spec.steps)
        return np.unique(self.places, return_inverse=True)[1], np.unique(people, return_inverse=True)[1]

    def measure(self, name: str) -> tuple[float | None, str]:
        """The measure over all items, or None and why it is undefined."""
        rows = np.arange(len(self.verdicts))
        if not len(rows):
            return None, "no item has a verdict"
        if name in ("weighted_kappa", "spearman") and self.spec.kind == "nominal":
            return None, "the scale has no order"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # undefined values come back as NaN, and are said
            value, why = _FUNCTIONS[name](self, rows)
        return (None, why) if not math.isfinite(value) else (value, "")

    def resampled(self, name: str, draws: np.ndarray) -> np.ndarray:
        """The measure on each row of `draws`, indices of items; NaN where it is undefined. For measures that have a value."""
        if name == "spearman":
            judge, people = (_ranks(codes, draws) for codes in self._codes)
            judge, people = judge - judge.mean(axis=1, keepdims=True), people - people.mean(axis=1, keepdims=True)
            both, own, theirs = (np.einsum("bi,bi->b", a, b) for a, b in ((judge, people), (judge, judge), (people, people)))
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.asarray(both / np.sqrt(own * theirs))
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

    def accuracy(self, rows: np.ndarray) -> tuple[float, str]:
        return float(np.average(self.right[rows], weights=self.weights[rows])), ""

    def kappa(self, rows: np.ndarray, weights: str | None = None) -> tuple[float, str]:
        from sklearn.metrics import cohen_kappa_score

        count, table = self.shares.shape[1], self._crossed(rows)
        if (table.sum(axis=0) > 0).sum() < 2:
            return math.nan, "people gave one label only, so all agreement may be chance"
        judge, people = np.divmod(np.arange(count * count), count)
        return float(cohen_kappa_score(judge, people, labels=list(range(count)), weights=weights, sample_weight=table.ravel())), "undefined"

    def weighted_kappa(self, rows: np.ndarray) -> tuple[float, str]:
        return self.kappa(rows, "quadratic")

    @functools.cached_property
    def _chosen(self) -> np.ndarray:
        """Row i: 1 at the verdict, 0 elsewhere."""
        found: np.ndarray = np.eye(self.shares.shape[1])[self.verdicts]
        return found

    def _crossed(self, rows: np.ndarray) -> np.ndarray:
        """Items by verdict and by people's label; an item on which people differ counts by their shares."""
        found: np.ndarray = self._chosen[rows].T @ (self.shares[rows] * self.weights[rows][:, None])
        return found

    def alpha(self, rows: np.ndarray) -> tuple[float, str]:
        """The judge and people as two coders; an item on which people differ stands as often as they do, by their shares. With
        one label an item it is krippendorff's (the package's)."""
        table = self._crossed(rows)
        if ((table.sum(axis=0) + table.sum(axis=1)) > 0).sum() < 2:
            return math.nan, "only one label was given"
        return float(_alphas(table[None], self.spec)[0]), "undefined"

    def brier(self, rows: np.ndarray) -> tuple[float, str]:
        """Mean squared distance between the judge's probabilities and the raters' shares, summed over labels: 0 to 2, lower
        is better (Brier 1950, Monthly Weather Review 78:1); over the verdicts that have probabilities."""
        known = np.isfinite(self.gaps[rows])
        return (float(self.gaps[rows][known].mean()), "") if known.any() else (math.nan, "no verdict has probabilities")

    def spearman(self, rows: np.ndarray) -> tuple[float, str]:
        from scipy import stats

        people = self.shares[rows] @ np.array(self.spec.steps)
        if np.ptp(people) == 0 or np.ptp(self.places[rows]) == 0:
            return math.nan, f"{'people' if np.ptp(people) == 0 else 'the judge'} put every item in one place"
        return float(stats.spearmanr(self.places[rows], people).statistic), "undefined"


_FUNCTIONS: dict[str, Callable[[_Table, np.ndarray], tuple[float, str]]] = {
    "accuracy": _Table.accuracy, "kappa": _Table.kappa, "weighted_kappa": _Table.weighted_kappa, "alpha": _Table.alpha, "spearman": _Table.spearman,
    "brier": _Table.brier,
}  # fmt: skip


def oriented(name: str, value: float) -> float:
    """The value of a measure so that more is better: the Brier score is lower where it is better."""
    return -value if name == "brier" else value


def kappas(tables: np.ndarray, *, quadratic: bool = False) -> np.ndarray:
    """Cohen's kappa of many tables at once, `tables[b][verdict][people]`; NaN where people gave one label only.

    One minus the observed over the expected distance (Cohen 1968, Psychological Bulletin 70:213); scikit-learn's, 500 times
    as fast over 500 resamples.
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
    """Krippendorff's alpha of two coders without gaps, of many tables at once (Krippendorff 2004, chapter 11)."""
    coincidences = tables + tables.transpose(0, 2, 1)
    margins, steps = coincidences.sum(axis=2), np.array(spec.steps)
    if spec.kind == "nominal":
        distance = np.broadcast_to(1.0 - np.eye(len(steps)), coincidences.shape)
    elif spec.kind == "numeric":
        distance = np.broadcast_to((steps[:, None] - steps) ** 2, coincidences.shape)
    else:  # the squared number of values between two ranks, the ends counted by half
        upto = np.cumsum(margins, axis=1) - margins / 2
        distance = (upto[:, :, None] - upto[:, None, :]) ** 2
    total = margins.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 - (coincidences * distance).sum(axis=(1, 2)) * (total - 1) / np.einsum("bi,bj,bij->b", margins, margins, distance)


def _draws(rows: int) -> Iterator[np.ndarray]:
    """Indices of 500 resamples of the items, a part at a time, so that many items need little memory."""
    rng, part = np.random.default_rng(0), max(1, min(_RESAMPLES, _AT_ONCE // rows))
    for start in range(0, _RESAMPLES, part):
        yield rng.integers(0, rows, (min(part, _RESAMPLES - start), rows))


def _ranks(codes: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Mean ranks of each resample's values, given each value's place among the different ones: counted, as a resample
    repeats what was sorted once."""
    drawn = codes[draws]
    counts = np.stack([np.bincount(row, minlength=int(codes.max()) + 1) for row in drawn])
    return np.asarray(np.take_along_axis(np.cumsum(counts, axis=1) - (counts - 1) / 2, drawn, axis=1))


def _shares(items: Sequence[Item], index: Mapping[str, int]) -> np.ndarray:
    """Row i: the shares of item i's raters by label."""
    given = [(row, index[rating.label]) for row, item in enumerate(items) for rating in item.ratings]
    counts = np.zeros((len(items), len(index)))
    if given:
        np.add.at(counts, tuple(np.array(given).T), 1.0)
    found: np.ndarray = counts / np.maximum(1.0, counts.sum(axis=1, keepdims=True))
    return found


def _percentiles(values: np.ndarray, rows: int) -> tuple[float, float] | None:
    """The middle 95 % of a measure over resamples of `rows` items, None where it is undefined in a tenth of them. Where all are
    equal, up to 3 / rows of the items may still be otherwise (the rule of three)."""
    known = values[np.isfinite(values)]
    if len(known) < 0.9 * len(values):
        return None
    low, high = (float(value) for value in np.percentile(known, [2.5, 97.5]))
    if low == high:  # resamples of what is all alike say nothing of the rest
        return max(-1.0, low - 3 / rows), min(1.0, high + 3 / rows)
    return low, high


def agreement(
    answers: Answers, items: Sequence[Item], spec: JudgeSpec, *, intervals: bool = True, weights: Sequence[float] | None = None
) -> Agreement:
    """Every measure between a judge's verdicts and people's labels; raters of one item share its weight equally.

    Intervals are percentiles of 500 resamples of the items; under 20 items there is none.
    """
    table = _Table(answers, items, spec, weights)
    found = {name: table.measure(name) for name in MEASURES}
    ranges: dict[str, tuple[float, float] | None] = dict.fromkeys(MEASURES)
    if intervals and len(table.verdicts) >= _FEWEST:
        defined = [name for name, (value, _) in found.items() if value is not None]
        parts = [{name: table.resampled(name, draws) for name in defined} for draws in _draws(len(table.verdicts))]
        ranges |= {name: _percentiles(np.concatenate([part[name] for part in parts]), len(table.verdicts)) for name in defined}
    why = {name: reason for name, (value, reason) in found.items() if value is None}
    return Agreement(len(table.verdicts), table.unscored, {name: value for name, (value, _) in found.items()}, ranges, why)


def ceiling(items: Sequence[Item], spec: JudgeSpec, *, seed: int = 0) -> Agreement:
    """How far people agree: each rater (up to four an item) is held, like a judge, against the other raters of the item."""
    rng = np.random.default_rng(seed)
    verdicts, rest, weights = [], [], []
    for item in items:
        if len(item.ratings) < 2:
            continue
        chosen = rng.permutation(len(item.ratings))[:_RATERS]
        for out in chosen:
            others = tuple(rating for i, rating in enumerate(item.ratings) if i != out)
            verdicts.append(item.ratings[out].label)
            rest.append(Item(id=item.id, shown=item.shown, ratings=others))
            weights.append(1 / len(chosen))
    if not verdicts:
        reason = "no item has two raters"
        return Agreement(0, 0, dict.fromkeys(MEASURES), dict.fromkeys(MEASURES), dict.fromkeys(MEASURES, reason))
    steps = dict(zip(spec.scale, spec.steps, strict=True))
    return agreement(Answers(verdicts, [steps[v] for v in verdicts]), rest, spec, weights=weights, intervals=False)


def measure_gain(name: str, before: Answers, after: Answers, items: Sequence[Item], spec: JudgeSpec) -> dict[str, float | int | None]:
    """How much better `after` is than `before` on one measure, over the items that both judged, with a paired bootstrap interval.

    `low` and `high` are None where nothing can be claimed: fewer than 20 items, or a measure that is undefined.
    """
    both = [i for i, (a, b) in enumerate(zip(before.verdicts, after.verdicts, strict=True)) if a is not None and b is not None]
    tables = [_Table(_only(answers, both), [items[i] for i in both], spec) for answers in (before, after)]
    old, new = (table.measure(name)[0] for table in tables)
    result: dict[str, float | int | None] = {
        "mean": None if old is None or new is None else oriented(name, new - old),
        "low": None,
        "high": None,
        "n": len(both),
    }
    if result["mean"] is not None and len(both) >= _FEWEST:
        gaps = [tables[1].resampled(name, draws) - tables[0].resampled(name, draws) for draws in _draws(len(both))]
        found = _percentiles(oriented(name, 1.0) * np.concatenate(gaps), len(both))
        if found is not None:
            result["low"], result["high"] = found
    return result


def _only(answers: Answers, rows: Sequence[int]) -> Answers:
    probabilities = [answers.probabilities[i] for i in rows] if answers.probabilities else ()
    return Answers([answers.verdicts[i] for i in rows], [answers.places[i] for i in rows], probabilities)


def calibration_error(answers: Answers, items: Sequence[Item], *, bins: int = 10) -> tuple[float | None, list[dict[str, float]]]:
    """Expected calibration error of the verdicts' confidence, and the reliability diagram's points.

    Each point: mean `confidence`, `share` of raters who gave the verdict's label, `n`. The error is the mean gap between the
    two, weighted by n (Naeini et al. 2015), in [0, 1]; None where no verdict has probabilities.
    """
    pairs = [
        (given[verdict], item.shares.get(verdict, 0.0))
        for verdict, given, item in zip(answers.verdicts, answers.probabilities, items, strict=False)
        if verdict is not None and given is not None
    ]
    points = []
    for index in range(bins):
        inside = [(c, s) for c, s in pairs if index / bins < c <= (index + 1) / bins or (index == 0 and c == 0)]
        if inside:
            confidence, share = (math.fsum(column) / len(inside) for column in zip(*inside, strict=True))
            points.append({"confidence": confidence, "share": share, "n": float(len(inside))})
    if not pairs:
        return None, []
    return math.fsum(p["n"] * abs(p["confidence"] - p["share"]) for p in points) / len(pairs), points
