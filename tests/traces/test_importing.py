"""Imports of traces: files of real tracers, hand-written rows of each generation of the conventions, broken files.

The files in `data/` were recorded once from one agent that calls the embedded SmolLM2-135M over HTTP, and are
unchanged. The first response, with two tool calls, was scripted: so small a model calls no tools. Tracers:
opentelemetry-instrumentation-openai-v2 2.4b0 with opentelemetry-util-genai 1.0b0 (`otlp_openai_v2*`, the events by
2.3b0), opentelemetry-instrumentation-openai 0.40.14 and 0.62.4 (`otlp_openllmetry*`),
openinference-instrumentation-openai 0.1.66, langfuse 5.0.4 (as OTLP), mlflow-skinny 3.17.2 and 2.22.5. Agents that end
with a tool call in front of a scripted model wrote `otlp_pydantic_ai.jsonl` (pydantic-ai 2.68, its own spans as logfire
stores them) and `otlp_*_final.jsonl`. Rows of Langfuse's server exports follow its documentation.
"""

import base64
import hashlib
import json
import math
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import DataError, MissingExtra
from assay.traces import Rollout, Store, ToolCall, Transition
from assay.traces.importers import ImportReport, Skipped, import_traces, read_langfuse, read_mlflow, read_otlp
from assay.traces.importers import files as importing_files
from assay.traces.messages.dialects import answer_of, chat_messages, chat_tools
from assay.traces.store.tables import metadata

DATA = Path(__file__).parent / "data"
READERS = {"otlp": read_otlp, "langfuse": read_langfuse, "mlflow": read_mlflow}
RAISED = "invalid literal for int() with base 10: 'x'"
BURNT = "Error code: 500 - the server is on fire"


def read(kind: str, path: Path, **more: Any) -> tuple[list[Rollout], list[Skipped]]:
    items = list(READERS[kind](path, **more))
    return [item for item in items if isinstance(item, Rollout)], [item for item in items if isinstance(item, Skipped)]


def body(transition: Transition) -> dict[str, Any]:
    return transition.request["body"]


def choice(transition: Transition) -> dict[str, Any]:
    assert transition.response is not None
    return transition.response["body"]["choices"][0]


# -- what real tracers wrote: the same agent, so the same rollouts

CALLS = [
    {"id": "call_one", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 30}'}},
    {"id": "call_two", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}},
]
PROMPT = [{"role": "system", "content": "You add numbers."}, {"role": "user", "content": "What is 12 + 30?"}]
CALLED = [
    *PROMPT,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_one", "content": "42"},
    {"role": "tool", "tool_call_id": "call_two", "content": f"error: {RAISED}"},
]
FINAL_ANSWER = "calling a tool with a non-integer value."  # a small model
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
# file, kind, whether tools were recorded with the request, how the inputs read
RECORDED = [
    ("otlp_openai_v2.jsonl", "otlp", False, "input"),
    ("otlp_openai_v2_events.jsonl", "otlp", False, "input"),
    ("otlp_openllmetry_0_40.jsonl", "otlp", True, "input"),
    ("otlp_openllmetry_0_62.jsonl", "otlp", True, "input"),
    ("otlp_openinference.jsonl", "otlp", True, "input"),
    ("otlp_langfuse_sdk.jsonl", "otlp", True, "input"),
    ("mlflow_3.jsonl", "mlflow", True, "question"),
]


@pytest.mark.parametrize(("name", "kind", "with_tools", "input_name"), RECORDED)
def test_recorded_traces_of_every_tracer_give_the_same_rollout(
    name: str, kind: str, with_tools: bool, input_name: str
) -> None:
    (run, _), _ = read(kind, DATA / name)
    assert (run.status, run.error, run.source, run.program) == ("done", None, kind, "adder")
    assert run.inputs == {input_name: "What is 12 + 30?"}
    assert run.prediction == {
        "output": FINAL_ANSWER
    }  # in the events' file the root span says nothing: it is the last call's answer
    first, second = run.transitions
    assert (body(first)["messages"], body(second)["messages"]) == (PROMPT, CALLED)
    assert body(first).get("tools") == ([ADD] if with_tools else None)
    assert (body(first)["temperature"], body(first)["max_tokens"]) == (0.0, 24)
    assert choice(first)["message"] == {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert choice(second)["message"] == {"role": "assistant", "content": FINAL_ANSWER}
    if "langfuse" not in name:  # which records no reasons, and the answer's model
        assert (choice(first)["finish_reason"], choice(second)["finish_reason"]) == ("tool_calls", "stop")
        assert [t.model for t in run.transitions] == [
            "smollm2-135m"
        ] * 2  # as it was asked for, not as the answer names it
    assert (first.output, second.output) == ("", FINAL_ANSWER)
    assert [(t.prompt_tokens, t.completion_tokens) for t in run.transitions] == [(91, 23), (66, 12)]
    assert first.tools[0] == ToolCall(name="add", arguments={"a": 12, "b": 30}, result="42")
    assert first.tools[1].arguments == {"a": 1, "b": "x"}
    assert first.tools[1].result is None
    assert str(first.tools[1].error).removeprefix("ValueError: ") == RAISED
    assert (second.tools, run.early_tools) == ([], [])
    assert 5 < first.latency_ms < 60 < second.latency_ms < 600
    assert run.started_at <= first.started_at < second.started_at < (run.ended_at or 0)
    assert 1_795_305_000 < run.started_at < 1_795_306_000  # when they were recorded


@pytest.mark.parametrize(("name", "kind", "with_tools", "input_name"), RECORDED)
def test_a_run_whose_model_failed_is_a_failed_rollout_with_its_call(
    name: str, kind: str, with_tools: bool, input_name: str
) -> None:
    (_, failed), _ = read(kind, DATA / name)
    assert failed.status == "failed"
    assert str(failed.error).removeprefix("InternalServerError: ").removeprefix("openai.") == BURNT
    assert (failed.inputs, failed.prediction) == ({input_name: "boom"}, None)
    (call,) = failed.transitions
    assert str(call.error).removeprefix("InternalServerError: ").removeprefix("openai.") == BURNT
    assert body(call)["messages"] == [PROMPT[0], {"role": "user", "content": "boom"}]
    assert (call.output, call.response, call.prompt_tokens, call.tools) == ("", None, None, [])


@pytest.mark.parametrize(("name", "kind", "with_tools", "input_name"), RECORDED)
def test_imported_calls_are_chat_requests(name: str, kind: str, with_tools: bool, input_name: str) -> None:
    (run, _), _ = read(kind, DATA / name)
    first, second = run.transitions
    assert chat_messages(second.request) == [
        *chat_messages(first.request),
        answer_of("chat", first.response["body"]).message,
        *CALLED[3:],
    ]  # type: ignore[index]
    assert chat_tools(first.request) == ([ADD] if with_tools else [])
    assert first.request["dialect"] == "chat"


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("otlp_pydantic_ai.jsonl", [42, '{"value": 42, "unit": "42"}', "The answer is 42."]),
        ("otlp_openllmetry_final.jsonl", ["42"]),
        ("otlp_openinference_final.jsonl", ["42"]),
    ],
)
def test_an_agent_that_ended_with_a_tool_call_has_its_arguments_as_the_answer(name: str, answers: list[Any]) -> None:
    runs, _ = read("otlp", DATA / name)
    assert [(run.status, len(run.transitions), run.prediction) for run in runs] == [
        ("done", 3, {"output": answer}) for answer in answers
    ]


def test_a_run_that_ended_by_asking_for_tools_or_unrecorded_has_no_answer(tmp_path: Path) -> None:
    def call(name: str) -> dict[str, Any]:
        parts = [{"type": "tool_call", "id": "c", "name": name, "arguments": {"answer": "42"}}]
        return chat() | {"gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts}])}

    silent = {key: value for key, value in chat().items() if "output" not in key}
    for last, answer in ((call("search"), None), (silent, None), (call("final_answer"), {"output": "42"})):
        (run,), _ = otlp(tmp_path, span(1), span(2, chat("a thought"), parent=1), span(3, last, parent=1, at=1))
        assert run.prediction == answer


@pytest.mark.parametrize(
    ("name", "result", "answer"),
    [
        ("final_result", None, {"output": "42"}),
        ("final_result", "Final result processed.", {"output": "42"}),
        ("search", "42", {"output": "42"}),
    ],
)
def test_a_recorded_conversation_that_ends_with_a_tool_call_has_an_answer(
    tmp_path: Path, name: str, result: str | None, answer: dict[str, Any]
) -> None:  # fmt: skip
    talk = [
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": name, "arguments": {"answer": "42"}}]}
    ]
    talk += (
        []
        if result is None
        else [{"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": result}]}]
    )
    (run,), _ = otlp(tmp_path, span(1, {"gen_ai.output.messages": json.dumps(talk)}), span(2, chat("x"), parent=1))
    assert run.prediction == answer


def test_calls_without_recorded_content_have_no_texts() -> None:
    (run, failed), skipped = read("otlp", DATA / "otlp_openai_v2_no_content.jsonl")  # ids in base64
    assert [(t.prompt_tokens, t.completion_tokens, t.output, body(t)["messages"]) for t in run.transitions] == [
        (91, 23, "", []),
        (66, 12, "", []),
    ]
    assert run.transitions[0].tools == [
        ToolCall(name="add", arguments={}),
        ToolCall(name="add", arguments={}, error=RAISED),
    ]
    assert (run.inputs, run.prediction, failed.status, skipped) == ({}, None, "failed", [])
    first = json.loads((DATA / "otlp_openai_v2_no_content.jsonl").read_text().splitlines()[0])["resourceSpans"][0][
        "scopeSpans"
    ][0]["spans"][0]
    assert run.metadata["trace_id"] == base64.b64decode(first["traceId"]).hex()
    assert run.transitions[0].request["span"] == base64.b64decode(first["spanId"]).hex()


def test_users_and_sessions_of_tracers_are_stored() -> None:
    for name, session in (("otlp_openinference", "s-1"), ("otlp_langfuse_sdk", "s-1"), ("otlp_openllmetry_0_40", None)):
        (run, _), _ = read("otlp", DATA / f"{name}.jsonl")
        assert (run.data_subject, run.metadata.get("session_id"), run.tenant) == ("u-1", session, None)
    (run, _), _ = read("mlflow", DATA / "mlflow_3.jsonl")
    assert (run.data_subject, run.metadata["session_id"], run.tenant) == ("u-1", "s-1", "acme")


def test_protobuf_gives_the_same_rollouts_as_json() -> None:
    pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2", reason="opentelemetry-proto is not installed")
    from_json, _ = read("otlp", DATA / "otlp_openai_v2.jsonl")
    from_binary, _ = read("otlp", DATA / "otlp_openai_v2.pb")
    assert [{**vars(rollout), "run_id": ""} for rollout in from_binary] == [
        {**vars(rollout), "run_id": ""} for rollout in from_json
    ]


