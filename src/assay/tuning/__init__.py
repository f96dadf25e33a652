"""Agent parameters from the users' side: `assay.tune`, and `assay.parameter_impact`, which shows what each does."""

from assay.tuning.config import TuneConfig
from assay.tuning.impact import ImpactReport, parameter_impact
from assay.tuning.report import TuneReport
from assay.tuning.run import tune

__all__ = ["ImpactReport", "TuneConfig", "TuneReport", "parameter_impact", "tune"]
