"""Values as texts of a page: numbers, times, and texts of models, whose invisible characters are made visible.

Two texts are compared by lines, such as a prompt before and after.
"""

import difflib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from assay.support.values import json_text

# Control characters that HTML does not have, and marks that reorder the text around them.
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_VALUE = re.compile(r'\{"(?:[^"\\]|\\.)*":\s*(.*)', re.DOTALL)
_LINE = 100  # characters of a setting that is shown in one line
_CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")


def readable(text: Any) -> str:
    """A text that a page can show: control characters, marks of direction and lone surrogates as `[U+202E]`."""
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return _SURROGATE.sub(_named, _INVISIBLE.sub(_named, text))


def _named(match: re.Match[str]) -> str:
    return f"[U+{ord(match[0]):04X}]"


class Clipped:
    """The beginning of a text. `left_out` is the number of characters behind it."""

    def __init__(self, text: str, most: int) -> None:
        self.text = readable(text[:most])
        self.left_out = max(0, len(text) - most)


class Budget:
    """Limits the texts of one page, so that it is small whatever a rollout holds.

    Args:
        total: characters of all texts.
        most: characters of one text.
        least: characters of one text once the total is spent.
    """

    def __init__(self, total: int = 50_000, *, most: int = 4_000, least: int = 200) -> None:
        self._left, self._most, self._least = total, most, least

    def clip(self, text: Any) -> Clipped:
        clipped = Clipped(str(text), max(self._least, min(self._most, self._left)))
        self._left -= len(clipped.text)
        return clipped


def preview(inputs: str, most: int = 120) -> str:
    """The first value of a JSON object, of which `inputs` is the beginning, in one line."""
    match = _VALUE.match(inputs)
    if match is None:
        return ""
    value = match[1]
    if value.startswith('"'):
        end = re.match(r'"((?:[^"\\]|\\.)*)', value, re.DOTALL)
        written = _CUT_ESCAPE.sub(r"\1", end[1] if end else "")
        try:
            value = json.loads(f'"{written}"', strict=False)
        except json.JSONDecodeError:
            value = written
    line = " ".join(value[: 4 * most].split())
    return readable(line[:most] + ("…" if len(line) > most else ""))


def pretty(value: Any, *, line: int = 0) -> str:
    """A value as indented JSON, or in one line if that has at most `line` characters; a text as it is."""
    if isinstance(value, str):
        return value
    short = json_text(value) if line else ""
    if 0 < len(short) <= line:
        return short
    return json_text(value, indent=2)


def plain(value: Any) -> str:
    """A value for a reader: an object as `name: value` lines, and any other value as in `pretty`.

    A text that is a JSON object, which judges are shown for an output of several fields, is written like the object.
    """
    if isinstance(value, str) and value[:1] == "{":
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    if not isinstance(value, dict) or not value:
        return pretty(value)
    return "\n".join(f"{name}: {pretty(part, line=100)}" for name, part in value.items())


def setting_texts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts of the settings of a run that have a value, without the kind of the run."""
    for name, value in config.items():
        if value not in (None, {}, [], "") and name != "kind":
            yield name.replace("_", " "), _setting(value)


def leaf_texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The values in nested objects and lists, each with its path; a list of plain values is one of them."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from leaf_texts(part, f"{name} {key}".strip())
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        for number, part in enumerate(value, 1):
            yield from leaf_texts(part, f"{name} {number}")
    else:
        yield from setting_texts({name: value})


def _setting(value: Any) -> str:
    """A value of a setting: yes or no, a number as short as it is, lists and flat objects without brackets."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        return ", ".join(map(_setting, value))
    if isinstance(value, dict) and not any(isinstance(part, dict | list) for part in value.values()):
        return ", ".join(f"{name} {_setting(part)}" for name, part in value.items())
    return pretty(value, line=_LINE) if isinstance(value, dict | list) else str(value)


def moment(at: float | None) -> str:
    """A time in the server's zone; a dash where there is none or it is not a date."""
    try:
        return "–" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "–"


def iso(at: float | None) -> str:
    """A time for the attribute `datetime`; empty where there is none or it is not a date."""
    try:
        return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return ""


def seconds(value: float | None) -> str:
    """A duration; a dash where there is none."""
    if value is None:
        return "–"
    if value < 10:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def size(characters: int) -> str:
    """A number of characters."""
    return f"{characters:,} characters"


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
