"""Rows of training data from a group of rollouts, in the forms that trainers read. Does not select, hide or write anything."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import orjson

from assay.traces.asked import asked_schema
from assay.traces.dialects import chat_tools
from assay.traces.rows import as_json
from assay.traces.selection import Episode, Turn

__all__ = ["JSON_COLUMNS", "grpo_columns", "grpo_rows", "preference_rows", "prompt_of", "sft_rows", "transition_row"]

Row = dict[str, Any]


JSON_COLUMNS = ("input", "tools", "adapters", "token_ids", "logprobs", "step_rewards")  # of a transition: JSON text as it was stored


def transition_row(episode: Episode, turn: Turn, *, reward: float, credited: float, advantage: float, weight: float) -> Row:
    """One LM call with its reward, return and advantage. `input` and what else the store holds as JSON stays as it was stored.

    `weight` is one over the rollout's calls: weighted by it, long rollouts do not weigh more than short ones.
    """
    rollout = episode.rollout
    return {
        "rollout": rollout.id, "group": episode.group, "task": rollout.task_id, "task_type": rollout.task_type, "t": turn.t,
        "input": turn.request_json, "output": turn.output, "reasoning": turn.reasoning, "refusal": turn.refusal, "tools": turn.tools_json,
        "constrained": turn.constrained, "cached": turn.cached, "model": turn.model, "weights": turn.weights,
        "adapters": turn.adapters_json, "prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens,
        "token_ids": turn.token_ids_json or "null", "logprobs": turn.logprobs_json or "null",
        "step_rewards": turn.step_rewards_json, "reward": reward, "return": credited, "advantage": advantage, "weight": weight,
        "score": rollout.score, "human_rating": rollout.human_rating, "status": rollout.status, "program": rollout.program,
        "program_version": rollout.program_version,
    }  # fmt: skip


def _where(episode: Episode, turn: Turn) -> Row:
    rollout = episode.rollout
    return {"task": rollout.task_id, "task_type": rollout.task_type, "rollout": rollout.id, "t": turn.t}


def _trained(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates want it: arguments of tool calls as objects."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        try:
            arguments = orjson.loads(call["function"]["arguments"] or "{}")
        except orjson.JSONDecodeError:
            arguments = {"arguments": call["function"]["arguments"]}
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _tools_json(turn: Turn) -> str:
    return as_json(chat_tools(turn.request))


def sft_rows(episode: Episode, turns: Sequence[Turn], *, whole: bool, demos: bool = True) -> Iterator[Row]:
    """`prompt` and `completion` as messages, one row an LM call; `tools` as JSON text, as TRL takes them.

    Args:
        whole: one row a conversation instead, as `messages`: calls whose messages a later call went on from are part of that one.
        demos: with the demonstrations that a DSPy program showed; without them a model learns to do without (context distillation:
            Snell, Klein, Zhong 2022, arXiv:2209.15189).
    """
    quality = episode.quality
    if not whole:
        for turn in turns:
            prompt, completion = [_trained(m) for m in prompt_of(turn, demos=demos)], [_trained(turn.answer)]
            yield {"prompt": prompt, "completion": completion, "tools": _tools_json(turn), "quality": quality, **_where(episode, turn)}
        return
    said = [(turn, turn.messages) for turn in turns]
    for at, (turn, messages) in enumerate(said):
        if any(_goes_on(later, [*messages, turn.answer]) for _, later in said[at + 1 :]):
            continue
        whole_row = {"messages": [_trained(m) for m in [*messages, turn.answer]], "tools": _tools_json(turn), "quality": quality}
        yield {**whole_row, **_where(episode, turn)}


def prompt_of(turn: Turn, *, demos: bool) -> list[dict[str, Any]]:
    """The messages of a call as an export shows them; DSPy's demonstrations only with `demos`."""
    return turn.messages if demos or turn.request.get("dialect") else _without_demos(turn.messages)


