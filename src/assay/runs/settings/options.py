"""The settings of commands that run a program, a judge or a training, as keywords of their Python functions (PEP 692),
for type checkers. Those of commands on the store are in `store_options`.

Each class has the fields of the settings class of the same name, with their types; a test compares them. Values are
checked at run time by the settings classes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict


class _Calls(TypedDict, total=False):
    trust: bool  # read by the decorator `assay.sources.trust.trusts`
    api_base: str | None
    api_key_env: str | None
    price: str | None
    thinking: int | str | None
    seed: int
    task_timeout: float
    max_calls: int | None
    max_tokens: int | None
    max_cost_usd: float | None


class _Run(_Calls, total=False):
    rename: Mapping[str, str]
    salt: str | None
    sizes: Mapping[str, int]
    threads: int | None
    preflight: bool


class _Common(_Run, total=False):
    model: str


class _Cache(TypedDict, total=False):
    cache: bool


class _Judged(TypedDict, total=False):
    judge_model: str | None
    judge_api_base: str | None
    judge_api_key_env: str | None
    judge_thinking: int | str | None
    prompt_format: str | None
    replace_lms: bool


class _Program(_Judged, total=False):
    parameters: Mapping[str, Any]


class _Saved(TypedDict, total=False):
    state: str | Path | None


class _Curriculum(TypedDict, total=False):
    curriculum: str | None


class _Executor(TypedDict, total=False):
    executor: str


class _Reflection(TypedDict, total=False):
    reflection_model: str | None
    reflection_api_base: str | None
    reflection_api_key_env: str | None
    reflection_thinking: int | str | None
    max_search_calls: int | None


class _Decisions(TypedDict, total=False):
    difference: float
    early_stop: bool
    portable: bool


class _Prompts(TypedDict, total=False):
    optimizer: Any
    optimizer_settings: Mapping[str, Any] | None
    threshold: float
    demos: int
    token_margin: float


class _PromptJob(_Common, _Cache, _Program, _Executor, _Reflection, _Decisions, _Prompts, total=False):
    pass


class ImproveOptions(_PromptJob, total=False):
    """The keywords of `assay.improve`."""

    order: Sequence[str]
    rollouts: int
    sft: Mapping[str, Any] | None
    grpo: Mapping[str, Any] | None
    retention: Sequence[str]
