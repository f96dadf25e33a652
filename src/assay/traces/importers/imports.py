"""Imports traces recorded by other tools into the store: OTLP files and exports of Langfuse and MLflow.

A trace becomes a rollout, whose id is derived from the trace id. Importing a file again, or files with parts of the
same trace, adds only what is missing. Traces may be interleaved in a file: rows are first sorted by trace on disk, so
that memory is bounded by the largest trace. Does not fetch traces from servers.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.datasets.tasks import task_key
from assay.errors import DataError, FailureKind
from assay.support.names import one_of
from assay.support.report import Report
from assay.traces.importers import genai, langfuse, mlflow, otlp
from assay.traces.importers.chat import as_inputs
from assay.traces.importers.files import Part, Row, Skipped, Sorted, is_text, json_rows, run_of
from assay.traces.importers.otlp import Trace
from assay.traces.importers.rollouts import Imported, answer_in, to_rollout
from assay.traces.records import Rollout, Transition, Verdict
from assay.traces.store import Store, tables as schema
from assay.traces.store.leases import acquire
from assay.traces.store.rows import clean, rollout_of, transition_of

KINDS = ("otlp", "langfuse", "mlflow")
_REASONS = 20  # maximum reasons in a report
_FLUSH = 500  # LM calls between flushes of the store
_LEASE_S = 10.0  # after which a killed import holds up no other one
_Take = Callable[[Row, Sorted], Iterator[Skipped]]
_TraceOf = Callable[[str, Iterable[Part]], Trace]
_READERS: dict[str, tuple[_Take, _TraceOf]] = {
    "otlp": (otlp.take, genai.trace_of),
    "langfuse": (langfuse.take, langfuse.trace_of),
    "mlflow": (mlflow.take, mlflow.trace_of),
}


def read_otlp(path: str | Path, *, score: str | None = None) -> Iterator[Imported]:
    """Read rollouts from OpenTelemetry spans with the GenAI conventions.

    Args:
        path: Export request as JSON, JSON lines (the collector's file exporter) or protobuf.
        score: Name of the score to use if a trace has several.
    Returns:
        Rollouts, and a `Skipped` for each part of the file that is not imported.
    Raises:
        DataError: The file does not exist, is empty, is not OTLP or has no LM call.
        MissingExtra: The file is protobuf and `opentelemetry-proto` is not installed.
    """
    return _read("otlp", Path(path), score, run_of(Path(path)))


def read_langfuse(path: str | Path, *, score: str | None = None) -> Iterator[Imported]:
    """Read rollouts from an export of Langfuse. See `read_otlp`."""
    return _read("langfuse", Path(path), score, run_of(Path(path)))


def read_mlflow(path: str | Path, *, score: str | None = None) -> Iterator[Imported]:
    """Read rollouts from MLflow traces in the format of `Trace.to_json()`. See `read_otlp`."""
    return _read("mlflow", Path(path), score, run_of(Path(path)))


def _read(kind: str, path: Path, score: str | None, run_id: str) -> Iterator[Imported]:
    if kind != "otlp" and not is_text(path):
        raise DataError(f"{path} is not JSON")
    rollouts, traces, first_reason = 0, 0, ""
    with Sorted.open() as parts:
        for skipped in _sort_rows(kind, path, parts):
            first_reason = first_reason or f"; {skipped.where}: {skipped.reason}"
            yield skipped
        for trace_id, trace_parts in parts.traces():
            traces += 1
            for imported in _rollout(kind, run_id, trace_id, trace_parts, score):
                if isinstance(imported, Skipped):
                    first_reason = first_reason or f"; {imported.where}: {imported.reason}"
                rollouts += isinstance(imported, Rollout)
                yield imported
    if not rollouts:
        raise DataError(f"{path} has no {kind} LM call in {traces} traces{first_reason}")


def _sort_rows(kind: str, path: Path, parts: Sorted) -> Iterator[Skipped]:
    """Sort the rows of a file into `parts`."""
    take, any_match = _READERS[kind][0], False
    for row in otlp.rows(path) if kind == "otlp" else json_rows(path):
        if isinstance(row, Skipped):
            yield row
        elif not isinstance(row.value, dict):
            yield Skipped(where=row.where, reason=f"expected an object, found {type(row.value).__name__}")
        elif (other := _kind_of(row.value)) in (kind, None):
            any_match = True
            yield from take(row, parts)
        elif any_match:
            yield Skipped(where=row.where, reason=f"a row of {other}, not of {kind}")
        else:
            raise DataError(
                f"{row.where} is not {kind}; it looks like {other}. Use: assay traces import {other} {path}"
            )


def _rollout(
    kind: str, run_id: str, trace_id: str, parts: list[Part] | Skipped, score: str | None
) -> Iterator[Imported]:
    if isinstance(parts, Skipped):
        yield parts
        return
    try:
        yield from to_rollout(kind, run_id, _READERS[kind][1](trace_id, parts), score=score)
    except RecursionError:
        yield Skipped(where=parts[0].where, reason="nested too deeply", trace=trace_id)


def _kind_of(row: Mapping[str, Any]) -> str | None:
    """Tool that wrote a row, by its field names; None if unknown."""
    names = {name.replace("_", "").lower() for name in row}  # in camel case or snake case
    if names & {"resourcespans", "resourcelogs", "resourcemetrics"}:
        return "otlp"
    if ("info" in row and "data" in row) or "request_metadata" in row:
        return "mlflow"
    is_langfuse = names & {"traceid", "observations"} and names & {"starttime", "datatype", "observations"}
    return "langfuse" if is_langfuse else None


@dataclass(frozen=True, kw_only=True, repr=False)
class ImportReport(Report):
    """Result of an import.

    Attributes:
        run_id: id of the run in the store.
        kind: `otlp`, `langfuse` or `mlflow`.
        rollouts: imported rollouts.
        unchanged: rollouts that were already in the store.
        transitions: imported LM calls.
        tool_calls: imported tool calls.
        scored: rollouts with a score.
        rated: rollouts with a human rating.
        duplicates: rows that were in the file twice.
        repeated: the first 20 of them.
        skipped: number of other parts that were not imported.
        reasons: the first 20 reasons for skipped parts.
    """

    run_id: str
    kind: str
    rollouts: int = 0
    unchanged: int = 0
    transitions: int = 0
    tool_calls: int = 0
    scored: int = 0
    rated: int = 0
    duplicates: int = 0
    repeated: tuple[str, ...] = ()
    skipped: int = 0
    reasons: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        shown = {name: value for name, value in vars(self).items() if name not in ("reasons", "repeated")}
        yield from (f"{name:18} {value}" for name, value in shown.items())

    def warnings(self) -> Iterator[str]:
        yield from (f"duplicate: {place}" for place in self.repeated)
        yield from (f"skipped: {reason}" for reason in self.reasons)


def import_traces(store: Store, kind: str, path: str | Path, *, score: str | None = None) -> ImportReport:
    """Import the traces of a file into the store.

    Args:
        kind: `otlp`, `langfuse` or `mlflow`.
        path: The file.
        score: Name of the score to use if a trace has several; the others become verdicts.
    Raises:
        DataError: The kind is unknown, or the file cannot be read; nothing is stored.
        StoreError: The store refused rows.
    """
    if kind not in KINDS:
        raise DataError(f"`kind={kind!r}` {one_of(kind, KINDS)}")
    with _alone(store):
        return _import(store, kind, path, score)


@contextmanager
def _alone(store: Store) -> Iterator[None]:
    """One import of a store at a time; others wait. Two that merge parts of one trace would overwrite each other."""
    while (lease := acquire(store.engine, "import", _LEASE_S)) is None:
        time.sleep(_LEASE_S / 100)
    with lease:
        yield


def _import(store: Store, kind: str, path: str | Path, score: str | None) -> ImportReport:
    report = ImportReport(run_id=run_of(Path(path)), kind=kind)
    config, started_at = {"kind": kind, "path": str(path), "score": score}, store.clock.now()
    store.flush()
    waiting, opened = 0, False
    for imported in _read(kind, Path(path), score, report.run_id):
        if isinstance(imported, Skipped):
            report = _with_skipped(report, imported)
            continue
        if not opened:
            store.put_run(report.run_id, kind="import", config=config, status="running", started_at=started_at)
            opened = True
        stored = _stored(store, imported.id)
        merged = imported if stored is None else _merged(stored, imported)
        if merged == stored:
            report = replace(report, unchanged=report.unchanged + 1)
            continue
        try:
            store.put_rollout(merged)
            for transition in merged.transitions:
                store.put_transition(merged.id, transition)
        except RecursionError:
            report = _with_skipped(report, Skipped(where=str(path), reason="nested too deeply", trace=imported.id))
            continue
        report = _counted(report, imported)
        waiting += len(merged.transitions)
        if waiting >= _FLUSH:
            store.flush()
            waiting = 0
    if opened:
        store.put_run(report.run_id, kind="import", config=config, status="done", started_at=started_at)
    store.flush()
    return report


def _with_skipped(report: ImportReport, skipped: Skipped) -> ImportReport:
    if skipped.repeated:
        repeated = (*report.repeated, skipped.where)[:_REASONS]
        return replace(report, duplicates=report.duplicates + 1, repeated=repeated)
    trace = f" (trace {skipped.trace})" if skipped.trace else ""
    reasons = (*report.reasons, f"{skipped.where}: {skipped.reason}{trace}")[:_REASONS]
    return replace(report, skipped=report.skipped + 1, reasons=reasons)


def _counted(report: ImportReport, rollout: Rollout) -> ImportReport:
    return replace(
        report,
        rollouts=report.rollouts + 1,
        transitions=report.transitions + len(rollout.transitions),
        tool_calls=report.tool_calls + len(rollout.tools),
        scored=report.scored + (rollout.score is not None),
        rated=report.rated + (rollout.human_rating is not None),
    )


def _stored(store: Store, rollout_id: str) -> Rollout | None:
    """A stored rollout with its transitions; None if it does not exist."""
    r, t = schema.rollouts, schema.transitions
    with store.engine.connect() as connection:
        row = connection.execute(sa.select(r).where(r.c.id == rollout_id)).mappings().first()
        if row is None:
            return None
        rollout = rollout_of(row)
        steps = connection.execute(sa.select(t).where(t.c.rollout_id == rollout_id).order_by(t.c.t)).mappings()
        rollout.transitions = [transition_of(step) for step in steps]
    return rollout


def _merged(stored: Rollout, imported: Rollout) -> Rollout:
    """Stored rollout with the new data of an import: LM calls of another part of the trace, and newer scores.

    Ratings and rubric scores that were added in this store are kept.
    """
    known = {transition.request.get("span", transition.t) for transition in stored.transitions}
    added = [
        t for t in imported.transitions if (clean(str(t.request["span"])) if "span" in t.request else t.t) not in known
    ]
    calls = (
        [replace(t, t=at) for at, t in enumerate(sorted([*stored.transitions, *added], key=_started))]
        if added
        else stored.transitions
    )
    known_verdicts = {_verdict_key(verdict) for verdict in stored.verdicts}
    inputs = imported.inputs if stored.inputs == _first_messages(stored.transitions) else stored.inputs
    if inputs == _first_messages(imported.transitions):
        inputs = _first_messages(calls) or inputs
    task_id = stored.task_id if inputs == stored.inputs else task_key(inputs)
    rescored = imported.score is not None and (stored.score is None or stored.rubric.startswith("imported:"))
    return replace(
        stored,
        inputs=inputs,
        task_id=task_id,
        expected={**imported.expected, **stored.expected},
        prediction=_prediction(stored, imported, calls),
        **_outcome(stored, imported, calls),
        score=imported.score if rescored else stored.score,
        rubric=imported.rubric if rescored else stored.rubric,
        human_rating=imported.human_rating if stored.human_rating is None else stored.human_rating,
        verdicts=[
            *stored.verdicts,
            *(verdict for verdict in imported.verdicts if _verdict_key(verdict) not in known_verdicts),
        ],
        started_at=min(stored.started_at, imported.started_at),
        ended_at=max(filter(None, (stored.ended_at, imported.ended_at)), default=None),
        early_tools=stored.early_tools or imported.early_tools,
        transitions=calls,
    )


def _outcome(stored: Rollout, imported: Rollout, calls: list[Transition]) -> dict[str, Any]:
    """Status, error and failure. A trace is incomplete if one of its calls is, or if none of its parts is complete."""
    incomplete = [call for call in calls if call.failure is FailureKind.RECORD]
    if incomplete:
        return {"status": "error", "error": incomplete[0].error, "failure": FailureKind.RECORD}
    complete = [part for part in (stored, imported) if part.failure is not FailureKind.RECORD] or [stored]
    first = next((part for part in complete if part.status != "done"), complete[-1])
    return {"status": first.status, "error": first.error, "failure": first.failure}


def _prediction(stored: Rollout, imported: Rollout, calls: list[Transition]) -> dict[str, Any] | None:
    """The stored prediction; if it was read from LM calls that are no longer the last, it is read again."""
    if stored.prediction is None or len(calls) == len(stored.transitions):
        return imported.prediction if stored.prediction is None else stored.prediction
    return answer_in(calls) if stored.prediction == answer_in(stored.transitions) else stored.prediction


def _first_messages(transitions: list[Transition]) -> dict[str, Any]:
    """Messages of the first call, which replace inputs that were not recorded."""
    body = transitions[0].request.get("body") if transitions else None
    return as_inputs(body["messages"]) if isinstance(body, dict) and "messages" in body else {}


def _verdict_key(verdict: Verdict) -> tuple[object, ...]:
    return clean(verdict.criterion), verdict.scope, verdict.grade, clean(verdict.reason)


def _started(transition: Transition) -> float:
    return transition.started_at or float("inf")
