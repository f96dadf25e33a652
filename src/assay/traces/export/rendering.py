"""Checks that the chat template of the model to be trained renders a training row, and converts tool calls to text.

A template that ignores `tool_calls` renders a tool call as an empty answer, and a model trained on it learns to answer
nothing. Such rows are converted, with tool definitions, calls and results as text, or they are refused and counted.
Does not select, anonymize or write rows.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

from assay.models.chat_templates import ChatTemplate, TemplateRefused
from assay.support.values import value_text
from assay.traces.export.selection import Episode, Turn
from assay.traces.gateway.requests import compact
from assay.traces.messages.dialects import chat_tools
from assay.traces.messages.final_answer import output_schema
from assay.traces.messages.parts import object_of
from assay.traces.store.rows import as_json

Message = dict[str, Any]
_THOUGHT = "</think>"  # end of the reasoning, which some templates leave out or rewrite
# The text form of Hermes and Qwen2.5, which llama.cpp, vLLM (`--tool-call-parser hermes`) and the embedded engine read
# as tool calls.
_OFFER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class RowRenderer:
    """Converts rows to a form that a chat template renders, and refuses rows that it cannot render.

    Args:
        template: Chat template of the model to be trained. None if it is not available; nothing is checked then.
        tools: `native` keeps `tool_calls` and `tools`; `text` converts them to text; `auto` converts them if the
            template ignores them.
    """

    def __init__(self, template: ChatTemplate | None, tools: str = "auto") -> None:
        self.template = template
        self.as_text = tools == "text" or (tools == "auto" and template is not None and not shows_tools(template))
        # otherwise the template expects objects, which it spells itself
        self.keeps_arguments = template is not None and _renders_text_arguments(template)
        self.calls = self.converted = 0
        self.refused: Counter[str] = Counter()

    def messages(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The messages to write; if tools are text, they contain the tool definitions.

        The arguments of tool calls stay in the model's spelling where the template can render it.
        """
        if self.as_text:
            return list(_in_text(messages, tools))
        return [self._native(message) for message in messages]

    def _native(self, message: Message) -> Message:
        if not message.get("tool_calls"):
            return dict(message)
        calls = [
            {**call, "function": {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "content": message.get("content") or "", "tool_calls": calls}

    def _arguments(self, arguments: Any) -> Any:
        keeps = (self.keeps_arguments and arguments) or not isinstance(arguments, str)
        return arguments if keeps else object_of(arguments)

    def written(
        self, prompt: Sequence[Message], completion: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[Message], list[Mapping[str, Any]]]:
        """Prompt and completion to write, and the tool definitions in their own field; none if tools are text."""
        conversation = self.messages([*prompt, *completion], tools)
        at = len(conversation) - len(completion)
        return conversation[:at], conversation[at:], [] if self.as_text else list(tools)

    def check(
        self, prompt: Sequence[Message], completion: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str | None:
        """Check and count a call.

        Args:
            prompt: Messages of the request.
            completion: The answer; empty if only the prompt is exported.
            tools: Definitions of the offered tools.
        Returns:
            Why a model cannot be trained on this call, or None.
        """
        self.calls += 1
        uses_tools = bool(tools) or any(
            message.get("tool_calls") or message.get("role") == "tool" for message in [*prompt, *completion]
        )
        if self.template is not None and (reason := self._problem(prompt, completion, tools)) is not None:
            self.refused[reason] += 1
            return reason
        self.converted += self.as_text and uses_tools
        return None

    def _problem(
        self, prompt: Sequence[Message], completion: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str | None:
        request, answer, definitions = self.written(prompt, completion, tools)
        try:
            trained = _completion_text(self.template, request, answer, definitions)
            if not completion:
                return None
            if calls := answer[0].get("tool_calls"):
                marked = [{**answer[0], "tool_calls": [_marked(call, index) for index, call in enumerate(calls)]}]
                rendered = _completion_text(self.template, request, marked, definitions)
                complete = all(mark in rendered for index in range(len(calls)) for mark in _marks(index))
                return None if complete else "the chat template leaves out tool calls"
        except TemplateRefused as error:
            return f"the chat template refuses the messages: {error}"
        content = str(answer[0].get("content") or "").rpartition(_THOUGHT)[2].strip()
        return None if content in trained and trained.strip() else "the chat template leaves out the answer"

    def to_dict(self) -> dict[str, Any]:
        """For the manifest: numbers of rendered calls, of calls with tools as text, and of refused calls by reason."""
        counts = {"calls": self.calls, "converted": self.converted, "refused": sum(self.refused.values())}
        return {"tools": "text" if self.as_text else "native", **counts, "reasons": dict(self.refused)}


def _completion_text(
    template: ChatTemplate | None,
    prompt: Sequence[Message],
    completion: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """The text that is trained on, found as in TRL: where prompt plus completion differs from the rendered prompt."""
    assert template is not None
    request = template.render(prompt, tools=tools, generate=True)
    conversation = template.render([*prompt, *completion], tools=tools)
    return conversation[len(os.path.commonprefix([request, conversation])) :]  # noqa: RUF071 (of any texts)


def _marks(at: int) -> tuple[str, str]:
    return f"mark{at}name", f"mark{at}value"


def _marked(call: Mapping[str, Any], at: int) -> dict[str, Any]:
    name, value = _marks(at)
    return {**call, "function": {"name": name, "arguments": {"argument": value}}}


def shows_tools(template: ChatTemplate) -> bool:
    """Whether a template renders tool definitions, tool calls and tool results."""
    offered = {
        "type": "function",
        "function": {"name": "offered", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    calls = [_marked({"id": "call_0", "type": "function"}, 0)]
    result = {"role": "tool", "tool_call_id": "call_0", "name": "mark0name", "content": "resultmark"}
    talk: list[Message] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        result,
    ]
    try:
        text = template.render(talk, tools=[offered], generate=True)
    except TemplateRefused:
        return False
    return all(mark in text for mark in ("offered", *_marks(0), "resultmark"))


def _renders_text_arguments(template: ChatTemplate) -> bool:
    """Whether a template renders arguments that are JSON text as they are, as many do next to objects."""
    arguments = '{"mark":1e0}'
    call = {"id": "call_0", "type": "function", "function": {"name": "called", "arguments": arguments}}
    try:
        return arguments in template.render(
            [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        )
    except TemplateRefused:
        return False


def _in_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """Messages with tools as text.

    Tool definitions go to the system message, calls to the assistant's text, consecutive results to one user message.
    """
    rest = list(messages)
    if tools:
        offer = _OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        first = rest.pop(0) if rest and rest[0].get("role") == "system" else None
        yield {"role": "system", "content": _joined(first["content"] if first else None, offer)}
    results: list[str] = []
    for message in rest:
        if message.get("role") == "tool":
            results.append(f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        if message.get("tool_calls"):
            calls = [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in message["tool_calls"]]
            fields = {key: value for key, value in message.items() if key != "tool_calls"}
            yield {**fields, "content": _joined(message.get("content"), "\n".join(calls), "\n")}
        else:
            yield message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _call_text(function: Mapping[str, Any]) -> str:
    """A call as JSON, with the arguments in the model's spelling."""
    arguments = function["arguments"] or {}
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {spelled}}}'


def _joined(content: Any, text: str, between: str = "\n\n") -> Any:
    """Append text to a content, which may be a list of parts."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": between + text}]
    return f"{content}{between}{text}" if content else text


def _text(content: Any) -> str:
    return value_text(content)


_SYSTEM, _USER, _ANSWER, _AGAIN = "probe-system", "probe-user", "probe-answer", "probe-again"
_TURNS = """{{%- for message in messages %}}
{{%- if loop.first and message['role'] != 'system' %}}{{{{ {preface} }}}}{{% endif %}}
{{%- if message['role'] == 'system' %}}{{{{ {system[0]} + message['content']{trim} + {system[1]} }}}}
{{%- elif message['role'] == 'assistant' %}}{{{{ {answer[0]} }}}}
{{%- generation %}}{{{{ {answer[1]} + message['content']{trim} + {answer[2]} }}}}{{% endgeneration %}}
{{%- else %}}{{{{ {user[0]} + message['content']{trim} + {user[1]} }}}}
{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ {answer[0]} }}}}{{% endif %}}"""


def marked_by_trl(template: ChatTemplate) -> bool | None:
    """Whether TRL has a marked template for this one, which it compares by text; None if TRL is not installed."""
    found = find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return any(
        known.read_text(encoding="utf-8") == template.text
        for known in folder.glob("*.jinja")
        if known.with_stem(f"{known.stem}_training").exists()
    )


def training_template(template: ChatTemplate) -> ChatTemplate | None:
    """The template with `generation` marks around the assistant's text, which TRL's `assistant_only_loss` requires.

    The result renders only text conversations of system, user and assistant. Compare it with the original template on
    the rows it is used for.

    Returns:
        None if the template already has marks, or if it does more than render one turn after another. TRL has marked
        templates for known model families.
    """
    if template.marks_generation or ("bos_token" in template.text and "bos_token" not in template.tokens):
        return None
    try:
        source = _marked_source(template)
    except (TemplateRefused, ValueError):
        return None
    return ChatTemplate(source, template.source, template.tokens)


def _marked_source(template: ChatTemplate) -> str:
    """Jinja source of a marked template. Finds the text around each turn by rendering conversations that differ by one.

    Raises:
        ValueError: A turn changes the rendering of earlier turns, or is rendered in several ways or not at all.
    """
    turns = (("system", _SYSTEM), ("user", _USER), ("assistant", _ANSWER), ("user", _AGAIN))
    system, user, answer, again = ({"role": role, "content": text} for role, text in turns)
    request, answered = template.render([system, user]), template.render([system, user, answer])
    answer_ends = _ends(_after(request, answered), _ANSWER)
    user_ends = _ends(_after(answered, template.render([system, user, answer, again])), _AGAIN)
    system_ends = _ends(_before(request, user_ends[0] + _USER + user_ends[1]), _SYSTEM)
    preface = _before(template.render([user]), user_ends[0] + _USER + user_ends[1])
    opening = _after(request, template.render([system, user], generate=True))
    begins = _after(opening, answer_ends[0])  # text that the model generates before the answer itself
    trim = "" if " x " in template.render([{"role": "user", "content": " x "}]) else " | trim"
    ends = {"system": system_ends, "answer": (opening, begins, answer_ends[1]), "user": user_ends}
    quoted = {name: tuple(json.dumps(text, ensure_ascii=False) for text in around) for name, around in ends.items()}
    return _TURNS.format(preface=json.dumps(preface, ensure_ascii=False), trim=trim, **quoted)


def _after(start: str, text: str) -> str:
    if not text.startswith(start):
        raise ValueError("a turn changes the rendering of earlier turns")
    return text[len(start) :]


def _before(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError("a turn is rendered in several ways")
    return text[: len(text) - len(end)]


def _ends(text: str, content: str) -> tuple[str, str]:
    before, separator, after = text.partition(content)
    if not separator:
        raise ValueError("a turn is not rendered")
    return before, after


# -- Training rows from a group of rollouts, in the formats of TRL's trainers. Does not select, anonymize or write.


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
    request, answer, definitions = renderer.written(prompt, completion, tools)
    return request, answer, as_json(definitions or None)


def sft_rows(episode: Episode, renderer: RowRenderer, *, whole: bool, demos: bool = True) -> Iterator[Row]:
    """SFT rows of a rollout: one per LM call, with `prompt` and `completion` as messages and `tools` as JSON text.

    Args:
        renderer: Converts messages and tools to the form that the model's chat template renders.
        whole: One row per conversation with `messages`. A call that a later call continues is part of that row.
        demos: Keep the demonstrations of DSPy prompts. Without them, the model learns to answer without demonstrations
            (context distillation: Snell, Klein, Zhong 2022, arXiv:2209.15189).
    """
    quality = episode.quality
    if not whole:
        for turn in episode.usable:
            prompt, completion, tools = _written(renderer, *trained_parts(turn, demos=demos))
            fields = {"prompt": prompt, "completion": completion, "tools": tools, "quality": quality}
            yield {**fields, **_where(episode, turn)}
        return
    conversations = [(turn, turn.messages) for turn in episode.usable]
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
    return len(later) > len(earlier) and all(map(_same, later, earlier))


def _same(later: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    return _plain(later) == _plain(earlier)


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


def preference_rows(calls: Iterable[tuple[Episode, Turn]], renderer: RowRenderer, *, margin: float) -> Iterator[Row]:
    """DPO pairs with `chosen` and `rejected`.

    The two answers of a pair have the same prompt, tools and output schema; tool-call ids are ignored in the
    comparison. The answer with the higher return is `chosen`.

    Args:
        calls: Credited calls of one group.
        renderer: Converts messages and tools to the form that the model's chat template renders.
        margin: Minimum difference between the two returns.
    """
    by_prompt: dict[str, list[tuple[Episode, Turn]]] = {}
    for episode, turn in calls:
        request, _, definitions = trained_parts(turn)
        prompt, _, _ = _written(renderer, request, [], definitions)
        key = as_json([_numbered(prompt), definitions, output_schema(turn.request)])
        by_prompt.setdefault(key, []).append((episode, turn))
    for entries in by_prompt.values():
        seen: set[tuple[str, str]] = set()
        for first, second in combinations(entries, 2):
            (_, worse), (episode, better) = sorted((first, second), key=lambda call: call[1].credited)
            margin_of_pair = better.credited - worse.credited
            prompt, chosen, tools = _written(renderer, *trained_parts(better))
            rejected = _written(renderer, *trained_parts(worse))[1]
            keys = (_answer_key(chosen[0]), _answer_key(rejected[0]))
            if margin_of_pair < margin or keys[0] == keys[1] or keys in seen:
                continue
            seen.add(keys)
            pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": tools, "margin": margin_of_pair}
            yield {**pair, **_where(episode, better)}


def labelled_rows(calls: Iterable[tuple[Episode, Turn]], renderer: RowRenderer, *, good: float) -> Iterator[Row]:
    """KTO rows with `label`.

    Args:
        calls: Credited calls of one group.
        good: Quality in [0, 1] from which a label is True.
    """
    for episode, turn in calls:
        prompt, completion, tools = _written(renderer, *trained_parts(turn))
        label = (episode.quality or 0.0) >= good
        fields = {"prompt": prompt, "completion": completion, "tools": tools, "label": label, "return": turn.credited}
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
        if called := message.get("tool_calls"):
            calls = [{**call, "id": numbers.setdefault(call["id"], str(len(numbers)))} for call in called]
            message = {**message, "tool_calls": calls}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": numbers.get(message["tool_call_id"], "")}
        result.append(message)
    return result
