"""Settings of `traces` and of `runs`: commands on what the store holds.

What one call selects, such as the run whose rollouts are listed, is not a key of `assay.toml`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from assay.errors import ConfigError, FailureKind
from assay.models.limits import DEFAULT_S
from assay.models.roles import check_address
from assay.runs.settings.fields import (
    api_base,
    limit_of,
    preflight_of,
    price_of_model,
    rubric_of,
    selected,
    thinking_of,
)
from assay.runs.settings.shared import JudgeModelSettings
from assay.support.settings import Settings, setting

SPLITS = ("train", "val", "gate", "test")
STATUSES = ("done", "failed", "error", "running")
FAILURES = tuple(kind.value for kind in FailureKind)


@dataclass(frozen=True, kw_only=True)
class RunsListSettings(Settings):
    """Settings of `assay runs list`."""

    limit: int = limit_of("runs to list")


@dataclass(frozen=True, kw_only=True)
class OfRunSettings(Settings):
    """The selection of the rollouts of one run; the settings of `assay traces stats`."""

    run_id: str | None = selected("Only rollouts of this run.", flag="--run")


@dataclass(frozen=True, kw_only=True)
class TracesListSettings(OfRunSettings):
    """Settings of `list_rollouts`."""

    task_id: str | None = selected("Only rollouts of this task.", flag="--task")
    split: str | None = selected("Only rollouts of this split.", choices=SPLITS)
    status: str | None = selected("Only rollouts with this status.", choices=STATUSES)
    phase: str | None = selected(
        "Only this phase of a command: baseline, search, gate, test, evaluate, collect, run, …"
    )
    program: str | None = selected("Only programs whose name contains this text.")
    source: str | None = selected(
        "Only rollouts of this source: program, gateway, …; judge for verdicts of judges, hidden by default."
    )
    failure: str | None = selected("Only this failure kind.", choices=FAILURES, metavar="KIND")
    min_score: float | None = selected("Lowest score.", ge=0, le=1)
    max_score: float | None = selected("Highest score.", ge=0, le=1)
    since: str | None = selected("Only started since: 30m, 12h, 7d, or a date such as 2026-11-23.", metavar="WHEN")
    limit: int = limit_of("rollouts to list")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise ConfigError(f"min_score={self.min_score!r} is above max_score={self.max_score!r}: no score is both")


@dataclass(frozen=True, kw_only=True)
class TracesRateSettings(OfRunSettings):
    """Settings of `rollouts_to_rate`."""

    limit: int = limit_of("rollouts to ask about")


@dataclass(frozen=True, kw_only=True)
class TracesCloseSettings(Settings):
    """Settings of `close_rollouts`."""

    idle_minutes: float = setting(60.0, "End the rollouts whose last LM call is at least this many minutes ago.", ge=0)


@dataclass(frozen=True, kw_only=True)
class TracesImportSettings(Settings):
    """Settings of `import_rollouts`."""

    score: str | None = setting(None, "Name of the score to import if a trace has several.", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class TracesExportSettings(OfRunSettings):
    """Settings of `export_rollouts`."""

    program: str | None = selected("Only programs whose name contains this text.")
    phase: str | None = selected("Only this phase, such as deployed for rollouts of production.")
    since: str | None = selected("Only started since: 30m, 12h, 7d, or a date such as 2026-11-23.", metavar="WHEN")
    tenants: Sequence[str] = setting(
        (), "Also rollouts of this tenant; repeatable.", flag="--tenant", metavar="NAME", many=True
    )
    content: bool = setting(
        True, "With inputs, outputs and messages.", flag="--no-content",
        flag_help="Without inputs, outputs and messages: only names, counts, times, costs and scores.",
    )  # fmt: skip
    endpoint: str | None = setting(
        None, "OTLP/HTTP address, to which /v1/traces is added; by default $OTEL_EXPORTER_OTLP_ENDPOINT.", metavar="URL"
    )


@dataclass(frozen=True, kw_only=True)
class TracesForgetSettings(Settings):
    """Settings of `forget_subject`."""

    tenant: str | None = selected("Erase only what is of this tenant.", metavar="NAME")
    versions: str = setting(
        "name",
        "Versions of agents that hold the person's data: name lists them; retire takes them out of all aliases but "
        "champion and out of deployments, permanently.",
        choices=("name", "retire"),
    )


@dataclass(frozen=True, kw_only=True)
class StoredJudgeSettings(JudgeModelSettings):
    """Settings of the model of a rubric's judges where no program runs, whose model could judge."""

    judge_model: str | None = setting(
        None, "Model of the rubric's judges; by default the one that a judge's file names."
    )
    judge_api_base: str | None = api_base("the judges' model")
    judge_thinking: int | str | None = thinking_of("the rubric's judges")
    price: str | None = price_of_model("the judges' model", "")

    OF_JUDGE: ClassVar[tuple[str, ...]] = ("judge_api_base", "judge_api_key_env", "judge_thinking", "price")

    @property
    def judge_price(self) -> str | None:
        return self.price

    def __post_init__(self) -> None:
        check_address(self.judge_api_base, "judge_api_base")
        super().__post_init__()
        unused = self.changed(*self.OF_JUDGE)
        if unused and self.judge_model is None:
            raise ConfigError(f"{unused[0]}={getattr(self, unused[0])!r} would have no effect without judge_model")


@dataclass(frozen=True, kw_only=True)
class TracesScoreSettings(StoredJudgeSettings):
    """Settings of `score_rollouts`."""

    rubric: str = rubric_of()
    runs: Sequence[str] = setting((), "Only rollouts of this run; repeatable.", flag="--run", many=True, project=False)
    again: bool = setting(False, "Also score rollouts that have a score, and replace it.", project=False)
    threads: int | None = setting(
        None, "Number of rollouts scored at the same time; by default chosen for the judges' model.", ge=1
    )
    task_timeout: float = setting(
        DEFAULT_S,
        "Time limit in seconds of one check or one judge; beyond it the criterion is unscored.",
        gt=0,
        metavar="SECONDS",
    )
    preflight: bool = preflight_of(
        "Stop if a judge leaves each of the first three rollouts with an answer unscored.",
        "Continue if a judge leaves the first three rollouts with an answer unscored.",
    )
