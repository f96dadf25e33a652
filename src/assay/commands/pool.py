"""`assay loop pool`: rollouts of production as tasks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from assay.commands.groups import InExistingStore, OfAgent
from assay.deployment.settings import PoolSettings
from assay.support.options import Flag, function_of

if TYPE_CHECKING:
    from assay.deployment.pool import PoolReport
else:
    PoolReport = Any  # so that the types can be read without the heavy packages


class Pool(OfAgent, InExistingStore, PoolSettings):
    """Write the benchmark pool of AGENT: its rollouts in production as tasks, for --data of other commands.

    Tasks are deduplicated, anonymized, split as in all commands, and balanced over task types; those on which
    production failed are kept. The gates are the requirements for training on the pool.

    Raises:
        ConfigError: the file exists, or has another ending.
        DataError: there are no tasks, or the anonymization is incomplete; nothing was written.
        DeploymentError: there is no such agent.
    """

    out: Annotated[str | Path | None, Flag(metavar="FILE", key=False)] = None
    """New file of tasks, .jsonl, with its manifest next to it; without it the tasks are only counted."""

    replace: Annotated[bool, Flag(key=False, shown=False)] = False
    """Replace an existing file."""

    def run(self) -> PoolReport:
        from assay.datasets.splits import load_tasks
        from assay.deployment.pool import write_pool
        from assay.deployment.registry import Registry

        training = [] if self.against is None else load_tasks(self.against)
        out, key = None if self.out is None else Path(self.out), self._key()
        with self.opened() as store:
            Registry(store.engine).version(f"{self.agent}@1")
            return write_pool(store, self.agent, self, out, key=key, training=training, replace=self.replace)

    def _key(self) -> Path | None:
        """One key for all pools of a store, so that a task has the same surrogates, and so the same id, in each."""
        from assay.traces.store.location import home_of

        if self.privacy == "off":
            return None
        if self.privacy_key is not None:
            return Path(self.privacy_key)
        path = home_of(self.store) / "loop" / "pool.key"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


collect_pool = function_of(Pool, "collect_pool")
