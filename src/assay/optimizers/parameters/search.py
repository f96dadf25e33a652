"""Optuna search over agent parameters, with pruning by task; several processes can share one study."""

import hashlib
import importlib.util
import json
import math
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
import sqlalchemy as sa
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState, create_trial

from assay.errors import Cancelled, ConfigError, MissingExtra, ModelError, ProgramError, StopRun, StoreError
from assay.evaluation.metrics import TaskRun, measure
from assay.evaluation.progress import Progress, SilentProgress
from assay.optimizers.parameters.objective import Objective, runs_by_task
from assay.optimizers.parameters.results import REQUEUED, SearchOutcome, first_by_task, outcome_of
from assay.optimizers.parameters.space import Point, Space, in_figures
from assay.optimizers.settings import OBJECTIVES, SearchConfig
from assay.support.addresses import DatabaseAddress
from assay.traces.store.connection import sqlite_pragmas
from assay.traces.store.leases import patiently

# -- Opens a study, and makes its sampler and pruner.


_NEEDS = {"gp": "torch"}  # Optuna raises only in the middle of a search
_RETRIES = 3  # of a trial whose process died
_HEARTBEAT_S = 15
_OPENINGS = 8
_CHECKED = "assay_checked"  # the transaction in which the guard was called last, in the facts of a connection
RUN = "run"  # attribute of a trial: run of the process that works on it


def open_study(
    name: str,
    url: str | None,
    space: Space,
    config: SearchConfig,
    *,
    of: Mapping[str, Any] | None = None,
    guard: Callable[[], None] | None = None,
    begun: bool = False,
) -> optuna.Study:
    """A study in Optuna's storage at `url` (in memory where None), new or continued.

    Args:
        of: everything else that must be equal for trials to be comparable, such as the version of the program.
        guard: called before each change of the study; what it raises prevents the change.
        begun: another process has begun it.
    Raises:
        ConfigError: a study of this name searches something else; the message says what differs. No process has begun
            it.
        StoreError: the storage cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if begun and url and not DatabaseAddress.of(url).exists:
        raise _not_begun(name, url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        for attempt in range(_OPENINGS):
            try:
                storage = study_storage(url, guard) if url else None
                if begun and name not in optuna.get_all_study_names(storage or ""):
                    raise _not_begun(name, url)
                study = optuna.create_study(
                    storage=storage,
                    study_name=name,
                    load_if_exists=True,
                    pruner=_pruner(config),
                    directions=[OBJECTIVES[objective] for objective in config.objectives],
                )
                break
            except (ConfigError, ModuleNotFoundError):
                raise
            except Exception as error:  # several processes may be creating the tables at once
                of_database = any(
                    isinstance(e, sa.exc.DBAPIError | optuna.exceptions.OptunaError) for e in (error, error.__cause__)
                )
                if attempt + 1 == _OPENINGS or not of_database:
                    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                    location = DatabaseAddress.of(url).shown if url else "memory"
                    raise StoreError(f"the study {name!r} at {location} cannot be opened: {reason}") from error
                time.sleep(
                    random.uniform(0.1, 0.2 * 2**attempt)
                )  # jitter: the processes must not retry at the same moment
    # a trial's numbers depend on its number alone: the same after a stop, others in another process
    study.sampler = _sampler(space, config)
    expected: dict[str, Any] = {
        "space": {**space.describe(), **(of or {})}, "objectives": list(config.objectives),
    }  # fmt: skip
    trials = study.get_trials(
        deepcopy=False
    )  # read before the mark: a process marks a new study before its first trial
    recorded = study.user_attrs.get("assay")
    directions = [OBJECTIVES[objective] for objective in config.objectives]
    if recorded is None and (trials or [d.name.lower() for d in study.directions] != directions):
        raise ConfigError(
            f"the study {name!r} was not created by assay: its search space and objectives are unknown. "
            "Give this one another name"
        )
    if recorded is None:
        study.set_user_attr("assay", expected)
    elif recorded["space"].get("store") != expected["space"].get("store"):
        raise ConfigError(
            f"the study {name!r} is of another store: processes that share a study share a store (`store`). Give this "
            "one another name"
        )
    elif recorded != json.loads(json.dumps(expected)):
        raise ConfigError(
            f"the study {name!r} searches something else: {_difference(recorded, expected)}. Give this one another name"
        )
    return study


def _not_begun(name: str, url: str | None) -> ConfigError:
    place = DatabaseAddress.of(url).shown if url else "memory"
    return ConfigError(
        f"the search that leads has no study {name!r} at {place}",
        hint="Give the same storage as there",
        field="storage",
    )


def _difference(recorded: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """What differs, by name: there, and here."""
    old, new = (
        {**entry["space"], "objectives": entry["objectives"]} for entry in (recorded, json.loads(json.dumps(expected)))
    )
    return "; ".join(
        f"{key} is {old.get(key)}, not {new.get(key)}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)
    )


def study_storage(url: str, guard: Callable[[], None] | None = None) -> Any:
    """Optuna's own storage, in which a trial whose process died is tried again. `guard`: see `open_study`."""
    retry = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=_RETRIES)
    options: dict[str, Any] = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    storage = _PatientStorage(
        url,
        engine_kwargs=options,
        heartbeat_interval=_HEARTBEAT_S,
        grace_period=3 * _HEARTBEAT_S,
        heartbeat_stale_trial_callback=retry,
    )
    if url.startswith("sqlite"):
        sa.event.listen(storage.engine, "connect", sqlite_pragmas)
        storage.engine.dispose()
    if guard is not None:
        _guarded(storage.engine, guard)
    return storage


