"""Spans of single clients, hand-written after recordings of an agent that adds two numbers.

Recorded with logfire 5.2, mlflow 3.17 with pydantic-ai 2.68, strands-agents 1.62, ai 6.0 (Vercel),
opentelemetry-instrumentation-botocore 0.66b2, openinference-instrumentation-google-genai 1.4 and -bedrock 0.1.61.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from importing_rows import (
    ADD,
    SCHEMA,
    attributes,
    body,
    call,
    child as span,
    choice,
    imported,
    lines,
    messages_of,
    mlflow_span,
    mlflow_trace,
    read,
    value,
)

from assay.traces import Rollout

USER, SYSTEM = {"role": "user", "content": "1+2?"}, {"role": "system", "content": "You add."}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("c0", a=1)]}
ROOT = span(1, parent=0)
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
text = json.dumps


def event(name: str, **data: Any) -> dict[str, Any]:
    return {"name": name, "attributes": attributes(data)}


def assert_added(run: Rollout) -> None:
    """The two calls of the agent, with its tool in between."""
    first, second = run.transitions
    answered = [SYSTEM, USER, CALLED, {"role": "tool", "tool_call_id": "c0", "content": "3"}]
    assert [messages_of(run, 0), messages_of(run, 1)] == [[SYSTEM, USER], answered]
    assert choice(first)["message"] == CALLED
    assert choice(second)["message"] == {"role": "assistant", "content": "It is 3."}
    assert (choice(first)["finish_reason"], choice(second)["finish_reason"]) == ("tool_calls", "stop")
    assert [body(t)["tools"] for t in run.transitions] == [[ADD], [ADD]]
    assert [(tool.name, tool.arguments, tool.result) for tool in run.tools] == [("add", {"a": 1}, "3")]
    assert (run.status, run.prediction, run.inputs) == ("done", {"output": "It is 3."}, {"input": "1+2?"})


# -- logfire


def logfire_stream(first: int, at: float, messages: list[Any], answer: str) -> list[dict[str, Any]]:
    """The span of a streamed request, and the log that is written when the stream has ended."""
    asked = {**CHAT, "gen_ai.input.messages": text(messages)}
    parts = [{"type": "text", "content": answer}]
    ended = {"gen_ai.output.messages": text([{"role": "assistant", "parts": parts}]), "duration": 1.0}
    name = "streaming response from 'm' took 1.00s"
    return [
        span(first, {**asked, "logfire.span_type": "span"}, at=at, name="Chat Completion with 'm'"),
        span(first + 1, {**asked, **ended, "logfire.span_type": "log"}, at=at + 2, name=name),
    ]


def test_concurrent_and_interrupted_logfire_streams_are_separate_calls(tmp_path: Path) -> None:
    question = [{"role": "user", "parts": [{"type": "text", "content": "1+2?"}]}]
    first_span, first_log = logfire_stream(2, 0, question, "2")
    second_span, second_log = logfire_stream(4, 0.5, question, "4")
    broken, _ = logfire_stream(6, 9, [*question, *question], "")
    run, _ = imported(tmp_path, ROOT, first_span, second_span, first_log, second_log, broken)
    assert [t.output for t in run.transitions] == ["2", "4", ""]


def test_requests_and_answers_of_older_logfire_versions_are_read(tmp_path: Path) -> None:
    asked = {"messages": [USER], "model": "m", "temperature": 0.5, "tools": [ADD]}
    recorded = {**CHAT, "request_data": text(asked), "response_data": text({"message": CALLED})}
    run, _ = imported(tmp_path, span(1, recorded, parent=0))
    assert (messages_of(run), body(run.transitions[0])["tools"]) == ([USER], [ADD])
    assert choice(run.transitions[0])["message"]["tool_calls"] == CALLED["tool_calls"]


# -- MLflow with pydantic-ai


def pydantic_request(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"parts": list(parts), "instructions": "Use tools.", "kind": "request", **more}


TOOL_CALL = {"tool_name": "add", "args": '{"a": 1}', "tool_call_id": "c0", "part_kind": "tool-call"}
FIRST = pydantic_request(
    {"content": "Be brief.", "part_kind": "system-prompt"}, {"content": "1+2?", "part_kind": "user-prompt"}
)
SECOND = pydantic_request({"tool_name": "add", "content": 3, "tool_call_id": "c0", "part_kind": "tool-return"})
ASKED_BY_MODEL = {"parts": [TOOL_CALL], "usage": {"input_tokens": 10, "output_tokens": 3}, "kind": "response"}
PARAMETERS = {
    "function_tools": [{"name": "add", "parameters_json_schema": SCHEMA, "description": "adds"}],
    "output_tools": [],
    "allow_text_output": True,
}


def pydantic_run(folder: Path, output: dict[str, Any], *calls: tuple[list[Any], dict[str, Any], Any]) -> Rollout:
    """An agent's run in MLflow: its output, and the messages, parameters and answer of each call."""
    spans = [mlflow_span(1, "AGENT", {"user_prompt": "1+2?"}, {**output, "_state": {}})]
    for number, (messages, parameters, answer) in enumerate(calls, 2):
        asked = {"messages": messages, "model_settings": {"temperature": 0.5}, "model_request_parameters": parameters}
        spans.append(mlflow_span(number, "LLM", asked, answer, parent=1))
    (run,), _ = read("mlflow", lines(folder / "x.jsonl", mlflow_trace(*spans)))
    return run


