"""What counts: weighted criteria, decided by code or by a judge, as score, metric and report."""

from assay.rubrics.criteria import Criterion, Essential, Failed, Grade, JudgeSpec, NoGrade
from assay.rubrics.loading import SHIPPED, load_rubric, rubric_schema
from assay.rubrics.metric import RubricMetric
from assay.rubrics.rubric import Rubric
from assay.rubrics.scoring import ScoreResult, fields_of

__all__ = [
    "SHIPPED",
    "Criterion",
    "Essential",
    "Failed",
    "Grade",
    "JudgeSpec",
    "NoGrade",
    "Rubric",
    "RubricMetric",
    "ScoreResult",
    "fields_of",
    "load_rubric",
    "rubric_schema",
]
