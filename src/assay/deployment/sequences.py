"""Confidence sequences: intervals that hold at every time at once, however often they are read.

Three kinds. `normal_mixture` for differences of means, from a variance estimate (asymptotic). `betting` for one mean of
values in [0, 1], exact for every sample size. `obrien_fleming` for a fixed number of planned evaluations.
Does not know arms, stages or metrics: `assay.deployment.evidence` does.
"""

import functools
import math
from collections.abc import Callable

from assay.errors import ConfigError

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
