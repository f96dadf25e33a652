"""Readings of a metric: differences of the arms with confidence sequences, as a decision uses them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.deployment.evidence import CANDIDATE, CHAMPION, Arms, Cell, difference, mean_of
from assay.deployment.plan import Metric, Plan, is_amount
from assay.errors import ConfigError

# -- Confidence sequences: intervals that hold at every time at once, however often they are read.
#
# Three kinds. `normal_mixture` for differences of means, from a variance estimate (asymptotic). `betting` for one mean
# of values in [0, 1], exact for every sample size. `obrien_fleming` for a fixed number of planned evaluations. Does not
# know arms, stages or metrics: `assay.deployment.evidence` does.


_STEPS = 60  # bisections of a bound: to 2^-60 of the range


def normal_mixture(variance: float, *, alpha: float, planned: float) -> float:
    """Half-width of the two-sided confidence sequence of an estimate that is about normal.

    With information I = 1 / variance and r chosen for I* = 1 / planned:
    sqrt((I + r) * log((I + r) / (r * alpha^2))) / I. A one-sided sequence of level alpha has the width of a two-sided
    one of level 2 * alpha.

    Worked: variance 0.01, planned 0.01, alpha 0.05: I = 100, r = 100 / (2 * log(20) + log(1 + 2 * log(20))) = 12.60;
    sqrt(112.60 * log(112.60 / (12.60 * 0.0025))) / 100 = sqrt(112.60 * 8.182) / 100 = 0.304. One evaluation of a fixed
    size has 1.96 * 0.1 = 0.196.

    Args:
        variance: of the estimate, above 0; infinite gives an infinite width.
        alpha: error over all times together, in (0, 1).
        planned: variance at which the sequence is to be narrowest.
    Source: Robbins 1970 (Ann Math Stat 41:1397); with estimated variances Waudby-Smith et al. 2021 (arXiv 2103.06476);
    the choice of r Howard et al. 2021 (Ann Stat 49:1055).
    """
    if not math.isfinite(variance):
        return math.inf
    if not (variance > 0 and planned > 0 and 0 < alpha < 1):
        raise ConfigError(
            f"variance={variance!r} and planned={planned!r} must be above 0, alpha={alpha!r} between 0 and 1"
        )
    information, best = 1 / variance, 1 / planned
    rho = best / (2 * math.log(1 / alpha) + math.log(1 + 2 * math.log(1 / alpha)))
    return math.sqrt((information + rho) * math.log((information + rho) / (rho * alpha**2))) / information


def betting(total: float, count: float, *, alpha: float) -> tuple[float, float]:
    """Two-sided confidence sequence of the mean of values in [0, 1].

    A mean m is refuted when the wealth of bets against it, mixed over all alternatives p by a Beta(1/2, 1/2) prior,
    reaches 1 / alpha: B(S + 1/2, n - S + 1/2) / B(1/2, 1/2) / (m^S * (1 - m)^(n - S)). For values between 0 and 1 the
    wealth is at most that of the linear bet 1 + l * (x - m), so the sequence is valid for them too, and exact for 0
    and 1.

    Worked: no success in 15: wealth against m is B(0.5, 15.5) / B(0.5, 0.5) / (1 - m)^15 = 0.1445 / (1 - m)^15, which
    is 20 at m = 1 - (0.1445 / 20)^(1 / 15) = 0.280.

    Args:
        total: sum of the values.
        count: number of values, also a fraction (an effective sample size).
        alpha: error over all times together, in (0, 1).
    Returns:
        (low, high); (0, 1) without values.
    Source: Robbins 1970; as betting Waudby-Smith and Ramdas 2024 (JRSS B 86:1).
    """
    from scipy import special

    if count < 0 or not -1e-9 <= total <= count + 1e-9:
        raise ConfigError(f"total={total!r} of count={count!r} values must be between 0 and count")
    if count == 0:
        return 0.0, 1.0
    total = min(max(total, 0.0), count)
    failures = count - total
    mixed = float(special.betaln(total + 0.5, failures + 0.5) - special.betaln(0.5, 0.5)) + math.log(alpha)

    def refuted(mean: float) -> bool:
        likelihood = (total * math.log(mean) if total else 0.0) + (failures * math.log1p(-mean) if failures else 0.0)
        return mixed - likelihood >= 0

    return _bound(refuted, 0.0, total / count), _bound(refuted, 1.0, total / count)


def _bound(refuted: Callable[[float], bool], outer: float, inner: float) -> float:
    """The mean closest to `outer` that is not refuted; `inner`, the observed mean, never is."""
    for _ in range(_STEPS):
        middle = (outer + inner) / 2
        if 0 < middle < 1 and refuted(middle):
            outer = middle
        else:
            inner = middle
    return inner if 0 < inner < 1 else outer


def obrien_fleming(evaluation: int, evaluations: int, alpha: float = 0.05) -> float:
    """Critical value of |estimate| / standard error at one of equally spaced evaluations.

    Worked: of 5 evaluations at 5 %: 4.56, 3.23, 2.63, 2.28, 2.04, which is 2.04 * sqrt(5 / k).

    Args:
        evaluation: from 1 to `evaluations`.
    Source: O'Brien and Fleming 1979 (Biometrics 35:549), computed as by Armitage, McPherson and Rowe 1969.
    """
    if not 1 <= evaluation <= evaluations:
        raise ConfigError(f"evaluation={evaluation!r} must be between 1 and evaluations={evaluations!r}")
    return _constant(evaluations, alpha) * math.sqrt(evaluations / evaluation)


@functools.lru_cache(maxsize=256)
def _constant(evaluations: int, alpha: float) -> float:
    low, high = 1.0, 10.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if _crossing(middle, evaluations) > alpha else (low, middle)
    return high


def _crossing(constant: float, evaluations: int) -> float:
    """Probability that a random walk with `evaluations` steps crosses the boundary `constant * sqrt(evaluations)`."""
    import numpy as np

    edge = constant * math.sqrt(evaluations)
    ahead = np.linspace(-edge, edge, 601)
    weights = np.full(ahead.size, ahead[1] - ahead[0])
    weights[[0, -1]] /= 2
    step = np.exp(-0.5 * (ahead[None, :] - ahead[:, None]) ** 2) / math.sqrt(2 * math.pi)
    density = np.exp(-0.5 * ahead**2) / math.sqrt(2 * math.pi) * weights
    for _ in range(evaluations - 1):
        density = (density @ step) * weights
    return 1 - float(density.sum())


# -- Readings.


_SHADOW, _GUARD, _GAIN = "shadow", "guard", "gain"
_MISSING_ALPHA = 0.001  # of the check that the arms miss equally many values
_LEAST_MISSING = 0.01  # difference of these shares below which it does not pause
_LEAST_ROLLOUTS = 200  # of an arm, from which on its share of missing values is judged


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One metric as a decision saw it. Differences are in the direction of better, in the metric's scale.

    Attributes:
        gain: candidate less champion in the step that decides (before it, in the running one); NaN without values.
        standard_error: of the gain, between units.
        low: lower bound of the gain, which must be above 0.
        high: upper bound over all live steps; below the tolerated loss it is harm.
        missing_by: how missing values enter `low` and `high`: `alike`, `bounds` or `propensity`, see `Plan.missing`;
            empty without any.
        least, least_error: the gain, and its standard error, that `low` is computed from.
        newer, newer_low: `gain` of the newer half of the step, and the lower end of its t interval of one evaluation;
            NaN where it is not known.
        champion, candidate: means in the metric's scale.
        counts, missing: by arm.
        bounds: of the candidate's mean, if all missing values were the worst or the best.
    """

    metric: str
    gain: float
    standard_error: float
    low: float
    high: float
    champion: float
    candidate: float
    counts: Mapping[str, int]
    missing: Mapping[str, int]
    bounds: tuple[float, float]
    missing_by: str = ""
    least: float = math.nan
    least_error: float = math.inf
    newer: float = math.nan
    newer_low: float = math.nan

    def in_units(self) -> "Reading":
        """For people. Amounts (latency, cost, tokens) are compared by logarithms: here their geometric means, and the
        gain as the share of the champion's mean that the candidate saves."""
        if not is_amount(self.metric):
            return self
        shares: dict[str, Any] = {
            name: _saved(getattr(self, name)) for name in ("gain", "low", "high", "least", "newer", "newer_low")
        }
        return replace(
            self, champion=math.exp(self.champion), candidate=math.exp(self.candidate),
            standard_error=self.standard_error * math.exp(-self.gain),
            least_error=self.least_error * math.exp(-self.least), **shares,
        )  # fmt: skip


