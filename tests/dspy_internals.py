"""Parts of DSPy that tests call and assay does not."""

import importlib
from types import SimpleNamespace
from typing import Any


def optimizer_internals() -> SimpleNamespace:
    """Modules of SIMBA and MIPROv2, GEPA's adapter class and the class that runs threads."""
    from dspy.teleprompt import mipro_optimizer_v2, simba
    from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
    from dspy.utils.parallelizer import ParallelExecutor

    return SimpleNamespace(simba=simba, mipro=mipro_optimizer_v2, gepa_adapter=DspyAdapter, parallel=ParallelExecutor)


def training_internals() -> SimpleNamespace:
    """DSPy's GRPO and its formats of training data."""
    from dspy.clients.utils_finetune import TrainDataFormat
    from dspy.teleprompt.grpo import GRPO

    return SimpleNamespace(grpo=GRPO, data_format=TrainDataFormat)


def serializer() -> Any:
    """DSPy's serializer of requests and responses."""
    return importlib.import_module("dspy._vendor.lm15.serde")
