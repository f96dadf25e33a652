"""The answer of a model, and helpers for message parts that the readers of all dialects share."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.support.values import json_text
from assay.traces.records import ToolCall

Message = dict[str, Any]
_TOOL_ERROR = re.compile(r"(?i:error:)|Traceback \(most recent call last\):|[A-Z]\w*(?:Error|Exception):")
_LISTS, MAPPING = (list, tuple), (dict, Mapping)  # `dict` first: isinstance with `Mapping` alone is slow


@dataclass(slots=True, eq=False)
class Answer:
    """Answer of a model: text, reasoning, refusal, tool calls, finish reason, token counts, token ids and logprobs.

    `tools` are `(id, name, arguments as text)`. `media` are references to parts that are not text: an address, an id,
    or the hash of inline data.
    """

    text: str = ""
    reasoning: str = ""
    refusal: str = ""  # text of a separate refusal field
    media: list[str] = field(default_factory=list)
    tools: list[tuple[str, str, str]] = field(default_factory=list)
    finish: str | None = None  # stop, length, tool_calls, content_filter or the provider's own value
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    thinking_tokens: int | None = None  # of the completion tokens
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None

    @property
    def output(self) -> str:
        """Output of a transition: the text of all parts, the refusal and references to media."""
        return self.text + self.refusal + "".join(f"[{reference}]" for reference in self.media)

    @property
    def empty(self) -> bool:
        """Whether the answer has no text, refusal, tool call, reasoning or media."""
        return not (self.text or self.refusal or self.tools or self.reasoning or self.media)

    def see_image(self, address: Any) -> None:
        """Record an image by its address, or by its hash if it is inline."""
        url = address.get("url") if isinstance(address, Mapping) else address
        if isinstance(url, str) and url:
            self.media.append("image: " + (hashed(url) if url.startswith("data:") else url))

    def call(self, call_id: Any, name: Any, arguments: Any) -> None:
        """Adds a tool call."""
        self.tools.append((str(call_id or ""), str(name or ""), str(arguments or "")))

    def count(self, prompt: Any, completion: Any, thinking: Any = None) -> None:
        """Sets the token counts; None where a value is not a number."""
        self.prompt_tokens, self.completion_tokens = count_of(prompt), count_of(completion)
        self.thinking_tokens = count_of(thinking)

    @property
    def message(self) -> Message:
        """The answer as an assistant's chat message. A refusal is part of the content, because chat templates have no
        field for it."""
        text = self.text + self.refusal
        message: Message = {"role": "assistant", "content": text or None if self.tools else text}
        if self.tools:
            message["tool_calls"] = [chat_call(*call) for call in self.tools]
        return message

    def tool_calls(self) -> list[ToolCall]:
        """Tool calls as records. Arguments that are not a JSON object are stored under `arguments`, with an error."""
        return [_tool_record(name, arguments) for _, name, arguments in self.tools]


def hashed(data: str) -> str:
    return f"sha256:{hashlib.sha256(data.encode()).hexdigest()}"


def chat_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A tool call in OpenAI's chat format."""
    function = {"name": str(name or ""), "arguments": str(arguments or "")}
    return {"id": str(call_id or ""), "type": "function", "function": function}


def chat_tool(function: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """The definition of a tool in OpenAI's chat format."""
    parameters = schema or {"type": "object", "properties": {}}
    described = {"name": function["name"], "description": function.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": described}


def tool_message(call_id: Any, content: Any) -> Message:
    """The result of a tool call as a chat message."""
    return {"role": "tool", "tool_call_id": str(call_id or ""), "content": content}


def arguments_text(arguments: Any) -> str:
    """Arguments of a tool call as JSON text."""
    return json.dumps(arguments or {}, ensure_ascii=False)


def _read_object(arguments: str) -> dict[str, Any] | None:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def object_of(arguments: str) -> dict[str, Any]:
    """Arguments of a tool call as an object. Text that is not a JSON object is stored under `arguments`."""
    value = _read_object(arguments)
    return {"arguments": arguments} if value is None else value


def _tool_record(name: str, arguments: str) -> ToolCall:
    if (value := _read_object(arguments)) is not None:
        return ToolCall(name=name, arguments=value)
    return ToolCall(name=name, arguments={"arguments": arguments}, error="the arguments are not a JSON object")


def is_tool_error(text: str) -> bool:
    """Whether the text of a tool's result says that the tool failed.

    True of a text that begins with `Error:` (in any case), or with a Python traceback or exception (`ValueError: …`),
    and of a JSON object with a true `isError` or `is_error`, or with an `error` that is a text or an object. Any other
    text is a result: only the agent's author knows what it means.
    """
    text = text.strip()
    if text.startswith("{"):
        value = _read_object(text) or {}
        error = value.get("error")
        return True in (value.get("isError"), value.get("is_error")) or (bool(error) and isinstance(error, str | dict))
    return _TOOL_ERROR.match(text) is not None


def part_texts(content: Any) -> str:
    """Text of a content, which may be a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else json_text(content)
    parts = (part for part in content if isinstance(part, str | Mapping))
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in parts)


def content_of(content: Any) -> Any:
    """Content as one string; content with images or files stays a list of parts."""
    if type(content) is str:
        return content
    if isinstance(content, list) and any(isinstance(part, Mapping) and "text" not in part for part in content):
        return content
    return part_texts(content)


def each(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, _LISTS):
        for part in value:
            if isinstance(part, MAPPING):
                yield part


def count_of(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# -- Ids for tool calls without one, such as Gemini's. Results belong to calls in order. Works on chat messages.


def linked(messages: Sequence[Message], prefix: str = "call_") -> list[Message]:
    """Messages in which each tool call has an id and each result refers to a call.

    A result without an id belongs to the first call without a result, of the function in its `name` if it has one.
    Duplicate results, as in Bedrock's events, are removed.

    Args:
        messages: Chat messages; ids are added to their tool calls in place.
        prefix: Prefix of new ids; the number of the call in the conversation follows.
    """
    result: list[Message] = []
    waiting: list[tuple[str, str]] = []  # id and function of calls without a result
    answered: set[str] = set()
    number = 0
    for message in messages:
        if message["role"] == "tool":
            name = message.get("name")
            called = message["tool_call_id"] or next(
                (call_id for call_id, function in waiting if function == name), waiting[0][0] if waiting else ""
            )
            tool_result = {**message, "tool_call_id": called}
            if called in answered and all(call_id != called for call_id, _ in waiting) and tool_result in result:
                continue
            answered.add(called)
            waiting = [call_id for call_id in waiting if call_id[0] != called]
            message = tool_result
        for call in message.get("tool_calls") or ():
            call["id"] = call["id"] or f"{prefix}{number}"
            waiting.append((call["id"], call["function"]["name"]))
            number += 1
        result.append(message)
    return result


def linked_choices(messages: Sequence[Message], choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of an answer; tool calls without an id get the one that the next request uses."""
    before = _calls(messages)
    for choice in choices:
        for at, call in enumerate(choice["message"].get("tool_calls") or ()):
            call["id"] = call["id"] or f"call_{before + at}"
    return choices


def linked_calls(
    messages: Sequence[Message], calls: Sequence[tuple[str, str, str]], prefix: str
) -> list[tuple[str, str, str]]:
    """Tool calls of an answer as `(id, name, arguments)`; those without an id get that of the next request."""
    before = _calls(messages)
    numbered = enumerate(calls, before)
    return [(call_id or f"{prefix}{number}", name, arguments) for number, (call_id, name, arguments) in numbered]


def _calls(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in messages)
