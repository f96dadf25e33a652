"""`assay runs`: what commands did."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from assay.commands.groups import InExistingStore
from assay.support.options import Flag, Positive, function_of
from assay.support.report import Report

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
                f"{run['id']:18} {_when(run['started_at'])} {_command(run):18} {run['status']:8} "
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
        status: running, done, stopped or failed.
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

    def to_dict(self) -> dict[str, Any]:
        gaps = () if self.unrecorded is None else ("unrecorded_seen", "unrecorded_reason")
        return {name: value for name, value in super().to_dict().items() if name not in gaps}

    def lines(self) -> Iterator[str]:
        from assay.reports.markdown import models_text
        from assay.reports.results import result_lines
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
        result = self.result or {}
        if text := models_text(result):
            yield f"  LM calls by model: {text}"
        if result.get("stopped"):
            yield f"  stopped early: {result['stopped']}"
        yield from (f"  {line}" for line in result_lines(result))


class ShowRun(InExistingStore):
    """Show one run: its settings, rollouts by phase and result. RUN_ID may be the first characters of the id."""

    run_id: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """Id of the run, or its first characters."""

    def run(self) -> RunReport:
        from assay.traces.store.listing import result_of, show_run as stored_run

        with self.opened() as store:
            run = stored_run(store, self.run_id)
        return RunReport(**{**run, "rollouts": tuple(run["rollouts"])}, result=result_of(self.store, run))


def _command(run: dict[str, Any]) -> str:
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
