"""Training rows from a group of rollouts, in the formats of TRL's trainers. Does not select, anonymize or write."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from assay.traces.export.rendering import RowRenderer
from assay.traces.export.selection import Episode
from assay.traces.export.turns import Turn
from assay.traces.gateway.client_requests import compact
from assay.traces.messages.dialects import chat_tools
from assay.traces.messages.requested import output_schema
from assay.traces.store.rows import as_json

__all__ = [
    "Labels",
    "grpo_columns",
    "grpo_rows",
    "labelled_rows",
    "preference_rows",
    "prompt_of",
    "sft_rows",
    "trained_parts",
]

Row = dict[str, Any]


def _where(episode: Episode, turn: Turn) -> Row:
    rollout = episode.rollout
    return {"task": rollout.task_id, "task_type": rollout.task_type, "rollout": rollout.id, "t": turn.t}


def trained_parts(turn: Turn, *, demos: bool = True) -> tuple[list[Row], list[Row], list[Row]]:
    """Prompt messages, completion messages and tool definitions of a call, before rendering.

    Args:
        demos: Whether to keep the demonstrations of a DSPy prompt.
    """
    return prompt_of(turn, demos=demos), [turn.answer], chat_tools(turn.request)


def _written(
    renderer: RowRenderer, prompt: Sequence[Row], completion: Sequence[Row], tools: Sequence[Row]
) -> tuple[list[Row], list[Row], str]:
    """Prompt, completion and tools in the form that the chat template can render; tools as JSON text, as TRL reads
    them.
    """
    conversation = renderer.messages([*prompt, *completion], tools)
    at = len(conversation) - len(completion)
    return conversation[:at], conversation[at:], as_json(renderer.tools(tools) or None)


def sft_rows(
    episode: Episode, turns: Sequence[Turn], renderer: RowRenderer, *, whole: bool, demos: bool = True
) -> Iterator[Row]:
    """SFT rows of a rollout: one per LM call, with `prompt` and `completion` as messages and `tools` as JSON text.

    Args:
        turns: The calls to export.
        renderer: Converts messages and tools to the form that the model's chat template renders.
        whole: One row per conversation with `messages`. A call that a later call continues is part of that row.
        demos: Keep the demonstrations of DSPy prompts. Without them, the model learns to answer without demonstrations
            (context distillation: Snell, Klein, Zhong 2022, arXiv:2209.15189).
    """
    quality = episode.quality
    if not whole:
        for turn in turns:
            prompt, completion, tools = _written(renderer, *trained_parts(turn, demos=demos))
            yield {
                "prompt": prompt,
                "completion": completion,
                "tools": tools,
                "quality": quality,
                **_where(episode, turn),
            }
        return
    conversations = [(turn, turn.messages) for turn in turns]
    for index, (turn, messages) in enumerate(conversations):
        if any(_continues(later, [*messages, turn.answer]) for _, later in conversations[index + 1 :]):
            continue
        prompt, completion, tools = _written(renderer, *trained_parts(turn))
        yield {"messages": [*prompt, *completion], "tools": tools, "quality": quality, **_where(episode, turn)}


def prompt_of(turn: Turn, *, demos: bool) -> list[dict[str, Any]]:
    """Prompt messages of a call.

    Args:
        demos: Keep the demonstrations of a DSPy prompt. Prompts of other clients are always complete.
    """
    return turn.messages if demos or turn.request.get("dialect") else _without_demos(turn.messages)


def _without_demos(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """System messages and the messages from the last user message on: DSPy puts demonstrations between them."""
    last = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=0)
    return [*(m for m in messages[:last] if m.get("role") in ("system", "developer")), *messages[last:]]


def _continues(later: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a longer conversation starts with all messages of another.

    Messages are normalised first: clients differ in how they write empty content and tool arguments, and some add the
    agent's name to its answers.
    """
    return len(later) > len(earlier) and [_plain(message) for message in later[: len(earlier)]] == [
        _plain(message) for message in earlier
    ]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    named = message.get("role") == "assistant"
    plain = {key: value for key, value in message.items() if value not in (None, "") and not (named and key == "name")}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": compact(call["function"]["arguments"])}}
            for call in calls
        ]
    return plain


def grpo_rows(group: Sequence[Episode], renderer: RowRenderer, *, call: str = "last") -> Iterator[Row]:
    """GRPO rows: the distinct prompts of a group, its tools, and one column for each input and expected field of the
    task.

    Prompts that the model's chat template refuses are left out and counted by `renderer`. `tools` has the definitions
    as JSON text, also if the prompt contains them as text, because TRL's GRPO trainer does not render the column.

    Args:
        renderer: Converts messages and tools to the form that the model's chat template renders.
        call: Calls of a rollout that become prompts: `last` (its completion is the answer), `first` or `all`.
    """
    seen: set[str] = set()
    for episode in group:
        rollout = episode.rollout
        for turn in prompted_turns(episode, call):
            request, _, definitions = trained_parts(turn)
            prompt, _, _ = _written(renderer, request, [], definitions)
            key = as_json([prompt, definitions])
            if key in seen or not request:
                continue
            seen.add(key)
            if renderer.check(request, [], definitions) is not None:
                continue
            columns = {_column(name): value for name, value in {**rollout.inputs, **rollout.expected}.items()}
            yield {**columns, "prompt": prompt, "tools": as_json(definitions or None), "task_type": rollout.task_type}


