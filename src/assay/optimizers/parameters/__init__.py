"""The five agent parameters: searched by Optuna, or moved by a policy that learns."""

from assay.optimizers.parameters.arena import AgentArena, Arena, ProgramArena
from assay.optimizers.parameters.policy import Episode, PolicyOutcome, RLTrainer, train_policy
from assay.optimizers.parameters.search import SearchConfig, SearchOutcome, TrialResult, open_study, search
from assay.optimizers.parameters.space import Point, Space

__all__ = [
    "AgentArena",
    "Arena",
    "Episode",
    "Point",
    "PolicyOutcome",
    "ProgramArena",
    "RLTrainer",
    "SearchConfig",
    "SearchOutcome",
    "Space",
    "TrialResult",
    "open_study",
    "search",
    "train_policy",
]
