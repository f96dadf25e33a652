"""An Optuna search over agent parameters: trials that are losing stop after few tasks, and any number of processes share one study."""

import json
import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.errors import Cancelled, ConfigError, ModelError, ProgramError, StopRun, StoreError
from assay.optimizers.metrics import Budget, TaskRun, measure
from assay.optimizers.parameters.arena import Arena
from assay.optimizers.parameters.space import Point, Space
from assay.optimizers.session import Progress

if TYPE_CHECKING:
    import optuna

__all__ = ["OBJECTIVES", "PRUNERS", "SAMPLERS", "SearchConfig", "SearchOutcome", "TrialResult", "open_study", "outcome_of", "search"]

SAMPLERS = ("tpe", "gp", "cmaes", "nsga2", "random", "grid")
PRUNERS = ("auto", "wilcoxon", "hyperband", "none")
OBJECTIVES = {"score": "maximize", "tokens": "minimize", "latency": "minimize", "cost": "minimize"}
_STATES = ("complete", "pruned", "failed")
_P_PRUNED = 0.2  # one-sided p of being worse than the best, under which a trial stops
_LEVEL = 0.01  # of the score: trials that are level with the best, of which the one with the fewest tokens is taken
_HEARTBEAT_S = 15
_RETRIES = 3
_OPENINGS = 5
_SCORED = 0.8  # share of a trial's runs that must have a score


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Settings of one search.

    Attributes:
        trials: finished trials (complete or pruned) that the study shall have, of all processes together.
        sampler: `tpe`, `gp` (needs torch), `cmaes` (needs cmaes), `nsga2`, `random` or `grid`.
        pruner: `wilcoxon` (Optuna's, over blocks of tasks against the best trial), `hyperband`, `none`, or `auto`: wilcoxon where
            there is one objective, none where there are several (Optuna prunes none of those).
        objectives: of `score`, `tokens`, `latency` and `cost`, the means a task.
        block: tasks run between two looks of the pruner.
        budget: of a run, for its efficiency.
    """

    trials: int = 60
    sampler: str = "tpe"
    pruner: str = "auto"
    objectives: Sequence[str] = ("score",)
    block: int = 5
    seed: int = 0
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        for name, value, known in (("sampler", self.sampler, SAMPLERS), ("pruner", self.pruner, PRUNERS)):
            if value not in known:
                raise ConfigError(f"{name}={value!r} must be one of {', '.join(known)}")
        if self.trials < 1 or self.block < 1:
            raise ConfigError(f"trials={self.trials!r} and block={self.block!r} must be at least 1")
        unknown = sorted(set(self.objectives) - set(OBJECTIVES))
        if unknown or not self.objectives or len(set(self.objectives)) != len(self.objectives):
            raise ConfigError(f"objectives {list(self.objectives)} must be different ones of {', '.join(OBJECTIVES)}")
        if len(self.objectives) > 1 and self.pruner not in ("auto", "none"):
            raise ConfigError(f"pruner={self.pruner!r} goes with one objective; with {len(self.objectives)} nothing is pruned")
        if self.sampler == "cmaes" and len(self.objectives) > 1:
            raise ConfigError("sampler='cmaes' goes with one objective; take tpe, gp or nsga2 for several")

    @property
    def prunes(self) -> str:
        if self.pruner != "auto":
            return self.pruner
        return "wilcoxon" if len(self.objectives) == 1 else "none"


@dataclass(frozen=True)
class TrialResult:
    """One finished trial. `state`: `complete`, `pruned` or `failed` (with `error`); `scores` by task, None where unscored."""

    number: int
    point: Point
    state: str
    values: Mapping[str, float | None]
    scores: Mapping[str, float | None]
    metrics: Mapping[str, float | None]
    tokens: float | None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number, **self.point.to_dict(), "state": self.state, "values": dict(self.values), "n": len(self.scores),
            "metrics": dict(self.metrics), "tokens": self.tokens, "error": self.error,
        }  # fmt: skip


@dataclass
class SearchOutcome:
    """What a search found. `saved`: the share of the task runs that pruning saved. `front`: numbers of the Pareto front's
    trials, with one objective the best alone."""

    best: TrialResult
    default: TrialResult | None
    trials: list[TrialResult]
    task_runs: int
    saved: float
    front: list[int]
    study: "optuna.Study | None"
    notes: list[str] = field(default_factory=list)


def open_study(
    name: str, url: str | None, space: Space, config: SearchConfig, *, worker: int = 0, of: Mapping[str, Any] | None = None
) -> "optuna.Study":
    """A study in Optuna's storage at `url` (in memory where None), new or gone on with.

    Args:
        worker: a number that no other process on this study has.
        of: what is searched on: whatever else must be the same for trials to be held against each other.
    Raises:
        ConfigError: a study of this name searches something else; the message says what differs.
        StoreError: the storage cannot be opened.
    """
    import optuna
    import sqlalchemy as sa

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        for attempt in range(_OPENINGS):
            try:
                study = optuna.create_study(
                    storage=_storage(url) if url else None, study_name=name, load_if_exists=True, pruner=_pruner(config),
                    directions=[OBJECTIVES[objective] for objective in config.objectives],
                )  # fmt: skip
                break
            except (ConfigError, ModuleNotFoundError):
                raise
            except Exception as error:  # several processes may be creating the tables at once
                if attempt + 1 == _OPENINGS or not isinstance(error.__cause__ or error, sa.exc.DBAPIError | optuna.exceptions.OptunaError):
                    why = f"{type(error).__name__}: {error}".partition("\n")[0]
                    raise StoreError(f"the study {name!r} at {_shown(url)} cannot be opened: {why}") from error
                time.sleep(0.2 * (attempt + 1))
    # a sampler that began anew from one seed would try again what it tried, here before a stop or in another process
    seed = int(np.random.SeedSequence([config.seed, worker, len(study.get_trials(deepcopy=False))]).generate_state(1)[0])
    study.sampler = _sampler(space, replace(config, seed=seed))
    wanted = {"space": {**space.describe(), **(of or {})}, "objectives": list(config.objectives)}
    known = study.user_attrs.get("assay")
    if known is None:
        study.set_user_attr("assay", wanted)
    elif known != json.loads(json.dumps(wanted)):
        raise ConfigError(f"the study {name!r} searches something else: {_difference(known, wanted)}. Give this one another name")
    return study


def _shown(url: str | None) -> str:
    return "memory" if url is None else re.sub(r"(://[^:/@]+):[^@]*@", r"\1:***@", url)


def _difference(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What differs, by name: there, and here."""
    old, new = ({**entry["space"], "objectives": entry["objectives"]} for entry in (known, json.loads(json.dumps(wanted))))
    return "; ".join(f"{key} is {old.get(key)}, not {new.get(key)}" for key in sorted({*old, *new}) if old.get(key) != new.get(key))


def _storage(url: str) -> Any:
    """Optuna's own storage, in which a trial whose process died is tried again."""
    import optuna
    import sqlalchemy as sa

    again = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=_RETRIES)
    options: dict[str, Any] = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    storage = optuna.storages.RDBStorage(
        url, engine_kwargs=options, heartbeat_interval=_HEARTBEAT_S, grace_period=3 * _HEARTBEAT_S, heartbeat_stale_trial_callback=again
    )
    if url.startswith("sqlite"):

        def quick(connection: Any, _: object) -> None:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")

        sa.event.listen(storage.engine, "connect", quick)
        storage.engine.dispose()
    return storage


