"""Converts chat completions, streamed or not, to OpenAI's Responses, Anthropic's messages or Gemini. Calls no models.

Log-probabilities and token ids, for which these dialects have no field in tool calls, are added as in chat:
`{"logprobs": {"content": [...]}}`.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol

from assay.traces.gateway.embedded_chat import stream_of
from assay.traces.gateway.events import read_events
from assay.traces.gateway.replies import JSON, STREAM, Reply, json_reply
from assay.traces.gateway.translation_gemini import GeminiStream, as_list, content_of_chat, data_line
from assay.traces.messages.dialects import answer_of
from assay.traces.messages.parts import each, object_of
from assay.traces.records import new_id

__all__ = ["answered", "stream_to_dialect", "streamed", "to_dialect"]

Body = dict[str, Any]
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def to_dialect(dialect: str, chat: Mapping[str, Any], model: str) -> Body:
    """A chat completion as an answer of the dialect, with `model` as the model's name."""
    if dialect == "responses":
        return _response(chat, model)
    if dialect == "gemini":
        return content_of_chat(chat, model)
    return _message(chat, model) if dialect == "messages" else {**chat, "model": model}


async def stream_to_dialect(dialect: str, chunks: AsyncIterator[Body], model: str) -> AsyncIterator[bytes]:
    """Chunks of a chat completion as events of the dialect. Text is sent as it arrives, everything else at the end."""
    if dialect not in _STREAMS:
        async for chunk in chunks:
            yield data_line({**chunk, "model": model} if "error" not in chunk else chunk)
        yield b"data: [DONE]\n\n"
        return
    stream = _STREAMS[dialect](model)
    received: list[Body] = []
    for event in stream.begin():
        yield event
    async for chunk in chunks:
        received.append(chunk)
        if "error" in chunk:
            yield stream.error(chunk["error"])
            return
        delta = next(each(chunk.get("choices")), {}).get("delta") or {}
        for event in stream.text(delta.get("content") or ""):
            yield event
    completion, _ = read_events("chat", received)
    for event in stream.end(to_dialect(dialect, completion or {"choices": []}, model)):
        yield event


def streamed(dialect: str, chunks: AsyncIterator[Body], model: str, query: str) -> Reply:
    """Chunks of a chat completion as a stream of the dialect; for Gemini a JSON list unless `query` has `alt=sse`."""
    events = stream_to_dialect(dialect, chunks, model)
    if dialect == "gemini" and "alt=sse" not in query.split("&"):
        return Reply(200, JSON, as_list(events))
    return Reply(200, STREAM, events)


def answered(dialect: str, completion: dict[str, Any], model: str, query: str, *, stream: bool) -> Reply:
    """A whole chat completion as an answer of the dialect, or as the stream of one."""
    if stream:
        return streamed(dialect, stream_of(completion), model, query)
    return json_reply(200, to_dialect(dialect, completion, model))


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + data_line({"type": kind, **fields})


def _tokens(chat: Mapping[str, Any]) -> list[Any]:
    logprobs = next(each(chat.get("choices")), {}).get("logprobs")
    tokens = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return tokens if isinstance(tokens, list) else []


def _logprobs(chat: Mapping[str, Any]) -> Body:
    tokens = _tokens(chat)
    return {"logprobs": {"content": tokens}} if tokens else {}


# -- OpenAI's Responses


def _response(chat: Mapping[str, Any], model: str) -> Body:
    answer, number = answer_of("chat", chat), new_id()
    output: list[Body] = []
    if answer.reasoning:
        content = [{"type": "reasoning_text", "text": answer.reasoning}]
        output.append(
            {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content, "status": "completed"}
        )
    if answer.text or not answer.tools:
        part = {
            "type": "output_text",
            "text": answer.text,
            "annotations": [],
            "logprobs": [] if answer.tools else _tokens(chat),
        }
        output.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [part]}
        )
    for at, (call_id, name, arguments) in enumerate(answer.tools):
        item = {
            "type": "function_call",
            "id": f"fc_{number}_{at}",
            "call_id": call_id,
            "name": name,
            "arguments": arguments,
            "status": "completed",
        }
        output.append(item)
    cut = answer.finish == "length"
    return {
        **_blank_response(model, f"resp_{number}"), "status": "incomplete" if cut else "completed", "output": output,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None, **_logprobs(chat),
        "usage": {
            "input_tokens": answer.prompt_tokens or 0, "output_tokens": answer.completion_tokens or 0,
            "total_tokens": (answer.prompt_tokens or 0) + (answer.completion_tokens or 0),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": answer.thinking_tokens or 0},
        },
    }  # fmt: skip


def _blank_response(model: str, response_id: str) -> Body:
    return {
        "id": response_id, "object": "response", "created_at": int(time.time()), "status": "in_progress",
        "model": model, "output": [], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {},
        "error": None, "incomplete_details": None, "instructions": None, "temperature": None, "top_p": None,
        "usage": None,
    }  # fmt: skip


