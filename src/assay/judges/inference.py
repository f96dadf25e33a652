"""Means that a few human labels correct: prediction-powered inference over many verdicts. Asks no model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assay.errors import DataError

__all__ = ["FEWEST_PEOPLE", "CorrectedMean", "corrected_mean"]

FEWEST_PEOPLE = 20  # labelled items under which nothing is claimed


@dataclass(frozen=True)
class CorrectedMean:
    """A mean with its 95 % interval. `verdicts_alone` is the mean that an uncorrected judge would report, `people_alone` that
    of the human sample; `weight` says how much the verdicts were trusted: 0 not at all, 1 as they are."""

    mean: float
    low: float
    high: float
    weight: float
    n_people: int
    n_verdicts: int
    people_alone: float
    verdicts_alone: float


def corrected_mean(people: Sequence[float], verdicts: Sequence[float], others: Sequence[float]) -> CorrectedMean:
    """The mean of what people would say of everything, from their word on a few items and a judge's on all.

    mean = w·mean(others) + mean(people - w·verdicts), with the w that makes its variance least, kept in [0, 1]
    (Angelopoulos, Duchi and Zrnic 2023, arXiv 2311.01453, for a mean); the interval is normal, and never shorter than 3/n to
    either side (the rule of three), so that a few equal labels do not pass for certainty.

    Worked: people 1 and 0 by halves, verdicts on them 1 throughout, others 1, and w = 1: 1 + (0.5 - 1) = 0.5.

    Args:
        people: scores of the labelled items.
        verdicts: the judge's scores of the same items, in order.
        others: the judge's scores of the items without a label.
    Raises:
        DataError: fewer than 20 labelled items or two others, lengths that differ, or a value that is no finite number.
    """
    y, f, g = (np.asarray(values, dtype=float) for values in (people, verdicts, others))
    if len(y) != len(f) or len(y) < FEWEST_PEOPLE or len(g) < 2:
        raise DataError(f"a corrected mean needs at least {FEWEST_PEOPLE} items with both scores and two others; got {len(y)}, {len(f)} and {len(g)}")
    if not all(np.isfinite(values).all() for values in (y, f, g)):
        raise DataError("a corrected mean takes finite numbers; leave out what has no score")
    n, many = len(y), len(g)
    spread = np.concatenate([f, g]).var(ddof=1)
    weight = 0.0 if spread == 0 else float(np.clip(np.cov(y, f)[0, 1] / ((1 + n / many) * spread), 0, 1))
    mean = weight * g.mean() + (y - weight * f).mean()
    reach = max(1.959964 * float(np.sqrt(weight**2 * g.var(ddof=1) / many + (y - weight * f).var(ddof=1) / n)), 3 / n)
    everything = float(np.concatenate([f, g]).mean())
    return CorrectedMean(float(mean), float(mean - reach), float(mean + reach), weight, n, n + many, float(y.mean()), everything)
