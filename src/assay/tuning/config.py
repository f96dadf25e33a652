"""Settings of a search over agent parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from assay.errors import ConfigError
from assay.jobs import RunConfig
from assay.optimizers.metrics import Budget
from assay.optimizers.parameters import SearchConfig
from assay.optimizers.parameters.space import check_ranges
from assay.traces.store import check_url

__all__ = ["TuneConfig"]

METHODS = ("optuna", "policy")
_CAPS = ("max_calls", "max_search_calls", "max_tokens", "max_cost_usd")


@dataclass(frozen=True, kw_only=True)
class TuneConfig(RunConfig):
    """Settings of a search over agent parameters; `parameters` are fixed ones. See `SearchConfig` for those of the search.

    Attributes:
        ranges: of searched parameters, (lowest, highest); all that act where empty.
        also: folders of further compiled artifacts of this program, tried as one more dimension.
        samples: runs of each task in a trial.
        study: name of a study to begin or to join; by default the run's own.
        storage: database URL of the study; by default beside the store, or its own database where that is a server.
        workers: processes on this machine that share the study; each has an equal part of the caps. `worker` is a process's number.
        method: `optuna`, or `policy`: a network that learns which parameter to move, for `episodes` of `tasks_per_episode` train
            tasks (all where None), by `learning_rate`: how fast the parameters move (30 times it is the largest share of its range that a
            parameter moves in an episode, at most 0.5).
        margin: how much lower a score may be, in [0, 1), for parameters that need fewer tokens to replace the default: the whole
            interval of the paired gain must lie above -margin (non-inferiority). A part of the job: another margin is another job.
    """

    kind: str = "tune"
    optimizer: str = "parameters"
    method: str = "optuna"
    trials: int = 60
    sampler: str = "tpe"
    pruner: str = "auto"
    objectives: Sequence[str] = ("score",)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    also: Sequence[str] = ()
    prune_at: float = 0.1
    block: int = 5
    samples: int = 1
    budget: Mapping[str, float] = field(default_factory=dict)
    study: str | None = None
    storage: str | None = None
    workers: int = 1
    worker: int = 0
    episodes: int = 10
    tasks_per_episode: int | None = None
    learning_rate: float = 0.01
    margin: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.margin < 1:
            raise ConfigError(f"margin={self.margin!r} must be at least 0 and below 1: how much score fewer tokens may cost")
        if self.method not in METHODS:
            raise ConfigError(f"method={self.method!r} must be one of {', '.join(METHODS)}")
        if self.episodes < 1 or (self.tasks_per_episode is not None and self.tasks_per_episode < 1):
            raise ConfigError(f"episodes={self.episodes!r} and tasks_per_episode={self.tasks_per_episode!r} must be at least 1")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate={self.learning_rate!r} must be a finite number above 0")
        if self.storage:
            check_url(self.storage)
        if self.workers < 1 or (self.workers > 1 and self.method == "policy"):
            raise ConfigError(f"workers={self.workers!r} must be at least 1, and a policy walks alone")
        if self.method == "policy" and (tuple(self.objectives) != ("score",) or self.study or self.storage):
            raise ConfigError("a policy learns from the metrics and keeps no study; objectives, study and storage go with method='optuna'")
        if self.method == "policy" and (self.sampler, self.pruner) != ("tpe", "auto"):
            raise ConfigError("a policy samples and prunes nothing; sampler and pruner go with method='optuna'")
        if self.method == "policy" and (idle := _given(self, "trials", "prune_at", "block")):
            raise ConfigError(f"{', '.join(idle)} would have no effect on a policy: they go with method='optuna'")
        if self.method == "optuna" and (idle := _given(self, "episodes", "tasks_per_episode", "learning_rate")):
            raise ConfigError(f"{', '.join(idle)} would have no effect on a search: they go with method='policy'")
        if self.method == "policy" and self.also:
            raise ConfigError("a policy moves the parameters of one program; choices among artifacts go with method='optuna'")
        if self.samples < 1:
            raise ConfigError(f"samples={self.samples!r} must be at least 1")
        if wrong := sorted(set(self.budget) - set(asdict(Budget()))):
            raise ConfigError(f"a budget has {', '.join(asdict(Budget()))}, not {wrong}")
        check_ranges(self.ranges, self.parameters)
        self.search  # noqa: B018 - its settings are checked before anything is opened

    @property
    def need(self) -> tuple[str, ...]:
        """Splits that must not be empty."""
        return ("val", "gate", "test") if self.method == "optuna" else ("train", "val", "gate", "test")

    @property
    def search(self) -> SearchConfig:
        return SearchConfig(
            trials=self.trials, sampler=self.sampler, pruner=self.pruner, objectives=tuple(self.objectives), block=self.block, seed=self.seed,
            prune_at=self.prune_at,
            budget=Budget(**self.budget),
        )  # fmt: skip

    def of_one_worker(self) -> "TuneConfig":
        """The settings of one of several processes (`worker`, from 0): its part of every cap. The parts add up to the whole."""
        caps: dict[str, Any] = {name: self._part(cap, whole=name != "max_cost_usd") for name in _CAPS if (cap := getattr(self, name)) is not None}
        return replace(self, **caps)

    def _part(self, cap: float, *, whole: bool) -> float:
        return cap // self.workers + (self.worker < cap % self.workers) if whole else cap / self.workers


def _given(config: TuneConfig, *names: str) -> list[str]:
    """Those of the settings that are not the defaults."""
    defaults = {item.name: item.default for item in fields(TuneConfig)}
    return [name for name in names if getattr(config, name) != defaults[name]]