SCORED_BY = (
    "score them with `rubric=…`; where its checks compare expected outputs, the calls of the agent need them "
    "(expected=…)"
)


def stated(missing_by: str) -> str:
    """What the bounds of a reading assume about missing values, for a sentence; empty if none are missing."""
    return {
        "alike": " if missing values are alike in both arms",
        "bounds": " with every missing value against this claim",
        "propensity": " if values are missing at random within step and task type",
    }.get(missing_by, "")


def _saved(gain: float) -> float:
    """A difference of logarithms as a share; one that is not finite stays so."""
    return -math.expm1(-gain) if math.isfinite(gain) else gain


def stored_reading(row: Mapping[str, Any]) -> Reading:
    """A reading as a decision was stored with it; what was unknown is NaN."""
    values: dict[str, Any] = {name: math.nan if value is None else value for name, value in row.items()}
    low, high = (math.nan if bound is None else bound for bound in row["bounds"])
    values["bounds"] = (low, high)
    return Reading(**values)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Replayed rollouts: candidate less champion, in the metric's scale, one value a rollout."""

    differences: Sequence[float] = ()
    champion: float = math.nan  # mean of the champion on them
    missing: int = 0


def replayed_reading(plan: Plan, metric: Metric, pairs: Paired) -> Reading:
    """The gain of the candidate on replayed rollouts, with its confidence sequence; NaN below two pairs."""
    values, count = pairs.differences, len(pairs.differences)
    gain, variance = math.nan, math.inf
    if count >= 2:
        mean = math.fsum(values) / count
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count
        variance = max(variance, 1 / (count + 1) ** 2)
        gain = metric.sign * mean
    width = _width(variance, count - 1, 2 * plan.shadow_alpha, _planned(plan, _SHADOW))
    low, high = (gain - width, gain + width) if count >= 2 else (-math.inf, math.inf)
    if plan.missing_by(metric) != "propensity" and count >= 2:  # pairs without values: not different, or by all of 1
        share, end = pairs.missing / (count + pairs.missing), float(plan.missing == "bounds")
        low, high = (1 - share) * low - share * end, (1 - share) * high + share * end
    return Reading(
        metric=metric.name, gain=gain, standard_error=math.sqrt(variance), low=low, high=high,
        champion=pairs.champion, candidate=pairs.champion + metric.sign * gain,
        counts={CANDIDATE: count, CHAMPION: count}, missing={CANDIDATE: pairs.missing}, bounds=(-math.inf, math.inf),
        missing_by=plan.missing_by(metric) if pairs.missing else "",
    )  # fmt: skip


