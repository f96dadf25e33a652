"""Settings of `assay loop`: the file of a loop, and its schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.deployment.plan import Hook
from assay.deployment.settings import PoolSettings
from assay.errors import ConfigError
from assay.runs.settings.commands import ImproveSettings
from assay.runs.settings.deploy import StartSettings
from assay.support.settings import Settings, nearest, part, parts, setting, settings_of
from assay.support.yaml_files import load_settings

SCHEDULERS = ("systemd", "cron")
METHODS = ("compile", "improve")
_PATHS = ("rubric", "plan", "suite_data", "suite_rubric", "replay_rubric", "privacy_key", "against", "monitor")
_SCORING = ("judge_model", "judge_api_base", "judge_api_key_env", "judge_thinking", "price", "threads", "task_timeout")


@dataclass(frozen=True, kw_only=True)
class LoopLimits(Settings):
    """Limits of what `assay loop status` shows."""

    convergence: float = setting(0.9, "Smallest share of improvements that ended and converged.", ge=0, le=1)
    forgetting: float = setting(
        0.05,
        "Largest loss of a task type against the version that the champion replaced, once it is shown.",
        ge=0,
        le=1,
    )
    hacks: int = setting(0, "Largest number of detected hacks of the rubric.", ge=0)
    clean: float = setting(0.95, "Smallest share of clean rollouts in the pool.", ge=0, le=1)
    live: float | None = setting(
        None,
        "Smallest mean score in production; by default that of the version that the champion replaced.",
        ge=0,
        le=1,
    )
    suite: float | None = setting(
        None, "Smallest pass rate on the validation suite; by default suite_pass_rate.", ge=0, le=1
    )
    deployments: float = setting(0.95, "Smallest share of deployments that succeeded.", ge=0, le=1)
    window_days: float = setting(7.0, "Production of so many days is shown as live.", gt=0)


@dataclass(frozen=True, kw_only=True)
class LoopSettings(Settings):
    """The file of a loop (YAML).

    Attributes:
        rubric: scores the rollouts of production, and what is improved.
        method: compile, improve, or `FILE.py:FUNCTION` of your own (see the how-to).
        options: settings of the method, named as in Python.
        scoring: judge_model and other settings of `assay traces score`.
        pool, deploy, limits: mappings of the settings of `assay loop pool`, of `assay deploy start`, and of the limits.
        events: hooks, with url, url_env or command.
    """

    rubric: str = setting(help="Rubric of production and of the improvement.")
    method: str = setting("compile", "compile, improve, or FILE.py:FUNCTION.")
    options: Mapping[str, Any] | None = None
    scoring: Mapping[str, Any] | None = None
    pool: Any = None
    deploy: Any = None
    limits: Any = None
    events: Sequence[Any] = ()
    every_days: float = setting(7.0, "Smallest time between two improvements.", ge=0)
    min_new_tasks: int = setting(1, "Smallest number of tasks that the pool before did not have.", ge=0)
    max_calls: int | None = setting(None, "Budget of LM calls in seven days.", ge=0)
    max_cost_usd: float | None = setting(None, "Budget in dollars in seven days.", ge=0)
    attempts: int = setting(5, "How often a step that fails, or whose process is killed, is begun.", ge=1)
    lease_s: float = setting(
        30.0, "Seconds without a sign of life after which another process takes the loop over.", ge=1, le=3600
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("pool", PoolSettings), ("deploy", StartSettings), ("limits", LoopLimits)):
            value = getattr(self, name)
            object.__setattr__(self, name, part(kind, {} if value is None else value, name))
        object.__setattr__(self, "events", parts(Hook, self.events, "events"))
        object.__setattr__(self, "options", dict(self.options or {}))
        object.__setattr__(self, "scoring", dict(self.scoring or {}))
        if self.method in METHODS:
            _check_names("options", self.options or {}, _options_of(self.method))
        elif ".py:" not in self.method:
            raise ConfigError(f"method={self.method!r} must be compile, improve or FILE.py:FUNCTION")
        _check_names("scoring", self.scoring or {}, _SCORING)
        if self.min_new_tasks > self.pool.max_tasks:
            raise ConfigError(
                f"min_new_tasks={self.min_new_tasks!r} must be at most max_tasks of the pool ({self.pool.max_tasks}): "
                "a pool never has more new tasks than tasks"
            )


@dataclass(frozen=True, kw_only=True)
class LoopInstallSettings(Settings):
    """Settings of `schedule_files`."""

    kind: str = setting("systemd", "Scheduler: systemd (a service and its timer) or cron (a line).", choices=SCHEDULERS)
    every_minutes: int = setting(
        5,
        "Minutes between two runs; for cron a divisor of 60.",
        ge=1,
        le=1440,
        flag="--every",
        metavar="MINUTES",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "cron" and (self.every_minutes > 59 or 60 % self.every_minutes):
            raise ConfigError(f"every_minutes={self.every_minutes!r} must be a divisor of 60 below it with kind='cron'")


def _check_names(what: str, names: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            hint = f". Did you mean {near!r}?" if (near := nearest(str(name), known)) else ""
            raise ConfigError(f"{what} has no setting {name!r}{hint}")


def _options_of(method: str) -> Sequence[str]:
    from assay.runs.groups import PromptJob  # which imports this package
    from assay.support.options import options_of

    return ["thinking_margin", *options_of(PromptJob)] if method == "compile" else [*settings_of(ImproveSettings)]


def load_loop(path: str | Path) -> LoopSettings:
    """Reads the file of a loop. Files that it names are searched next to it first.

    Raises:
        ConfigError: there is no such file, it is not YAML, or a setting breaks its rule.
    """
    settings = load_settings(path, LoopSettings, "loop")
    folder = Path(path).absolute().parent
    method = settings.method
    if method not in METHODS:
        source, _, function = method.partition(".py:")
        method = f"{_placed(f'{source}.py', folder)}:{function}"
    return replace(
        settings, rubric=_placed(settings.rubric, folder), method=method, pool=_all_placed(settings.pool, folder),
        deploy=_all_placed(settings.deploy, folder),
        options={k: _placed(v, folder) if k in _PATHS else v for k, v in (settings.options or {}).items()},
    )  # fmt: skip


def _all_placed(part: Any, folder: Path) -> Any:
    changed = {name: _placed(getattr(part, name), folder) for name in _PATHS if hasattr(part, name)}
    return replace(part, **changed)


def _placed(value: Any, folder: Path) -> Any:
    """The file of this name next to the file of the loop, where there is one; else the value."""
    if isinstance(value, str) and (folder / value).exists():
        return str(folder / value)
    return value
