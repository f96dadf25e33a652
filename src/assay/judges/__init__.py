"""Who decides where code cannot: model-based judges, how they are read and calibrated, and how far they agree with people."""

from assay.judges.calibration import Calibration
from assay.judges.deciding import resolver
from assay.judges.labels import Item, LabelSplits, Rating, load_labels, split_items
from assay.judges.pointwise import PointwiseJudge

__all__ = ["Calibration", "Item", "LabelSplits", "PointwiseJudge", "Rating", "load_labels", "resolver", "split_items"]
