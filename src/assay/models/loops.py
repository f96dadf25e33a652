"""Detects repetition: in generated text, and in tool calls. Depends on nothing, calls no model.

Text is read word by word, as it arrives. Two signals are used, each in constant time per word:

- the words end in exact copies of the same phrase;
- most groups of four words have occurred shortly before. This finds loops that count ("step 1 …, step 2 …").
"""

import json
import re
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Loop",
    "LoopDetector",
    "LoopSettings",
    "TextLoopDetector",
    "ToolLoopDetector",
    "find_final_loop",
    "find_loop",
    "words_of",
]

_GRAM = 4  # words of a group
_WORD = re.compile(r"\w+|[^\w\s]+")  # a run of punctuation is one word, so that a ruled line is not a loop
_LEVELS = ((16, 256), (64, 1024))  # words between two checks for exact copies, and words that a check reads


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Thresholds of the detectors. The defaults raised no alarm on this project's documents and sources.

    Attributes:
        copies: smallest number of exact copies of a phrase, at least 2.
        least_words: smallest number of words that these copies have in total, at least 8.
        reuse: share of the groups of four words in the window that occurred in it before, in (0, 1].
        sustained: number of consecutive words at which the share is at least `reuse`, from which on it is a loop.
        window: number of words in which groups are compared, at least 16.
        calls: number of equal tool calls with equal results, or of rounds of two or three calls, at least 2.
    """

    copies: int = 4
    least_words: int = 64
    reuse: float = 0.4
    sustained: int = 384
    window: int = 128
    calls: int = 2

    def __post_init__(self) -> None:
        least = {"copies": 2, "least_words": 8, "sustained": 1, "window": 16, "calls": 2}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least {low}")
        if not 0 < self.reuse <= 1:
            raise ValueError(f"reuse={self.reuse!r} must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A detected loop.

    Attributes:
        kind: `copies`, `reuse`, `same call` or `alternating calls`.
        period: words or calls of one round; 0 for `reuse`, which has no fixed one.
        start: index of the first word or call that repeats earlier ones.
        end: number of words or calls at the time of detection.
    """

    kind: str
    period: int
    start: int
    end: int

    @property
    def repeated(self) -> int:
        """Number of words or calls that repeat earlier ones."""
        return self.end - self.start


class LoopDetector:
    """Finds loops in a sequence of hashable items, one item at a time. Keeps the first loop that it found.

    Memory is bounded: only the last 1024 items are kept.
    """

    def __init__(self, settings: LoopSettings | None = None) -> None:
        self.settings = settings or LoopSettings()
        self.count = 0
        self.loop: Loop | None = None
        self._tail: deque[Hashable] = deque(maxlen=_LEVELS[-1][1])
        self._grams: deque[tuple[Hashable, ...]] = deque()
        self._known: Counter[tuple[Hashable, ...]] = Counter()
        self._stretch = 0  # consecutive items at which most groups were known

    def add(self, item: Hashable) -> Loop | None:
        """Adds an item. Returns the loop if one was found so far."""
        self._tail.append(item)
        self.count += 1
        if self.loop is None:
            self.loop = self._reuse() or self._copies()
        return self.loop

    @property
    def reuse(self) -> float:
        """Share of the groups in the window that occurred in it before; 0 before the window is full."""
        total = self.settings.window - _GRAM + 1
        return 1 - len(self._known) / total if len(self._grams) == total else 0.0

    @property
    def continues(self) -> bool:
        """Whether the last items belong to a loop."""
        if self._stretch >= self.settings.sustained:
            return True
        return any(self._tail_period(reach) is not None for _, reach in _LEVELS)

    def _reuse(self) -> Loop | None:
        if self.count < _GRAM:
            return None
        gram = tuple(self._tail[index] for index in range(-_GRAM, 0))
        self._grams.append(gram)
        self._known[gram] += 1
        if len(self._grams) > self.settings.window - _GRAM + 1:
            old = self._grams.popleft()
            self._known[old] -= 1
            if not self._known[old]:
                del self._known[old]
        self._stretch = self._stretch + 1 if self.reuse >= self.settings.reuse else 0
        if self._stretch < self.settings.sustained:
            return None
        return Loop(kind="reuse", period=0, start=self.count - self._stretch, end=self.count)

    def _copies(self) -> Loop | None:
        """A check reads as many words as lie between two checks, times a constant: constant time per word."""
        for stride, reach in _LEVELS:
            if self.count % stride == 0 and (suffix := self._tail_period(reach)) is not None:
                period, length = suffix
                return Loop(kind="copies", period=period, start=self.count - length + period, end=self.count)
        return None

    def _tail_period(self, reach: int) -> tuple[int, int] | None:
        """Period and length of the longest suffix of enough copies, from the borders of the reversed suffixes.

        A suffix with a border of b of its m items has the period m - b (Knuth, Morris and Pratt 1977).
        """
        items = [self._tail[-1 - back] for back in range(min(reach, len(self._tail)))]
        borders, border, longest = [0], 0, None
        for length in range(2, len(items) + 1):
            item = items[length - 1]
            while border and items[border] != item:
                border = borders[border - 1]
            border += items[border] == item
            borders.append(border)
            period = length - border
            if length >= self.settings.least_words and length >= self.settings.copies * period:
                longest = (period, length)
        return longest