def _width(variance: float, freedom: float, alpha: float, planned: float) -> float:
    """Half-width of a confidence sequence; wider where the variance has few degrees of freedom, by the ratio of the
    quantiles of Student's t and the normal distribution."""
    from scipy import special

    width = normal_mixture(variance, alpha=alpha, planned=planned)
    if not math.isfinite(width):
        return width
    return width * _student(alpha, freedom) / float(special.ndtri(1 - alpha / 2))


def _student(alpha: float, freedom: float) -> float:
    """Quantile of Student's t for a two-sided interval."""
    from scipy import special

    return float(special.stdtrit(max(1.0, freedom), 1 - alpha / 2))


def reading_of(plan: Plan, step: int, metric: Metric, arms: Arms) -> Reading:
    """Harm is read from all live steps. A gain is read from the step that decides alone, so that one which fades after
    the first steps is not taken for it.

    Means and `gain` are of the values that exist. `low` and `high` take in the missing ones, see `_completed`.
    """
    deciding = min(step, plan.deciding)
    of_step = {stratum: of_arm for stratum, of_arm in arms.items() if stratum[0] == deciding}
    apart, latest, newer = difference(arms), difference(of_step), difference(_newer(of_step))

    def interval(part: Arms, best: str, alpha: float, claim: str) -> list[tuple[float, float, float]]:
        """Mean, half-width and variance by what the missing values may be."""
        every = [difference(completed) for completed in _completed(plan, metric, part, best)]
        return [
            (metric.sign * one.mean, _width(one.variance, one.freedom, alpha, _planned(plan, claim)), one.variance)
            for one in every
            if math.isfinite(one.mean)
        ]

    above = interval(arms, CANDIDATE, 2 * plan.harm_alpha(metric), _GUARD)
    below = interval(of_step, CHAMPION, 2 * plan.alpha, _GAIN)
    least, width, variance = min(below, key=lambda one: one[0] - one[1], default=(math.nan, math.inf, math.inf))
    counts = {arm: sum(of_arm[arm].count for of_arm in arms.values()) for arm in (CHAMPION, CANDIDATE)}
    missing = {arm: sum(of_arm[arm].missing for of_arm in arms.values()) for arm in (CHAMPION, CANDIDATE)}
    candidate = apart.champion + apart.mean
    unknown = sum(missing.values()) + sum(cell.running for of_arm in arms.values() for cell in of_arm.values())
    return Reading(
        metric=metric.name,
        gain=metric.sign * latest.mean,
        standard_error=math.sqrt(latest.variance),
        low=least - width if below else -math.inf,
        high=max((mean + width for mean, width, _ in above), default=math.inf),
        champion=apart.champion,
        candidate=candidate,
        counts=counts,
        missing=missing,
        bounds=_bounds(metric, candidate, counts[CANDIDATE], missing[CANDIDATE]),
        missing_by=plan.missing_by(metric) if unknown else "",
        least=least,
        least_error=math.sqrt(variance),
        newer=metric.sign * newer.mean,
        newer_low=metric.sign * newer.mean - _student(plan.alpha, newer.freedom) * math.sqrt(newer.variance),
    )


