"""Reads LM calls and tools from the attributes of OpenTelemetry spans.

Supports all versions of the GenAI conventions and what is built on them: messages as attributes (from 1.37), as span
events or log records (1.28 to 1.36), as indexed attributes (OpenLLMetry), OpenInference, the SDKs of Langfuse and
MLflow, and the attributes of the Vercel AI SDK, Google ADK, Semantic Kernel, Agent Framework and Strands. What else an
attribute holds is not understood, and is counted with its name.
Source: github.com/open-telemetry/semantic-conventions-genai, github.com/Arize-ai/openinference.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from assay.traces.importers.chat import answers_of, body_of, settings_of
from assay.traces.importers.files import Part
from assay.traces.importers.otlp import (
    LMCall,
    Mark,
    Reading,
    Span,
    ToolUse,
    Trace,
    UnknownShape,
    as_text,
    count_of,
    decoded,
    first_of,
    number_of,
    parsed,
    tools_of,
    usage_of,
)
from assay.traces.otlp import spans as names

Attributes = Mapping[str, Any]
Event = tuple[str, dict[str, Any]]  # name, attributes
_CALLS = {"chat", "text_completion", "text_completions", "generate_content", "llm_call"}  # operations of LM calls
_TOOLS = {"execute_tool", "tool_call"}
_VERCEL = {  # ai.operationId
    **{f"ai.{name}": "chat" for name in ("generateText.doGenerate", "streamText.doStream")},
    **{f"ai.{name}": "chat" for name in ("generateObject.doGenerate", "streamObject.doStream")},
    "ai.toolCall": "execute_tool",
}
_ADK_REQUEST = "gcp.vertex.agent.llm_request"
_WITHHELD = ("<elided>", "<not serializable>", "<not specified>", "<replaced>", "[REDACTED]")  # instead of a value
_KINDS = (names.KIND, "langfuse.observation.type", "mlflow.spanType", "traceloop.span.kind")
_LM_KINDS = {"llm", "generation", "chat_model"}
_INPUTS = (
    names.INPUT,
    "langfuse.observation.input",
    "langfuse.trace.input",
    "mlflow.spanInputs",
    "traceloop.entity.input",
    "request_data",
    "ai.prompt.messages",
    "ai.prompt",
    _ADK_REQUEST,
)
_OUTPUTS = (
    names.OUTPUT,
    "langfuse.observation.output",
    "langfuse.trace.output",
    "mlflow.spanOutputs",
    "traceloop.entity.output",
    "ai.response.text",
    "ai.response.object",
    "gcp.vertex.agent.llm_response",
)
_DEFINED = (names.TOOLS, "ai.prompt.tools", "mlflow.chat.tools")
_JSON = (  # values are JSON, also strings
    *("mlflow.", "traceloop.entity.", "gcp.vertex.agent.", "ai.prompt", "ai.toolCall.args", "ai.toolCall.result"),
    *("ai.response.toolCalls", names.INPUT_MESSAGES, names.OUTPUT_MESSAGES),
)
_MODEL = (names.REQUEST_MODEL, "langfuse.observation.model.name", "mlflow.llm.model", "llm.model_name", "ai.model.id")
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
    "gcp.vertex.agent.session_id",
    "traceloop.association.properties.session_id",
)
_PROGRAM = (names.AGENT, "langfuse.trace.name", "traceloop.entity.name", "ai.telemetry.functionId", "service.name")
_PROMPT_TOKENS = (
    names.PROMPT_TOKENS,
    "gen_ai.usage.prompt_tokens",
    "llm.usage.prompt_tokens",
    "llm.token_count.prompt",
    "ai.usage.inputTokens",
    "ai.usage.promptTokens",
)
_COMPLETION_TOKENS = (
    names.COMPLETION_TOKENS,
    "gen_ai.usage.completion_tokens",
    "llm.usage.completion_tokens",
    "llm.token_count.completion",
    "ai.usage.outputTokens",
    "ai.usage.completionTokens",
)
_USAGE = ("langfuse.observation.usage_details", "mlflow.chat.tokenUsage")
_COST = (names.COST, "gen_ai.usage.total_cost", "llm.cost.total")
_COSTS = ("langfuse.observation.cost_details", "mlflow.llm.cost")
_FINISHED = (
    *(names.FINISH_REASONS, "llm.finish_reason", "gen_ai.response.finish_reason"),
    "ai.response.finishReason",
)
_ANSWERED_BY = (names.RESPONSE_MODEL, "llm.model_name", "mlflow.llm.model", "ai.response.model")
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
        trace.spans.append(span_of(part.where, number, row, events))
        trace.marks += [_mark(attributes, part.where) for name, attributes in events if name == names.EVALUATION]
    trace.spans = _joined_streams(trace.spans, {part.value["id"]: part.value["attributes"] for part in spans})
    top = sorted(spans, key=lambda part: bool(part.value["parent"]))  # attributes of the root span have priority
    attributes = [{**part.value["resource"], **part.value["attributes"]} for part in top]
    trace.user, trace.tenant, trace.session = (_first_text(attributes, names) for names in (_USER, _TENANT, _SESSION))
    trace.program = _first_text(attributes[:1], _PROGRAM) or ""
    trace.version = _first_text(attributes, (names.SERVICE_VERSION,)) or ""
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
    return _named(attributes, names)[1]


def _named(attributes: Attributes, names: Iterable[str]) -> tuple[str, Any]:
    """Name and value of the first attribute that is present, in the form in which it was before it became text.

    Without one, the name of the first that is null, else an empty name.
    """
    null = ""
    for name in names:
        value = attributes.get(name)
        if name.startswith(_JSON) or attributes.get(_mime_type(name)) == "application/json":
            value = decoded(value)
        if value is not None and (not isinstance(value, str) or value not in _WITHHELD):
            return name, value
        null = null or (name if name in attributes else "")
    return null, None


def _mime_type(name: str) -> str:
    """The attribute of OpenInference with the type of another one."""
    return f"{name.removesuffix('value')}mime_type"


def span_of(where: str, number: int, row: Mapping[str, Any], events: list[Event]) -> Span:
    """A span from its row.

    Args:
        number: Its position in the trace, for spans without an id.
        row: `id`, `parent`, `name`, `start` and `end` in Unix seconds, `error` and `attributes`.
    """
    attributes: Attributes = row["attributes"]
    for name, event_attributes in events:
        if name == "gen_ai.client.inference.operation.details":
            attributes = {**event_attributes, **attributes}
    inputs_in, inputs = _named(attributes, (names.INPUT_MESSAGES, *_INPUTS))
    outputs_in, outputs = _named(attributes, (names.OUTPUT_MESSAGES, *_OUTPUTS))
    reading = Reading()
    does = work_of(row["name"], attributes, events, reading)
    tools, system = list[dict[str, Any]](), list[dict[str, Any]]()
    if does is None:
        tools = reading.read(_named(attributes, _DEFINED)[0], _definitions, attributes, [])
        system = reading.read(names.SYSTEM, lambda found: _system(found, events), attributes, [])
    if inputs_in == "ai.prompt":
        inputs = reading.read(inputs_in, body_of, inputs, {"messages": None})["messages"]
    return Span(
        id=row["id"] or f"#{number}",
        parent=row["parent"],
        name=row["name"],
        where=where,
        start=row["start"],
        end=row["end"],
        error=row["error"],
        does=does,
        inputs=inputs,
        outputs=outputs,
        inputs_in=inputs_in,
        outputs_in=outputs_in,
        tools=tools,
        system=system,
        unknown=reading.unknown,
        own={name: value for name, value in attributes.items() if name.startswith(names.PREFIX)},
    )


def work_of(span_name: str, attributes: Attributes, events: list[Event], reading: Reading) -> LMCall | ToolUse | None:
    """What a span did: an LM call, a tool call, or None."""
    operation = attributes.get(names.OPERATION)
    if not isinstance(operation, str):
        vercel = attributes.get("ai.operationId")
        operation = _VERCEL.get(vercel, vercel) if isinstance(vercel, str) else None
    kinds = {as_text(_first(attributes, (name,))).lower() for name in _KINDS}
    if operation in _CALLS or (operation is None and _asks(attributes, kinds)):
        return _call(attributes, events, reading)
    if operation in _TOOLS or (operation is None and "tool" in kinds):
        return None if attributes.get(names.TOOL) == "(merged tools)" else _tool(span_name, attributes, events)
    return None


def _definitions(attributes: Attributes) -> list[dict[str, Any]]:
    indexed = (_indexed(attributes, prefix) for prefix in ("llm.request.functions", "llm.tools"))
    definitions = parsed(_first(attributes, _DEFINED) or next(filter(None, indexed), None))
    items = definitions if isinstance(definitions, list) else [definitions]
    if definitions and not all(isinstance(parsed(item), dict) for item in items):
        raise UnknownShape
    return tools_of(definitions)


def _system(attributes: Attributes, events: list[Event]) -> list[dict[str, Any]]:
    """System messages of an agent's span."""
    recorded = [payload for name, payload in events if name == "gen_ai.system.message"]
    system = _first(attributes, (names.SYSTEM, "system_prompt")) or (
        _payload(recorded[0]).get("content") if recorded else None
    )
    return list(body_of({"messages": [], "system": parsed(system)})["messages"]) if system else []


