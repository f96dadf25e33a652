"""MLflow's traces as `Trace.to_json()` writes them, of MLflow 2 (`request_id`) and 3 (`trace_id`): one a line, or several in a list.

Source: mlflow/entities/trace.py, mlflow/tracing/constant.py.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from assay.traces.importing.chat import answers_of, body_of
from assay.traces.importing.files import Part, Row, Skipped, Sorted
from assay.traces.importing.spans import LMCall, Mark, Span, ToolUse, Trace
from assay.traces.importing.tools import tools_of
from assay.traces.importing.values import as_text, number_of, parsed, usage_of

__all__ = ["take", "trace_of"]

_CALLS = {"CHAT_MODEL", "LLM"}
_HELD = ("traces", "data")


def take(row: Row, into: Sorted) -> Iterator[Skipped]:
    """Keeps the traces of a row."""
    told = row.value
    for name in _HELD:
        if isinstance(told.get(name), list):
            for item in told[name]:
                yield from _take(row.where, item, into)
            return
    yield from _take(row.where, told, into)


def _take(where: str, told: Any, into: Sorted) -> Iterator[Skipped]:
    if isinstance(told, dict) and told.get("trace"):  # a row of `mlflow.search_traces()`
        told = parsed(told["trace"])
    info, data = (parsed(told.get(name)) for name in ("info", "data")) if isinstance(told, dict) else (None, None)
    if not isinstance(info, dict) or not isinstance(data, dict):
        yield Skipped(where=where, reason="no MLflow trace: it has no 'info' and 'data'")
        return
    trace = as_text(info.get("trace_id") or info.get("request_id"))
    if not trace:
        yield Skipped(where=where, reason="an MLflow trace without an id")
    elif found := into.add(trace, "trace", "trace", where, {"info": info, "data": data}):
        yield found


def trace_of(trace_id: str, parts: Iterable[Part]) -> Trace:
    """A trace from its one row."""
    found = Trace(id=trace_id, where="")
    for part in parts:
        info, data, found.where = part.value["info"], part.value["data"], part.where
        metadata, tags = (_mapping(info.get(name)) for name in ("trace_metadata", "tags"))
        metadata = metadata or _mapping(info.get("request_metadata"))
        spans = data.get("spans")
        found.spans = [_span(told, part.where, n) for n, told in enumerate(spans if isinstance(spans, list) else ()) if isinstance(told, dict)]
        state = as_text(info.get("state") or info.get("status")).upper()
        found.status = {"OK": "done", "ERROR": "failed", "IN_PROGRESS": "error"}.get(state)
        found.error = "the trace was not finished when it was exported" if state == "IN_PROGRESS" else None
        found.inputs, found.outputs = _loaded(data.get("request")), _loaded(data.get("response"))
        found.program = as_text(tags.get("mlflow.traceName"))
        found.version = as_text(tags.get("mlflow.source.git.commit") or metadata.get("mlflow.source.git.commit"))
        found.user, found.session = (as_text(metadata.get(f"mlflow.trace.{name}")) or None for name in ("user", "session"))
        told = [as_text(one.get(name)) for one in (tags, metadata) for name in ("tenant", "tenant_id")]
        found.tenant = next(filter(None, told), None)
        assessments = info.get("assessments")
        for told in assessments if isinstance(assessments, list) else ():
            if isinstance(told, dict) and told.get("valid") is not False:
                _assess(found, told)
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    """An object, also as REST writes one: a list of keys and values."""
    if isinstance(value, list):
        return {as_text(item.get("key")): item.get("value") for item in value if isinstance(item, dict)}
    return value if isinstance(value, dict) else {}


def _loaded(value: Any) -> Any:
    """Attributes are JSON, texts included."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _span(told: Mapping[str, Any], where: str, number: int) -> Span:
    context, status = _mapping(told.get("context")), _mapping(told.get("status"))
    attributes = {key: _loaded(value) for key, value in _mapping(told.get("attributes")).items()}
    inputs, outputs = attributes.get("mlflow.spanInputs"), attributes.get("mlflow.spanOutputs")
    code = as_text(status.get("code") or told.get("status_code")).upper()
    message = as_text(status.get("message") or told.get("status_message")) or _raised(told.get("events"))
    kind, name = as_text(attributes.get("mlflow.spanType")).upper(), as_text(told.get("name"))
    does: LMCall | ToolUse | None = None
    if kind in _CALLS:
        does = _call(attributes, inputs, outputs)
    elif kind == "TOOL":
        called = _mapping(inputs)  # LangChain's tools are given the whole call
        does = ToolUse(name=name, call_id=as_text(called.get("tool_call_id")), arguments=inputs, result=outputs)
    return Span(
        id=as_text(told.get("span_id") or context.get("span_id")) or f"#{number}", name=name, where=where, does=does, inputs=inputs, outputs=outputs,
        parent=as_text(told.get("parent_span_id") or told.get("parent_id")), error=(message or "error") if code.endswith("ERROR") else None,
        start=_seconds(told.get("start_time_unix_nano", told.get("start_time"))), end=_seconds(told.get("end_time_unix_nano", told.get("end_time"))),
    )  # fmt: skip


