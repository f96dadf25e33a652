"""Converts chat completions, streamed or not, to OpenAI's Responses, Anthropic's messages or Gemini. Calls no models.

Log-probabilities and token ids, for which these dialects have no field in tool calls, are added as in chat:
`{"logprobs": {"content": [...]}}`.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from assay.models.embedded import with_tool_calls
from assay.traces.gateway.events import read_events
from assay.traces.gateway.replies import JSON, STREAM, Reply, json_reply
from assay.traces.messages.dialects import Message, answer_of, chat_messages, chat_tools, part_texts
from assay.traces.messages.final_answer import insisted_tool, must_call, output_schema
from assay.traces.messages.gemini import field, listed
from assay.traces.messages.parts import each, object_of
from assay.traces.records import new_id

# -- Converts requests of Google's Gemini API to chat, and chat completions to its answers. Does not use HTTP.


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
    names = {name for tool in listed(body.get("tools")) for name in tool}
    google_tools = sorted(names - {"functionDeclarations", "function_declarations"})
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
    for call_id, name, arguments in answer.tools:
        parts.append({"functionCall": {"id": call_id, "name": name, "args": object_of(arguments)}})
    reason, content = _REASONS.get(str(answer.finish), "STOP"), {"parts": parts, "role": "model"}
    candidate: Body = {"content": content, "finishReason": reason, "index": 0}
    if tokens := [*each(_tokens(chat))]:
        candidate["logprobsResult"] = {"chosenCandidates": [_token(token) for token in tokens]}
    asked, thoughts, made = answer.prompt_tokens or 0, answer.thinking_tokens or 0, answer.completion_tokens or 0
    usage = {"promptTokenCount": asked, "candidatesTokenCount": made - thoughts, "totalTokenCount": asked + made}
    usage |= {"thoughtsTokenCount": thoughts} if thoughts else {}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": model, "responseId": new_id()}


def _token(token: Mapping[str, Any]) -> Body:
    entry = {"token": token.get("token"), "logProbability": token.get("logprob")}
    return entry if token.get("id") is None else {**entry, "tokenId": token["id"]}


class Stream:
    """The events of one answer in a dialect. A part with text comes first if text was streamed."""

    def __init__(self, model: str) -> None:
        self.model, self.sent_text = model, ""

    def begin(self) -> Iterator[bytes]:
        """The events before the answer."""
        return iter(())

    def error(self, message: str) -> bytes:
        """The event that ends a stream that failed."""
        raise NotImplementedError

    def opened(self, at: int) -> Iterator[bytes]:
        """The events before the text of the part at an index."""
        return iter(())

    def text(self, delta: str) -> bytes:
        """The event of a part of the text."""
        raise NotImplementedError

    def end(self, answer: Body) -> Iterator[bytes]:
        """The last events, with the parts of the answer that were not streamed; `answer` is that of `to_dialect`."""
        raise NotImplementedError

    def in_order(self, parts: list[Body], kind: str) -> list[Body]:
        """The parts of an answer, the one with the streamed text first."""
        return sorted(parts, key=lambda part: part["type"] != kind) if self.sent_text else parts


class GeminiStream(Stream):
    """Text as it arrives, everything else in the last event."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.response_id = new_id()

    def error(self, message: str) -> bytes:
        return data_line({"error": {"code": 500, "message": message, "status": "INTERNAL"}})

    def text(self, delta: str) -> bytes:
        candidate = {"content": {"parts": [{"text": delta}], "role": "model"}, "index": 0}
        return data_line({"candidates": [candidate], "modelVersion": self.model, "responseId": self.response_id})

    def end(self, answer: Body) -> Iterator[bytes]:
        candidate = answer["candidates"][0]
        parts = candidate["content"]["parts"]
        remaining = [part for part in parts if not self.sent_text or "text" not in part or part.get("thought")]
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


# -- Converts requests of any dialect to llama.cpp's chat, for an embedded model behind the gateway. Does not use HTTP.
#
# If tools must be called, a grammar constrains the answer to tool calls, so that this works also with a model whose
# chat template has no tools.


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
            "no conversations are kept here: send all messages as input, without previous_response_id or conversation"
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


