"""What a model answered is byte for byte in an imported record."""

import json
from pathlib import Path
from typing import Any

import pytest
from exact_answers import ANSWERS, FORMATS, Sentiment, as_turn

from assay.programs.adapters import make_adapter
from assay.traces import Store
from assay.traces.importers import import_traces


@pytest.mark.parametrize("prompt_format", [*FORMATS, "refusal"])
@pytest.mark.parametrize("kind", ["otlp", "langfuse", "mlflow"])
def test_an_imported_answer_is_stored_byte_for_byte(tmp_path: Path, kind: str, prompt_format: str) -> None:
    text = ANSWERS.get(prompt_format, "I cannot help with that.")
    message = (
        {"role": "assistant", "content": text}
        if prompt_format in ANSWERS
        else {"role": "assistant", "content": None, "refusal": text}
    )
    prompt = [{"role": "user", "content": "fine"}]
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps(_trace(kind, prompt, message)), encoding="utf-8")
    with Store(tmp_path / "s.db") as store:
        import_traces(store, kind, path)
        store.flush()
        (rollout,) = store.rollouts()
        (transition,) = store.rollout(rollout.id).transitions
    assert transition.output == text
    turn = as_turn(transition)
    assert turn.answer["content"] == text
    if prompt_format in FORMATS:
        assert make_adapter(prompt_format).parse(Sentiment, transition.output)["label"] == "pos"


def _trace(kind: str, prompt: list[dict[str, Any]], message: dict[str, Any]) -> Any:
    """One LM call as a tracer writes it."""
    if kind == "langfuse":
        return _langfuse(prompt, message)
    return _mlflow(prompt, message) if kind == "mlflow" else _otlp(message)


def _langfuse(prompt: list[dict[str, Any]], message: dict[str, Any]) -> Any:
    return [
        {
            "id": "t",
            "name": "a",
            "timestamp": "2026-01-01T00:00:00Z",
            "observations": [
                {
                    "id": "o",
                    "traceId": "t",
                    "type": "GENERATION",
                    "name": "g",
                    "model": "m",
                    "startTime": "2026-01-01T00:00:00Z",
                    "endTime": "2026-01-01T00:00:01Z",
                    "input": prompt,
                    "output": message,
                }
            ],
        }
    ]


def _mlflow(prompt: list[dict[str, Any]], message: dict[str, Any]) -> Any:
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    return [
        {
            "info": {"trace_id": "t", "state": "OK"},
            "data": {
                "spans": [
                    {
                        "name": "g",
                        "span_id": "0000000000000001",
                        "trace_id": "1",
                        "parent_span_id": None,
                        "start_time_unix_nano": 1,
                        "end_time_unix_nano": 2,
                        "status": {"code": "STATUS_CODE_OK"},
                        "attributes": {
                            "mlflow.spanType": json.dumps("CHAT_MODEL"),
                            "mlflow.spanInputs": json.dumps({"model": "m", "messages": prompt}),
                            "mlflow.spanOutputs": json.dumps(answer),
                        },
                    }
                ]
            },
        }
    ]


def _otlp(message: dict[str, Any]) -> Any:
    parts = (
        [{"type": "text", "content": message["content"]}]
        if message["content"]
        else [{"type": "refusal", "content": message["refusal"]}]
    )
    values = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "fine"}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts, "finish_reason": "stop"}]),
    }  # fmt: skip
    span = {
        "traceId": "0" * 31 + "1",
        "spanId": "0" * 15 + "1",
        "name": "chat m",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in values.items()],
    }
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
