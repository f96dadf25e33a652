"""Converts requests of Google's Gemini API to chat, and chat completions to its answers. Does not use HTTP."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from assay.traces.messages.dialects import answer_of, chat_messages, chat_tools
from assay.traces.messages.gemini import field, listed
from assay.traces.messages.parts import each, object_of
from assay.traces.messages.requested import insisted_tool, must_call, output_schema
from assay.traces.records import new_id

__all__ = ["GeminiStream", "as_list", "chat_of", "content_of_chat", "data_line", "error_of", "untranslatable"]

Body = dict[str, Any]
_SETTINGS = {
    "temperature": "temperature", "topP": "top_p", "topK": "top_k", "seed": "seed",
    "presencePenalty": "presence_penalty", "frequencyPenalty": "frequency_penalty", "stopSequences": "stop",
    "maxOutputTokens": "max_tokens",
}  # fmt: skip
_REASONS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}


# -- requests


def untranslatable(body: Mapping[str, Any]) -> str | None:
    """Why a request cannot be converted to chat; None if it can."""
    if field(body, "cachedContent"):
        return "cachedContent is kept at Google: send all contents"
    if (field(field(body, "generationConfig"), "candidateCount") or 1) != 1:
        return "candidateCount must be 1"
    google_tools = sorted(
        {
            name
            for tool in listed(body.get("tools"))
            for name in tool
            if name not in ("functionDeclarations", "function_declarations")
        }
    )
    return f"{', '.join(google_tools)}: these tools are run by Google; declare functions" if google_tools else None


def chat_of(body: Mapping[str, Any], model: str, *, stream: bool) -> Body:
    """A request as a request of OpenAI chat completions."""
    request, config = {"dialect": "gemini", "body": body}, field(body, "generationConfig")
    chat: Body = {"model": model, "messages": chat_messages(request), "stream": stream}
    chat |= {name: value for key, name in _SETTINGS.items() if (value := field(config, key)) is not None}
    if (schema := output_schema(request)) is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    elif field(config, "responseMimeType") == "application/json":
        chat["response_format"] = {"type": "json_object"}
    if tools := chat_tools(request):
        chat |= {"tools": tools, **_choice(request)}
    return {**chat, "stream_options": {"include_usage": True}} if stream else chat


def _choice(request: Mapping[str, Any]) -> Body:
    if (name := insisted_tool(request)) is not None:
        return {"tool_choice": {"type": "function", "function": {"name": name}}}
    if must_call(request):
        return {"tool_choice": "required"}
    mode = field(field(field(request["body"], "toolConfig"), "functionCallingConfig"), "mode")
    return {"tool_choice": "none"} if mode == "NONE" else {}


def error_of(code: int, text: str) -> Body:
    """The API's error body for a refused request."""
    return {"error": {"code": code, "message": text, "status": "NOT_FOUND" if code == 404 else "INVALID_ARGUMENT"}}


# -- answers


def content_of_chat(chat: Mapping[str, Any], model: str) -> Body:
    """A chat completion as the body of `generateContent`, with `model` as the model's name."""
    answer = answer_of("chat", chat)
    text = answer.text or answer.refusal
    parts: list[Body] = [{"text": answer.reasoning, "thought": True}] if answer.reasoning else []
    parts += [{"text": text}] if text or not answer.tools else []
    parts += [
        {"functionCall": {"id": call_id, "name": name, "args": object_of(arguments)}}
        for call_id, name, arguments in answer.tools
    ]
    candidate: Body = {
        "content": {"parts": parts, "role": "model"},
        "finishReason": _REASONS.get(str(answer.finish), "STOP"),
        "index": 0,
    }
    logprobs = next(each(chat.get("choices")), {}).get("logprobs")
    if tokens := list(each(logprobs.get("content"))) if isinstance(logprobs, Mapping) else []:
        candidate["logprobsResult"] = {"chosenCandidates": [_token(token) for token in tokens]}
    thoughts, made = answer.thinking_tokens or 0, answer.completion_tokens or 0
    usage = {
        "promptTokenCount": answer.prompt_tokens or 0,
        "candidatesTokenCount": made - thoughts,
        "totalTokenCount": (answer.prompt_tokens or 0) + made,
    }
    usage |= {"thoughtsTokenCount": thoughts} if thoughts else {}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": model, "responseId": new_id()}


def _token(token: Mapping[str, Any]) -> Body:
    entry = {"token": token.get("token"), "logProbability": token.get("logprob")}
    return entry if token.get("id") is None else {**entry, "tokenId": token["id"]}


class GeminiStream:
    """The events of one answer: text as it arrives, everything else in the last event."""

    def __init__(self, model: str) -> None:
        self.model, self.response_id, self.text_sent = model, new_id(), False

    def begin(self) -> Iterator[bytes]:
        return iter(())

    def error(self, error: Any) -> bytes:
        message = error.get("message") if isinstance(error, Mapping) else error
        return data_line({"error": {"code": 500, "message": str(message), "status": "INTERNAL"}})

    def text(self, delta: str) -> Iterator[bytes]:
        if delta:
            self.text_sent = True
            candidate = {"content": {"parts": [{"text": delta}], "role": "model"}, "index": 0}
            yield data_line({"candidates": [candidate], "modelVersion": self.model, "responseId": self.response_id})

    def end(self, answer: Body) -> Iterator[bytes]:
        candidate = answer["candidates"][0]
        remaining = [
            part
            for part in candidate["content"]["parts"]
            if not self.text_sent or "text" not in part or part.get("thought")
        ]
        content = {"parts": remaining or [{"text": ""}], "role": "model"}
        yield data_line({**answer, "candidates": [{**candidate, "content": content}], "responseId": self.response_id})


def data_line(body: Mapping[str, Any]) -> bytes:
    """An event of a stream."""
    return f"data: {json.dumps(body)}\n\n".encode()


async def as_list(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Events as items of one JSON list, which the API streams unless events are requested."""
    before = b"["
    async for event in events:
        yield before + event.removeprefix(b"data: ").strip()
        before = b",\n"
    yield b"]" if before != b"[" else b"[]"