def test_pydantic_ais_messages_in_mlflow_keep_roles_tools_and_calls(tmp_path: Path) -> None:
    thought = [{"content": "hm", "part_kind": "thinking"}, {"content": "It is 3.", "part_kind": "text"}]
    run = pydantic_run(
        tmp_path,
        {"output": "It is 3.", "_output_tool_name": None},
        ([FIRST], PARAMETERS, ASKED_BY_MODEL),
        ([FIRST, ASKED_BY_MODEL, SECOND], PARAMETERS, {"parts": thought, "kind": "response"}),
    )
    systems = [{"role": "system", "content": content} for content in ("Be brief.", "Use tools.")]
    result = {"role": "tool", "tool_call_id": "c0", "content": "3"}
    assert messages_of(run, 0) == [*systems, USER]
    assert messages_of(run, 1) == [*systems, USER, CALLED, result]
    first, second = run.transitions
    assert (body(first)["tools"], body(first)["temperature"], first.prompt_tokens) == ([ADD], 0.5, 10)
    assert choice(first)["message"] == CALLED
    assert choice(second)["message"] == {"role": "assistant", "content": "It is 3.", "reasoning_content": "hm"}
    assert run.prediction == {"output": "It is 3."}


def test_pydantic_ais_retries_pictures_and_typed_answers_are_read(tmp_path: Path) -> None:
    final = {"name": "final_result", "parameters_json_schema": SCHEMA}
    typed = {**PARAMETERS, "output_tools": [final], "allow_text_output": False}
    user = {"content": ["Look:", {"url": "https://x/y.png", "kind": "image-url"}], "part_kind": "user-prompt"}
    missing = [{"type": "missing", "loc": ["b"]}]
    retry = {"content": missing, "tool_name": "add", "tool_call_id": "c0", "part_kind": "retry-prompt"}
    plain = {"content": "Answer with a tool.", "tool_name": None, "part_kind": "retry-prompt"}
    sent = [pydantic_request(user, instructions=None), ASKED_BY_MODEL, pydantic_request(retry, plain)]
    answer = {"tool_name": "final_result", "args": {"a": 3}, "tool_call_id": "c9", "part_kind": "tool-call"}
    output = {"output": {"a": 3}, "_output_tool_name": "final_result"}
    run = pydantic_run(tmp_path, output, (sent, typed, {"parts": [answer], "kind": "response"}))
    _, first, _, third, fourth = messages_of(run)
    picture = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    assert first["content"] == [{"type": "text", "text": "Look:"}, picture]
    assert (third["role"], third["tool_call_id"], json.loads(third["content"])) == ("tool", "c0", missing)
    assert fourth == {"role": "user", "content": "Answer with a tool."}
    asked = body(run.transitions[0])
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["add", "final_result"]
    assert (asked["tool_choice"], run.prediction) == ("required", {"a": 3})


# -- Google GenAI and Bedrock


