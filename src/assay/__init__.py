"""assay makes LLM agents better against a measure that can be trusted.

Importing this package loads none of dspy, torch, litellm or sqlalchemy: public names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Agent": "assay.programs",
    "AgentParameters": "assay.programs",
    "AssayError": "assay.errors",
    "BaseAgent": "assay.programs",
    "Criterion": "assay.rubrics",
    "DataCollector": "assay.traces.collector",
    "Rubric": "assay.rubrics",
    "Store": "assay.traces",
    "Task": "assay.datasets",
    "collect": "assay.exporting",
    "compare": "assay.comparing",
    "compile": "assay.api",
    "compile_judge": "assay.judging",
    "evaluate": "assay.api",
    "export": "assay.exporting",
    "improve": "assay.improving",
    "get_lm": "assay.models",
    "load": "assay.api",
    "load_judge": "assay.jobs",
    "load_rubric": "assay.api",
    "load_tasks": "assay.datasets",
    "parameter_impact": "assay.tuning",
    "record": "assay.recording",
    "recorded": "assay.recording",
    "train": "assay.training",
    "tune": "assay.tuning",
}

__all__ = [*_WHERE, "__version__"]

if TYPE_CHECKING:
    from assay.api import compile, evaluate, load, load_rubric
    from assay.comparing import compare
    from assay.datasets import Task, load_tasks
    from assay.errors import AssayError
    from assay.exporting import collect, export
    from assay.improving import improve
    from assay.jobs import load_judge
    from assay.judging import compile_judge
    from assay.models import get_lm
    from assay.programs import Agent, AgentParameters, BaseAgent
    from assay.recording import record, recorded
    from assay.rubrics import Criterion, Rubric
    from assay.traces import Store
    from assay.traces.collector import DataCollector
    from assay.training import train
    from assay.tuning import parameter_impact, tune


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'assay' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
