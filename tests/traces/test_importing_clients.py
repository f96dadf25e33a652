"""Spans of single clients, hand-written after recordings of an agent with three calls.

Recorded with logfire 5.2, mlflow 3.17 with pydantic-ai 2.68, langfuse 5.0 with langchain 1.4.
"""

import json
from pathlib import Path
from typing import Any

from client_spans import ADD, SCHEMA, T0, answer_of, call, imported, messages_of, span

from assay.traces import Rollout
from assay.traces.importers import read_mlflow


def logfire_stream(
    first: int, at: float, messages: list[dict[str, Any]], parts: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The span of a streamed request, and the log that is written when the stream has ended."""
    request_fields = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.input.messages": json.dumps(messages),
    }
    answer = json.dumps([{"role": "assistant", "parts": parts}])
    ended = {
        "gen_ai.output.messages": answer,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "duration": 1.0,
    }
    return [
        span(first, {**request_fields, "logfire.span_type": "span"}, at=at, name="Chat Completion with 'm'"),
        span(
            first + 1,
            {**request_fields, **ended, "logfire.span_type": "log"},
            at=at + 2,
            name="streaming response from 'm' took 1.00s",
        ),
    ]


# -- logfire


def test_concurrent_and_interrupted_logfire_streams_are_separate_calls(tmp_path: Path) -> None:
    question = [{"role": "user", "parts": [{"type": "text", "content": "1+2?"}]}]
    (first_span, first_log), (second_span, second_log) = (
        logfire_stream(n, at, question, [{"type": "text", "content": f"{n}"}]) for n, at in ((2, 0), (4, 0.5))
    )
    broken, _ = logfire_stream(6, 9, [*question, *question], [])
    run = imported(tmp_path, [span(1, {}, parent=0), first_span, second_span, first_log, second_log, broken])
    assert [t.output for t in run.transitions] == ["2", "4", ""]


def test_requests_and_answers_of_older_logfire_versions_are_read(tmp_path: Path) -> None:
    request_data = json.dumps(
        {"messages": [{"role": "user", "content": "1+2?"}], "model": "m", "temperature": 0.5, "tools": [ADD]}
    )
    response_data = json.dumps({"message": {"role": "assistant", "content": None, "tool_calls": [call("c0", a=1)]}})
    recorded = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "request_data": request_data,
        "response_data": response_data,
    }
    run = imported(tmp_path, [span(1, recorded, parent=0)])
    assert messages_of(run, 0) == [{"role": "user", "content": "1+2?"}]
    assert run.transitions[0].request["body"]["tools"] == [ADD]
    assert answer_of(run, 0)["tool_calls"] == [call("c0", a=1)]


def pydantic_request(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"parts": list(parts), "instructions": "Use tools.", "kind": "request", **more}


TOOL_CALL = {"tool_name": "add", "args": '{"a": 1}', "tool_call_id": "c0", "part_kind": "tool-call"}


FIRST = pydantic_request(
    {"content": "Be brief.", "part_kind": "system-prompt"}, {"content": "1+2?", "part_kind": "user-prompt"}
)


SECOND = pydantic_request({"tool_name": "add", "content": 3, "tool_call_id": "c0", "part_kind": "tool-return"})


CALLED = {
    "parts": [TOOL_CALL],
    "usage": {"input_tokens": 10, "output_tokens": 3},
    "finish_reason": "tool_call",
    "kind": "response",
}


PARAMETERS = {
    "function_tools": [{"name": "add", "parameters_json_schema": SCHEMA, "description": "adds"}],
    "output_tools": [],
    "allow_text_output": True,
}


def mlflow_span(number: int, kind: str, inputs: Any, outputs: Any, *, parent: int = 1) -> dict[str, Any]:
    recorded = {
        "mlflow.spanType": kind,
        "mlflow.spanInputs": inputs,
        "mlflow.spanOutputs": outputs,
        "mlflow.llm.model": "m",
    }
    return {
        "name": f"span {number}", "span_id": f"{number:016x}", "parent_span_id": f"{parent:016x}" if parent else None,
        "start_time_unix_nano": int((T0 + number) * 1e9), "end_time_unix_nano": int((T0 + number + 1) * 1e9),
        "status": {"code": "STATUS_CODE_OK"},
        "attributes": {key: json.dumps(item) for key, item in recorded.items()},
    }  # fmt: skip


def mlflow(folder: Path, *spans: dict[str, Any]) -> Rollout:
    (folder / "x.jsonl").write_text(
        json.dumps({"info": {"trace_id": "tr-1", "state": "OK"}, "data": {"spans": list(spans)}})
    )
    (rollout,) = (item for item in read_mlflow(folder / "x.jsonl") if isinstance(item, Rollout))
    return rollout


# -- MLflow with pydantic-ai


def test_pydantic_ais_messages_in_mlflow_keep_roles_tools_and_calls(tmp_path: Path) -> None:
    answer = {
        "parts": [{"content": "hm", "part_kind": "thinking"}, {"content": "It is 3.", "part_kind": "text"}],
        "kind": "response",
    }
    run = mlflow(
        tmp_path,
        mlflow_span(
            1,
            "AGENT",
            {"user_prompt": "1+2?"},
            {"output": "It is 3.", "_output_tool_name": None, "_state": {"usage": {}}},
            parent=0,
        ),
        mlflow_span(
            2,
            "LLM",
            {"messages": [FIRST], "model_settings": {"temperature": 0.5}, "model_request_parameters": PARAMETERS},
            CALLED,
        ),
        mlflow_span(3, "TOOL", {"a": 1}, 3),
        mlflow_span(
            4,
            "LLM",
            {"messages": [FIRST, CALLED, SECOND], "model_settings": {}, "model_request_parameters": PARAMETERS},
            answer,
        ),
    )
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "1+2?"},
    ]
    assert messages_of(run, 0) == prompt
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**call("c0"), "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    assert messages_of(run, 1) == [*prompt, called, {"role": "tool", "tool_call_id": "c0", "content": "3"}]
    assert run.transitions[0].request["body"]["tools"] == [ADD]
    assert (run.transitions[0].request["body"]["temperature"], run.transitions[0].prompt_tokens) == (0.5, 10)
    assert answer_of(run, 0) == called
    assert answer_of(run, 1) == {"role": "assistant", "content": "It is 3.", "reasoning_content": "hm"}
    assert run.prediction == {"output": "It is 3."}


def test_pydantic_ais_retries_pictures_and_typed_answers_are_read(tmp_path: Path) -> None:
    typed = {
        **PARAMETERS,
        "output_tools": [{"name": "final_result", "parameters_json_schema": SCHEMA}],
        "allow_text_output": False,
    }
    user = {"content": ["Look:", {"url": "https://x/y.png", "kind": "image-url"}], "part_kind": "user-prompt"}
    retry = {
        "content": [{"type": "missing", "loc": ["b"]}],
        "tool_name": "add",
        "tool_call_id": "c0",
        "part_kind": "retry-prompt",
    }
    plain = {"content": "Answer with a tool.", "tool_name": None, "part_kind": "retry-prompt"}
    sent = [pydantic_request(user, instructions=None), CALLED, pydantic_request(retry, plain, instructions=None)]
    final = {
        "parts": [{"tool_name": "final_result", "args": {"a": 3}, "tool_call_id": "c9", "part_kind": "tool-call"}],
        "kind": "response",
    }
    run = mlflow(
        tmp_path,
        mlflow_span(
            1,
            "AGENT",
            {"user_prompt": "?"},
            {"output": {"a": 3}, "_output_tool_name": "final_result", "_state": {}},
            parent=0,
        ),
        mlflow_span(2, "LLM", {"messages": sent, "model_request_parameters": typed}, final),
    )
    first, _, third, fourth = messages_of(run, 0)
    assert first["content"] == [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
    ]
    assert (third["role"], third["tool_call_id"], json.loads(third["content"])) == (
        "tool",
        "c0",
        [{"type": "missing", "loc": ["b"]}],
    )
    assert fourth == {"role": "user", "content": "Answer with a tool."}
    body = run.transitions[0].request["body"]
    assert ([tool["function"]["name"] for tool in body["tools"]], body["tool_choice"]) == (
        ["add", "final_result"],
        "required",
    )
    assert run.prediction == {"a": 3}


# -- Langfuse with LangChain
