"""The ways to improve: prompts, judges, agent parameters, weights."""

from typing import TYPE_CHECKING

from assay.lazy import attach

if TYPE_CHECKING:
    from assay.optimizers.evaluation import Evaluation, evaluate
    from assay.optimizers.metrics import AgentEvaluator, AgentMetrics, measure
    from assay.optimizers.parameters import RLTrainer
    from assay.optimizers.prompts import AUTO_SEARCH_CALLS, CompileConfig, CompileOutcome, compile_prompts
    from assay.optimizers.repairs import repaired_dspy
    from assay.optimizers.session import Progress, Session, Student
    from assay.optimizers.statistics import Gain, mean_interval, paired_gain
    from assay.optimizers.teleprompters import OPTIMIZERS
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "evaluation": "Evaluation evaluate",
            "metrics": "AgentEvaluator AgentMetrics measure",
            "parameters": "RLTrainer",
            "prompts": "AUTO_SEARCH_CALLS CompileConfig CompileOutcome compile_prompts",
            "repairs": "repaired_dspy",
            "session": "Progress Session Student",
            "statistics": "Gain mean_interval paired_gain",
            "teleprompters": "OPTIMIZERS",
        },
    )

__all__ = [
    "AUTO_SEARCH_CALLS",
    "OPTIMIZERS",
    "AgentEvaluator",
    "AgentMetrics",
    "CompileConfig",
    "CompileOutcome",
    "Evaluation",
    "Gain",
    "Progress",
    "RLTrainer",
    "Session",
    "Student",
    "compile_prompts",
    "evaluate",
    "mean_interval",
    "measure",
    "paired_gain",
    "repaired_dspy",
]
