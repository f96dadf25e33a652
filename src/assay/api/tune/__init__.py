"""Agent parameters from the users' side: `assay.tune`, and `assay.parameter_impact`, which shows what each does."""

from assay.api.tune.impact import ImpactReport, parameter_impact
from assay.api.tune.report import TuneReport
from assay.api.tune.run import tune

__all__ = ["ImpactReport", "TuneReport", "parameter_impact", "tune"]
