"""Reads LM calls and tools from the attributes of OpenTelemetry spans.

Supports all versions of the GenAI conventions and what is built on them: messages as attributes (from 1.37), as span
events or log records (1.28 to 1.36), as indexed attributes (OpenLLMetry), OpenInference, and the SDKs of Langfuse and
MLflow.
Source: github.com/open-telemetry/semantic-conventions-genai, github.com/Arize-ai/openinference.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from assay.traces.importers.answers import answers_of
from assay.traces.importers.chat import body_of
from assay.traces.importers.files import Part
from assay.traces.importers.spans import LMCall, Mark, Span, ToolUse, Trace
from assay.traces.importers.tools import tools_of
from assay.traces.importers.values import as_text, count_of, number_of, parsed, usage_of
from assay.traces.otlp import names

__all__ = ["trace_of"]

Attributes = Mapping[str, Any]
Event = tuple[str, dict[str, Any]]  # name, attributes
_CALLS = {"chat", "text_completion", "generate_content"}  # gen_ai.operation.name of LM calls
_KINDS = (names.KIND, "langfuse.observation.type", "mlflow.spanType", "traceloop.span.kind")
_LM_KINDS = {"llm", "generation", "chat_model"}
_INPUTS = (
    names.INPUT,
    "langfuse.observation.input",
    "langfuse.trace.input",
    "mlflow.spanInputs",
    "traceloop.entity.input",
    "request_data",
)
_OUTPUTS = (
    names.OUTPUT,
    "langfuse.observation.output",
    "langfuse.trace.output",
    "mlflow.spanOutputs",
    "traceloop.entity.output",
)
_JSON = ("mlflow.", "traceloop.entity.")  # values are JSON, also strings
_MODEL = (names.REQUEST_MODEL, "langfuse.observation.model.name", "mlflow.llm.model", "llm.model_name")
_USER = (names.USER, "enduser.id", "langfuse.user.id", "traceloop.association.properties.user_id")
_TENANT = (
    names.TENANT,
    "tenant",
    "tenant_id",
    "traceloop.association.properties.tenant_id",
    "traceloop.association.properties.tenant",
)
_SESSION = (
    "session.id",
    names.CONVERSATION,
    "langfuse.session.id",
    "traceloop.association.properties.session_id",
)
_PROGRAM = (names.AGENT, "langfuse.trace.name", "traceloop.entity.name", "service.name")
_PROMPT_TOKENS = (
    names.PROMPT_TOKENS,
    "gen_ai.usage.prompt_tokens",
    "llm.usage.prompt_tokens",
    "llm.token_count.prompt",
)
_COMPLETION_TOKENS = (
    names.COMPLETION_TOKENS,
    "gen_ai.usage.completion_tokens",
    "llm.usage.completion_tokens",
    "llm.token_count.completion",
)
_USAGE = ("langfuse.observation.usage_details", "mlflow.chat.tokenUsage")
_COST = (names.COST, "gen_ai.usage.total_cost", "llm.cost.total")
_COSTS = ("langfuse.observation.cost_details", "mlflow.llm.cost")
_PARAMETERS = ("llm.invocation_parameters", "langfuse.observation.model.parameters")


def trace_of(trace_id: str, parts: Iterable[Part]) -> Trace:
    """Trace from its spans and log records."""
    trace = Trace(id=trace_id, where="")
    spans: list[Part] = []
    logged: dict[str, list[Event]] = {}
    for part in parts:
        trace.where = trace.where or part.where
        if part.kind == "span":
            spans.append(part)
        else:
            logged.setdefault(part.value["span"], []).append((part.value["name"], part.value["attributes"]))
    for number, part in enumerate(spans):
        row = part.value
        events = [*((name, attributes) for name, attributes in row["events"]), *logged.get(row["id"], ())]
        trace.spans.append(_span(row["id"] or f"#{number}", part.where, row, events))
        trace.marks += [_mark(attributes, part.where) for name, attributes in events if name == names.EVALUATION]
    trace.spans = _joined_streams(trace.spans, {part.value["id"]: part.value["attributes"] for part in spans})
    top = sorted(spans, key=lambda part: bool(part.value["parent"]))  # attributes of the root span have priority
    attributes = [{**part.value["resource"], **part.value["attributes"]} for part in top]
    trace.user, trace.tenant, trace.session = (_first_text(attributes, names) for names in (_USER, _TENANT, _SESSION))
    trace.program, trace.version = (
        _first_text(attributes[:1], _PROGRAM) or "",
        _first_text(attributes, (names.SERVICE_VERSION,)) or "",
    )
    return trace


def _joined_streams(spans: list[Span], attributes: Mapping[str, Attributes]) -> list[Span]:
    """Merge Logfire's records of a stream, a span for the request and a later log with the answer, into one call."""
    kinds = {span.id: attributes.get(span.id, {}).get("logfire.span_type") for span in spans}
    merged = [span for span in spans if kinds[span.id] != "pending_span"]
    for log in [span for span in merged if kinds[span.id] == "log" and isinstance(span.does, LMCall)]:
        # time at which the request's span ended
        began = (log.start or 0.0) - (number_of(attributes[log.id].get("duration")) or 0.0)
        candidates = [
            span for span in merged if kinds[span.id] == "span" and span.parent == log.parent and _awaits(span, log)
        ]
        if candidates:
            request = min(candidates, key=lambda span: abs((span.end or 0.0) - began))
            request.does, request.end, request.error = log.does, log.start, request.error or log.error
            merged.remove(log)
    return merged


