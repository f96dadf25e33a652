"""Spans of single clients, written by hand, and what an import reads from them."""

import json
from pathlib import Path
from typing import Any

from assay.traces import Rollout
from assay.traces.importers import read_otlp

T0 = 1_700_000_000
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}


def value(data: Any) -> dict[str, Any]:
    if isinstance(data, list):
        return {"arrayValue": {"values": [value(item) for item in data]}}
    if isinstance(data, dict):
        return {"kvlistValue": {"values": attributes(data)}}
    if isinstance(data, float):
        return {"doubleValue": data}
    return {"intValue": str(data)} if isinstance(data, int) else {"stringValue": data}


def attributes(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value(item)} for key, item in data.items()]


def span(number: int, data: dict[str, Any], *, at: float = 0, parent: int = 1, name: str = "") -> dict[str, Any]:
    return {
        "traceId": f"{1:032x}", "spanId": f"{number:016x}", "parentSpanId": f"{parent:016x}" if parent else "",
        "name": name or f"span {number}",
        "startTimeUnixNano": str(int((T0 + at) * 1e9)), "endTimeUnixNano": str(int((T0 + at + 1) * 1e9)), "status": {},
        "attributes": attributes(data),
    }  # fmt: skip


def imported(folder: Path, spans: list[dict[str, Any]], logs: list[dict[str, Any]] | None = None) -> Rollout:
    document: dict[str, Any] = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    if logs:
        document["resourceLogs"] = [{"scopeLogs": [{"logRecords": logs}]}]
    (folder / "x.json").write_text(json.dumps(document))
    (rollout,) = (item for item in read_otlp(folder / "x.json") if isinstance(item, Rollout))
    return rollout


def messages_of(run: Rollout, t: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = run.transitions[t].request["body"]["messages"]
    return messages


def answer_of(run: Rollout, t: int) -> dict[str, Any]:
    response = run.transitions[t].response
    assert response is not None
    message: dict[str, Any] = response["body"]["choices"][0]["message"]
    return message


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}
