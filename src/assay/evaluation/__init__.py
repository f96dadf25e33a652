"""Runs programs over tasks and compares what came out: sessions, executors, metrics, statistics."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.evaluation.evaluation import Evaluation, evaluate
    from assay.evaluation.metrics import AgentEvaluator, AgentMetrics, measure
    from assay.evaluation.progress import NotebookProgress, Progress, SilentProgress, default_progress
    from assay.evaluation.session import RecordedProgram, Session
    from assay.evaluation.statistics import Gain, mean_interval, paired_gain
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "evaluation": "Evaluation evaluate",
            "metrics": "AgentEvaluator AgentMetrics measure",
            "progress": "NotebookProgress Progress SilentProgress default_progress",
            "session": "Session RecordedProgram",
            "statistics": "Gain mean_interval paired_gain",
        },
    )

__all__ = [
    "AgentEvaluator",
    "AgentMetrics",
    "Evaluation",
    "Gain",
    "NotebookProgress",
    "Progress",
    "RecordedProgram",
    "Session",
    "SilentProgress",
    "default_progress",
    "evaluate",
    "mean_interval",
    "measure",
    "paired_gain",
]
