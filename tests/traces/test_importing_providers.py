"""Spans of Google GenAI and Bedrock, hand-written after recordings of an agent, and outputs of a run.

Recorded with opentelemetry-instrumentation-google-genai 1.3b0 and -botocore 0.66b2, OpenLLMetry's google-generativeai
and bedrock 0.62, openinference-instrumentation-google-genai 1.4 and -bedrock 0.1.61.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from client_spans import ADD, SCHEMA, answer_of, call, imported, messages_of, span, value

GEMINI = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "OBJECT", "properties": {"a": {"type": "NUMBER"}}},
}


# -- Google GenAI


def test_a_raw_gemini_request_and_reply_read_as_chat(tmp_path: Path) -> None:
    """OpenInference also has its own attributes; here they are missing."""
    contents = [
        {"parts": [{"text": "1+2?"}], "role": "user"},
        {"parts": [{"function_call": {"args": {"a": 1}, "name": "add"}}], "role": "model"},
        {"parts": [{"function_response": {"name": "add", "response": {"result": 3}}}], "role": "user"},
    ]
    request = {
        "contents": contents,
        "system_instruction": {"parts": [{"text": "Be brief."}], "role": "user"},
        "tools": [{"function_declarations": [GEMINI]}],
    }
    reply = {
        "candidates": [{"content": {"parts": [{"text": "It is 3."}], "role": "model"}, "finish_reason": "STOP"}],
        "model_version": "gemini",
    }
    recorded = {
        "openinference.span.kind": "LLM",
        "llm.model_name": "gemini",
        "input.value": json.dumps(request),
        "output.value": json.dumps(reply),
    }
    run = imported(tmp_path, [span(1, recorded, parent=0)])
    assert [m["role"] for m in messages_of(run, 0)] == ["system", "user", "assistant", "tool"]
    assert messages_of(run, 0)[2]["tool_calls"] == [call("call_0", a=1)]
    assert messages_of(run, 0)[3] == {"role": "tool", "tool_call_id": "call_0", "content": '{"result": 3}'}
    assert run.transitions[0].request["body"]["tools"] == [ADD]
    assert run.transitions[0].response["body"]["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]
    assert run.prediction == {"output": "It is 3."}


# -- Bedrock


def test_duplicate_bedrock_calls_and_results_are_imported_once(tmp_path: Path) -> None:
    """botocore's events have each call as a part and as a tool call, each result as a message and as a part."""
    used = {"toolUse": {"toolUseId": "tu0", "name": "add", "input": {"a": 1}}}
    result = {"toolResult": {"toolUseId": "tu0", "content": [{"text": "3"}]}}
    tool_calls = [{"type": "function", "id": "tu0", "function": {"name": "add", "arguments": {"a": 1}}}]
    events = [
        ("gen_ai.system.message", {"content": [{"text": "Be brief."}]}),
        ("gen_ai.user.message", {"content": [{"text": "1+2?"}]}),
        ("gen_ai.assistant.message", {"content": [{"text": "Let me add."}, used], "tool_calls": tool_calls}),
        ("gen_ai.tool.message", {"id": "tu0", "content": [{"text": "3"}]}),
        ("gen_ai.user.message", {"content": [result]}),
        (
            "gen_ai.choice",
            {
                "index": 0,
                "finish_reason": "end_turn",
                "message": {"role": "assistant", "content": [{"text": "It is 3."}]},
            },
        ),
    ]
    recorded = {
        "gen_ai.system": "aws.bedrock",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "claude",
        "rpc.method": "Converse",
    }
    logs = [
        {"traceId": f"{1:032x}", "spanId": f"{1:016x}", "eventName": name, "body": value(payload)}
        for name, payload in events
    ]
    run = imported(tmp_path, [span(1, recorded, parent=0)], logs)
    assert messages_of(run, 0) == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "Let me add.", "tool_calls": [call("tu0", a=1)]},
        {"role": "tool", "tool_call_id": "tu0", "content": "3"},
    ]  # fmt: skip
    assert answer_of(run, 0)["content"] == "It is 3."


def test_bedrocks_definitions_of_tools_are_read(tmp_path: Path) -> None:
    spec = {"toolSpec": {"name": "add", "description": "adds", "inputSchema": {"json": SCHEMA}}}
    recorded = {
        "openinference.span.kind": "LLM",
        "llm.model_name": "claude",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "1+2?",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "3",
        "llm.tools.0.tool.json_schema": json.dumps(spec),
    }
    assert imported(tmp_path, [span(1, recorded, parent=0)]).transitions[0].request["body"]["tools"] == [ADD]
    raw = {"messages": [{"role": "user", "content": [{"text": "1+2?"}]}], "toolConfig": {"tools": [spec]}}
    recorded = {"openinference.span.kind": "LLM", "input.value": json.dumps(raw), "output.value": "3"}
    assert imported(tmp_path, [span(1, recorded, parent=0)]).transitions[0].request["body"]["tools"] == [ADD]


# -- predictions


@pytest.mark.parametrize(
    ("output", "prediction"),
    [
        ({"outputs": {"answer": "3"}, "kwargs": {"tags": []}}, {"answer": "3"}),  # OpenLLMetry
        ({"outputs": "3", "kwargs": {}}, {"output": "3"}),
        # LangGraph
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "3"}]}, {"output": "3"}),
        ({"messages": [{"type": "ai", "content": "3"}], "label": "odd"}, {"label": "odd", "output": "3"}),
        ({"messages": [{"source": "a", "content": "3", "type": "TextMessage"}], "stop_reason": None}, {"output": "3"}),
        # AutoGen
        ({"choices": [{"message": {"role": "assistant", "content": "3"}}], "id": "c"}, {"output": "3"}),
        (
            {"output": [{"type": "message", "content": [{"type": "output_text", "text": "3"}]}], "id": "resp"},
            {"output": "3"},
        ),
        ({"final_output": {"label": "odd"}, "new_items": [], "raw_responses": []}, {"label": "odd"}),  # OpenAI Agents
        ({"raw": "3", "pydantic": None, "json_dict": None, "tasks_output": []}, {"output": "3"}),  # CrewAI
        ({"answer": "3"}, {"answer": "3"}),
        ({"messages": []}, {"messages": []}),
        ({"output": "3", "confidence": 0.5}, {"output": "3", "confidence": 0.5}),
        ("3", {"output": 3}),
    ],
)
def test_the_output_of_a_run_is_extracted_from_its_result_object(
    tmp_path: Path, output: Any, prediction: dict[str, Any]
) -> None:
    recorded = {"openinference.span.kind": "LLM", "input.value": "?", "output.value": "hm"}
    name = "traceloop.entity.output" if isinstance(output, dict) else "mlflow.spanOutputs"
    text = json.dumps(output) if isinstance(output, dict) else output
    run = imported(tmp_path, [span(1, {name: text}, parent=0), span(2, recorded)])
    assert run.prediction == prediction
