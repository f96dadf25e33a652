"""What the arms of a deployment have shown: sums by stratum and bucket of units, and differences between the arms.

A stratum is a stage and a task type: shares and base rates change from stage to stage, so that pooling them shows
gains that do not exist. Values of one unit (a user, a conversation) are correlated, also between strata, so the
variance is that between buckets of units. Unscored rollouts are missing: counted, bounded, never 0. They enter the
bounds and the weights of a decision, and no mean that is shown.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from assay.errors import ConfigError

# -- Which arm a unit gets: by a salted hash, so that it needs no table and is the same on every machine.


CHAMPION, CANDIDATE = "champion", "candidate"


def unit_digest(unit: str) -> str:
    """Digest under which a unit is stored: its name may be a person's, and of any length."""
    return hashlib.sha256(unit.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def position(unit: str, salt: str) -> float:
    """Position of a unit in [0, 1): the first 53 bits of the SHA-256 of its salt and name.

    Args:
        unit: digest of a user or conversation, see `unit_digest`.
        salt: of the deployment; another one shuffles all units.
    """
    digest = hashlib.sha256(f"{salt}\0{unit}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def arm_of(unit: str, *, salt: str, share: float) -> str:
    """The arm of a unit. Nested: a unit that is on the candidate at a share stays there at every larger one.

    Args:
        share: of the units on the candidate, from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"share={share!r} must be between 0 and 1")
    return CANDIDATE if position(unit, salt) < share else CHAMPION


def probability(arm: str, share: float) -> float:
    """Probability with which a unit is assigned to an arm: the propensity that is stored with its rollouts."""
    return share if arm == CANDIDATE else 1 - share


# -- Evidence.


BUCKETS = 4096  # of units by their position: a constant amount of memory for any number of units
_CORRELATION = 0.05  # of values of one unit, assumed for the weights; the variance is measured

_Number = TypeVar("_Number", float, np.ndarray)
Stratum = tuple[int, str]  # stage from 0, task type


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm in one stratum, for one metric.

    Attributes:
        weight, total: [bucket], sums of the unit weights w and of w times the unit's mean.
        shift: [bucket], sums of w times the unit's mean covariate, which differences subtract; None without one.
        count: number of values.
        units: that have at least one value.
        missing: rollouts that ended, are older than the metric's horizon and have no value; also those that should have
            ended long ago.
        running: other rollouts that have not ended.
        whole: of all rollouts, with `missing` as 1 and the others as 0; None where each has a value.
        unknown: of all rollouts, with those without a value, missing or running, as 0 and as 1; None as above.
        newer: of the newer half of the stage alone, where it is known.
    """

    weight: np.ndarray = field(default_factory=lambda: np.zeros(BUCKETS))
    total: np.ndarray = field(default_factory=lambda: np.zeros(BUCKETS))
    count: int = 0
    units: int = 0
    missing: int = 0
    running: int = 0
    shift: np.ndarray | None = None
    whole: "Cell | None" = None
    unknown: "tuple[Cell, Cell] | None" = None
    newer: "Cell | None" = None

    @property
    def mean(self) -> float:
        """Weighted mean; NaN without values."""
        weight = float(self.weight.sum())
        return float(self.total.sum()) / weight if weight else math.nan

    def filled(self, value: int) -> "Cell":
        """With this value, 0 or 1, for each rollout that has none: a bound."""
        return self if self.unknown is None else self.unknown[value]

    @property
    def without_value(self) -> "Cell":
        """Of all rollouts: 1 where the value is missing, else 0."""
        return self.whole or replace(self, total=np.zeros_like(self.total), shift=None)

    @property
    def by_propensity(self) -> "Cell":
        """Each value weighted by the inverse of the share of the cell's rollouts that have one."""
        weight = float(self.weight.sum())
        if self.whole is None or not weight:
            return self
        factor = float(self.whole.weight.sum()) / weight
        shift = None if self.shift is None else self.shift * factor
        return replace(self, weight=self.weight * factor, total=self.total * factor, shift=shift)


Arms = Mapping[Stratum, Mapping[str, Cell]]


@dataclass(frozen=True, kw_only=True)
class Units:
    """One arm in one stratum by unit, [unit].

    Attributes:
        bucket: of the unit.
        count, total, shift: number of values, their sum and the sum of their covariates.
        missing, running: rollouts without a value, see `Cell`.
        unknown_shift: sum of the covariates of these rollouts.
    """

    bucket: np.ndarray
    count: np.ndarray
    total: np.ndarray
    shift: np.ndarray
    missing: np.ndarray
    running: np.ndarray
    unknown_shift: np.ndarray


def unit_weight(count: _Number) -> _Number:
    """Weight of a unit with `count` values in a stratum: n / (1 + (n - 1) / 20).

    That of least variance where values of one unit have the correlation 0.05. It is at most 20, so that a few units
    with many values do not decide alone.
    """
    return count / (1 + (count - 1) * _CORRELATION)


def cell_of_units(units: Units, *, buckets: int = BUCKETS, newer: Cell | None = None) -> Cell:
    """The cell of one arm in one stratum."""
    scored = _summed(units, units.count, units.total, units.shift, buckets)
    missing, running = int(units.missing.sum()), int(units.running.sum())
    if not missing + running:
        return replace(scored, newer=newer)
    unknown, shift = units.missing + units.running, units.shift + units.unknown_shift
    every = units.count + unknown
    return replace(
        scored, missing=missing, running=running, newer=newer,
        whole=_summed(units, every, units.missing, None, buckets),
        unknown=(
            _summed(units, every, units.total, shift, buckets),
            _summed(units, every, units.total + unknown, shift, buckets),
        ),
    )  # fmt: skip


def _summed(units: Units, count: np.ndarray, total: np.ndarray, shift: np.ndarray | None, buckets: int) -> Cell:
    weight = unit_weight(count)
    share = weight / np.maximum(count, 1)  # no count, no weight

    def summed(part: np.ndarray) -> np.ndarray:
        return np.bincount(units.bucket, part, minlength=buckets)

    return Cell(
        weight=summed(weight), total=summed(share * total), shift=None if shift is None else summed(share * shift),
        count=int(count.sum()), units=int(np.count_nonzero(count)),
    )  # fmt: skip


def cell_of(
    units: Iterable[tuple[str, int, float] | tuple[str, int, float, float]], *, salt: str,
    missing: Mapping[str, tuple[int, float]] | int = 0, running: Mapping[str, tuple[int, float]] | int = 0,
    newer: Cell | None = None,
) -> Cell:  # fmt: skip
    """A cell from the units of one arm in one stratum: name, number of values, their sum, sum of the covariate.

    Args:
        missing, running: rollouts without a value by unit, with the sums of their covariates; a number alone is of as
            many other units.
    """
    rows: dict[str, list[float]] = {}
    for name, *of_unit in units:
        rows[name] = [*of_unit, *[0.0] * (6 - len(of_unit))]
    for place, without in ((3, missing), (4, running)):
        if not isinstance(without, Mapping):
            without = {f"{place}, {at}": (1, 0.0) for at in range(without)}
        for name, (count, shift) in without.items():
            row = rows.setdefault(name, [0.0] * 6)
            row[place] += count
            row[5] += shift
    table = np.array(list(rows.values())).reshape(-1, 6).T
    bucket = np.array([int(position(name, salt) * BUCKETS) for name in rows], dtype=int)
    names = ("count", "total", "shift", "missing", "running", "unknown_shift")
    return cell_of_units(Units(bucket=bucket, **dict(zip(names, table, strict=True))), newer=newer)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Candidate less champion.

    Attributes:
        mean: NaN where no stratum has values of two units of both arms.
        variance: of the mean; infinite where it is NaN.
        champion: mean of the champion, with the strata weighted as in `mean`; the base of relative differences.
        freedom: degrees of freedom of the variance.
    """

    mean: float
    variance: float
    champion: float
    freedom: float


_NOTHING = Difference(mean=math.nan, variance=math.inf, champion=math.nan, freedom=1.0)


def difference(arms: Arms, *, covariate: bool = True) -> Difference:
    """The difference of the arms' means, stratified, each value less its covariate where it has one.

    The weight of a stratum is w1 * w0 / (w1 + w0) (Cochran 1954), which depends on the counts and not on the values.
    The variance of an arm is the sum over buckets of the squared influence of the bucket on the mean, over all strata
    at once (linearised, cluster-robust), times k / (k - 1) with k the effective number of buckets (Kish 1965). An arm
    whose values are nearly all equal has too small a variance: it is at least that of one more bucket at the distance 1
    from the mean, 1 / (k + 1)^2.

    Args:
        covariate: whether it is subtracted.
    """
    rows = [(of_arm[CANDIDATE], of_arm[CHAMPION]) for of_arm in arms.values() if len(of_arm) == 2]
    rows = [(one, zero) for one, zero in rows if min(one.units, zero.units) >= 2]
    if not rows:
        return _NOTHING
    one, zero = (_stacked([row[at] for row in rows], shifted=covariate) for at in (0, 1))
    weights = one.weights * zero.weights / (one.weights + zero.weights)
    shares = weights / weights.sum()
    variances, freedoms = zip(*(arm.variance(shares) for arm in (one, zero)), strict=True)
    return Difference(
        mean=float(shares @ (one.means - zero.means)),
        variance=sum(variances),
        champion=float(shares @ [zero.mean for _, zero in rows]),
        # Welch 1947, Satterthwaite 1946
        freedom=max(1.0, sum(variances) ** 2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True))),
    )


def mean_of(cells: Iterable[Cell]) -> tuple[float, float, float]:
    """Mean of an arm over its strata, weighted by their values, its variance and the degrees of freedom."""
    known = [cell for cell in cells if cell.units]
    if not known or sum(cell.units for cell in known) < 2:
        return math.nan, math.inf, 1.0
    arm = _stacked(known)
    shares = arm.weights / arm.weights.sum()
    return (float(shares @ arm.means), *arm.variance(shares))


@dataclass(frozen=True)
class _Stack:
    """An arm over its strata: [stratum][bucket]."""

    weight: np.ndarray
    total: np.ndarray
    weights: np.ndarray
    means: np.ndarray

    def variance(self, shares: np.ndarray) -> tuple[float, float]:
        """Variance of the weighted mean of the strata, and its degrees of freedom."""
        scale = (shares / self.weights)[:, None]
        influence = ((self.total - self.means[:, None] * self.weight) * scale).sum(axis=0)
        parts = (self.weight * scale).sum(axis=0)
        effective = float(parts.sum() ** 2 / (parts**2).sum())
        correction = effective / (effective - 1) if effective > 1 else math.inf
        floor = 1 / (effective + 1) ** 2
        return max(float((influence**2).sum()) * correction, floor), max(1.0, effective - 1)


def _stacked(cells: list[Cell], *, shifted: bool = False) -> _Stack:
    """Args:
    shifted: without the covariate.
    """
    weight = np.stack([cell.weight for cell in cells])
    total = np.stack([cell.total if cell.shift is None or not shifted else cell.total - cell.shift for cell in cells])
    weights = weight.sum(axis=1)
    return _Stack(weight, total, weights, total.sum(axis=1) / weights)
