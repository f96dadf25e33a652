"""Ids for tool calls without one, such as Gemini's. Results belong to calls in order. Works on chat messages."""

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]


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
    """Tool calls of an answer as `(id, name, arguments)`; those without an id get the one that the next request
    uses.
    """
    before = _calls(messages)
    return [
        (call_id or f"{prefix}{before + at}", name, arguments) for at, (call_id, name, arguments) in enumerate(calls)
    ]


def _calls(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in messages)
