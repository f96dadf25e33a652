"""Paired gain of one judge over another in agreement with raters: what the gate of a judge's compile decides by."""

from collections.abc import Sequence

import numpy as np

from assay.evaluation.statistics import interval_of
from assay.judges.labels import Item
from assay.judges.quality.agreement import FEWEST, AgreementTable, Answers, oriented
from assay.rubrics import JudgeSpec


def measure_gain(
    name: str, before: Answers, after: Answers, items: Sequence[Item], spec: JudgeSpec
) -> dict[str, float | int | None]:
    """Gain of `after` over `before` on one measure, over the items that both scored, with its 95 % interval.

    Higher is better. `low` and `high` are None below 20 items, if the measure is undefined, or if it is so without one
    of the items.

    The interval is `assay.evaluation.statistics.interval_of` of the jackknife pseudo-values, which are what each item
    contributes to the gain (Miller 1974, Biometrika 61:1): for the accuracy, the item's own difference. Their range is
    that of the gain, or wider where they are: an item with a rare label may contribute more to kappa. Simulated figures
    are in `docs/explanation/judges.md`.
    """
    paired = [
        i
        for i, (a, b) in enumerate(zip(before.verdicts, after.verdicts, strict=True))
        if a is not None and b is not None
    ]
    tables = [AgreementTable(_only(answers, paired), [items[i] for i in paired], spec) for answers in (before, after)]
    old, new = (table.measure(name)[0] for table in tables)
    mean = None if old is None or new is None else oriented(name, new - old)
    low, high = (None, None) if mean is None or len(paired) < FEWEST else _interval(name, mean, tables)
    return {"mean": mean, "low": low, "high": high, "n": len(paired)}


def _interval(name: str, mean: float, tables: Sequence[AgreementTable]) -> tuple[float | None, float | None]:
    without = [oriented(name, 1.0) * table.without_each(name) for table in tables]
    gaps = without[1] - without[0]
    if not np.isfinite(gaps).all():
        return None, None
    values = mean + (len(gaps) - 1) * (gaps.mean() - gaps)
    span = 1.0 if name == "accuracy" else 2.0  # other measures are in [-1, 1], the Brier score in [0, 2]
    reach = max(span, float(abs(values).max()))
    low, high = interval_of(values, -reach, reach)
    return max(-span, low), min(span, high)


def _only(answers: Answers, rows: Sequence[int]) -> Answers:
    probabilities = [answers.probabilities[i] for i in rows] if answers.probabilities else ()
    return Answers([answers.verdicts[i] for i in rows], [answers.places[i] for i in rows], probabilities)
