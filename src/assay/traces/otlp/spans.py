"""Rollouts as OTLP spans: one trace of each, with a span of the agent, of each LM call and of each tool call.

Ids are derived from the rollout's, so that a rollout that is sent twice is the same trace. Sends nothing.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from assay.support.package import __version__
from assay.support.values import json_text, json_value
from assay.traces.messages.dialects import answer_to, chat_messages, chat_tools
from assay.traces.messages.parts import part_texts
from assay.traces.records import Rollout, ToolCall, Transition

# -- Names of attributes in OTLP. The export writes them, and `assay.traces.importers` reads them. Names of metrics are
# in `metric_names`; `VERSION` is that of both.
#
# What the GenAI conventions of OpenTelemetry name has their names, so that other tools show it. The rest, with which an
# import restores the rollout exactly, has the prefix `assay.`. A change of meaning increases `VERSION`; a newer version
# is not imported.


VERSION = 1
PREFIX, VERSION_KEY = "assay.", "assay.mapping.version"

# conventions
OPERATION, AGENT, CONVERSATION = "gen_ai.operation.name", "gen_ai.agent.name", "gen_ai.conversation.id"
REQUEST_MODEL, RESPONSE_MODEL = "gen_ai.request.model", "gen_ai.response.model"
RESPONSE_ID, FINISH_REASONS = "gen_ai.response.id", "gen_ai.response.finish_reasons"
INPUT_MESSAGES, OUTPUT_MESSAGES = "gen_ai.input.messages", "gen_ai.output.messages"
SYSTEM, TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
PROMPT_TOKENS, COMPLETION_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
COST = "gen_ai.usage.cost"
TOOL, TOOL_CALL_ID = "gen_ai.tool.name", "gen_ai.tool.call.id"
TOOL_ARGUMENTS, TOOL_RESULT = "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"
EVALUATION, EVALUATION_NAME = "gen_ai.evaluation.result", "gen_ai.evaluation.name"
EVALUATION_VALUE, EVALUATION_LABEL = "gen_ai.evaluation.score.value", "gen_ai.evaluation.score.label"
EVALUATION_REASON = "gen_ai.evaluation.explanation"
USER, TENANT, ERROR = "user.id", "tenant.id", "error.type"
KIND, INPUT, OUTPUT = "openinference.span.kind", "input.value", "output.value"  # OpenInference, for Phoenix
SERVICE, SERVICE_VERSION = "service.name", "service.version"

SETTINGS = {  # `gen_ai.request.` + name -> key of an OpenAI request
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "seed": "seed",
    "stop_sequences": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "choice.count": "n",
}

Field = tuple[str, bool]  # name of the attribute, whether its value is JSON

# fields of a rollout, on its root span
ROLLOUT: dict[str, Field] = {
    **{
        name: (f"assay.{name}", False)
        for name in (
            "task_id", "task_type", "group_id", "sample", "program", "program_version", "model", "seed", "split",
            "phase", "source", "status", "failure", "error", "rubric", "score", "coverage", "human_rating", "tenant",
            "data_subject", "consent", "started_at", "ended_at", "deployment", "stage", "arm", "propensity", "unit",
            "version",
        )
    },
    **{name: (f"assay.{name}", True) for name in ("parameters", "adapters", "metadata", "expected", "verdicts")},
    "id": ("assay.rollout.id", False),
}  # fmt: skip
# fields of an LM call; those of `CONTENT` are texts
CALL: dict[str, Field] = {
    **{
        name: (f"assay.{name}", False)
        for name in (
            "t", "model", "weights", "output", "error", "failure", "constrained", "cached", "prompt_tokens",
            "completion_tokens", "thinking_tokens", "latency_ms", "cost_usd", "started_at", "return_", "agent",
        )
    },
    **{
        name: (f"assay.{name}", True)
        for name in ("adapters", "request", "response", "shown_tasks", "token_ids", "logprobs", "step_rewards")
    },
}  # fmt: skip
TURN, ISOLATION = "assay.t", "assay.isolation"  # of a tool: the LM call that asked for it; its sandbox
CONTENT = frozenset(
    {
        "request",
        "response",
        "output",
        "token_ids",
        "logprobs",
        "expected",
        "metadata",
        "verdicts",
        "error",
        "data_subject",
    }
)


def written(record: Any, fields: dict[str, Field], *, content: bool) -> dict[str, Any]:
    """The attributes of a rollout or LM call; None is left out.

    Args:
        content: with texts.
    """
    attributes = {}
    for name, (attribute, is_json) in fields.items():
        value = getattr(record, name)
        if value is None or (name in CONTENT and not content):
            continue
        attributes[attribute] = json_text(value) if is_json else json_value(value)
    return attributes


def read(attributes: dict[str, Any], fields: dict[str, Field]) -> dict[str, Any]:
    """The fields that attributes have, by name.

    Raises:
        ValueError: one of them is not the JSON that `written` writes.
    """
    return {
        name: json.loads(attributes[attribute]) if is_json else attributes[attribute]
        for name, (attribute, is_json) in fields.items()
        if attribute in attributes
    }


# -- Spans.


_INTERNAL, _CLIENT = 1, 3  # kinds of spans


def trace_request(rollouts: Iterable[Rollout], *, content: bool = True, service: str = "assay") -> dict[str, Any]:
    """An export request in OTLP's JSON encoding.

    Args:
        rollouts: ended, with their transitions.
        content: with inputs, outputs, messages, tool arguments and results. Without them only names, counts, times,
            costs and scores.
        service: `service.name` of the resource.
    """
    spans = [span for rollout in rollouts for span in _spans(rollout, content)]
    return {"resourceSpans": [{"resource": resource(service), "scopeSpans": [{"scope": scope(), "spans": spans}]}]}


def resource(service: str) -> dict[str, Any]:
    return {"attributes": attributes_of({SERVICE: service, SERVICE_VERSION: __version__})}


def scope() -> dict[str, str]:
    return {"name": "assay", "version": __version__}


def _spans(rollout: Rollout, content: bool) -> Iterator[dict[str, Any]]:
    trace, root = _trace_id(rollout.id), _digest(rollout.id, "root")[:16]
    times = [(t.started_at or rollout.started_at, t.latency_ms / 1000) for t in rollout.transitions]
    end = rollout.ended_at or max([start + s for start, s in times], default=rollout.started_at)
    head = {"traceId": trace, "parentSpanId": root, "flags": 1}
    yield {
        "traceId": trace, "spanId": root, "flags": 1, "name": f"invoke_agent {rollout.program}"[:200],
        "kind": _INTERNAL, **_between(rollout.started_at, end), "attributes": attributes_of(_root(rollout, content)),
        "events": list(_evaluations(rollout, content)), **_status(rollout.error, rollout.status, content),
    }  # fmt: skip
    for number, tool in enumerate(rollout.early_tools):
        yield {**head, **_tool(rollout, tool, None, number, "", rollout.started_at, content)}
    for transition, (start, seconds) in zip(rollout.transitions, times, strict=True):
        yield {
            **head, "spanId": _digest(rollout.id, f"call {transition.t}")[:16],
            "name": f"chat {transition.model}"[:200], "kind": _CLIENT, **_between(start, start + seconds),
            "attributes": attributes_of(_call(transition, content)),
            **_status(transition.error, "failed" if transition.error is not None else "done", content),
        }  # fmt: skip
        ids = _call_ids(transition)
        for number, tool in enumerate(transition.tools):
            waiting = ids.get(tool.name)
            call_id = waiting.pop(0) if waiting else ""
            yield {**head, **_tool(rollout, tool, transition.t, number, call_id, start + seconds, content)}


def _root(rollout: Rollout, content: bool) -> dict[str, Any]:
    attributes = {
        OPERATION: "invoke_agent", KIND: "AGENT", AGENT: rollout.program or None,
        USER: rollout.data_subject if content else None, TENANT: rollout.tenant,
        VERSION_KEY: VERSION,
        **written(rollout, ROLLOUT, content=content),
    }  # fmt: skip
    if content:
        attributes[INPUT] = _json(rollout.inputs)
        attributes[OUTPUT] = None if rollout.prediction is None else _json(rollout.prediction)
    return attributes


def _evaluations(rollout: Rollout, content: bool) -> Iterator[dict[str, Any]]:
    """The verdicts as events of the convention; the score itself is one with the name of the rubric."""
    marks = [(v.criterion, v.grade, v.label, v.reason) for v in rollout.verdicts]
    if rollout.score is not None:
        marks.append((rollout.rubric.removeprefix("imported:") or "score", rollout.score, None, ""))
    if rollout.human_rating is not None:
        marks.append(("human_rating", rollout.human_rating, None, ""))
    for name, grade, label, reason in marks:
        attributes = {
            EVALUATION_NAME: name, EVALUATION_VALUE: grade, EVALUATION_LABEL: label,
            EVALUATION_REASON: reason if content and reason else None,
        }  # fmt: skip
        moment = _nanoseconds(rollout.ended_at or rollout.started_at)
        yield {"timeUnixNano": moment, "name": EVALUATION, "attributes": attributes_of(attributes)}


def _call(transition: Transition, content: bool) -> dict[str, Any]:
    request, response = transition.request, transition.response or {}
    body = request.get("body", request)
    answered = response.get("body", response)
    attributes: dict[str, Any] = {
        OPERATION: "chat", KIND: "LLM", REQUEST_MODEL: transition.model,
        RESPONSE_MODEL: answered.get("model"), RESPONSE_ID: answered.get("id"),
        PROMPT_TOKENS: transition.prompt_tokens, COMPLETION_TOKENS: transition.completion_tokens,
        COST: transition.cost_usd, ERROR: transition.failure and transition.failure.value,
        **{
            f"gen_ai.request.{name}": value
            for name, key in SETTINGS.items()
            if isinstance(value := body.get(key), int | float | str | list)
        },
        **written(transition, CALL, content=content),
    }  # fmt: skip
    if not content:
        return attributes
    messages = chat_messages(request)
    system = [{"type": "text", "content": part_texts(m.get("content"))} for m in messages if m["role"] == "system"]
    talk = [_message(message) for message in messages if message["role"] != "system"]
    attributes[SYSTEM] = _json(system) if system else None
    attributes[INPUT_MESSAGES] = _json(talk) if talk else None
    attributes[TOOLS] = _json(tools) if (tools := chat_tools(request)) else None
    if transition.response is not None:
        answer = answer_to(request, answered)
        finish = answer.finish or "stop"
        parts: list[dict[str, Any]] = [{"type": "reasoning", "content": answer.reasoning}] if answer.reasoning else []
        text = answer.text or answer.refusal
        parts += [{"type": "text", "content": text}] if text else []
        parts += [_tool_call(*call) for call in answer.tools]
        attributes[FINISH_REASONS] = [finish]
        attributes[OUTPUT_MESSAGES] = _json([{"role": "assistant", "parts": parts, "finish_reason": finish}])
    return attributes


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message in the convention's parts. Media are named, not contained."""
    text = part_texts(message.get("content"))
    if message["role"] == "tool":
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": text}
        return {"role": "tool", "parts": [part]}
    parts = [{"type": "text", "content": text}] if text else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(_tool_call(call.get("id"), function["name"], function.get("arguments")))
    return {"role": message["role"], "parts": parts}


