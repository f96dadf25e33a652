"""Whether a judge still judges as it did: a frozen anchor set replayed, CUSUM and PSI over the differences. Asks no model."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from assay.errors import DataError

__all__ = ["Anchor", "AnchorSet", "Cusum", "compare", "population_stability_index"]

_FORMAT = 1
_BINS = 10
_PSI = 0.25  # above it a shift is called major (a convention of credit scoring)
_LEAST_NOISE = 0.02  # of the scale: a judge that repeats itself exactly is still only known so far
_FEWEST = 20


@dataclass(frozen=True)
class Anchor:
    """One thing that was judged, and what was said: a value in [0, 1], None where there was no verdict."""

    shown: Mapping[str, Any]
    value: float | None
    verdict: str | None


@dataclass(frozen=True)
class AnchorSet:
    """What a judge said when it was trusted.

    `made_by` names everything that decides a verdict (question, prompt, calibration, model, weights, …); `noise` is the
    standard deviation of the difference between the values of two askings, in shares of the scale.
    """

    made_by: Mapping[str, str]
    noise: float
    anchors: Sequence[Anchor] = field(repr=False)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"format": _FORMAT, "made_by": dict(self.made_by), "noise": self.noise, "anchors": [asdict(anchor) for anchor in self.anchors]}
        path.write_text(json.dumps(whole, ensure_ascii=False, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "AnchorSet":
        """Raises `DataError` where the file is no anchor set, or of a newer format."""
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            newer = whole["format"] > _FORMAT
            if not newer:
                return cls(dict(whole["made_by"]), float(whole["noise"]), [Anchor(**anchor) for anchor in whole["anchors"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no anchor set: {type(error).__name__}: {error}. Freeze one with --freeze") from None
        raise DataError(f"{path} has format {whole['format']}, this assay reads up to {_FORMAT}: update assay")


class Cusum:
    """A two-sided cumulative sum chart (Page 1954, Biometrika 41:100): `update(x)` is True once the mean has moved.

    Args:
        sigma: standard deviation of x while nothing has moved, its mean being 0.
        slack: half the shift that matters, in sigmas. With 0.5 and limit 5 a false alarm comes once in about 465 values,
            and a shift of one sigma is seen after about 10.
        limit: where the alarm is raised, in sigmas; `limit_for` gives one for a set of known size.
    """

    def __init__(self, *, sigma: float, slack: float = 0.5, limit: float = 5.0) -> None:
        self.sigma, self.slack, self.limit = sigma, slack, limit
        self.high = self.low = self.peak = 0.0

    def update(self, x: float) -> bool:
        z = x / self.sigma
        self.high = max(0.0, self.high + z - self.slack)
        self.low = max(0.0, self.low - z - self.slack)
        self.peak = max(self.peak, self.high, self.low)
        return self.peak > self.limit


def limit_for(n: int) -> float:
    """Where a chart over n values raises an alarm, so that one comes without a cause in about one set of a hundred: the limit
    h at which a two-sided chart with slack 0.5 runs 100·n values on average, e^(h + 1.166) (Siegmund 1985, Sequential
    Analysis, section 10.2), and at least 5."""
    return max(5.0, math.log(100 * max(1, n)) - 1.166)


def population_stability_index(before: Sequence[float], after: Sequence[float], *, bins: int = _BINS) -> float:
    """Sum over bins of (q - p)·ln(q / p), p and q the shares of values before and after: 0 where nothing has moved; above
    0.1 a moderate shift is seen, above 0.25 a major one. Bins are equal parts of the values before; half a value is added
    to each, so that an empty one stays finite. Worked: two bins, shares 0.5/0.5 before and 0.9/0.1 after give 0.879.

    Raises:
        DataError: either is empty.
    """
    if not len(before) or not len(after):
        raise DataError("a stability index needs values before and after")
    inner = np.unique(np.quantile(before, np.linspace(0, 1, bins + 1)[1:-1]))
    edges = np.concatenate([[-math.inf], inner, [math.inf]])
    p, q = (np.histogram(values, edges)[0] + 0.5 for values in (before, after))
    p, q = p / p.sum(), q / q.sum()
    return float(((q - p) * np.log(q / p)).sum())


def compare(frozen: AnchorSet, values: Sequence[float | None], made_by: Mapping[str, str]) -> dict[str, Any]:
    """What came of a replay, JSON-ready: `alarms`, `changed` (what decides verdicts and is not as it was, from and to), the
    mean difference, and both statistics.

    Args:
        values: of the anchors, in order, None without a verdict.
    """
    pairs = [(a.value, value) for a, value in zip(frozen.anchors, values, strict=True) if a.value is not None and value is not None]
    lost = sum(a.value is not None and value is None for a, value in zip(frozen.anchors, values, strict=True))
    keys = sorted({*frozen.made_by, *made_by})
    changed = {k: [frozen.made_by.get(k), made_by.get(k)] for k in keys if frozen.made_by.get(k) != made_by.get(k)}
    chart = Cusum(sigma=max(frozen.noise, _LEAST_NOISE), limit=limit_for(len(pairs)))
    moved_at = next((at for at, (before, after) in enumerate(pairs) if chart.update(after - before)), None)
    psi, most = None, math.inf
    if len(pairs) >= _FEWEST:
        bins = min(_BINS, len(pairs) // 10)
        psi, most = population_stability_index(*map(list, zip(*pairs, strict=True)), bins=bins), _psi_limit(len(pairs), bins)
    named = f" What changed: {', '.join(changed)}." if changed else " Nothing that is recorded changed: look at the server that answers."
    mean = float(np.mean([after - before for before, after in pairs])) if pairs else None
    alarms = []
    if moved_at is not None:
        alarms.append(f"verdicts moved by {mean:+.3f} of the scale on average (CUSUM, seen at anchor {moved_at + 1}).{named}")
    if psi is not None and psi > most:
        alarms.append(f"verdicts are spread differently (PSI {psi:.2f}, over {most:.2f}).{named}")
    if lost > 0.05 * len(frozen.anchors):
        alarms.append(f"{lost} of {len(frozen.anchors)} anchors get no verdict any more.{named}")
    return {
        "alarms": alarms,
        "changed": changed,
        "n": len(pairs),
        "lost": lost,
        "mean_difference": mean,
        "cusum": chart.peak,
        "cusum_limit": chart.limit,
        "psi": psi,
        "psi_limit": None if psi is None else most,
    }


def _psi_limit(n: int, bins: int) -> float:
    """The conventional limit, or what two samples of n from one distribution reach once in a hundred, if that is more: PSI is
    then about (2 / n)·chi-square with bins - 1 degrees (Yurdakul and Naranjo 2020, Journal of Risk Model Validation 14)."""
    from scipy import stats

    return max(_PSI, 2 / n * float(stats.chi2.ppf(0.99, bins - 1)))
