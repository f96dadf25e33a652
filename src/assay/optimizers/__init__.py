"""Optimizers of prompts, judges, agent parameters and weights."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.optimizers.parameters import RLTrainer
    from assay.optimizers.prompts.compile import CompileConfig, CompileOutcome, compile_prompts
    from assay.optimizers.prompts.dspy_patches import repaired_dspy
    from assay.optimizers.prompts.teleprompters import OPTIMIZERS
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "parameters": "RLTrainer",
            "prompts.compile": "CompileConfig CompileOutcome compile_prompts",
            "prompts.dspy_patches": "repaired_dspy",
            "prompts.teleprompters": "OPTIMIZERS",
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
