"""Scores a rollout by a rubric.

Every rollout gets its score here: that of a program, of a recorded agent, and of the store when it is scored again.
Does not write to the store.
"""

import math
from typing import Any

from assay.datasets.tasks import Task
from assay.rubrics.rubric import Rubric
from assay.rubrics.scoring import ScoreResult, set_failure
from assay.traces.records import Rollout

__all__ = ["score_rollout"]


def score_rollout(rubric: Rubric, task: Task, prediction: Any, rollout: Rollout) -> ScoreResult:
    """Scores a prediction and sets the rollout's rubric, score, coverage, verdicts and failure kind.

    Step rewards are not set: `Rubric.step_rewards` gives them, and `Recorder.scored` writes both.

    Args:
        prediction: what the program returned, or `Failed`.
        rollout: its LM calls and tool calls are complete.
    """
    result = rubric.score(task, prediction, rollout)
    rollout.rubric = f"{rubric.name}@{rubric.version}"
    rollout.score = None if math.isnan(result.value) else result.value
    rollout.coverage, rollout.verdicts = result.coverage, list(result.verdicts)
    set_failure(rollout, rubric.criteria, result)
    return result
