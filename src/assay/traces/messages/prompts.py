"""Parses the prompts and answers of DSPy's adapters: sections with the fields of a signature. Does not import DSPy."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.traces.messages.dialects import Message, part_texts

__all__ = ["Prompt", "output_values", "sections_of"]

_SECTION = re.compile(r"^\[\[ ## (\w+) ## \]\][^\S\n]*$", re.MULTILINE)
_ASKS = re.compile(
    r"\n\nRespond with (?:the corresponding output fields|a JSON object)\b.*\Z", re.DOTALL
)  # end of an adapter's prompt
_FORM = re.compile(r"All interactions will be structured.*?(?=In adhering to this structure|\Z)", re.DOTALL)
_MODULE_FIELDS = re.compile(  # fields that DSPy's modules add to a task's inputs: ReAct, ProgramOfThought, retrieval
    r"trajectory|(?:thought|tool_name|tool_args|observation)_\d+|previous_code|final_generated_code|code_output|error"
    r"|context|passages"
)
_LONG = 12  # minimum characters of a text that is recognised inside another one


def sections_of(text: str) -> dict[str, str]:
    """Fields of a text in DSPy's section format, by name; empty without sections."""
    _, *parts = _SECTION.split(text)
    sections = {name: part.strip() for name, part in zip(parts[::2], parts[1::2], strict=True)}
    sections.pop("completed", None)
    return sections


def output_values(text: str) -> list[tuple[str, str]]:
    """Names and values of the fields of an answer, from its sections or its JSON object; empty if it has neither."""
    fields: Any = sections_of(text)
    if not fields:
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            return []
    pairs = fields.items() if isinstance(fields, dict) else ()
    texts = (
        (str(name), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for name, value in pairs
    )
    return [(name, value.strip()) for name, value in texts if value.strip() not in ("", "{}", "[]", "null")]


@dataclass(frozen=True)
class Prompt:
    """A prompt of a DSPy adapter.

    Args:
        sections: Fields of the last message, by name.
        signature: System message without the description of the output format.
    """

    sections: Mapping[str, str] = field(default_factory=dict)
    signature: str = ""

    @classmethod
    def of(cls, messages: Sequence[Message]) -> "Prompt":
        """Parse messages. The result has no sections if a DSPy adapter did not write them."""
        if not messages or messages[-1].get("role") != "user":
            return cls()
        sections = sections_of(_ASKS.sub("", part_texts(messages[-1].get("content"))))
        system = next((part_texts(m.get("content")) for m in messages if m.get("role") == "system"), "")
        return cls(sections, _FORM.sub("", system)) if sections else cls()

    def follows(
        self, first: "Prompt", answers: Sequence[tuple[str, str]], latest: Sequence[tuple[str, str]]
    ) -> float | None:
        """Whether this is a later prompt of the program run that `first` started.

        It must have inputs of the first prompt, and otherwise only fields from earlier answers or fields that DSPy's
        modules add. Identical inputs belong to the same run only if the latest answer could not be parsed, because the
        adapter then retries in another format.

        Args:
            first: First prompt of the run.
            answers: Fields of all answers of the run.
            latest: Fields of the latest answer.
        Returns:
            Share of the latest answer's fields that are in this prompt, in [0, 1]; None if it is another run.
        """
        if not any(value and first.sections.get(name) == value for name, value in self.sections.items()):
            return None
        more = {name: value for name, value in self.sections.items() if value and first.sections.get(name) != value}
        if not more:
            return 0.0 if not latest and self.signature == first.signature else None
        if not all(
            name in first.sections or _MODULE_FIELDS.fullmatch(name) or _in_answers(name, value, answers)
            for name, value in more.items()
        ):
            return None
        if not any(
            _in_answers(name, value, answers, within=bool(_MODULE_FIELDS.fullmatch(name)))
            for name, value in more.items()
        ):
            return None
        texts = "\n".join(more.values())
        return sum(value in texts for _, value in latest) / len(latest) if latest else 0.0


def _in_answers(name: str, value: str, answers: Sequence[tuple[str, str]], *, within: bool = False) -> bool:
    """Whether a field has text of an earlier answer: the field of the same name, or a text of at least `_LONG`
    characters.

    Args:
        within: Accept short texts of other fields too.
    """
    return any(
        (known == name and text == value) or (text in value and (within or len(text) >= _LONG))
        for known, text in answers
    )