def _completed(plan: Plan, metric: Metric, arms: Arms, best: str) -> list[Arms]:
    """The cells with their missing values, once for each extreme of what these may be under the plan's assumption.

    By `bounds` each is the best one in the arm `best` and the worst one in the other (Manski 1990, AER 80:319). If they
    are `alike` in both arms, they are the worst ones in both, the best ones in both, or between. By `propensity` the
    values that exist have more weight.
    """
    by, good = plan.missing_by(metric), int(metric.sign > 0)
    if all(cell.unknown is None for of_arm in arms.values() for cell in of_arm.values()):
        return [arms]
    if by == "propensity":
        return [{key: {arm: cell.by_propensity for arm, cell in of_arm.items()} for key, of_arm in arms.items()}]
    other = CHAMPION if best == CANDIDATE else CANDIDATE
    fills = [{best: good, other: 1 - good}] if by == "bounds" else [{best: value, other: value} for value in (0, 1)]
    return [
        {key: {arm: cell.filled(fill[arm]) for arm, cell in of_arm.items()} for key, of_arm in arms.items()}
        for fill in fills
    ]


def _newer(arms: Arms) -> Arms:
    return {key: {arm: cell.newer or Cell() for arm, cell in of_arm.items()} for key, of_arm in arms.items()}


def _bounds(metric: Metric, mean: float, count: int, missing: int) -> tuple[float, float]:
    """The candidate's mean if every missing value were 0, and if every one were 1."""
    if metric.is_amount or not count:
        return -math.inf, math.inf
    return mean * count / (count + missing), (mean * count + missing) / (count + missing)


