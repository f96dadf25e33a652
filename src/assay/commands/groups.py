"""Groups of settings that several commands share. A command inherits those that it needs."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from assay.errors import AssayError, ConfigError, LowCoverage
from assay.support.numbers import counted
from assay.support.options import Flag, Settings, Share
from assay.support.places import is_other_file

if TYPE_CHECKING:
    from assay.evaluation import Progress
    from assay.traces.gateway.connections import Listener
    from assay.traces.store import Store
else:
    Progress = Any  # so that the types of the fields can be read without the heavy packages


class NoJson(Settings):
    """Output of a command that changes something and reports a line."""

    @property
    def speaks(self) -> bool:
        """Whether the report is shown."""
        return True

    def begin(self, stdout: Any) -> None:
        """What is done before the command; `stdout` is standard output if it is JSON. May end the process."""

    def finish(self, command: Any, report: Any) -> None:
        """What is done once the report is shown; raises where it ends the command with an error."""


class Output(NoJson):
    """Output."""

    json: bool = False
    """One JSON object on standard output, nothing else."""


class JobOutput(Output):
    """Output."""

    min_coverage: Share = 0.9
    """Smallest share of tasks on which each criterion must be scored; below it the exit code is 1."""

    def finish(self, command: Any, report: Any) -> None:
        check_coverage(report.to_dict(), self.min_coverage)


class Planned(Output):
    """Output."""

    dry_run: bool = False
    """Print the estimate of calls, tokens, dollars and minutes, and run nothing."""


class WithPage(Output):
    """Output."""

    report: Annotated[str | None, Flag(metavar="FILE.html")] = None
    """Also write the report to this HTML file, which is self-contained."""

    def check(self) -> None:
        if self.report is None:
            return
        if is_other_file(self.report, ".html"):
            raise ConfigError("exists and is not overwritten, because its name does not end in .html", field="report")
        folder = Path(self.report).parent
        if not folder.is_dir():
            raise ConfigError(f"cannot be written: there is no folder {folder}", field="report")
        if not os.access(folder, os.W_OK) or Path(self.report).is_dir():
            raise ConfigError(f"{self.report} cannot be written", field="report", hint="Name another file")


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
        from assay.traces.store.location import store_address

        address = store_address(self.store)
        if not address.exists:
            raise StoreError(
                f"there is no store at {address.shown}: no command has written one yet", hint="Name it with `store`"
            )
        return Store(self.store)


class NewArtifact(Settings):
    """Result."""

    out: Annotated[str | Path | None, Flag(metavar="DIR", key=False)] = None
    """New folder to write the artifact to; by default one in .assay/artifacts."""


class OfAgent(InStore):
    """Store."""

    agent: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """Name of the agent."""


class Trusting(Settings):
    """Trust."""

    trust: Annotated[bool, Flag(key=False)] = False
    """Permanently trust the artifacts given here, so that their code may be run. See assay trust."""

    def scope(self) -> AbstractContextManager[None]:
        from assay.sources.trust import trusting

        return trusting(self.trust)


class Listening(Settings):
    """Address."""

    host: str = "127.0.0.1"
    """Address to bind; addresses other than loopback require `key`."""
    port: Annotated[int, Ge(0), Le(65535)] = 0
    """Port to bind; 0 selects a free port."""
    allow_host: Annotated[Sequence[str], Flag(metavar="NAME")] = ()
    """Additional host name under which clients may reach this server; repeatable."""
    key: Annotated[str | None, Flag(env="ASSAY_KEY", key=False)] = field(default=None, repr=False)
    """Key that callers must send: at least 8 ASCII characters, without a dot or spaces. An address other than loopback
    requires one."""

    async def listen(self, listener: "Listener") -> int:
        """Starts listening; returns the port. Raises `AssayError` if the address cannot be bound."""
        try:
            return await listener.start(self.host, self.port)
        except OSError as error:
            problem = f"cannot listen on {self.host}:{self.port}: {error.strerror or error}"
            raise AssayError(problem, hint="Choose another `port`") from None


class Reported(Settings):
    """Progress."""

    progress: Annotated[Progress | None, Flag(key=False, shown=False)] = None
    """Reports how far the command is; by default nothing."""

    def check(self) -> None:
        if not (self.progress is None or callable(getattr(self.progress, "say", None))):
            raise ConfigError("must be an assay.evaluation.Progress or None", field="progress")

    @property
    def reporter(self) -> Progress:
        """The given progress; by default bars in a notebook, and nothing elsewhere."""
        from assay.evaluation import default_progress

        return default_progress(self.progress)


def check_coverage(data: Any, least: float) -> None:
    """Raises `LowCoverage` if a report in `data` has a lower coverage.

    A report is a mapping with `coverage` and `undecided`, as of `assay.rubrics.scoring`, at any depth.
    """
    low = [report for report in _coverages(data) if report["coverage"] < least]
    if low:
        worst = min(low, key=lambda report: float(report["coverage"]))
        gaps = [
            f"{name} was not decided on {gap['n']} of {gap['of']}: {gap['reason']}"
            for name, gap in worst["undecided"].items()
        ]
        if worst.get("why_failed"):
            gaps.append(f"{worst['failed']} of {counted(worst['n'], 'runs')} failed: {worst['why_failed']}")
        way = ", or lower `min_coverage`" if worst["coverage"] else ""
        raise LowCoverage(
            f"coverage {worst['coverage']:.2f} is below the required {least:g}. {'; '.join(gaps)}. Correct "
            f"what failed{way}"
        )


def _coverages(data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        if isinstance(data.get("coverage"), float | int) and isinstance(data.get("undecided"), dict):
            yield data
        for value in data.values():
            yield from _coverages(value)
    elif isinstance(data, list):
        for value in data:
            yield from _coverages(value)
