"""Opens Optuna studies, also from several processes at once, and makes their samplers and pruners."""

import importlib.util
import json
import random
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from assay.errors import ConfigError, MissingExtra, StoreError
from assay.optimizers.parameters.space import Space
from assay.optimizers.search_settings import OBJECTIVES, SearchConfig
from assay.traces.store import url_without_password
from assay.traces.store.connection import sqlite_pragmas

if TYPE_CHECKING:
    import optuna

_NEEDS = {"gp": "torch"}  # Optuna raises only in the middle of a search
RETRIES = 3  # of a trial whose process died
_HEARTBEAT_S = 15
_OPENINGS = 8


def open_study(
    name: str, url: str | None, space: Space, config: SearchConfig, *, of: Mapping[str, Any] | None = None
) -> "optuna.Study":
    """A study in Optuna's storage at `url` (in memory where None), new or continued.

    Args:
        of: everything else that must be equal for trials to be comparable, such as the version of the program.
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
                    storage=study_storage(url) if url else None,
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
                    location = url_without_password(url) if url else "memory"
                    raise StoreError(f"the study {name!r} at {location} cannot be opened: {reason}") from error
                time.sleep(
                    random.uniform(0.1, 0.2 * 2**attempt)
                )  # jitter: the processes must not retry at the same moment
    # a trial's numbers depend on its number alone: the same after a stop, others in another process
    study.sampler = _sampler(space, config)
    expected = {"space": {**space.describe(), **(of or {})}, "objectives": list(config.objectives)}
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
    elif recorded != json.loads(json.dumps(expected)):
        raise ConfigError(
            f"the study {name!r} searches something else: {_difference(recorded, expected)}. Give this one another name"
        )
    return study


def _difference(recorded: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """What differs, by name: there, and here."""
    old, new = (
        {**entry["space"], "objectives": entry["objectives"]} for entry in (recorded, json.loads(json.dumps(expected)))
    )
    return "; ".join(
        f"{key} is {old.get(key)}, not {new.get(key)}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)
    )


def study_storage(url: str) -> Any:
    """Optuna's own storage, in which a trial whose process died is tried again."""
    import optuna
    import sqlalchemy as sa

    retry = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=RETRIES)
    options: dict[str, Any] = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    storage = optuna.storages.RDBStorage(
        url,
        engine_kwargs=options,
        heartbeat_interval=_HEARTBEAT_S,
        grace_period=3 * _HEARTBEAT_S,
        heartbeat_stale_trial_callback=retry,
    )
    if url.startswith("sqlite"):
        sa.event.listen(storage.engine, "connect", sqlite_pragmas)
        storage.engine.dispose()
    return storage


def _sampler(space: Space, config: SearchConfig) -> Any:
    import optuna

    from assay.optimizers.parameters.seeding import SeededByTrial

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
    import optuna

    return (
        optuna.pruners.HyperbandPruner(min_resource=1) if config.prunes == "hyperband" else optuna.pruners.NopPruner()
    )
