"""Converts requests of any dialect to llama.cpp's chat, for an embedded model behind the gateway. Does not use HTTP.

If tools must be called, a grammar constrains the answer to tool calls, so that this works also with a model whose chat
template has no tools.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from assay.models.tool_calls import with_tool_calls
from assay.traces.gateway.translation_gemini import chat_of, error_of, untranslatable
from assay.traces.messages.dialects import Message, chat_messages, chat_tools, part_texts
from assay.traces.messages.parts import each
from assay.traces.messages.requested import insisted_tool, must_call, output_schema

__all__ = ["as_called", "chat_request", "chunks_of", "error_body", "refused", "stream_of"]

_ANY = ("", "any", "default")  # names that leave the choice of the model to the gateway
_SAME = (
    "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "stop", "n", "logit_bias",
    "top_logprobs",
)  # fmt: skip
_LONGEST = 400  # maximum characters of a string argument in a grammar: small models may not end one by themselves


def refused(dialect: str, body: Mapping[str, Any], names: Sequence[str]) -> tuple[int, dict[str, Any]] | None:
    """Status and body of the error for a request that the model cannot answer; None if it can.

    Refused are requests for another model, requests that continue a stored conversation, and Gemini's own tools.

    Args:
        names: names of the model; the first is the one in the list of models.
    """
    requested = body.get("model")
    if dialect == "gemini":
        names = names[::-1]  # a path has no place for the slash of the whole name
        if (why := untranslatable(body)) is not None:
            return 400, error_of(400, f"{names[-1]} cannot answer this: {why}")
    if requested is not None and requested not in (*_ANY, *names, *(f"openai/{name}" for name in names)):
        message = f"there is no model {str(requested)[:100]!r} here; there are: {names[0]}. Name it, or "
        if dialect == "gemini":
            return 404, error_of(404, message + "call it any")
        message += "leave the model out"
        return 404, error_body(message, "not_found_error" if dialect == "messages" else "model_not_found")
    if dialect == "responses" and (body.get("previous_response_id") or body.get("conversation")):
        message = (
            "an embedded model keeps no conversations: send all messages as input, without previous_response_id or "
            "conversation"
        )
        return 400, error_body(message, "invalid_request_error")
    return None


_OWNERS = frozenset(
    ("lora", "id_slot")
)  # fields of llama.cpp's requests that select adapters: callers may not set them


def chat_request(dialect: str, body: Mapping[str, Any], model: str, *, tools: bool) -> dict[str, Any]:
    """A request of any dialect as llama.cpp's chat request; completions stay completions.

    Args:
        tools: whether the model's chat template has a place for tools.
    """
    body = {key: value for key, value in body.items() if key not in _OWNERS}
    request = {"dialect": dialect, "body": body}
    if dialect == "completions":
        return {"logprobs": 1, **body, "model": model}
    chat = {**body, "model": model} if dialect == "chat" else _translated(request, body, model)
    chat.setdefault("logprobs", True)
    if chat["logprobs"]:
        chat.setdefault("top_logprobs", 1)
    if must_call(request) and chat_tools(request):
        return _constrained_to_calls(chat, request)
    if not tools:
        chat["messages"] = [_plain(dict(message)) for message in each(chat.get("messages"))]
    return chat


def _translated(request: Mapping[str, Any], body: Mapping[str, Any], model: str) -> dict[str, Any]:
    if request["dialect"] == "gemini":
        return chat_of(body, model, stream=bool(body.get("stream")))
    chat: dict[str, Any] = {"model": model, "messages": chat_messages(request), "stream": bool(body.get("stream"))}
    chat |= {key: body[key] for key in _SAME if body.get(key) is not None}
    limit, stops = body.get("max_output_tokens", body.get("max_tokens")), body.get("stop_sequences")
    chat |= {**({} if limit is None else {"max_tokens": limit}), **({"stop": stops} if stops else {})}
    if (schema := output_schema(request)) is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if tools := chat_tools(request):
        chat["tools"] = tools
    return {**chat, "stream_options": {"include_usage": True}} if chat["stream"] else chat


def as_called(reply: dict[str, Any], dialect: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion whose text is parsed as tool calls if tools had to be called."""
    request = {"dialect": dialect, "body": body}
    return _with_ids(with_tool_calls(reply, chat_tools(request))) if must_call(request) else reply