class _PatientStorage(optuna.storages.RDBStorage):
    """Waits for a database that is away or read-only for a while, as the store does."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in _PATIENT:
            return found
        return lambda *args, **options: patiently(
            lambda: found(*args, **options), optuna.exceptions.StorageInternalError
        )


def _guarded(engine: sa.Engine, guard: Callable[[], None]) -> None:
    """Calls `guard` before the first change in each transaction; heartbeats change nothing."""

    def check(connection: sa.Connection, cursor: Any, statement: str, *_: Any) -> None:
        changes = statement.lstrip()[:6].upper() in ("INSERT", "UPDATE", "DELETE")
        transaction = connection.get_transaction()
        if changes and "trial_heartbeats" not in statement and connection.info.get(_CHECKED) is not transaction:
            guard()
            connection.info[_CHECKED] = transaction

    sa.event.listen(engine, "before_cursor_execute", check)


# what Optuna calls during a search
_PATIENT = frozenset((
    "_create_new_trial", "_get_best_trial_id", "_get_stale_trial_ids", "_get_trials", "_set_trial_param",
    "get_study_system_attrs", "get_study_user_attrs", "get_trial", "get_trial_id_from_study_id_trial_number",
    "record_heartbeat", "set_study_system_attr", "set_study_user_attr", "set_trial_intermediate_value",
    "set_trial_state_values", "set_trial_system_attr", "set_trial_user_attr",
))  # fmt: skip


class SeededByTrial(BaseSampler):
    """A sampler built anew for each trial, so that a resumed study suggests the same points.

    Optuna stores a study's trials but not the state of the sampler's random generator. Here the random numbers of a
    trial depend on its number, and those of a parameter also on its name, so that a trial that was interrupted while
    its parameters were drawn gets the same remaining ones.

    Args:
        make: builds a sampler from a seed; it must read earlier trials from the study only.
        seed: of the study.
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._current: tuple[int, BaseSampler] | None = None

    def _of(self, trial: Any, name: str = "") -> BaseSampler:
        if not name and self._current is not None and self._current[0] == trial.number:
            return self._current[1]
        words = [
            self._seed,
            trial.number,
            *([int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")] if name else []),
        ]
        sampler = self._make(int(np.random.SeedSequence(words).generate_state(1)[0]))
        if not name:
            self._current = (trial.number, sampler)
        return sampler

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self._of(trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Any, trial: Any) -> None:
        self._of(trial).before_trial(study, trial)

    def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
        self._of(trial).after_trial(study, trial, state, values)


def _sampler(space: Space, config: SearchConfig) -> Any:
    samplers = optuna.samplers
    makers: dict[str, Callable[[int], Any]] = {
        "tpe": lambda seed: samplers.TPESampler(
            seed=seed, n_startup_trials=min(10, max(2, config.trials // 4)), constant_liar=True
        ),
        "gp": lambda seed: samplers.GPSampler(seed=seed, deterministic_objective=False),
        "cmaes": lambda seed: samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False),
        "nsga2": lambda seed: samplers.NSGAIISampler(seed=seed, population_size=max(4, min(50, config.trials // 4))),
        "random": lambda seed: samplers.RandomSampler(seed=seed),
        "grid": lambda seed: samplers.GridSampler(space.grid(), seed=seed),
    }
    if (
        config.sampler == "grid"
        and len(space.programs) > 1
        and len({tuple(space.searched(p)) for p in space.programs}) > 1
    ):
        raise ConfigError("`sampler='grid'` needs programs with the same parameters; take tpe")
    if config.sampler in _NEEDS and importlib.util.find_spec(_NEEDS[config.sampler]) is None:
        raise MissingExtra(_NEEDS[config.sampler], "train")
    return SeededByTrial(makers[config.sampler], config.seed)


def _pruner(config: SearchConfig) -> Any:
    return (
        optuna.pruners.HyperbandPruner(min_resource=1) if config.prunes == "hyperband" else optuna.pruners.NopPruner()
    )


# -- Optuna's Wilcoxon pruner, paired by task: compares a trial with the best trial on the tasks that both have run.


_FEWEST = 5  # pairs
# pairs for which scipy's exact test with ties takes up to seconds (2^n evaluations)
_SLOW = range(8, 14)


def is_worse_paired(
    study: optuna.Study, values: Mapping[str, float | None], best: Mapping[str, float], *, p: float
) -> bool:
    """Whether a trial with these values by task is significantly worse than the best.

    Optuna's pruner compares the two trials in a temporary study: in the study's own storage each value would be a
    transaction.

    Args:
        p: largest one-sided p-value at which a trial is pruned.
    """
    pairs = [(value, best[task]) for task, value in values.items() if value is not None and task in best]
    if len(pairs) < _FEWEST or len(pairs) in _SLOW:
        return False
    comparison = optuna.create_study(direction=study.direction)
    leader = create_trial(
        value=sum(best.values()) / len(best), intermediate_values=dict(enumerate(against for _, against in pairs))
    )
    comparison.add_trial(leader)
    trial = create_trial(state=TrialState.RUNNING, intermediate_values=dict(enumerate(value for value, _ in pairs)))
    return optuna.pruners.WilcoxonPruner(p_threshold=p).prune(comparison, trial)


# -- Search.


_LOST = 0.2  # share of a trial's runs that may be unscored


def search(
    objective: Objective,
    tasks: Sequence[Any],
    space: Space,
    config: SearchConfig,
    study: optuna.Study,
    *,
    defaults: Sequence[Point] = (),
    progress: Progress | None = None,
    run: str = "",
    helping: bool = False,
    alone: bool = False,
    until: Callable[[optuna.Study], bool] = lambda _: False,
) -> SearchOutcome:
    """Runs trials until the study has `config.trials` finished ones, the defaults first.

    Args:
        run: of this process, stored with its trials.
        helping: another process completes the study. This one stops as soon as finished and running trials are enough.
        alone: no other process of this job works on this study unless it joins. An interrupted trial is then re-run
            under its own number on resuming, so that the study ends with the same trials as without the interruption.
        until: ends the search before `config.trials` as soon as it is true of the study.
    Raises:
        BudgetExceeded, Cancelled: the running trial is re-run on resuming; finished trials are in the study.
        ModelError: no trial could be scored at all.
    """
    progress = progress or SilentProgress()
    evaluator = _TrialEvaluator(objective, list(tasks), space, config, progress, alone, run)
    for point in defaults if not study.get_trials(deepcopy=False) else ():
        study.enqueue_trial(space.trial_parameters(point), user_attrs={"default": True}, skip_if_exists=True)

    def states() -> Counter[Any]:
        return Counter(trial.state for trial in study.get_trials(deepcopy=False))

    def enough(study: optuna.Study, _: Any) -> None:
        advance(1)
        counts = states()
        done, failed = counts[TrialState.COMPLETE] + counts[TrialState.PRUNED], counts[TrialState.FAIL] - before
        working = counts[TrialState.RUNNING] if helping else 0
        failing = failed > config.trials or (failed >= _RETRIES + 2 and not done)
        if failing or done + working >= config.trials or until(study):
            study.stop()

    with progress.bar("trials", config.trials) as advance, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        counts = states()
        done, before = counts[TrialState.COMPLETE] + counts[TrialState.PRUNED], counts[TrialState.FAIL]
        advance(done)
        cut_off = [trial for trial in running_trials(study) if run_of(trial) in (None, run)] if alone else []
        if done + (counts[TrialState.RUNNING] if helping else 0) < config.trials or cut_off:
            with _storage_errors():
                for trial in cut_off:
                    _rerun(study, trial, evaluator)
                    advance(1)
                if done + len(cut_off) < config.trials and not until(study):
                    _optimized(study, evaluator, enough)
    return outcome_of(study, space, config, len(tasks))


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Raises errors of the study's storage as `StoreError`."""
    try:
        yield
    except Exception as error:
        storage_error = _of_the_storage(error)
        if storage_error is None:
            raise
        reason = str(storage_error).partition("\n")[0]
        raise StoreError(f"the study's storage is gone: {reason}. Start it, and continue with `resume=True`") from error


def _of_the_storage(error: BaseException | None) -> BaseException | None:
    """The database error that caused this one, if any: Optuna raises a later error, of its own clean-up."""
    while error is not None:
        if isinstance(error, optuna.exceptions.StorageInternalError | sa.exc.DBAPIError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _optimized(study: optuna.Study, evaluator: "_TrialEvaluator", enough: Callable[..., None]) -> None:
    """Optuna's loop. It continues if another process marked a trial of this one as failed."""
    # id of a trial after its evaluation, and what that raised: later errors are Optuna's, not the objective's
    ended = list[tuple[int, Exception | None]]()
    caught = (ProgramError, ModelError)
    of_trial = (*caught, optuna.TrialPruned, optuna.exceptions.UpdateFinishedTrialError)

    def watched(trial: Any) -> Any:
        ended.clear()
        try:
            value = evaluator(trial)
        except Exception as error:
            ended.append((trial._trial_id, error))
            raise
        ended.append((trial._trial_id, None))
        return value

    while True:
        try:
            study.optimize(watched, callbacks=[enough], catch=caught)
            return
        except optuna.exceptions.UpdateFinishedTrialError:
            continue
        except ValueError:
            # Optuna raises it for a trial that is no longer running; ask the storage, the study's list is an old copy
            if not ended or study._storage.get_trial(ended[0][0]).state != TrialState.FAIL:
                raise
            error = ended[0][1]
            if error is not None and not isinstance(error, of_trial):
                raise error from None


@dataclass(frozen=True)
class _TrialEvaluator:
    """Runs one trial in blocks of tasks, until all are done or the trial is pruned."""

    objective: Objective
    tasks: list[Any]
    space: Space
    config: SearchConfig
    progress: Progress
    alone: bool
    run: str

    def __call__(self, trial: Any) -> Any:
        with self.objective.within(f"trial {trial.number}"):
            return self._value(trial)

    def _value(self, trial: Any) -> Any:
        if self.run:
            trial.set_user_attr(RUN, self.run)
        point = self.space.suggest(trial)
        best = _best_by_task(trial.study) if self.config.prunes == "wilcoxon" else {}
        runs: list[TaskRun] = []
        try:
            for step, start in enumerate(range(0, len(self.tasks), self.config.block)):
                runs += self.objective.run(point, self.tasks[start : start + self.config.block])
                if start + self.config.block < len(self.tasks) and self._losing(trial, step, runs, best):
                    self._keep(trial, runs)
                    if (
                        best
                        and (measured := _values(runs, self.config.objectives)[self.config.objectives[0]]) is not None
                    ):
                        trial.report(measured, step)  # the sampler uses it for pruned trials
                    raise optuna.TrialPruned
        except StopRun:
            self._requeue(trial)
            raise
        except KeyboardInterrupt as stop:
            self._requeue(trial)
            raise Cancelled(f"cancelled {str(stop) or 'by the user'}") from None
        except (ProgramError, ModelError) as error:
            trial.set_user_attr("error", str(error))
            raise
        self._keep(trial, runs)
        values = _values(runs, self.config.objectives)
        lost = sum(run.score is None or not math.isfinite(run.score) for run in runs)
        missing = [name for name, value in values.items() if value is None] or (
            ["score"] if lost > _LOST * len(runs) else []
        )
        if missing:
            reason = next((run.error for run in runs if run.error), "no reason was given")
            text = f"{', '.join(missing)} could not be measured on {lost or len(runs)} of {len(runs)} runs: {reason}"
            trial.set_user_attr("error", text)
            raise ModelError(text)
        self.progress.say(f"  trial {trial.number}: {_result_text(point, values)}")
        return list(values.values())

    def _losing(self, trial: Any, step: int, runs: Sequence[TaskRun], best: Mapping[str, float]) -> bool:
        first = self.config.objectives[0]
        if self.config.prunes == "wilcoxon":
            return is_worse_paired(trial.study, _by_task(runs, first), best, p=self.config.prune_at)
        value = _values(runs, self.config.objectives)[first]
        if self.config.prunes == "none" or value is None:
            return False
        trial.report(value, step)
        return bool(trial.should_prune())

    def _keep(self, trial: Any, runs: Sequence[TaskRun]) -> None:
        first, scores = self.config.objectives[0], _by_task(runs, "score")
        paired = {} if first == "score" else {"first": _by_task(runs, first)}
        metrics, tokens = measure(runs, budget=self.config.run_budget).to_dict(), _mean([run.tokens for run in runs])
        trial.set_user_attr(
            "found", {"scores": scores, "metrics": metrics, "tokens": tokens, "runs": len(runs), **paired}
        )

    def _requeue(self, trial: Any) -> None:
        if not self.alone:
            _requeue(trial.study, trial)


def _requeue(study: optuna.Study, trial: Any) -> None:
    """Ends an interrupted trial and enqueues its point again."""
    study.enqueue_trial(
        trial.params, user_attrs={key: value for key, value in trial.user_attrs.items() if key == "default"}
    )
    study._storage.set_trial_user_attr(trial._trial_id, REQUEUED, True)
    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def _rerun(study: optuna.Study, cut_off: Any, evaluator: "_TrialEvaluator") -> None:
    """Re-runs an interrupted trial under its own number, with the parameters it had already drawn."""
    trial = Trial(study, cut_off._trial_id)
    # the warning that these steps were reported before; `search` restores the filters
    warnings.simplefilter("ignore", UserWarning)
    try:
        values = evaluator(trial)
    except optuna.TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
    except (ProgramError, ModelError):
        study.tell(trial, state=TrialState.FAIL)
    else:
        study.tell(trial, values)


def running_trials(study: optuna.Study) -> list[Any]:
    """Trials that have begun and not ended, also those whose process was killed."""
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def run_of(trial: Any) -> str | None:
    """Run of the process that works on a trial; None if it was killed before it said so."""
    run: str | None = trial.user_attrs.get(RUN)
    return run


def requeue_all(study: optuna.Study, cut_off: Callable[[Any], bool]) -> None:
    """Enqueues the running trials again of which `cut_off` is true: their processes are gone."""
    for trial in filter(cut_off, running_trials(study)):
        _requeue(study, trial)


def close_all(study: optuna.Study, cut_off: Callable[[Any], bool]) -> None:
    """Ends the running trials of which `cut_off` is true as failed: their processes are gone."""
    for trial in filter(cut_off, running_trials(study)):
        study._storage.set_trial_user_attr(trial._trial_id, "error", "its process ended before the trial did")
        study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def _by_task(runs: Sequence[TaskRun], objective: str) -> dict[str, float | None]:
    """Mean of an objective over the samples of each task."""
    return {task: _values(of_task, (objective,))[objective] for task, of_task in runs_by_task(runs).items()}


def _best_by_task(study: optuna.Study) -> dict[str, float]:
    """Values of the first objective by task, of the best trial; empty if there is no trial yet."""
    try:
        values = first_by_task(study.best_trial)
    except ValueError:
        return {}
    return {task: value for task, value in values.items() if value is not None}


def _mean(values: Sequence[float | int | None]) -> float | None:
    finite = [float(value) for value in values if value is not None and math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def _values(runs: Sequence[TaskRun], objectives: Sequence[str]) -> dict[str, float | None]:
    """Means of the objectives per run; None if no run has a value."""
    columns: dict[str, list[float | int | None]] = {
        "score": [run.score for run in runs],
        "tokens": [run.tokens for run in runs],
        "latency": [run.seconds for run in runs],
        "cost": [run.cost_usd for run in runs],
    }
    return {name: _mean(columns[name]) for name in objectives}


def _result_text(point: Point, values: Mapping[str, float | None]) -> str:
    settings = ", ".join(f"{name} {in_figures(value)}" for name, value in point.parameters.items())
    results = ", ".join(f"{name} {in_figures(value)}" for name, value in values.items() if value is not None)
    return f"{results} with {settings}"
