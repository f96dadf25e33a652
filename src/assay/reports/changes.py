"""The difference of two texts by lines, for a prompt before and after."""

import difflib
from dataclasses import dataclass

from assay.reports.texts import readable

_MOST_LINES, _MOST_CHARACTERS = 400, 20_000
_AROUND = 2  # unchanged lines that are shown next to changed ones


@dataclass(frozen=True)
class Change:
    """Lines of both texts (`kind` is `same`), of one (`removed`, `added`), or not shown (`skipped`: a number)."""

    kind: str
    text: str
    lines: int = 0


def changes_of(before: str, after: str) -> list[Change]:
    """Runs of lines in order; of unchanged ones only those around a change. Empty if the texts are equal.

    Only the first 400 lines and 20,000 characters of each are compared, so that no text can make this slow.
    """
    if before == after:
        return []
    old, new = _lines(before), _lines(after)
    changes: list[Change] = []
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    for place, (kind, start, end, new_start, new_end) in enumerate(blocks):
        if kind == "equal":
            changes += _around(old[start:end], is_first=place == 0, is_last=place == len(blocks) - 1)
            continue
        if end > start:
            changes.append(Change("removed", "\n".join(old[start:end])))
        if new_end > new_start:
            changes.append(Change("added", "\n".join(new[new_start:new_end])))
    return changes


def _lines(text: str) -> list[str]:
    lines = text[:_MOST_CHARACTERS].split("\n")
    cut = len(text) > _MOST_CHARACTERS or len(lines) > _MOST_LINES
    return [readable(line) for line in lines[:_MOST_LINES]] + (["… (cut here)"] if cut else [])


def _around(lines: list[str], *, is_first: bool, is_last: bool) -> list[Change]:
    """Unchanged lines, without those in the middle that no change is near to."""
    head, tail = (0 if is_first else _AROUND), (0 if is_last else _AROUND)
    left_out = len(lines) - head - tail
    if left_out < 2:
        return [Change("same", "\n".join(lines))]
    parts = [Change("same", "\n".join(lines[:head]))] if head else []
    parts.append(Change("skipped", "", left_out))
    return parts + ([Change("same", "\n".join(lines[-tail:]))] if tail else [])