def test_protobuf_messages_after_their_lengths_are_read_one_by_one(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2", reason="opentelemetry-proto is not installed")
    message = (DATA / "otlp_openai_v2.pb").read_bytes()
    (path := tmp_path / "x.pb").write_bytes(
        len(message).to_bytes(4, "big") + message + (999).to_bytes(4, "big") + message[:100]
    )
    rollouts, skipped = read("otlp", path)
    assert len(rollouts) == 2
    assert [skip.where for skip in skipped] == [f"{path}[1]"]
    assert "not OTLP protobuf" in skipped[0].reason
    (broken := tmp_path / "y.pb").write_bytes(message[:100])
    with pytest.raises(DataError, match="neither JSON nor OTLP protobuf"):
        read("otlp", broken)


def test_protobuf_without_its_package_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.trace.v1.trace_pb2", None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtra, match=r"opentelemetry-proto.*assay\[otlp\]"):
        read("otlp", DATA / "otlp_openai_v2.pb")


def test_mlflow_2_traces_have_other_names_and_read_the_same() -> None:
    (run,), skipped = read("mlflow", DATA / "mlflow_2.json")
    (call,) = run.transitions
    assert (run.metadata, run.program, run.status, skipped) == (
        {"trace_id": "8babde34ae1d47c4a9489d8cfb95cb0d"},
        "agent",
        "done",
        [],
    )
    assert (run.inputs, run.prediction) == ({"q": "12 + 30?"}, {"output": "42"})
    assert body(call) == {"model": "m", "messages": [{"role": "user", "content": "12 + 30?"}], "temperature": 0.5}
    assert (call.prompt_tokens, call.completion_tokens) == (5, 2)
    assert call.tools == [ToolCall(name="add", arguments={"a": 12, "b": 30}, result="42")]


def test_mlflow_spans_of_other_flavours_read_as_chat() -> None:
    (run,), skipped = read("mlflow", DATA / "mlflow_3_flavours.json")
    openai, claude, plain = run.transitions
    assert (openai.cost_usd, openai.output, body(openai)["model"]) == (0.75, "hello", "m")  # the inner span of two
    assert [skip.reason.split(" is ")[0] for skip in skipped] == ["the span 'LM.__call__'"]
    assert body(claude)["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1+1"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
    ]
    assert body(claude)["tools"] == [
        {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
    ]
    assert (choice(claude)["finish_reason"], claude.output, claude.prompt_tokens, claude.completion_tokens) == (
        "stop",
        "two",
        9,
        2,
    )
    assert (body(plain), plain.output) == ({"messages": [{"role": "user", "content": "say yes"}]}, "yes")


def test_mlflow_assessments_are_verdicts_and_a_persons_is_the_rating() -> None:
    (run, _), skipped = read("mlflow", DATA / "mlflow_3.jsonl")
    assert [(v.criterion, v.grade, v.reason) for v in run.verdicts] == [
        ("helpful", 0.75, "close"), ("relevance", 0.5, "so so"), ("stars", None, "imported as 4.0"), ("ok", 1.0, ""),
    ]  # fmt: skip
    assert (run.human_rating, run.score, run.rubric) == (
        0.75,
        None,
        "",
    )  # two scores that are no person's: neither is the score
    assert run.expected == {"answer": "42"}
    assert [skip.reason for skip in skipped] == [
        "the score 'stars' is 4.0: outside [0, 1]",
        "several scores (relevance, ok) and none selected: stored as verdicts",
    ]
    (run, _), skipped = read("mlflow", DATA / "mlflow_3.jsonl", score="relevance")
    assert (run.human_rating, run.score, run.rubric, len(skipped)) == (0.75, 0.5, "imported:relevance", 1)


# -- OTLP by hand

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


def test_messages_as_attributes_in_json_with_every_kind_of_part(tmp_path: Path) -> None:
    messages = [
        {
            "role": "user",
            "parts": [
                {"type": "text", "content": "look"},
                {"type": "uri", "modality": "image", "uri": "https://x/y.png"},
            ],
        },
        {"role": "user", "parts": [{"type": "blob", "modality": "image", "mime_type": "image/png", "content": "aGk="}]},
        {
            "role": "assistant",
            "parts": [
                {"type": "text", "content": "let me"},
                {"type": "tool_call", "id": "c1", "name": "f", "arguments": {"x": 1}},
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": {"y": 2}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c2", "result": "older name"}]},
        {"role": "user", "parts": [{"type": "text", "content": "one"}, {"type": "text", "content": "two"}]},
        {"role": "user", "parts": [{"type": "file", "file_id": "f-1"}]},
    ]
    answer = [
        {
            "role": "assistant",
            "parts": [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "done"}],
            "finish_reason": "length",
        },
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c3", "name": "g"}], "finish_reason": "tool_call"},
    ]
    recorded = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "gpt",
        "gen_ai.response.model": "gpt-0613",
        "gen_ai.response.id": "r-1",
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
        "gen_ai.input.messages": json.dumps(messages),
        "gen_ai.output.messages": json.dumps(answer),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.tool.definitions": json.dumps(
            [{"type": "function", "name": "f", "description": "F.", "parameters": {"type": "object"}}]
        ),
        "gen_ai.request.temperature": 0.25,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ["END"],
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.cost": 0.125,
    }
    call = only(otlp(tmp_path, span(1, recorded, duration=0.25)))
    assert body(call) == {
        "model": "gpt",
        "temperature": 0.25,
        "top_p": 0.5,
        "max_tokens": 9,
        "seed": 3,
        "stop": ["END"],
        "n": 2,
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
        ],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "look"},
                    {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                ],
            },
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]},
            {
                "role": "assistant",
                "content": "let me",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": '{"y": 2}'},
            {"role": "tool", "tool_call_id": "c2", "content": "older name"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "user", "content": [{"type": "file", "file_id": "f-1"}]},
        ],
    }
    assert call.response == {
        "body": {
            "id": "r-1",
            "model": "gpt-0613",
            "usage": {"prompt_tokens": 7, "completion_tokens": 3},
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "done", "reasoning_content": "hm"},
                    "finish_reason": "length",
                },
                {
                    "index": 1,
                    "finish_reason": "tool_calls",
                    "message": {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "c3", "type": "function", "function": {"name": "g", "arguments": "{}"}}],
                    },
                },
            ],
        }
    }
    assert (call.model, call.output, call.prompt_tokens, call.completion_tokens, call.cost_usd) == (
        "gpt",
        "done",
        7,
        3,
        0.125,
    )
    assert (call.started_at, call.latency_ms, call.request["span"]) == (T0, 250.0, f"{1:016x}")


def test_messages_as_structured_attributes(tmp_path: Path) -> None:
    recorded = chat()
    for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
        recorded[name] = json.loads(recorded[name])
    call = only(otlp(tmp_path, span(1, {**recorded, "gen_ai.system_instructions": [{"type": "text", "content": "s"}]})))
    assert body(call)["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    assert call.output == "hi"


EVENTS = {
    "as the conventions had them": [
        ("gen_ai.system.message", {"content": "s"}),
        ("gen_ai.user.message", {"content": "hello"}),
        (
            "gen_ai.choice",
            {"index": 0, "finish_reason": "stop", "message": json.dumps({"role": "assistant", "content": "hi"})},
        ),
    ],
    "Azure's, with all in one attribute": [
        (
            "gen_ai.system.message",
            {"gen_ai.system": "az.ai.inference", "gen_ai.event.content": '{"role": "system", "content": "s"}'},
        ),
        ("gen_ai.user.message", {"gen_ai.event.content": '{"role": "user", "content": "hello"}'}),
        (
            "gen_ai.choice",
            {"gen_ai.event.content": '{"message": {"content": "hi"}, "finish_reason": "stop", "index": 0}'},
        ),
    ],
    "Strands', with Bedrock's contents": [
        ("gen_ai.system.message", {"content": '[{"text": "s"}]'}),
        ("gen_ai.user.message", {"content": '[{"text": "hello"}]'}),
        ("gen_ai.choice", {"message": '[{"text": "hi"}]', "finish_reason": "end_turn"}),
    ],
    "with dots": [
        ("gen_ai.system.message", {"content": "s"}),
        ("gen_ai.user.message", {"content": "hello"}),
        ("gen_ai.choice", {"finish_reason": "stop", "message.role": "assistant", "message.content": "hi"}),
    ],
    "of 1.27": [
        (
            "gen_ai.content.prompt",
            {"gen_ai.prompt": '[{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]'},
        ),
        (
            "gen_ai.content.completion",
            {"gen_ai.completion": '[{"role": "assistant", "content": "hi", "finish_reason": "stop"}]'},
        ),
    ],
}


@pytest.mark.parametrize("events", EVENTS.values(), ids=EVENTS)
def test_messages_as_span_events(tmp_path: Path, events: list[tuple[str, dict[str, Any]]]) -> None:
    recorded = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.prompt_tokens": 4,
        "gen_ai.usage.completion_tokens": 1,
    }
    call = only(
        otlp(
            tmp_path,
            span(1, recorded, events=[{"name": name, "attributes": attributes(payload)} for name, payload in events]),
        )
    )
    assert body(call)["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    assert choice(call) == {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    assert (call.prompt_tokens, call.completion_tokens) == (4, 1)


def test_bedrock_tools_in_events_are_calls_and_results(tmp_path: Path) -> None:
    events = [
        ("gen_ai.user.message", {"content": '[{"text": "go"}]'}),
        ("gen_ai.assistant.message", {"content": '[{"toolUse": {"toolUseId": "t1", "name": "f", "input": {"x": 1}}}]'}),
        (
            "gen_ai.tool.message",
            {"content": '[{"toolResult": {"toolUseId": "t1", "status": "success", "content": [{"text": "2"}]}}]'},
        ),
        ("gen_ai.choice", {"message": '[{"text": "two"}]', "finish_reason": "end_turn"}),
    ]
    call = only(
        otlp(
            tmp_path,
            span(
                1,
                {"gen_ai.operation.name": "chat"},
                events=[{"name": n, "attributes": attributes(g)} for n, g in events],
            ),
        )
    )
    assert body(call)["messages"] == [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
    ]


def test_messages_of_the_details_event_in_a_log_file_join_their_span(tmp_path: Path) -> None:
    recorded = chat()
    detail = {name: json.loads(recorded.pop(name)) for name in ("gen_ai.input.messages", "gen_ai.output.messages")}
    record = {
        "traceId": f"{1:032x}", "spanId": f"{1:016x}", "eventName": "gen_ai.client.inference.operation.details",
        "attributes": attributes(detail)
    }  # fmt: skip
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}
    call = only(read("otlp", lines(tmp_path / "x.jsonl", logs, request(span(1, recorded)))))
    assert (body(call)["messages"], call.output) == ([{"role": "user", "content": "hello"}], "hi")


def test_pydantic_ai_lists_its_events_in_an_attribute(tmp_path: Path) -> None:
    events = [
        {"event.name": "gen_ai.user.message", "content": "hello", "role": "user", "gen_ai.message.index": 0},
        {"event.name": "gen_ai.choice", "index": 0, "message": {"role": "assistant", "content": "hi"}},
    ]
    call = only(otlp(tmp_path, span(1, {"gen_ai.operation.name": "chat", "events": json.dumps(events)})))
    assert (body(call)["messages"], call.output) == ([{"role": "user", "content": "hello"}], "hi")


