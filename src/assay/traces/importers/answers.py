"""Answers of traces as choices of chat completions, from the formats that `assay.traces.importers.chat` reads."""

from collections.abc import Iterator, Mapping
from typing import Any

from assay.traces.importers.chat import is_message, messages_of
from assay.traces.importers.values import as_text, parsed

__all__ = ["answers_of"]

_FINISH = {
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
}


def answers_of(value: Any, reasons: Any = None) -> list[dict[str, Any]]:
    """Choices of an answer, each with `index`, `message` and `finish_reason`; empty without an answer.

    Args:
        value: The answer in any format.
        reasons: Finish reasons by choice, used if a choice has none.
    """
    answer = parsed(value)
    known = _is_answer(answer, strict=isinstance(value, str))
    pairs = (
        []
        if answer is None or answer == ""
        else list(_choices(answer))
        if known
        else [({"content": as_text(value)}, None)]
    )
    reasons = reasons if isinstance(reasons, list) else [reasons]
    choices = []
    for index, (message, reason) in enumerate(pairs):
        chat_message = next(
            (m for m in messages_of(message, "assistant") if m["role"] != "tool"), {"role": "assistant", "content": ""}
        )
        reason = reason or (reasons[index] if index < len(reasons) else None)
        choices.append(
            {
                "index": index,
                "message": {**chat_message, "role": "assistant"},
                "finish_reason": _FINISH.get(str(reason), reason),
            }
        )
    return choices


_BLOCKS = ("text", "thinking", "tool_use")  # Anthropic's, of one answer


_SURE = ("choices", "candidates", "generations", "role", "parts", "tool_calls")


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
    if any(key in value for key in _SURE) or (is_message(value) and not strict):
        return True
    return (
        not strict
        and bool(value)
        and ("message" in value or isinstance(value.get("output"), list) or set(value) <= {"content", "text"})
    )


def _is_block(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in _BLOCKS and "role" not in value


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
    reason = next(
        (answer[key] for key in ("finish_reason", "stop_reason", "finishReason", "stopReason") if answer.get(key)), None
    )
    inner = parsed(answer["message"]) if "message" in answer else answer
    inner = inner.get("content") if isinstance(inner, dict) and isinstance(inner.get("content"), dict) else inner
    if isinstance(inner, dict) and "content" not in inner and "parts" not in inner and "text" in inner:
        inner = {**inner, "content": inner["text"]}
    yield (inner if isinstance(inner, dict) else {"content": inner}), reason


def _output_parts(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if item.get("type") == "function_call":
        return [item]
    content = item.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
