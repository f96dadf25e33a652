"""Prompts as DSPy's adapters write them: sections with the inputs of a signature, and answers with its outputs. Does not call DSPy."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.traces.dialects import Message, part_texts

__all__ = ["Prompt", "output_values", "sections_of"]

_SECTION = re.compile(r"^\[\[ ## (\w+) ## \]\][^\S\n]*$", re.MULTILINE)
_ASKS = re.compile(r"\n\nRespond with (?:the corresponding output fields|a JSON object)\b.*\Z", re.DOTALL)  # how an adapter ends a prompt
_FORM = re.compile(r"All interactions will be structured.*?(?=In adhering to this structure|\Z)", re.DOTALL)
_OWN = re.compile(  # fields that DSPy's own modules put beside a task's inputs: ReAct, ProgramOfThought, retrieval
    r"trajectory|(?:thought|tool_name|tool_args|observation)_\d+|previous_code|final_generated_code|code_output|error|context|passages"
)
_LONG = 12  # characters from which a text is known again inside another one


def sections_of(text: str) -> dict[str, str]:
    """The fields of a text in DSPy's sections, by name; empty where it has none."""
    _, *parts = _SECTION.split(text)
    found = {name: part.strip() for name, part in zip(parts[::2], parts[1::2], strict=True)}
    found.pop("completed", None)
    return found


def output_values(text: str) -> list[tuple[str, str]]:
    """Names and values of the fields of an answer: its sections, or its JSON object; empty where it is neither."""
    found: Any = sections_of(text)
    if not found:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return []
    pairs = found.items() if isinstance(found, dict) else ()
    texts = ((str(name), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for name, value in pairs)
    return [(name, value.strip()) for name, value in texts if value.strip() not in ("", "{}", "[]", "null")]


@dataclass(frozen=True)
class Prompt:
    """The last message of a request in DSPy's sections, and what its system message says without the form of the answer."""

    sections: Mapping[str, str] = field(default_factory=dict)
    signature: str = ""

    @classmethod
    def of(cls, messages: Sequence[Message]) -> "Prompt":
        """Without sections where DSPy's adapters did not write this."""
        if not messages or messages[-1].get("role") != "user":
            return cls()
        sections = sections_of(_ASKS.sub("", part_texts(messages[-1].get("content"))))
        system = next((part_texts(m.get("content")) for m in messages if m.get("role") == "system"), "")
        return cls(sections, _FORM.sub("", system)) if sections else cls()

    def follows(self, first: "Prompt", said: Sequence[tuple[str, str]], latest: Sequence[tuple[str, str]]) -> float | None:
        """Whether this is a later prompt of the run of a program that `first` began: the share of its latest answer that is in it, or None.

        It has inputs of the first one, and nothing beside them but what the program said before or what DSPy's modules add. The same inputs
        alone are the same run only where the latest answer could not be read, and the adapter asks again in another form.

        Args:
            said: fields of all answers of the run; `latest` of the last one.
        """
        if not any(value and first.sections.get(name) == value for name, value in self.sections.items()):
            return None
        more = {name: value for name, value in self.sections.items() if value and first.sections.get(name) != value}
        if not more:
            return 0.0 if not latest and self.signature == first.signature else None
        if not all(name in first.sections or _OWN.fullmatch(name) or _is_said(name, value, said) for name, value in more.items()):
            return None
        if not any(_is_said(name, value, said, within=bool(_OWN.fullmatch(name))) for name, value in more.items()):
            return None
        texts = "\n".join(more.values())
        return sum(value in texts for _, value in latest) / len(latest) if latest else 0.0


def _is_said(name: str, value: str, said: Sequence[tuple[str, str]], *, within: bool = False) -> bool:
    """Whether a field holds what was said before: under its own name, or a longer text under any. `within`: also a short one under any name."""
    return any((known == name and text == value) or (text in value and (within or len(text) >= _LONG)) for known, text in said)
