"""Settings of `tune` and of `parameter_impact`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import ConfigError
from assay.runs.settings.fields import RESUMED, state_of
from assay.runs.settings.shared import (
    CurriculumSettings,
    DecisionSettings,
    ExecutorSettings,
    SearchSettings,
)
from assay.support.presets import apply_preset
from assay.support.settings import nearest, one_of, setting

if TYPE_CHECKING:
    from typing import Self

    from assay.optimizers.parameters import SearchConfig

_METHODS = ("optuna", "policy")
_CAPS = ("max_calls", "max_search_calls", "max_tokens", "max_cost_usd")
_OF_SEARCH = ("trials", "prune_at", "block", "sampler", "pruner", "objectives", "study", "storage", "also")
_OF_POLICY = ("episodes", "tasks_per_episode", "learning_rate")
_OF_PRUNING = ("prune_at", "block")


@dataclass(frozen=True, kw_only=True)
class ParameterSettings(ExecutorSettings):
    """Settings shared by `tune` and `parameter_impact`. `parameters` are fixed, not searched."""

    ranges: Mapping[str, tuple[float, float]] = setting(
        help="Range to search for a parameter; repeatable. By default all parameters over their whole ranges, and for "
        "a program with a thinking budget probe_margin, stable, confidence and samples of its thinking policy.",
        factory=dict,
        flag="--range",
        metavar="NAME=LOW:HIGH",
    )
    samples: int = setting(1, "Number of runs of each task in a trial.", ge=1)
    budget: Mapping[str, float] = setting(
        help="Number of steps, tokens or seconds at which the efficiency of a run is 0.",
        factory=dict,
        metavar="NAME=VALUE",
    )
    study: str | None = setting(None, "Name of the study to create or join; by default a study of this run alone.")
    storage: str | None = setting(
        None, "URL of the study's database; by default a file next to the store.", metavar="URL", job=RESUMED
    )
    objectives: Sequence[str] = setting(
        ("score",),
        "Objectives, separated by commas: score, tokens, latency, cost. Several give a Pareto front.",
        flag="--objective",
    )

    def __post_init__(self) -> None:
        from assay.evaluation.metrics import Budget
        from assay.optimizers.parameters.space import check_ranges
        from assay.traces.store import check_url

        super().__post_init__()
        if self.storage:
            check_url(self.storage)
        names = [item.name for item in fields(Budget)]
        if unknown := sorted(set(self.budget) - set(names)):
            similar = nearest(unknown[0], names)
            raise ConfigError(
                f"a budget has {', '.join(names)}, not {unknown}" + (f". Did you mean {similar!r}?" if similar else "")
            )
        check_ranges(self.ranges, self.parameters)

    @property
    def searches_thresholds(self) -> bool:
        """Whether the thresholds of a thinking policy can be searched."""
        return True

    @property
    def also(self) -> Sequence[str]:
        """Artifacts whose prompts are tried as well."""
        return ()

    @property
    def without_passwords(self) -> dict[str, Any]:
        from assay.traces.store import url_without_password

        return {
            **super().without_passwords,
            **({"storage": url_without_password(self.storage)} if self.storage else {}),
        }


@dataclass(frozen=True, kw_only=True)
class ImpactSettings(ParameterSettings):
    """Settings of `assay.parameter_impact`.

    The page also shows the plots of `study`; by default of the newest study of the same search.
    """

    kind: str = "impact"
    levels: int = setting(5, "Number of values of each parameter that are measured.", ge=2)


@dataclass(frozen=True, kw_only=True)
class TuneSettings(ParameterSettings, SearchSettings, DecisionSettings, CurriculumSettings):
    """Settings of `assay.tune`; for those of the search see `assay.optimizers.parameters.SearchConfig`.

    `margin` is a non-inferiority margin: parameters with fewer tokens replace the default if the whole interval of the
    paired gain is above -margin. It is part of the job, so that it cannot be changed after the result is known. The
    caps are divided equally among `workers`. With `method="policy"` a network learns which parameter to change; in one
    episode a parameter changes by at most min(0.5, 30 * `learning_rate`) of its range.
    """

    kind: str = "tune"
    optimizer: str = "parameters"  # internal: part of the artifact's name
    state: str | Path | None = state_of()
    worker: int = 0  # internal: index of the worker process, from 0
    also: Sequence[str] = setting(
        (),
        "Compiled artifact of the same program whose prompts are tried as well; repeatable.",
        metavar="ARTIFACT",
        many=True,
        file=True,
    )
    method: str = setting(
        "optuna",
        "Method. optuna: search by trials; policy: reinforcement learning of a network that adjusts the parameters; or "
        "a .toml file of settings such as optimizers/tune.toml.",
        file=True,
    )
    episodes: int = setting(10, "Number of episodes, for --method policy.", ge=1)
    tasks_per_episode: int | None = setting(
        None, "Number of train tasks per episode, for --method policy; by default all.", ge=1
    )
    learning_rate: float = setting(0.01, "Learning rate, for --method policy.", gt=0)
    trials: int = setting(60, "Number of completed trials.", ge=1, job=RESUMED)
    sampler: str = setting("tpe", "Sampler: tpe, gp, cmaes, nsga2, random or grid.")
    pruner: str = setting("auto", "Pruner: wilcoxon, hyperband, none, or auto (wilcoxon if there is one objective).")
    prune_at: float = setting(
        0.1, "One-sided p-value against the best trial below which a trial is pruned.", gt=0, le=0.5
    )
    block: int = setting(5, "Number of tasks between two pruning checks of a trial.", ge=1)
    workers: int = setting(1, "Number of processes on this machine that work on the study.", ge=1, job=RESUMED)
    margin: float = setting(
        0.02,
        "Non-inferiority margin: parameters with fewer tokens replace the default if the gate's interval excludes a "
        "loss in score larger than this.",
        ge=0,
        lt=1,
        why="how much score fewer tokens may cost",
    )

    def __post_init__(self) -> None:
        apply_preset(self, "method", TuneSettings)
        if self.method not in _METHODS:
            raise ConfigError(f"method={self.method!r} {one_of(self.method, _METHODS, other='a .toml file')}")
        super().__post_init__()
        self.search  # noqa: B018 - SearchConfig checks its settings, so that an error comes before the run is opened
        if self.curriculum is not None and (
            unused := [name for name in ("method", "workers", "study", "objectives") if self.changed(name)]
        ):
            raise ConfigError(
                f"{', '.join(unused)} cannot be used with a curriculum, which has a study for each stage, searched by "
                "one process for the score: leave it out",
                flag=", ".join({"objectives": "--objective"}.get(name, f"--{name}") for name in unused),
            )
        if self.method == "policy":
            if self.workers > 1:
                raise ConfigError(
                    f"workers={self.workers!r} needs method='optuna': method='policy' supports only workers=1"
                )
            if unused := self.changed(*_OF_SEARCH):
                raise ConfigError(
                    f"{', '.join(unused)} would have no effect on a policy, which has no study: "
                    "they require method='optuna'"
                )
            return
        if unused := self.changed(*_OF_POLICY):
            raise ConfigError(f"{', '.join(unused)} would have no effect on a search: they require method='policy'")
        if self.pruner == "none" and (unused := self.changed(*_OF_PRUNING)):
            raise ConfigError(f"{' and '.join(unused)} would have no effect with pruner='none', which prunes no trial")

    @property
    def searches_thresholds(self) -> bool:
        return self.method == "optuna"

    @property
    def need(self) -> tuple[str, ...]:
        """Splits that must not be empty."""
        return ("val", "gate", "test") if self.method == "optuna" else ("train", "val", "gate", "test")

    @property
    def search(self) -> "SearchConfig":
        from assay.evaluation.metrics import Budget
        from assay.optimizers.parameters import SearchConfig

        return SearchConfig(
            trials=self.trials,
            sampler=self.sampler,
            pruner=self.pruner,
            objectives=tuple(self.objectives),
            block=self.block,
            seed=self.seed,
            prune_at=self.prune_at,
            budget=Budget(**self.budget),
        )

    def of_one_worker(self) -> "Self":
        """The settings of process number `worker`: with its part of each cap. The parts of all add up to the cap."""
        caps: dict[str, Any] = {
            name: self._part(cap, integer=name != "max_cost_usd")
            for name in _CAPS
            if (cap := getattr(self, name)) is not None
        }
        return replace(self, **caps)

    def _part(self, cap: float, *, integer: bool) -> float:
        return cap // self.workers + (self.worker < cap % self.workers) if integer else cap / self.workers
