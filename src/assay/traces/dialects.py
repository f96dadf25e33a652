"""One LM call in the three dialects of the field and in DSPy's own form, read as OpenAI chat messages.

A request that came over HTTP is kept exactly, as `{"dialect": D, "body": …}` with D one of `chat` (OpenAI chat completions),
`responses` (OpenAI Responses) and `messages` (Anthropic); one without a dialect is DSPy's canonical request. Does not talk to models.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.traces.records import ToolCall

__all__ = ["DIALECTS", "Answer", "answer_of", "asked_schema", "chat_messages", "chat_tools", "insisted_tool", "read_events", "tool_results"]

DIALECTS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
Message = dict[str, Any]


class Answer:
    """What a model said: text, tool calls as `(id, name, arguments as text)`, why it stopped, tokens, ids and logprobs."""

    __slots__ = ("completion_tokens", "finish", "logprobs", "prompt_tokens", "text", "token_ids", "tools")

    def __init__(self) -> None:
        self.text = ""
        self.tools: list[tuple[str, str, str]] = []
        self.finish: str | None = None  # stop, length, tool_calls, content_filter, or the provider's own word
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.token_ids: tuple[int, ...] | None = None
        self.logprobs: tuple[float, ...] | None = None

    @property
    def message(self) -> Message:
        """As an assistant's chat message."""
        found: Message = {"role": "assistant", "content": self.text or None if self.tools else self.text}
        if self.tools:
            found["tool_calls"] = [_chat_call(*call) for call in self.tools]
        return found

    def tool_calls(self) -> list[ToolCall]:
        """Tool calls as records; arguments that are no JSON object are kept under `arguments`, with the error."""
        return [_tool_record(name, arguments) for _, name, arguments in self.tools]


def _chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_record(name: str, arguments: str) -> ToolCall:
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return ToolCall(name=name, arguments=found)
    return ToolCall(name=name, arguments={"arguments": arguments}, error="the arguments are no JSON object")


def _text_of(content: Any) -> str:
    """The text of a content that is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else json.dumps(content, ensure_ascii=False, default=str)
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content if isinstance(part, str | Mapping))


def _content_of(content: Any) -> Any:
    """Texts as one string; content with images or files stays a list of parts."""
    if isinstance(content, list) and any(isinstance(part, Mapping) and "text" not in part for part in content):
        return content
    return _text_of(content)


def chat_messages(request: Mapping[str, Any]) -> list[Message]:
    """The conversation that was sent, as OpenAI chat messages; what cannot be read as a conversation gives none."""
    body = request.get("body", request)
    if not isinstance(body, Mapping):
        return []
    reader = {"chat": _from_chat, "responses": _from_responses, "messages": _from_anthropic}.get(str(request.get("dialect")), _from_canonical)
    return list(reader(body))


def chat_tools(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that were offered, in OpenAI's chat form."""
    tools = []
    body = request.get("body", request)
    for tool in body.get("tools") or () if isinstance(body, Mapping) else ():
        told = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if told and told.get("name"):
            schema = told.get("parameters") or told.get("input_schema") or {"type": "object", "properties": {}}
            function = {"name": told["name"], "description": told.get("description") or "", "parameters": schema}
            tools.append({"type": "function", "function": function})
    return tools


