"""Reads OTLP export requests, as JSON or protobuf, into spans and log records. `genai` interprets the attributes."""

import base64
import binascii
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.errors import DataError, MissingExtra
from assay.traces.importers.files import Row, Skipped, Sorted, is_text, json_rows
from assay.traces.importers.spans import as_text, exception_of, number_of, parsed, seconds_of

Attributes = dict[str, Any]
_BODY = ("role", "content", "message", "tool_calls", "parts")  # fields of an event's body
_RESOURCE = (
    "service.name",
    "service.version",
    "tenant",
    "tenant.id",
    "tenant_id",
    "user.id",
    "enduser.id",
    "session.id",
)


def rows(path: Path) -> Iterator[Row | Skipped]:
    """Export requests of a file: a JSON document, JSON lines (the collector's file exporter), or protobuf.

    Raises:
        DataError: the file is neither.
        MissingExtra: it is protobuf, and `opentelemetry-proto` is not installed.
    """
    return json_rows(path) if is_text(path) else _protobuf(path)


def _protobuf(path: Path) -> Iterator[Row | Skipped]:
    """One request, or several, each after its length in four bytes (the format of the collector's file exporter)."""
    try:
        to_dict = importlib.import_module("google.protobuf.json_format").MessageToDict
        broken = importlib.import_module("google.protobuf.message").DecodeError
        read = importlib.import_module("opentelemetry.proto.trace.v1.trace_pb2").TracesData.FromString
    except ModuleNotFoundError as error:
        raise MissingExtra("opentelemetry-proto", "otlp") from error
    data = path.read_bytes()
    is_single = data[:1] == b"\n"  # tag of a request's first field; a length starts with a zero byte
    at, number = 0, 0
    while at < len(data):
        start = at if is_single else at + 4
        end = len(data) if is_single else start + int.from_bytes(data[at : at + 4], "big")
        try:
            message = to_dict(read(data[start:end]))
        except broken as error:
            if not number:
                raise DataError(f"{path}: neither JSON nor OTLP protobuf: {error}") from None
            yield Skipped(where=f"{path}[{number}]", reason=f"not OTLP protobuf at byte {start}: {error}")
            return
        yield Row(f"{path}[{number}]", message)
        at, number = end, number + 1


# -- taking rows apart


def take(row: Row, into: Sorted) -> Iterator[Skipped]:
    """Add the spans and log records of one export request to their traces."""
    request = row.value
    spans, logs = _of(request, "resourceSpans"), _of(request, "resourceLogs")
    if not spans and not logs:
        reason = f"no spans: its fields are {', '.join(map(repr, list(request)[:5]))}"
        if "resourceSpans" not in request and (_field(request, "traceId") or _field(request, "spanId")):
            reason += ". A single span is not read: a line is an OTLP request, an object with 'resourceSpans'"
        yield Skipped(where=row.where, reason=reason)
    for group in spans:
        resource = {
            key: value
            for key, value in _attributes(_field(group, "resource", "attributes")).items()
            if key in _RESOURCE
        }
        for scope in _of(group, "scopeSpans") or _of(group, "instrumentationLibrarySpans"):
            for span in _of(scope, "spans"):
                yield from _take(row.where, "span", span, _span_row(span, resource), into)
    for group in logs:
        for scope in _of(group, "scopeLogs"):
            for record in _of(scope, "logRecords"):
                yield from _take(row.where, "event", record, _event_row(record), into)


def _take(where: str, kind: str, record: Mapping[str, Any], value: dict[str, Any], into: Sorted) -> Iterator[Skipped]:
    trace = _id(_field(record, "traceId"), 16)
    if not trace:
        yield Skipped(where=where, reason=f"the {kind} {as_text(value['name'])!r:.100} has no trace id")
    elif skipped := into.add(trace, kind, value["id"] if kind == "span" else "", where, value):
        yield skipped


def _span_row(span: Mapping[str, Any], resource: Attributes) -> dict[str, Any]:
    status = _field(span, "status")
    code = as_text(_field(status, "code")).removeprefix("STATUS_CODE_")
    attributes = _attributes(_field(span, "attributes"))
    events = [(as_text(event.get("name")), _attributes(_field(event, "attributes"))) for event in _of(span, "events")]
    error = None
    if code in ("2", "ERROR") or attributes.get("error.type"):
        exception = exception_of(event for name, event in events if name == "exception")
        error = as_text(_field(status, "message")) or exception or as_text(attributes.get("error.type")) or "error"
    return {
        "id": _id(_field(span, "spanId"), 8),
        "parent": _id(_field(span, "parentSpanId"), 8),
        "name": as_text(span.get("name")),
        "start": seconds_of(_field(span, "startTimeUnixNano")),
        "end": seconds_of(_field(span, "endTimeUnixNano")),
        "error": error,
        "attributes": attributes,
        "events": [event for event in events if event[0].startswith("gen_ai.")],
        "resource": resource,
    }


def _event_row(record: Mapping[str, Any]) -> dict[str, Any]:
    attributes, body = _attributes(_field(record, "attributes")), _value(_field(record, "body"))
    decoded = parsed(body)  # Python's logging has only texts
    body = decoded if isinstance(decoded, dict) and decoded.keys() & _BODY else body
    name = as_text(_field(record, "eventName") or attributes.get("event.name"))
    payload = body if isinstance(body, dict) else {} if body is None else {"content": body}
    return {"id": "", "span": _id(_field(record, "spanId"), 8), "name": name, "attributes": {**attributes, **payload}}


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _field(value: Any, *names: str) -> Any:
    """Value of a field by its path, in the spelling of JSON or protobuf."""
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value[name] if name in value else value.get(_snake(name))
    return value


def _of(value: Any, name: str) -> list[Mapping[str, Any]]:
    """The objects of a list."""
    items = _field(value, name)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _id(value: Any, size: int) -> str:
    """An id in hex, from hex or base64; empty if it is all zeros."""
    if not isinstance(value, str):
        return ""
    if len(value) != 2 * size:
        try:
            raw = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        value = raw.hex() if len(raw) == size else value
    return "" if not value.strip("0") else value.lower()


def _attributes(value: Any) -> Attributes:
    if isinstance(value, dict):  # format of some JavaScript exporters
        return dict(value)
    pairs = [pair for pair in value if isinstance(pair, dict)] if isinstance(value, list) else []
    return {as_text(pair.get("key")): _value(pair.get("value")) for pair in pairs}


def _value(wrapped: Any) -> Any:
    """An `AnyValue`: `stringValue`, `intValue` (text or number), `doubleValue`, `boolValue`, `arrayValue`,
    `kvlistValue`, `bytesValue`.
    """
    if not isinstance(wrapped, dict) or len(wrapped) != 1:
        return None if wrapped == {} else wrapped
    kind, value = next(iter(wrapped.items()))
    match kind.replace("_", "").removesuffix("Value").removesuffix("value"):
        case "int":
            number = number_of(value)
            return value if number is None else int(value) if not isinstance(value, float) else int(number)
        case "double":
            return float(value) if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity") else value
        case "array":
            values = _field(value, "values")
            return [_value(item) for item in values] if isinstance(values, list) else []
        case "kvlist":
            return _attributes(_field(value, "values"))
        case "string" | "bool" | "bytes":
            return value
    return dict(wrapped)