def test_indexed_attributes_are_sorted_by_their_numbers(tmp_path: Path) -> None:
    recorded = {"llm.request.type": "chat", "gen_ai.request.model": "m"}
    for at in (10, 2, 1, 0):
        recorded |= {f"gen_ai.prompt.{at}.role": "user", f"gen_ai.prompt.{at}.content": f"m{at}"}
    recorded |= {
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "hi",
        "gen_ai.completion.0.finish_reason": "stop",
    }
    recorded |= {"llm.usage.prompt_tokens": 4, "llm.usage.completion_tokens": 2}
    call = only(otlp(tmp_path, span(1, recorded)))
    assert [message["content"] for message in body(call)["messages"]] == ["m0", "m1", "m2", "m10"]
    assert (call.output, choice(call)["finish_reason"], call.prompt_tokens, call.completion_tokens) == (
        "hi",
        "stop",
        4,
        2,
    )


def test_indexed_contents_in_parts_are_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}]
    recorded = {
        "llm.request.type": "chat",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": json.dumps(parts),
    }
    assert body(only(otlp(tmp_path, span(1, recorded))))["messages"] == [{"role": "user", "content": parts}]


def test_openinference_messages_without_the_raw_request(tmp_path: Path) -> None:
    recorded = {"openinference.span.kind": "LLM", "llm.model_name": "m", "llm.token_count.prompt": 2}
    recorded |= {
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.contents.0.message_content.type": "text",
    }
    recorded |= {
        "llm.input_messages.0.message.contents.0.message_content.text": "hello",
        "llm.output_messages.0.message.content": "hi",
    }
    recorded |= {
        "llm.tools.0.tool.json_schema": json.dumps(ADD),
        "llm.tools.1.tool.name": "g",
        "llm.tools.1.tool.description": "G.",
    }
    call = only(otlp(tmp_path, span(1, recorded)))
    assert (body(call)["messages"], call.output, call.model, call.prompt_tokens) == (
        [{"role": "user", "content": "hello"}],
        "hi",
        "m",
        2,
    )
    assert body(call)["tools"] == [ADD, {"type": "function", "function": {"name": "g", "description": "G."}}]


def test_azures_system_instruction_is_a_system_message(tmp_path: Path) -> None:
    events = [
        ("gen_ai.system.instruction", {"gen_ai.event.content": '{"content": "s"}'}),
        ("gen_ai.user.message", {"gen_ai.event.content": '{"content": "hello"}'}),
    ]
    call = only(
        otlp(
            tmp_path,
            span(
                1,
                {"gen_ai.operation.name": "chat"},
                events=[{"name": n, "attributes": attributes(g)} for n, g in events],
            ),
        )
    )
    assert body(call)["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]


def test_prompt_and_completion_of_a_text_completion(tmp_path: Path) -> None:
    recorded = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m",
        "gen_ai.prompt": "Once",
        "gen_ai.completion": "upon",
    }
    call = only(otlp(tmp_path, span(1, {**recorded, "gen_ai.response.finish_reasons": ["length"]})))
    assert body(call)["messages"] == [{"role": "user", "content": "Once"}]
    assert choice(call) == {"index": 0, "message": {"role": "assistant", "content": "upon"}, "finish_reason": "length"}


def test_json_written_by_a_model_stays_text(tmp_path: Path) -> None:
    for text in (
        '{"answer": 42}',
        '{"text": "x"}',
        '{"message": "x"}',
        '["a", "b"]',
        "{}",
        "[]",
        '"quoted"',
        "{not json",
        '{"output": [1]}',
        '{"input": "x"}',
    ):
        recorded = {"openinference.span.kind": "LLM", "input.value": text, "output.value": text}
        call = only(otlp(tmp_path, span(1, recorded)))
        assert (call.output, body(call)["messages"]) == (text, [{"role": "user", "content": text}])


def test_other_operations_are_not_imported_as_lm_calls(tmp_path: Path) -> None:
    others = [
        span(
            number,
            {
                "gen_ai.operation.name": name,
                "gen_ai.request.model": "m",
                "gen_ai.usage.input_tokens": 9,
                "gen_ai.usage.output_tokens": 0,
            },
            parent=1,
        )
        for number, name in enumerate(("embeddings", "create_agent", "invoke_agent", "retrieval"), 10)
    ]
    others.append(
        span(
            20,
            {"openinference.span.kind": "EMBEDDING", "gen_ai.request.model": "m", "gen_ai.usage.output_tokens": 1},
            parent=1,
        )
    )
    (run,), _ = otlp(tmp_path, span(1), *others, span(2, chat(), parent=1))
    assert [t.request["span"] for t in run.transitions] == [f"{2:016x}"]


def test_older_spans_without_an_operation_name_are_recognised_by_their_token_usage(tmp_path: Path) -> None:
    call = only(
        otlp(
            tmp_path,
            span(1, {"gen_ai.system": "openai", "gen_ai.request.model": "m", "gen_ai.usage.completion_tokens": 3}),
        )
    )
    assert (call.model, call.completion_tokens) == ("m", 3)
    with pytest.raises(DataError, match=r"no .*LM call"):
        otlp(
            tmp_path, span(1, {"gen_ai.system": "openai", "gen_ai.request.model": "m"})
        )  # a chain that names its model


def test_values_of_every_type_and_spelling(tmp_path: Path) -> None:
    written = [
        {"key": "gen_ai.operation.name", "value": {"string_value": "chat"}},
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": 5}},
        {"key": "gen_ai.usage.output_tokens", "value": {"int_value": "6"}},
        {"key": "gen_ai.request.temperature", "value": {"doubleValue": 1}},
        {"key": "gen_ai.request.top_p", "value": {"doubleValue": "NaN"}}, {"key": "x", "value": {"bytesValue": "aGk="}},
        {"key": "y", "value": {}},
        {"key": "gen_ai.request.seed", "value": {"intValue": "9007199254740993"}}, {"key": "z", "value": None},
        "not an attribute",
    ]  # fmt: skip
    document = {
        "resource_spans": [{"resource": {"attributes": []}, "scope_spans": [{"spans": [{
            "trace_id": base64.b64encode(bytes(15) + b"\1").decode(),
            "span_id": base64.b64encode(bytes(7) + b"\2").decode(),
            "start_time_unix_nano": T0 * 10**9, "end_time_unix_nano": (T0 + 1) * 10**9, "attributes": written,
        }]}]}]
    }  # fmt: skip
    (run,), _ = read("otlp", lines(tmp_path / "x.jsonl", document))
    (call,) = run.transitions
    assert (run.metadata["trace_id"], call.request["span"]) == (f"{1:032x}", f"{2:016x}")
    assert (call.prompt_tokens, call.completion_tokens, body(call)["temperature"], body(call)["seed"]) == (
        5,
        6,
        1,
        9007199254740993,
    )
    assert math.isnan(body(call)["top_p"])
    assert (call.started_at, call.latency_ms) == (T0, 1000.0)


@pytest.mark.parametrize("bad", ["NaN", "-1", "abc", "1e400", str(2**31), True, None, [1], {"a": 1}, "9" * 5000])
def test_a_missing_count_is_unknown_and_never_zero(tmp_path: Path, bad: Any) -> None:
    written = [
        *attributes({"gen_ai.operation.name": "chat"}),
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": bad}},
    ]
    call = only(otlp(tmp_path, {**span(1), "attributes": written}))
    assert (call.prompt_tokens, call.completion_tokens) == (None, None)


@pytest.mark.parametrize(
    "bad", [{"arrayValue": {"values": [{"stringValue": "chat"}]}}, {"kvlistValue": {"values": []}}, {"intValue": "5"}]
)
def test_an_operation_name_that_is_not_text_is_ignored(tmp_path: Path, bad: Any) -> None:
    written = [
        {"key": "gen_ai.operation.name", "value": bad},
        *attributes({"gen_ai.request.model": "m", "gen_ai.system": "openai"}),
    ]
    (run,), _ = otlp(tmp_path, {**span(1), "attributes": written}, span(2, chat("a"), parent=1, at=1))
    assert run.transitions[-1].output == "a"


def test_a_document_lines_and_an_array_give_the_same_rollouts(tmp_path: Path) -> None:
    spans = [span(1), span(2, chat("a"), parent=1, at=1), span(3, chat("b"), parent=1, at=2)]
    forms = {
        "document": json.dumps(request(*spans), indent=2), "one line": json.dumps(request(*spans)),
        "lines": "\n".join(json.dumps(request(item)) for item in spans),
        "array": json.dumps([request(item) for item in spans], indent=1),
        "array in lines": "[\n" + ",\n".join(json.dumps(request(item)) for item in spans) + "\n]\n",
        "array of one": "[\n" + json.dumps(request(*spans)) + "\n]\n",
        "documents": "\n".join(json.dumps(request(item), indent=2) for item in spans),
        "bom": "\ufeff" + "\n".join(json.dumps(request(item)) for item in spans),
        "blank lines": "\n\r\n" + "\n\n".join(json.dumps(request(item)) for item in spans) + "\n \n",
    }  # fmt: skip
    for name, text in forms.items():
        (path := tmp_path / "x.json").write_text(text, encoding="utf-8")
        (run,), skipped = read("otlp", path)
        assert ([t.output for t in run.transitions], skipped) == (["a", "b"], []), name


# -- which rollout, which call, which tool


def test_interleaved_spans_are_grouped_by_trace(tmp_path: Path) -> None:
    rows = [request(span(n, chat(f"{trace}.{n}"), at=n, trace=trace)) for n in (3, 1, 2) for trace in (1, 2)]
    (first, second), _ = read("otlp", lines(tmp_path / "x.jsonl", *rows))
    assert [[t.output for t in run.transitions] for run in (first, second)] == [
        ["1.1", "1.2", "1.3"],
        ["2.1", "2.2", "2.3"],
    ]
    assert [t.t for t in first.transitions] == [0, 1, 2]


def test_the_id_of_a_rollout_follows_from_kind_and_trace(tmp_path: Path) -> None:
    (run,), _ = otlp(tmp_path, span(1, chat()))
    (again,), _ = otlp(tmp_path, span(1, chat("other")))
    (other,), _ = otlp(tmp_path, span(1, chat(), trace=2))
    assert run.id == again.id != other.id
    assert len(run.id) == 32
    assert int(run.id, 16)
    assert run.run_id.startswith("import-")
    assert len(run.run_id) == len("import-") + 12
    assert run.run_id != again.run_id  # another file
    assert run.id == hashlib.sha256(f"otlp\n{1:032x}".encode()).hexdigest()[:32]
    assert (
        other.run_id == f"import-{hashlib.sha256((tmp_path / 'x.jsonl').read_bytes()).hexdigest()[:12]}"
    )  # the last that was written


def test_the_same_question_is_the_same_task(tmp_path: Path) -> None:
    silent = {"gen_ai.operation.name": "chat"}
    (first, second, third, fourth), _ = otlp(
        tmp_path, span(1, chat("a")), span(1, chat("b"), trace=2), span(1, silent, trace=3), span(1, silent, trace=4)
    )  # fmt: skip
    assert first.inputs == second.inputs == {"input": "hello"}
    assert first.task_id == second.task_id
    assert len({first.task_id, third.task_id, fourth.task_id}) == 3  # of what was asked in those, nothing is known
    assert (first.prediction, third.inputs, third.prediction) == ({"output": "a"}, {}, None)


def test_without_recorded_inputs_they_are_what_the_first_call_was_sent(tmp_path: Path) -> None:
    (run,), _ = otlp(tmp_path, span(1), span(2, chat(), parent=1))
    assert (run.inputs, run.prediction) == (
        {"input": "hello"},
        {"output": "hi"},
    )  # and the answer is what the last one said


