"""Reads MLflow traces in the format of `Trace.to_json()`, of MLflow 2 (`request_id`) and 3 (`trace_id`).

A file has one trace per line or a list of traces.

Source: mlflow/entities/trace.py, mlflow/tracing/constant.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from assay.traces.importers.files import Part, Row, Skipped, Sorted
from assay.traces.importers.genai import span_of
from assay.traces.importers.otlp import Mark, Span, Trace, as_text, decoded, exception_of, parsed, seconds_of
from assay.traces.otlp import spans as names

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
        trace.inputs, trace.outputs = decoded(data.get("request")), decoded(data.get("response"))
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


def _span(span: Mapping[str, Any], where: str, number: int) -> Span:
    """A span, whose attributes are those of MLflow's SDK in OTLP."""
    context, status = _mapping(span.get("context")), _mapping(span.get("status"))
    attributes = dict(_mapping(span.get("attributes")))
    inputs, outputs = (_mapping(decoded(attributes.get(f"mlflow.span{end}"))) for end in ("Inputs", "Outputs"))
    events = span.get("events")
    raised = [_mapping(event.get("attributes")) for event in events if isinstance(event, dict)] if events else []
    code = as_text(status.get("code") or span.get("status_code")).upper()
    message = as_text(status.get("message") or span.get("status_message")) or exception_of(raised)
    recorded = {
        "mlflow.llm.model": decoded(attributes.get("model")),
        names.RESPONSE_MODEL: outputs.get("model"),
        names.RESPONSE_ID: outputs.get("id"),
        names.TOOL_CALL_ID: inputs.get("tool_call_id"),  # LangChain passes the whole call to tools
    }
    row = {
        "id": as_text(span.get("span_id") or context.get("span_id")),
        "parent": as_text(span.get("parent_span_id") or span.get("parent_id")),
        "name": as_text(span.get("name")),
        "start": seconds_of(span.get("start_time_unix_nano", span.get("start_time"))),
        "end": seconds_of(span.get("end_time_unix_nano", span.get("end_time"))),
        "error": (message or "error") if code.endswith("ERROR") else None,
        "attributes": {**{name: value for name, value in recorded.items() if value}, **attributes},
    }
    return span_of(where, number, row, [])


def _assess(trace: Trace, assessment: Mapping[str, Any]) -> None:
    """Add feedback as a score and an expectation as an expected value. Failed feedback has no value."""
    name, feedback = as_text(assessment.get("assessment_name", assessment.get("name"))), assessment.get("feedback")
    expectation = assessment.get("expectation")
    if isinstance(expectation, dict):
        value = expectation.get("value", decoded(_mapping(expectation.get("serialized_value")).get("value")))
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