def _tool_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": _parsed(arguments)}


def _call_ids(transition: Transition) -> dict[str, list[str]]:
    """Ids of the tool calls that the model requested, by name of the tool."""
    ids: dict[str, list[str]] = {}
    if transition.response is not None and transition.tools:
        body = transition.response.get("body", transition.response)
        for call_id, name, _ in answer_to(transition.request, body).tools:
            ids.setdefault(name, []).append(call_id)
    return ids


def _tool(
    rollout: Rollout, tool: ToolCall, t: int | None, number: int, call_id: str, at: float, content: bool
) -> dict[str, Any]:
    """The span of a tool call, whose duration is not recorded."""
    attributes = {
        OPERATION: "execute_tool", KIND: "TOOL", TOOL: tool.name, TOOL_CALL_ID: call_id or None,
        TURN: t, ISOLATION: tool.isolation,
        TOOL_ARGUMENTS: _json(tool.arguments) if content else None,
        TOOL_RESULT: tool.result if content else None,
    }  # fmt: skip
    return {
        "spanId": _digest(rollout.id, f"tool {t} {number}")[:16], "name": f"execute_tool {tool.name}"[:200],
        "kind": _INTERNAL, **_between(at, at), "attributes": attributes_of(attributes),
        **_status(tool.error, "failed" if tool.error is not None else "done", content),
    }  # fmt: skip


def _status(error: str | None, status: str, content: bool) -> dict[str, Any]:
    if status == "done":
        return {}
    message = error if content and error else status
    return {"status": {"code": 2, "message": message}}


def attributes_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Key-value pairs; without those that are None."""
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": value if isinstance(value, str) else _json(value)}


def _between(start: float, end: float) -> dict[str, str]:
    return {"startTimeUnixNano": _nanoseconds(start), "endTimeUnixNano": _nanoseconds(max(start, end))}


def _nanoseconds(seconds: float) -> str:
    numerator, denominator = seconds.as_integer_ratio()
    return str(numerator * 1_000_000_000 // denominator)


def _trace_id(rollout: str) -> str:
    """The rollout's id where it is a trace id, else its hash."""
    is_hex = len(rollout) == 32 and set(rollout) <= set("0123456789abcdef") and rollout.strip("0")
    return rollout if is_hex else _digest(rollout, "trace")[:32]


def _digest(rollout: str, part: str) -> str:
    return hashlib.sha256(f"{rollout}\0{part}".encode("utf-8", "replace")).hexdigest()


def _json(value: Any) -> str:
    return json_text(value)


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
