"""Weights improved from traces: an SFT warm-up with LoRA and a policy gradient, on stock TRL. Torch is loaded where training begins."""

from assay.optimizers.weights.config import PolicyConfig, SFTConfig
from assay.optimizers.weights.data import TrainingData, read_sft
from assay.optimizers.weights.policy import PolicyReport, train_policy
from assay.optimizers.weights.provider import TRLProvider
from assay.optimizers.weights.sft import SFTReport, train_sft

__all__ = [
    "PolicyConfig",
    "PolicyReport",
    "SFTConfig",
    "SFTReport",
    "TRLProvider",
    "TrainingData",
    "read_sft",
    "train_policy",
    "train_sft",
]