def test_a_raw_gemini_request_and_reply_read_as_chat(tmp_path: Path) -> None:
    """OpenInference also has its own attributes; here they are missing."""
    parameters = {"type": "OBJECT", "properties": {"a": {"type": "NUMBER"}}}
    contents = [
        {"parts": [{"text": "1+2?"}], "role": "user"},
        {"parts": [{"function_call": {"args": {"a": 1}, "name": "add"}}], "role": "model"},
        {"parts": [{"function_response": {"name": "add", "response": {"result": 3}}}], "role": "user"},
    ]
    asked = {
        "contents": contents,
        "system_instruction": {"parts": [{"text": "You add."}], "role": "user"},
        "tools": [{"function_declarations": [{"name": "add", "description": "adds", "parameters": parameters}]}],
    }
    answer = {"parts": [{"text": "It is 3."}], "role": "model"}
    reply = {"candidates": [{"content": answer, "finish_reason": "STOP"}], "model_version": "gemini"}
    recorded = {"openinference.span.kind": "LLM", "input.value": text(asked), "output.value": text(reply)}
    run, _ = imported(tmp_path, span(1, recorded, parent=0))
    called = {"role": "assistant", "content": None, "tool_calls": [call("call_0", a=1)]}
    result = {"role": "tool", "tool_call_id": "call_0", "content": '{"result": 3}'}
    assert messages_of(run) == [SYSTEM, USER, called, result]
    assert body(run.transitions[0])["tools"] == [ADD]
    assert (choice(run.transitions[0])["finish_reason"], run.prediction) == ("stop", {"output": "It is 3."})


def test_duplicate_bedrock_calls_and_results_are_imported_once(tmp_path: Path) -> None:
    """botocore's events have each call as a part and as a tool call, each result as a message and as a part."""
    used = {"toolUse": {"toolUseId": "c0", "name": "add", "input": {"a": 1}}}
    result = {"toolResult": {"toolUseId": "c0", "content": [{"text": "3"}]}}
    tool_calls = [{"type": "function", "id": "c0", "function": {"name": "add", "arguments": {"a": 1}}}]
    answer = {"role": "assistant", "content": [{"text": "It is 3."}]}
    events = [
        ("gen_ai.system.message", {"content": [{"text": "You add."}]}),
        ("gen_ai.user.message", {"content": [{"text": "1+2?"}]}),
        ("gen_ai.assistant.message", {"content": [{"text": "Let me add."}, used], "tool_calls": tool_calls}),
        ("gen_ai.tool.message", {"id": "c0", "content": [{"text": "3"}]}),
        ("gen_ai.user.message", {"content": [result]}),
        ("gen_ai.choice", {"index": 0, "finish_reason": "end_turn", "message": answer}),
    ]
    place = {"traceId": f"{1:032x}", "spanId": f"{1:016x}"}
    logs = [{**place, "eventName": name, "body": value(payload)} for name, payload in events]
    run, _ = imported(tmp_path, span(1, {**CHAT, "gen_ai.system": "aws.bedrock"}, parent=0), logs=logs)
    tool = {"role": "tool", "tool_call_id": "c0", "content": "3"}
    assert messages_of(run) == [SYSTEM, USER, {**CALLED, "content": "Let me add."}, tool]
    assert choice(run.transitions[0])["message"]["content"] == "It is 3."


def test_bedrocks_definitions_of_tools_are_read(tmp_path: Path) -> None:
    spec = {"toolSpec": {"name": "add", "description": "adds", "inputSchema": {"json": SCHEMA}}}
    raw = {"messages": [{"role": "user", "content": [{"text": "1+2?"}]}], "toolConfig": {"tools": [spec]}}
    for recorded in (
        {
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": "1+2?",
            "llm.output_messages.0.message.content": "3",
            "llm.tools.0.tool.json_schema": text(spec),
        },
        {"input.value": text(raw), "output.value": "3"},
    ):
        run, _ = imported(tmp_path, span(1, {"openinference.span.kind": "LLM", **recorded}, parent=0))
        assert body(run.transitions[0])["tools"] == [ADD]


# -- agents of frameworks