def _without_demos(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is before the conversation, and the last thing that was asked: DSPy puts demonstrations between."""
    last = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=0)
    return [*(m for m in messages[:last] if m.get("role") in ("system", "developer")), *messages[last:]]


def _goes_on(later: Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation begins with all of another; an assistant's empty content may stand as null."""
    plain = [{key: value for key, value in m.items() if value not in (None, "")} for m in later[: len(said)]]
    return len(later) > len(said) and plain == [{key: value for key, value in m.items() if value not in (None, "")} for m in said]


def grpo_rows(group: Sequence[Episode], *, call: str = "last") -> Iterator[Row]:
    """Distinct prompts of a group with what the rubric reads: the task's inputs and what it expects, each a column.

    Args:
        call: which call of a rollout the policy is to make: `last` (whose completion is the answer), `first`, or `all`.
    """
    seen: set[str] = set()
    for episode in group:
        rollout = episode.rollout
        turns = episode.turns if call == "all" else episode.turns[-1:] if call == "last" else episode.turns[:1]
        for turn in turns:
            prompt = turn.messages
            key = as_json(prompt)
            if key in seen or not prompt:
                continue
            seen.add(key)
            columns = {_column(name): value for name, value in {**rollout.inputs, **rollout.expected}.items()}
            yield {**columns, "prompt": [_trained(m) for m in prompt], "task_type": rollout.task_type}


def _without_ids(answer: Mapping[str, Any]) -> str:
    """An answer as JSON text without the ids of its tool calls, which differ where a server numbers them."""
    calls = [call["function"] for call in _trained(answer).get("tool_calls") or ()]
    return as_json([answer.get("content") or "", calls])


_TRLS = ("prompt", "prompts", "completion", "completions", "completion_ids", "task_type", "trainer_state", "log_extra", "log_metric", "environments")


def _column(name: str) -> str:
    """A column's name that no trainer has a meaning of its own for."""
    return f"{name}_" if name in _TRLS else name


def grpo_columns(group: Sequence[Episode]) -> tuple[dict[str, str], set[str]]:
    """Columns of inputs, with the names of the inputs, and the fields that completions are to hold: those of the recorded answers,
    or, where no answer is on record, those that the tasks expect."""
    inputs = {_column(name): name for episode in group for name in episode.rollout.inputs if name not in episode.rollout.expected}
    return inputs, {name for episode in group for name in episode.rollout.prediction or episode.rollout.expected}


def preference_rows(group: Sequence[tuple[Episode, Turn, float]], *, margin: float, unpaired: bool = False, good: float = 0.8) -> Iterator[Row]:
    """Pairs of answers to the very same prompt with the same tools and schema, the better one `chosen`, for DPO; or each answer with a
    `label`, for KTO. Answers that differ in nothing but the ids of their tool calls are no pair.

    Args:
        group: calls of one group with what each was credited with.
        margin: least difference of the two returns.
        unpaired: rows for KTO: True from a quality of `good` on.
    """
    by_prompt: dict[str, list[tuple[Episode, Turn, float]]] = {}
    for entry in group:
        request = entry[1].request
        by_prompt.setdefault(as_json([entry[1].messages, chat_tools(request), asked_schema(request)]), []).append(entry)
    for entries in by_prompt.values():
        prompt = [_trained(m) for m in entries[0][1].messages]
        if unpaired:
            for episode, turn, value in entries:
                label = (episode.quality or 0.0) >= good
                yield {"prompt": prompt, "completion": [_trained(turn.answer)], "label": label, "return": value, **_where(episode, turn)}
            continue
        told: set[tuple[str, str]] = set()
        for one, other in combinations(entries, 2):
            (_, worse, low), (episode, better, high) = sorted((one, other), key=lambda entry: entry[2])
            chosen, rejected = [_trained(better.answer)], [_trained(worse.answer)]
            key = (_without_ids(better.answer), _without_ids(worse.answer))
            if high - low < margin or key[0] == key[1] or key in told:
                continue
            told.add(key)
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": high - low, **_where(episode, better)}