def test_the_roots_input_and_output_are_those_of_the_rollout(tmp_path: Path) -> None:
    recorded = {
        "input.value": '{"question": "q", "k": 2}',
        "output.value": '{"answer": "a"}',
        "openinference.span.kind": "CHAIN",
    }
    (run,), _ = otlp(tmp_path, span(1, recorded), span(2, chat(), parent=1))
    assert (run.inputs, run.prediction) == ({"question": "q", "k": 2}, {"answer": "a"})
    called = {"traceloop.entity.input": '{"args": [], "kwargs": {"question": "q"}}', "traceloop.entity.output": '"[1]"'}
    (run,), _ = otlp(tmp_path, span(1, called), span(2, chat(), parent=1))
    assert (run.inputs, run.prediction) == ({"question": "q"}, {"output": [1]})


def test_a_conversation_that_goes_in_is_kept_as_one(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (run,), _ = otlp(
        tmp_path,
        span(1, {"input.value": json.dumps(talk), "output.value": json.dumps(talk[1])}),
        span(2, chat(), parent=1),
    )
    assert (run.inputs, run.prediction) == ({"messages": talk}, {"output": "b"})


def test_users_tenants_and_versions_come_only_from_where_they_are_named(tmp_path: Path) -> None:
    resource = {"service.name": "bot", "service.version": "v" * 100, "tenant.id": "acme"}
    (run,), _ = otlp(tmp_path, span(1, {"enduser.id": "eve"}), span(2, chat(), parent=1), resource=resource)
    assert (run.program, run.program_version, run.tenant, run.data_subject) == ("bot", "v" * 64, "acme", "eve")
    (run,), _ = otlp(tmp_path, span(1), span(2, chat(), parent=1), resource={"service.name": "bot"})
    assert (run.tenant, run.data_subject) == (None, None)
    (run,), _ = otlp(
        tmp_path, span(1, {"gen_ai.agent.name": "planner"}), span(2, chat(), parent=1), resource={"service.name": "bot"}
    )
    assert run.program == "planner"


def tool(call_id: str = "", name: str = "f", **more: Any) -> dict[str, Any]:
    recorded = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, **more}
    return {**recorded, "gen_ai.tool.call.id": call_id} if call_id else recorded


def asks(*ids: str) -> dict[str, Any]:
    parts = [{"type": "tool_call", "id": call_id, "name": "f", "arguments": {"of": call_id}} for call_id in ids]
    return {**chat(), "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts}])}


def test_a_tool_belongs_to_the_call_that_requested_it_by_id(tmp_path: Path) -> None:
    late = tool("a", **{"gen_ai.tool.call.result": "1"})
    (run,), _ = otlp(
        tmp_path,
        span(1, asks("a"), at=0),
        span(2, asks("b"), at=2),
        span(3, tool("b"), at=3),
        span(4, late, at=9),
        span(5, tool("b"), at=-5),
    )
    first, second = run.transitions
    assert first.tools == [
        ToolCall(name="f", arguments={"of": "a"}, result="1")
    ]  # though the second call was before it too
    assert second.tools == [ToolCall(name="f", arguments={"of": "b"})] * 2  # one by a clock that runs before


def test_a_repeated_id_belongs_to_the_latest_call_before_it(tmp_path: Path) -> None:
    calls = [span(1, asks("call_0"), at=0), span(2, asks("call_0"), at=10)]
    (run,), _ = otlp(
        tmp_path, *calls, span(3, tool("call_0", name="x"), at=5), span(4, tool("call_0", name="y"), at=15)
    )
    assert [[used.name for used in t.tools] for t in run.transitions] == [["x"], ["y"]]


def test_a_tool_without_an_id_belongs_to_the_latest_call_before_it(tmp_path: Path) -> None:
    (run,), _ = otlp(
        tmp_path, span(1, tool(name="early"), at=0), span(2, chat(), at=1), span(3, tool(name="mid"), at=2),
        span(4, chat(), at=3),
        span(5, tool("unknown", name="late"), at=4),
    )  # fmt: skip
    assert [used.name for used in run.early_tools] == ["early"]
    assert [[used.name for used in t.tools] for t in run.transitions] == [["mid"], ["late"]]


def test_a_tools_events_are_its_arguments_and_result(tmp_path: Path) -> None:
    events = [
        ("gen_ai.tool.message", {"role": "tool", "content": '{"x": 1}', "id": "a"}),
        ("gen_ai.choice", {"message": "2", "id": "a"}),
    ]
    tool_span = span(
        3,
        {"gen_ai.operation.name": "execute_tool"},
        at=3,
        name="execute_tool f",
        events=[{"name": n, "attributes": attributes(g)} for n, g in events],
    )
    (run,), _ = otlp(tmp_path, span(1, asks("a"), at=0), span(2, chat(), at=2), tool_span)
    assert run.transitions[0].tools == [ToolCall(name="f", arguments={"x": 1}, result="2")]  # by the id in its event


def test_arguments_and_results_missing_in_a_tool_span_are_read_from_the_messages(tmp_path: Path) -> None:
    back = [{"role": "tool", "parts": [{"type": "tool_call_response", "id": "a", "response": "5"}]}]
    (run,), _ = otlp(
        tmp_path,
        span(1, asks("a"), at=0),
        span(2, tool("a"), at=1),
        span(3, chat(**{"gen_ai.input.messages": json.dumps(back)}), at=2),
    )
    assert run.transitions[0].tools == [ToolCall(name="f", arguments={"of": "a"}, result="5")]


def test_a_trace_without_tool_spans_has_the_tools_of_its_messages(tmp_path: Path) -> None:
    def back(*pairs: tuple[str, str]) -> dict[str, Any]:
        parts = [
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": name, "response": result}]}
            for name, result in pairs
        ]
        return {"gen_ai.input.messages": json.dumps(parts)}

    (run,), _ = otlp(
        tmp_path, span(1, asks("a", "b"), at=0), span(2, {**asks("a"), **back(("a", "1"), ("b", "2"))}, at=1),
        span(3, chat(**back(("a", "1"), ("b", "2"), ("a", "3"))), at=2),
    )  # fmt: skip
    assert [[(used.arguments["of"], used.result) for used in t.tools] for t in run.transitions] == [
        [("a", "1"), ("b", "2")],
        [("a", "3")],
        [],
    ]


def test_arguments_and_results_that_are_not_objects_are_kept(tmp_path: Path) -> None:
    listed = tool(**{"gen_ai.tool.call.arguments": "[1, 2]", "gen_ai.tool.call.result": ["x", 1]})
    long = tool(**{"gen_ai.tool.call.arguments": "plain", "gen_ai.tool.call.result": "y" * 30_000})
    (run,), _ = otlp(tmp_path, span(1, chat()), span(2, listed, at=1), span(3, long, at=2))
    assert run.transitions[0].tools[0] == ToolCall(name="f", arguments={"arguments": [1, 2]}, result='["x", 1]')
    assert (run.transitions[0].tools[1].arguments, len(run.transitions[0].tools[1].result or "")) == (
        {"arguments": "plain"},
        20_000,
    )


def test_an_lm_span_around_another_is_not_counted_twice(tmp_path: Path) -> None:
    outer, inner = chat("outer", **{"gen_ai.usage.input_tokens": 5}), chat("inner", **{"gen_ai.usage.input_tokens": 5})
    (run,), skipped = otlp(tmp_path, span(1), span(2, outer, parent=1), span(3, parent=2), span(4, inner, parent=3))
    assert ([t.output for t in run.transitions], run.tokens) == (["inner"], 5)
    assert [skip.reason for skip in skipped] == [f"the span 'span 2' is the same LM call as the span '{4:016x}'"]
    silent = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    (run,), _ = otlp(tmp_path, span(1, chat("outer")), span(2, silent, parent=1))
    assert [t.output for t in run.transitions] == ["outer"]  # the inner one recorded nothing of what was said


def test_an_lm_call_inside_a_tool_is_a_separate_call(tmp_path: Path) -> None:
    (run,), skipped = otlp(
        tmp_path, span(1, chat("outer")), span(2, tool(), parent=1), span(3, chat("inner"), parent=2, at=1)
    )
    assert ([t.output for t in run.transitions], skipped) == (["outer", "inner"], [])


def test_scores_of_evaluation_events_are_scores(tmp_path: Path) -> None:
    recorded = {
        "gen_ai.evaluation.name": "relevance",
        "gen_ai.evaluation.score.value": 0.5,
        "gen_ai.evaluation.score.label": "so",
        "gen_ai.evaluation.explanation": "e",
    }
    (run,), _ = otlp(
        tmp_path, span(1, chat(), events=[{"name": "gen_ai.evaluation.result", "attributes": attributes(recorded)}])
    )
    (verdict,) = run.verdicts
    assert (run.score, run.rubric, verdict.grade, verdict.label, verdict.reason) == (
        0.5,
        "imported:relevance",
        0.5,
        "so",
        "e",
    )


# -- what is broken


def test_spans_with_missing_or_cyclic_parents_are_imported(tmp_path: Path) -> None:
    (run,), _ = otlp(tmp_path, span(2, chat("a"), parent=99, at=5), span(3, chat("b"), parent=98, at=6))
    assert [t.output for t in run.transitions] == ["a", "b"]
    (run,), skipped = otlp(
        tmp_path, span(1, chat("a"), parent=2), span(2, chat("b"), parent=1, at=1), span(3, chat("c"), parent=3, at=2)
    )
    assert ([t.output for t in run.transitions], skipped) == (["a", "b", "c"], [])


def test_a_root_is_the_earliest_span_without_a_parent(tmp_path: Path) -> None:
    failed = {"status": {"code": 2, "message": "broke"}}
    (run,), _ = otlp(
        tmp_path,
        span(1, at=0, parent=77),
        span(2, at=2),
        span(3, at=1, **failed),
        span(4, chat(), at=3, parent=2, **failed),
    )
    assert (run.status, run.error, run.program, run.transitions[0].error) == ("failed", "broke", "span 3", "broke")
    (run,), _ = otlp(tmp_path, span(1, at=1), span(2, chat(), at=2, parent=1, **failed))
    assert (run.status, run.error, run.transitions[0].error) == ("done", None, "broke")  # the agent coped


def test_an_error_is_read_from_status_exception_or_type(tmp_path: Path) -> None:
    raised = [{"name": "exception", "attributes": attributes({"exception.type": "E", "exception.message": "m"})}]
    for recorded, more, expected in (
        ({}, {"status": {"code": "STATUS_CODE_ERROR"}, "events": raised}, "E: m"),
        ({"error.type": "timeout"}, {}, "timeout"),
        ({}, {"status": {"code": 2}}, "error"), ({}, {"status": {"code": 1}}, None), ({}, {"status": None}, None),
    ):  # fmt: skip
        (run,), _ = otlp(tmp_path, span(1, {**chat(), **recorded}, **more))
        assert run.transitions[0].error == expected


def test_invalid_times_are_ignored(tmp_path: Path) -> None:
    backwards = span(1, chat("a"), at=10, duration=-5)
    timeless = {**span(2, chat("b")), "startTimeUnixNano": "0", "endTimeUnixNano": None}
    absurd = {**span(3, chat("c")), "startTimeUnixNano": "1e999", "endTimeUnixNano": "soon"}
    jumped = span(4, chat("d"), at=-1_000_000)
    (run,), _ = otlp(tmp_path, timeless, absurd, backwards, jumped)
    assert [t.output for t in run.transitions] == [
        "d",
        "a",
        "b",
        "c",
    ]  # those without a time at the end, in the file's order
    assert [t.latency_ms for t in run.transitions] == [1000.0, 0.0, 0.0, 0.0]
    assert [t.started_at for t in run.transitions] == [T0 - 1_000_000, T0 + 10, 0.0, 0.0]
    assert (run.started_at, run.ended_at) == (T0 - 1_000_000, T0 + 10)


def test_of_a_duplicate_span_the_later_one_is_imported(tmp_path: Path) -> None:
    result = read("otlp", lines(tmp_path / "x.jsonl", request(span(1, chat("first"))), request(span(1, chat("last")))))
    (run,), (again,) = result
    assert [t.output for t in run.transitions] == ["last"]
    assert (again.repeated, again.where, again.trace) == (True, f"{tmp_path / 'x.jsonl'}:2", f"{1:032x}")


def test_broken_rows_are_skipped_and_the_others_are_read(tmp_path: Path) -> None:
    nameless = {**span(5, chat()), "traceId": "0" * 32}
    path = lines(
        tmp_path / "x.jsonl", request(span(1, chat("a"))), '{"resourceSpans": [{"scopeSp\n', "[1, null]\n", "17\n",
        '{"resourceMetrics": []}\n',
        json.dumps({"info": {}, "data": {}}) + "\n", request(nameless), request(span(1, trace=3)),
        request(span(1, chat("b"), trace=2)),
        '{"resourceSpans": {"a": 1}}\n', '{"resourceSpans": [{"scopeSpans": [{"spans": [3, {"traceId": 7}]}]}]}\n',
        '{"resourceSpans": [{"scopeSpans": [{"sp',
    )  # fmt: skip
    rollouts, skipped = read("otlp", path)
    assert [run.transitions[0].output for run in rollouts] == ["a", "b"]
    reasons = {skip.where.removeprefix(f"{path}:"): skip.reason for skip in skipped}
    assert reasons["2"].startswith("not JSON: ")
    assert (reasons["3[0]"], reasons["3[1]"], reasons["4"]) == tuple(
        f"expected an object, found {kind}" for kind in ("int", "NoneType", "int")
    )
    assert reasons["5"] == "no spans: its fields are 'resourceMetrics'"
    assert reasons["6"] == "a row of mlflow, not of otlp"
    assert reasons["7"] == "the span 'span 5' has no trace id"
    assert reasons["8"] == "no LM call among its 1 spans"
    assert reasons["10"] == "no spans: its fields are 'resourceSpans'"
    assert reasons["11"] == "the span '' has no trace id"
    assert reasons["12"].startswith("not JSON: ")
    assert len(skipped) == 11


def test_hostile_texts_are_read(tmp_path: Path) -> None:
    row = json.dumps(request(span(1, chat("a\ud800b\0c")))).replace("hello", "\\udfff\\u0000")
    (path := tmp_path / "x.jsonl").write_bytes(row.encode() + b"\n" + b"\xff\xfe bad bytes\n" + b"\0" * 100 + b"\n")
    (run,), skipped = read("otlp", path)
    assert run.transitions[0].output == "a\ud800b\0c"
    assert skipped[0].reason == "not UTF-8 at byte 0"
    assert len(skipped) == 2


def test_any_text_is_accepted_as_an_id(tmp_path: Path) -> None:
    odd = [{**span(1, chat("x")), "traceId": name} for name in ("trace-é\ud800", "trace-é\ud801", "a\0b", "ABCDEF")]
    rollouts, _ = otlp(tmp_path, *odd)
    assert len({run.id for run in rollouts}) == 4


def test_only_rows_with_excessive_nesting_are_skipped(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    inner: Any = {"stringValue": "x"}
    for _ in range(200):
        inner = {"arrayValue": {"values": [inner]}}
    nested = {**span(1, chat("b"), trace=2), "attributes": [*attributes(chat("b")), {"key": "x", "value": inner}]}
    rows = [
        request(span(1, chat("a"))),
        f'{{"resourceSpans": {deep}}}\n',
        request({**span(1, chat(deep), trace=3)}),
        request(nested),
    ]
    rollouts, skipped = read("otlp", lines(tmp_path / "x.jsonl", *rows))
    assert [run.transitions[0].output for run in rollouts] == ["a", deep, "b"]
    assert [skip.where for skip in skipped] == [f"{tmp_path / 'x.jsonl'}:2"]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "only white space"),
        (b'{"resourceSpans": [{"scopeSpans"', r"x\.json:1: neither JSON lines nor a JSON document"),
        (b'{\n "resourceSpans": [\n  {,\n', r"x\.json:3: neither JSON lines nor a JSON document"),
        (b"hello\nworld\n", r"x\.json:1: neither"),
        (b"\x1f\x8b\x08\x00", r"compressed \(gzip\)"),
        (b"\x28\xb5\x2f\xfd\x00", r"compressed \(zstd\)"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b'{"resourceSpans": []}', "has no otlp LM call in 0 traces; .*x.json:1: no spans"),
        (
            json.dumps(request(span(1, {"gen_ai.operation.name": "embeddings"}))).encode(),
            "has no otlp LM call in 1 traces; .*among its 1 spans",
        ),
    ],
)
def test_a_file_without_traces_is_refused_with_the_reason(tmp_path: Path, written: bytes, message: str) -> None:
    (path := tmp_path / "x.json").write_bytes(written)
    with pytest.raises(DataError, match=message):
        read("otlp", path)


