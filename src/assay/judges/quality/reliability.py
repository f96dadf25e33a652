"""Calibration error of a judge's confidence."""

import math
from collections.abc import Sequence

from assay.judges.labels import Item
from assay.judges.quality.agreement import Answers


def calibration_error(
    answers: Answers, items: Sequence[Item], *, bins: int = 10
) -> tuple[float | None, list[dict[str, float]]]:
    """Returns the expected calibration error of the confidence, and the points of the reliability diagram.

    Each point has the mean `confidence`, the `share` of raters who chose the verdict's label, and `n`. The error is the
    mean gap between the two, weighted by n, in [0, 1]; None if no verdict has probabilities.

    Source: Naeini et al. 2015.
    """
    pairs = [
        (probabilities[verdict], item.shares.get(verdict, 0.0))
        for verdict, probabilities, item in zip(answers.verdicts, answers.probabilities, items, strict=False)
        if verdict is not None and probabilities is not None
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
