"""Reads Langfuse exports: API pages and traces, UI downloads and tables, blob storage rows; camelCase or snake_case.

Observations, scores and traces may be in one file in any order, for instance concatenated files of a blob export.
Source: langfuse.com/docs/api-and-data-platform (Observations API v2, Export Field Reference, Export from UI).
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from assay.traces.importers.files import Part, Row, Skipped, Sorted
from assay.traces.importers.genai import span_of
from assay.traces.importers.otlp import LMCall, Mark, Span, Trace, as_text, count_of, number_of, parsed, usage_of
from assay.traces.otlp import spans as names

_NESTED_FIELDS = ("data", "observations", "traces", "scores")  # fields with nested rows
_PREFIX = "langfuse.observation."  # of the attributes that Langfuse's SDK writes to OTLP
_NUMBERS = ("NUMERIC", "BOOLEAN", "")  # score types whose `value` is a grade; for categories it is an index


def _get(row: Any, *names: str) -> Any:
    """Value of the first field that is present, in camel case or snake case."""
    for name in names if isinstance(row, dict) else ():
        snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
        if (value := row.get(name, row.get(snake))) is not None:
            return value
    return None


def take(row: Row, into: Sorted) -> Iterator[Skipped]:
    """Add the observations, scores and traces of a row to their trace."""
    yield from _take(row.where, row.value, into, "")


def _take(where: str, row: Any, into: Sorted, inside: str) -> Iterator[Skipped]:
    """Add one object with its nested rows.

    Args:
        inside: Id of the enclosing trace, used if the object has none.
    """
    if not isinstance(row, dict):
        yield Skipped(where=where, reason=f"expected an object, found {type(row).__name__}")
        return
    kind, trace = _kind_of(row), as_text(_get(row, "traceId")) or inside
    if kind == "trace":
        trace = as_text(row.get("id")) or trace
    nested = [(name, row[name]) for name in _NESTED_FIELDS if isinstance(row.get(name), list)]
    if isinstance(row.get("trace"), dict):  # older UI downloads: a trace next to its observations
        trace = as_text(row["trace"].get("id"))
        nested.append(("trace", [row["trace"]]))
    for name, rows in nested:
        for item in rows:
            if not (name == "scores" and isinstance(item, str)):  # lists of traces have score ids instead of scores
                yield from _take(where, item, into, trace if kind == "trace" or name != "data" else inside)
    if not kind:
        if not nested:
            yield Skipped(
                where=where,
                reason=f"not an observation, score or trace: its fields are {', '.join(map(repr, list(row)[:5]))}",
            )
    elif not trace:
        yield Skipped(where=where, reason=f"the {kind} {as_text(row.get('id'))!r:.100} belongs to no trace")
    else:
        fields = {key: value for key, value in row.items() if key not in _NESTED_FIELDS and key != "trace"}
        if skipped := into.add(trace, kind, as_text(row.get("id")), where, fields):
            yield skipped


def _kind_of(row: Mapping[str, Any]) -> str:
    if _get(row, "startTime") is not None and row.get("type"):
        return "observation"
    if _get(row, "dataType") is not None or (
        "source" in row and "name" in row and ("value" in row or _get(row, "stringValue") is not None)
    ):
        return "score"
    return "trace" if "id" in row and ("timestamp" in row or "observations" in row) else ""


def trace_of(trace_id: str, parts: Iterable[Part]) -> Trace:
    """Trace from its rows."""
    trace = Trace(id=trace_id, where="")
    scores: list[Part] = []
    rows: list[Mapping[str, Any]] = []
    for part in parts:
        trace.where = trace.where or part.where
        if part.kind == "score":
            scores.append(part)
        elif part.kind == "observation":
            trace.spans.append(_span(part, len(trace.spans)))
            rows.append(part.value)
        else:
            rows.insert(0, part.value)
            trace.whole = True
            trace.inputs, trace.outputs = part.value.get("input"), part.value.get("output")
            trace.program = as_text(part.value.get("name"))
    tops = {span.id for span in trace.spans if not span.parent}
    for part in scores:
        _mark(trace, part, tops)
    trace.program = trace.program or _first_text(rows, "traceName")
    trace.version = _first_text(rows, "release") or _first_text(rows, "version")
    trace.user, trace.session = _first_text(rows, "userId") or None, _first_text(rows, "sessionId") or None
    metadata = [parsed(row.get("metadata")) for row in rows]
    trace.tenant = next((name for row in metadata if (name := as_text(_get(row, "tenant", "tenantId")))), None)
    return trace


def _first_text(rows: Iterable[Mapping[str, Any]], name: str) -> str:
    return next((text for row in rows if (text := as_text(_get(row, name)))), "")


def _seconds(value: Any) -> float | None:
    """Unix seconds from ISO 8601 (UTC without a zone) or a Unix time in seconds or milliseconds."""
    number = number_of(value)
    if number is not None:  # 1e11 seconds are the year 5138, 1e11 milliseconds March 1973
        number = number / 1000 if number > 1e11 else number
        return number if 0 < number < 1e11 else None
    try:
        time = datetime.fromisoformat(as_text(value))
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _span(part: Part, number: int) -> Span:
    """A span, whose attributes are those of Langfuse's SDK in OTLP."""
    row = part.value
    tool_calls = _get(row, "toolCalls")  # have a column of their own
    calls = [parsed(call) for call in tool_calls] if isinstance(tool_calls, list) else None
    called = None if calls is None else [{"role": "assistant", "tool_calls": calls}]
    prompt, completion = _usage(row)
    attributes = {
        f"{_PREFIX}type": row.get("type"),
        f"{_PREFIX}input": row.get("input"),
        f"{_PREFIX}output": row.get("output") or called,
        f"{_PREFIX}model.parameters": _get(row, "modelParameters"),
        names.REQUEST_MODEL: _get(row, "providedModelName", "model"),
        names.TOOLS: _get(row, "toolDefinitions"),
        names.PROMPT_TOKENS: prompt,
        names.COMPLETION_TOKENS: completion,
        names.COST: _cost(row),
    }
    failed = as_text(row.get("level")).upper() == "ERROR"
    span_row = {
        "id": as_text(row.get("id")),
        "parent": as_text(_get(row, "parentObservationId")),
        "name": as_text(row.get("name")),
        "start": _seconds(_get(row, "startTime")),
        "end": _seconds(_get(row, "endTime")),
        "error": as_text(_get(row, "statusMessage")) or "error" if failed else None,
        "attributes": {name: value for name, value in attributes.items() if value not in (None, "")},
    }
    span = span_of(part.where, number, span_row, [])
    span.inputs_in, span.outputs_in = "input", "output"  # the names of the columns, for messages
    span.unknown = [name.removeprefix(_PREFIX) for name in span.unknown]
    if isinstance(span.does, LMCall):
        span.does.asked_in = "input"
    return span