def _planned(plan: Plan, claim: str) -> float:
    """Variance at which the sequence of a claim is narrowest: that of values with variance 1/4 at about the number of
    rollouts where the claim is expected."""
    if claim == _SHADOW:
        return 0.25 / max(20.0, plan.steps[0].requests / 2)
    if claim == _GUARD:
        first = next(step for step in plan.steps if not step.shadow)
        return 0.25 / max(20.0, first.requests * first.share)
    step = plan.steps[plan.deciding]
    rollouts = 1000 if step.max_requests is None else max(40.0, step.max_requests / 6)
    return 0.25 / (rollouts * step.share) + 0.25 / (rollouts * (1 - step.share))


def known_or_zero(champion: float) -> float:
    return 0.0 if math.isnan(champion) else champion


def beyond_limit(plan: Plan, metric: Metric, arms: Arms) -> str | None:
    """Harm by an absolute limit: the whole confidence sequence of the candidate's mean is beyond it."""
    if metric.failure_above is None:
        return None
    completed = (_completed(plan, metric, arms, CANDIDATE)[-1 if metric.sign > 0 else 0]).values()
    cells = [of_arm[CANDIDATE] for of_arm in completed]  # missing ones are not harm
    mean, variance, freedom = mean_of(cells)
    if math.isnan(mean):
        return None
    limit, alpha = metric.value(metric.failure_above), 2 * plan.harm_alpha(metric)
    if metric.is_amount:
        width = _width(variance, freedom, alpha, _planned(plan, _GUARD))
        low, high = mean - width, mean + width
    else:
        effective = _effective(mean, variance, cells)
        low, high = betting(mean * effective, effective, alpha=alpha)
    if (low > limit) if metric.sign < 0 else (high < limit):
        word = "above" if metric.sign < 0 else "below"
        value = math.exp(mean) if metric.is_amount else mean
        return f"{metric.name} of the candidate is {value:.3g}, {word} its limit {metric.failure_above:g}"
    return None


def _effective(mean: float, variance: float, cells: Sequence[Cell]) -> float:
    """Number of independent values that would have the variance seen between units; at most the count, at least the
    number of units over their correlated values."""
    count, units = sum(cell.count for cell in cells), max(cell.units for cell in cells)
    independent = mean * (1 - mean)
    return float(count) if independent <= 0 else min(float(count), max(units / 2, independent / variance))


def uncomparable(plan: Plan, metric: Metric, reading: Reading, arms: Arms) -> str | None:
    """Why a metric's missing values do not allow a decision; None if they do.

    Too many are missing in one arm, or the arms miss different shares: the difference of the shares, by stage and task
    type, is at least `_LEAST_MISSING`, and its confidence sequence, valid at every evaluation, is apart from 0.
    """
    shares = {}
    for arm, missing in reading.missing.items():
        ended = missing + reading.counts.get(arm, 0)
        shares[arm] = missing / ended if ended else 0.0
        if ended >= _LEAST_ROLLOUTS and shares[arm] > plan.max_missing:
            hint = "" if reading.counts.get(arm, 0) else f"; {SCORED_BY}"
            return f"{reading.metric}: {shares[arm]:.0%} of the rollouts of the {arm} have no value{hint}"
    if not any(reading.missing.values()):
        return None
    apart = difference(
        {key: {arm: cell.without_value for arm, cell in of_arm.items()} for key, of_arm in arms.items()},
        covariate=False,
    )
    width = _width(apart.variance, apart.freedom, _MISSING_ALPHA, _planned(plan, _GUARD))
    if not abs(apart.mean) >= max(_LEAST_MISSING, width):
        return None
    return (
        f"{reading.metric}: the arms have different shares without a value, {shares[CANDIDATE]:.0%} of the candidate "
        f"and {shares[CHAMPION]:.0%} of the champion, so the arms cannot be compared (if values are only late, set "
        "horizon_s)"
    )