def _constrained_to_calls(chat: dict[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """The request with the tools in its instructions, and as response format the schema of one tool call."""
    insisted = insisted_tool(request)
    functions = [tool["function"] for tool in chat_tools(request) if insisted in (None, tool["function"]["name"])]
    functions = functions or [tool["function"] for tool in chat_tools(request)]
    shared: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = _bounded(function["parameters"])
        shared |= {key: parameters.pop(key) for key in ("$defs", "definitions") if key in parameters}
        properties = {"name": {"const": function["name"]}, "arguments": {"type": "object", **parameters}}
        calls.append({"type": "object", "properties": properties, "required": ["name", "arguments"]})
    schema = {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **shared}
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    instruction = f'Answer by calling one of these tools, as JSON: {{"name": NAME, "arguments": ARGUMENTS}}.\n{listed}'
    messages = [_plain(dict(message)) for message in each(chat.get("messages"))]
    first = messages[0] if messages and messages[0].get("role") == "system" else None
    system_text = f"{part_texts(first.get('content'))}\n\n{instruction}" if first is not None else instruction
    unchanged = {
        key: value
        for key, value in chat.items()
        if key not in ("tools", "tool_choice", "parallel_tool_calls", "stream_options")
    }
    constraint = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}},
        "stream": False,
    }
    return {
        **unchanged,
        **constraint,
        "messages": [{"role": "system", "content": system_text}, *(messages[1:] if first is not None else messages)],
    }


def _bounded(schema: Any) -> Any:
    """A schema whose strings and lists have a maximum length."""
    if isinstance(schema, list):
        return [_bounded(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    bounded = {key: _bounded(value) for key, value in schema.items()}
    kind = bounded.get("type")
    if kind == "string" and not bounded.keys() & {"maxLength", "enum", "const", "pattern", "format"}:
        bounded["maxLength"] = _LONGEST
    elif kind == "array" and "maxItems" not in bounded:
        bounded["maxItems"] = max(16, bounded["minItems"] if isinstance(bounded.get("minItems"), int) else 0)
    return bounded


def _plain(message: Message) -> Message:
    """A message for a chat template without tools: calls and results become text."""
    calls = [call["function"] for call in each(message.get("tool_calls")) if isinstance(call.get("function"), Mapping)]
    if message.get("role") == "tool":
        return {"role": "user", "content": f"The tool's result: {part_texts(message.get('content'))}"}
    if not calls:
        return message
    lines = [
        f'{{"name": {json.dumps(call.get("name"))}, "arguments": {call.get("arguments") or "{}"}}}' for call in calls
    ]
    return {
        "role": message.get("role"),
        "content": "\n".join(filter(None, [part_texts(message.get("content")), *lines])),
    }


def _with_ids(reply: dict[str, Any]) -> dict[str, Any]:
    """Gives tool calls unique ids: calls parsed from text are numbered from 0 in each answer."""
    for choice in reply.get("choices") or ():
        for at, call in enumerate(choice.get("message", {}).get("tool_calls") or ()):
            call["id"] = f"call_{str(reply.get('id') or '').removeprefix('chatcmpl-')[:24]}_{at}"
    return reply


async def chunks_of(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects in the data lines of a stream."""
    incomplete = b""
    async for part in parts:
        *lines, incomplete = (incomplete + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield json.loads(data)
            elif line.startswith(b"error:"):
                yield {"error": json.loads(line[6:])}


async def stream_of(reply: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """A whole chat completion as the chunks of a stream."""
    head = {
        **{key: value for key, value in reply.items() if key not in ("choices", "usage")},
        "object": "chat.completion.chunk",
    }
    for choice in reply["choices"]:
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        begun = {"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": choice.get("logprobs")}
        yield {**head, "choices": [begun]}
        yield {**head, "choices": [{"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}]}
    yield {**head, "choices": [], "usage": reply.get("usage")}


def error_body(message: str, code: str) -> dict[str, Any]:
    """An error in the shape that OpenAI's and Anthropic's clients read."""
    return {"type": "error", "error": {"message": message, "type": code, "code": code, "param": None}}
