"""Drift of a judge: replays a frozen anchor set and tests the differences. Calls no model.

Values on a continuous scale (expected grades from token probabilities) are tested with CUSUM, values of few levels
(written verdicts, shares of samples) by the number of values that changed, both with PSI.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from assay.errors import DataError
from assay.support.numbers import signed
from assay.support.places import write_whole
from assay.support.values import check_format

# -- Prediction-powered inference: corrects the mean of many verdicts with a few human labels. Calls no model.


FEWEST_PEOPLE = 20  # minimum number of labelled items


@dataclass(frozen=True)
class CorrectedMean:
    """A corrected mean with its 95 % interval.

    Args:
        weight: weight of the judge's verdicts in [0, 1]; 0 ignores them.
        people_alone: mean of the human scores.
        verdicts_alone: mean of the judge's uncorrected scores.
    """

    mean: float
    low: float
    high: float
    weight: float
    n_people: int
    n_verdicts: int
    people_alone: float
    verdicts_alone: float


def corrected_mean(human: Sequence[float], verdicts: Sequence[float], unlabelled: Sequence[float]) -> CorrectedMean:
    """Estimates the mean human score of all items from human scores of a few and a judge's scores of all.

    mean = w·mean(unlabelled) + mean(human - w·verdicts), with the w in [0, 1] of minimum variance. The interval is
    normal and extends at least 3/n to either side (rule of three), so that a few equal labels do not give a zero width.

    Example: half of `human` 1 and half 0, all `verdicts` and `unlabelled` 1, and w = 1: 1 + (0.5 - 1) = 0.5.

    Args:
        human: human scores of the labelled items.
        verdicts: the judge's scores of the same items, in order.
        unlabelled: the judge's scores of the items without a label.
    Raises:
        DataError: fewer than 20 labelled items or two others, different lengths, or a value that is not finite.
    Source: Angelopoulos, Duchi and Zrnic 2023, arXiv 2311.01453, for a mean.
    """
    y, f, g = (np.asarray(values, dtype=float) for values in (human, verdicts, unlabelled))
    if len(y) != len(f) or len(y) < FEWEST_PEOPLE or len(g) < 2:
        raise DataError(
            f"a corrected mean needs at least {FEWEST_PEOPLE} items with both scores and two others; "
            f"got {len(y)}, {len(f)} and {len(g)}"
        )
    if not all(np.isfinite(values).all() for values in (y, f, g)):
        raise DataError("a corrected mean needs finite numbers; leave out unscored items")
    n, rest = len(y), len(g)
    spread = np.concatenate([f, g]).var(ddof=1)
    weight = 0.0 if spread == 0 else float(np.clip(np.cov(y, f)[0, 1] / ((1 + n / rest) * spread), 0, 1))
    mean = weight * g.mean() + (y - weight * f).mean()
    reach = max(1.959964 * float(np.sqrt(weight**2 * g.var(ddof=1) / rest + (y - weight * f).var(ddof=1) / n)), 3 / n)
    everything = float(np.concatenate([f, g]).mean())
    return CorrectedMean(
        float(mean), float(mean - reach), float(mean + reach), weight, n, n + rest, float(y.mean()), everything
    )


# -- Drift.


_FORMAT = 2
_BINS = 10
_PSI = 0.25  # a shift above it is major (a convention of credit scoring)
_LEAST_NOISE = 0.02  # share of the scale; minimum assumed noise, also for a judge that repeats itself exactly
_FEWEST = 20
# levels of the two exact tests of changed verdicts; together a stable judge raises an alarm in less than 5 % of replays
_DIRECTION_LEVEL, _RATE_LEVEL = 0.035, 0.015


@dataclass(frozen=True)
class Anchor:
    """A judged item: the fields that the judge reads, its value in [0, 1] and its verdict.

    Value and verdict are None if the item was unscored.
    """

    fields: Mapping[str, Any]
    value: float | None
    verdict: str | None


@dataclass(frozen=True)
class AnchorSet:
    """Reference verdicts of a judge.

    Args:
        made_by: everything that determines a verdict (question, prompt, calibration, model, weights, …).
        noise: standard deviation of the difference between the values of two runs, as a share of the scale.
        anchors: the judged items.
        repeated: anchors that were judged twice when the set was made; `flips`: those whose value changed.
    """

    made_by: Mapping[str, str]
    noise: float
    anchors: Sequence[Anchor] = field(repr=False)
    repeated: int
    flips: int

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "format": _FORMAT,
            "made_by": dict(self.made_by),
            "noise": self.noise,
            "repeated": self.repeated,
            "flips": self.flips,
            "anchors": [
                {"shown": dict(anchor.fields), "value": anchor.value, "verdict": anchor.verdict}
                for anchor in self.anchors
            ],
        }
        write_whole(path, json.dumps(content, ensure_ascii=False, indent=1))

    @classmethod
    def load(cls, path: Path) -> "AnchorSet":
        """Loads an anchor set.

        Raises:
            DataError: the file is not an anchor set, or has another format.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            remake = "create one with `freeze=…`"
            check_format(f"the anchor set {path}", content["format"], _FORMAT, remake=remake, error=DataError)
            anchors = [Anchor(row["shown"], row["value"], row["verdict"]) for row in content["anchors"]]
            return cls(
                dict(content["made_by"]),
                float(content["noise"]),
                anchors,
                int(content["repeated"]),
                int(content["flips"]),
            )
        except DataError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is not an anchor set: {type(error).__name__}: {error}. Create one with `freeze=…`"
            ) from None


