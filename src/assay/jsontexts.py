"""JSON that stands in a text: its values changed, and every other byte of the text kept. Does not know what a secret is."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

__all__ = ["is_json", "rewritten", "with_values"]

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.S)  # the last one may have been cut


def is_json(text: str) -> bool:
    """Whether a text begins like a JSON object or list."""
    return text.lstrip()[:1] in ("{", "[")


def with_values(text: str, changed: Callable[[str, str], str]) -> str:
    """The text with the values of its JSON's fields that are strings, at any depth, as `changed` gives them. Also of JSON that was cut.

    Args:
        changed: is given a field's name and value; where it returns that very value, nothing of the text changes.
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
    """`new` as JSON in the form in which `text` writes `value`: its spaces, line breaks and escapes."""
    for indent in (None, 2, 4, 1, "\t"):
        for separators in ((", ", ": "), (",", ":")) if indent is None else ((",", ": "),):
            for ascii_alone in (True, False):
                if json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_alone) == text:
                    return json.dumps(new, indent=indent, separators=separators, ensure_ascii=ascii_alone)
    return json.dumps(new, ensure_ascii=text.isascii())