class _Responses:
    """The events of one response. The text item comes first if text was streamed."""

    def __init__(self, model: str) -> None:
        self.response_id, self.message_id = f"resp_{new_id()}", f"msg_{new_id()}"
        self.blank = _blank_response(model, self.response_id)
        self.number, self.sent_text = 0, ""

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return _event(f"response.{kind}", **fields, sequence_number=self.number - 1)

    def begin(self) -> Iterator[bytes]:
        yield self._event("created", response=self.blank)
        yield self._event("in_progress", response=self.blank)

    def error(self, error: Any) -> bytes:
        details = error if isinstance(error, Mapping) else {"message": str(error)}
        return self._event(
            "failed",
            response={
                **self.blank,
                "status": "failed",
                "error": {"code": "server_error", "message": str(details.get("message"))},
            },
        )

    def text(self, delta: str) -> Iterator[bytes]:
        if not delta:
            return
        if not self.sent_text:
            yield from self._open(0)
        self.sent_text += delta
        yield self._event(
            "output_text.delta", item_id=self.message_id, output_index=0, content_index=0, delta=delta, logprobs=[]
        )

    def _open(self, at: int) -> Iterator[bytes]:
        item = {"type": "message", "id": self.message_id, "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("output_item.added", output_index=at, item=item)
        yield self._event("content_part.added", item_id=self.message_id, output_index=at, content_index=0, part=part)

    def end(self, answer: Body) -> Iterator[bytes]:
        items = (
            sorted(answer["output"], key=lambda item: item["type"] != "message") if self.sent_text else answer["output"]
        )
        for at, item in enumerate(items):
            if item["type"] == "message":
                item["id"] = self.message_id
                if not self.sent_text:
                    yield from self._open(at)
                part = item["content"][0]
                where = {"item_id": self.message_id, "output_index": at, "content_index": 0}
                yield self._event("output_text.done", **where, text=part["text"], logprobs=part["logprobs"])
                yield self._event("content_part.done", **where, part=part)
            elif item["type"] == "function_call":
                where = {"item_id": item["id"], "output_index": at}
                yield self._event(
                    "output_item.added", output_index=at, item={**item, "arguments": "", "status": "in_progress"}
                )
                yield self._event("function_call_arguments.delta", **where, delta=item["arguments"])
                yield self._event(
                    "function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
                )
            else:
                yield self._event("output_item.added", output_index=at, item=item)
            yield self._event("output_item.done", output_index=at, item=item)
        # Also for a truncated answer, whose status shows it: OpenAI's SDK returns no final response after
        # `response.incomplete`.
        yield self._event("completed", response={**answer, "id": self.response_id, "output": items})


# -- Anthropic's messages


def _message(chat: Mapping[str, Any], model: str) -> Body:
    answer = answer_of("chat", chat)
    content: list[Body] = (
        [{"type": "thinking", "thinking": answer.reasoning, "signature": ""}] if answer.reasoning else []
    )
    content += [{"type": "text", "text": answer.text}] if answer.text or not answer.tools else []
    content += [
        {"type": "tool_use", "id": call_id, "name": name, "input": object_of(arguments)}
        for call_id, name, arguments in answer.tools
    ]
    return {
        "id": f"msg_{new_id()}", "type": "message", "role": "assistant", "model": model, "content": content,
        "stop_reason": _STOPS.get(str(answer.finish), "end_turn"), "stop_sequence": None, **_logprobs(chat),
        "usage": {"input_tokens": answer.prompt_tokens or 0, "output_tokens": answer.completion_tokens or 0},
    }  # fmt: skip


class _Messages:
    """The events of one message. The text block comes first if text was streamed."""

    def __init__(self, model: str) -> None:
        self.model, self.sent_text = model, ""

    def begin(self) -> Iterator[bytes]:
        usage = {"input_tokens": 0, "output_tokens": 0}
        head: Body = {
            "id": f"msg_{new_id()}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
        }
        yield _event("message_start", message={**head, "stop_sequence": None, "usage": usage})

    def error(self, error: Any) -> bytes:
        details = error if isinstance(error, Mapping) else {"message": str(error)}
        return _event("error", error={"type": "api_error", "message": str(details.get("message"))})

    def text(self, delta: str) -> Iterator[bytes]:
        if not delta:
            return
        if not self.sent_text:
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        self.sent_text += delta
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta})

    def end(self, answer: Body) -> Iterator[bytes]:
        blocks = (
            sorted(answer["content"], key=lambda block: block["type"] != "text")
            if self.sent_text
            else answer["content"]
        )
        parts: dict[str, Callable[[Body], tuple[Body, Body]]] = {
            "text": lambda block: ({"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}),
            "thinking": lambda block: (
                {**block, "thinking": ""},
                {"type": "thinking_delta", "thinking": block["thinking"]},
            ),
            "tool_use": lambda block: (
                {**block, "input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            ),
        }
        for at, block in enumerate(blocks):
            if not (block["type"] == "text" and self.sent_text):
                start, delta = parts[block["type"]](block)
                yield _event("content_block_start", index=at, content_block=start)
                yield _event("content_block_delta", index=at, delta=delta)
            yield _event("content_block_stop", index=at)
        more = {"logprobs": answer["logprobs"]} if "logprobs" in answer else {}
        delta = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=answer["usage"], **more)
        yield _event("message_stop")


class _Stream(Protocol):
    """The events of one answer in a dialect."""

    def begin(self) -> Iterator[bytes]: ...

    def error(self, error: Any) -> bytes: ...

    def text(self, delta: str) -> Iterator[bytes]: ...

    def end(self, answer: Body) -> Iterator[bytes]:
        """The last events, with the parts of the answer that were not streamed; `answer` is that of `to_dialect`."""


_STREAMS: dict[str, Callable[[str], _Stream]] = {"responses": _Responses, "messages": _Messages, "gemini": GeminiStream}
