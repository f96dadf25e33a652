"""Converts messages and tools of traces to OpenAI chat messages, the format of imported calls.

Reads the formats of the OpenTelemetry GenAI conventions, OpenAI (chat, completions, responses), Anthropic, Bedrock,
Gemini, LangChain, OpenInference, the Vercel AI SDK, Semantic Kernel, Google ADK and Strands. Parts without a chat
equivalent are kept unchanged. Any other object is an `UnknownShape`. Does not read files.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.traces.importers.otlp import UnknownShape, as_text, count_of, filled, first_of, parsed, tools_of
from assay.traces.messages.chaining import unfinished
from assay.traces.messages.final_answer import argument_value, ends_run
from assay.traces.messages.parts import linked

# -- Converts pydantic-ai's own message format, which MLflow records, to chat messages. Does not read files.
#
# Source: pydantic_ai/messages.py; the position of the instructions follows pydantic_ai/models/openai.py.


Message = dict[str, Any]


def is_native(value: Any) -> bool:
    """Whether a value is a `ModelRequest` or `ModelResponse`."""
    parts = value.get("parts") if isinstance(value, Mapping) else None
    return (
        isinstance(parts, list)
        and bool(parts)
        and all(isinstance(part, Mapping) and "part_kind" in part for part in parts)
    )


def native_conversation(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Chat messages of a conversation. The instructions of the latest request follow the system prompts, as when
    sent.
    """
    chat = [message for native in messages for message in _messages(native)]
    instructions = next((native["instructions"] for native in reversed(messages) if native.get("instructions")), None)
    if instructions:
        position = next((position for position, message in enumerate(chat) if message["role"] != "system"), len(chat))
        chat.insert(position, {"role": "system", "content": str(instructions)})
    return chat


def _messages(native: Mapping[str, Any]) -> Iterator[Message]:
    """One message per part of a request; one message for all parts of a response."""
    parts = [(part.get("part_kind"), part) for part in native["parts"] if isinstance(part, Mapping)]
    answers = {"text", "tool-call", "thinking"}.intersection(kind for kind, _ in parts)
    if native.get("kind") != "response" and not answers:
        for kind, part in parts:
            yield from _request_messages(kind, part)
        return
    text, thought = (
        "".join(str(part.get("content") or "") for kind, part in parts if kind == wanted)
        for wanted in ("text", "thinking")
    )
    calls = [
        _call({"id": part.get("tool_call_id"), "name": part.get("tool_name"), "args": part.get("args") or "{}"})
        for kind, part in parts
        if kind == "tool-call"
    ]
    message: Message = {"role": "assistant", "content": text or (None if calls else "")}
    yield message | filled(tool_calls=calls, reasoning_content=thought)


def _request_messages(kind: Any, part: Mapping[str, Any]) -> Iterator[Message]:
    content = part.get("content")
    if kind == "system-prompt":
        yield {"role": "system", "content": as_text(content)}
    elif kind == "user-prompt":
        yield {
            "role": "user",
            "content": [*map(_user_part, content)] if isinstance(content, list) else as_text(content),
        }
    elif kind == "tool-return" or (kind == "retry-prompt" and part.get("tool_name")):
        yield {"role": "tool", "tool_call_id": str(part.get("tool_call_id") or ""), "content": as_text(content)}
    elif content is not None:
        yield {"role": "user", "content": as_text(content)}


def _user_part(part: Any) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("kind") == "image-url":
        return {"type": "image_url", "image_url": {"url": str(part.get("url"))}}
    return dict(part) if isinstance(part, Mapping) else {"type": "text", "text": str(part)}


def native_tools(parameters: Any) -> list[dict[str, Any]]:
    """Tools of `ModelRequestParameters`: the agent's tools and the output tools that end a run with a typed answer."""
    listed = parameters if isinstance(parameters, Mapping) else {}
    return [tool for name in ("function_tools", "output_tools") for tool in tools_of(listed.get(name) or [])]


