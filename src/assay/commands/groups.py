"""Groups of settings that several commands share. A command inherits those that it needs."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from assay.support.options import Flag, Settings, Share

if TYPE_CHECKING:
    from assay.evaluation import Progress
    from assay.traces.store import Store
else:
    Progress = Any  # so that the types of the fields can be read without the heavy packages


class Output(Settings):
    """Output."""

    json: bool = False
    """One JSON object on standard output, nothing else."""


class CoverageOutput(Output):
    """Output."""

    min_coverage: Share = 0.9
    """Smallest share of tasks on which each criterion must be scored; below it the exit code is 1."""


class NoJson(Settings):
    """Output of a command that changes something and reports a line."""


class InStore(Settings):
    """Store."""

    store: Annotated[str | Path | None, Flag(key=False)] = None
    """Database of traces; by default .assay/assay.db or $ASSAY_STORE."""


class InExistingStore(InStore):
    """Store."""

    def opened(self) -> "Store":
        """The store, opened. Raises `StoreError` where there is none, instead of creating it."""
        from assay.errors import StoreError
        from assay.traces.store import Store
        from assay.traces.store.location import store_file

        file = store_file(self.store)
        if file is not None and not file.is_file():
            raise StoreError(
                f"there is no store at {file}: no command has written one yet", hint="Name it with `store`"
            )
        return Store(self.store)


class Trusting(Settings):
    """Trust."""

    trust: Annotated[bool, Flag(key=False)] = False
    """Permanently trust the artifacts given here, so that their code may be run. See assay trust."""

    def scope(self) -> AbstractContextManager[None]:
        from assay.sources.trust import trusting

        return trusting(self.trust)


class Reported(Settings):
    """Progress."""

    progress: Annotated[Progress | None, Flag(key=False, shown=False)] = None
    """Reports how far the command is; by default nothing."""

    @property
    def reporter(self) -> Progress:
        """The given progress; by default bars in a notebook, and nothing elsewhere."""
        from assay.evaluation import default_progress

        return default_progress(self.progress)
