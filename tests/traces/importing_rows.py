"""Spans, requests and answers that the tests of imports write by hand, and how they read a file."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from assay.traces import Rollout, Transition
from assay.traces.importers import Skipped, read_langfuse, read_mlflow, read_otlp

DATA = Path(__file__).parent / "data"
READERS = {"otlp": read_otlp, "langfuse": read_langfuse, "mlflow": read_mlflow}


def read(kind: str, path: Path, **more: Any) -> tuple[list[Rollout], list[Skipped]]:
    items = list(READERS[kind](path, **more))
    return [item for item in items if isinstance(item, Rollout)], [item for item in items if isinstance(item, Skipped)]


def body(transition: Transition) -> dict[str, Any]:
    return transition.request["body"]


def messages_of(run: Rollout, t: int = 0) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = body(run.transitions[t])["messages"]
    return messages


def choice(transition: Transition) -> dict[str, Any]:
    assert transition.response is not None
    return transition.response["body"]["choices"][0]


CALLS = [
    {"id": "call_one", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 30}'}},
    {"id": "call_two", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}},
]


SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}


T0 = 1_700_000_000


def value(data: Any) -> dict[str, Any]:
    match data:
        case bool():
            return {"boolValue": data}
        case int():
            return {"intValue": str(data)}
        case float():
            return {"doubleValue": data}
        case list():
            return {"arrayValue": {"values": [value(item) for item in data]}}
        case dict():
            return {"kvlistValue": {"values": attributes(data)}}
        case _:
            return {"stringValue": data}


def attributes(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value(item)} for key, item in data.items()]


def span(
    number: int,
    data: dict[str, Any] | None = None,
    *,
    at: float = 0,
    duration: float = 1,
    parent: int = 0,
    trace: int = 1,
    **more: Any,
) -> Any:
    """Span `number` of a trace, `at` seconds after T0."""
    return {
        "traceId": f"{trace:032x}", "spanId": f"{number:016x}", "parentSpanId": f"{parent:016x}" if parent else "",
        "name": f"span {number}",
        "startTimeUnixNano": str(int((T0 + at) * 1e9)), "endTimeUnixNano": str(int((T0 + at + duration) * 1e9)),
        "status": {},
        "attributes": attributes(data or {}), **more,
    }  # fmt: skip


child = partial(span, parent=1)


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}


def request(*spans: Any, resource: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "resourceSpans": [
            {"resource": {"attributes": attributes(resource or {})}, "scopeSpans": [{"spans": list(spans)}]}
        ]
    }


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def otlp(path: Path, *spans: Any, **more: Any) -> tuple[list[Rollout], list[Skipped]]:
    return read("otlp", lines(path / "x.jsonl", request(*spans, **more)))


def imported(folder: Path, *spans: Any, logs: list[dict[str, Any]] | None = None) -> tuple[Rollout, list[Skipped]]:
    """The one rollout of a file with these spans, and with records of a log."""
    rows = [request(*spans), *([{"resourceLogs": [{"scopeLogs": [{"logRecords": logs}]}]}] if logs else [])]
    (run,), skipped = read("otlp", lines(folder / "x.jsonl", *rows))
    return run, skipped


def mlflow_span(
    number: int, kind: str, inputs: Any = None, outputs: Any = None, *, parent: int = 0, **more: Any
) -> dict[str, Any]:
    recorded = {"mlflow.spanType": kind, "mlflow.spanInputs": inputs, "mlflow.spanOutputs": outputs, **more}
    return {
        "span_id": f"s{number}", "parent_span_id": f"s{parent}" if parent else None, "name": f"n{number}",
        "start_time_unix_nano": number * 10**9, "end_time_unix_nano": number * 10**9 + 1,
        "status": {"code": "STATUS_CODE_OK"},
        "attributes": {key: json.dumps(item) for key, item in recorded.items()},
    }  # fmt: skip


def mlflow_trace(*spans: dict[str, Any], **info: Any) -> dict[str, Any]:
    return {"info": {"trace_id": "tr-1", "state": "OK", **info}, "data": {"spans": list(spans)}}


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    """Attributes of an LM call by the current conventions."""
    messages = [{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]
    answer = [{"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": "stop"}]
    kinds = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    return {
        **kinds,
        "gen_ai.input.messages": json.dumps(messages),
        "gen_ai.output.messages": json.dumps(answer),
        **more,
    }


def only(result: tuple[list[Rollout], list[Skipped]]) -> Transition:
    (run,), skipped = result
    assert skipped == []
    (call,) = run.transitions
    return call


def tool(call_id: str = "", name: str = "f", **more: Any) -> dict[str, Any]:
    recorded = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, **more}
    return {**recorded, "gen_ai.tool.call.id": call_id} if call_id else recorded


def langfuse(path: Path, *rows: Any, **more: Any) -> tuple[list[Rollout], list[Skipped]]:
    return read("langfuse", lines(path / "x.jsonl", *rows), **more)


def observation(
    number: int, kind: str = "GENERATION", *, at: int = 0, parent: int = 0, trace: str = "t", **more: Any
) -> dict[str, Any]:
    return {
        "id": f"o{number}", "traceId": trace, "type": kind, "name": f"{kind.lower()} {number}",
        "startTime": f"2025-01-01T00:00:{at:02}.000Z",
        "endTime": f"2025-01-01T00:00:{at + 1:02}.000Z", "parentObservationId": f"o{parent}" if parent else None,
        **more,
    }  # fmt: skip


def mark(name: str, value: Any, source: str = "EVAL", kind: str = "NUMERIC", **more: Any) -> dict[str, Any]:
    known = {"traceId": "t", "name": name, "value": value, "source": source, "dataType": kind}
    return {"id": f"{name}-{value}-{len(more)}", **known, **more}
