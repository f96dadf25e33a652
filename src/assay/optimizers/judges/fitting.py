"""Fits a calibration to readings and human labels, with or without cuts between the words of an ordered scale."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from assay.evaluation.judged import Judged
from assay.judges import Judge
from assay.judges.calibration import Calibration, expected_step, fit
from assay.judges.labels import Item
from assay.judges.quality.agreement import (
    kappas,
)
from assay.rubrics.criteria import JudgeSpec

_CUTS = 25  # places tried for each cut of an ordered scale


def cuttable(judge: Judge) -> bool:
    """Whether cuts can be fitted: only on an ordered scale of three or more words, and not for pairwise judges."""
    return len(judge.spec.scale) > 2 and judge.spec.kind != "nominal" and not judge.compares


class Fits:
    """Calibrations of one judge's readings. The fits with and without cuts share what costs most, the regression.

    Args:
        read: the judge's readings of the items, in their order.
    """

    def __init__(self, judge: Judge, read: Judged, items: Sequence[Item], *, objective: str, seed: int) -> None:
        self._judge, self._read, self._items, self._objective, self._seed = judge, read, items, objective, seed
        self._fitted: dict[tuple[str, tuple[int, ...]], Calibration | None] = {}

    def calibration(self, method: str, rows: Sequence[int], *, cuts: bool) -> Calibration | None:
        """Fits a calibration to some of the items; None if their readings or labels are too few."""
        readings = [
            pair
            for row in rows
            if (raw := self._read.raw[row]) is not None
            for pair in self._judge.fit_rows(raw, self._items[row].shares)
        ]
        if len({label for _, shares in readings for label in shares}) < 2:
            return None
        raws, shares = [raw for raw, _ in readings], [share for _, share in readings]
        key = (method, tuple(rows))
        if key not in self._fitted:
            self._fitted[key] = fit(method, raws, shares, self._judge.labels, seed=self._seed)
        fitted = self._fitted[key]
        if not cuts or fitted is None:
            return fitted
        spec = self._judge.spec
        places = [expected_step(list(fitted.map(raw, self._judge.labels).values()), spec) for raw in raws]
        return replace(fitted, cuts=_cuts(places, shares, spec, self._objective))


def _cuts(
    places: Sequence[float], labelled: Sequence[Mapping[str, float]], spec: JudgeSpec, objective: str
) -> list[float]:
    """Ascending cuts between the words; coordinate ascent moves one cut at a time to its best position, in two
    passes."""
    tried = sorted(set(np.quantile(places, np.linspace(0.02, 0.98, _CUTS)).tolist()))
    cuts = np.quantile(places, np.linspace(0, 1, len(spec.scale) + 1)[1:-1]).tolist()
    shares = np.array([[raters.get(label, 0.0) for label in spec.scale] for raters in labelled])
    readings, eye = np.array(places), np.eye(len(spec.scale))

    def value(chosen: list[float]) -> float:
        verdicts = np.searchsorted(chosen, readings, side="right")
        if objective == "accuracy":
            return float(shares[np.arange(len(readings)), verdicts].mean())
        # Cuts do not change a rank correlation, so the quadratic kappa replaces the other objectives.
        kappa = kappas((eye[verdicts].T @ shares)[None], quadratic=objective != "kappa")[0]
        return float(kappa) if math.isfinite(kappa) else -math.inf

    for _ in range(2):
        for index in range(len(cuts)):
            low, high = cuts[index - 1] if index else -math.inf, cuts[index + 1] if index + 1 < len(cuts) else math.inf
            options = [[*cuts[:index], place, *cuts[index + 1 :]] for place in tried if low <= place <= high]
            cuts = max([cuts, *options], key=value)
    return [float(cut) for cut in cuts]
