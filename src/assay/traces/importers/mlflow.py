"""Reads MLflow traces in the format of `Trace.to_json()`, of MLflow 2 (`request_id`) and 3 (`trace_id`).

A file has one trace per line or a list of traces.

Source: mlflow/entities/trace.py, mlflow/tracing/constant.py.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from assay.traces.importers.answers import answers_of
from assay.traces.importers.chat import body_of
from assay.traces.importers.files import Part, Row, Skipped, Sorted
from assay.traces.importers.spans import LMCall, Mark, Span, ToolUse, Trace
from assay.traces.importers.tools import tools_of
from assay.traces.importers.values import Reading, as_text, number_of, parsed, usage_of

__all__ = ["take", "trace_of"]

_CALLS = {"CHAT_MODEL", "LLM"}
_NESTED_FIELDS = ("traces", "data")


def take(row: Row, into: Sorted) -> Iterator[Skipped]:
    """Add the traces of a row."""
    value = row.value
    for name in _NESTED_FIELDS:
        if isinstance(value.get(name), list):
            for item in value[name]:
                yield from _take(row.where, item, into)
            return
    yield from _take(row.where, value, into)


def _take(where: str, value: Any, into: Sorted) -> Iterator[Skipped]:
    if isinstance(value, dict) and value.get("trace"):  # a row of `mlflow.search_traces()`
        value = parsed(value["trace"])
    info, data = (parsed(value.get(name)) for name in ("info", "data")) if isinstance(value, dict) else (None, None)
    if not isinstance(info, dict) or not isinstance(data, dict):
        yield Skipped(where=where, reason="not an MLflow trace: it has no 'info' and 'data'")
        return
    trace = as_text(info.get("trace_id") or info.get("request_id"))
    if not trace:
        yield Skipped(where=where, reason="an MLflow trace without an id")
    elif skipped := into.add(trace, "trace", "trace", where, {"info": info, "data": data}):
        yield skipped


def trace_of(trace_id: str, parts: Iterable[Part]) -> Trace:
    """Trace from its only row."""
    trace = Trace(id=trace_id, where="", whole=True)
    for part in parts:
        info, data, trace.where = part.value["info"], part.value["data"], part.where
        metadata, tags = (_mapping(info.get(name)) for name in ("trace_metadata", "tags"))
        metadata = metadata or _mapping(info.get("request_metadata"))
        spans = data.get("spans")
        trace.spans = [
            _span(item, part.where, n)
            for n, item in enumerate(spans if isinstance(spans, list) else ())
            if isinstance(item, dict)
        ]
        state = as_text(info.get("state") or info.get("status")).upper()
        trace.status = {"OK": "done", "ERROR": "failed", "IN_PROGRESS": "error"}.get(state)
        trace.error = "the trace was not finished when it was exported" if state == "IN_PROGRESS" else None
        trace.inputs, trace.outputs = _loaded(data.get("request")), _loaded(data.get("response"))
        trace.program = as_text(tags.get("mlflow.traceName"))
        trace.version = as_text(tags.get("mlflow.source.git.commit") or metadata.get("mlflow.source.git.commit"))
        trace.user, trace.session = (
            as_text(metadata.get(f"mlflow.trace.{name}")) or None for name in ("user", "session")
        )
        tenants = [as_text(source.get(name)) for source in (tags, metadata) for name in ("tenant", "tenant_id")]
        trace.tenant = next(filter(None, tenants), None)
        assessments = info.get("assessments")
        for item in assessments if isinstance(assessments, list) else ():
            if isinstance(item, dict) and item.get("valid") is not False:
                _assess(trace, item)
    return trace


def _mapping(value: Any) -> Mapping[str, Any]:
    """An object, also in the REST format: a list of keys and values."""
    if isinstance(value, list):
        return {as_text(item.get("key")): item.get("value") for item in value if isinstance(item, dict)}
    return value if isinstance(value, dict) else {}


def _loaded(value: Any) -> Any:
    """Decode an attribute. All values are JSON, also strings."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _span(span: Mapping[str, Any], where: str, number: int) -> Span:
    context, status = _mapping(span.get("context")), _mapping(span.get("status"))
    attributes = {key: _loaded(value) for key, value in _mapping(span.get("attributes")).items()}
    inputs, outputs = attributes.get("mlflow.spanInputs"), attributes.get("mlflow.spanOutputs")
    code = as_text(status.get("code") or span.get("status_code")).upper()
    message = as_text(status.get("message") or span.get("status_message")) or _raised(span.get("events"))
    kind, name = as_text(attributes.get("mlflow.spanType")).upper(), as_text(span.get("name"))
    does: LMCall | ToolUse | None = None
    reading = Reading()
    if kind in _CALLS:
        does = _call(attributes, inputs, outputs, reading)
    elif kind == "TOOL":
        called = _mapping(inputs)  # LangChain passes the whole call to tools
        does = ToolUse(name=name, call_id=as_text(called.get("tool_call_id")), arguments=inputs, result=outputs)
    return Span(
        id=as_text(span.get("span_id") or context.get("span_id")) or f"#{number}",
        name=name,
        where=where,
        does=does,
        inputs=inputs,
        outputs=outputs,
        inputs_in="mlflow.spanInputs",
        outputs_in="mlflow.spanOutputs",
        parent=as_text(span.get("parent_span_id") or span.get("parent_id")),
        error=(message or "error") if code.endswith("ERROR") else None,
        tools=[] if does else tools_of(attributes.get("mlflow.chat.tools")),
        unknown=reading.unknown,
        start=_seconds(span.get("start_time_unix_nano", span.get("start_time"))),
        end=_seconds(span.get("end_time_unix_nano", span.get("end_time"))),
    )