def test_lines_after_a_broken_first_line_are_read(tmp_path: Path) -> None:
    (run,), (skipped,) = read("otlp", lines(tmp_path / "x.jsonl", '{"resourceSpa\n', request(span(1, chat("a")))))
    assert (run.transitions[0].output, skipped.where) == ("a", f"{tmp_path / 'x.jsonl'}:1")


def test_skipped_rows_of_a_document_name_their_line(tmp_path: Path) -> None:
    good, bad = json.dumps(request(span(1, chat())), indent=1), json.dumps({"resourceMetrics": [1, 2]}, indent=1)
    (path := tmp_path / "x.json").write_text(f"{bad}\n\n{good}\n\n\n{bad}")
    _, skipped = read("otlp", path)
    assert [skip.where for skip in skipped] == [
        f"{path}:1",
        f"{path}:{6 + 2 + good.count(chr(10)) + 3}",
    ]  # the first has six lines


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(DataError, match="no such file"):
            read("otlp", path)


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [
        ("otlp", "mlflow_3.jsonl", "mlflow"),
        ("mlflow", "otlp_openai_v2.jsonl", "otlp"),
        ("langfuse", "mlflow_2.json", "mlflow"),
        ("langfuse", "otlp_langfuse_sdk.jsonl", "otlp"),
    ],
)
def test_a_file_of_another_kind_is_recognised_by_its_first_row(kind: str, name: str, other: str) -> None:
    with pytest.raises(
        DataError, match=rf"{name}:1 is not {kind}; it looks like {other}\. Use: assay traces import {other} "
    ):
        read(kind, DATA / name)


def test_protobuf_is_refused_as_a_langfuse_export(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"otlp_openai_v2\.pb is not JSON"):
        read("langfuse", DATA / "otlp_openai_v2.pb")


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_trace(tmp_path: Path) -> None:
    path, text = tmp_path / "x.jsonl", "x" * 10_000
    with path.open("w") as file:
        for number in range(600):  # 12 MB, each trace's two spans at the two ends of the file
            file.write(json.dumps(request(span(1, chat(text), trace=number + 1))) + "\n")
        for number in range(600):
            file.write(json.dumps(request(span(2, chat(text), trace=number + 1))) + "\n")
    tracemalloc.start()
    try:
        assert sum(len(run.transitions) for run in read_otlp(path) if isinstance(run, Rollout)) == 1200
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_only_lines_and_traces_that_are_too_large_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing_files, "_LINE", 5_000)
    monkeypatch.setattr(importing_files, "_TRACE", 3_000)
    rows = [
        request(span(1, chat("x" * 20_000))),
        request(span(1, chat("a"), trace=2)),
        *(request(span(n, chat("y" * 500), trace=3)) for n in range(1, 9)),
    ]
    (run,), skipped = read("otlp", lines(tmp_path / "x.jsonl", *rows, request(span(1, chat("b"), trace=2))))
    assert run.transitions[0].output == "b"
    assert [skip.reason.split(":")[0] for skip in skipped if not skip.repeated] == [
        "not JSON",
        "the trace is larger than 0 MiB",
    ]


def test_a_full_disk_during_sorting_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = importing_files.Sorted.__init__

    def small(self: importing_files.Sorted) -> None:
        made(self)
        self._db.execute("PRAGMA max_page_count=8")

    monkeypatch.setattr(importing_files.Sorted, "__init__", small)
    with pytest.raises(DataError, match=r"cannot be sorted by trace: .*full.*SQLITE_TMPDIR"):
        otlp(tmp_path, *(span(n, chat("y" * 5_000)) for n in range(1, 50)))


# -- Langfuse, after its documentation


def langfuse(path: Path, *rows: Any, **more: Any) -> tuple[list[Rollout], list[Skipped]]:
    return read("langfuse", lines(path / "x.jsonl", *rows), **more)


PAGE = {  # the sample response of the Observations API v2
    "data": [{
        "id": "support-chat-7-950dc53a-gen", "traceId": "support-chat-7-950dc53a",
        "startTime": "2025-12-17T16:09:00.875Z",
        "projectId": "7a88fb47-b4e2-43b8-a06c-a5ce950dc53a", "parentObservationId": None, "type": "GENERATION",
        "endTime": "2025-12-17T16:09:01.456Z", "name": "llm-generation", "level": "DEFAULT", "statusMessage": "",
        "version": "",
        "environment": "default", "bookmarked": False, "public": False,
        "completionStartTime": "2025-12-17T16:09:00.995Z",
        "createdAt": "2025-12-17T16:09:00.875Z", "updatedAt": "2025-12-17T16:09:01.456Z",
        "input": '{"messages":[{"role":"user","content":"Perfect."}]}',
        "output": '{"role":"assistant","content":"You\'re all set. Have a great day!"}', "metadata": {},
        "providedModelName": "gpt-4o",
        "internalModelId": "clm1a2b3c4d5e6f7g8h9i0j1", "modelParameters": {"temperature": 0.2},
        "usageDetails": {"input": 98, "output": 68, "total": 166}, "inputUsage": 98, "outputUsage": 68,
        "totalUsage": 166,
        "costDetails": {"input": 0.00049, "output": 0.00204, "total": 0.00253}, "inputCost": 0.00049,
        "outputCost": 0.00204,
        "totalCost": 0.00253, "promptId": "", "promptName": "", "promptVersion": None, "latency": 0.581,
        "timeToFirstToken": 0.12,
        "userId": "", "sessionId": "support-chat-session", "modelId": "clm1a2b3c4d5e6f7g8h9i0j1",
        "inputPrice": "0.000005",
        "outputPrice": "0.00003", "totalPrice": None, "usagePricingTierName": None, "tags": ["support", "chat"],
        "release": "v1.4.2",
        "traceName": "support-chat",
    }],
    "meta": {"cursor": "eyJsYXN0"},
}  # fmt: skip