class Cusum:
    """Two-sided cumulative sum chart (Page 1954, Biometrika 41:100). `update(x)` is True after the mean has shifted.

    Args:
        sigma: standard deviation of x without a shift; its mean is 0.
        slack: half the smallest relevant shift, in sigmas. With 0.5 and limit 5, a false alarm occurs about once in 465
            values, and a shift of one sigma is detected after about 10.
        limit: alarm threshold, in sigmas; `limit_for` computes it for a number of values.
    """

    def __init__(self, *, sigma: float, slack: float = 0.5, limit: float = 5.0) -> None:
        self.sigma, self.slack, self.limit = sigma, slack, limit
        self.high = self.low = self.peak = 0.0

    def update(self, x: float) -> bool:
        """Adds a value. Returns whether the threshold has been exceeded."""
        z = x / self.sigma
        self.high = max(0.0, self.high + z - self.slack)
        self.low = max(0.0, self.low - z - self.slack)
        self.peak = max(self.peak, self.high, self.low)
        return self.peak > self.limit


def limit_for(n: int) -> float:
    """Returns the CUSUM threshold for n values with a false alarm in about one of a hundred sets; at least 5.

    It is the threshold h at which a two-sided chart with slack 0.5 has an average run length e^(h + 1.166) of 100·n
    values (Siegmund 1985, Sequential Analysis, section 10.2).
    """
    return max(5.0, math.log(100 * max(1, n)) - 1.166)


def population_stability_index(before: Sequence[float], after: Sequence[float], *, bins: int = _BINS) -> float:
    """Returns the population stability index: the sum over bins of (q - p)·ln(q / p).

    p and q are the shares of values before and after. 0 means no shift, above 0.1 a moderate and above 0.25 a major
    one. Bins are quantiles of the values before. Half a value is added to each bin, so that empty bins stay finite.

    Example: two bins with shares 0.5/0.5 before and 0.9/0.1 after give 0.879.

    Raises:
        DataError: one of the sequences is empty.
    """
    if not len(before) or not len(after):
        raise DataError("a stability index needs values before and after")
    inner = np.unique(np.quantile(before, np.linspace(0, 1, bins + 1)[1:-1]))
    edges = np.concatenate([[-math.inf], inner, [math.inf]])
    p, q = (np.histogram(values, edges)[0] + 0.5 for values in (before, after))
    p, q = p / p.sum(), q / q.sum()
    return float(((q - p) * np.log(q / p)).sum())


@dataclass(frozen=True)
class Flips:
    """Changed values of few levels, against those of a judge that has not changed.

    `direction` is the p-value of the sign test of rises and falls (McNemar 1947, Psychometrika 12:153): two runs of one
    judge are exchangeable, so both are equally likely, however noisy it is. `rate` is that of Fisher's exact test
    whether more values changed than when the anchors were judged twice.
    """

    n: int
    rises: int
    falls: int
    direction: float
    rate: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], frozen: AnchorSet) -> "Flips":
        from scipy import stats

        rises = sum(after > before for before, after in pairs)
        falls = sum(after < before for before, after in pairs)
        changed = rises + falls
        table = [[changed, len(pairs) - changed], [frozen.flips, frozen.repeated - frozen.flips]]
        return cls(
            n=changed,
            rises=rises,
            falls=falls,
            direction=float(stats.binomtest(rises, changed).pvalue) if changed else 1.0,
            rate=float(stats.fisher_exact(table, "greater").pvalue),
        )

    @property
    def alarm(self) -> bool:
        return self.direction <= _DIRECTION_LEVEL or self.rate <= _RATE_LEVEL


