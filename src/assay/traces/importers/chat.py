"""Converts messages and tools of traces to OpenAI chat messages, the format of imported calls.

Reads the formats of the OpenTelemetry GenAI conventions, OpenAI (chat, completions, responses), Anthropic, Bedrock,
Gemini, LangChain, OpenInference, the Vercel AI SDK, Semantic Kernel, Google ADK and Strands. Parts without a chat
equivalent are kept unchanged. Any other object is an `UnknownShape`. Does not read files.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from assay.traces.importers.pydantic_ai import is_native, native_conversation, native_settings, native_tools
from assay.traces.importers.tools import tools_of
from assay.traces.importers.values import UnknownShape, as_text, parsed
from assay.traces.messages.linking import linked

__all__ = [
    "Message",
    "body_of",
    "conversation_of",
    "is_call",
    "is_message",
    "messages_of",
    "result_text",
    "settings_of",
    "text_of",
]

Message = dict[str, Any]
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
    arguments: Any = next(
        (function[key] for key in ("arguments", "args", "input") if function.get(key) is not None), {}
    )
    call_id = next((call[key] for key in _CALL_IDS if call.get(key)), "")
    text = arguments if isinstance(arguments, str) else as_text(arguments)
    return {
        "id": str(call_id),
        "type": "function",
        "function": {"name": as_text(function.get("name") or function.get("toolName")), "arguments": text},
    }


def _file(part: Mapping[str, Any]) -> Any:
    """Images as OpenAI's `image_url`, by address or inline; other files unchanged."""
    if part.get("modality") == "image" and part.get("uri"):
        return {"type": "image_url", "image_url": {"url": part["uri"]}}
    if part.get("modality") == "image" and part.get("type") == "blob":
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{part.get('mime_type') or 'image/png'};base64,{part.get('content')}"},
        }
    return dict(part)


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
            result = next(
                (part[key] for key in ("response", "result", "content", "output") if part.get(key) is not None), None
            )
            called = next((part[key] for key in _CALL_IDS if part.get(key)), "")
            self.results.append({"role": "tool", "tool_call_id": str(called), "content": result_text(result)})
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
    return next((_thought(part[key]) for key in _THOUGHTS if part.get(key) is not None), "")


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
    parts = _Parts()
    content = next((item[key] for key in _CONTENTS if item.get(key) is not None), None)
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
        parts.calls += [
            call
            for recorded_call in calls
            if isinstance(recorded_call, dict) and (call := _call(recorded_call))["id"] not in known
        ]
    yield from parts.results
    if parts.results and not parts.content and not parts.calls:
        return
    message: Message = {"role": role, "content": parts.message_content}
    if role == "tool":
        message["tool_call_id"] = str(item.get("tool_call_id") or item.get("id") or "")
    elif isinstance(item.get("name"), str):
        message["name"] = item["name"]
    if parts.calls:
        message["tool_calls"] = parts.calls
    if refusal := item["refusal"] if isinstance(item.get("refusal"), str) else parts.refusal:
        message["refusal"] = refusal
    if isinstance(item.get("audio"), dict):
        message["audio"] = item["audio"]
    if reasoning := item.get("reasoning_content") or "\n".join(parts.reasoning):
        message["reasoning_content"] = reasoning
    yield message


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
        tools = (
            tools_of([message["content"] for message in request if _defines(message)])
            if isinstance(request, list)
            else []
        )
        return {
            **({"tools": tools} if tools else {}),
            "messages": conversation_of(request) or _texts(value),
        }
    if isinstance(request.get("config"), dict):  # Google's
        request = {**request["config"], **request}
    if request.get("previous_response_id") or ("input" in request and request.get("conversation")):
        raise UnknownShape  # the server adds earlier messages, which are not in it
    keys = (
        ("messages", "contents")
        if isinstance(value, str)
        else ("messages", "contents", "chat_history", "prompts", *_TEXTS)
    )
    items = next(
        (request[key] for key in keys if request.get(key) is not None),
        request["input"] if isinstance(request.get("input"), list) else None,
    )
    if items is None:
        return {"messages": _texts(value)}
    if isinstance(items, dict) and not is_message(items):
        return body_of(items)
    messages = conversation_of(parsed(items)) or _texts(items)
    system = next(
        (
            request[key]
            for key in ("system", "instructions", "system_instruction", "systemInstruction")
            if request.get(key)
        ),
        None,
    )
    if system is not None:
        messages = [
            *messages_of({**(system if isinstance(system, dict) else {"content": system}), "role": "system"}, "system"),
            *messages,
        ]
    return {**settings_of(request, items), "messages": messages}


def settings_of(request: Mapping[str, Any], items: Any = ()) -> dict[str, Any]:
    """Settings and `tools` of a request.

    Args:
        items: Its messages; Langfuse writes LangChain's tool definitions as messages.
    """
    parameters = request.get("model_request_parameters")  # pydantic-ai's
    request_fields = {
        **(model_settings if isinstance(model_settings := request.get("model_settings"), dict) else {}),
        **native_settings(parameters),
        **request,
    }
    if (limit := request.get("max_output_tokens", request.get("maxOutputTokens"))) is not None:
        request_fields.setdefault("max_tokens", limit)
    settings = {key: request_fields[key] for key in _SETTINGS if request_fields.get(key) is not None}
    listed = [message["content"] for message in items if _defines(message)] if isinstance(items, list) else []
    config = request.get("toolConfig")  # Bedrock's
    tools = tools_of(
        request.get("tools") or (config.get("tools") if isinstance(config, dict) else None) or listed
    ) or native_tools(parameters)
    return {**settings, **({"tools": tools} if tools else {})}