class TextLoopDetector:
    """`LoopDetector` over the words of a text that arrives in parts."""

    def __init__(self, settings: LoopSettings | None = None) -> None:
        self._detector = LoopDetector(settings)
        self._open = ""  # the last word, which the next part may continue

    @property
    def loop(self) -> Loop | None:
        return self._detector.loop

    @property
    def words(self) -> int:
        """Number of words so far."""
        return self._detector.count

    def set(self, loop: Loop) -> None:
        """Sets a loop that was found otherwise."""
        self._detector.loop = loop

    def add(self, text: str) -> Loop | None:
        """Adds a part of the text. Returns the loop if one was found so far."""
        if self.loop is not None:
            return self.loop
        pieces = list(_WORD.finditer(self._open + text))
        whole = self._open + text
        ends = bool(pieces) and pieces[-1].end() == len(whole)
        self._open = pieces[-1][0][-200:] if ends else ""
        for piece in pieces[:-1] if ends else pieces:
            if self._detector.add(piece[0]) is not None:
                break
        return self.loop


def words_of(text: str) -> list[str]:
    """The words of a text, as the detector reads them."""
    return _WORD.findall(text)


def find_loop(text: str, settings: LoopSettings | None = None) -> Loop | None:
    """The first loop in a complete text."""
    detector = LoopDetector(settings)
    for word in words_of(text):
        if (loop := detector.add(word)) is not None:
            return loop
    return None


def find_final_loop(text: str, settings: LoopSettings | None = None) -> Loop | None:
    """The first loop in a text that ends in a loop, though its last word may be cut. None if other text followed."""
    detector, first = LoopDetector(settings), None
    for word in words_of(text)[:-1]:
        loop = detector.add(word)
        first, detector.loop = first or loop, None  # reads on behind a loop
    return first if detector.continues else None


class ToolLoopDetector:
    """Finds an agent that repeats tool calls: the same call with the same result, or rounds of two or three calls.

    Arguments are compared as canonical JSON: the order of keys does not matter, and 2.0 equals 2. A call that returns
    something new is progress, so polling until a result changes is not a loop.
    """

    def __init__(self, settings: LoopSettings | None = None) -> None:
        self.settings = settings or LoopSettings()
        self.loop: Loop | None = None
        self._calls: list[str] = []
        self._seen: Counter[str] = Counter()
        self._first: dict[str, int] = {}

    def add(self, tool: str, arguments: Mapping[str, Any], result: Any) -> Loop | None:
        """Adds a call with its result or error. Returns the loop if one was found so far."""
        key = f"{tool}({canonical(arguments)}) = {canonical(result)}"
        self._calls.append(key)
        self._seen[key] += 1
        self._first.setdefault(key, len(self._calls) - 1)
        if self.loop is None:
            self.loop = self._alternating() or self._same(key)
        return self.loop

    def _same(self, key: str) -> Loop | None:
        if self._seen[key] < self.settings.calls:
            return None
        repeats = [index for index, call in enumerate(self._calls) if call == key]
        return Loop(kind="same call", period=repeats[-1] - repeats[-2], start=repeats[1], end=len(self._calls))

    def _alternating(self) -> Loop | None:
        """A-B-A-B and A-B-C-A-B-C."""
        for period in (2, 3):
            tail = self._calls[-period * self.settings.calls :]
            whole = len(tail) == period * self.settings.calls
            if whole and len(set(tail)) == period and all(tail[i] == tail[i % period] for i in range(len(tail))):
                end = len(self._calls)
                return Loop(kind="alternating calls", period=period, start=end - len(tail) + period, end=end)
        return None


def canonical(value: Any) -> str:
    """A value as JSON with sorted keys and without white space; whole floats as integers, other objects as text."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, list | tuple) or (isinstance(value, Iterable) and not hasattr(value, "__next__")):
        items = [_plain(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if isinstance(value, float):
        return int(value) if value.is_integer() else repr(value)
    return value if value is None or isinstance(value, bool | int) else str(value)