def _awaits(span: Span, log: Span) -> bool:
    """Whether a log has the answer to the request of a span that has no answer yet."""
    request, answered = span.does, log.does
    if not isinstance(request, LMCall) or not isinstance(answered, LMCall) or request.choices:
        return False
    return request.body["messages"] == answered.body["messages"] and (span.start or 0.0) <= (log.start or 0.0)


def _first_text(sources: Iterable[Attributes], names: Iterable[str]) -> str | None:
    return next(
        (as_text(source[name]) for source in sources for name in names if source.get(name) not in (None, "")), None
    )


def _first(attributes: Attributes, names: Iterable[str]) -> Any:
    """Value of the first attribute that is present."""
    for name in names:
        if (value := attributes.get(name)) is not None:
            return _loaded(value) if name.startswith(_JSON) else value
    return None


def _loaded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _span(span_id: str, where: str, row: Mapping[str, Any], events: list[Event]) -> Span:
    attributes: Attributes = row["attributes"]
    for name, event_attributes in events:
        if name == "gen_ai.client.inference.operation.details":
            attributes = {**event_attributes, **attributes}
    operation = attributes.get(names.OPERATION)
    operation = operation if isinstance(operation, str) else None
    does: LMCall | ToolUse | None = None
    kinds = {as_text(_first(attributes, (name,))).lower() for name in _KINDS}
    if operation in _CALLS or (operation is None and _asks(attributes, kinds)):
        does = _call(attributes, events)
    elif operation == "execute_tool" or (operation is None and "tool" in kinds):
        does = _tool(row["name"], attributes, events)
    return Span(
        id=span_id,
        parent=row["parent"],
        name=row["name"],
        where=where,
        start=row["start"],
        end=row["end"],
        error=row["error"],
        does=does,
        inputs=attributes.get(names.INPUT_MESSAGES, _first(attributes, _INPUTS)),
        outputs=attributes.get(names.OUTPUT_MESSAGES, _first(attributes, _OUTPUTS)),
        own={name: value for name, value in attributes.items() if name.startswith(names.PREFIX)},
    )


def _asks(attributes: Attributes, kinds: set[str]) -> bool:
    """Whether a span without an operation name is an LM call, by its kind or (before 1.27) by its token usage."""
    if kinds - {""}:
        return bool(kinds & _LM_KINDS)
    if attributes.get("llm.request.type") in ("chat", "completion"):
        return True
    used = any(name in attributes for name in (*_COMPLETION_TOKENS, "gen_ai.completion", "gen_ai.completion.0.content"))
    return used and any(name in attributes for name in ("gen_ai.request.model", "gen_ai.system"))