def _usage(row: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Prompt and completion tokens: Langfuse's sums, else the sum of details starting with `input` or `output`.

    Cached tokens are included.
    """
    details = parsed(_get(row, "usageDetails", "usage"))
    details = details if isinstance(details, dict) else {}
    named = {f"{side}_tokens": _get(row, f"{side}Tokens") for side in ("prompt", "completion")}
    counts: list[int | None] = []
    for side, other in zip(("input", "output"), usage_of(details, named), strict=True):
        total = count_of(_get(row, f"{side}Usage"))
        parts = [n for key, part in details.items() if key.startswith(side) and (n := count_of(part)) is not None]
        counts.append(total if total is not None else sum(parts) if parts else other)
    return counts[0], counts[1]


def _cost(row: Mapping[str, Any]) -> float | None:
    """Cost in dollars. A total of 0 without details means that Langfuse has no price for the model."""
    details = parsed(_get(row, "costDetails"))
    details = details if isinstance(details, dict) else {}
    total = number_of(details.get("total"))
    if total is None:
        total = number_of(_get(row, "totalCost", "calculatedTotalCost"))
        total = None if total == 0 and not details else total
    return total if total is not None and total >= 0 else None


def _mark(trace: Trace, part: Part, tops: set[str]) -> None:
    row = part.value
    kind, label = as_text(_get(row, "dataType")).upper(), _get(row, "stringValue")
    if kind == "CORRECTION":
        trace.expected["output"] = parsed(label)
        return
    value = row.get("value")
    if kind not in _NUMBERS:
        value = as_text(label if label is not None else value)
    elif kind == "BOOLEAN" and value in (0, 1):
        value = bool(value)
    observation = as_text(_get(row, "observationId"))
    trace.marks.append(
        Mark(
            name=as_text(row.get("name")),
            value=value,
            human=as_text(row.get("source")).upper() == "ANNOTATION",
            where=part.where,
            step=bool(observation) and observation not in tops,
            reason=as_text(row.get("comment")),
            label=None if label is None else as_text(label),
        )
    )