def _raised(events: Any) -> str:
    """The exception in a span's events; empty without one."""
    attributes = (
        [_mapping(event.get("attributes")) for event in events if isinstance(event, dict)]
        if isinstance(events, list)
        else []
    )
    raised = next((event for event in attributes if "exception.type" in event), {})
    return ": ".join(as_text(raised[key]) for key in ("exception.type", "exception.message") if raised.get(key))


def _seconds(value: Any) -> float | None:
    number = number_of(value)
    return number / 1e9 if number is not None and 0 < number < 1e20 else None


def _call(attributes: Mapping[str, Any], inputs: Any, outputs: Any, reading: Reading) -> LMCall:
    talk = attributes.get("mlflow.chat.messages")
    body = reading.read("mlflow.spanInputs", body_of, inputs, {"messages": []})
    choices = reading.read("mlflow.spanOutputs", answers_of, outputs, [])
    if not body["messages"] and isinstance(talk, list):  # the whole conversation, with the answer last
        asked = {"messages": talk[: -1 if choices else None]}
        body = {**body, **reading.read("mlflow.chat.messages", body_of, asked, {})}
        reading.unknown = [name for name in reading.unknown if name != "mlflow.spanInputs"]
    if tools := body.get("tools") or tools_of(attributes.get("mlflow.chat.tools")):
        body["tools"] = tools
    named = as_text(attributes.get("mlflow.llm.model"))
    model = body.get("model") or attributes.get("model") or named
    prompt, completion = usage_of(attributes.get("mlflow.chat.tokenUsage"), outputs)
    cost = number_of(_mapping(attributes.get("mlflow.llm.cost")).get("total_cost"))
    answer = _mapping(outputs)
    return LMCall(
        body={**body, **({"model": as_text(model)} if model else {})},
        choices=choices,
        answered_by=as_text(answer.get("model")) or named,
        response_id=as_text(answer.get("id")),
        prompt_tokens=prompt,
        completion_tokens=completion,
        cost_usd=cost if cost is not None and cost >= 0 else None,
        asked_in="mlflow.spanInputs",
    )


def _assess(trace: Trace, assessment: Mapping[str, Any]) -> None:
    """Add feedback as a score and an expectation as an expected value. Failed feedback has no value."""
    name, feedback = as_text(assessment.get("assessment_name", assessment.get("name"))), assessment.get("feedback")
    expectation = assessment.get("expectation")
    if isinstance(expectation, dict):
        value = expectation.get("value", _loaded(_mapping(expectation.get("serialized_value")).get("value")))
        trace.expected[name] = value
    if not isinstance(feedback, dict):
        return
    source = as_text(_mapping(assessment.get("source")).get("source_type")).upper()
    error = _mapping(feedback.get("error", assessment.get("error")))
    reason = as_text(assessment.get("rationale")) or as_text(error.get("error_message"))
    step = bool(assessment.get("span_id")) and all(
        span.id != assessment["span_id"] or span.parent for span in trace.spans
    )
    value = feedback.get("value")
    trace.marks.append(
        Mark(name=name, value=value, human=source == "HUMAN", step=step, reason=reason, where=trace.where)
    )
