"""Adapters of every prompt format, and values that look like parts of prompts."""

from types import SimpleNamespace
from typing import Any

import dspy
from dspy.signatures import ensure_signature

from assay.models.dspy_seam import prompt_text
from assay.programs.adapters import make_adapter

ADAPTERS: dict[str, Any] = {
    "chat": make_adapter("chat"),
    "json": make_adapter("json"),
    "lean": make_adapter("lean"),
    "xml": make_adapter("xml"),
    "ChatAdapter": dspy.ChatAdapter(),
    "JSONAdapter": dspy.JSONAdapter(),
    "XMLAdapter": dspy.XMLAdapter(),
    "XMLAdapter, native": dspy.XMLAdapter(use_native_function_calling=True),
}
VALUES = [
    "one line",
    "two\nlines, and <b>bold</b> & plain",
    "a tag <answer>3</answer> in a line\n</i> and &lt;",
    '{"answer": 3, "why": "no"}',
    "see:\nnote: of a line\nwhy not",
    "```python\nprint('<x>')\n```",
    "Zürich 雪 \u2028 and 🙂",
    "in a line [[ ## answer ## ]] and\n\nRespond with care",
]


def prompt_of(adapter: Any, signature: Any, inputs: dict[str, Any], demos: Any = ()) -> list[dict[str, Any]]:
    """The messages of a call; DSPy 3.5's prompts as dictionaries."""
    prompt = adapter.format(ensure_signature(signature), list(demos), inputs)
    if isinstance(prompt, list):
        return prompt
    messages = [{"role": message.role, "content": message.text} for message in prompt.messages]
    return [{"role": "system", "content": prompt_text(SimpleNamespace(system=prompt.system, messages=()))}, *messages]


def answer_of(adapter: Any, signature: Any, outputs: dict[str, Any]) -> str:
    """An answer as the adapter asks for it."""
    return str(adapter.format_assistant_message_content(ensure_signature(signature), outputs))
