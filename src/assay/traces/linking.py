"""Ids for tool calls that have none, as Gemini's: results belong to calls in order. Reads chat messages, whatever dialect they came in."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["linked", "linked_calls", "linked_choices"]

Message = dict[str, Any]


def linked(messages: Sequence[Message], prefix: str = "call_") -> list[Message]:
    """Messages in which each tool call has an id and each result is that of a call.

    A result without an id belongs to the first call without a result, of the function that it names (`name`) where it names one. Results that
    stand there twice, as in Bedrock's events, are taken once.

    Args:
        prefix: of the ids that are given; the number of the call in the conversation follows.
    """
    found: list[Message] = []
    waiting: list[tuple[str, str]] = []  # id and function of calls without a result
    answered: set[str] = set()
    number = 0
    for message in messages:
        if message["role"] == "tool":
            name = message.get("name")
            called = message["tool_call_id"] or next((one for one, function in waiting if function == name), waiting[0][0] if waiting else "")
            told = {**message, "tool_call_id": called}
            if called in answered and all(one != called for one, _ in waiting) and told in found:
                continue
            answered.add(called)
            waiting = [one for one in waiting if one[0] != called]
            message = told
        for call in message.get("tool_calls") or ():
            call["id"] = call["id"] or f"{prefix}{number}"
            waiting.append((call["id"], call["function"]["name"]))
            number += 1
        found.append(message)
    return found


def linked_choices(messages: Sequence[Message], choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of an answer, whose tool calls without an id have the id that the next request gives them."""
    before = _calls(messages)
    for choice in choices:
        for at, call in enumerate(choice["message"].get("tool_calls") or ()):
            call["id"] = call["id"] or f"call_{before + at}"
    return choices


def linked_calls(messages: Sequence[Message], calls: Sequence[tuple[str, str, str]], prefix: str) -> list[tuple[str, str, str]]:
    """Tool calls of an answer as `(id, name, arguments)`; those without an id have the id that the next request gives them."""
    before = _calls(messages)
    return [(call_id or f"{prefix}{before + at}", name, arguments) for at, (call_id, name, arguments) in enumerate(calls)]


def _calls(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in messages)
