"""Episodes and the outcome of the adjuster's training. Runs nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.evaluation.metrics import AgentMetrics, TaskRun
from assay.optimizers.parameters.space import Point

_WEIGHTS = {"accuracy": 4.0, "efficiency": 1.0, "coherence": 1.0, "adaptability": 1.0, "tool_usage": 1.0}


@dataclass(frozen=True)
class Episode:
    """One episode.

    `adjustments` are relative to the policy's current parameters, in their own units. `overall`, in [0, 1], is the
    weighted mean of the metrics that could be measured. `improvement` is `overall` minus the expected score of the
    current parameters; `meaning` describes it. Both are NaN if the episode could not be scored. `unscored` counts runs
    without a score, and `why` is the reason of the first.
    """

    number: int
    metrics: Mapping[str, float | None]
    parameters: Mapping[str, Any]
    adjustments: Mapping[str, float]
    overall: float
    improvement: float
    accepted: bool
    meaning: str
    unscored: int = 0
    why: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            name: dict(value) if isinstance(value, Mapping) else None if value != value else value
            for name, value in vars(self).items()
        }


@dataclass
class PolicyOutcome:
    """Result of the training.

    `best` is the point with the highest expected score, or with validation tasks the one that scored best on them:
    `confirmed` then has the overall score of each point evaluated there, the initial one first.
    """

    best: Point
    history: list[Episode] = field(default_factory=list)
    confirmed: list[dict[str, Any]] = field(default_factory=list)
    converged: bool = False
    notes: list[str] = field(default_factory=list)
    stopped: str | None = None


def overall(metrics: AgentMetrics) -> float:
    """Mean of the measured metrics, with accuracy weighted 4; NaN if accuracy could not be measured."""
    values = {name: value for name, value in metrics.to_dict().items() if value is not None}
    if "accuracy" not in values:
        return math.nan
    return math.fsum(_WEIGHTS[name] * value for name, value in values.items()) / math.fsum(
        _WEIGHTS[name] for name in values
    )


def scores_by_task(runs: Sequence[TaskRun]) -> dict[str, float]:
    """Mean score of each task's runs; NaN if none is scored."""
    by_task: dict[str, list[float]] = {}
    for run in runs:
        by_task.setdefault(run.task_id, []).extend([] if run.score is None else [run.score])
    return {task: math.fsum(scores) / len(scores) if scores else math.nan for task, scores in by_task.items()}
