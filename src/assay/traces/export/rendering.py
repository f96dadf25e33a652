"""Checks that the chat template of the model to be trained renders a training row, and converts tool calls to text.

A template that ignores `tool_calls` renders a tool call as an empty answer, and a model trained on it learns to answer
nothing. Such rows are converted, with tool definitions, calls and results as text, or they are refused and counted.
Does not select, anonymize or write rows.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.models.chat_templates import ChatTemplate, TemplateRefused
from assay.support.values import value_text
from assay.traces.messages.parts import object_of

__all__ = ["TOOL_FORMS", "RowRenderer", "marked_by_trl", "shows_tools", "training_template"]

Message = dict[str, Any]
TOOL_FORMS = ("auto", "native", "text")
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

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The tool definitions to write in their own field; empty if tools are text."""
        return [] if self.as_text else list(tools)

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
        conversation, definitions = self.messages([*prompt, *completion], tools), self.tools(tools)
        request, answer = (
            conversation[: len(conversation) - len(completion)],
            conversation[len(conversation) - len(completion) :],
        )
        try:
            trained = _completion_text(self.template, request, answer, definitions)
            if not completion:
                return None
            if calls := answer[0].get("tool_calls"):
                marked = [{**answer[0], "tool_calls": [_marked(call, index) for index, call in enumerate(calls)]}]
                rendered = _completion_text(self.template, request, marked, definitions)
                return (
                    None
                    if all(mark in rendered for index in range(len(calls)) for mark in _marks(index))
                    else "the chat template leaves out tool calls"
                )
        except TemplateRefused as error:
            return f"the chat template refuses the messages: {error}"
        content = str(answer[0].get("content") or "").rpartition(_THOUGHT)[2].strip()
        return None if content in trained and trained.strip() else "the chat template leaves out the answer"

    def to_dict(self) -> dict[str, Any]:
        """For the manifest: numbers of rendered calls, of calls with tools as text, and of refused calls by reason."""
        form = "text" if self.as_text else "native"
        return {
            "tools": form,
            "calls": self.calls,
            "converted": self.converted,
            "refused": sum(self.refused.values()),
            "reasons": dict(self.refused),
        }


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
    if conversation.startswith(request):
        return conversation[len(request) :]
    return conversation[
        next(
            (index for index, (left, right) in enumerate(zip(request, conversation, strict=False)) if left != right),
            len(conversation),
        ) :
    ]


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
