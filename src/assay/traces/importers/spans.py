"""A trace, its spans and what each of them does, as the readers of all tracers' formats produce them."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.support.values import value_text
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