def native_settings(parameters: Any) -> dict[str, Any]:
    """Settings in `ModelRequestParameters`: a tool must be called if text is not allowed."""
    must_call = isinstance(parameters, Mapping) and parameters.get("allow_text_output") is False
    return {"tool_choice": "required"} if must_call else {}


# -- Chat.


_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "model": "assistant", "function": "tool"}
_ROLE_NAMES = frozenset(("system", "developer", "user", "assistant", "tool", *_ROLES))
_CALLS = ("tool_call", "tool-call", "tool_use", "toolUse", "functionCall", "function_call")
_RESULTS = (
    "tool_call_response",
    "tool-result",
    "tool_result",
    "toolResult",
    "function_call_output",
    "functionResponse",
    "function_response",
    "function_result",
)
_REASONING = ("reasoning", "thinking", "reasoningContent")
_THOUGHTS = ("content", "thinking", "text", "reasoningText")  # fields with its text
_OUTPUTS = ("text", "json", "content", "error-text", "error-json")  # kinds of results of the Vercel AI SDK
_KEPT = frozenset(  # parts without a chat equivalent
    (
        *("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "document", "media"),
        *("file", "input_file", "file_data", "fileData", "inlineData", "inline_data", "blob", "uri", "source"),
        *("executableCode", "executable_code", "codeExecutionResult", "code_execution_result", "cachePoint"),
        *("server_tool_use", "web_search_tool_result", "redacted_thinking", "guardContent", "citation"),
    )
)
_WRAPPED = (
    "message_content",
    "toolUse",
    "functionCall",
    "function_call",
    "toolResult",
    "functionResponse",
    "function_response",
    "reasoningContent",
)
_TEXTS = ("prompt", "input", "query", "question", "text", "user_prompt")  # fields with the text of a request
_INSTRUCTIONS = ("system", "instructions", "system_instruction", "systemInstruction")
_SETTINGS = (
    "model",
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "n",
    "frequency_penalty",
    "presence_penalty",
    "tool_choice",
    "response_format",
    "parallel_tool_calls",
    "reasoning_effort",
    "logprobs",
    "top_logprobs",
)


def text_of(content: Any) -> str:
    """Text of a message's content."""
    parts = content if isinstance(content, list) else [content]
    return "".join(
        part if isinstance(part, str) else str(part.get("text") or "") for part in parts if isinstance(part, str | dict)
    )


_CALL_IDS = ("id", "call_id", "tool_use_id", "toolUseId", "toolCallId")


def is_call(value: Any) -> bool:
    """Whether a value is a tool call of a model on its own, as OpenAI or the Vercel AI SDK write it."""
    return isinstance(value, dict) and ("toolName" in value or isinstance(value.get("function"), dict))


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    inner = call.get("tool_call")
    call = inner if isinstance(inner, dict) else call
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = first_of(function, ("arguments", "args", "input"), {})
    called = {"name": as_text(function.get("name") or function.get("toolName")), "arguments": as_text(arguments)}
    return {"id": _call_id(call), "type": "function", "function": called}


def _call_id(part: Mapping[str, Any]) -> str:
    return str(next((part[key] for key in _CALL_IDS if part.get(key)), ""))


def _file(part: Mapping[str, Any]) -> Any:
    """Images as OpenAI's `image_url`, by address or inline; other files unchanged."""
    url = part.get("uri")
    if not url and part.get("type") == "blob":
        url = f"data:{part.get('mime_type') or 'image/png'};base64,{part.get('content')}"
    return {"type": "image_url", "image_url": {"url": url}} if part.get("modality") == "image" and url else dict(part)


class _Parts:
    """Collects the parts of one message."""

    def __init__(self) -> None:
        self.content: list[Any] = []
        self.calls: list[dict[str, Any]] = []
        self.results: list[Message] = []
        self.reasoning: list[str] = []
        self.refusal = ""

    @property
    def message_content(self) -> Any:
        """Content: a single text as a string, otherwise a list of parts; None next to tool calls without text."""
        if not self.content:
            return None if self.calls else ""
        part = self.content[0] if len(self.content) == 1 else {}
        return (part["text"] or (None if self.calls else "")) if part.get("type") == "text" else self.content

    def take(self, part: Any) -> None:
        if not isinstance(part, dict):
            if isinstance(part, list):
                raise UnknownShape
            self.content += [] if part is None else [{"type": "text", "text": as_text(part)}]
            return
        kind = next((part[key] for key in ("type", "content_type") if isinstance(part.get(key), str)), None)
        if kind in (None, "function") and (is_call(part) or {"name", "arguments"} <= part.keys()):
            kind = "tool_call"
        elif kind is None and (wrap := next((key for key in _WRAPPED if isinstance(part.get(key), dict)), None)):
            part = part[wrap]
            kind = part.get("type") if wrap == "message_content" else wrap
        if part.get("thought") is True and "text" in part:  # Gemini's
            kind = "thinking"
        if kind in ("text", "input_text", "output_text", None) and ("text" in part or "content" in part):
            self.content.append({"type": "text", "text": as_text(part["text"] if "text" in part else part["content"])})
        elif kind in _CALLS:
            self.calls.append(_call(part))
        elif kind in _RESULTS:
            result = result_text(first_of(part, ("response", "result", "content", "output")))
            self.results.append({"role": "tool", "tool_call_id": _call_id(part), "content": result})
        elif kind == "refusal":
            self.refusal += as_text(next((part[key] for key in ("refusal", "content", "text") if part.get(key)), ""))
        elif kind in _REASONING:
            self.reasoning.append(_thought(part))
        elif kind in _KEPT or (kind is None and len(part) == 1 and next(iter(part)) in _KEPT):
            self.content.append(_file(part))
        else:
            raise UnknownShape


def _thought(part: Any) -> str:
    """Text of a part with reasoning. Bedrock nests it."""
    if not isinstance(part, dict):
        return as_text(part)
    return _thought(first_of(part, _THOUGHTS, ""))


def result_text(value: Any) -> str:
    """Result of a tool as text: texts joined, the content of LangChain's and the value of Vercel's results.

    Anything else is as it is, or JSON.
    """
    result = parsed(value)
    if isinstance(result, dict) and result.get("type") == "tool" and "content" in result:
        return text_of(result["content"])
    if isinstance(result, dict) and "value" in result and result.get("type") in _OUTPUTS:
        value = result = result["value"]
    parts = result if isinstance(result, list) else []
    if parts and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return text_of(parts)
    return as_text(value)


_CONTENTS = ("parts", "contents", "content", "blocks", "items")
_HELD = frozenset(
    (
        *(*_CONTENTS, "tool_calls", "toolCalls", "function_call"),
        *("refusal", "reasoning_content", "reasoning", "audio"),
    )
)
_ABOUT = frozenset(("role", "type", "id", "name", "index", "finish_reason", "tool_call_id", "message"))


def _role(name: str) -> str:
    known = name if name in _ROLE_NAMES else name.lower()
    return _ROLES.get(known, known) if known in _ROLE_NAMES else name


def _is_pair(item: Any) -> bool:
    """Whether a value is a role and a text, a short form of LangChain's messages."""
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and item[0] in _ROLE_NAMES


def messages_of(item: Any, default: str) -> Iterator[Message]:
    """Convert one message of any tracer. A message with tool results becomes several chat messages."""
    if not isinstance(item, dict):
        role, content = item if _is_pair(item) else (default, item)
        if isinstance(content, list | dict):
            raise UnknownShape
        yield {"role": _role(role), "content": as_text(content)}
        return
    if is_native(item):
        yield from native_conversation([item])
        return
    inner = item.get("message", item.get("kwargs") if "lc" in item else None)
    item = inner if isinstance(inner, dict) else item
    if isinstance(item.get("content"), dict) and "parts" in item["content"]:  # Google ADK's events
        item = {**item, **item["content"], "content": None}
    kind = item.get("type")
    role = item.get("role") or (kind if isinstance(kind, str) and kind in _ROLE_NAMES else default)
    role = _role(role) if isinstance(role, str) else default
    if not (item.keys() & _HELD or (item.keys() <= _ABOUT and ("role" in item or "type" not in item))):
        raise UnknownShape  # also a reference to an item, which has a type and an id alone
    parts, content = _Parts(), first_of(item, _CONTENTS)
    try:
        for part in content if isinstance(content, list) else [content]:
            parts.take(part)
    except UnknownShape:
        if role != "tool":
            raise
        parts.content = [{"type": "text", "text": result_text(content)}]  # a tool may return anything
    calls = parsed(item.get("tool_calls") or item.get("toolCalls"))
    if calls is None and isinstance(item.get("function_call"), dict):  # OpenAI's, before tools
        calls = [item["function_call"]]
    if isinstance(calls, list):
        # Some tracers write calls both as parts and in `tool_calls`.
        known = {call["id"] for call in parts.calls if call["id"]}
        parts.calls += [call for call in map(_call, filter(_is_object, calls)) if call["id"] not in known]
    yield from parts.results
    if parts.results and not parts.content and not parts.calls:
        return
    message: Message = {"role": role, "content": parts.message_content}
    if role == "tool":
        message["tool_call_id"] = str(item.get("tool_call_id") or item.get("id") or "")
    elif isinstance(item.get("name"), str):
        message["name"] = item["name"]
    refusal = item["refusal"] if isinstance(item.get("refusal"), str) else parts.refusal
    message |= filled(tool_calls=parts.calls, refusal=refusal)
    if isinstance(item.get("audio"), dict):
        message["audio"] = item["audio"]
    yield message | filled(reasoning_content=item.get("reasoning_content") or "\n".join(parts.reasoning))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_message(value: Any) -> bool:
    """Whether a value is a message of a known format."""
    if not isinstance(value, dict):
        return _is_pair(value)
    if isinstance(value.get("message"), dict) or "lc" in value or is_native(value):
        return True
    return "role" in value or ("type" in value and ("content" in value or "call_id" in value)) or _reasons(value)


def _reasons(item: Any) -> bool:
    """Whether a value is an item of the Responses API with the model's reasoning."""
    return isinstance(item, dict) and item.get("type") == "reasoning" and "summary" in item


def conversation_of(value: Any) -> list[Message] | None:
    """Convert a list of messages; None if the value is not one."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]  # LangChain's batch of one
    if isinstance(value, dict) and is_message(value):
        value = [value]
    if not isinstance(value, list) or not value or not all(is_message(item) for item in value):
        return None
    if all(map(is_native, value)):
        return native_conversation(value)
    value = [item for item in value if not _defines(item) and not _reasons(item)]
    items = [{"role": "tool" if "output" in m else "assistant", "parts": [m]} if "call_id" in m else m for m in value]
    return linked([message for item in items for message in messages_of(item, "user")])


def _defines(message: Any) -> bool:
    """Whether a message is a tool definition: Langfuse writes LangChain's definitions as messages of role `tool`."""
    if not isinstance(message, dict) or message.get("role") != "tool" or message.get("tool_call_id"):
        return False
    content = parsed(message.get("content"))
    return isinstance(content, dict) and content.get("type") == "function" and isinstance(content.get("function"), dict)


def _texts(value: Any) -> list[Message]:
    """Messages of the user: a text, or a list of texts and messages."""
    if isinstance(value, list) and not all(isinstance(item, str | dict | list) for item in value):
        raise UnknownShape
    return [m for item in (value if isinstance(value, list) else [value]) for m in messages_of(item, "user")]


def body_of(value: Any) -> dict[str, Any]:
    """Body of a request: `messages`, and `tools` and settings if the value has them.

    Args:
        value: The request in any format. A text may be JSON, or the question itself.
    Raises:
        UnknownShape: It is an object or a list in no known format.
    """
    request = parsed(value)
    if request is None or request == "" or (request == {} and not isinstance(value, str)):
        return {"messages": []}
    if isinstance(request, dict) and request and set(request) <= {"args", "kwargs"}:
        items = request.get("args")
        return body_of(request.get("kwargs") or (items[0] if isinstance(items, list) and len(items) == 1 else items))
    if not isinstance(request, dict) or (is_message(request) and "messages" not in request):
        return {**filled(tools=tools_of(_defined(request))), "messages": conversation_of(request) or _texts(value)}
    if isinstance(request.get("config"), dict):  # Google's
        request = {**request["config"], **request}
    if request.get("previous_response_id") or ("input" in request and request.get("conversation")):
        raise UnknownShape  # the server adds earlier messages, which are not in it
    others = () if isinstance(value, str) else ("chat_history", "prompts", *_TEXTS)
    listed = request["input"] if isinstance(request.get("input"), list) else None
    items = first_of(request, ("messages", "contents", *others), listed)
    if items is None:
        return {"messages": _texts(value)}
    if isinstance(items, dict) and not is_message(items):
        return body_of(items)
    messages = conversation_of(parsed(items)) or _texts(items)
    if system := next((request[key] for key in _INSTRUCTIONS if request.get(key)), None):
        content = system if isinstance(system, dict) else {"content": system}
        messages = [*messages_of({**content, "role": "system"}, "system"), *messages]
    return {**settings_of(request, items), "messages": messages}


def _defined(messages: Any) -> list[Any]:
    """The tool definitions among messages."""
    return [message["content"] for message in messages if _defines(message)] if isinstance(messages, list) else []


def settings_of(request: Mapping[str, Any], items: Any = ()) -> dict[str, Any]:
    """Settings and `tools` of a request.

    Args:
        items: Its messages; Langfuse writes LangChain's tool definitions as messages.
    """
    parameters, settings = request.get("model_request_parameters"), request.get("model_settings")  # pydantic-ai's
    values = {**(settings if isinstance(settings, dict) else {}), **native_settings(parameters), **request}
    if (limit := request.get("max_output_tokens", request.get("maxOutputTokens"))) is not None:
        values.setdefault("max_tokens", limit)
    config = request.get("toolConfig")  # Bedrock's
    listed = request.get("tools") or (config.get("tools") if isinstance(config, dict) else None) or _defined(items)
    known = {key: values[key] for key in _SETTINGS if values.get(key) is not None}
    return known | filled(tools=tools_of(listed) or native_tools(parameters))


# -- Answers of traces as choices of chat completions, from the formats that `assay.traces.importers.chat` reads.


_FINISH = {
    **dict.fromkeys(("tool_call", "tool_calls", "tool_use", "function_call", "function_calls"), "tool_calls"),
    **dict.fromkeys(("stop", "end_turn", "stop_sequence", "eos", "eos_token", "complete"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "model_length"), "length"),
    "content_filter": "content_filter",  # other refusals keep their reason
}
_BLOCKS = (  # of one answer
    *("text", "thinking", "redacted_thinking", "reasoning", "tool_use", "tool-call"),
    *("server_tool_use", "web_search_tool_result", "image"),
)
_REPLIES = ("choices", "candidates", "generations")  # OpenAI, Gemini, LangChain
_SURE = (*_REPLIES, "role", "parts", "tool_calls", "toolCalls")
_SAID = frozenset(("role", "content", "parts", "text", "tool_calls", "toolCalls"))
_TEXT = frozenset(("content", "text", "reasoning_content", "logprobs", "citations"))  # as DSPy's models return it
_REASONS = ("finish_reason", "stop_reason", "finishReason", "stopReason")


def answers_of(value: Any, reasons: Any = None, *, count: Any = None) -> list[dict[str, Any]]:
    """Choices of an answer, each with `index`, `message` and `finish_reason`; empty without an answer.

    Several messages without finish reasons of their own are the pieces of one answer, as tracers record a stream.
    Those with different indexes are different choices.

    Args:
        value: The answer in any format. A text may be JSON in a known format; otherwise it is the answer itself.
        reasons: Finish reasons by choice, used if a choice has none.
        count: Number of choices that the request asked for, if it did.
    Raises:
        UnknownShape: It is an object or a list in no known format.
    """
    answer, reasons = parsed(value), parsed(reasons)
    if isinstance(answer, dict) and (_has_no_answer(answer) or (answer.get("partial") is True and "content" in answer)):
        raise UnknownShape  # of the Responses API, or one piece of a stream of Google ADK
    if answer in (None, "") or (answer == {} and not isinstance(value, str)):
        return []
    if not _is_answer(answer, strict=isinstance(value, str)):
        if isinstance(value, dict | list):
            raise UnknownShape
        answer = as_text(value)
    reasons = reasons if isinstance(reasons, list) else [reasons]
    pieces = isinstance(answer, list) and all(isinstance(item, dict) and not _is_block(item) for item in answer)
    groups = _by_index(answer) if pieces else [answer]
    choices: list[tuple[dict[str, Any], Any]] = []
    for group in groups:
        read = [(_message(message), reason) for message, reason in _choices(group)]
        choices += _joined(read) if pieces and (len(groups) > 1 or len(read) not in (len(reasons), count)) else read
    reasons = [*reasons, *[None] * len(choices)]
    return [
        {"index": index, "message": message, "finish_reason": _finish(reason or reasons[index])}
        for index, (message, reason) in enumerate(choices)
    ]


def _message(value: Any) -> dict[str, Any]:
    chat_message = next((m for m in messages_of(value, "assistant") if m["role"] != "tool"), {"content": ""})
    return {**chat_message, "role": "assistant"}


def _finish(reason: Any) -> Any:
    """A finish reason in OpenAI's words, from those of any API and from the names of enumerations."""
    name = str(reason).rpartition(".")[2].lower().replace("-", "_")
    return _FINISH.get(name, reason)


def _by_index(items: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Messages by the index of the choice that they name; those without one belong together."""
    groups: dict[int | None, list[dict[str, Any]]] = {}
    for item in items:
        groups.setdefault(count_of(item.get("index")), []).append(item)
    return [groups[index] for index in sorted(groups, key=lambda index: -1 if index is None else index)]


def _joined(choices: list[tuple[dict[str, Any], Any]]) -> list[tuple[dict[str, Any], Any]]:
    """Choices in which each message without a finish reason continues in the next one."""
    result: list[tuple[dict[str, Any], Any]] = []
    is_open = False
    for message, reason in choices:
        if is_open:
            begun, _ = result.pop()
            message = _continued(begun, message)
        result.append((message, reason))
        is_open = not reason
    return result


def _continued(begun: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
    """A message and its continuation: the texts in one string, the tool calls and other parts in one list."""
    contents = [each["content"] for each in (begun, piece) if each["content"]]
    content: Any = "".join(contents) if all(isinstance(text, str) for text in contents) else []
    for part in contents if content == [] else ():
        content += [{"type": "text", "text": part}] if isinstance(part, str) else part
    calls = [*begun.get("tool_calls", ()), *piece.get("tool_calls", ())]
    reasoning = begun.get("reasoning_content", "") + piece.get("reasoning_content", "")
    more = filled(tool_calls=calls, reasoning_content=reasoning)
    return {**begun, **piece, "content": content or None if calls else content, **more}


def _has_no_answer(body: dict[str, Any]) -> bool:
    """Whether a response of the Responses API goes on in the background, or ended without any output."""
    ended = body.get("object") == "response" and body.get("status") in ("failed", "cancelled")
    return unfinished(body) or (ended and not body.get("output"))


def _is_answer(value: Any, *, strict: bool) -> bool:
    """Whether a value is an answer in the format of an API.

    Args:
        strict: The value was text, which may also be JSON that the model wrote.
    """
    if isinstance(value, list):
        if not strict and value and all(isinstance(item, str) for item in value):
            return True
        return bool(value) and all(
            isinstance(item, dict) and (_is_block(item) or _is_answer(item, strict=strict)) for item in value
        )
    if not isinstance(value, dict):
        return False
    if any(key in value for key in (*_SURE, *_REASONS)) or is_call(value):
        return True
    if any(_is_answer(value.get(key), strict=True) for key in ("message", "output")):
        return True
    return not strict and (
        is_message(value)
        or "message" in value
        or isinstance(value.get("output"), list | dict)
        or isinstance(value.get("content"), dict)
        or (bool(value) and set(value) <= _TEXT)
    )


def _is_block(value: Any) -> bool:
    return isinstance(value, dict) and "role" not in value and (value.get("type") in _BLOCKS or is_call(value))


def _choices(answer: Any) -> Iterator[tuple[Any, Any]]:
    """Message of each choice in the tracer's format, and its finish reason."""
    if isinstance(answer, list):
        if all(_is_block(item) for item in answer):
            yield {"content": answer}, None
            return
        for item in answer:
            yield from _choices(item)
        return
    if not isinstance(answer, dict):
        yield {"content": answer}, None
        return
    listed = next((answer[key] for key in _REPLIES if isinstance(answer.get(key), list)), None)
    if listed is not None:
        for item in listed[0] if listed and isinstance(listed[0], list) else listed:
            yield from _choices(item)
        return
    if isinstance(answer.get("output"), list):  # OpenAI's responses
        parts = [p for item in answer["output"] if isinstance(item, dict) for p in _output_parts(item)]
        yield {"parts": parts}, "tool_calls" if any(p.get("type") == "function_call" for p in parts) else "stop"
        return
    reason = next((answer[key] for key in _REASONS if answer.get(key)), None)
    if isinstance(answer.get("output"), dict) and "message" in answer["output"]:  # Bedrock's
        answer = answer["output"]
    inner = parsed(answer["message"]) if "message" in answer else answer
    if isinstance(inner, dict) and not (inner.keys() & _SAID):
        inner = answer.get("message", inner)  # JSON that the model wrote
    inner = inner.get("content") if isinstance(inner, dict) and isinstance(inner.get("content"), dict) else inner
    if isinstance(inner, dict) and "content" not in inner and "parts" not in inner and "text" in inner:
        inner = {**inner, "content": inner["text"]}
    if answer.get("tool_calls") and isinstance(inner, dict):  # Semantic Kernel of .NET
        inner = {"tool_calls": answer["tool_calls"], **inner}
    yield (inner if isinstance(inner, dict) else {"content": inner}), reason


def _output_parts(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if item.get("type") == "function_call":
        return [item]
    content = item.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


# -- Converts the inputs, outputs and tool arguments of traces to named fields. Does not read files.


def as_inputs(value: Any) -> dict[str, Any]:
    """Fields of an input.

    An object has its own fields, a function call its arguments. One user message becomes `input`, a conversation
    `messages`.
    """
    parsed_value = parsed(value)
    if parsed_value in (None, "", []):
        return {}
    messages = conversation_of(parsed_value)
    if messages is not None:
        questions = [message for message in messages if message["role"] not in ("system", "developer")]
        is_question = len(questions) == 1 and questions[0]["role"] == "user"
        return {"input": questions[0]["content"]} if is_question else {"messages": messages}
    if isinstance(parsed_value, dict) and "args" in parsed_value and set(parsed_value) <= {"args", "kwargs"}:
        arguments, named = parsed_value["args"], parsed_value.get("kwargs")
        if not arguments:
            return dict(named) if isinstance(named, dict) else {}
        if not named and isinstance(arguments, list) and len(arguments) == 1:
            return as_inputs(arguments[0]) or {"input": arguments[0]}
    return _fields(parsed_value, "input")


def _fields(value: Any, name: str) -> dict[str, Any]:
    """The fields of an object; another value as the field `name`."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {name: value}


def as_prediction(value: Any) -> dict[str, Any] | None:
    """Fields of an output: those of an object, otherwise `output`; None without an output."""
    parsed_value = parsed(value)
    if parsed_value in (None, "", []):
        return None
    messages = conversation_of(parsed_value)
    return _fields(parsed_value, "output") if messages is None else _last_answer(messages)


def _last_answer(messages: list[Message]) -> dict[str, Any] | None:
    """Answer of a conversation: its last text, or the arguments of the tool call that ended it.

    The result of that call may follow it. None if the last message requests other tools.
    """
    last = next((message for message in reversed(messages) if message["role"] != "tool"), messages[-1])
    calls = [call["function"] for call in last.get("tool_calls") or ()]
    if (final := next((call for call in calls if ends_run(call["name"])), None)) is not None:
        return {"output": argument_value(final["arguments"])}
    text = text_of(messages[-1]["content"])
    return {"output": text} if text or not messages[-1].get("tool_calls") else None


def as_arguments(value: Any) -> dict[str, Any]:
    """Arguments of a tool by name; a value that is not an object is stored under `arguments`."""
    arguments = parsed(value)
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict) and set(arguments) == {"args", "kwargs"}:
        named = dict(arguments["kwargs"]) if isinstance(arguments["kwargs"], dict) else {}
        return {**({"args": arguments["args"]} if arguments["args"] else {}), **named}
    return _fields(arguments, "arguments")


# -- Extracts the output of a run from the result objects of agent libraries, graph states and API replies.
#
# Does not read files.


_OPEN_LLMETRY = frozenset(("outputs", "kwargs", "tags", "metadata"))


def unwrapped(value: Any) -> dict[str, Any] | None:
    """Convert an output to the fields of a prediction; None if it has no answer.

    Reads results of pydantic-ai, the OpenAI Agents SDK and CrewAI, states of LangGraph and AutoGen with `messages`,
    replies of model APIs, and the outputs of OpenLLMetry's spans. Any other object is returned with its own fields.
    """
    output = parsed(value)
    if not isinstance(output, Mapping):
        return as_prediction(value)
    if isinstance(output.get("outputs"), dict | list | str) and not set(output) - _OPEN_LLMETRY:
        return unwrapped(output["outputs"])
    talk = output.get("messages")
    if isinstance(talk, list) and talk and all(isinstance(message, dict) for message in talk):
        return _state(output)
    for name, companions in (
        ("output", ("_state", "_output_tool_name")),
        ("final_output", ("raw_responses", "new_items")),
        ("raw", ("tasks_output",)),
    ):
        if name in output and any(other in output for other in companions):
            return as_prediction(output[name])
    if any(isinstance(output.get(name), list) for name in _REPLIES) or isinstance(output.get("output"), list):
        choices = answers_of(output)
        text = text_of(choices[0]["message"]["content"]) if choices else ""
        return {"output": text} if text else None
    return as_prediction(value)


def _state(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Answer of the messages of a state, with the other fields of the state."""
    others = {str(name): value for name, value in state.items() if name not in ("messages", "stop_reason")}
    fields = {name: value for name, value in others.items() if value not in (None, "", [], {})}
    return fields | filled(output=(as_prediction(state["messages"]) or {}).get("output")) or None
