"""Public API for `assay loop pool`: rollouts of production as tasks."""

from pathlib import Path
from typing import Any, Unpack

from assay.datasets import Task
from assay.datasets.splits import load_tasks
from assay.deployment.pool import PoolReport, write_pool
from assay.deployment.pool_settings import PoolSettings
from assay.deployment.registry import Registry
from assay.runs.opening import home_of
from assay.runs.settings.store_options import PoolOptions
from assay.support.keywords import takes
from assay.traces import Store


@takes(PoolSettings)
def collect_pool(
    agent: str,
    out: str | Path | None = None,
    *,
    replace: bool = False,
    store: str | Path | None = None,
    **options: Unpack[PoolOptions],
) -> PoolReport:
    """Writes the benchmark pool of an agent: a file of tasks that `compile`, `evaluate` and `improve` take as `data`.

    Args:
        out: new file that ends in .jsonl, with its manifest next to it; None only counts.
        replace: an existing file is replaced.
        options: see `PoolSettings`.
    Raises:
        ConfigError: the file exists, or has another ending.
        DataError: there are no tasks, or the anonymization is incomplete; nothing was written.
        DeploymentError: there is no such agent.
    """
    settings = PoolSettings(**options)
    training: list[Task] = [] if settings.against is None else load_tasks(settings.against)
    key = _key(settings, store)
    with Store(store) as opened:
        Registry(opened.engine).version(f"{agent}@1")
        path = None if out is None else Path(out)
        return write_pool(opened, agent, settings, path, key=key, training=training, replace=replace)


def _key(settings: PoolSettings, store: Any) -> Path | None:
    """One key for all pools of a store, so that a task has the same surrogates, and so the same id, in each."""
    if settings.privacy == "off":
        return None
    if settings.privacy_key is not None:
        return Path(settings.privacy_key)
    path = home_of(store) / "loop" / "pool.key"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
