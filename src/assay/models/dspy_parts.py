"""Parts of DSPy that are not public and that assay patches, and the optimizers that rest on them.

A part that has moved, or that takes other arguments, is not patched; the optimizers that need it are refused by name,
and everything else works.
"""

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BOOTSTRAP", "EVALUATE", "EXECUTE", "EXECUTOR", "GEPA_BATCH", "GEPA_TEXTS", "MIPRO_CANDIDATE", "SIMBA_PROGRAM",
    "Part", "moved_parts",
]  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A function or method of DSPy.

    Attributes:
        arguments: names of arguments that it must take, without self.
    """

    module: str
    name: str
    arguments: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[Any, str]:
        """The module or class that has it, and its name there."""
        owner, _, name = self.name.rpartition(".")
        module = importlib.import_module(self.module)
        return functools.reduce(getattr, owner.split("."), module) if owner else module, name

    @functools.cached_property
    def moved(self) -> bool:
        """Whether it is not there or takes other arguments. Decided once, before it is patched."""
        try:
            owner, name = self.place
            parameters = inspect.signature(vars(owner)[name]).parameters  # an inherited one is another part
        except (ImportError, AttributeError, KeyError, TypeError, ValueError):
            return True
        return not set(self.arguments) <= set(parameters)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


EVALUATE = Part("dspy.evaluate.evaluate", "Evaluate.__call__", ("program", "metric", "devset"))
EXECUTOR = Part(
    "dspy.utils.parallelizer", "ParallelExecutor.__init__", ("timeout", "max_errors", "disable_progress_bar")
)
EXECUTE = Part("dspy.utils.parallelizer", "ParallelExecutor.execute", ("function", "data"))
SIMBA_PROGRAM = Part("dspy.teleprompt.simba", "wrap_program", ("program", "metric"))
MIPRO_CANDIDATE = Part(
    "dspy.teleprompt.mipro_optimizer_v2",
    "eval_candidate_program",
    ("batch_size", "trainset", "candidate_program", "evaluate"),
)
GEPA_BATCH = Part("dspy.teleprompt.gepa.gepa_utils", "DspyAdapter.evaluate", ("batch",))
GEPA_TEXTS = Part("dspy.teleprompt.gepa.gepa_utils", "DspyAdapter.propose_new_texts", ("candidate",))
BOOTSTRAP = Part("dspy.teleprompt.bootstrap", "BootstrapFewShot._bootstrap")
_NEEDED = {
    "BootstrapFewShot": (BOOTSTRAP,),
    "BootstrapFewShotWithRandomSearch": (EVALUATE,),
    "BootstrapFewShotWithOptuna": (
        EVALUATE,
        Part("dspy.teleprompt.teleprompt_optuna", "BootstrapFewShotWithOptuna.objective", ("trial",)),
    ),
    "COPRO": (EVALUATE,),
    "MIPROv2": (EVALUATE, MIPRO_CANDIDATE),
    "SIMBA": (EVALUATE, EXECUTOR, EXECUTE, SIMBA_PROGRAM),
    "GEPA": (EVALUATE, GEPA_BATCH, GEPA_TEXTS),
    "InferRules": (
        EVALUATE,
        Part("dspy.teleprompt.infer_rules", "InferRules.update_program_instructions", ("natural_language_rules",)),
    ),
}


def moved_parts(optimizer: str) -> list[Part]:
    """The parts of DSPy that an optimizer needs, by the name of its class, and that have moved."""
    return [part for part in _NEEDED.get(optimizer, ()) if part.moved]
