"""Imports in the code of artifacts that earlier versions wrote: modules that have moved, and renamed arguments.

The files of an artifact are hashed, so they are not edited; their imports of `assay` are resolved here instead. A file
outside of an artifact imports only what exists today. `assay.sources.modules` decides which files these are.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from assay.errors import ArtifactError

__all__ = ["MODULES", "PROGRAMS", "MovedName", "import_former"]

# Former module -> the modules that have its names today. Submodules follow their package.
MODULES: dict[str, tuple[str, ...]] = {
    "assay.api": ("assay.api.compile", "assay.api.evaluate", "assay.api.run", "assay.runs.loading"),
    "assay.comparing": ("assay.api.compare",),
    "assay.exporting": ("assay.api.collect", "assay.api.export", "assay.api.traces"),
    "assay.improving": ("assay.api.improve.run", "assay.api.improve.report"),
    "assay.jobs": ("assay.runs.jobs", "assay.runs.opening", "assay.runs.loading"),
    "assay.judges.agreement": ("assay.judges.quality.agreement", "assay.judges.quality.reliability"),
    "assay.judges.attacks": ("assay.judges.quality.attacks",),
    "assay.judges.audit": ("assay.judges.quality.audit", "assay.judges.quality.bases"),
    "assay.judges.card": ("assay.judges.quality.card", "assay.judges.quality.drawing"),
    "assay.judges.drift": ("assay.judges.quality.drift",),
    "assay.judges.inference": ("assay.judges.quality.inference",),
    "assay.judges.ranking": ("assay.judges.quality.ranking",),
    "assay.judges.scan": ("assay.judges.quality.scan",),
    "assay.judging": ("assay.api.judge.compile", "assay.api.judge.session", "assay.api.judge.items"),
    "assay.models.adapters": ("assay.models.lora.adapters",),
    "assay.models.chattemplates": ("assay.models.chat_templates",),
    "assay.models.gguffile": ("assay.models.gguf_file",),
    "assay.models.lm": ("assay.models.lm", "assay.models.recording", "assay.models.token_counts"),
    "assay.models.lora": ("assay.models.lora", "assay.models.lora.conversion"),
    "assay.models.toolcalls": ("assay.models.tool_calls",),
    "assay.models.toollimits": ("assay.models.tool_limits",),
    "assay.optimizers": ("assay.optimizers", "assay.evaluation"),
    "assay.optimizers.candidates": ("assay.optimizers.prompts.candidates",),
    "assay.optimizers.comparison": ("assay.evaluation.comparison",),
    "assay.optimizers.demonstrations": ("assay.optimizers.prompts.demonstrations",),
    "assay.optimizers.evaluation": ("assay.evaluation.evaluation",),
    "assay.optimizers.metrics": ("assay.evaluation.metrics",),
    "assay.optimizers.session": ("assay.evaluation.session", "assay.evaluation.progress"),
    "assay.optimizers.statistics": ("assay.evaluation.statistics",),
    "assay.optimizers.weights": ("assay.optimizers.finetuning",),
    "assay.planning": ("assay.api.plan",),
    "assay.recording": ("assay.api.record", "assay.evaluation.stored", "assay.rubrics.grading"),
    "assay.programs.agent": ("assay.programs.agent", "assay.programs.tool_agent"),
    "assay.rubrics.metric": ("assay.rubrics.dspy_metric",),
    "assay.rubrics.reward": ("assay.rubrics.trl_reward",),
    "assay.rubrics.yamlfiles": ("assay.rubrics.yaml_files",),
    "assay.scrubbing": ("assay.support.scrubbing",),
    "assay.traces.answers": ("assay.traces.messages.parts", "assay.traces.messages.answers"),
    "assay.traces.dialects": ("assay.traces.messages.dialects",),
    "assay.traces.privacy": ("assay.traces.privacy", "assay.traces.privacy.anonymizer"),
    "assay.training": ("assay.api.train", "assay.api.model_comparison"),
    "assay.tuning": ("assay.api.tune",),
    "assay.verdicts": ("assay.api.judge.score", "assay.api.judge.audit", "assay.api.judge.drift"),
}
# Programs whose arguments were renamed, and their subclasses that also take the former arguments.
PROGRAMS: dict[str, str] = {
    "assay.programs.agent.Agent": "assay.programs.former.Agent",
    "assay.programs.tool_agent.ToolAgent": "assay.programs.former.ToolAgent",
    "assay.programs.shipped.Classify": "assay.programs.former.Classify",
    "assay.programs.shipped.Extract": "assay.programs.former.Extract",
    "assay.programs.shipped.MathQA": "assay.programs.former.MathQA",
}


class MovedName(ArtifactError, ImportError):
    """An artifact's code imports a name of assay that no longer exists. It is an `ImportError` for that code."""


def import_former(name: str, fromlist: Sequence[str]) -> ModuleType:
    """`__import__` of `assay` or one of its modules, for code inside of an artifact.

    Raises:
        MovedName: neither the module or name itself, nor its place of today, exists.
    """
    module = _module(name)
    for attribute in fromlist:
        if attribute != "*" and not hasattr(module, attribute):
            raise _no_longer(f"{name}.{attribute}")
    return module if fromlist else _module("assay")


class _Former(ModuleType):
    """A former module. Its names are those of the modules that replace it; the first that has a name counts."""

    def __init__(self, name: str, modules: Sequence[ModuleType]) -> None:
        super().__init__(name, modules[0].__doc__)
        self._modules = modules

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            try:
                return _today(getattr(module, name))
            except AttributeError:
                continue
        try:
            return _module(f"{self.__name__}.{name}")
        except MovedName:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None


def _module(name: str) -> _Former:
    base, rest = name, ""
    while base not in MODULES and "." in base:  # the longest package that has moved
        base, _, last = base.rpartition(".")
        rest = f".{last}{rest}"
    own = [name] if base not in MODULES or rest else []
    moved = [f"{place}{rest}" for place in MODULES.get(base, ())]
    modules = [module for place in dict.fromkeys([*moved, *own]) if (module := _module_or_none(place)) is not None]
    if not modules:
        raise _no_longer(name)
    return _Former(name, modules)


def _module_or_none(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # a package that is not installed
        return None


def _today(value: Any) -> Any:
    if isinstance(value, ModuleType):
        return _module(value.__name__) if value.__name__.partition(".")[0] == "assay" else value
    if isinstance(value, type) and (place := PROGRAMS.get(f"{value.__module__}.{value.__qualname__}")) is not None:
        module, _, name = place.rpartition(".")
        return getattr(importlib.import_module(module), name)
    return value


def _no_longer(name: str) -> MovedName:
    from assay import __version__

    return MovedName(
        f"its code imports {name}, which assay {__version__} does not have. Use the assay that wrote it "
        "(`assay` in manifest.json), or change the import in your own copy of the file and compile again"
    )
