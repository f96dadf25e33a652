"""Settings of `compile`, `run` and `improve`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.models.limits import DEFAULT_S
from assay.models.roles import check_address
from assay.runs.settings.fields import (
    api_base,
    api_key_env,
    price_of_model,
    replace_lms_of,
    state_of,
    thinking_of,
)
from assay.runs.settings.shared import ExecutorSettings, PromptSettings
from assay.support.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class CompileSettings(ExecutorSettings, PromptSettings):
    """Settings of `assay.compile`."""

    kind: str = "compile"
    state: str | Path | None = state_of()
    thinking_margin: float | None = setting(
        None,
        "Maximum loss in score for saving thinking tokens. After the search, the agent's thinking policy, or the "
        "halting of a Refine program, is fitted on val: of the settings whose loss is at most this by a one-sided 95 "
        "% interval, the one that saves most tokens is chosen. This takes at least 3 / margin val tasks. By default "
        "nothing is fitted. The program must be an Agent with a thinking budget, or a "
        "Refine program. A policy takes six runs of each val task, which --max-search-calls does not count.",
        ge=0,
        lt=1,
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Settings of `assay.run`."""

    state: str | Path | None = state_of()
    model: str | None = setting(
        None, "Language model; by default that of the artifact, or of the program's predictors if each has one."
    )
    api_base: str | None = api_base("the model")
    api_key_env: str | None = api_key_env()
    price: str | None = price_of_model(note="")
    thinking: int | str | None = thinking_of("the program", " By default that of the artifact.")
    replace_lms: bool = replace_lms_of()
    task_timeout: float = setting(DEFAULT_S, "Time limit of one prediction in seconds.", gt=0, metavar="SECONDS")

    def __post_init__(self) -> None:
        check_address(self.api_base)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class ImproveSettings(ExecutorSettings, PromptSettings):
    """Settings of `assay.improve`: of its compile steps and of its training steps. The caps cover all steps."""

    kind: str = "improve"
    order: Sequence[str] = setting(
        ("prompts", "sft", "prompts"), "Steps in order, separated by commas: prompts, sft, grpo."
    )
    rollouts: int = setting(2, "Number of rollouts of each train task that sft collects.", ge=1)
    sft: Mapping[str, Any] | None = setting(
        None, "Setting of sft, named as in `assay train sft`: epochs=2.", metavar="NAME=VALUE"
    )
    grpo: Mapping[str, Any] | None = setting(
        None, "Setting of grpo, named as in `assay train grpo`: steps=12, beta=0.", metavar="NAME=VALUE"
    )
    retention: Sequence[str] = setting(
        (),
        "Retention task: a program, rubric and data whose score grpo must not lower; repeatable.",
        metavar="PROGRAM,RUBRIC,DATA",
        many=True,
    )
    monitor: str | None = setting(
        None, "Monitor rubric: scores the rollouts of grpo, but gives no reward.", metavar="R", file=True
    )
