"""Settings of `improve`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.runs.settings.shared import ExecutorSettings, PromptSettings
from assay.support.settings import setting


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
