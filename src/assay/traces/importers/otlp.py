"""A trace, its spans and what each of them does, as the readers of all tracers' formats produce them; OTLP.

Export requests of OTLP are read, as JSON or protobuf, into spans and log records. `genai` interprets the attributes.
"""

import base64
import binascii
import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import DataError, MissingExtra
from assay.support.values import value_text
from assay.traces.importers.files import Row, Skipped, Sorted, is_text, json_rows
from assay.traces.messages.gemini import field as field_of, plain_types


@dataclass(kw_only=True)
class LMCall:
    """An LM call: body of the request and choices of the answer, in OpenAI's format."""

    body: dict[str, Any]
    choices: list[dict[str, Any]]
    answered_by: str = ""  # model name in the answer
    response_id: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    asked_in: str = ""  # name of the field that has the request

    @property
    def says(self) -> bool:
        """Whether messages or an answer were recorded."""
        return bool(self.body.get("messages")) or any(
            any(c["message"].get(key) for key in ("content", "tool_calls", "refusal")) for c in self.choices
        )


@dataclass(kw_only=True)
class ToolUse:
    """A tool call of a span; `call_id` is empty and `result` None where the span does not have them."""

    name: str
    call_id: str = ""
    arguments: Any = None
    result: Any = None


@dataclass(kw_only=True)
class Span:
    """A span. Times are Unix seconds; `does` is its LM call or tool call, None if it only contains other spans."""

    id: str
    parent: str = ""
    name: str = ""
    where: str = ""
    start: float | None = None
    end: float | None = None
    error: str | None = None
    does: LMCall | ToolUse | None = None
    inputs: Any = None
    outputs: Any = None
    inputs_in: str = "inputs"  # names of their fields
    outputs_in: str = "outputs"
    tools: list[dict[str, Any]] = field(default_factory=list)  # definitions, for the calls inside
    system: list[dict[str, Any]] = field(default_factory=list)  # system messages, for the calls inside
    unknown: list[str] = field(default_factory=list)  # names of fields whose shape is not understood
    own: dict[str, Any] = field(default_factory=dict)  # attributes of assay's own export


@dataclass(kw_only=True)
class Mark:
    """A score. `human`: given by a rater; `step`: for one span, not for the whole run."""

    name: str
    value: Any
    human: bool = False
    step: bool = False
    reason: str = ""
    label: str | None = None
    where: str = ""


@dataclass(kw_only=True)
class Trace:
    """A trace. `inputs` and `outputs` are those of the trace itself, not of its root span.

    `whole`: the trace itself was recorded, so that no root span is needed.
    """

    id: str
    where: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    whole: bool = False
    program: str = ""
    version: str = ""
    inputs: Any = None
    outputs: Any = None
    status: str | None = None
    error: str | None = None
    user: str | None = None
    tenant: str | None = None
    session: str | None = None
    expected: dict[str, Any] = field(default_factory=dict)


# -- Parses values of trace files: JSON text, numbers and token counts. Independent of the tracers.
#
# A value whose shape no reader knows is an `UnknownShape`. It is never converted to text.


_USAGES = ("usage", "usage_metadata", "usageMetadata")


class UnknownShape(ValueError):
    """A value is not in a format that the importers read."""


class Reading:
    """Reads the values of a span, and collects the names of those that are not understood."""

    def __init__(self) -> None:
        self.unknown: list[str] = []

    def read(self, name: str, reader: Callable[[Any], Any], value: Any, otherwise: Any) -> Any:
        """The value as `reader` gives it; `otherwise` if its shape is unknown."""
        try:
            return reader(value)
        except UnknownShape:
            self.unknown.append(name)
            return otherwise


_TOKENS = (
    ("prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "input", "promptTokenCount", "prompt_token_count"),
    (
        *("completion_tokens", "output_tokens", "completionTokens", "outputTokens", "output"),
        *("candidatesTokenCount", "candidates_token_count"),
    ),
)


def first_of(value: Mapping[str, Any], names: Iterable[str], default: Any = None) -> Any:
    """The first of these fields that is not null."""
    return next((value[name] for name in names if value.get(name) is not None), default)


def filled(**fields: Any) -> dict[str, Any]:
    """These fields, without those that are empty."""
    return {name: value for name, value in fields.items() if value}


def parsed(value: Any) -> Any:
    """Parse text that is a JSON object or array; return other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def decoded(value: Any) -> Any:
    """Decode a text whose tracer writes all values as JSON, also strings; return anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def as_text(value: Any) -> str:
    """Text unchanged, None as an empty string, other values as JSON."""
    if value is None:
        return ""
    return value_text(value)


def number_of(value: Any) -> float | None:
    """A finite number, also from text; None for other values and booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def count_of(value: Any) -> int | None:
    """A token count, or None."""
    number = number_of(value)
    return int(number) if number is not None and 0 <= number < 2**31 else None


def seconds_of(value: Any) -> float | None:
    """Unix seconds of a time in nanoseconds, or None."""
    number = number_of(value)
    return number / 1e9 if number is not None and 0 < number < 1e20 else None


def exception_of(events: Iterable[Mapping[str, Any]]) -> str:
    """Type and message of the first exception in the attributes of a span's events; empty without one."""
    names = ("exception.type", "exception.message")
    raised = next((event for event in events if any(event.get(name) for name in names)), {})
    return ": ".join(as_text(raised[name]) for name in names if raised.get(name))


def usage_of(*values: Any) -> tuple[int | None, int | None]:
    """Prompt and completion tokens from the first value that has them, under the names of any API.

    Args:
        values: Usage objects, or objects that contain one.
    """
    for value in map(parsed, values):
        inner = [value.get(name) for name in _USAGES] if isinstance(value, dict) else []
        usage = next((usage for usage in inner if isinstance(usage, dict)), value)
        if not isinstance(usage, dict):
            continue
        prompt, completion = (count_of(first_of(usage, names)) for names in _TOKENS)
        if prompt is not None or completion is not None:
            return prompt, completion
    return None, None


# -- Converts tool definitions of all APIs and tracers to OpenAI's format.


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Tool definitions in OpenAI's format, from nested or flat ones, Anthropic's, OpenInference's, or a mapping by
    name.
    """
    definitions = parsed(value)
    if isinstance(definitions, dict):
        by_name = [(name, parsed(definition)) for name, definition in definitions.items()]
        definitions = [
            {"name": name, **(definition if isinstance(definition, dict) else {"description": as_text(definition)})}
            for name, definition in by_name
        ]
    return [tool for item in definitions for tool in _tool(parsed(item))] if isinstance(definitions, list) else []


_SCHEMAS = ("parameters", "input_schema", "inputSchema", "parameters_json_schema", "parametersJsonSchema")


def _tool(definition: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(definition, dict):
        return
    inner = definition.get("tool")
    if isinstance(inner, dict):
        yield from _tool(parsed(inner.get("json_schema")) if inner.get("json_schema") else inner)
    elif isinstance(definition.get("function"), dict):
        yield dict(definition)
    elif isinstance(declared := field_of(definition, "functionDeclarations"), list):  # Gemini
        for declaration in declared:
            yield from _tool(declaration)
    elif isinstance(definition.get("toolSpec"), dict):  # Bedrock
        yield from _tool(definition["toolSpec"])
    elif definition.get("name"):
        schema = next((parsed(definition[key]) for key in _SCHEMAS if definition.get(key)), None)
        if isinstance(schema, dict) and isinstance(schema.get("json"), dict):
            schema = schema["json"]
        described = filled(description=definition.get("description"), parameters=plain_types(schema))
        yield {"type": "function", "function": {"name": definition["name"], **described}}


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
