"""The file of a loop (YAML): what `assay loop start` reads, and every run of the loop."""

import hashlib
from collections.abc import Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le

from assay.commands import command_class
from assay.commands.deploy import StartOptions
from assay.deployment.plan import Hook
from assay.deployment.settings import PoolSettings
from assay.errors import ConfigError, DeploymentError
from assay.jobs.groups import ScoringSettings
from assay.support.names import nearest
from assay.support.options import Count, Items, Positive, Settings, Share, options_of
from assay.support.yaml_files import load_settings

if TYPE_CHECKING:
    from assay.deployment.loops import Loops

METHODS = ("compile", "improve")


class LoopLimits(Settings):
    """Limits of what `assay loop status` shows."""

    convergence: Share = 0.9
    """Smallest share of improvements that ended and converged."""

    forgetting: Share = 0.05
    """Largest loss of a task type against the version that the champion replaced, once it is shown."""

    hacks: Count = 0
    """Largest number of detected hacks of the rubric."""

    clean: Share = 0.95
    """Smallest share of clean rollouts in the pool."""

    live: Share | None = None
    """Smallest mean score in production; by default that of the version that the champion replaced."""

    suite: Share | None = None
    """Smallest pass rate on the validation suite; by default suite_pass_rate."""

    deployments: Share = 0.95
    """Smallest share of deployments that succeeded."""

    window_days: Annotated[float, Gt(0)] = 7.0
    """Production of so many days is shown as live."""


class LoopSettings(Settings):
    """The settings of a loop."""

    rubric: str
    """Rubric of production and of the improvement."""

    method: str = "compile"
    """compile, improve, or FILE.py:FUNCTION of your own (see the how-to)."""

    options: Mapping[str, Any] | None = None
    """Settings of the method, named as in Python."""

    scoring: ScoringSettings | None = None
    """judge_model and other settings of `assay traces score`."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    """Settings of `assay loop pool`."""

    deploy: StartOptions = field(default_factory=StartOptions)
    """Settings of `assay deploy start`."""

    limits: LoopLimits = field(default_factory=LoopLimits)
    """Limits of the figures."""

    events: Items[Hook] = ()
    """Hooks, with url, url_env or command."""

    every_days: Annotated[float, Ge(0)] = 7.0
    """Smallest time between two improvements."""

    min_new_tasks: Count = 1
    """Smallest number of tasks that the pool before did not have."""

    max_calls: Count | None = None
    """Budget of LM calls in seven days."""

    max_cost_usd: Annotated[float, Ge(0)] | None = None
    """Budget in dollars in seven days."""

    attempts: Positive = 5
    """How often a step that fails, or whose process is killed, is begun."""

    lease_s: Annotated[float, Ge(1), Le(3600)] = 30.0
    """Seconds without a sign of life after which another process takes the loop over."""

    def check(self) -> None:
        object.__setattr__(self, "options", dict(self.options or {}))
        if self.method in METHODS:
            known = [*_options_of(self.method), "monitor"]
            for name in self.options or {}:
                if name not in known:
                    hint = f"Did you mean {near!r}?" if (near := nearest(str(name), known)) else ""
                    raise ConfigError("is not a setting", field=f"options.{name}", hint=hint)
        elif ".py:" not in self.method:
            raise ConfigError(f"must be compile, improve or FILE.py:FUNCTION, not {self.method!r}", field="method")
        if self.min_new_tasks > self.pool.max_tasks:
            raise ConfigError(
                f"must be at most `max_tasks` of the pool ({self.pool.max_tasks}), not {self.min_new_tasks}: a pool "
                "never has more new tasks than tasks",
                field="min_new_tasks",
            )


def _options_of(method: str) -> list[str]:
    """The keywords of `assay.compile` or `assay.improve`."""
    return [item.name for item in fields(command_class(method))]


def load_loop(path: str | Path) -> LoopSettings:
    """Reads the file of a loop. Files that it names are searched next to it first.

    Raises:
        ConfigError: there is no such file, it is not YAML, or a setting breaks its rule.
    """
    settings, folder = load_settings(path, LoopSettings, "loop"), Path(path).absolute().parent

    def placed(value: Any) -> Any:
        """The file of this name next to the file of the loop, where there is one; else the value."""
        return str(folder / value) if isinstance(value, str) and (folder / value).exists() else value

    def with_places(part: Any) -> Any:
        kind: Any = type(part)
        paths = [name for name, option in options_of(kind).items() if option.flag.path]
        return replace(part, **{name: placed(getattr(part, name)) for name in paths})

    source, python, function = settings.method.partition(".py:")
    options = settings.options or {}
    return replace(
        settings, rubric=placed(settings.rubric), method=placed(f"{source}.py") + f":{function}" if python else source,
        pool=with_places(settings.pool), deploy=with_places(settings.deploy),
        options={name: placed(value) if name == "monitor" else value for name, value in options.items()},
    )  # fmt: skip


def started_loop(loops: "Loops", agent: str, file: str | Path | None = None) -> LoopSettings:
    """The settings of a started loop.

    The store has the path and the hash of the file and not its content: commands and Python files that it names are
    run, and whoever may write to the store must not choose them.

    Raises:
        DeploymentError: the agent has no loop, or the file is missing or another one than at the start.
    """
    loop = loops.known(agent)
    path = Path(loop.file if file is None else file)
    if not path.is_file():
        raise DeploymentError(
            f"there is no {path} on this machine", hint="Copy the file of the loop here, and name it with `file`"
        )
    if loop_digest(path) != loop.sha256:
        raise DeploymentError(
            f"{path} is not the file that the loop of {agent!r} was started with: start it again with the changed "
            f"file (assay loop start {agent} --file {path})"
        )
    return load_loop(path)


def loop_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