def asked_schema(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that the answer was held to, or asked to follow; None without one."""
    config = request.get("body") or request.get("config") or {}
    asked = config.get("response_format") if isinstance(config, Mapping) else None
    if not isinstance(asked, Mapping) and isinstance(config, Mapping) and isinstance(config.get("text"), Mapping):
        asked = config["text"].get("format")  # OpenAI Responses
    if not isinstance(asked, Mapping):
        return None
    schema = (asked.get("json_schema") or {}).get("schema") or asked.get("schema")
    return schema if isinstance(schema, dict) else None


def insisted_tool(request: Mapping[str, Any]) -> str | None:
    """Name of the one tool that the model must call, as clients ask for typed answers."""
    body = request.get("body", request)
    choice = body.get("tool_choice") if isinstance(body, Mapping) else None
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name else None


def tool_results(messages: Sequence[Message]) -> dict[str, str]:
    """Results of tools by the id of their call, as later messages brought them back."""
    return {str(m.get("tool_call_id")): _text_of(m.get("content")) for m in messages if m.get("role") == "tool" and m.get("tool_call_id")}


def _each(value: Any) -> Iterator[Mapping[str, Any]]:
    yield from (part for part in value if isinstance(part, Mapping)) if isinstance(value, list | tuple) else ()


def _from_chat(body: Mapping[str, Any]) -> Iterator[Message]:
    for message in _each(body.get("messages")):
        kept = {key: message[key] for key in ("role", "tool_call_id", "name") if message.get(key) is not None}
        kept["role"] = "system" if kept.get("role") == "developer" else str(kept.get("role", "user"))
        kept["content"] = _content_of(message.get("content"))
        functions = [(c, c["function"]) for c in _each(message.get("tool_calls")) if isinstance(c.get("function"), Mapping)]
        if calls := [_chat_call(str(c.get("id") or ""), str(f.get("name") or ""), str(f.get("arguments") or "")) for c, f in functions]:
            kept["tool_calls"] = calls
            kept["content"] = kept["content"] or None
        yield kept


def _from_responses(body: Mapping[str, Any]) -> Iterator[Message]:
    if body.get("instructions"):
        yield {"role": "system", "content": _text_of(body["instructions"])}
    given = body.get("input")
    if isinstance(given, str):
        yield {"role": "user", "content": given}
    said: Message | None = None  # one answer comes back as an item for its text and one for each call
    for item in _each(given):
        kind = item.get("type", "message")
        role = "assistant" if kind == "function_call" else str(item.get("role", "user"))
        if kind == "function_call" or (kind == "message" and role == "assistant"):
            said = said or {"role": "assistant", "content": ""}
            if kind == "function_call":
                call = _chat_call(str(item.get("call_id") or ""), str(item.get("name") or ""), str(item.get("arguments") or ""))
                said.setdefault("tool_calls", []).append(call)
            else:
                said["content"] += _text_of(item.get("content"))
            continue
        if said is not None and kind in ("function_call_output", "message"):
            yield _said(said)
            said = None
        if kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": _text_of(item.get("output"))}
        elif kind == "message":
            yield {"role": "system" if role == "developer" else role, "content": _content_of(item.get("content"))}
    if said is not None:
        yield _said(said)


def _said(message: Message) -> Message:
    return {**message, "content": message["content"] or None} if message.get("tool_calls") else message


def _from_anthropic(body: Mapping[str, Any]) -> Iterator[Message]:
    if body.get("system"):
        yield {"role": "system", "content": _text_of(body["system"])}
    for message in _each(body.get("messages")):
        content, role = message.get("content"), str(message.get("role", "user"))
        parts = list(_each(content))
        for part in parts:
            if part.get("type") == "tool_result":
                yield {"role": "tool", "tool_call_id": str(part.get("tool_use_id") or ""), "content": _text_of(part.get("content"))}
        calls = [
            _chat_call(str(part.get("id") or ""), str(part.get("name") or ""), json.dumps(part.get("input") or {}, ensure_ascii=False))
            for part in parts
            if part.get("type") == "tool_use"
        ]
        said = _content_of(
            content if isinstance(content, str) else [p for p in parts if p.get("type") not in ("tool_use", "tool_result", "thinking")]
        )
        if calls:
            yield {"role": role, "content": said or None, "tool_calls": calls}
        elif said or not parts:
            yield {"role": role, "content": said}


def _from_canonical(body: Mapping[str, Any]) -> Iterator[Message]:
    if body.get("system"):
        system = body["system"]
        yield {"role": "system", "content": system if isinstance(system, str) else _text_of(list(system))}
    for message in _each(body.get("messages")):
        parts, role = list(_each(message.get("parts"))), str(message.get("role", "user"))
        if "parts" not in message:
            yield {"role": role, "content": _content_of(message.get("content") or message.get("text"))}
        elif role == "tool":
            for part in parts:
                content = part.get("content")
                yield {"role": "tool", "tool_call_id": str(part.get("id") or ""), "content": _text_of(list(content) if content else "")}
        else:
            answer = _canonical_answer({"message": message})
            said = _content_of([part for part in parts if part.get("type") not in ("tool_call", "thinking")])
            yield {**answer.message, "role": role, "content": said or None if answer.tools else said}


def answer_of(dialect: str | None, body: Mapping[str, Any]) -> Answer:
    """What a response says, in the dialect of its request (None: DSPy's canonical form)."""
    reader = {"chat": _chat_answer, "responses": _responses_answer, "messages": _anthropic_answer}.get(str(dialect), _canonical_answer)
    return reader(body)


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _chat_answer(body: Mapping[str, Any]) -> Answer:
    found = Answer()
    choice = next(_each(body.get("choices")), {})
    message = choice.get("message") or {}
    found.text, found.finish = _text_of(message.get("content")), choice.get("finish_reason")
    for call in _each(message.get("tool_calls")):
        function = call.get("function") or {}
        found.tools.append((str(call.get("id") or ""), str(function.get("name") or ""), str(function.get("arguments") or "")))
    usage = body.get("usage") or {}
    found.prompt_tokens, found.completion_tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    tokens = list(_each((choice.get("logprobs") or {}).get("content")))
    if tokens:
        if all(token.get("logprob") is not None for token in tokens):
            found.logprobs = tuple(float(token["logprob"]) for token in tokens)
        made = _count((body.get("timings") or {}).get("predicted_n")) if found.completion_tokens is None else found.completion_tokens
        if made == len(tokens) and all("id" in token for token in tokens):  # of a letter that several make up llama.cpp tells the last one alone
            found.token_ids = tuple(int(token["id"]) for token in tokens)
    return found


def _responses_answer(body: Mapping[str, Any]) -> Answer:
    found = Answer()
    for item in _each(body.get("output")):
        if item.get("type") == "message":
            found.text += _text_of(item.get("content"))
        elif item.get("type") == "function_call":
            found.tools.append((str(item.get("call_id") or ""), str(item.get("name") or ""), str(item.get("arguments") or "")))
    reason = (body.get("incomplete_details") or {}).get("reason")
    found.finish = "length" if reason == "max_output_tokens" else reason or ("tool_calls" if found.tools else "stop")
    usage = body.get("usage") or {}
    found.prompt_tokens, found.completion_tokens = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
    return found


def _anthropic_answer(body: Mapping[str, Any]) -> Answer:
    found = Answer()
    for part in _each(body.get("content")):
        if part.get("type") == "text":
            found.text += str(part.get("text") or "")
        elif part.get("type") == "tool_use":
            found.tools.append((str(part.get("id") or ""), str(part.get("name") or ""), json.dumps(part.get("input") or {}, ensure_ascii=False)))
    reason = body.get("stop_reason")
    found.finish = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}.get(str(reason), reason)
    usage = body.get("usage") or {}
    counts = [_count(usage.get(name)) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")]
    found.prompt_tokens = sum(count or 0 for count in counts) if counts[0] is not None else None
    found.completion_tokens = _count(usage.get("output_tokens"))
    return found


def _canonical_answer(body: Mapping[str, Any]) -> Answer:
    found = Answer()
    for part in _each((body.get("message") or {}).get("parts")):
        if part.get("type") == "text":
            found.text += str(part.get("text") or "")
        elif part.get("type") == "tool_call":
            arguments = part.get("input")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            found.tools.append((str(part.get("id") or ""), str(part.get("name") or ""), text))
    found.finish = {"tool_call": "tool_calls"}.get(str(body.get("finish_reason")), body.get("finish_reason"))
    usage = body.get("usage") or {}
    found.prompt_tokens, found.completion_tokens = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
    return found


def read_events(dialect: str, events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, bool]:
    """A streamed answer's events as the body that would have come unstreamed, and whether the stream came to its end.

    None where no event carried any of an answer.
    """
    return {"chat": _chat_events, "responses": _responses_events, "messages": _anthropic_events}[dialect](events)


def _chat_events(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, bool]:
    body: dict[str, Any] = {}
    text, calls, tokens, finish = [], dict[int, dict[str, Any]](), [], None
    for event in events:
        body.update({key: event[key] for key in ("id", "model", "created", "usage", "system_fingerprint", "timings") if event.get(key) is not None})
        choice = next((c for c in _each(event.get("choices")) if c.get("index", 0) == 0), None)
        if choice is None:
            continue
        delta = choice.get("delta") or {}
        text.append(delta.get("content") or "")
        tokens += list(_each((choice.get("logprobs") or {}).get("content")))
        finish = choice.get("finish_reason") or finish
        for part in _each(delta.get("tool_calls")):
            call = calls.setdefault(part.get("index", len(calls)), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call["id"] = part.get("id") or call["id"]
            function = part.get("function") or {}
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""
    if not body:
        return None, False
    message: Message = {"role": "assistant", "content": "".join(text) or None if calls else "".join(text)}
    if calls:
        message["tool_calls"] = [calls[at] for at in sorted(calls)]
    choice_: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
    if tokens:
        choice_["logprobs"] = {"content": tokens}
    return {"object": "chat.completion", **body, "choices": [choice_]}, finish is not None


def _responses_events(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, bool]:
    body: dict[str, Any] | None = None
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, at = event.get("type"), event.get("output_index", 0)
        if kind in ("response.completed", "response.incomplete", "response.failed") and isinstance(event.get("response"), Mapping):
            return dict(event["response"]), kind != "response.failed"
        if kind in ("response.created", "response.in_progress"):
            body = dict(event.get("response") or {})
        elif kind == "response.output_item.added":
            items[at] = json.loads(json.dumps(event.get("item") or {}))
        elif kind == "response.output_text.delta":
            item = items.setdefault(at, {"type": "message", "role": "assistant", "content": []})
            item["content"] = [{"type": "output_text", "text": _text_of(item.get("content")) + str(event.get("delta") or "")}]
        elif kind == "response.function_call_arguments.delta":
            item = items.setdefault(at, {"type": "function_call"})
            item["arguments"] = str(item.get("arguments") or "") + str(event.get("delta") or "")
    return (None if body is None else {**body, "output": [items[at] for at in sorted(items)]}), False


def _anthropic_events(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, bool]:
    body: dict[str, Any] | None = None
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    ended = False
    for event in events:
        kind, at = event.get("type"), event.get("index", 0)
        if kind == "message_start":
            body = dict(event.get("message") or {})
        elif kind == "content_block_start":
            blocks[at] = dict(event.get("content_block") or {})
        elif kind == "content_block_delta":
            delta, block = event.get("delta") or {}, blocks.setdefault(at, {"type": "text", "text": ""})
            if delta.get("type") == "text_delta":
                block["text"] = str(block.get("text") or "") + str(delta.get("text") or "")
            elif delta.get("type") == "thinking_delta":
                block["thinking"] = str(block.get("thinking") or "") + str(delta.get("thinking") or "")
            elif delta.get("type") == "input_json_delta":
                inputs[at] = inputs.get(at, "") + str(delta.get("partial_json") or "")
        elif kind == "message_delta" and body is not None:
            body.update({key: value for key, value in (event.get("delta") or {}).items() if value is not None})
            body["usage"] = {**(body.get("usage") or {}), **(event.get("usage") or {})}
        elif kind == "message_stop":
            ended = True
    if body is None:
        return None, False
    for at, text in inputs.items():
        try:
            blocks[at]["input"] = json.loads(text or "{}")
        except (ValueError, RecursionError):
            blocks[at]["input"] = {"arguments": text}  # not JSON: kept as it came
    return {**body, "content": [blocks[at] for at in sorted(blocks)]}, ended
