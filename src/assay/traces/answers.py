"""What a model said, and pieces of messages that the readers of all dialects share. Reads no dialect."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from assay.traces.records import ToolCall

__all__ = ["MAPPING", "Answer", "Message", "chat_call", "content_of", "count_of", "each", "hashed", "part_texts"]

Message = dict[str, Any]
_LISTS, MAPPING = (list, tuple), (dict, Mapping)  # a dict is known at once; `Mapping` alone asks for each


class Answer:
    """What a model said: text, reasoning, refusal, tool calls as `(id, name, arguments as text)`, why it stopped, tokens, ids and logprobs.

    `media` are references to what is no text: an address, an id, or the hash of what came inline.
    """

    __slots__ = (
        "completion_tokens", "finish", "logprobs", "media", "prompt_tokens", "reasoning", "refusal", "text", "thinking_tokens", "token_ids", "tools",
    )  # fmt: skip

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.refusal = ""  # what the model said in place of an answer, in a field of its own
        self.media: list[str] = []
        self.tools: list[tuple[str, str, str]] = []
        self.finish: str | None = None  # stop, length, tool_calls, content_filter, or the provider's own word
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.thinking_tokens: int | None = None  # of the completion tokens
        self.token_ids: tuple[int, ...] | None = None
        self.logprobs: tuple[float, ...] | None = None

    @property
    def output(self) -> str:
        """What is stored as a transition's output: the text of all parts, a refusal, which is an answer too, and media by reference."""
        return self.text + self.refusal + "".join(f"[{reference}]" for reference in self.media)

    @property
    def empty(self) -> bool:
        """Nothing at all came: no text, no refusal, no tool call, no reasoning, no media."""
        return not (self.text or self.refusal or self.tools or self.reasoning or self.media)

    def see_image(self, address: Any) -> None:
        """Notes an image by its address; one that came inline by the hash of it."""
        url = address.get("url") if isinstance(address, Mapping) else address
        if isinstance(url, str) and url:
            self.media.append("image: " + (hashed(url) if url.startswith("data:") else url))

    @property
    def message(self) -> Message:
        """As an assistant's chat message; a refusal is its content, as chat templates know no other place for it."""
        said = self.text + self.refusal
        found: Message = {"role": "assistant", "content": said or None if self.tools else said}
        if self.tools:
            found["tool_calls"] = [chat_call(*call) for call in self.tools]
        return found

    def tool_calls(self) -> list[ToolCall]:
        """Tool calls as records; arguments that are no JSON object are kept under `arguments`, with the error."""
        return [_tool_record(name, arguments) for _, name, arguments in self.tools]


def hashed(data: str) -> str:
    return f"sha256:{hashlib.sha256(data.encode()).hexdigest()}"


def chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_record(name: str, arguments: str) -> ToolCall:
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return ToolCall(name=name, arguments=found)
    return ToolCall(name=name, arguments={"arguments": arguments}, error="the arguments are no JSON object")


def part_texts(content: Any) -> str:
    """The text of a content that is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else json.dumps(content, ensure_ascii=False, default=str)
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content if isinstance(part, str | Mapping))


def content_of(content: Any) -> Any:
    """Texts as one string; content with images or files stays a list of parts."""
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
