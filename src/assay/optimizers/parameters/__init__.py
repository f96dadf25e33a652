"""The five agent parameters: searched by Optuna, or changed by a learned adjuster."""

from assay.optimizers.parameters.objective import AgentObjective, Objective, ProgramObjective
from assay.optimizers.parameters.policy import Episode, HeldOutReport, PolicyOutcome, RLTrainer, train_policy
from assay.optimizers.parameters.results import SearchOutcome, TrialResult, outcome_of
from assay.optimizers.parameters.search import open_study, search
from assay.optimizers.parameters.space import Point, Space, in_figures
from assay.optimizers.settings import SearchConfig

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
