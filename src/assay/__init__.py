"""assay makes LLM agents better against a measure that can be trusted.

Importing this package loads none of dspy, torch, litellm or sqlalchemy: public names load on first use.
"""

import os
from typing import TYPE_CHECKING, Any

from assay.support.lazy import loaded
from assay.support.package import __version__

# Otherwise litellm reads a file `.env` at its import, which may be somebody else's and may send the user's key to
# another host.
os.environ.setdefault("LITELLM_MODE", "PRODUCTION")

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
    "collect": "assay.commands.collect",
    "deployed": "assay.commands.deployed",
    "compare": "assay.commands.compare",
    "compile": "assay.commands.compile",
    "compile_judge": "assay.commands.judge_compile",
    "evaluate": "assay.commands.evaluate",
    "export": "assay.commands.export",
    "improve": "assay.commands.improve",
    "index": "assay.commands.index",
    "get_lm": "assay.models",
    "join_tune": "assay.commands.tune",
    "load": "assay.jobs.loading",
    "load_judge": "assay.jobs.loading",
    "load_rubric": "assay.jobs.loading",
    "load_tasks": "assay.datasets",
    "load_verifier": "assay.jobs.loading",
    "migrate": "assay.commands.migrate",
    "parameter_impact": "assay.commands.impact",
    "project_settings": "assay.commands.project",
    "record": "assay.jobs.recording",
    "recorded": "assay.jobs.recording",
    "run": "assay.commands.run",
    "side_effects": "assay.traces.listening",
    "tune": "assay.commands.tune",
    "train": "assay.commands.train",
    "train_sft": "assay.commands.train",
}

__all__ = [*_WHERE, "__version__"]

if TYPE_CHECKING:  # `as` makes them public to type checkers
    from assay.commands.collect import collect as collect
    from assay.commands.compare import compare as compare
    from assay.commands.compile import compile as compile
    from assay.commands.deployed import deployed as deployed
    from assay.commands.evaluate import evaluate as evaluate
    from assay.commands.export import export as export
    from assay.commands.impact import parameter_impact as parameter_impact
    from assay.commands.improve import improve as improve
    from assay.commands.index import index as index
    from assay.commands.judge_compile import compile_judge as compile_judge
    from assay.commands.migrate import migrate as migrate
    from assay.commands.project import project_settings as project_settings
    from assay.commands.run import run as run
    from assay.commands.train import train as train, train_sft as train_sft
    from assay.commands.tune import join_tune as join_tune, tune as tune
    from assay.datasets import Task as Task, load_tasks as load_tasks
    from assay.errors import AssayError as AssayError
    from assay.jobs.loading import (
        load as load,
        load_judge as load_judge,
        load_rubric as load_rubric,
        load_verifier as load_verifier,
    )
    from assay.jobs.recording import record as record, recorded as recorded
    from assay.models import get_lm as get_lm
    from assay.programs import Agent as Agent, AgentParameters as AgentParameters, BaseAgent as BaseAgent
    from assay.rubrics import Criterion as Criterion, Rubric as Rubric
    from assay.traces import Store as Store
    from assay.traces.collector import DataCollector as DataCollector
    from assay.traces.listening import side_effects as side_effects


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'assay' has no attribute {name!r}")
    return getattr(loaded(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