def translated(dialect: str, body: Mapping[str, Any], model: str) -> dict[str, Any]:
    """A request of any dialect as a request of OpenAI's chat API, for a model that takes tools."""
    if dialect == "chat":
        return {**body, "model": model}
    request = {"dialect": dialect, "body": body}
    chat = _translated(request, body, model)
    return {**chat, **_choice(request)} if chat.get("tools") and dialect != "gemini" else chat


def completion_of(response: Mapping[str, Any], model: str) -> dict[str, Any]:
    """A canonical response, as `assay.models.codec.stored_response` writes it, as a chat completion."""
    answer = answer_of(None, response)
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.tools else "")}
    message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    message |= {"refusal": answer.refusal} if answer.refusal else {}
    if answer.tools:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in answer.tools
        ]
    prompt, made, thought = answer.prompt_tokens or 0, answer.completion_tokens or 0, answer.thinking_tokens
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    usage |= {"completion_tokens_details": {"reasoning_tokens": thought}} if thought is not None else {}
    reason = "tool_calls" if answer.tools else answer.finish or "stop"
    choice = {"index": 0, "finish_reason": reason, "message": message}
    if tokens := response.get("logprobs"):
        choice["logprobs"] = {"content": [_token_of(token) for token in tokens]}
    return {
        "id": f"chatcmpl-{new_id()}", "object": "chat.completion", "created": int(time.time()), "model": model,
        "choices": [choice], "usage": usage,
    }  # fmt: skip


def _token_of(token: Mapping[str, Any]) -> dict[str, Any]:
    alternatives = [_token_of(top) for top in token.get("top") or ()]
    entry = {"token": token.get("token"), "logprob": token.get("logprob"), "bytes": token.get("bytes")}
    return {**entry, "top_logprobs": alternatives} if "top" in token else entry


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
    dropped = ("tools", "tool_choice", "parallel_tool_calls", "stream_options")
    return {
        **{key: value for key, value in chat.items() if key not in dropped},
        "response_format": {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}},
        "stream": False,
        "messages": [{"role": "system", "content": system_text}, *(messages if first is None else messages[1:])],
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
    lines = [part_texts(message.get("content"))]
    for call in calls:
        lines.append(f'{{"name": {json.dumps(call.get("name"))}, "arguments": {call.get("arguments") or "{}"}}}')
    return {"role": message.get("role"), "content": "\n".join(filter(None, lines))}


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
    head = {key: value for key, value in reply.items() if key not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
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


# -- Translation.


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
            error = chunk["error"]
            yield stream.error(str(error.get("message") if isinstance(error, Mapping) else error))
            return
        delta = next(each(chunk.get("choices")), {}).get("delta") or {}
        if text := delta.get("content"):
            for event in stream.opened(0) if not stream.sent_text else ():
                yield event
            stream.sent_text += text
            yield stream.text(text)
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
        thought: Body = {"type": "reasoning", "id": f"rs_{number}", "summary": []}
        content = [{"type": "reasoning_text", "text": answer.reasoning}]
        output.append({**thought, "content": content, "status": "completed"})
    if answer.text or not answer.tools:
        tokens = [] if answer.tools else _tokens(chat)
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": tokens}
        output.append({**_message_item(f"msg_{number}"), "status": "completed", "content": [part]})
    for at, (call_id, name, arguments) in enumerate(answer.tools):
        item = {"type": "function_call", "id": f"fc_{number}_{at}", "call_id": call_id}
        output.append({**item, "name": name, "arguments": arguments, "status": "completed"})
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


def _message_item(message_id: str) -> Body:
    return {"type": "message", "id": message_id, "role": "assistant", "status": "in_progress", "content": []}


class _Responses(Stream):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.response_id, self.message_id = f"resp_{new_id()}", f"msg_{new_id()}"
        self.blank, self.number = _blank_response(model, self.response_id), 0

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return _event(f"response.{kind}", **fields, sequence_number=self.number - 1)

    def begin(self) -> Iterator[bytes]:
        yield self._event("created", response=self.blank)
        yield self._event("in_progress", response=self.blank)

    def error(self, message: str) -> bytes:
        error = {"code": "server_error", "message": message}
        return self._event("failed", response={**self.blank, "status": "failed", "error": error})

    def text(self, delta: str) -> bytes:
        where = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        return self._event("output_text.delta", **where, delta=delta, logprobs=[])

    def opened(self, at: int) -> Iterator[bytes]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("output_item.added", output_index=at, item=_message_item(self.message_id))
        yield self._event("content_part.added", item_id=self.message_id, output_index=at, content_index=0, part=part)

    def end(self, answer: Body) -> Iterator[bytes]:
        items = self.in_order(answer["output"], "message")
        for at, item in enumerate(items):
            if item["type"] == "message":
                item["id"] = self.message_id
                yield from self.opened(at) if not self.sent_text else ()
                part = item["content"][0]
                where = {"item_id": self.message_id, "output_index": at, "content_index": 0}
                yield self._event("output_text.done", **where, text=part["text"], logprobs=part["logprobs"])
                yield self._event("content_part.done", **where, part=part)
            elif item["type"] == "function_call":
                where, text = {"item_id": item["id"], "output_index": at}, item["arguments"]
                begun = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("output_item.added", output_index=at, item=begun)
                yield self._event("function_call_arguments.delta", **where, delta=text)
                yield self._event("function_call_arguments.done", **where, name=item["name"], arguments=text)
            else:
                yield self._event("output_item.added", output_index=at, item=item)
            yield self._event("output_item.done", output_index=at, item=item)
        # Also for a truncated answer, whose status shows it: OpenAI's SDK returns no final response after
        # `response.incomplete`.
        yield self._event("completed", response={**answer, "id": self.response_id, "output": items})


# -- Anthropic's messages


def _message(chat: Mapping[str, Any], model: str) -> Body:
    answer, content = answer_of("chat", chat), list[Body]()
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text or not answer.tools:
        content.append({"type": "text", "text": answer.text})
    for call_id, name, arguments in answer.tools:
        content.append({"type": "tool_use", "id": call_id, "name": name, "input": object_of(arguments)})
    return {
        **_blank_message(model), "content": content, "stop_reason": _STOPS.get(str(answer.finish), "end_turn"),
        "stop_sequence": None, **_logprobs(chat),
        "usage": {"input_tokens": answer.prompt_tokens or 0, "output_tokens": answer.completion_tokens or 0},
    }  # fmt: skip


def _blank_message(model: str) -> Body:
    message_id = f"msg_{new_id()}"
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
    }


