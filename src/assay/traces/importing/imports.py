"""Histories of agents that were traced elsewhere, brought into the store: OTLP files, exports of Langfuse and of MLflow.

One trace is one rollout, whose id follows from the trace's: a file that is imported twice, and files that hold parts of a trace,
add what is not there yet. Traces may be interleaved over a file: its rows are sorted by trace on disk first, so that a file
of JSON lines takes the memory of its largest trace. Does not fetch from anybody's server.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.datasets.tasks import content_hash
from assay.errors import DataError
from assay.traces import schema
from assay.traces.importing import genai, langfuse, mlflow, otlp
from assay.traces.importing.chat import as_inputs
from assay.traces.importing.files import Part, Row, Skipped, Sorted, is_text, json_rows, run_of
from assay.traces.importing.spans import Imported, Trace, answer_in, to_rollout
from assay.traces.records import Rollout, Transition, Verdict
from assay.traces.rows import clean, rollout_of, transition_of
from assay.traces.store import Store

__all__ = ["KINDS", "ImportReport", "Imported", "Skipped", "import_traces", "read_langfuse", "read_mlflow", "read_otlp"]

KINDS = ("otlp", "langfuse", "mlflow")
_REASONS = 20  # kept of a report
_FLUSH = 500  # LM calls put before the store is waited for
_Take = Callable[[Row, Sorted], Iterator[Skipped]]
_TraceOf = Callable[[str, Iterable[Part]], Trace]
_READERS: dict[str, tuple[_Take, _TraceOf]] = {
    "otlp": (otlp.take, genai.trace_of),
    "langfuse": (langfuse.take, langfuse.trace_of),
    "mlflow": (mlflow.take, mlflow.trace_of),
}


def read_otlp(path: str | Path, *, score: str | None = None) -> Iterator[Imported]:
    """Rollouts of a file of OpenTelemetry spans with the GenAI conventions, and what was `Skipped` of it.

    Args:
        path: an export request as JSON, JSON lines of them (the collector's file exporter), or protobuf.
        score: the score that counts, where a trace carries several.
    Raises:
        DataError: there is no such file, it is empty, no OTLP, or holds no LM call.
        MissingExtra: it is protobuf, and `opentelemetry-proto` is not installed.
    """
    return _read("otlp", Path(path), score, run_of(Path(path)))


def read_langfuse(path: str | Path, *, score: str | None = None) -> Iterator[Imported]:
    """Rollouts of an export of Langfuse, and what was `Skipped` of it. See `read_otlp`."""
    return _read("langfuse", Path(path), score, run_of(Path(path)))


def read_mlflow(path: str | Path, *, score: str | None = None) -> Iterator[Imported]:
    """Rollouts of MLflow traces as `Trace.to_json()` writes them, and what was `Skipped`. See `read_otlp`."""
    return _read("mlflow", Path(path), score, run_of(Path(path)))


def _read(kind: str, path: Path, score: str | None, run_id: str) -> Iterator[Imported]:
    if kind != "otlp" and not is_text(path):
        raise DataError(f"{path} is no JSON")
    rollouts, traces, why = 0, 0, ""
    with Sorted.open() as parts:
        for skipped in _taken(kind, path, parts):
            why = why or f"; {skipped.where}: {skipped.reason}"
            yield skipped
        for trace_id, found in parts.traces():
            traces += 1
            for imported in [found] if isinstance(found, Skipped) else _rollout(kind, run_id, trace_id, found, score):
                rollouts += isinstance(imported, Rollout)
                why = why or (f"; {imported.where}: {imported.reason}" if isinstance(imported, Skipped) else "")
                yield imported
    if not rollouts:
        raise DataError(f"{path}: no LM call of {kind} in it, in {traces} traces{why}")


def _taken(kind: str, path: Path, parts: Sorted) -> Iterator[Skipped]:
    """Sorts the rows of a file into `parts`."""
    take, right = _READERS[kind][0], False
    for row in otlp.rows(path) if kind == "otlp" else json_rows(path):
        if isinstance(row, Skipped):
            yield row
        elif not isinstance(row.value, dict):
            yield Skipped(where=row.where, reason=f"expected an object, found {type(row.value).__name__}")
        elif (other := _kind_of(row.value)) in (kind, None):
            right = True
            yield from take(row, parts)
        elif right:
            yield Skipped(where=row.where, reason=f"a row of {other}, not of {kind}")
        else:
            raise DataError(f"{row.where}: this is no {kind}: it looks like {other}. Use: assay traces import {other} {path}")


def _rollout(kind: str, run_id: str, trace_id: str, parts: list[Part], score: str | None) -> Iterator[Imported]:
    try:
        yield from to_rollout(kind, run_id, _READERS[kind][1](trace_id, parts), score=score)
    except RecursionError:
        yield Skipped(where=parts[0].where, reason="nested too deeply", trace=trace_id)


def _kind_of(told: Mapping[str, Any]) -> str | None:
    """Whose row this is, where it tells."""
    if told.keys() & {"resourceSpans", "resource_spans", "resourceLogs", "resource_logs", "resourceMetrics", "resource_metrics"}:
        return "otlp"
    if ("info" in told and "data" in told) or "request_metadata" in told:
        return "mlflow"
    if told.keys() & {"traceId", "trace_id", "observations"} and told.keys() & {"startTime", "start_time", "dataType", "data_type", "observations"}:
        return "langfuse"
    return None


# -- into the store


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What came of a file. `unchanged` rollouts were in the store already; `duplicates` are rows that stood in the file twice;
    `skipped` counts everything else that was not taken, and `reasons` are the first of them, one by one."""

    run_id: str
    kind: str
    rollouts: int = 0
    unchanged: int = 0
    transitions: int = 0
    tool_calls: int = 0
    scored: int = 0
    rated: int = 0
    duplicates: int = 0
    skipped: int = 0
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def import_traces(store: Store, kind: str, path: str | Path, *, score: str | None = None) -> ImportReport:
    """Brings a file's traces into the store.

    Args:
        kind: `otlp`, `langfuse` or `mlflow`.
        score: the score that counts, where a trace carries several; the others are kept as verdicts.
    Raises:
        DataError: the kind does not exist, or the file cannot be read as it; nothing is stored then.
        StoreError: the store refused rows.
    """
    if kind not in KINDS:
        raise DataError(f"there is no import of {kind!r}: there are {', '.join(KINDS)}")
    report = ImportReport(run_id=run_of(Path(path)), kind=kind)
    config, begun = {"kind": kind, "path": str(path), "score": score}, time.time()
    store.flush()
    waiting, opened = 0, False
    for imported in _read(kind, Path(path), score, report.run_id):
        if isinstance(imported, Skipped):
            report = _told(report, imported)
            continue
        if not opened:
            store.put_run(report.run_id, kind="import", config=config, status="running", started_at=begun)
            opened = True
        stored = _stored(store, imported.id)
        merged = imported if stored is None else _merged(stored, imported)
        if merged == stored:
            report = replace(report, unchanged=report.unchanged + 1)
            continue
        try:
            _put(store, merged)
        except RecursionError:
            report = _told(report, Skipped(where=str(path), reason="nested too deeply", trace=imported.id))
            continue
        report = _counted(report, imported)
        waiting += len(merged.transitions)
        if waiting >= _FLUSH:
            store.flush()
            waiting = 0
    if opened:
        store.put_run(report.run_id, kind="import", config=config, status="done", started_at=begun)
    store.flush()
    return report


def _told(report: ImportReport, skipped: Skipped) -> ImportReport:
    if skipped.repeated:
        return replace(report, duplicates=report.duplicates + 1)
    trace = f" (trace {skipped.trace})" if skipped.trace else ""
    reasons = report.reasons if len(report.reasons) >= _REASONS else (*report.reasons, f"{skipped.where}: {skipped.reason}{trace}")
    return replace(report, skipped=report.skipped + 1, reasons=reasons)


def _counted(report: ImportReport, rollout: Rollout) -> ImportReport:
    return replace(
        report, rollouts=report.rollouts + 1, transitions=report.transitions + len(rollout.transitions),
        tool_calls=report.tool_calls + len(rollout.tools), scored=report.scored + (rollout.score is not None),
        rated=report.rated + (rollout.human_rating is not None),
    )  # fmt: skip


def _put(store: Store, rollout: Rollout) -> None:
    store.put_rollout(rollout)
    for transition in rollout.transitions:
        store.put_transition(rollout.id, transition)


def _stored(store: Store, rollout_id: str) -> Rollout | None:
    """A rollout by its whole id, with its transitions."""
    r, t = schema.rollouts, schema.transitions
    with store.engine.connect() as connection:
        row = connection.execute(sa.select(r).where(r.c.id == rollout_id)).mappings().first()
        if row is None:
            return None
        found = rollout_of(row)
        steps = connection.execute(sa.select(t).where(t.c.rollout_id == rollout_id).order_by(t.c.t)).mappings()
        found.transitions = [transition_of(step) for step in steps]
    return found


def _merged(stored: Rollout, found: Rollout) -> Rollout:
    """What the store holds, with what it did not hold: LM calls of another part of the trace, scores given since. What was said of the
    rollout here, a person's rating or a rubric's score, stays."""
    known = {transition.request.get("span") for transition in stored.transitions}
    added = [t for t in found.transitions if clean(str(t.request["span"])) not in known]
    calls = [replace(t, t=at) for at, t in enumerate(sorted([*stored.transitions, *added], key=_started))] if added else stored.transitions
    said = {_said(verdict) for verdict in stored.verdicts}
    inputs = found.inputs if stored.inputs == _asked(stored.transitions) else stored.inputs
    if inputs == _asked(found.transitions):
        inputs = _asked(calls) or inputs
    task_id = stored.task_id if inputs == stored.inputs else content_hash(inputs)[:16]
    rescored = found.score is not None and (stored.score is None or stored.rubric.startswith("imported:"))
    return replace(
        stored, inputs=inputs, task_id=task_id, expected={**found.expected, **stored.expected},
        prediction=_prediction(stored, found, calls),
        status=found.status if stored.status == "done" else stored.status, error=found.error if stored.error is None else stored.error,
        score=found.score if rescored else stored.score, rubric=found.rubric if rescored else stored.rubric,
        human_rating=found.human_rating if stored.human_rating is None else stored.human_rating,
        verdicts=[*stored.verdicts, *(verdict for verdict in found.verdicts if _said(verdict) not in said)],
        started_at=min(stored.started_at, found.started_at), ended_at=max(filter(None, (stored.ended_at, found.ended_at)), default=None),
        early_tools=stored.early_tools or found.early_tools, transitions=calls,
    )  # fmt: skip


def _prediction(stored: Rollout, found: Rollout, calls: list[Transition]) -> dict[str, Any] | None:
    """The stored one; of LM calls that were then the last ones, what all of them ended with."""
    if stored.prediction is None or len(calls) == len(stored.transitions):
        return found.prediction if stored.prediction is None else stored.prediction
    return answer_in(calls) if stored.prediction == answer_in(stored.transitions) else stored.prediction


def _asked(transitions: list[Transition]) -> dict[str, Any]:
    """What the first call was sent: what stands for inputs that nobody recorded."""
    return as_inputs(transitions[0].request["body"]["messages"]) if transitions else {}


def _said(verdict: Verdict) -> tuple[object, ...]:
    return clean(verdict.criterion), verdict.scope, verdict.grade, clean(verdict.reason)


def _started(transition: Transition) -> float:
    return transition.started_at or float("inf")
