"""A streamed answer is stored like the same answer unstreamed, in every field that a provider sends."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from assay.traces.gateway.events import read_events
from assay.traces.messages.dialects import answer_of

CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "7*8"}'}},
]
CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 5,
    "model": "m",
    "service_tier": "flex",
    "system_fingerprint": "fp",
    "usage": {"prompt_tokens": 7, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 3}},
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.1}]},
            "message": {
                "role": "assistant",
                "content": "I will calculate.",
                "reasoning_content": "Six times seven needs a tool.",
                "tool_calls": CALLS,
            },
        },
        {
            "index": 1,
            "finish_reason": "stop",
            "logprobs": None,
            "message": {"role": "assistant", "content": "It is 42, I think."},
        },
        {
            "index": 2,
            "finish_reason": "stop",
            "logprobs": {"content": None, "refusal": [{"token": "n", "logprob": -1.0}]},
            "message": {"role": "assistant", "content": None, "refusal": "I cannot help with that."},
        },
        {
            "index": 3,
            "finish_reason": "stop",
            "logprobs": None,
            "message": {
                "role": "assistant",
                "content": "thought",
                "reasoning_details": [
                    {"type": "reasoning.text", "index": 0, "format": "f-1", "text": "one thought after another"}
                ],
            },
        },
    ],
}


def parts(text: str) -> list[str]:
    return [text[at : at + 4] for at in range(0, len(text), 4)]


def chat_deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None if message["content"] is None else ""}
    for name in ("reasoning_content", "refusal", "content"):
        yield from ({name: part} for part in parts(message.get(name) or ""))
    for detail in message.get("reasoning_details", ()):
        yield from ({"reasoning_details": [{**detail, "text": part}]} for part in parts(detail["text"]))
    for at, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{**call, "index": at, "function": {"name": call["function"]["name"], "arguments": ""}}]}
        yield from (
            {"tool_calls": [{"index": at, "function": {"arguments": part}}]}
            for part in parts(call["function"]["arguments"])
        )


def chat_stream(completion: dict[str, Any]) -> Iterator[dict[str, Any]]:
    head = {key: value for key, value in completion.items() if key not in ("choices", "usage")} | {
        "object": "chat.completion.chunk"
    }
    for choice in completion["choices"]:
        for delta in chat_deltas(choice["message"]):
            yield {
                **head,
                "usage": None,
                "choices": [{"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": None}],
            }
        for name, tokens in (choice["logprobs"] or {}).items():
            for token in tokens or ():
                yield {
                    **head,
                    "choices": [
                        {"index": choice["index"], "delta": {}, "logprobs": {**choice["logprobs"], name: [token]}}
                    ],
                }
        yield {
            **head,
            "obfuscation": "x",
            "choices": [{"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}],
        }
    yield {**head, "choices": [], "usage": completion["usage"]}


def test_a_streamed_chat_equals_the_unstreamed_answer_with_all_choices() -> None:
    assert read_events("chat", list(chat_stream(CHAT))) == (CHAT, True)


def test_a_chat_with_an_unfinished_choice_is_incomplete() -> None:
    events = [
        event
        for event in chat_stream(CHAT)
        if not any(c["index"] == 1 and c.get("finish_reason") for c in event["choices"])
    ]
    body, complete = read_events("chat", events)
    assert not complete
    assert body is not None
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls", None, "stop", "stop"]


@pytest.mark.parametrize(
    "sent",
    [
        [{**CALLS[0], "index": 0}, {**CALLS[1], "index": 0}],  # as older Ollama: every call has the index 0
        [CALLS[0], CALLS[1]],  # without any index
        [
            {**CALLS[0], "index": 0},
            {**CALLS[0], "index": 0, "function": {"name": "calculator", "arguments": ""}},
            {**CALLS[1], "index": 1},
        ],
    ],
    ids=["one index", "no index", "the name in every part"],
)
def test_tool_calls_are_distinguished_for_every_numbering_of_a_server(sent: list[dict[str, Any]]) -> None:
    events = [{"id": "1", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in sent]
    body, complete = read_events(
        "chat", [*events, {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}]
    )
    assert complete
    assert body is not None
    assert body["choices"][0]["message"]["tool_calls"] == CALLS


def test_a_streamed_completion_equals_the_unstreamed_one() -> None:
    completion = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
        "choices": [
            {
                "index": 0,
                "text": "once upon",
                "finish_reason": "length",
                "logprobs": {"tokens": ["once", " upon"], "token_logprobs": [-0.1, -0.2]},
            },
            {"index": 1, "text": "twice", "finish_reason": "stop", "logprobs": None},
        ],
    }
    head = {key: value for key, value in completion.items() if key not in ("choices", "usage")}
    first: list[dict[str, Any]] = [
        {"index": 0, "text": text, "finish_reason": None, "logprobs": {"tokens": [text], "token_logprobs": [logprob]}}
        for text, logprob in (("once", -0.1), (" upon", -0.2))
    ]
    ends = [
        {"index": 0, "text": "", "finish_reason": "length", "logprobs": None},
        {"index": 1, "text": "twice", "finish_reason": "stop", "logprobs": None},
    ]
    events = [{**head, "choices": [choice]} for choice in [*first, *ends]]
    assert read_events("chat", [*events, {**head, "choices": [], "usage": completion["usage"]}]) == (completion, True)


ITEMS: list[dict[str, Any]] = [
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [
            {"type": "summary_text", "text": "first a thought"},
            {"type": "summary_text", "text": "and a next"},
        ],
    },
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [
            {"type": "output_text", "text": "this far", "annotations": []},
            {"type": "refusal", "refusal": "and no further"},
        ],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "calculator",
        "arguments": '{"expression": "6*7"}',
    },
]
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "in_progress",
    "model": "m",
    "service_tier": "flex",
    "output": [],
}


def responses_stream() -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": RESPONSE}
    for at, item in enumerate(ITEMS):
        begun = {
            **item,
            **{name: [] for name in ("summary", "content") if name in item},
            **({"arguments": ""} if "arguments" in item else {}),
        }
        yield {"type": "response.output_item.added", "output_index": at, "item": begun}
        for place, part in enumerate(item.get("summary", ())):
            where = {"output_index": at, "summary_index": place}
            yield {"type": "response.reasoning_summary_part.added", **where, "part": {**part, "text": ""}}
            yield from (
                {"type": "response.reasoning_summary_text.delta", **where, "delta": text}
                for text in parts(part["text"])
            )
        for place, part in enumerate(item.get("content", ())):
            where, name = {"output_index": at, "content_index": place}, "text" if "text" in part else "refusal"
            yield {"type": "response.content_part.added", **where, "part": {**part, name: ""}}
            kind = f"response.{part['type']}.delta"
            yield from ({"type": kind, **where, "delta": text} for text in parts(part[name]))
        yield from (
            {"type": "response.function_call_arguments.delta", "output_index": at, "delta": text}
            for text in parts(item.get("arguments", ""))
        )


def test_an_interrupted_responses_stream_keeps_the_received_items() -> None:
    assert read_events("responses", list(responses_stream())) == ({**RESPONSE, "output": ITEMS}, False)


def test_a_responses_stream_whose_last_event_lacks_the_items_has_them() -> None:
    end = {"type": "response.completed", "response": {**RESPONSE, "status": "completed"}}
    assert read_events("responses", [*responses_stream(), end]) == (
        {**RESPONSE, "status": "completed", "output": ITEMS},
        True,
    )


MESSAGE: dict[str, Any] = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use",
    "stop_sequence": None,
    "content": [
        {"type": "thinking", "thinking": "a long thought", "signature": "c2lnbmVk"},
        {"type": "redacted_thinking", "data": "hidden"},
        {"type": "text", "text": "as it says there", "citations": [{"type": "char_location", "cited_text": "there"}]},
        {"type": "tool_use", "id": "toolu_1", "name": "calculator", "input": {"expression": "6*7"}},
        {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
    ],
    "usage": {"input_tokens": 7, "output_tokens": 30, "cache_read_input_tokens": 2, "service_tier": "priority"},
}  # fmt: skip


def anthropic_stream() -> Iterator[dict[str, Any]]:
    usage = {**MESSAGE["usage"], "output_tokens": 1}
    yield {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None, "usage": usage}}
    empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}, "tool_use": {"input": {}}}
    for at, block in enumerate(MESSAGE["content"]):
        begun = {**block, **empty.get(block["type"], {})}
        yield {
            "type": "content_block_start",
            "index": at,
            "content_block": {key: value for key, value in begun.items() if key != "citations"},
        }
        deltas: list[dict[str, Any]] = [
            {"type": "thinking_delta", "thinking": text} for text in parts(block.get("thinking", ""))
        ]
        deltas += [{"type": "signature_delta", "signature": block["signature"]}] if "signature" in block else []
        deltas += [{"type": "citations_delta", "citation": citation} for citation in block.get("citations", ())]
        deltas += [{"type": "text_delta", "text": text} for text in parts(block.get("text", ""))]
        deltas += [
            {"type": "input_json_delta", "partial_json": text}
            for text in ["", *parts(json.dumps(block.get("input")))]
            if block.get("input")
        ]
        yield from ({"type": "content_block_delta", "index": at, "delta": delta} for delta in deltas)
        yield {"type": "content_block_stop", "index": at}
    delta = {"stop_reason": "tool_use", "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 30, "cache_read_input_tokens": None}}
    yield {"type": "message_stop"}


def test_a_streamed_message_equals_the_unstreamed_one_with_signatures_and_citations() -> None:
    assert read_events("messages", list(anthropic_stream())) == (MESSAGE, True)


def test_a_long_stream_is_merged_in_linear_time() -> None:
    """Joining at each of 100,000 deltas would copy 10 GB."""
    events = [{"id": "1", "choices": [{"index": 0, "delta": {"content": "a few words "}}]}] * 100_000
    body, _ = read_events("chat", events)
    assert body is not None
    assert len(body["choices"][0]["message"]["content"]) == 1_200_000


@pytest.mark.parametrize(
    ("dialect", "body", "parts"),
    [
        ("chat", {"choices": [{"message": {"content": None, "refusal": "No."}}]}, ("", "No.", "")),
        ("chat", {"choices": [{"message": {"content": [{"type": "refusal", "refusal": "No."}]}}]}, ("", "No.", "")),
        (
            "chat",
            {"choices": [{"message": {"content": "yes", "reasoning_content": "why not"}}]},
            ("yes", "", "why not"),
        ),
        ("responses", {"output": ITEMS}, ("this far", "and no further", "first a thoughtand a next")),
        ("messages", MESSAGE, ("as it says there", "", "a long thought")),
        (
            "messages",
            {"content": [], "stop_reason": "refusal", "stop_details": {"explanation": "No."}},
            ("", "No.", ""),
        ),
        (
            None,
            {"message": {"parts": [{"type": "refusal", "text": "No."}, {"type": "thinking", "text": "hm"}]}},
            ("", "No.", "hm"),
        ),
    ],
)
def test_refusal_and_reasoning_are_fields_of_the_answer(
    dialect: str | None, body: dict[str, Any], parts: tuple[str, str, str]
) -> None:
    answer = answer_of(dialect, body)
    assert (answer.text, answer.refusal, answer.reasoning) == parts
    assert answer.output == answer.text + answer.refusal
    assert not answer.empty