def prompted_turns(episode: Episode, call: str) -> Sequence[Turn]:
    """The calls of a rollout that become prompts of a GRPO export: `last`, `first` or `all`."""
    return episode.turns if call == "all" else episode.turns[-1:] if call == "last" else episode.turns[:1]


def _answer_key(answer: Mapping[str, Any]) -> str:
    """An answer as JSON text without tool-call ids, because some servers number them per request."""
    return as_json([answer.get("content") or "", [call["function"] for call in answer.get("tool_calls") or ()]])


# Names that TRL's GRPO trainer passes to reward functions itself, and columns of ours.
_RESERVED = frozenset(
    {
        "prompt",
        "prompts",
        "completion",
        "completions",
        "completion_ids",
        "task_type",
        "tools",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
    }
)


def _column(name: str) -> str:
    """Column name for a field; names that TRL reserves get a trailing underscore."""
    return f"{name}_" if name in _RESERVED else name


def grpo_columns(group: Sequence[Episode]) -> tuple[dict[str, str], set[str]]:
    """Columns of a GRPO export.

    Returns:
        Input names by column, and the fields of a completion: those of the recorded predictions, or the expected
        fields of the tasks where no prediction is recorded.
    """
    inputs = {
        _column(name): name
        for episode in group
        for name in episode.rollout.inputs
        if name not in episode.rollout.expected
    }
    return inputs, {name for episode in group for name in episode.rollout.prediction or episode.rollout.expected}


def preference_rows(
    group: Sequence[tuple[Episode, Turn, float]], renderer: RowRenderer, *, margin: float
) -> Iterator[Row]:
    """DPO pairs with `chosen` and `rejected`.

    The two answers of a pair have the same prompt, tools and output schema; tool-call ids are ignored in the
    comparison. The answer with the higher return is `chosen`.

    Args:
        group: Calls of one group: episode, turn, return.
        renderer: Converts messages and tools to the form that the model's chat template renders.
        margin: Minimum difference between the two returns.
    """
    by_prompt: dict[str, list[tuple[Episode, Turn, float]]] = {}
    for entry in group:
        request, _, definitions = trained_parts(entry[1])
        prompt, _, _ = _written(renderer, request, [], definitions)
        by_prompt.setdefault(as_json([_numbered(prompt), definitions, output_schema(entry[1].request)]), []).append(
            entry
        )
    for entries in by_prompt.values():
        seen: set[tuple[str, str]] = set()
        for first, second in combinations(entries, 2):
            (_, worse, low), (episode, better, high) = sorted((first, second), key=lambda entry: entry[2])
            prompt, chosen, tools = _written(renderer, *trained_parts(better))
            rejected = _written(renderer, *trained_parts(worse))[1]
            key = (_answer_key(chosen[0]), _answer_key(rejected[0]))
            if high - low < margin or key[0] == key[1] or key in seen:
                continue
            seen.add(key)
            yield {
                "prompt": prompt,
                "chosen": chosen,
                "rejected": rejected,
                "tools": tools,
                "margin": high - low,
                **_where(episode, better),
            }


def labelled_rows(group: Iterable[tuple[Episode, Turn, float]], renderer: RowRenderer, *, good: float) -> Iterator[Row]:
    """KTO rows with `label`.

    Args:
        group: Calls of one group: episode, turn, return.
        good: Quality in [0, 1] from which a label is True.
    """
    for episode, turn, value in group:
        prompt, completion, tools = _written(renderer, *trained_parts(turn))
        label = (episode.quality or 0.0) >= good
        fields = {"prompt": prompt, "completion": completion, "tools": tools, "label": label, "return": value}
        yield {**fields, **_where(episode, turn)}


class Labels:
    """The labels of the KTO rows of an export, in order.

    In an answer that was followed by good and by bad outcomes there is nothing to prefer or to avoid: none of its rows
    is exported. Tool-call ids are ignored in the comparison.
    """

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._labels: dict[int, bool | None] = {}  # by prompt and answer; None where it has both

    def see(self, row: Row) -> None:
        """Notes a row as it is written."""
        key = hash((as_json([_numbered(row["prompt"]), row["tools"]]), _answer_key(row["completion"][0])))
        self._keys.append(key)
        if self._labels.setdefault(key, row["label"]) is not row["label"]:
            self._labels[key] = None

    def contradictions(self) -> list[int]:
        """Numbers of the rows whose prompt and answer have both labels, from 0."""
        return [number for number, key in enumerate(self._keys) if self._labels[key] is None]


def _numbered(messages: Sequence[Row]) -> list[Row]:
    """Messages with tool-call ids replaced by their order: clients and servers generate new ids for each request."""
    numbers: dict[str, str] = {}
    result = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {
                **message,
                "tool_calls": [{**call, "id": numbers.setdefault(call["id"], str(len(numbers)))} for call in calls],
            }
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": numbers.get(message["tool_call_id"], "")}
        result.append(message)
    return result
