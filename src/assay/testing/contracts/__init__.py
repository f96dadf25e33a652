"""Contract suites: tests for your own store, judge, agent, environment, criterion, optimizer, retriever, or memory.

Subclass a suite under a name that starts with `Test` and override `make`; pytest collects the inherited tests. Nothing
here imports pytest: `failures` runs a suite without it.
"""

from assay.testing.contracts.agents import AgentContract, EnvironmentContract, MemoryContract, RetrieverContract
from assay.testing.contracts.base import Contract
from assay.testing.contracts.judges import (
    CriterionContract,
    JudgeContract,
    ListwiseJudgeContract,
    PairwiseJudgeContract,
)
from assay.testing.contracts.optimizers import OptimizerContract
from assay.testing.contracts.stores import StoreContract

__all__ = [
    "AgentContract",
    "Contract",
    "CriterionContract",
    "EnvironmentContract",
    "JudgeContract",
    "ListwiseJudgeContract",
    "MemoryContract",
    "OptimizerContract",
    "PairwiseJudgeContract",
    "RetrieverContract",
    "StoreContract",
]
