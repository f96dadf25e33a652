"""The five agent parameters: searched by Optuna, or changed by a learned adjuster."""

from assay.optimizers.parameters.objective import AgentObjective, Objective, ProgramObjective
from assay.optimizers.parameters.policy import Episode, PolicyOutcome, train_policy
from assay.optimizers.parameters.results import SearchOutcome, TrialResult, outcome_of
from assay.optimizers.parameters.search import search
from assay.optimizers.parameters.space import Point, Space, in_figures
from assay.optimizers.parameters.study import open_study
from assay.optimizers.parameters.trainer import HeldOutReport, RLTrainer
from assay.optimizers.search_settings import SearchConfig

__all__ = [
    "AgentObjective",
    "Episode",
    "HeldOutReport",
    "Objective",
    "Point",
    "PolicyOutcome",
    "ProgramObjective",
    "RLTrainer",
    "SearchConfig",
    "SearchOutcome",
    "Space",
    "TrialResult",
    "in_figures",
    "open_study",
    "outcome_of",
    "search",
    "train_policy",
]
