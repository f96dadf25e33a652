"""OTLP: export requests as JSON or protobuf, taken apart into spans and log records. What the attributes mean, `genai` knows."""

import base64
import binascii
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.errors import DataError, MissingExtra
from assay.traces.importing.files import Row, Skipped, Sorted, is_text, json_rows
from assay.traces.importing.values import as_text, number_of

__all__ = ["rows", "take"]

Attributes = dict[str, Any]
_RESOURCE = ("service.name", "service.version", "tenant", "tenant.id", "tenant_id", "user.id", "enduser.id", "session.id")


def rows(path: Path) -> Iterator[Row | Skipped]:
    """Export requests of a file: a JSON document, JSON lines (the collector's file exporter), or protobuf.

    Raises:
        DataError: the file is neither.
        MissingExtra: it is protobuf, and `opentelemetry-proto` is not installed.
    """
    return json_rows(path) if is_text(path) else _protobuf(path)


def _protobuf(path: Path) -> Iterator[Row | Skipped]:
    """One request, or several with their lengths as four bytes before each, as the collector writes them."""
    try:
        to_dict = importlib.import_module("google.protobuf.json_format").MessageToDict
        broken = importlib.import_module("google.protobuf.message").DecodeError
        read = importlib.import_module("opentelemetry.proto.trace.v1.trace_pb2").TracesData.FromString
    except ModuleNotFoundError as error:
        raise MissingExtra("opentelemetry-proto", "otlp") from error
    data = path.read_bytes()
    one = data[:1] == b"\n"  # the tag of a request's first field; a length begins with a zero
    at, number = 0, 0
    while at < len(data):
        start = at if one else at + 4
        end = len(data) if one else start + int.from_bytes(data[at : at + 4], "big")
        try:
            message = to_dict(read(data[start:end]))
        except broken as error:
            if not number:
                raise DataError(f"{path}: neither JSON nor OTLP protobuf: {error}") from None
            yield Skipped(where=f"{path}[{number}]", reason=f"no OTLP protobuf at byte {start}: {error}")
            return
        yield Row(f"{path}[{number}]", message)
        at, number = end, number + 1


# -- taking rows apart


def take(row: Row, into: Sorted) -> Iterator[Skipped]:
    """Puts the spans and the log records of one export request where their trace is."""
    told = row.value
    spans, logs = _of(told, "resourceSpans"), _of(told, "resourceLogs")
    if not spans and not logs:
        yield Skipped(where=row.where, reason=f"no spans: its fields are {', '.join(map(repr, list(told)[:5]))}")
    for group in spans:
        resource = {key: value for key, value in _attributes(_field(group, "resource", "attributes")).items() if key in _RESOURCE}
        for scope in _of(group, "scopeSpans") or _of(group, "instrumentationLibrarySpans"):
            for span in _of(scope, "spans"):
                yield from _take(row.where, "span", span, _span_row(span, resource), into)
    for group in logs:
        for scope in _of(group, "scopeLogs"):
            for record in _of(scope, "logRecords"):
                yield from _take(row.where, "event", record, _event_row(record), into)


def _take(where: str, kind: str, told: Mapping[str, Any], value: dict[str, Any], into: Sorted) -> Iterator[Skipped]:
    trace = _id(_field(told, "traceId"), 16)
    if not trace:
        yield Skipped(where=where, reason=f"the {kind} {as_text(value['name'])!r:.100} has no trace id")
    elif found := into.add(trace, kind, value["id"] if kind == "span" else "", where, value):
        yield found


def _span_row(told: Mapping[str, Any], resource: Attributes) -> dict[str, Any]:
    status = _field(told, "status")
    code = as_text(_field(status, "code")).removeprefix("STATUS_CODE_")
    attributes = _attributes(_field(told, "attributes"))
    events = [(as_text(event.get("name")), _attributes(_field(event, "attributes"))) for event in _of(told, "events")]
    error = None
    if code in ("2", "ERROR") or attributes.get("error.type"):
        raised = next((given for name, given in events if name == "exception"), {})
        named = ": ".join(as_text(raised[key]) for key in ("exception.type", "exception.message") if raised.get(key))
        error = as_text(_field(status, "message")) or named or as_text(attributes.get("error.type")) or "error"
    return {
        "id": _id(_field(told, "spanId"), 8), "parent": _id(_field(told, "parentSpanId"), 8), "name": as_text(told.get("name")),
        "start": _seconds(_field(told, "startTimeUnixNano")), "end": _seconds(_field(told, "endTimeUnixNano")), "error": error,
        "attributes": attributes, "events": [event for event in events if event[0].startswith("gen_ai.")], "resource": resource,
    }  # fmt: skip


def _event_row(told: Mapping[str, Any]) -> dict[str, Any]:
    attributes, body = _attributes(_field(told, "attributes")), _value(_field(told, "body"))
    name = as_text(_field(told, "eventName") or attributes.get("event.name"))
    payload = body if isinstance(body, dict) else {} if body is None else {"content": body}
    return {"id": "", "span": _id(_field(told, "spanId"), 8), "name": name, "told": {**attributes, **payload}}


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _field(told: Any, *names: str) -> Any:
    """A field by its path, in JSON's spelling or protobuf's."""
    for name in names:
        if not isinstance(told, dict):
            return None
        told = told[name] if name in told else told.get(_snake(name))
    return told


def _of(told: Any, name: str) -> list[Mapping[str, Any]]:
    """The objects of a list."""
    found = _field(told, name)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _id(value: Any, size: int) -> str:
    """An id in hex, whether it came in hex or in base64; zeros are none."""
    if not isinstance(value, str):
        return ""
    if len(value) != 2 * size:
        try:
            raw = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        value = raw.hex() if len(raw) == size else value
    return "" if not value.strip("0") else value.lower()


def _seconds(value: Any) -> float | None:
    number = number_of(value)
    return number / 1e9 if number is not None and 0 < number < 1e20 else None


def _attributes(told: Any) -> Attributes:
    if isinstance(told, dict):  # as some exporters of JavaScript write them
        return dict(told)
    pairs = [pair for pair in told if isinstance(pair, dict)] if isinstance(told, list) else []
    return {as_text(pair.get("key")): _value(pair.get("value")) for pair in pairs}


def _value(told: Any) -> Any:
    """An `AnyValue`: `stringValue`, `intValue` (text or number), `doubleValue`, `boolValue`, `arrayValue`, `kvlistValue`, `bytesValue`."""
    if not isinstance(told, dict) or len(told) != 1:
        return None if told == {} else told
    kind, value = next(iter(told.items()))
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
    return dict(told)
