"""Imports of OTLP spans, written by hand: the spellings of every generation of the conventions."""

import json
from pathlib import Path
from typing import Any

import pytest
from importing_rows import T0, attributes, body, chat, choice, lines, only, otlp, read, request, span

PARTS = [
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
ANSWERED = [
    {
        "role": "assistant",
        "parts": [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "done"}],
        "finish_reason": "length",
    },
    {"role": "assistant", "parts": [{"type": "tool_call", "id": "c3", "name": "g"}], "finish_reason": "tool_call"},
]
EVERY_KIND_OF_PART = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "gpt",
    "gen_ai.response.model": "gpt-0613",
    "gen_ai.response.id": "r-1",
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
    "gen_ai.input.messages": json.dumps(PARTS),
    "gen_ai.output.messages": json.dumps(ANSWERED),
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
PARTS_AS_CHAT = {
    "model": "gpt",
    "temperature": 0.25,
    "top_p": 0.5,
    "max_tokens": 9,
    "seed": 3,
    "stop": ["END"],
    "n": 2,
    "tools": [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}],
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
ANSWERED_AS_CHAT = {
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


def test_messages_as_attributes_in_json_with_every_kind_of_part(tmp_path: Path) -> None:
    call = only(otlp(tmp_path, span(1, EVERY_KIND_OF_PART, duration=0.25)))
    assert body(call) == PARTS_AS_CHAT
    assert call.response == ANSWERED_AS_CHAT
    assert (call.model, call.output, call.cost_usd) == ("gpt", "done", 0.125)
    assert (call.prompt_tokens, call.completion_tokens) == (7, 3)
    assert (call.started_at, call.latency_ms, call.request["span"]) == (T0, 250.0, f"{1:016x}")


def test_messages_as_structured_attributes(tmp_path: Path) -> None:
    recorded = chat()
    for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
        recorded[name] = json.loads(recorded[name])
    call = only(otlp(tmp_path, span(1, {**recorded, "gen_ai.system_instructions": [{"type": "text", "content": "s"}]})))
    assert body(call)["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    assert call.output == "hi"


SYSTEM_EVENT, USER_EVENT = (
    (f"gen_ai.{role}.message", {"content": content}) for role, content in (("system", "s"), ("user", "hello"))
)
HI = {"finish_reason": "stop", "index": 0}
EVENTS = {
    "as the conventions had them": [
        SYSTEM_EVENT,
        USER_EVENT,
        ("gen_ai.choice", {**HI, "message": json.dumps({"role": "assistant", "content": "hi"})}),
    ],
    "Azure's, with all in one attribute": [
        ("gen_ai.system.message", {"gen_ai.event.content": '{"role": "system", "content": "s"}'}),
        ("gen_ai.user.message", {"gen_ai.event.content": '{"role": "user", "content": "hello"}'}),
        ("gen_ai.choice", {"gen_ai.event.content": json.dumps({**HI, "message": {"content": "hi"}})}),
    ],
    "Strands', with Bedrock's contents": [
        ("gen_ai.system.message", {"content": '[{"text": "s"}]'}),
        ("gen_ai.user.message", {"content": '[{"text": "hello"}]'}),
        ("gen_ai.choice", {"message": '[{"text": "hi"}]', "finish_reason": "end_turn"}),
    ],
    "with dots": [
        SYSTEM_EVENT,
        USER_EVENT,
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
    recorded = {"gen_ai.operation.name": "chat", "gen_ai.usage.prompt_tokens": 4, "gen_ai.usage.completion_tokens": 1}
    written = [{"name": name, "attributes": attributes(payload)} for name, payload in events]
    call = only(otlp(tmp_path, span(1, recorded, events=written)))
    assert body(call)["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    assert choice(call) == {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    assert (call.prompt_tokens, call.completion_tokens) == (4, 1)


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


@pytest.mark.parametrize("bad", ["NaN", "-1", "abc", "1e400", str(2**31), True, None, [1], {"a": 1}, "9" * 5000])
def test_a_missing_count_is_unknown_and_never_zero(tmp_path: Path, bad: Any) -> None:
    written = [
        *attributes({"gen_ai.operation.name": "chat"}),
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": bad}},
    ]
    call = only(otlp(tmp_path, {**span(1), "attributes": written}))
    assert (call.prompt_tokens, call.completion_tokens) == (None, None)


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
