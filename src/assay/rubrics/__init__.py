"""Rubrics: weighted criteria, graded by code or by a judge, as scores, DSPy metrics and TRL rewards."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.rubrics.criteria import Criterion, Essential, Failed, Grade, JudgeSpec, NoGrade, NotApplicable
    from assay.rubrics.dspy_metric import RubricMetric
    from assay.rubrics.lint import lint_rubric
    from assay.rubrics.loading import SHIPPED, load_rubric, points_rubric, rubric_schema
    from assay.rubrics.rubric import Rubric
    from assay.rubrics.scoring import ScoreResult, fields_of
    from assay.rubrics.weights import fit_weights
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "criteria": "Criterion Essential Failed Grade JudgeSpec NoGrade NotApplicable",
            "loading": "SHIPPED load_rubric points_rubric rubric_schema",
            "lint": "lint_rubric",
            "dspy_metric": "RubricMetric",
            "rubric": "Rubric",
            "scoring": "ScoreResult fields_of",
            "weights": "fit_weights",
        },
    )

__all__ = [
    "SHIPPED",
    "Criterion",
    "Essential",
    "Failed",
    "Grade",
    "JudgeSpec",
    "NoGrade",
    "NotApplicable",
    "Rubric",
    "RubricMetric",
    "ScoreResult",
    "fields_of",
    "fit_weights",
    "lint_rubric",
    "load_rubric",
    "points_rubric",
    "rubric_schema",
]
