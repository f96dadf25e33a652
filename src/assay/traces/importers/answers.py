"""Answers of traces as choices of chat completions, from the formats that `assay.traces.importers.chat` reads."""

from collections.abc import Iterator, Mapping
from typing import Any

from assay.traces.importers.chat import is_call, is_message, messages_of
from assay.traces.importers.values import UnknownShape, as_text, count_of, parsed
from assay.traces.messages.chaining import unfinished

__all__ = ["answers_of"]

_FINISH = {
    "tool_call": "tool_calls",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "stop": "stop",
    "max_tokens": "length",
    "length": "length",
    "content_filter": "content_filter",
}
_BLOCKS = (  # of one answer
    *("text", "thinking", "redacted_thinking", "reasoning", "tool_use", "tool-call"),
    *("server_tool_use", "web_search_tool_result", "image"),
)
_SURE = ("choices", "candidates", "generations", "role", "parts", "tool_calls", "toolCalls")
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
    return [
        {
            "index": index,
            "message": message,
            "finish_reason": _finish(reason or (reasons[index] if index < len(reasons) else None)),
        }
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
    message = {**begun, **piece}
    contents = [each["content"] for each in (begun, piece) if each["content"]]
    if all(isinstance(content, str) for content in contents):
        message["content"] = "".join(contents)
    else:
        message["content"] = [
            part
            for content in contents
            for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
        ]
    if calls := [*begun.get("tool_calls", ()), *piece.get("tool_calls", ())]:
        message.update(content=message["content"] or None, tool_calls=calls)
    if reasoning := begun.get("reasoning_content", "") + piece.get("reasoning_content", ""):
        message["reasoning_content"] = reasoning
    return message


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
    listed = next(
        (answer[key] for key in ("choices", "candidates", "generations") if isinstance(answer.get(key), list)), None
    )
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