def _asks(attributes: Attributes, kinds: set[str]) -> bool:
    """Whether a span without an operation name is an LM call, by its kind or (before 1.27) by its token usage."""
    if kinds - {""}:
        return bool(kinds & _LM_KINDS)
    if _ADK_REQUEST in attributes:
        return True
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


def _call(attributes: Attributes, events: list[Event], reading: Reading) -> LMCall:
    events = [*events, *_listed_events(attributes.get("events"))]
    raw_name, raw_request = _named(attributes, _INPUTS)
    if raw_name.startswith("langfuse."):  # which writes texts as they are, and anything else as JSON
        raw_request = None if raw_request == "null" else parsed(raw_request)
    raw_reading = Reading()
    raw = raw_reading.read(raw_name, body_of, raw_request, {"messages": []})
    settings = {
        ours: attributes[name]
        for theirs, ours in names.SETTINGS.items()
        if (name := f"gen_ai.request.{theirs}") in attributes
    }
    parameters = parsed(_first(attributes, _PARAMETERS))
    body = {**raw, **(settings_of(parameters) if isinstance(parameters, dict) else {}), **settings}
    asked_in, request = _request(attributes, events)
    body["messages"] = reading.read(asked_in, body_of, request, {"messages": []})["messages"]
    if not body["messages"] and not reading.unknown:
        body["messages"], asked_in = raw["messages"], raw_name or asked_in
        reading.unknown += raw_reading.unknown
    talk = _first(attributes, ("mlflow.chat.messages",))
    if not body["messages"] and isinstance(talk, list):  # the whole conversation, with the answer last if there is one
        ends = bool(talk) and isinstance(talk[-1], dict) and talk[-1].get("role") == "assistant"
        asked = talk[:-1] if ends else talk
        body["messages"] = reading.read("mlflow.chat.messages", body_of, asked, {"messages": []})["messages"]
        reading.unknown = [name for name in reading.unknown if name != raw_name]
    if tools := reading.read(_named(attributes, _DEFINED)[0], _definitions, attributes, None):
        body["tools"] = tools
    if choice := _tool_choice(_first(attributes, ("ai.prompt.toolChoice",))):
        body["tool_choice"] = choice
    if model := _first(attributes, _MODEL):
        body["model"] = body.get("model") if "gen_ai.request.model" not in attributes and body.get("model") else model
    answered_in, answer = _answer(attributes, events)
    reasons = _first(attributes, _FINISHED)
    choices = reading.read(answered_in, lambda value: answers_of(value, reasons, count=body.get("n")), answer, [])
    usage = usage_of(_first(attributes, _USAGE), _first(attributes, _OUTPUTS))
    prompt, completion = (count_of(_first(attributes, names)) for names in (_PROMPT_TOKENS, _COMPLETION_TOKENS))
    costs, cost = parsed(_first(attributes, _COSTS)), _first(attributes, _COST)
    if cost is None and isinstance(costs, dict):
        cost = first_of(costs, ("total", "total_cost"))
    cost = number_of(cost)
    return LMCall(
        body=body,
        choices=choices,
        response_id=as_text(_first(attributes, (names.RESPONSE_ID, "ai.response.id"))),
        answered_by=as_text(_first(attributes, _ANSWERED_BY)),
        prompt_tokens=usage[0] if prompt is None else prompt,
        completion_tokens=usage[1] if completion is None else completion,
        cost_usd=cost if cost is not None and cost >= 0 else None,
        asked_in=asked_in,
    )


