"""Replaces texts of an agent in its requests, in all dialects. The agent's code and its other messages do not change.

A text is recognised by its literal pieces, in their order; what its placeholders were rendered to is written into the
new text. It is replaced only in the roles in which it was seen when the agent sent its own text.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from assay.errors import ConfigError
from assay.support.placeholders import inner_of, outer_of

Roles: TypeAlias = Mapping[str, frozenset[str]]  # text -> roles: system, user, assistant, tool, tools (definitions)
_SYSTEM = ("system", "instructions", "systemInstruction", "system_instruction")
_TOOLS = ("tools", "functions")
_MESSAGES = ("messages", "input", "contents", "prompt")
_ROLES = {"developer": "system", "model": "assistant", "function": "tool"}
_OF_TYPES = {  # types of items and parts that have a role of their own
    "function_call": "assistant", "tool_use": "assistant", "function_call_output": "tool", "tool_result": "tool",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NewText:
    """A text in place of one of the agent's own.

    Attributes:
        name: of the text.
        before, after: templates with the same placeholders.
        examples: added to `after`; braces in it are no placeholders.
    """

    name: str
    before: str
    after: str
    examples: str = ""


class TextSwap:
    """The texts of one rollout.

    Args:
        roles: where each text may be replaced; None replaces and notes it wherever it is found.

    Attributes:
        seen: the roles in which each text was found so far.
        places: in how many places of one request it was, at most.
    """

    def __init__(self, texts: Sequence[NewText], roles: Roles | None = None) -> None:
        self._texts = sorted((_Matcher(text) for text in texts), key=lambda matcher: -matcher.length)
        self._roles = roles
        self.seen: dict[str, set[str]] = defaultdict(set)
        self.places = Counter[str]()

    def body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request with the new texts; parts without any are the same objects as before."""
        found = Counter[str]()
        changed = with_texts(body, partial(self._replaced, found))
        self.places |= found
        return changed

    def _replaced(self, places: Counter[str], text: str, role: str) -> str:
        plain = text.replace("\r\n", "\n")
        found: list[tuple[int, int, str]] = []
        for matcher in self._texts:
            if self._roles is not None and role not in self._roles.get(matcher.name, ()):
                continue
            for start, end, new in matcher.found_in(plain):
                if all(end <= other or start >= other_end for other, other_end, _ in found):
                    found.append((start, end, new))
                    self.seen[matcher.name].add(role)
                    places[matcher.name] += 1
        if all(plain[start:end] == new for start, end, new in found):
            return text
        for start, end, new in sorted(found, reverse=True):
            plain = plain[:start] + new + plain[end:]
        return plain


class _Matcher:
    """Finds a text by its literal pieces, without the placeholders before the first and after the last of them."""

    def __init__(self, text: NewText) -> None:
        self.name, self._examples = text.name, text.examples
        outer = outer_of(text.before)
        before, after = (inner_of(template, outer) for template in (text.before, text.after))
        if before is None or after is None:
            raise ConfigError(f"the new text of {text.name!r} lacks a placeholder at its beginning or its end")
        self._before, self._after = before, after
        self.length = sum(map(len, self._before[::2]))

    def found_in(self, text: str) -> list[tuple[int, int, str]]:
        """Start, end and replacement of each occurrence; none without literal text."""
        found, at = [], 0
        while self.length and (place := self._occurrence(text, at)) is not None:
            start, at, values = place
            found.append((start, at, self._rendered(values)))
        return found

    def _occurrence(self, text: str, at: int) -> tuple[int, int, list[str]] | None:
        first, *others = self._before[::2]
        while (start := text.find(first, at)) >= 0:
            end, values = start + len(first), list[str]()
            for literal in others:
                place = text.find(literal, end)
                if place < 0:
                    return None  # nor does it follow a later occurrence of the first piece
                values.append(text[end:place])
                end = place + len(literal)
            if values:  # what looks like the beginning may stand before the text too
                near = _nearest(first, text, start, start + len(first) + len(values[0]))
                start, values[0] = near, values[0][near - start :]
            return start, end, values
        return None

    def _rendered(self, values: Sequence[str]) -> str:
        rendered = defaultdict[str, list[str]](list)
        for placeholder, value in zip(self._before[1::2], values, strict=True):
            rendered[placeholder].append(value)
        pieces = [
            rendered[piece].pop(0) if at % 2 and rendered[piece] else piece for at, piece in enumerate(self._after)
        ]
        return "".join(pieces) + self._examples


def _nearest(piece: str, text: str, start: int, end: int) -> int:
    """Where a text begins whose first piece is at `start` and whose second one is at `end`: the last place between them
    where the piece begins a line, else the last one, as a placeholder's value may have it within a line."""
    places, at = list[int](), start
    while at >= 0:
        places.append(at)
        at = text.find(piece, at + 1, end)
    return next((place for place in reversed(places) if not place or text[place - 1] == "\n"), places[-1])


def with_texts(body: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """A request of any dialect with its texts changed.

    Args:
        change: text and role -> the text in its place.
    """

    def changed(value: Any, role: str) -> Any:
        if isinstance(value, str):
            return change(value, role)
        if isinstance(value, list):
            items = [changed(item, role) for item in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else items
        if isinstance(value, Mapping):
            role = role if role == "tools" else _role_of(value, role)
            fields = {key: changed(item, role) for key, item in value.items()}
            return value if all(fields[key] is item for key, item in value.items()) else fields
        return value

    def of_field(name: str, value: Any) -> Any:
        if name in _SYSTEM:
            return changed(value, "system")
        if name in _TOOLS:
            return changed(value, "tools")
        return changed(value, "user") if name in _MESSAGES else value

    return {name: of_field(name, value) for name, value in body.items()}


def _role_of(part: Mapping[str, Any], role: str) -> str:
    if isinstance(own := part.get("role"), str):
        return _ROLES.get(own, own)
    if "functionResponse" in part or "function_response" in part:
        return "tool"
    return _OF_TYPES.get(str(part.get("type")), role)
