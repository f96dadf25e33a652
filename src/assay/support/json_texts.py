"""Edits JSON inside of a text: changes values, and keeps every other byte. Does not know what a secret is."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.S)  # the last string may be truncated


def is_json(text: str) -> bool:
    """Whether a text starts like a JSON object or list."""
    return text.lstrip()[:1] in ("{", "[")


def with_values(text: str, changed: Callable[[str, str], str]) -> str:
    """The text with all string values of JSON fields, at any depth, replaced by `changed`. The JSON may be truncated.

    Args:
        changed: called with the name and the value of a field; the text is unchanged where it returns an equal value.
    """
    strings = list(_STRING.finditer(text))
    parts, at = [], 0
    for named, valued in pairwise(strings):
        if text[named.end() : valued.start()].strip() != ":":
            continue
        value = _read(valued[0])
        if (new := changed(_read(named[0]), value)) != value:
            parts += [text[at : valued.start()], json.dumps(new, ensure_ascii=valued[0].isascii())]
            at = valued.end()
    return "".join([*parts, text[at:]]) if parts else text


def _read(written: str) -> str:
    if len(written) < 2 or not written.endswith('"'):
        return written[1:]
    try:
        return str(json.loads(written, strict=False))
    except ValueError:
        return written[1:-1]


def rewritten(text: str, value: Any, new: Any) -> str:
    """`new` as JSON in the format in which `text` writes `value`: spaces, line breaks and escapes."""
    for indent in (None, 2, 4, 1, "\t"):
        for separators in ((", ", ": "), (",", ":")) if indent is None else ((",", ": "),):
            for ascii_alone in (True, False):
                if json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_alone) == text:
                    return json.dumps(new, indent=indent, separators=separators, ensure_ascii=ascii_alone)
    return json.dumps(new, ensure_ascii=text.isascii())
