"""Settings that several commands share.

The class of each command is composed of these: see `commands`, `tune`, `train`, `judge` and `export`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from assay.models.defaults import DEFAULT_MODEL
from assay.models.limits import DEFAULT_S
from assay.models.roles import check_address
from assay.optimizers.prompts.config import optimizer_of
from assay.runs.settings.fields import (
    RESUMED,
    api_base,
    api_key_env,
    preflight_of,
    price_of_model,
    replace_lms_of,
    rubric_of,
    thinking_of,
)
from assay.support.presets import apply_preset
from assay.support.settings import LARGEST_SEED, Settings, named_setting, setting, settings_of
from assay.support.values import json_text

if TYPE_CHECKING:
    from assay.models import Caps
    from assay.optimizers.budget import Decisions

__all__ = [
    "DEFAULT_MODEL",
    "CommonSettings",
    "CurriculumSettings",
    "DecisionSettings",
    "ExecutorSettings",
    "JudgeModelSettings",
    "ProgramSettings",
    "PromptSettings",
    "ReflectionSettings",
    "SearchSettings",
]

DEFAULT_SALT = "assay"  # of `assay.traces.store.sealing`, which loads the database


_PROVIDER = " By default that of --api-base; 'provider': the provider's own address."


@dataclass(frozen=True, kw_only=True)
class CommonSettings(Settings):
    """Settings of every run: model, data splits, caps, seed."""

    ROLE: ClassVar[str] = "program"  # role of `model`: the table of assay.toml that sets it

    kind: str = "run"  # internal: kind of the run in the store
    model: str = setting(
        DEFAULT_MODEL,
        "Language model of the program: PROVIDER/NAME, embedded/NAME or embedded:FILE.gguf. An artifact runs with the "
        "model it was compiled for, unless one is named; a program whose predictors all have a model needs none.",
    )
    api_base: str | None = api_base("the model", " Also used for the other models that have no base URL of their own.")
    api_key_env: str | None = api_key_env()
    price: str | None = price_of_model()
    thinking: int | str | None = thinking_of(
        "the program", " It replaces the program's own, and is stored in the artifact."
    )
    rename: Mapping[str, str] = setting(
        help="Column of the data to rename, and its new name.", factory=dict, metavar="COLUMN=NAME"
    )
    salt: str | None = setting(
        None,
        "Salt of the hash that assigns tasks to splits. By default the salt of the store; for a new store that of the "
        "artifact, or 'assay'.",
    )
    sizes: Mapping[str, int] = setting(help="Maximum number of {split} tasks.", factory=dict)
    seed: int = setting(0, "Seed of the random number generators.", ge=0, le=LARGEST_SEED)
    threads: int | None = setting(
        None, "Number of concurrent runs; by default the number that suits the model's engine.", ge=1, job=RESUMED
    )
    task_timeout: float = setting(
        DEFAULT_S,
        "Time limit in seconds of one run with its tools, of one check and of one judge. A run that exceeds it fails; "
        "the criterion of a check or judge is unscored. The limit of one tool call is a quarter of it.",
        gt=0,
        metavar="SECONDS",
        job=RESUMED,
    )
    max_calls: int | None = setting(None, "Maximum number of LM calls; the run stops there.", ge=0, job=RESUMED)
    max_tokens: int | None = setting(None, "Maximum number of tokens; the run stops there.", ge=0, job=RESUMED)
    max_cost_usd: float | None = setting(None, "Maximum cost in US dollars; the run stops there.", ge=0, job=RESUMED)
    preflight: bool = preflight_of(
        "Check first, on one task, that the program runs and its judges answer.",
        "Skip the check on one task that the program runs and its judges answer.",
    )
    cache: bool = setting(
        True,
        "Read and write the response cache. Without it equal calls are sent once in a run, and again in the next.",
        flag="--no-cache",
        flag_help="Do not read or write the response cache. Equal calls are sent once in a run, and again in the next.",
        job=RESUMED,
    )

    def __post_init__(self) -> None:
        from assay.datasets import check_sizes

        # Addresses come first: an error about another field prints the settings, and an address may contain a key.
        for name in ("api_base", "judge_api_base", "reflection_api_base"):
            check_address(getattr(self, name, None), name)
        check_sizes(self.sizes)
        super().__post_init__()

    @property
    def model_name(self) -> str:
        """The model of the job."""
        return self.model

    @property
    def stored_salt(self) -> str | None:
        """The salt of the job's splits, which the store keeps."""
        return self.salt

    @property
    def limits(self) -> Mapping[str, int | None]:
        """Largest number of rows by split, None for all; splits that are not named have the usual limits."""
        return self.sizes

    @property
    def caps(self) -> "Caps":
        from assay.models import Caps

        return Caps(
            calls=self.max_calls, tokens=self.max_tokens, cost_usd=self.max_cost_usd, search_calls=self.max_search_calls
        )

    @property
    def max_search_calls(self) -> int | None:
        """Maximum number of LM calls of the search; None for commands without a search."""
        return None

    @property
    def endpoints(self) -> dict[str, tuple[str | None, str | None, str | None]]:
        """Role -> model, base URL and key variable, for the roles other than `model`; None where not set."""
        return {}

    @property
    def without_passwords(self) -> dict[str, Any]:
        """The settings as they are stored."""
        return asdict(self)

    @property
    def key(self) -> str:
        """12 hex digits that identify the job. Fields with `job=False`, such as caps and threads, do not change it."""
        declared = settings_of(type(self))
        values = asdict(self).items()
        job = {name: value for name, value in values if name not in declared or declared[name].declared.job}
        job["salt"] = self.salt or DEFAULT_SALT
        if not job.get("replace_lms"):  # jobs of before this setting keep their key
            job.pop("replace_lms", None)
        return hashlib.sha256(json_text(job, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class JudgeModelSettings(Settings):
    """Settings of the model of a rubric's judges."""

    judge_model: str | None = setting(None, "Language model of the rubric's judges; by default that of the program.")
    judge_api_base: str | None = api_base("the judges' model", _PROVIDER)
    judge_api_key_env: str | None = api_key_env("the judges' model")
    judge_thinking: int | str | None = thinking_of(
        "the rubric's judges", " A judge that names its own model keeps that model's default."
    )


@dataclass(frozen=True, kw_only=True)
class ProgramSettings(JudgeModelSettings, CommonSettings):
    """Settings of a run of a program against a rubric."""

    state: str | Path | None = None  # a setting of the commands that start from a saved state
    program: str = named_setting(
        "Program: path/file.py:Class, package.module:Class, an artifact's folder or a shipped name."
    )
    rubric: str = rubric_of()
    data: str = named_setting(
        "Tasks: a .jsonl, .json, .csv or .parquet file, or a spec (hf:…, reasoning_gym:…, bfcl:…, mutants:…, "
        "arithmetic:…, tools:…, documents:…, conversations:…, nim:…, experiment:…, curriculum:…).",
        flag="--data",
        metavar="D",
        file=True,
    )
    prompt_format: str | None = setting(
        None,
        "Format in which a program's fields are written into messages; by default the program's own.",
        choices=("json", "lean", "xml", "chat"),
    )
    replace_lms: bool = replace_lms_of()
    parameters: Mapping[str, Any] = setting(
        help="Agent parameter and its value, such as temperature=0.1.",
        factory=dict,
        flag="--set",
        metavar="NAME=VALUE",
    )

    @property
    def own_models(self) -> bool:
        """Whether compiled judges use the model they were calibrated with, as none is named for judges."""
        return not (self.judge_model or self.judge_api_base or self.judge_api_key_env)

    @property
    def endpoints(self) -> dict[str, tuple[str | None, str | None, str | None]]:
        return {**super().endpoints, "judge": (self.judge_model, self.judge_api_base, self.judge_api_key_env)}

    @property
    def generation(self) -> dict[str, Any]:
        """Generation settings that override those of the program's model."""
        return {}

    @property
    def decisions(self) -> "Decisions":
        """How gate and test are sized and decided."""
        from assay.optimizers.budget import Decisions

        return Decisions(sized=frozenset(self.sizes))

    @property
    def executor(self) -> str:
        return "threads"

    @property
    def shown_demos(self) -> int:
        """Maximum number of demonstrations in a prompt, for estimates."""
        return 0


@dataclass(frozen=True, kw_only=True)
class CurriculumSettings(ProgramSettings):
    """The setting that orders tasks by difficulty."""

    curriculum: str | None = setting(
        None,
        "Curriculum: a YAML or JSON file of stages of data, or a shipped one (tool_use). A stage is left when its val "
        "score is high enough. --data is needed only for stages that name no data.",
        metavar="FILE",
        file=True,
    )


@dataclass(frozen=True, kw_only=True)
class ExecutorSettings(ProgramSettings):
    """The setting that chooses where tasks run."""

    executor: str = setting(
        "threads",
        "Where tasks run. threads: in this process; ray: on the hosts of the Ray cluster at RAY_ADDRESS, or of one "
        "that is started on this machine.",
        choices=("threads", "ray"),
        job=RESUMED,
    )


@dataclass(frozen=True, kw_only=True)
class SearchSettings(CommonSettings):
    """The cap on a search."""

    max_search_calls: int | None = setting(
        None, "Maximum number of LM calls of the search; by default no limit.", ge=0, job=RESUMED
    )


@dataclass(frozen=True, kw_only=True)
class ReflectionSettings(CommonSettings):
    """Settings of the model that proposes instructions."""

    reflection_model: str | None = setting(
        None, "Language model that proposes instructions; by default that of the program."
    )
    reflection_api_base: str | None = api_base("the reflection model", _PROVIDER)
    reflection_api_key_env: str | None = api_key_env("the reflection model")
    reflection_thinking: int | str | None = thinking_of("the reflection model")

    @property
    def endpoints(self) -> dict[str, tuple[str | None, str | None, str | None]]:
        return {
            **super().endpoints,
            "reflection": (self.reflection_model, self.reflection_api_base, self.reflection_api_key_env),
        }


@dataclass(frozen=True, kw_only=True)
class DecisionSettings(ProgramSettings):
    """Settings of the gate, the sealed test (`assay.optimizers.budget.Decisions`) and the artifact."""

    difference: float = setting(
        0.1,
        "Smallest gain in mean score that gate and test are to detect. It decides how many tasks they take, unless the "
        "size of the split is set.",
        gt=0,
        le=1,
        why="the smallest gain in mean score that is to be shown",
        job=RESUMED,
    )
    early_stop: bool = setting(
        True,
        "Stop gate and test as soon as the sequential test has decided.",
        flag="--early-stop/--no-early-stop",
        job=RESUMED,
    )

    portable: bool = setting(
        True,
        "Stop before the search if the program needs files or modules that its artifact cannot contain: outside of its "
        "folder, or too large.",
        flag="--no-portable",
        flag_help="Continue although the program needs files or modules that its artifact cannot contain. The artifact "
        "then runs on this machine only.",
        job=RESUMED,
    )

    @property
    def decisions(self) -> "Decisions":
        from assay.optimizers.budget import Decisions

        return Decisions(difference=self.difference, early_stop=self.early_stop, sized=frozenset(self.sizes))


@dataclass(frozen=True, kw_only=True)
class PromptSettings(SearchSettings, ReflectionSettings, DecisionSettings):
    """Settings of the prompt search."""

    max_search_calls: int | None = setting(
        None,
        "Maximum number of LM calls of the search; by default 300 with optimizer auto, otherwise no limit.",
        ge=0,
        job=RESUMED,
    )
    optimizer: Any = setting(
        "auto",
        "Optimizer: auto, labeled, bootstrap, bootstrap-search, knn, copro, mipro, simba, gepa, infer-rules, ensemble, "
        "optuna, a class of DSPy such as SIMBA, or the class, function or object package.module:NAME or file.py:NAME. "
        "Also a preset: light, or a .toml file of settings such as optimizers/gepa.toml.",
        parse=optimizer_of,
        file=True,
    )
    optimizer_settings: Mapping[str, Any] | None = setting(
        None,
        "Setting of the optimizer, such as max_metric_calls=400 for gepa.",
        flag="--optimizer-set",
        metavar="NAME=VALUE",
    )
    threshold: float = setting(0.8, "Minimum score at which a run counts as a success to learn from.", gt=0, le=1)
    demos: int = setting(16, "Maximum number of demonstrations per predictor; auto also tries fewer.", ge=1, le=64)
    token_margin: float = setting(
        0.01,
        "A candidate with fewer prompt tokens wins on val if its expected score is at most this much lower, unless the "
        "other candidate is significantly better.",
        ge=0,
        lt=1,
        why="how much expected score fewer tokens may cost",
        job=RESUMED,
    )

    def __post_init__(self) -> None:
        apply_preset(self, "optimizer", PromptSettings)
        super().__post_init__()

    @property
    def shown_demos(self) -> int:
        return self.demos
