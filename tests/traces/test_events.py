"""A streamed answer is stored like the same answer unstreamed, in every field that a provider sends."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from assay.traces.gateway.events import read_events
from assay.traces.messages.dialects import answer_of

Event = dict[str, Any]


def called(number: int, expression: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"id": f"call_{number}", "type": "function", "function": function}


def choice(index: int, finish: str = "stop", logprobs: Any = None, **message: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": None, **message}
    return {"index": index, "finish_reason": finish, "logprobs": logprobs, "message": message}


def parts(text: str) -> list[str]:
    return [text[at : at + 4] for at in range(0, len(text), 4)]


# -- chat and completions

CALLS = [called(1, "6*7"), called(2, "7*8")]
TOKENS = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.1}]}
REFUSED = {"content": None, "refusal": [{"token": "n", "logprob": -1.0}]}
THOUGHT = {"type": "reasoning.text", "index": 0, "format": "f-1", "text": "one thought after another"}
HEAD = {"id": "c-1", "created": 5, "model": "m", "service_tier": "flex", "system_fingerprint": "fp"}
CHAT: dict[str, Any] = {
    **HEAD,
    "object": "chat.completion",
    "usage": {"prompt_tokens": 7, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 3}},
    "choices": [
        choice(0, "tool_calls", TOKENS, content="I will.", reasoning_content="It needs a tool.", tool_calls=CALLS),
        choice(1, content="It is 42, I think."),
        choice(2, logprobs=REFUSED, refusal="I cannot help with that."),
        choice(3, content="thought", reasoning_details=[THOUGHT]),
    ],
}


def chat_deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None if message["content"] is None else ""}
    for name in ("reasoning_content", "refusal", "content"):
        yield from ({name: part} for part in parts(message.get(name) or ""))
    for detail in message.get("reasoning_details", ()):
        yield from ({"reasoning_details": [{**detail, "text": part}]} for part in parts(detail["text"]))
    for at, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        yield {"tool_calls": [{**call, "index": at, "function": {"name": name, "arguments": ""}}]}
        for part in parts(arguments):
            yield {"tool_calls": [{"index": at, "function": {"arguments": part}}]}


def chat_stream() -> Iterator[Event]:
    head = {**HEAD, "object": "chat.completion.chunk"}
    for sent in CHAT["choices"]:
        known = {"index": sent["index"], "finish_reason": None, "logprobs": None, "delta": {}}
        for delta in chat_deltas(sent["message"]):
            yield {**head, "usage": None, "choices": [{**known, "delta": delta}]}
        for name, tokens in (sent["logprobs"] or {}).items():
            for token in tokens or ():
                yield {**head, "choices": [{**known, "logprobs": {**sent["logprobs"], name: [token]}}]}
        yield {**head, "obfuscation": "x", "choices": [{**known, "finish_reason": sent["finish_reason"]}]}
    yield {**head, "choices": [], "usage": CHAT["usage"]}


def test_a_streamed_chat_equals_the_unstreamed_answer_with_all_choices() -> None:
    assert read_events("chat", list(chat_stream())) == (CHAT, True)


def test_a_chat_with_an_unfinished_choice_is_incomplete() -> None:
    unfinished = [
        event for event in chat_stream() if not any(c["index"] == 1 and c["finish_reason"] for c in event["choices"])
    ]
    body, complete = read_events("chat", unfinished)
    assert body is not None
    assert not complete
    assert [sent["finish_reason"] for sent in body["choices"]] == ["tool_calls", None, "stop", "stop"]


@pytest.mark.parametrize(
    "sent",
    [
        [{**CALLS[0], "index": 0}, {**CALLS[1], "index": 0}],  # as older Ollama: every call has the index 0
        [CALLS[0], CALLS[1]],
        [
            {**CALLS[0], "index": 0},
            {**CALLS[0], "index": 0, "function": {"name": "calculator", "arguments": ""}},
            {**CALLS[1], "index": 1},
        ],
    ],
    ids=["one index", "no index", "the name in every part"],
)
def test_tool_calls_are_distinguished_for_every_numbering_of_a_server(sent: list[dict[str, Any]]) -> None:
    events: list[Event] = [{"id": "1", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in sent]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    body, complete = read_events("chat", [*events, end])
    assert complete
    assert body is not None
    assert body["choices"][0]["message"]["tool_calls"] == CALLS


def test_a_streamed_completion_equals_the_unstreamed_one() -> None:
    head, usage = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}, {"prompt_tokens": 1}

    def sent(index: int, text: str, finish: str | None, *logprobs: float) -> dict[str, Any]:
        tokens = {"tokens": [text], "token_logprobs": list(logprobs)} if logprobs else None
        return {"index": index, "text": text, "finish_reason": finish, "logprobs": tokens}

    events = [
        sent(0, "once", None, -0.1),
        sent(0, " upon", None, -0.2),
        sent(0, "", "length"),
        sent(1, "twice", "stop"),
    ]
    logprobs = {"tokens": ["once", " upon"], "token_logprobs": [-0.1, -0.2]}
    whole = [{**sent(0, "once upon", "length"), "logprobs": logprobs}, sent(1, "twice", "stop")]
    streamed = [*({**head, "choices": [event]} for event in events), {**head, "choices": [], "usage": usage}]
    assert read_events("completions", streamed) == ({**head, "usage": usage, "choices": whole}, True)


def test_a_long_stream_is_merged_in_linear_time() -> None:
    """Joining at each of 100,000 deltas would copy 10 GB."""
    events = [{"id": "1", "choices": [{"index": 0, "delta": {"content": "a few words "}}]}] * 100_000
    body, _ = read_events("chat", events)
    assert body is not None
    assert len(body["choices"][0]["message"]["content"]) == 1_200_000


# -- responses

RESPONSE = {"id": "resp_1", "object": "response", "status": "in_progress", "service_tier": "flex", "output": []}
THOUGHTS = [{"type": "summary_text", "text": "first a thought"}, {"type": "summary_text", "text": "and a next"}]
SAID = [
    {"type": "output_text", "text": "this far", "annotations": []},
    {"type": "refusal", "refusal": "and no further"},
]
ARGUMENTS = '{"expression": "6*7"}'
ITEMS: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_1", "summary": THOUGHTS},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": SAID},
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "calculator", "arguments": ARGUMENTS},
]


def responses_stream() -> Iterator[Event]:
    yield {"type": "response.created", "response": RESPONSE}
    for at, item in enumerate(ITEMS):
        begun = {**item, **{name: [] for name in ("summary", "content") if name in item}}
        begun |= {"arguments": ""} if "arguments" in item else {}
        yield {"type": "response.output_item.added", "output_index": at, "item": begun}
        for place, part in enumerate(item.get("summary", ())):
            where = {"output_index": at, "summary_index": place}
            yield {"type": "response.reasoning_summary_part.added", **where, "part": {**part, "text": ""}}
            for text in parts(part["text"]):
                yield {"type": "response.reasoning_summary_text.delta", **where, "delta": text}
        for place, part in enumerate(item.get("content", ())):
            where, name = {"output_index": at, "content_index": place}, "text" if "text" in part else "refusal"
            yield {"type": "response.content_part.added", **where, "part": {**part, name: ""}}
            for text in parts(part[name]):
                yield {"type": f"response.{part['type']}.delta", **where, "delta": text}
        for text in parts(item.get("arguments", "")):
            yield {"type": "response.function_call_arguments.delta", "output_index": at, "delta": text}


def test_a_responses_stream_keeps_the_items_if_it_breaks_off_or_its_last_event_lacks_them() -> None:
    assert read_events("responses", list(responses_stream())) == ({**RESPONSE, "output": ITEMS}, False)
    completed = {**RESPONSE, "status": "completed"}
    events = [*responses_stream(), {"type": "response.completed", "response": completed}]
    assert read_events("responses", events) == ({**completed, "output": ITEMS}, True)


# -- messages

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
EMPTY: dict[str, Any] = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}, "tool_use": {"input": {}}}


def block_deltas(block: dict[str, Any]) -> Iterator[Event]:
    yield from ({"type": "thinking_delta", "thinking": text} for text in parts(block.get("thinking", "")))
    if "signature" in block:
        yield {"type": "signature_delta", "signature": block["signature"]}
    yield from ({"type": "citations_delta", "citation": citation} for citation in block.get("citations", ()))
    yield from ({"type": "text_delta", "text": text} for text in parts(block.get("text", "")))
    if block.get("input"):
        for text in ["", *parts(json.dumps(block["input"]))]:
            yield {"type": "input_json_delta", "partial_json": text}


def anthropic_stream() -> Iterator[Event]:
    usage = {**MESSAGE["usage"], "output_tokens": 1}
    yield {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None, "usage": usage}}
    for at, block in enumerate(MESSAGE["content"]):
        begun = {name: value for name, value in block.items() if name != "citations"} | EMPTY.get(block["type"], {})
        yield {"type": "content_block_start", "index": at, "content_block": begun}
        yield from ({"type": "content_block_delta", "index": at, "delta": delta} for delta in block_deltas(block))
        yield {"type": "content_block_stop", "index": at}
    delta = {"stop_reason": "tool_use", "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 30, "cache_read_input_tokens": None}}
    yield {"type": "message_stop"}


def test_a_streamed_message_equals_the_unstreamed_one_with_signatures_and_citations() -> None:
    assert read_events("messages", list(anthropic_stream())) == (MESSAGE, True)


# -- parts of an answer

STOPPED = {"content": [], "stop_reason": "refusal", "stop_details": {"explanation": "No."}}
DSPY = {"message": {"parts": [{"type": "refusal", "text": "No."}, {"type": "thinking", "text": "hm"}]}}


@pytest.mark.parametrize(
    ("dialect", "body", "expected"),
    [
        ("chat", {"choices": [choice(0, refusal="No.")]}, ("", "No.", "")),
        ("chat", {"choices": [choice(0, content=[{"type": "refusal", "refusal": "No."}])]}, ("", "No.", "")),
        ("chat", {"choices": [choice(0, content="yes", reasoning_content="why not")]}, ("yes", "", "why not")),
        ("responses", {"output": ITEMS}, ("this far", "and no further", "first a thoughtand a next")),
        ("messages", MESSAGE, ("as it says there", "", "a long thought")),
        ("messages", STOPPED, ("", "No.", "")),
        (None, DSPY, ("", "No.", "hm")),
    ],
)
def test_refusal_and_reasoning_are_fields_of_the_answer(
    dialect: str | None, body: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    answer = answer_of(dialect, body)
    assert (answer.text, answer.refusal, answer.reasoning) == expected
    assert answer.output == answer.text + answer.refusal
    assert not answer.empty