def test_strands_takes_the_system_prompt_and_tools_from_its_agent(tmp_path: Path) -> None:
    use = {"toolUse": {"toolUseId": "c0", "name": "add", "input": {"a": 1}}}
    result = {"toolResult": {"toolUseId": "c0", "status": "success", "content": [{"text": "3"}]}}
    thought = {"reasoningContent": {"reasoningText": {"text": "hm", "signature": "s"}}}
    asked = event("gen_ai.user.message", content=text([{"text": "1+2?"}]))
    called = [asked, event("gen_ai.choice", finish_reason="tool_use", message=text([use]))]
    answered = [
        asked,
        event("gen_ai.assistant.message", content=text([use])),
        event("gen_ai.user.message", content=text([result])),
        event("gen_ai.choice", finish_reason="end_turn", message=text([thought, {"text": "It is 3."}])),
    ]
    used = [
        event("gen_ai.tool.message", role="tool", content='{"a": 1}', id="c0"),
        event("gen_ai.choice", message=text([{"text": "3"}]), id="c0"),
    ]
    run_of_agent = [
        event("gen_ai.user.message", content="1+2?"),
        event("gen_ai.choice", message="It is 3.\n", finish_reason="end_turn"),
    ]
    defined = text([{"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA}])
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.tool.definitions": defined, "system_prompt": "You add."}
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "gen_ai.tool.call.id": "c0"}
    run, skipped = imported(
        tmp_path,
        span(1, agent, parent=0, events=run_of_agent),
        span(2, CHAT, at=1, events=called),
        span(3, tool, at=3, events=used),
        span(4, CHAT, at=4, events=answered),
    )
    assert choice(run.transitions[1])["message"].pop("reasoning_content") == "hm"
    assert_added(run)
    assert skipped == []


def vercel(operation: str, **data: Any) -> dict[str, Any]:
    known = {"ai.operationId": f"ai.{operation}", "ai.telemetry.functionId": "adder", "ai.model.id": "m"}
    return {**known, **{f"ai.{name.replace('_', '.')}": item for name, item in data.items()}}


@pytest.mark.parametrize(
    ("outer", "inner", "arguments", "output", "schema"),
    [
        ("streamText", "doStream", "args", {"result": 3}, "parameters"),  # version 4
        ("generateText", "doGenerate", "input", {"output": {"type": "json", "value": 3}}, "inputSchema"),  # version 6
    ],
)
def test_the_vercel_ai_sdks_spans_are_read(
    tmp_path: Path, outer: str, inner: str, arguments: str, output: dict[str, Any], schema: str
) -> None:
    names = {"toolCallId": "c0", "toolName": "add"}
    question = [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "1+2?"}]}]
    called = {"type": "tool-call", **names, arguments: {"a": 1}}
    result = {"role": "tool", "content": [{"type": "tool-result", **names, **output}]}
    later = [*question, {"role": "assistant", "content": [called]}, result]
    usage = {"usage_inputTokens": 10, "usage_outputTokens": 3}
    tools = [text({"type": "function", "name": "add", "description": "adds", schema: SCHEMA})]
    asked = {"prompt_tools": tools, "prompt_toolChoice": '{"type":"auto"}', **usage}
    requested = text([{**names, arguments: '{"a": 1}'}])
    first, second = (
        vercel(f"{outer}.{inner}", prompt_messages=text(messages), response_finishReason=reason, **asked, **said)
        for messages, reason, said in (
            (question, "tool-calls", {"response_toolCalls": requested}),
            (later, "stop", {"response_text": "It is 3."}),
        )
    )
    tool = vercel("toolCall", toolCall_name="add", toolCall_id="c0", toolCall_args='{"a":1}', toolCall_result="3")
    root = vercel(outer, prompt=text({"system": "You add.", "prompt": "1+2?"}), response_text="It is 3.")
    run, skipped = imported(
        tmp_path, span(1, root, parent=0), span(2, first, at=1), span(3, tool, at=3), span(4, second, at=4)
    )
    assert_added(run)
    assert (run.program, skipped) == ("adder", [])
    assert [(t.model, t.prompt_tokens, t.completion_tokens) for t in run.transitions] == [("m", 10, 3)] * 2


# -- predictions


@pytest.mark.parametrize(
    ("output", "prediction"),
    [
        ({"outputs": {"answer": "3"}, "kwargs": {"tags": []}}, {"answer": "3"}),  # OpenLLMetry
        ({"outputs": "3", "kwargs": {}}, {"output": "3"}),
        ({"messages": [USER, {"role": "assistant", "content": "3"}]}, {"output": "3"}),  # LangGraph
        ({"messages": [{"type": "ai", "content": "3"}], "label": "odd"}, {"label": "odd", "output": "3"}),
        ({"messages": [{"source": "a", "content": "3", "type": "TextMessage"}], "stop_reason": None}, {"output": "3"}),
        ({"choices": [{"message": {"role": "assistant", "content": "3"}}], "id": "c"}, {"output": "3"}),  # AutoGen
        ({"output": [{"type": "message", "content": [{"type": "output_text", "text": "3"}]}]}, {"output": "3"}),
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
    ended = {"mlflow.spanOutputs": output} if output == "3" else {"traceloop.entity.output": text(output)}
    run, _ = imported(tmp_path, span(1, ended, parent=0), span(2, recorded))
    assert run.prediction == prediction
