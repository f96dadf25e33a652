"""Prediction-powered inference: corrects the mean of many verdicts with a few human labels. Calls no model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assay.errors import DataError

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
