"""Reads the rollout and the score that `RecordedProgram` and the executors attach to a prediction.

They are private attributes, because the fields of a `dspy.Prediction` are the program's outputs.
"""

from typing import Any

from assay.rubrics import ScoreResult
from assay.traces import Rollout

__all__ = ["result_of", "rollout_of"]


def rollout_of(prediction: Any) -> Rollout:
    """The record of the run that returned a prediction."""
    rollout: Rollout = prediction._rollout
    return rollout


def result_of(prediction: Any) -> ScoreResult:
    """The score of a prediction; only runs on registered tasks have one."""
    result: ScoreResult = prediction._result
    return result
