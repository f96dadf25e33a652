"""Optimizers of prompts, judges, agent parameters and weights."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.optimizers.parameters import RLTrainer
    from assay.optimizers.prompts.compile import CompileOutcome, compile_prompts
    from assay.optimizers.prompts.dspy_patches import repaired_dspy
    from assay.optimizers.prompts.teleprompters import OPTIMIZERS
    from assay.optimizers.settings import CompileConfig
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "parameters": "RLTrainer",
            "prompts.compile": "CompileOutcome compile_prompts",
            "prompts.dspy_patches": "repaired_dspy",
            "prompts.teleprompters": "OPTIMIZERS",
            "settings": "CompileConfig",
        },
    )

__all__ = [
    "OPTIMIZERS",
    "CompileConfig",
    "CompileOutcome",
    "RLTrainer",
    "compile_prompts",
    "repaired_dspy",
]