def _mark(attributes: Attributes, where: str) -> Mark:
    label = attributes.get(names.EVALUATION_LABEL)
    return Mark(
        name=as_text(attributes.get(names.EVALUATION_NAME)),
        value=attributes.get(names.EVALUATION_VALUE),
        where=where,
        label=None if label is None else as_text(label),
        reason=as_text(attributes.get(names.EVALUATION_REASON)),
    )


# -- LM calls


def _call(attributes: Attributes, events: list[Event]) -> LMCall:
    events = [*events, *_listed_events(attributes.get("events"))]
    raw, answer = body_of(_first(attributes, _INPUTS)), _first(attributes, _OUTPUTS)
    settings = {
        ours: attributes[name]
        for theirs, ours in names.SETTINGS.items()
        if (name := f"gen_ai.request.{theirs}") in attributes
    }
    parameters = parsed(_first(attributes, _PARAMETERS))
    body = {**raw, **(body_of({**parameters, "messages": []}) if isinstance(parameters, dict) else {}), **settings}
    body["messages"] = _messages(attributes, events) or raw["messages"]
    defined = (
        attributes.get(names.TOOLS)
        or _indexed(attributes, "llm.request.functions")
        or _indexed(attributes, "llm.tools")
    )
    if tools := tools_of(defined):
        body["tools"] = tools
    if model := _first(attributes, _MODEL):
        body["model"] = body.get("model") if "gen_ai.request.model" not in attributes and body.get("model") else model
    reasons = attributes.get(names.FINISH_REASONS, attributes.get("llm.finish_reason"))
    answer_value = _answer(attributes, events)
    usage = usage_of(_first(attributes, _USAGE), answer)
    prompt, completion = (count_of(_first(attributes, names)) for names in (_PROMPT_TOKENS, _COMPLETION_TOKENS))
    costs = parsed(_first(attributes, _COSTS))
    total = (
        next((costs[key] for key in ("total", "total_cost") if costs.get(key) is not None), None)
        if isinstance(costs, dict)
        else None
    )
    cost = number_of(next((value for value in (_first(attributes, _COST), total) if value is not None), None))
    return LMCall(
        body=body,
        choices=answers_of(answer if answer_value is None else answer_value, reasons),
        response_id=as_text(attributes.get(names.RESPONSE_ID)),
        answered_by=as_text(_first(attributes, (names.RESPONSE_MODEL, "llm.model_name", "mlflow.llm.model"))),
        prompt_tokens=usage[0] if prompt is None else prompt,
        completion_tokens=usage[1] if completion is None else completion,
        cost_usd=cost if cost is not None and cost >= 0 else None,
    )


def _messages(attributes: Attributes, events: list[Event]) -> list[dict[str, Any]]:
    """Messages of the request, by the first convention that has them."""
    messages, system = (parsed(attributes.get(name)) for name in (names.INPUT_MESSAGES, names.SYSTEM))
    if messages is None:
        parsed_events = [(name.removeprefix("gen_ai.").partition("."), payload) for name, payload in events]
        messages = [
            {"role": role, **_payload(payload)}
            for (role, _, rest), payload in parsed_events
            if rest in ("message", "instruction")
        ]
    messages = messages or _indexed(attributes, "gen_ai.prompt") or _indexed(attributes, "llm.input_messages")
    if not messages:
        request = next(
            (payload.get("gen_ai.prompt") for name, payload in events if name == "gen_ai.content.prompt"),
            attributes.get("gen_ai.prompt"),
        )
        messages = body_of(request)["messages"]
    result: list[dict[str, Any]] = body_of({"messages": messages, **({"system": system} if system else {})})["messages"]
    return result


def _answer(attributes: Attributes, events: list[Event]) -> Any:
    """The answer, by the first convention that has it; None without one."""
    if (answer := attributes.get(names.OUTPUT_MESSAGES)) is not None:
        return answer
    if choices := [_choice(_payload(payload)) for name, payload in events if name == "gen_ai.choice"]:
        return choices
    if messages := _indexed(attributes, "gen_ai.completion") or _indexed(attributes, "llm.output_messages"):
        return messages
    texts = (payload.get("gen_ai.completion") for name, payload in events if name == "gen_ai.content.completion")
    return next(texts, attributes.get("gen_ai.completion", _logfire_answer(attributes)))


