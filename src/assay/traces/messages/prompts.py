"""The prompts of a program's run: which of them continue it. Does not import DSPy."""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.support.sections import adapter_readings, answer_fields, format_of, nested_outputs, output_names
from assay.traces.messages.dialects import Answer, Message, chat_messages, part_texts
from assay.traces.messages.parts import object_of
from assay.traces.records import Transition

_FORM = re.compile(r"All interactions will be structured.*?(?=In adhering to this structure|\Z)", re.DOTALL)
_MODULE_FIELDS = re.compile(  # fields that DSPy's modules add to a task's inputs: ReAct, ProgramOfThought, retrieval
    r"trajectory|(?:thought|tool_name|tool_args|observation)_\d+|previous_code|final_generated_code|code_output|error"
    r"|context|passages"
)
_SYSTEM = ("system", "developer")
_LONG = 12  # minimum characters of a text that is recognised inside another one


def asked_outputs(messages: Sequence[Message]) -> tuple[str, ...]:
    """Names of the output fields that a prompt asks for; empty if no adapter of DSPy or assay wrote it."""
    return output_names(_system(messages))


def answered_fields(request: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """Fields in the text of an answer; empty if no adapter of DSPy or assay wrote the request, or it has none."""
    messages = chat_messages(request)
    outputs, nested = asked_outputs(messages), nested_outputs(_system(messages))
    return answer_fields(answer.output, names=outputs, nested=nested) if outputs else {}


def sent_formats(calls: Sequence[Transition]) -> Counter[str]:
    """Prompt formats of recorded calls with their counts; calls that no adapter wrote are left out."""
    formats = Counter(format_of(_system(chat_messages(call.request))) for call in calls)
    del formats[""]
    return formats


def _system(messages: Sequence[Message]) -> str:
    return next((part_texts(m.get("content")) for m in messages if m.get("role") in _SYSTEM), "")


def arguments_of(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each tool call of an answer."""
    return [(name, object_of(arguments)) for _, name, arguments in answer.tools]


def output_values(answer: Answer, outputs: Collection[str] = ()) -> list[tuple[str, str]]:
    """Names and values of the fields of an answer; empty if it has none.

    Args:
        outputs: names of the fields, see `asked_outputs`.
    """
    fields = answer_fields(answer.output, arguments_of(answer), outputs)
    texts = (
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in fields.items()
    )
    return [(name, value.strip()) for name, value in texts if value.strip() not in ("", "{}", "[]", "null")]


@dataclass(frozen=True)
class Prompt:
    """A prompt of an adapter of DSPy or assay.

    Args:
        readings: Fields of the last message, by name; several where the format is ambiguous, the most likely first.
        signature: System message without the description of the output format.
    """

    readings: Sequence[Mapping[str, str]] = ()
    signature: str = ""

    @property
    def sections(self) -> Mapping[str, str]:
        """Fields of the last message as it was most likely written."""
        return self.readings[0] if self.readings else {}

    @classmethod
    def of(cls, messages: Sequence[Message]) -> "Prompt":
        """Parse messages. The result has no sections if no adapter wrote them."""
        if not messages or messages[-1].get("role") != "user":
            return cls()
        system = _system(messages)
        readings = adapter_readings(system, part_texts(messages[-1].get("content")))
        return cls(readings, _FORM.sub("", system)) if readings else cls()

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
        shares = [
            share
            for before in first.readings
            for sections in self.readings
            if (share := self._share(sections, before, first, answers, latest)) is not None
        ]
        return max(shares, default=None)

    def _share(
        self,
        sections: Mapping[str, str],
        before: Mapping[str, str],
        first: "Prompt",
        answers: Sequence[tuple[str, str]],
        latest: Sequence[tuple[str, str]],
    ) -> float | None:
        """`follows` for a reading of each prompt."""
        if not any(value and before.get(name) == value for name, value in sections.items()):
            return None
        more = {name: value for name, value in sections.items() if value and before.get(name) != value}
        if not more:
            return 0.0 if not latest and self.signature == first.signature else None
        if not all(
            name in before or _MODULE_FIELDS.fullmatch(name) or _in_answers(name, value, answers)
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
