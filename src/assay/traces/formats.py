"""Rows of training data from a group of rollouts, in the forms that trainers read. Does not select, hide or write anything."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import orjson

from assay.traces.asked import asked_schema
from assay.traces.conversation import compact
from assay.traces.dialects import chat_tools
from assay.traces.rendering import RowRenderer
from assay.traces.rows import as_json
from assay.traces.selection import Episode, Turn

__all__ = ["JSON_COLUMNS", "grpo_columns", "grpo_rows", "preference_rows", "prompt_of", "sft_rows", "trained_parts", "transition_row"]

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


def trained_parts(turn: Turn, *, demos: bool = True) -> tuple[list[Row], list[Row], list[Row]]:
    """Prompt and completion of a call as messages, and the tools that were offered, before they are written for a template."""
    return [_trained(m) for m in prompt_of(turn, demos=demos)], [_trained(turn.answer)], chat_tools(turn.request)


def _written(renderer: RowRenderer, prompt: Sequence[Row], completion: Sequence[Row], tools: Sequence[Row]) -> tuple[list[Row], list[Row], str]:
    """Prompt, completion and tools as the template of the model can show them; tools as JSON text, as TRL takes them."""
    said = renderer.messages([*prompt, *completion], tools)
    at = len(said) - len(completion)
    return said[:at], said[at:], as_json(renderer.tools(tools) or None)


def sft_rows(episode: Episode, turns: Sequence[Turn], renderer: RowRenderer, *, whole: bool, demos: bool = True) -> Iterator[Row]:
    """`prompt` and `completion` as messages, one row an LM call; `tools` as JSON text.

    Args:
        renderer: writes messages and tools in the form that the model's chat template shows.
        whole: one row a conversation instead, as `messages`: calls whose messages a later call went on from are part of that one.
        demos: with the demonstrations that a DSPy program showed; without them a model learns to do without (context distillation:
            Snell, Klein, Zhong 2022, arXiv:2209.15189).
    """
    quality = episode.quality
    if not whole:
        for turn in turns:
            prompt, completion, tools = _written(renderer, *trained_parts(turn, demos=demos))
            yield {"prompt": prompt, "completion": completion, "tools": tools, "quality": quality, **_where(episode, turn)}
        return
    said = [(turn, turn.messages) for turn in turns]
    for at, (turn, messages) in enumerate(said):
        if any(_goes_on(later, [*messages, turn.answer]) for _, later in said[at + 1 :]):
            continue
        prompt, completion, tools = _written(renderer, *trained_parts(turn))
        yield {"messages": [*prompt, *completion], "tools": tools, "quality": quality, **_where(episode, turn)}


def prompt_of(turn: Turn, *, demos: bool) -> list[dict[str, Any]]:
    """The messages of a call as an export shows them; DSPy's demonstrations only with `demos`."""
    return turn.messages if demos or turn.request.get("dialect") else _without_demos(turn.messages)


def _without_demos(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is before the conversation, and the last thing that was asked: DSPy puts demonstrations between."""
    last = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=0)
    return [*(m for m in messages[:last] if m.get("role") in ("system", "developer")), *messages[last:]]


def _goes_on(later: Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation begins with all of another; clients write empty content and arguments of tools in ways of their own, and
    some add the name of their agent to its answers."""
    return len(later) > len(said) and [_plain(message) for message in later[: len(said)]] == [_plain(message) for message in said]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    named = message.get("role") == "assistant"
    plain = {key: value for key, value in message.items() if value not in (None, "") and not (named and key == "name")}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{**call, "function": {**call["function"], "arguments": compact(call["function"]["arguments"])}} for call in calls]
    return plain


