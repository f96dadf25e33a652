"""Fine-tuning of model weights from traces with TRL: supervised warm-up (SFT) and policy gradient, both with LoRA.

Importing this package does not import torch; training does.
"""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.optimizers.finetuning.data import TrainingData, read_sft
    from assay.optimizers.finetuning.policy_gradient import train_policy
    from assay.optimizers.finetuning.provider import TRLProvider
    from assay.optimizers.finetuning.report import PolicyReport, SFTReport
    from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings
    from assay.optimizers.finetuning.sft import train_sft
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "data": "TrainingData read_sft",
            "policy_gradient": "train_policy",
            "provider": "TRLProvider",
            "report": "PolicyReport SFTReport",
            "settings": "PolicySettings SFTSettings",
            "sft": "train_sft",
        },
    )

__all__ = [
    "PolicyReport",
    "PolicySettings",
    "SFTReport",
    "SFTSettings",
    "TRLProvider",
    "TrainingData",
    "read_sft",
    "train_policy",
    "train_sft",
]