def test_a_page_of_langfuses_api_is_read(tmp_path: Path) -> None:
    (run,), skipped = langfuse(tmp_path, PAGE)
    (call,) = run.transitions
    assert skipped == []
    assert (run.source, run.program, run.program_version, run.status, run.data_subject) == (
        "langfuse",
        "support-chat",
        "v1.4.2",
        "done",
        None,
    )
    assert run.metadata == {"trace_id": "support-chat-7-950dc53a", "session_id": "support-chat-session"}
    assert (run.inputs, run.prediction) == ({"input": "Perfect."}, {"output": "You're all set. Have a great day!"})
    assert body(call) == {"model": "gpt-4o", "messages": [{"role": "user", "content": "Perfect."}], "temperature": 0.2}
    assert (call.output, call.prompt_tokens, call.completion_tokens, call.cost_usd) == (
        "You're all set. Have a great day!",
        98,
        68,
        0.00253,
    )
    assert (call.started_at, call.latency_ms) == (1765987740.875, 581.0)  # 2025-12-17T16:09:00.875Z


def test_a_table_exported_from_langfuses_ui_is_read(tmp_path: Path) -> None:
    row = {  # the example of "Export from UI"
        "id": "obs_01J9",
        "traceId": "trace_01J9",
        "name": "openai-chat",
        "type": "GENERATION",
        "model": "gpt-4o-mini",
        "startTime": "2025-04-12T10:23:14.512Z",
        "endTime": "2025-04-12T10:23:16.108Z",
        "input": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Summarize the email below."},
        ],
        "output": {"role": "assistant", "content": "The email asks ..."},
        "usage": {"input": 412, "output": 87, "total": 499, "unit": "TOKENS"},
        "totalCost": 0.000183,
        "level": "DEFAULT",
        "metadata": {"customer_tier": "pro"},
        "tags": ["prod", "summarize"],
    }
    (path := tmp_path / "x.json").write_text(json.dumps([row, {**row, "id": "2", "traceId": "trace_2"}], indent=2))
    (run, _), skipped = read("langfuse", path)
    (call,) = run.transitions
    assert skipped == []
    assert (body(call)["messages"], call.output) == (row["input"], "The email asks ...")
    assert (call.model, call.prompt_tokens, call.completion_tokens, call.cost_usd, call.latency_ms) == (
        "gpt-4o-mini",
        412,
        87,
        0.000183,
        1596.0,
    )


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
    return {
        "id": f"{name}-{value}-{len(more)}",
        "traceId": "t",
        "name": name,
        "value": value,
        "source": source,
        "dataType": kind,
        **more,
    }


AGENT = [
    observation(1, "AGENT", input={"q": "12 + 30"}, output="42"),
    observation(2, at=1, parent=1, input="12 + 30", output={"role": "assistant", "content": None, "tool_calls": CALLS}),
    observation(3, "TOOL", at=2, parent=1, name="add", input={"a": 12, "b": 30}, output=42),
    observation(
        4, "TOOL", at=3, parent=1, name="add", input={"a": 1, "b": "x"}, level="ERROR", statusMessage="no number"
    ),
    observation(5, at=5, parent=1, input=[{"role": "user", "content": "12 + 30"}], output="42"),
    observation(6, "EMBEDDING", at=6, parent=1, model="e"),
]


def reads_as_the_agent(run: Rollout) -> None:
    assert (run.status, run.inputs, run.prediction) == ("done", {"q": "12 + 30"}, {"output": "42"})
    first, second = run.transitions
    assert choice(first)["message"]["tool_calls"] == CALLS
    assert first.tools == [
        ToolCall(name="add", arguments={"a": 12, "b": 30}, result="42"),
        ToolCall(name="add", arguments={"a": 1, "b": "x"}, error="no number"),
    ]
    assert (second.output, second.tools, run.score, run.human_rating) == ("42", [], 0.5, 1.0)


def test_a_langfuse_trace_with_nested_observations_and_scores_is_read(tmp_path: Path) -> None:
    inside = [{key: value for key, value in row.items() if key != "traceId"} for row in AGENT]
    scores = [mark("ok", 0.5), mark("stars", 1, "ANNOTATION")]
    of_it = {
        "id": "t",
        "timestamp": "2025-01-01T00:00:00.000Z",
        "name": "adder",
        "userId": "eve",
        "sessionId": "s",
        "release": "r",
        "metadata": {"tenant": "acme"},
    }
    older = {"trace": {**of_it, "observations": [], "scores": []}, "observations": inside, "scores": scores}
    for trace in ({**of_it, "observations": inside, "scores": scores}, older):
        (run,), skipped = langfuse(tmp_path, trace)
        reads_as_the_agent(run)
        assert skipped == []
        assert (run.program, run.data_subject, run.tenant, run.program_version, run.metadata["session_id"]) == (
            "adder",
            "eve",
            "acme",
            "r",
            "s",
        )
    (run,), skipped = langfuse(tmp_path, {"observations": AGENT, "scores": scores})  # today's download
    reads_as_the_agent(run)
    assert (run.program, skipped) == ("agent 1", [])


def test_rows_of_a_blob_export_are_read_in_any_order(tmp_path: Path) -> None:
    def snake(row: dict[str, Any]) -> dict[str, Any]:
        return {"".join(f"_{c.lower()}" if c.isupper() else c for c in key): value for key, value in row.items()}

    written = [
        snake(
            {
                **observed,
                "startTime": observed["startTime"].replace("T", " ").replace("Z", "000"),
                "endTime": observed["endTime"].replace("T", " ").replace("Z", "000"),
            }
        )
        for observed in AGENT
    ]
    for observed in written:
        observed["parent_observation_id"] = observed["parent_observation_id"] or ""
        for name in ("input", "output"):  # texts, empty where there is nothing
            observed[name] = (
                observed[name]
                if isinstance(observed.get(name), str)
                else json.dumps(observed[name])
                if name in observed
                else ""
            )
    scores = [snake(mark("ok", 0.5, observationId=None)), snake(mark("stars", 1, "ANNOTATION"))]
    rows = [
        *scores,
        *reversed(written),
        {"id": "t", "timestamp": "2025-01-01 00:00:00.000000", "name": "adder", "user_id": "eve"},
    ]
    (run,), skipped = langfuse(tmp_path, *rows)
    reads_as_the_agent(run)
    assert (run.program, run.data_subject, skipped) == ("adder", "eve", [])
    assert run.transitions[0].started_at == 1735689601.0  # 2025-01-01T00:00:01Z


def test_fields_of_the_trace_take_precedence_over_its_root(tmp_path: Path) -> None:
    trace = {
        "id": "t",
        "timestamp": "2025-01-01T00:00:00.000Z",
        "name": "n",
        "input": {"asked": "x"},
        "output": "y",
        "version": "2",
    }
    (run,), _ = langfuse(tmp_path, *({**row, "version": "1"} for row in AGENT), trace)
    assert (run.inputs, run.prediction, run.program, run.program_version) == ({"asked": "x"}, {"output": "y"}, "n", "2")


def test_times_without_a_zone_are_utc_and_may_be_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        for written in (
            "2025-01-01 00:00:01.500000",
            "2025-01-01T00:00:01.500Z",
            "2025-01-01T09:00:01.500+09:00",
            1735689601500,
            1735689601.5,
        ):
            (run,), _ = langfuse(tmp_path, {**observation(1, input="a", output="b"), "startTime": written})
            assert run.transitions[0].started_at == 1735689601.5
        (run,), _ = langfuse(tmp_path, {**observation(1, input="a", output="b"), "startTime": "yesterday"})
        assert run.transitions[0].started_at == 0.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_langfuse_scores_are_verdicts_and_annotations_ratings(tmp_path: Path) -> None:
    call = observation(1, input="hi", output="ho")
    scores = [
        mark("stars", 0.5, "ANNOTATION"), mark("stars", 1.0, "ANNOTATION", comment="good"),
        mark("ok", 1, "API", "BOOLEAN", stringValue="True"),
        mark("tone", 2, kind="CATEGORICAL", stringValue="friendly"),
        mark("note", 0, "ANNOTATION", "TEXT", stringValue="as he said"),
        mark("five", 4), mark("nan", math.nan), mark("text", "0.7"),
        mark("fix", 0, "ANNOTATION", "CORRECTION", stringValue="better"), mark("step", 0.25, observationId="o9"),
        mark("root", 2.5, observationId="o1"),
    ]  # fmt: skip
    (run,), skipped = langfuse(tmp_path, call, *scores)
    assert (run.human_rating, run.score, run.rubric) == (0.75, 1.0, "imported:ok")  # the mean of 0.5 and 1
    assert run.expected == {"output": "better"}
    assert [v.reason for v in run.verdicts[:4]] == ["", "good", "", "imported as 'friendly'"]
    assert [(v.criterion, v.grade, v.label, v.scope) for v in run.verdicts] == [
        ("stars", 0.5, None, "final"), ("stars", 1.0, None, "final"), ("ok", 1.0, "True", "final"),
        ("tone", None, "friendly", "final"),
        ("note", None, "as he said", "final"), ("five", None, None, "final"), ("nan", None, None, "final"),
        ("text", None, "0.7", "final"),
        ("step", 0.25, None, "step"), ("root", None, None, "final"),
    ]  # fmt: skip
    assert [skip.reason for skip in skipped] == [
        "the score 'five' is 4: outside [0, 1]", "the score 'nan' is nan: not a finite number",
        "the score 'root' is 2.5: outside [0, 1]",
    ]  # fmt: skip
    assert [skip.where for skip in skipped] == [f"{tmp_path / 'x.jsonl'}:{line}" for line in (7, 8, 12)]


def test_a_score_of_zero_is_a_score_and_a_missing_one_is_not(tmp_path: Path) -> None:
    call = observation(1, input="hi", output="ho")
    for scores, expected in (
        ([mark("ok", 0)], 0.0),
        ([mark("ok", None)], None),
        ([], None),
        ([mark("ok", -0.01)], None),
        ([mark("ok", 1.01)], None),
    ):
        (run,), _ = langfuse(tmp_path, call, *scores)
        assert (run.score, run.human_rating) == (expected, None)
    (run,), _ = langfuse(tmp_path, call, mark("ok", False, "ANNOTATION", "BOOLEAN"))
    assert (run.score, run.human_rating) == (None, 0.0)


def test_of_several_scores_the_named_one_is_used(tmp_path: Path) -> None:
    rows = [observation(1, input="hi", output="ho"), mark("a", 0.25), mark("b", 0.5), mark("b", 0.75)]
    (run,), skipped = langfuse(tmp_path, *rows)
    assert (run.score, [skip.reason for skip in skipped]) == (
        None,
        ["several scores (a, b) and none selected: stored as verdicts"],
    )
    (run,), skipped = langfuse(tmp_path, *rows, score="b")
    assert (run.score, run.rubric, skipped) == (0.75, "imported:b", [])  # the later of two
    (run,), skipped = langfuse(tmp_path, *rows[:2], score="b")
    assert (run.score, run.rubric) == (None, "")  # another is not taken for it