def _has_few_levels(pairs: Sequence[tuple[float, float]]) -> bool:
    return 2 * len({value for pair in pairs for value in pair}) <= len(pairs)


def compare(
    frozen: AnchorSet, values: Sequence[float | None], made_by: Mapping[str, str], *, written: bool | None = None
) -> dict[str, Any]:
    """Compares a replay with an anchor set.

    Args:
        values: new values of the anchors, in order; None for unscored ones.
        made_by: what determined the new verdicts.
        written: whether the values are those of written verdicts; None: if they have few levels.
    Returns:
        JSON-serializable: `alarms`, `changed` (entries of `made_by` that differ: [old, new]), the mean difference, the
        statistics with their limits (`flips` for values of few levels, otherwise `cusum`; `psi`), and the mean of the
        squared differences with its standard error.
    """
    pairs = [
        (a.value, value)
        for a, value in zip(frozen.anchors, values, strict=True)
        if a.value is not None and value is not None
    ]
    lost = sum(a.value is not None and value is None for a, value in zip(frozen.anchors, values, strict=True))
    keys = sorted({*frozen.made_by, *made_by})
    changed = {k: [frozen.made_by.get(k), made_by.get(k)] for k in keys if frozen.made_by.get(k) != made_by.get(k)}
    counted = _has_few_levels(pairs) if written is None else written
    flips = Flips.of(pairs, frozen) if counted and pairs else None
    chart = Cusum(sigma=max(frozen.noise, _LEAST_NOISE), limit=limit_for(len(pairs)))
    moved_at = next((at for at, (before, after) in enumerate(pairs) if chart.update(after - before)), None)
    psi, psi_limit = None, math.inf
    if len(pairs) >= _FEWEST:
        bins = min(_BINS, len(pairs) // 10)
        psi = population_stability_index(*map(list, zip(*pairs, strict=True)), bins=bins)
        psi_limit = _psi_limit(len(pairs), bins)
    cause = f" Changed: {', '.join(changed)}." if changed else " No recorded setting changed: check the model server."
    mean = float(np.mean([after - before for before, after in pairs])) if pairs else None
    squares = [(after - before) ** 2 for before, after in pairs]
    alarms = []
    if flips is not None and flips.alarm:
        alarms.append(
            f"{flips.n} of {len(pairs)} verdicts changed, {flips.rises} up and {flips.falls} down "
            f"(p {flips.direction:.3g} for the direction, {flips.rate:.3g} for the number).{cause}"
        )
    if moved_at is not None and flips is None:
        alarms.append(
            f"verdicts shifted by {signed(mean)} of the scale on average (CUSUM, at anchor {moved_at + 1}).{cause}"
        )
    if psi is not None and psi > psi_limit:
        alarms.append(f"the distribution of verdicts changed (PSI {psi:.2f}, limit {psi_limit:.2f}).{cause}")
    if lost > 0.05 * len(frozen.anchors):
        alarms.append(f"{lost} of {len(frozen.anchors)} anchors are now unscored.{cause}")
    return {
        "alarms": alarms,
        "changed": changed,
        "n": len(pairs),
        "lost": lost,
        "mean_difference": mean,
        "mean_square": float(np.mean(squares)) if squares else None,
        "mean_square_error": float(np.std(squares, ddof=1) / math.sqrt(len(squares))) if len(squares) > 1 else None,
        "noise": frozen.noise,
        "flips": None if flips is None else asdict(flips),
        "cusum": chart.peak if flips is None else None,
        "cusum_limit": chart.limit if flips is None else None,
        "psi": psi,
        "psi_limit": None if psi is None else psi_limit,
    }


def _psi_limit(n: int, bins: int) -> float:
    """The larger of 0.25 and the 99 % quantile of the PSI of two samples of n values from one distribution.

    That PSI is about (2 / n)·chi-square with bins - 1 degrees of freedom (Yurdakul and Naranjo 2020, Journal of Risk
    Model Validation 14).
    """
    from scipy import stats

    return max(_PSI, 2 / n * float(stats.chi2.ppf(0.99, bins - 1)))
