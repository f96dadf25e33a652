"""Model-based judges: reading verdicts, calibration, juries and cascades, human labels and agreement with raters."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.judges.base import Judge
    from assay.judges.calibration import Calibration
    from assay.judges.comparing import PAIR_SCALE, ListwiseJudge, PairwiseJudge, bradley_terry, win_rates
    from assay.judges.deciding import resolver
    from assay.judges.labels import Item, LabelSplits, Rating, load_labels, split_items
    from assay.judges.panel import Cascade, Jury, reliability_weights
    from assay.judges.pointwise import PointwiseJudge
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "base": "Judge",
            "calibration": "Calibration",
            "deciding": "resolver",
            "labels": "Item LabelSplits Rating load_labels split_items",
            "comparing": "ListwiseJudge PAIR_SCALE PairwiseJudge bradley_terry win_rates",
            "panel": "Cascade Jury reliability_weights",
            "pointwise": "PointwiseJudge",
        },
    )

__all__ = [
    "PAIR_SCALE",
    "Calibration",
    "Cascade",
    "Item",
    "Judge",
    "Jury",
    "LabelSplits",
    "ListwiseJudge",
    "PairwiseJudge",
    "PointwiseJudge",
    "Rating",
    "bradley_terry",
    "load_labels",
    "reliability_weights",
    "resolver",
    "split_items",
    "win_rates",
]
