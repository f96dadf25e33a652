"""Responses of the scripted server (`rigs.upstream`) in each dialect, as one body and as a stream."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ScriptedCall = tuple[str, str, str]  # id, name, arguments as text
Chunks = Callable[[str], list[str]]
_PROMPT_TOKENS = 7


def response_body(dialect: str, number: int, model: str, text: str, calls: Sequence[ScriptedCall]) -> dict[str, Any]:
    """The body of a response that is not streamed.

    Args:
        number: number of the response, part of its id.
        text: text of the response; without text and calls the response contains an empty text.
    """
    if dialect == "chat":
        return _chat_body(number, model, text, calls)
    if dialect == "completions":
        return _text_body(number, model, text)
    if dialect == "responses":
        return _responses_body(number, model, text, calls)
    if dialect == "gemini":
        return _gemini_body(number, model, text, [(name, _object(arguments)) for _, name, arguments in calls])
    return _anthropic_body(number, model, text, calls)


def _usage(text: str) -> dict[str, int]:
    tokens = len(text.split())
    return {
        "prompt_tokens": _PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": _PROMPT_TOKENS + tokens,
    }


def _chat_body(number: int, model: str, text: str, calls: Sequence[ScriptedCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [choice],
        "usage": _usage(text),
    }


def _text_body(number: int, model: str, text: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{number}",
        "object": "text_completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}],
        "usage": _usage(text),
    }


def _responses_body(number: int, model: str, text: str, calls: Sequence[ScriptedCall]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        items.append(
            {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": "completed",
                "content": content,
            }
        )
    for index, (call_id, name, arguments) in enumerate(calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{number}_{index}",
                "call_id": call_id,
                "name": name,
                "arguments": arguments,
                "status": "completed",
            }
        )
    tokens = len(text.split())
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": model,
        "output": items,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "metadata": {},
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "usage": {
            "input_tokens": _PROMPT_TOKENS,
            "output_tokens": tokens,
            "total_tokens": _PROMPT_TOKENS + tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _anthropic_body(number: int, model: str, text: str, calls: Sequence[ScriptedCall]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    blocks += [
        {"type": "tool_use", "id": call_id, "name": name, "input": _object(arguments)}
        for call_id, name, arguments in calls
    ]
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": "tool_use" if calls else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": _PROMPT_TOKENS, "output_tokens": len(text.split())},
    }


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def response_events(
    dialect: str, number: int, model: str, text: str, calls: Sequence[ScriptedCall], chunks: int, usage: bool
) -> Iterator[bytes]:
    """The stream of a response: the text in chunks, then the arguments of each call in chunks.

    Args:
        chunks: maximum number of pieces of the text, and of each call's arguments.
        usage: whether the stream of `chat` and `completions` ends with the token counts.
    """
    body = response_body(dialect, number, model, text, calls)

    def split(content: str) -> list[str]:
        size = max(1, -(-len(content) // chunks))
        return [content[start : start + size] for start in range(0, len(content), size)] or [""]

    streams = {
        "chat": _chat_stream,
        "completions": _text_stream,
        "responses": _responses_stream,
        "messages": _anthropic_stream,
        "gemini": _gemini_stream,
    }
    yield from streams[dialect](body, text, calls, split, usage)


def _data(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def _chat_stream(
    body: dict[str, Any], text: str, calls: Sequence[ScriptedCall], split: Chunks, usage: bool
) -> Iterator[bytes]:
    head = {"id": body["id"], "object": "chat.completion.chunk", "created": 1, "model": body["model"]}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return _data({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    yield chunk({"role": "assistant", "content": None if calls and not text else ""})
    for part in split(text) if text or not calls else ():
        yield chunk({"content": part})
    for index, (call_id, name, arguments) in enumerate(calls):
        for position, part in enumerate(split(arguments)):
            first: dict[str, Any] = {"id": call_id, "type": "function"} if position == 0 else {}
            function = {"arguments": part, **({"name": name} if position == 0 else {})}
            yield chunk({"tool_calls": [{"index": index, **first, "function": function}]})
    yield chunk({}, "tool_calls" if calls else "stop")
    if usage:
        yield _data({**head, "choices": [], "usage": body["usage"]})
    yield b"data: [DONE]\n\n"


def _text_stream(
    body: dict[str, Any], text: str, calls: Sequence[ScriptedCall], split: Chunks, usage: bool
) -> Iterator[bytes]:
    head = {key: body[key] for key in ("id", "object", "created", "model")}
    for part, finish in (*((part, None) for part in split(text)), ("", "stop")):
        yield _data({**head, "choices": [{"index": 0, "text": part, "finish_reason": finish, "logprobs": None}]})
    if usage:
        yield _data({**head, "choices": [], "usage": body["usage"]})
    yield b"data: [DONE]\n\n"


def _event(kind: str, **payload: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **payload})}\n\n".encode()


def _responses_stream(
    body: dict[str, Any], text: str, calls: Sequence[ScriptedCall], split: Chunks, usage: bool
) -> Iterator[bytes]:
    number = itertools.count()

    def event(kind: str, **payload: Any) -> bytes:
        return _event(kind, **payload, sequence_number=next(number))

    yield event("response.created", response={**body, "status": "in_progress", "output": []})
    for index, item in enumerate(body["output"]):
        is_call = item["type"] == "function_call"
        position = {"item_id": item["id"], "output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        yield event("response.output_item.added", output_index=index, item={**item, **empty})
        if is_call:
            arguments, name = item["arguments"], item["name"]
            for part in split(arguments):
                yield event("response.function_call_arguments.delta", **position, delta=part)
            yield event("response.function_call_arguments.done", **position, arguments=arguments, name=name)
        else:
            content = item["content"][0]
            yield event("response.content_part.added", **position, content_index=0, part={**content, "text": ""})
            for part in split(text):
                yield event("response.output_text.delta", **position, content_index=0, logprobs=[], delta=part)
            yield event("response.output_text.done", **position, content_index=0, logprobs=[], text=text)
            yield event("response.content_part.done", **position, content_index=0, part=content)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=body)


def _anthropic_stream(
    body: dict[str, Any], text: str, calls: Sequence[ScriptedCall], split: Chunks, usage: bool
) -> Iterator[bytes]:
    arguments = iter(call[2] for call in calls)
    yield _event("message_start", message={**body, "content": [], "stop_reason": None})
    for index, block in enumerate(body["content"]):
        is_call = block["type"] == "tool_use"
        empty: dict[str, Any] = {"input": {}} if is_call else {"text": ""}
        yield _event("content_block_start", index=index, content_block={**block, **empty})
        for part in split(next(arguments) if is_call else text):
            delta = (
                {"type": "input_json_delta", "partial_json": part} if is_call else {"type": "text_delta", "text": part}
            )
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=end, usage={"output_tokens": 3})
    yield _event("message_stop")


def _gemini_body(number: int, model: str, text: str, calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The body of a response that is not streamed.

    Gemini's calls have no ids. The first call of a response has a thought signature, which the client must send back.
    """
    parts: list[dict[str, Any]] = [{"text": text}] if text or not calls else []
    for index, (name, arguments) in enumerate(calls):
        signature = {} if index else {"thoughtSignature": "c2lnbmVk"}
        parts.append({"functionCall": {"name": name, "args": arguments}, **signature})
    candidate = {"content": {"parts": parts, "role": "model"}, "finishReason": "STOP", "index": 0}
    tokens = len(text.split())
    usage = {"promptTokenCount": 7, "candidatesTokenCount": tokens, "totalTokenCount": 7 + tokens}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": model, "responseId": f"gen-{number}"}


def _gemini_stream(
    body: dict[str, Any], text: str, calls: Sequence[Any], split: Chunks, usage: bool
) -> Iterator[bytes]:
    """The text in chunks, each call in one event. The last event has the finish reason; there is no `[DONE]`."""
    parts = [{"text": part} for part in split(text)] if text or not calls else []
    parts += [part for part in body["candidates"][0]["content"]["parts"] if "text" not in part]
    for index, part in enumerate(parts):
        candidate = {
            "content": {"parts": [part], "role": "model"},
            "index": 0,
            **({"finishReason": "STOP"} if index == len(parts) - 1 else {}),
        }
        yield f"data: {json.dumps({**body, 'candidates': [candidate]})}\r\n\r\n".encode()


def as_list(events: Iterator[bytes]) -> Iterator[bytes]:
    """The events as elements of one JSON list: Gemini's format for streams without `alt=sse`."""
    for index, event in enumerate(events):
        yield (b"," if index else b"[") + event.removeprefix(b"data:").strip()
    yield b"]"