def _logfire_answer(attributes: Attributes) -> Any:
    """Answer in Logfire's own attributes, used before it followed the conventions: a message or the text of a
    stream.
    """
    data = parsed(attributes.get("response_data"))
    if not isinstance(data, dict):
        return None
    return (
        [{"message": data["message"]}] if isinstance(data.get("message"), dict) else data.get("combined_chunk_content")
    )


def _choice(payload: dict[str, Any]) -> dict[str, Any]:
    message = parsed(payload.get("message"))
    if message is None:
        message = {key: payload[key] for key in ("content", "tool_calls") if key in payload}
    return {"message": message, "finish_reason": payload.get("finish_reason")}


def _payload(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Content of an event: JSON in one attribute (Azure), JSON contents (Strands), or `message.*` attributes."""
    content = parsed(attributes.get("gen_ai.event.content"))
    if content is not None:
        return dict(content) if isinstance(content, dict) else {"content": content}
    fields = {key: value for key, value in attributes.items() if not key.startswith(("gen_ai.", "event.", "message."))}
    message = {key.removeprefix("message."): value for key, value in attributes.items() if key.startswith("message.")}
    if message:
        fields["message"] = message
    return {**fields, **({"content": _unpacked(fields["content"])} if "content" in fields else {})}


def _unpacked(value: Any) -> Any:
    """Decode message parts written as JSON text."""
    parts = parsed(value)
    known = (
        isinstance(parts, list)
        and parts
        and all(isinstance(p, dict) and p.keys() & {"type", "text", "toolUse", "toolResult"} for p in parts)
    )
    return parts if known else value


def _listed_events(value: Any) -> list[Event]:
    """Events that Pydantic AI lists in one attribute."""
    parsed_value = parsed(value)
    listed = [event for event in parsed_value if isinstance(event, dict)] if isinstance(parsed_value, list) else []
    return [(as_text(event.get("event.name")), dict(event)) for event in listed]


def _indexed(attributes: Attributes, prefix: str) -> list[Any]:
    """Attributes `prefix.0.role`, `prefix.0.tool_calls.1.name`, … as a list of objects."""
    tree: dict[str, Any] = {}
    prefix += "."
    for key, value in attributes.items():
        if not key.startswith(prefix):
            continue
        *steps, last = key[len(prefix) :].split(".")
        node = tree
        for step in steps:
            inner = node.get(step)
            if not isinstance(inner, dict):
                inner = node[step] = {}
            node = inner
        node[last] = _unpacked(value) if last == "content" else value
    items = _lists(tree)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _lists(node: Any) -> Any:
    """Convert objects with numeric keys to lists in numeric order."""
    if not isinstance(node, dict):
        return node
    inner = {key: _lists(value) for key, value in node.items()}
    if inner and all(key.isascii() and key.isdigit() and len(key) < 10 for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner


# -- tools


def _tool(span_name: str, attributes: Attributes, events: list[Event]) -> ToolUse:
    payloads = {name: _payload(payload) for name, payload in events}
    request, answered = payloads.get("gen_ai.tool.message", {}), payloads.get("gen_ai.choice", {})
    name = _first(attributes, (names.TOOL, "tool.name", "traceloop.entity.name")) or span_name.removeprefix(
        "execute_tool "
    )
    call_id = _first(attributes, (names.TOOL_CALL_ID, "tool_call.id", "langfuse.observation.metadata.tool_call_id"))
    arguments = _first(attributes, (names.TOOL_ARGUMENTS, "tool.parameters", *_INPUTS))
    result = _first(attributes, (names.TOOL_RESULT, *_OUTPUTS))
    return ToolUse(
        name=as_text(name),
        call_id=as_text(call_id or request.get("id")),
        arguments=request.get("content") if arguments is None else arguments,
        result=answered.get("message", answered.get("content")) if result is None else result,
    )