def _raised(events: Any) -> str:
    """The exception that a span's events tell of."""
    told = [_mapping(event.get("attributes")) for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    raised = next((one for one in told if "exception.type" in one), {})
    return ": ".join(as_text(raised[key]) for key in ("exception.type", "exception.message") if raised.get(key))


def _seconds(value: Any) -> float | None:
    number = number_of(value)
    return number / 1e9 if number is not None and 0 < number < 1e20 else None


def _call(attributes: Mapping[str, Any], inputs: Any, outputs: Any) -> LMCall:
    body, talk = body_of(inputs), attributes.get("mlflow.chat.messages")
    choices = answers_of(outputs)
    if not body["messages"] and isinstance(talk, list):  # the whole talk, the answer last
        body = {**body, **body_of({"messages": talk[: -1 if choices else None]})}
    if tools := body.get("tools") or tools_of(attributes.get("mlflow.chat.tools")):
        body["tools"] = tools
    named = as_text(attributes.get("mlflow.llm.model"))
    model = body.get("model") or attributes.get("model") or named
    prompt, completion = usage_of(attributes.get("mlflow.chat.tokenUsage"), outputs)
    cost = number_of(_mapping(attributes.get("mlflow.llm.cost")).get("total_cost"))
    answer = _mapping(outputs)
    return LMCall(
        body={**body, **({"model": as_text(model)} if model else {})}, choices=choices, answered_by=as_text(answer.get("model")) or named,
        response_id=as_text(answer.get("id")), prompt_tokens=prompt, completion_tokens=completion,
        cost_usd=cost if cost is not None and cost >= 0 else None,
    )  # fmt: skip


def _assess(trace: Trace, told: Mapping[str, Any]) -> None:
    """Feedback as a score, an expectation as what was expected; a feedback that failed has no value."""
    name, feedback = as_text(told.get("assessment_name", told.get("name"))), told.get("feedback")
    expectation = told.get("expectation")
    if isinstance(expectation, dict):
        value = expectation.get("value", _loaded(_mapping(expectation.get("serialized_value")).get("value")))
        trace.expected[name] = value
    if not isinstance(feedback, dict):
        return
    source = as_text(_mapping(told.get("source")).get("source_type")).upper()
    error = _mapping(feedback.get("error", told.get("error")))
    reason = as_text(told.get("rationale")) or as_text(error.get("error_message"))
    step = bool(told.get("span_id")) and all(span.id != told["span_id"] or span.parent for span in trace.spans)
    value = feedback.get("value")
    trace.marks.append(Mark(name=name, value=value, human=source == "HUMAN", step=step, reason=reason, where=trace.where))