# the start and the delta of a block of the answer
_BLOCKS: dict[str, Callable[[Body], tuple[Body, Body]]] = {
    "text": lambda block: ({"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}),
    "thinking": lambda block: (
        {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    ),
    "tool_use": lambda block: (
        {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    ),
}  # fmt: skip


class _Messages(Stream):
    def begin(self) -> Iterator[bytes]:
        usage = {"input_tokens": 0, "output_tokens": 0}
        yield _event("message_start", message={**_blank_message(self.model), "stop_sequence": None, "usage": usage})

    def error(self, message: str) -> bytes:
        return _event("error", error={"type": "api_error", "message": message})

    def opened(self, at: int) -> Iterator[bytes]:
        yield _event("content_block_start", index=at, content_block={"type": "text", "text": ""})

    def text(self, delta: str) -> bytes:
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta})

    def end(self, answer: Body) -> Iterator[bytes]:
        for at, block in enumerate(self.in_order(answer["content"], "text")):
            if not (block["type"] == "text" and self.sent_text):
                start, delta = _BLOCKS[block["type"]](block)
                yield _event("content_block_start", index=at, content_block=start)
                yield _event("content_block_delta", index=at, delta=delta)
            yield _event("content_block_stop", index=at)
        more = {"logprobs": answer["logprobs"]} if "logprobs" in answer else {}
        delta = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=answer["usage"], **more)
        yield _event("message_stop")


_STREAMS: dict[str, type[Stream]] = {"responses": _Responses, "messages": _Messages, "gemini": GeminiStream}