def _tool_choice(value: Any) -> Any:
    """The Vercel AI SDK's choice of a tool as OpenAI writes it."""
    if not isinstance(value, dict):
        return None
    if value.get("type") == "tool":
        return {"type": "function", "function": {"name": as_text(value.get("toolName"))}}
    return value.get("type")


def _request(attributes: Attributes, events: list[Event]) -> tuple[str, Any]:
    """Name and value of the request's messages, by the first convention that has them."""
    system = _first(attributes, (names.SYSTEM,))
    name, messages = _named(attributes, (names.INPUT_MESSAGES,))
    if messages is None:
        parsed_events = [(event.removeprefix("gen_ai.").partition("."), payload) for event, payload in events]
        messages = [
            {"role": role, **_payload(payload)}
            for (role, _, rest), payload in parsed_events
            if rest in ("message", "instruction") and _is_recorded(payload)
        ]
        name = next((event for event, _ in events if event.endswith((".message", ".instruction"))), name)
    for prefix in ("gen_ai.prompt", "llm.input_messages"):
        if not messages and (messages := _indexed(attributes, prefix)):
            name = prefix
    if not messages:
        prompts = (
            (event, payload.get("gen_ai.prompt", payload.get("content")))
            for event, payload in events
            if event in ("gen_ai.prompt", "gen_ai.content.prompt")
        )
        prompt_name, prompt = next(prompts, None) or _named(attributes, ("gen_ai.prompt",))
        return prompt_name or name or names.INPUT_MESSAGES, prompt
    return name, {"messages": parsed(messages), **({"system": parsed(system)} if system else {})}


