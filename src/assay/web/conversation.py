"""One rollout as a conversation: what each call added, and what came back. Reads records, not the database."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.reports.texts import Budget, Clipped, pretty
from assay.traces.messages.chaining import requests_of
from assay.traces.messages.dialects import Message, answer_of, chat_messages
from assay.traces.records import ToolCall, Transition

__all__ = ["PageMessage", "ToolUse", "Turn", "tools_of", "turns_of"]

_UNFOLDED = 5  # messages that one call shows at once


@dataclass(frozen=True, kw_only=True)
class PageMessage:
    """A message of a request. `calls` are names and arguments of the tools that it asks for."""

    role: str
    text: Clipped
    calls: list[tuple[str, Clipped]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """A tool call with its result or error; None for both while it runs."""

    name: str
    arguments: Clipped
    result: Clipped | None
    error: Clipped | None
    isolation: str | None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An LM call.

    Attributes:
        earlier: number of messages of the request that the call before had too; they are not in `messages`.
        folded: the messages between the first and the `last` of many, such as demonstrations.
        refusal: whether the answer is a refusal.
    """

    call: Transition
    earlier: int
    messages: list[PageMessage]
    folded: list[PageMessage]
    last: list[PageMessage]
    reasoning: Clipped | None
    output: Clipped | None
    error: Clipped | None
    refusal: bool
    tools: list[ToolUse]


def turns_of(calls: Sequence[Transition], before: Transition | None, budget: Budget) -> list[Turn]:
    """The calls as turns. Messages that the call before had too are counted, not repeated."""
    earlier = [] if before is None else [before]
    conversations = [
        chat_messages(request or call.request)
        for call, request in zip([*earlier, *calls], requests_of([*earlier, *calls]), strict=True)
    ]
    turns, known = [], conversations.pop(0) if before is not None else []
    for call, messages in zip(calls, conversations, strict=True):
        shared = _shared(known, messages)
        turns.append(_turn(call, messages[shared:], shared, budget))
        known = messages
    return turns


def tools_of(tools: Sequence[ToolCall], budget: Budget) -> list[ToolUse]:
    """Tool calls with clipped texts."""
    return [
        ToolUse(
            name=tool.name,
            arguments=budget.clip(pretty(tool.arguments)),
            result=None if tool.result is None else budget.clip(tool.result),
            error=None if tool.error is None else budget.clip(tool.error),
            isolation=tool.isolation,
        )
        for tool in tools
    ]


def _turn(call: Transition, messages: Sequence[Message], earlier: int, budget: Budget) -> Turn:
    response = call.response or {}
    body = response.get("body", response)
    answer = answer_of(call.request.get("dialect"), body if isinstance(body, dict) else {})
    turns = list(_clipped(messages, budget))
    folds = len(turns) > _UNFOLDED
    return Turn(
        call=call,
        earlier=earlier,
        messages=turns[:1] if folds else turns,
        folded=turns[1:-1] if folds else [],
        last=turns[-1:] if folds else [],
        reasoning=budget.clip(answer.reasoning) if answer.reasoning else None,
        output=budget.clip(call.output) if call.output else None,
        error=budget.clip(call.error) if call.error else None,
        refusal=bool(answer.refusal),
        tools=tools_of(call.tools, budget),
    )


def _shared(before: Sequence[Message], messages: Sequence[Message]) -> int:
    """Number of messages at the beginning that both have. One is left: a turn shows at least its last message."""
    count = 0
    for old, new in zip(before, messages, strict=False):
        if old != new:
            break
        count += 1
    return min(count, max(0, len(messages) - 1))


def _clipped(messages: Sequence[Message], budget: Budget) -> Iterator[PageMessage]:
    for message in messages:
        content = message.get("content")
        calls: list[Any] = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        yield PageMessage(
            role=str(message.get("role") or "user"),
            text=budget.clip("" if content is None else pretty(content)),
            calls=[(str(call.get("name") or ""), budget.clip(pretty(call.get("arguments") or ""))) for call in calls],
        )
