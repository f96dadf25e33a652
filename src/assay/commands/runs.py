"""`assay runs`: what commands did."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

from assay.commands import COMMANDS, SHORT_FORMS, command_class
from assay.commands.groups import InExistingStore
from assay.support.options import Flag, Positive, function_of
from assay.support.report import OBJECT, Report, Table

_SUFFIXES = {"judge": " (verdicts of judges)", "check": " (calls of checks)", "outside": " (calls outside of a task)"}


@dataclass(frozen=True, kw_only=True, repr=False)
class RunListing(Report):
    """The newest runs.

    Attributes:
        runs: newest first, each as `runs show` shows it, without its rollouts and its result.
    """

    is_list = True
    none = "the store holds no runs"

    runs: tuple[dict[str, Any], ...]

    def lines(self) -> Iterator[str]:
        for run in self.runs:
            yield (
                f"{run['id']:18} {_when(run['started_at'])} {_command(run):18} {run['status']:11} "
                f"{_duration(run['seconds']):>7}  {run['program'] or '–'}  {run['model'] or '–'}"
            )


class ListRuns(InExistingStore):
    """List the newest runs, one per line: id, start, command, status, duration, program, model.

    The command `check of train sft` is the check of the program on one task that `assay train sft --program` makes
    before it trains.
    """

    limit: Positive = 20
    """Maximum number of runs to list."""

    def run(self) -> RunListing:
        from assay.traces.store.listing import list_runs as stored_runs

        with self.opened() as store:
            return RunListing(runs=tuple(stored_runs(store, limit=self.limit)))


@dataclass(frozen=True, kw_only=True, repr=False)
class RunReport(Report):
    """A run.

    Attributes:
        id: its id in the store.
        kind: its command, such as `judge compile`.
        status: running, interrupted (its process has ended and can be resumed), done, stopped or failed.
        program: the program, or the judge.
        model: name of the model.
        started_at: seconds since the epoch.
        resumed_at: when it was resumed last; null if it was not.
        ended_at: when it ended; null if it has not.
        seconds: duration since its start, or since it was resumed.
        config: its settings.
        unrecorded: number of LM calls that were not recorded; null if it is unknown.
        unrecorded_seen: number of such calls that were seen, if it is unknown how many there were.
        unrecorded_reason: why the number is unknown, if it is.
        rollouts: number and mean score by phase, status and source.
        result: the report of its command; null if it is in progress.
    """

    id: str
    kind: str
    status: str
    program: str | None
    model: str | None
    started_at: float
    resumed_at: float | None
    ended_at: float | None
    seconds: float | None
    config: dict[str, Any]
    unrecorded: int | None
    unrecorded_seen: int | None = None
    unrecorded_reason: str | None = None
    rollouts: tuple[dict[str, Any], ...]
    result: dict[str, Any] | None
    report: Report | None = field(metadata=OBJECT)

    def to_dict(self) -> dict[str, Any]:
        gaps = () if self.unrecorded is None else ("unrecorded_seen", "unrecorded_reason")
        return {name: value for name, value in super().to_dict().items() if name not in gaps}

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.texts import setting_texts

        resumed = "" if self.resumed_at is None else f"resumed {_when(self.resumed_at)}  "
        command = _command({"kind": self.kind, "config": self.config})
        duration = _duration(self.seconds)
        yield f"{self.id}  {command}  {self.status}  {_when(self.started_at)}  {resumed}{duration}"
        for name, text in setting_texts(self.config):
            yield f"  {name}: {text}".replace("\n", "\n    ")
        for part in self.rollouts:
            mean = "" if part["mean_score"] is None else f", mean score {part['mean_score']:.3f}"
            suffix = _SUFFIXES.get(part["source"], "")
            phase = {"preflight": "preflight, one task and each judge before the run"}.get(part["phase"], part["phase"])
            yield f"  {phase or '–'}: {part['n']} {part['status']}{mean}{suffix}"
        if self.unrecorded != 0:
            yield f"  LM calls not recorded: {'an unknown number' if self.unrecorded is None else self.unrecorded}"
        if self.report is not None:
            yield from self.report.lines()
        elif reason := (self.result or {}).get("stopped"):
            yield f"  stopped early: {reason}"


class ShowRun(InExistingStore):
    """Show one run: its settings, rollouts by phase and result. RUN_ID may be the first characters of the id."""

    run_id: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """Id of the run, or its first characters."""

    def run(self) -> RunReport:
        from assay.traces.store.listing import result_of, show_run as stored_run

        with self.opened() as store:
            run = stored_run(store, self.run_id)
            result = result_of(store, run)
        return RunReport(
            **{**run, "rollouts": tuple(run["rollouts"])}, result=result, report=stored_report(run, result or {})
        )


def stored_report(run: Mapping[str, Any], result: Mapping[str, Any]) -> Report | None:
    """The stored result of a run as the report that its command returns; None if it has none, or of other keys."""
    if not result or (words := _command(run)) not in {*COMMANDS, *SHORT_FORMS}:
        return None
    returned = command_class(words).run.__annotations__["return"]
    kinds: tuple[type[Report], ...] = get_args(returned) or (returned,)
    kind = next((kind for kind in kinds if kind.reads(result)), None)
    return None if kind is None else kind.read(result, {"run_id": run["id"], "program": run["program"]})


def _command(run: Mapping[str, Any]) -> str:
    """The command of a run, with the method of a training."""
    if run["kind"] == "preflight":
        return "check of train sft"
    method = run["config"].get("algorithm") if run["kind"] == "train" else None
    return f"{run['kind']} {method}" if method else str(run["kind"])


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _duration(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.0f} s"


list_runs = function_of(ListRuns, "list_runs")
show_run = function_of(ShowRun, "show_run")