def _sampler(space: Space, config: SearchConfig) -> Any:
    import optuna

    samplers = optuna.samplers
    makers: dict[str, Callable[[], Any]] = {
        "tpe": lambda: samplers.TPESampler(seed=config.seed, n_startup_trials=min(10, max(2, config.trials // 4)), constant_liar=True),
        "gp": lambda: samplers.GPSampler(seed=config.seed, deterministic_objective=False),
        "cmaes": lambda: samplers.CmaEsSampler(seed=config.seed, warn_independent_sampling=False),
        "nsga2": lambda: samplers.NSGAIISampler(seed=config.seed, population_size=max(4, min(50, config.trials // 4))),
        "random": lambda: samplers.RandomSampler(seed=config.seed),
        "grid": lambda: samplers.GridSampler(space.grid(), seed=config.seed),
    }
    if config.sampler == "grid" and len(space.programs) > 1 and len({tuple(space.searched(p)) for p in space.programs}) > 1:
        raise ConfigError("sampler='grid' needs programs with the same parameters; take tpe")
    try:
        return makers[config.sampler]()
    except ImportError as error:
        raise ConfigError(f"sampler={config.sampler!r} needs a package that is not installed: {error}") from None


def _pruner(config: SearchConfig) -> Any:
    import optuna

    if config.prunes == "wilcoxon":
        return optuna.pruners.WilcoxonPruner(p_threshold=_P_PRUNED)
    return optuna.pruners.HyperbandPruner(min_resource=1) if config.prunes == "hyperband" else optuna.pruners.NopPruner()


def search(
    arena: Arena, tasks: Sequence[Any], space: Space, config: SearchConfig, study: "optuna.Study", *, defaults: Sequence[Point] = (),
    progress: Progress | None = None, helping: bool = False,
) -> SearchOutcome:  # fmt: skip
    """Tries points until the study has as many finished trials as asked for, the defaults first.

    Args:
        helping: whether another process sees the study through: this one stops as soon as the trials at work there and here
            are enough.
    Raises:
        BudgetExceeded, Cancelled: the trial at work is put back, to be tried again; everything finished is in the study.
        ModelError: no trial could be scored at all.
    """
    import optuna
    from optuna.trial import TrialState

    shown = progress or Progress()
    objective = _Objective(arena, list(tasks), space, config, shown)
    for point in defaults if not study.get_trials(deepcopy=False) else ():
        study.enqueue_trial(space.asked(point), user_attrs={"default": True}, skip_if_exists=True)

    def states() -> Counter[Any]:
        return Counter(trial.state for trial in study.get_trials(deepcopy=False))

    def enough(study: "optuna.Study", _: Any) -> None:
        advance(1)
        found = states()
        done, failed = found[TrialState.COMPLETE] + found[TrialState.PRUNED], found[TrialState.FAIL]
        working = found[TrialState.RUNNING] if helping else 0
        if done + working >= config.trials or (failed >= _RETRIES + 2 and not done) or failed > config.trials:
            study.stop()

    with shown.bar("trials", config.trials) as advance, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        found = states()
        done = found[TrialState.COMPLETE] + found[TrialState.PRUNED]
        advance(done)
        if done < config.trials:
            try:
                _optimized(study, objective, enough)
            except optuna.exceptions.StorageInternalError as error:
                raise StoreError(f"the study's storage is gone: {error}. Start it, and go on with --resume") from error
    return outcome_of(study, space, config, len(tasks))


def _optimized(study: "optuna.Study", objective: Any, enough: Callable[..., None]) -> None:
    """Optuna's loop, gone on with where another process has declared a trial of this one dead, after a sleep, say."""
    import optuna

    while True:
        try:
            study.optimize(objective, callbacks=[enough], catch=(ProgramError, ModelError))
            return
        except optuna.exceptions.UpdateFinishedTrialError:
            continue
        except ValueError as error:
            if "Cannot tell" not in str(error):
                raise


class _Objective:
    """One trial: blocks of tasks, until all are done or the pruner sees that it is losing."""

    def __init__(self, arena: Arena, tasks: list[Any], space: Space, config: SearchConfig, progress: Progress) -> None:
        self.arena, self.tasks, self.space, self.config, self.progress = arena, tasks, space, config, progress

    def __call__(self, trial: Any) -> Any:
        import optuna

        point = self.space.suggest(trial)
        runs: list[TaskRun] = []
        try:
            for step, start in enumerate(range(0, len(self.tasks), self.config.block)):
                block = self.arena.run(point, self.tasks[start : start + self.config.block])
                runs += block
                if self._losing(trial, step, block, runs) and start + self.config.block < len(self.tasks):
                    self._keep(trial, runs)
                    raise optuna.TrialPruned
        except StopRun:
            self._put_back(trial)
            raise
        except KeyboardInterrupt:
            self._put_back(trial)
            raise Cancelled("stopped by the user") from None
        except (ProgramError, ModelError) as error:
            trial.set_user_attr("error", str(error))
            raise
        self._keep(trial, runs)
        scored = sum(run.score is not None and math.isfinite(run.score) for run in runs)
        if scored < _SCORED * len(runs):
            why = next((run.error for run in runs if run.error), "no reason was given")
            trial.set_user_attr("error", f"score could not be measured on {len(runs) - scored} of {len(runs)} runs: {why}")
            raise ModelError(f"score could not be measured on {len(runs) - scored} of {len(runs)} runs: {why}")
        values = _values(runs, self.config.objectives)
        if missing := [name for name, value in values.items() if value is None]:
            why = next((run.error for run in runs if run.error), "no run has it")
            trial.set_user_attr("error", f"{', '.join(missing)} could not be measured: {why}")
            raise ModelError(f"{', '.join(missing)} could not be measured: {why}")
        self.progress.say(f"  trial {trial.number}: {_said(point, values)}")
        return list(values.values())

    def _losing(self, trial: Any, step: int, block: Sequence[TaskRun], runs: Sequence[TaskRun]) -> bool:
        if self.config.prunes == "none":
            return False
        # the Wilcoxon test pairs what was measured on the same tasks; halving compares how far each came
        value = _values(block if self.config.prunes == "wilcoxon" else runs, self.config.objectives)[self.config.objectives[0]]
        if value is None:
            return False
        trial.report(value, step)
        return bool(trial.should_prune())

    def _keep(self, trial: Any, runs: Sequence[TaskRun]) -> None:
        scores: dict[str, list[float | None]] = {}
        for run in runs:
            scores.setdefault(run.task_id, []).append(run.score)
        means = {task: _mean(values) for task, values in scores.items()}
        tokens = _mean([run.tokens for run in runs])
        trial.set_user_attr("found", {"scores": means, "metrics": measure(runs, budget=self.config.budget).to_dict(), "tokens": tokens})

    @staticmethod
    def _put_back(trial: Any) -> None:
        """Ends a trial that was cut short, and has its point tried again by whoever goes on."""
        from optuna.trial import TrialState

        study = trial.study
        study.enqueue_trial(trial.params, user_attrs={key: value for key, value in trial.user_attrs.items() if key == "default"})
        study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def _mean(values: Sequence[float | int | None]) -> float | None:
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def _values(runs: Sequence[TaskRun], objectives: Sequence[str]) -> dict[str, float | None]:
    """The means a run of what is searched for; None where no run has it."""
    columns: dict[str, list[float | int | None]] = {
        "score": [run.score for run in runs], "tokens": [run.tokens for run in runs], "latency": [run.seconds for run in runs],
        "cost": [run.cost_usd for run in runs],
    }  # fmt: skip
    return {name: _mean(columns[name]) for name in objectives}


def _said(point: Point, values: Mapping[str, float | None]) -> str:
    settings = ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in point.parameters.items())
    return f"{', '.join(f'{name} {value:.3g}' for name, value in values.items())} with {settings}"


def outcome_of(study: "optuna.Study", space: Space, config: SearchConfig, tasks: int) -> SearchOutcome:
    trials = [_result(trial, space, config) for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    complete = [trial for trial in trials if trial.state == "complete"]
    if not complete:
        reasons = [trial.error for trial in trials if trial.error]
        raise ModelError(f"none of {len(trials)} trials could be scored: {reasons[-1] if reasons else 'all were cut short'}")
    ran, done = sum(len(trial.scores) for trial in trials), [trial for trial in trials if trial.state != "failed"]
    first = [trial for trial in study.get_trials(deepcopy=False) if trial.user_attrs.get("default") and trial.state.is_finished()]
    default = min((_result(trial, space, config) for trial in first), key=lambda trial: _STATES.index(trial.state), default=None)
    front = [trial.number for trial in study.best_trials]
    best = _best([trial for trial in complete if len(config.objectives) == 1 or trial.number in front], config)
    return SearchOutcome(best, default, trials, ran, 1 - sum(len(t.scores) for t in done) / max(1, tasks * len(done)), front, study)


def _best(trials: Sequence[TrialResult], config: SearchConfig) -> TrialResult:
    """The best by the first objective; of those that are level with it the one with the fewest tokens."""
    first = config.objectives[0]
    sign = 1 if OBJECTIVES[first] == "maximize" else -1
    top = max(sign * (trial.values[first] or 0.0) for trial in trials)
    reach = _LEVEL if first == "score" else 0.0
    level = [trial for trial in trials if sign * (trial.values[first] or 0.0) >= top - reach]
    return min(level, key=lambda trial: (math.inf if trial.tokens is None else trial.tokens, trial.number))


def _result(trial: Any, space: Space, config: SearchConfig) -> TrialResult:
    from optuna.trial import TrialState

    found = trial.user_attrs.get("found") or {"scores": {}, "metrics": {}, "tokens": None}
    state = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}.get(trial.state, "failed")
    values = dict(zip(config.objectives, trial.values or [None] * len(config.objectives), strict=True))
    return TrialResult(
        trial.number, space.point(trial.params), state, values, found["scores"], found["metrics"], found["tokens"],
        trial.user_attrs.get("error"),
    )  # fmt: skip
