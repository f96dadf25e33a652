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

__all__ = ["cuttable", "fitted"]

_CUTS = 25  # places tried for each cut of an ordered scale


def cuttable(judge: Judge) -> bool:
    """Whether cuts can be fitted: only on an ordered scale of three or more words, and not for pairwise judges."""
    return len(judge.spec.scale) > 2 and judge.spec.kind != "nominal" and not judge.compares


def fitted(
    method: str, cuts: bool, judged: Judged, items: Sequence[Item], *, judge: Judge, objective: str, seed: int
) -> Calibration | None:
    pairs = zip(judged.raw, items, strict=True)
    rows = [row for raw, item in pairs if raw is not None for row in judge.fit_rows(raw, item.shares)]
    if not rows or len({label for _, shares in rows for label in shares}) < 2:
        return None
    raw, shares = [r for r, _ in rows], [s for _, s in rows]
    calibration = fit(method, raw, shares, judge.labels, seed=seed)
    if not cuts or calibration is None:
        return calibration
    places = [expected_step(list(calibration.map(r, judge.labels).values()), judge.spec) for r in raw]
    return replace(calibration, cuts=_cuts(places, shares, judge.spec, objective))


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
