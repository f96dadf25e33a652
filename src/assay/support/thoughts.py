"""Thoughts in the text of an answer: what a reasoning model writes between `<think>` and `</think>`.

Servers that know a model's marks return its thoughts apart; the others leave them in the text.
"""

import re
from collections.abc import Collection

_NAMES = "think|thinking|thoughts?|reasoning|reflection|scratchpad|seed:think"
# marks of DeepSeek, Qwen and Seed; Mistral; OpenThoughts; Kimi; Cohere; gpt-oss; Gemma. A quoted mark is a mention.
_MARK = re.compile(
    rf"(?<!['\"`])(?:(?P<opens><(?:{_NAMES})(?:\s[^<>]*)?>|\[THINK\]|<\|begin_of_thought\|>|◁think▷"
    r"|<\|START_THINKING\|>|<\|channel\|>(?:analysis|commentary)\b|<unused94>)"
    rf"|</(?:{_NAMES})\s*>|\[/THINK\]|<\|end_of_thought\|>|◁/think▷|<\|END_THINKING\|>"
    r"|<\|channel\|>final(?:<\|message\|>)?|<unused95>)",
    re.IGNORECASE,
)
_TAG = re.compile(r"</?(\w+)")


def without_thoughts(text: str, fields: Collection[str] = ()) -> str:
    """The text outside of thoughts.

    A thought that is not closed reaches to the end of the text: an answer that was cut within it is empty. What comes
    before a closing mark without an opening one is a thought too, because some templates open it in the prompt.

    Args:
        fields: names of tags that are fields of the answer, such as `reasoning` in XML.
    """
    spans = _spans_outside(text, fields)
    return text if spans is None else "".join(text[start:end] for start, end in spans).strip()


def blanked_thoughts(text: str, fields: Collection[str] = ()) -> str:
    """The text with spaces instead of thoughts, so that positions stay the same; see `without_thoughts`."""
    spans = _spans_outside(text, fields)
    if spans is None:
        return text
    parts, at = list[str](), 0
    for start, end in spans:
        parts += [" " * (start - at), text[start:end]]
        at = end
    return "".join([*parts, " " * (len(text) - at)])


def _spans_outside(text: str, fields: Collection[str]) -> list[tuple[int, int]] | None:
    """Spans of the text outside of thoughts; None if it has no marks."""
    kept, depth, at = list[tuple[int, int]](), 0, 0
    for mark in _MARK.finditer(text):
        if fields and (tag := _TAG.match(mark[0])) and tag[1] in fields:
            continue
        if depth == 0:
            kept.append((at, mark.start()))
        if mark["opens"]:
            depth += not mark["opens"].startswith("<|channel|>") or depth == 0  # channels follow each other
        elif depth == 0:
            kept.clear()
        else:
            depth = 0 if mark[0].startswith("<|channel|>") else depth - 1
        at = mark.end()
    return None if at == 0 else [*kept, *([(at, len(text))] if depth == 0 else [])]