def grpo_rows(group: Sequence[Episode], renderer: RowRenderer, *, call: str = "last") -> Iterator[Row]:
    """Distinct prompts of a group with the tools that were offered and what the rubric reads: the task's inputs and what it expects, each a
    column. Prompts that the model's chat template refuses are left out; `renderer` counts them. `tools` are the definitions as JSON text,
    also where the prompt has them in text: TRL's GRPO trainer does not render the column.

    Args:
        call: which call of a rollout the policy is to make: `last` (whose completion is the answer), `first`, or `all`.
    """
    seen: set[str] = set()
    for episode in group:
        rollout = episode.rollout
        turns = episode.turns if call == "all" else episode.turns[-1:] if call == "last" else episode.turns[:1]
        for turn in turns:
            asked, _, offered = trained_parts(turn)
            key = as_json([asked, offered])
            if key in seen or not asked:
                continue
            seen.add(key)
            if renderer.check(asked, [], offered) is not None:
                continue
            prompt, _, _ = _written(renderer, asked, [], offered)
            columns = {_column(name): value for name, value in {**rollout.inputs, **rollout.expected}.items()}
            yield {**columns, "prompt": prompt, "tools": as_json(offered or None), "task_type": rollout.task_type}


def _said(answer: Mapping[str, Any]) -> str:
    """An answer as JSON text without the ids of its tool calls, which differ where a server numbers them."""
    return as_json([answer.get("content") or "", [call["function"] for call in answer.get("tool_calls") or ()]])


_TRLS = frozenset({
    "prompt", "prompts", "completion", "completions", "completion_ids", "task_type", "tools", "trainer_state", "log_extra", "log_metric",
    "environments",
})  # fmt: skip


def _column(name: str) -> str:
    """A column's name that no trainer has a meaning of its own for."""
    return f"{name}_" if name in _TRLS else name


def grpo_columns(group: Sequence[Episode]) -> tuple[dict[str, str], set[str]]:
    """Columns of inputs, with the names of the inputs, and the fields that completions are to hold: those of the recorded answers,
    or, where no answer is on record, those that the tasks expect."""
    inputs = {_column(name): name for episode in group for name in episode.rollout.inputs if name not in episode.rollout.expected}
    return inputs, {name for episode in group for name in episode.rollout.prediction or episode.rollout.expected}


def preference_rows(
    group: Sequence[tuple[Episode, Turn, float]], renderer: RowRenderer, *, margin: float, unpaired: bool = False, good: float = 0.8
) -> Iterator[Row]:
    """Pairs of answers to the very same prompt with the same tools and schema, the better one `chosen`, for DPO; or each answer with a
    `label`, for KTO. Ids of tool calls make neither prompts nor answers different.

    Args:
        group: calls of one group with what each was credited with.
        renderer: writes messages and tools in the form that the model's chat template shows.
        margin: least difference of the two returns.
        unpaired: rows for KTO: True from a quality of `good` on.
    """
    by_prompt: dict[str, list[tuple[Episode, Turn, float]]] = {}
    for entry in group:
        asked, _, offered = trained_parts(entry[1])
        by_prompt.setdefault(as_json([_numbered(asked), offered, asked_schema(entry[1].request)]), []).append(entry)
    for entries in by_prompt.values():
        if unpaired:
            for episode, turn, value in entries:
                prompt, completion, tools = _written(renderer, *trained_parts(turn))
                label = (episode.quality or 0.0) >= good
                yield {"prompt": prompt, "completion": completion, "tools": tools, "label": label, "return": value, **_where(episode, turn)}
            continue
        told: set[tuple[str, str]] = set()
        for one, other in combinations(entries, 2):
            (_, worse, low), (episode, better, high) = sorted((one, other), key=lambda entry: entry[2])
            prompt, chosen, tools = _written(renderer, *trained_parts(better))
            rejected = _written(renderer, *trained_parts(worse))[1]
            key = (_said(chosen[0]), _said(rejected[0]))
            if high - low < margin or key[0] == key[1] or key in told:
                continue
            told.add(key)
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": tools, "margin": high - low, **_where(episode, better)}


def _numbered(messages: Sequence[Row]) -> list[Row]:
    """Messages with tool calls numbered in order in place of their ids, which clients and servers make up anew."""
    numbers: dict[str, str] = {}
    found = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{**call, "id": numbers.setdefault(call["id"], str(len(numbers)))} for call in calls]}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": numbers.get(message["tool_call_id"], "")}
        found.append(message)
    return found