def test_tokens_and_costs_of_every_langfuse_version_are_read(tmp_path: Path) -> None:
    known = [
        (
            {
                "usageDetails": {
                    "input": 10,
                    "input_cached_tokens": 5,
                    "output": 3,
                    "output_reasoning_tokens": 2,
                    "total": 20,
                }
            },
            (15, 5, None),
        ),
        ({"usage": {"promptTokens": 4, "completionTokens": 2}, "calculatedTotalCost": 0.5}, (4, 2, 0.5)),
        (
            {
                "usage_details": '{"prompt_tokens": 6, "completion_tokens": 1}',
                "cost_details": '{"input": 0.1, "total": 0.25}',
            },
            (6, 1, 0.25),
        ),
        # a price that is not known
        ({"inputUsage": 0, "outputUsage": 0, "totalCost": 0, "costDetails": {}}, (0, 0, None)),
        ({"totalCost": 0, "costDetails": {"total": 0}}, (None, None, 0.0)),
        ({"totalCost": -1}, (None, None, None)),
        ({"usageDetails": None, "usage": "no", "promptTokens": 3, "completionTokens": 4}, (3, 4, None)),
    ]
    for recorded, expected in known:
        (run,), _ = langfuse(tmp_path, observation(1, input="a", output="b", **recorded))
        (call,) = run.transitions
        assert (call.prompt_tokens, call.completion_tokens, call.cost_usd) == expected


def test_tools_in_separate_columns_are_read(tmp_path: Path) -> None:
    recorded = {
        "toolDefinitions": {"add": '{"description": "Adds.", "parameters": {"type": "object"}}'},
        "toolCalls": [json.dumps(CALLS[0])],
        "output": None,
    }
    (run,), _ = langfuse(tmp_path, observation(1, input="a", **recorded))
    (call,) = run.transitions
    assert body(call)["tools"] == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    ]
    assert choice(call)["message"]["tool_calls"] == CALLS[:1]
    assert call.tools == [ToolCall(name="add", arguments={"a": 12, "b": 30})]


def test_langfuse_errors_are_of_level_error(tmp_path: Path) -> None:
    (run,), _ = langfuse(
        tmp_path,
        observation(1, "SPAN", level="ERROR", statusMessage="broke"),
        observation(2, parent=1, level="WARNING", statusMessage="hm"),
    )
    assert (run.status, run.error, run.transitions[0].error) == ("failed", "broke", None)
    (run,), _ = langfuse(tmp_path, observation(1, "SPAN"), observation(2, parent=1, level="ERROR", statusMessage=""))
    assert (run.status, run.error, run.transitions[0].error) == ("done", None, "error")


def test_unknown_langfuse_rows_are_skipped_with_the_reason(tmp_path: Path) -> None:
    rows = [
        observation(1, input="a", output="b"), {"id": "x", "foo": 1}, {**mark("m", 1), "traceId": None},
        observation(1, input="a", output="c"),
        observation(2, trace=""), mark("alone", 1, traceId="other"), {"data": [3]},
    ]  # fmt: skip
    (run,), skipped = langfuse(tmp_path, *rows)
    assert run.transitions[0].output == "c"
    assert [(skip.where.rsplit(":", 1)[1], skip.reason, skip.repeated) for skip in skipped] == [
        ("2", "not an observation, score or trace: its fields are 'id', 'foo'", False),
        ("3", "the score 'm-1-0' belongs to no trace", False),
        ("4", "the observation 'o1' is in the file twice; the later one is imported", True),
        ("5", "the observation 'o2' belongs to no trace", False),
        ("7", "expected an object, found int", False), ("6", "no LM call among its 0 spans", False),
    ]  # fmt: skip


def test_answers_of_other_apis_read_as_chat(tmp_path: Path) -> None:
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answers = [
        ({"choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]}, "a", None, "stop"),
        ({"choices": [{"text": "a", "finish_reason": "length"}]}, "a", None, "length"),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
                ],
                "stop_reason": "tool_use",
            },
            "a",
            [called],
            "tool_calls",
        ),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}], "a", None, None),
        (
            {
                "output": [
                    {"type": "reasoning", "summary": []},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
                ]
            },
            "a",
            [called],
            "tool_calls",
        ),
        (
            {
                "candidates": [
                    {
                        "content": {
                            "role": "model",
                            "parts": [{"text": "a"}, {"functionCall": {"id": "c", "name": "f", "args": {"x": 1}}}],
                        },
                        "finishReason": "stop",
                    }
                ]
            },
            "a",
            [called],
            "stop",
        ),
        (
            {
                "generations": [
                    [
                        {
                            "text": "a",
                            "message": {
                                "type": "ai",
                                "content": "a",
                                "tool_calls": [{"id": "c", "name": "f", "args": {"x": 1}}],
                            },
                        }
                    ]
                ]
            },
            "a",
            [called],
            None,
        ),
        (["a", "b"], "a", None, None),
        ({"content": "a"}, "a", None, None),
        ({"answer": 1}, '{"answer": 1}', None, None),
        (7, "7", None, None),
    ]
    for output, text, calls, reason in answers:
        (run,), _ = langfuse(tmp_path, observation(1, input="q", output=output))
        (call,) = run.transitions
        assert (call.output, choice(call)["message"].get("tool_calls"), choice(call)["finish_reason"]) == (
            text,
            calls,
            reason,
        ), output


def test_requests_of_other_apis_read_as_chat(tmp_path: Path) -> None:
    user = {"role": "user", "content": "a"}
    requests = [
        ("a", [user]),
        ({"prompt": "a"}, [user]),
        ([[{"type": "human", "content": "a"}]], [user]),
        ({"args": ["a"], "kwargs": {}}, [user]),
        (
            {
                "instructions": "s",
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "r"},
                ],
            },
            [
                {"role": "system", "content": "s"},
                user,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ],
        ),
        (
            {"contents": [{"role": "user", "parts": [{"text": "a"}]}], "systemInstruction": {"parts": [{"text": "s"}]}},
            [{"role": "system", "content": "s"}, user],
        ),
        (
            [{"lc": 1, "type": "constructor", "id": ["HumanMessage"], "kwargs": {"content": "a", "type": "human"}}],
            [user],
        ),
        ('{"input": [{"role": "user", "content": "a"}]}', [user]),
        ([{**user, "name": "eve"}], [{**user, "name": "eve"}]),
        ({"question": "a"}, [{"role": "user", "content": '{"question": "a"}'}]),
        (["a", "b"], [{"role": "user", "content": '["a", "b"]'}]),
    ]
    for request, expected in requests:
        (run,), _ = langfuse(tmp_path, observation(1, input=request, output="x"))
        assert body(run.transitions[0])["messages"] == expected, request


# -- MLflow by hand


def mlflow_trace(spans: list[dict[str, Any]], **info: Any) -> dict[str, Any]:
    return {"info": {"trace_id": "tr-1", "state": "OK", **info}, "data": {"spans": spans}}


def mlflow_span(
    number: int, kind: str, inputs: Any = None, outputs: Any = None, *, parent: int = 0, **more: Any
) -> dict[str, Any]:
    recorded = {"mlflow.spanType": kind, "mlflow.spanInputs": inputs, "mlflow.spanOutputs": outputs, **more}
    return {
        "span_id": f"s{number}", "parent_span_id": f"s{parent}" if parent else None, "name": f"n{number}",
        "start_time_unix_nano": number * 10**9,
        "end_time_unix_nano": number * 10**9 + 1, "status": {"code": "STATUS_CODE_OK"},
        "attributes": {k: json.dumps(v) for k, v in recorded.items()},
    }  # fmt: skip