def _is_recorded(payload: Attributes) -> bool:
    content = payload.get("content")
    return not isinstance(content, str) or content not in _WITHHELD


def _answer(attributes: Attributes, events: list[Event]) -> tuple[str, Any]:
    """Name and value of the answer, by the first convention that has it; None without one."""
    name, answer = _named(attributes, (names.OUTPUT_MESSAGES,))
    if answer is not None:
        return name, parsed(answer)
    choices = [payload for event, payload in events if event == "gen_ai.choice" and _is_recorded(payload)]
    if choices:
        return "gen_ai.choice", [_choice(_payload(payload)) for payload in choices]
    for prefix in ("gen_ai.completion", "llm.output_messages"):
        if messages := _indexed(attributes, prefix):
            return prefix, messages
    texts = (payload.get("gen_ai.completion") for event, payload in events if event == "gen_ai.content.completion")
    if (text := next(texts, attributes.get("gen_ai.completion"))) is not None:
        return "gen_ai.completion", text
    if (recorded := _logfire_answer(attributes)) is not None:
        return "response_data", recorded
    if (calls := _first(attributes, ("ai.response.toolCalls",))) is not None:
        thought, text = (_first(attributes, (f"ai.response.{part}",)) for part in ("reasoning", "text"))
        answer = {"content": text, "tool_calls": calls, **({"reasoning_content": thought} if thought else {})}
        return "ai.response.toolCalls", answer if isinstance(calls, list) else calls
    return _named(attributes, _OUTPUTS)


def _logfire_answer(attributes: Attributes) -> Any:
    """Answer in Logfire's own attributes, used before it followed the conventions: a message or the text of a
    stream.
    """
    data = parsed(attributes.get("response_data"))
    if isinstance(data, dict) and isinstance(data.get("message"), dict):
        return [{"message": data["message"]}]
    return data.get("combined_chunk_content") if isinstance(data, dict) else None


def _choice(payload: dict[str, Any]) -> dict[str, Any]:
    message = payload.get("message")
    if message is None:
        message = {key: payload[key] for key in ("content", "tool_calls") if key in payload}
    also = {key: payload[key] for key in ("index", "tool_calls") if payload.get(key) is not None}
    return {"message": _unpacked(message), "finish_reason": payload.get("finish_reason"), **also}


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
    """Decode a message, or message parts, written as JSON text."""
    inner = parsed(value)
    parts = inner if isinstance(inner, list) else [inner]
    known = parts and all(isinstance(part, dict) for part in parts) and any(part.keys() & _PARTS for part in parts)
    return inner if known else value


_PARTS = frozenset(("type", "text", "toolUse", "toolResult", "reasoningContent", "parts", "role", "content"))


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
    name = _first(attributes, (names.TOOL, "tool.name", "ai.toolCall.name", "traceloop.entity.name"))
    call_id = _first(
        attributes,
        (names.TOOL_CALL_ID, "tool_call.id", "ai.toolCall.id", "langfuse.observation.metadata.tool_call_id"),
    )
    arguments = _first(
        attributes,
        (names.TOOL_ARGUMENTS, "tool.parameters", "ai.toolCall.args", "gcp.vertex.agent.tool_call_args", *_INPUTS),
    )
    result = _first(attributes, (names.TOOL_RESULT, "ai.toolCall.result", "gcp.vertex.agent.tool_response", *_OUTPUTS))
    return ToolUse(
        name=as_text(name or span_name.removeprefix("execute_tool ")),
        call_id=as_text(call_id or request.get("id")),
        arguments=request.get("content") if arguments is None else arguments,
        result=answered.get("message", answered.get("content")) if result is None else result,
    )
