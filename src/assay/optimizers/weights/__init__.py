"""Weights improved from traces: an SFT warm-up with LoRA on stock TRL. Torch is loaded where training begins."""

from assay.optimizers.weights.config import SFTConfig
from assay.optimizers.weights.data import TrainingData, read_sft
from assay.optimizers.weights.sft import SFTReport, train_sft

__all__ = ["SFTConfig", "SFTReport", "TrainingData", "read_sft", "train_sft"]