def test_an_unfinished_mlflow_trace_is_unscored_and_not_a_failure_of_the_agent(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", mlflow_trace([mlflow_span(1, "LLM", "a", "b")], state="IN_PROGRESS"))
    (run,), _ = read("mlflow", path)
    assert (run.status, run.error) == ("error", "the trace was not finished when it was exported")


def test_yes_and_no_of_mlflow_judges_are_scores_and_failures_are_not(tmp_path: Path) -> None:
    def feedback(name: str, value: Any, **more: Any) -> dict[str, Any]:
        return {"assessment_name": name, "source": {"source_type": "LLM_JUDGE"}, "feedback": {"value": value, **more}}

    broken = feedback("broken", None, error={"error_code": "E", "error_message": "judge is down"})
    assessments = [
        feedback("safe", "yes"),
        broken,
        {**feedback("old", "no"), "valid": False},
        {"assessment_name": "answer", "expectation": {"value": [1]}},
    ]
    (run,), skipped = read(
        "mlflow", lines(tmp_path / "x.jsonl", mlflow_trace([mlflow_span(1, "LLM", "a", "b")], assessments=assessments))
    )
    assert [(v.criterion, v.grade, v.label, v.reason) for v in run.verdicts] == [
        ("safe", 1.0, "yes", ""), ("broken", None, None, "imported as None judge is down"),
    ]  # fmt: skip
    assert (run.score, run.rubric, run.expected, skipped) == (1.0, "imported:safe", {"answer": [1]}, [])


def test_mlflow_traces_in_lists_pages_and_tables_are_read(tmp_path: Path) -> None:
    trace = mlflow_trace([mlflow_span(1, "CHAT_MODEL", {"messages": [{"role": "user", "content": "a"}]}, "b")])
    for document in (
        [trace],
        {"traces": [trace]},
        {"trace_id": "tr-1", "trace": json.dumps(trace)},
        {"info": json.dumps(trace["info"]), "data": json.dumps(trace["data"])},
    ):
        (path := tmp_path / "x.json").write_text(json.dumps(document))
        (run,), skipped = read("mlflow", path)
        assert (run.transitions[0].output, run.metadata["trace_id"], skipped) == ("b", "tr-1", [])
    (path := tmp_path / "x.json").write_text(
        json.dumps([trace, trace, {"info": {}, "data": {}}, {"x": 1}, {"traces": [4]}])
    )
    (run,), skipped = read("mlflow", path)
    assert [(skip.repeated, skip.reason) for skip in skipped] == [
        (True, "the trace 'trace' is in the file twice; the later one is imported"),
        (False, "an MLflow trace without an id"),
        (False, "not an MLflow trace: it has no 'info' and 'data'"),
        (False, "not an MLflow trace: it has no 'info' and 'data'"),
    ]  # fmt: skip


def test_messages_in_mlflow_2s_attribute_are_read_if_there_are_no_inputs(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (run,), _ = read(
        "mlflow",
        lines(
            tmp_path / "x.jsonl",
            mlflow_trace([mlflow_span(1, "CHAT_MODEL", None, "b", **{"mlflow.chat.messages": talk})]),
        ),
    )
    assert (body(run.transitions[0])["messages"], run.transitions[0].output) == (talk[:1], "b")


def test_mlflow_attributes_besides_the_inputs_are_read(tmp_path: Path) -> None:
    inputs, outputs = (
        {"messages": [{"role": "user", "content": "a"}]},
        {"choices": [{"message": {"content": "b"}}], "usage": {"prompt_tokens": 1}},
    )
    more = {"mlflow.chat.tools": [ADD], "mlflow.chat.tokenUsage": {"input_tokens": 7, "output_tokens": 2}}
    fine, failed = (
        mlflow_span(2, "CHAT_MODEL", inputs, outputs, parent=1, **more),
        mlflow_span(3, "CHAT_MODEL", inputs, parent=1),
    )
    fine["status"], failed["status"] = {"code": "STATUS_CODE_OK", "message": "fine"}, {"code": "STATUS_CODE_ERROR"}
    trace = mlflow_trace([mlflow_span(1, "AGENT"), fine, failed])
    trace["data"] |= {"request": '{"q": "a"}', "response": '"b"'}
    (run,), _ = read("mlflow", lines(tmp_path / "x.jsonl", trace))
    assert (run.inputs, run.prediction, run.status) == ({"q": "a"}, {"output": "b"}, "done")
    assert (
        body(run.transitions[0])["tools"],
        run.transitions[0].prompt_tokens,
        run.transitions[0].completion_tokens,
    ) == ([ADD], 7, 2)
    assert [t.error for t in run.transitions] == [None, "error"]


# -- into the store


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = str(tmp_path / "s.db")
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        metadata.drop_all(engine)
        engine.dispose()
    with Store(url) as opened:
        yield opened


def stored(opened: Store) -> list[Rollout]:
    opened.flush()
    return sorted((opened.rollout(row.id) for row in opened.rollouts()), key=lambda row: row.started_at)


def test_an_import_is_in_the_store_as_it_was_read(store: Store) -> None:
    for kind, name in (("otlp", "otlp_openinference.jsonl"), ("mlflow", "mlflow_3.jsonl")):
        report = import_traces(store, kind, DATA / name)
        rollouts, skipped = read(kind, DATA / name)
        assert stored(store)[-2:] == rollouts
        assert report == ImportReport(
            run_id=rollouts[0].run_id, kind=kind, rollouts=2, transitions=3, tool_calls=2, rated=int(kind == "mlflow"),
            skipped=len(skipped),
            reasons=tuple(f"{skip.where}: {skip.reason} (trace {skip.trace})" for skip in skipped),
        )  # fmt: skip
    assert store.stats(run_id=report.run_id)["transitions"] == 3


def test_a_second_import_of_a_file_stores_nothing(store: Store) -> None:
    first = import_traces(store, "otlp", DATA / "otlp_openai_v2.jsonl")
    before = stored(store)
    second = import_traces(store, "otlp", DATA / "otlp_openai_v2.jsonl")
    assert (first.rollouts, first.unchanged, second.rollouts, second.unchanged) == (2, 0, 0, 2)
    assert (second.transitions, second.tool_calls) == (0, 0)
    assert stored(store) == before


def test_hostile_texts_are_stored_and_recognised_on_the_next_import(store: Store, tmp_path: Path) -> None:
    odd = "a\ud800b\0c"
    hostile_span = {
        **span(1, {**chat(odd), "user.id": odd, "gen_ai.agent.name": odd, "x": [math.nan, math.inf]}),
        "traceId": odd,
        "spanId": odd,
    }
    path = lines(tmp_path / "x.jsonl", request(hostile_span))
    assert import_traces(store, "otlp", path).rollouts == 1
    (run,) = stored(store)
    assert run.transitions[0].output == run.program == run.data_subject == "a?b\ufffdc"
    assert import_traces(store, "otlp", path).unchanged == 1
    assert len(stored(store)) == 1


def test_a_trace_in_two_files_becomes_one_rollout(store: Store, tmp_path: Path) -> None:
    first = lines(tmp_path / "1.jsonl", request(span(2, chat("a"), parent=1, at=1), span(4, chat("c"), parent=1, at=3)))
    second = lines(
        tmp_path / "2.jsonl",
        request(
            span(1, {"output.value": "d"}, duration=9),
            span(3, chat("b"), parent=1, at=2),
            span(4, chat("c"), parent=1, at=3),
        ),
    )
    assert import_traces(store, "otlp", first).rollouts == 1
    assert import_traces(store, "otlp", second).rollouts == 1
    (run,) = stored(store)
    assert [(t.t, t.output) for t in run.transitions] == [(0, "a"), (1, "b"), (2, "c")]
    assert (run.prediction, run.started_at, run.ended_at) == ({"output": "d"}, T0, T0 + 9)
    for path in (first, second):
        assert import_traces(store, "otlp", path).unchanged == 1


def test_the_answer_of_a_trace_in_two_files_is_that_of_its_last_call(store: Store, tmp_path: Path) -> None:
    otlp(tmp_path, span(1), span(2, chat("a"), parent=1))
    import_traces(store, "otlp", tmp_path / "x.jsonl")
    otlp(tmp_path, span(3, chat("b"), parent=1, at=5))
    import_traces(store, "otlp", tmp_path / "x.jsonl")
    store.flush()
    (run,) = store.rollouts()
    assert run.prediction == {"output": "b"}


def test_recorded_inputs_replace_derived_ones(store: Store, tmp_path: Path) -> None:
    def question(text: str) -> dict[str, Any]:
        return chat(
            **{"gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]}])}
        )

    files = [
        lines(tmp_path / "1.jsonl", request(span(3, question("second"), parent=1, at=3))),
        lines(tmp_path / "2.jsonl", request(span(2, question("first"), parent=1, at=2))),
        lines(
            tmp_path / "3.jsonl",
            request(
                span(1, {"input.value": '{"q": "real"}'}, status={"code": 2, "message": "m"}),
                span(4, question("third"), parent=1, at=4),
            ),
        ),
    ]
    tasks = []
    for path, expected in zip(files, ({"input": "second"}, {"input": "first"}, {"q": "real"}), strict=True):
        import_traces(store, "otlp", path)
        assert [import_traces(store, "otlp", before).unchanged for before in files[: len(tasks) + 1]] == [1] * (
            len(tasks) + 1
        )
        (run,) = stored(store)
        assert run.inputs == expected
        tasks.append(run.task_id)
    assert len(set(tasks)) == 3
    assert (run.status, run.error) == ("failed", "m")


def test_new_scores_are_added_and_ratings_of_this_store_are_kept(store: Store, tmp_path: Path) -> None:
    call = observation(1, input="hi", output="ho")
    import_traces(store, "langfuse", lines(tmp_path / "1.jsonl", call))
    import_traces(store, "langfuse", lines(tmp_path / "2.jsonl", call, mark("ok", 0.5), mark("stars", 1, "ANNOTATION")))
    (run,) = stored(store)
    assert (run.score, run.rubric, run.human_rating, [v.criterion for v in run.verdicts]) == (
        0.5,
        "imported:ok",
        1.0,
        ["ok", "stars"],
    )
    assert import_traces(store, "langfuse", tmp_path / "2.jsonl").unchanged == 1
    import_traces(store, "langfuse", lines(tmp_path / "3.jsonl", call, mark("ok", 0.75)))
    (run,) = stored(store)
    assert (run.score, [v.grade for v in run.verdicts]) == (0.75, [0.5, 1.0, 0.75])
    run.score, run.rubric, run.human_rating = 0.25, "mine@1", 0.0
    store.put_rollout(run)
    import_traces(store, "langfuse", tmp_path / "2.jsonl")
    (run,) = stored(store)
    assert (run.score, run.rubric, run.human_rating) == (0.25, "mine@1", 0.0)


def test_the_report_keeps_the_first_reasons_and_counts_all(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", request(span(1, chat())), request(span(1, chat())), *["{broken\n"] * 30)
    with Store(tmp_path / "s.db") as store:
        report = import_traces(store, "otlp", path)
    assert (report.rollouts, report.skipped, report.duplicates, len(report.reasons)) == (1, 30, 1, 20)
    assert report.reasons[0].startswith(f"{path}:3: not JSON: ")
    assert report.to_dict()["reasons"] == report.reasons


def test_a_file_without_rollouts_stores_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with pytest.raises(DataError, match=r"no .*LM call"):
            import_traces(store, "otlp", lines(tmp_path / "x.jsonl", request(span(1))))
        with pytest.raises(DataError, match="kind='jaeger' must be one of otlp, langfuse, mlflow"):
            import_traces(store, "jaeger", DATA / "mlflow_2.json")
        assert (list(store.rollouts()), store.runs("import")) == ([], [])


def test_an_import_is_a_separate_run(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        report = import_traces(store, "mlflow", DATA / "mlflow_2.json")
        assert store.runs("import") == [(report.run_id, "done")]


# -- anything at all


def assert_imported_or_skipped(rollouts: list[Rollout], skipped: list[Skipped]) -> None:
    """No row is dropped silently: a read returns rollouts, or says where and why it skipped a row."""
    assert rollouts or skipped
    assert all(item.transitions or item.inputs or item.prediction for item in rollouts)
    assert all(item.where and item.reason for item in skipped)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "parts",
                    "type",
                    "text",
                    "id",
                    "name",
                    "tool_calls",
                    "function",
                    "arguments",
                    "message",
                    "messages",
                    "choices",
                    "input",
                    "output",
                    "kwargs",
                    "args",
                    "finish_reason",
                    "usage",
                    "tool",
                    "lc",
                    "toolUse",
                    "call_id",
                    "system",
                    "value",
                    "system",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(prompt=JSON, answer=JSON, tools=JSON, usage=JSON, plain=st.booleans())
def test_no_value_raises_an_error_in_any_format(
    tmp_path_factory: pytest.TempPathFactory, prompt: Any, answer: Any, tools: Any, usage: Any, plain: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    values = [part if plain else json.dumps(part) for part in (prompt, answer, tools, usage)]
    recorded = dict(
        zip(
            ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions", "events"),
            values,
            strict=True,
        )
    )
    inner = [{"key": key, "value": {"x": item}} for key, item in recorded.items()]
    events = [
        {"name": name, "attributes": {"content": values[0], "message": values[1]}}
        for name in ("gen_ai.user.message", "gen_ai.choice")
    ]
    for attributes_ in (
        recorded,
        inner,
        {"input.value": values[0], "output.value": values[1], "openinference.span.kind": "LLM"},
        {"gen_ai.prompt.0": values[0]},
    ):
        more = (
            attributes({"gen_ai.operation.name": "chat"})
            if isinstance(attributes_, list)
            else {"gen_ai.operation.name": "chat"}
        )
        both = [*attributes_, *more] if isinstance(attributes_, list) else {**attributes_, **more}
        assert_imported_or_skipped(
            *otlp(
                folder,
                {**span(1), "attributes": both, "events": events},
                {**span(2), "attributes": {**tool("c"), "input.value": values[0], "output.value": values[1]}},
            )
        )
    row = {
        "id": "o",
        "traceId": "t",
        "type": "GENERATION",
        "startTime": "2025-01-01T00:00:00Z",
        "input": values[0],
        "output": values[1],
    }
    row |= {
        "toolDefinitions": values[2],
        "usageDetails": values[3],
        "costDetails": values[3],
        "modelParameters": values[2],
        "toolCalls": values[2],
    }
    score = {
        "traceId": "t",
        "name": "s",
        "source": "API",
        "dataType": "NUMERIC",
        "value": usage,
        "id": "s",
        "comment": prompt,
    }
    rows = (row, {**row, "id": "p", "type": "TOOL", "name": prompt}, score)
    assert_imported_or_skipped(*read("langfuse", lines(folder / "l.jsonl", *rows)))
    spanned = {
        "span_id": "a",
        "attributes": {
            "mlflow.spanType": '"LLM"',
            "mlflow.spanInputs": values[0],
            "mlflow.spanOutputs": values[1],
            "mlflow.chat.tokenUsage": usage,
        },
    }
    info = {
        "trace_id": "t",
        "tags": tools,
        "trace_metadata": usage,
        "assessments": [{"assessment_name": prompt, "feedback": {"value": usage}}],
    }
    data = {"spans": [spanned, prompt], "request": prompt, "response": answer}
    assert_imported_or_skipped(*read("mlflow", lines(folder / "m.jsonl", {"info": info, "data": data})))
