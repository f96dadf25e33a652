"""Splits the text of a document into passages, as a stream: a document need not fit into memory."""

import re
from collections.abc import Iterable, Iterator

__all__ = ["passages_of"]

# Ends of a passage, the best first: a blank line, a line, a sentence, a word.
_ENDS = (re.compile(r"\n[ \t]*\n"), re.compile(r"\n"), re.compile(r"[.!?]\s"), re.compile(r"\s"))
_LEAST = 3  # a passage that ends early has at least this part of the largest size: one third


def passages_of(blocks: Iterable[str], most: int) -> Iterator[tuple[int, str]]:
    """Passages of at most `most` characters, each with the line on which it begins, from 1.

    Together they have all characters of the document but white space at their ends. Passages without a letter or
    digit are left out.
    """
    rest, line = "", 1
    for block in blocks:
        rest += block
        at = 0
        while len(rest) - at > most:
            end = _end(rest, at, most)
            yield from _passage(rest[at:end], line)
            line += rest.count("\n", at, end)
            at = end
        rest = rest[at:]
    yield from _passage(rest, line)


def _end(text: str, start: int, most: int) -> int:
    """Where a passage ends: at the last end of the best kind in the window."""
    least, limit = start + most // _LEAST, start + most
    for pattern in _ENDS:
        ends = [match.end() for match in pattern.finditer(text, least, limit)]
        if ends:
            return ends[-1]
    return limit


def _passage(text: str, line: int) -> Iterator[tuple[int, str]]:
    stripped = text.strip()
    if any(map(str.isalnum, stripped)):
        before = text[: len(text) - len(text.lstrip())]
        yield line + before.count("\n"), stripped
