"""What a rollout spent on thinking, from its recorded calls. Does not call a model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import FailureKind
from assay.models.thinking import THOUGHT_FIELDS, budget_of, schema_of
from assay.support.sections import fields_in
from assay.traces.records import RUN_FIELDS, Rollout, Transition

_LONGEST = 1024  # bits of an integer that a thought may mention; Python refuses to write very long ones


@dataclass(frozen=True, kw_only=True)
class ThinkingUse:
    """Thinking of one run.

    Attributes:
        tokens: thinking tokens of all calls; None if a call thought and its tokens were not reported.
        after_stable: of them, those spent after the choice of a step, or the answer, was first the final one.
        budget: thinking tokens that the calls were allowed, of the calls with a budget.
        budget_share: thinking tokens of those calls divided by `budget`; None without a budget.
        loops: calls that ended in a loop, and tool calls that brought nothing new.
        tokens_saved: tokens that calls stopped in a loop had left until their limit, at most; after a loop of tool
            calls those of the steps that were left, at the mean completion tokens of a tool call so far.
    """

    tokens: int | None
    after_stable: int | None
    budget: int
    budget_share: float | None
    loops: int
    tokens_saved: int


def thinking_of(rollout: Rollout) -> ThinkingUse:
    """What a rollout spent on thinking.

    A step may think in several calls, each with a choice. What came after the first of its last equal choices was
    wasted. In a thought, what follows the first mention of the final answer was.
    """
    calls = rollout.transitions
    known = not any(_hides(call) for call in calls)
    within = [(budget, call.thinking_tokens or 0) for call in calls if (budget := budget_of(call.request))]
    allowed = sum(budget for budget, _ in within)
    answer = _answer(rollout)
    return ThinkingUse(
        tokens=sum(call.thinking_tokens or 0 for call in calls) if known else None,
        after_stable=sum(_wasted(step, answer) for step in _steps(calls)) if known else None,
        budget=allowed,
        budget_share=sum(tokens for _, tokens in within) / allowed if allowed else None,
        loops=sum(call.failure is FailureKind.LOOP for call in calls),
        tokens_saved=sum(_saved(call) for call in calls) + _saved_steps(rollout),
    )


def _hides(call: Transition) -> bool:
    """Whether a call thought, as far as its answer shows, and its tokens were not counted."""
    if call.thinking_tokens is not None or call.response is None:
        return False
    message = call.response.get("message")
    parts = message.get("parts") if isinstance(message, Mapping) else None
    return any(isinstance(part, Mapping) and part.get("type") == "thinking" for part in parts or ())


def _saved(call: Transition) -> int:
    config = call.request.get("config")
    limit = config.get("max_tokens") if isinstance(config, Mapping) else None
    stopped = call.failure is FailureKind.LOOP and call.error is not None
    return max(0, limit - (call.completion_tokens or 0)) if stopped and isinstance(limit, int) else 0


def _saved_steps(rollout: Rollout) -> int:
    calls, limit = rollout.transitions, rollout.parameters.get("max_steps")
    ended = [at for at, call in enumerate(calls) if call.failure is FailureKind.LOOP and call.error is None]
    if rollout.failure is not FailureKind.LOOP or not ended or not isinstance(limit, int):
        return 0
    until = calls[: ended[0] + 1]
    steps, spent = sum(len(call.tools) for call in until), sum(call.completion_tokens or 0 for call in until)
    return round(spent / steps * max(0, limit - 1 - steps)) if steps else 0


def _steps(calls: Sequence[Transition]) -> list[list[Transition]]:
    """Calls in a row that ask for the same fields: the rounds of a step. A call without a schema is a step."""
    steps: list[list[Transition]] = []
    before: tuple[str, ...] = ()
    for call in calls:
        names = tuple(name for name in schema_of(call.request) if name not in THOUGHT_FIELDS)
        if names and names == before:
            steps[-1].append(call)
        else:
            steps.append([call])
        before = names
    return steps


def _wasted(step: Sequence[Transition], answer: str) -> int:
    """Thinking tokens of a step after its choice was first the final one."""
    choices = [_choice(call) for call in step]
    first = len(step) - 1
    while first > 0 and choices[first - 1] is not None and choices[first - 1] == choices[-1]:
        first -= 1
    after = sum(call.thinking_tokens or 0 for call in step[first + 1 :])
    return after + (_after_mention(step[first], answer) if len(step) == 1 else 0)


def _choice(call: Transition) -> dict[str, Any] | None:
    """The fields of an answer besides the thought; None if there are none."""
    written = fields_in(call.output, schema_of(call.request))
    return {name: value for name, value in written.items() if name not in THOUGHT_FIELDS} or None


def _thought(call: Transition) -> str:
    written = fields_in(call.output, schema_of(call.request))
    text = next((str(written[name]) for name in THOUGHT_FIELDS if written.get(name)), "")
    message = call.response.get("message") if call.response is not None else None
    parts = message.get("parts") if isinstance(message, Mapping) else None
    return text or "".join(str(part.get("text", "")) for part in parts or () if part.get("type") == "thinking")


def _after_mention(call: Transition, answer: str) -> int:
    """Thinking tokens after a thought first mentions the final answer, by its share of the characters."""
    thought = _thought(call)
    if not answer or not thought or not call.thinking_tokens:
        return 0
    mention = re.search(rf"(?<![\w.]){re.escape(answer)}(?![\w]|\.\d)", thought)
    return 0 if mention is None else round(call.thinking_tokens * (len(thought) - mention.end()) / len(thought))


def _answer(rollout: Rollout) -> str:
    """The only field of the answer, a text or a number; empty if there are several, or it is something else."""
    prediction = rollout.prediction or {}
    values = [value for name, value in prediction.items() if name not in {*RUN_FIELDS, *THOUGHT_FIELDS}]
    if len(values) != 1 or not isinstance(values[0], str | int | float):
        return ""
    long = isinstance(values[0], int) and values[0].bit_length() > _LONGEST
    return "" if long else str(values[0]).strip()
