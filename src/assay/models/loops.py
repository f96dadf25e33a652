"""Detects repetition: in generated text, and in tool calls. Depends on nothing, calls no model.

Text is read word by word, as it arrives. Two signals are used, each in constant time per word:

- the words end in exact copies of the same phrase;
- most groups of four words have occurred shortly before. This finds loops that count ("step 1 …, step 2 …").
"""

import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Loop", "LoopDetector", "ToolLoopDetector", "find_final_loop", "find_loop", "words_of"]

# The thresholds raised no alarm on this project's documents and sources.
_COPIES = 4  # smallest number of exact copies of a phrase
_COPIED_WORDS = 64  # smallest number of words that these copies have in total
_REUSE = 0.4  # share of the groups in the window that occurred in it before
_SUSTAINED = 384  # number of consecutive words at which the share is that high, from which on it is a loop
_WINDOW = 128  # number of words in which groups are compared
_GRAM = 4  # words of a group
_GROUPS = _WINDOW - _GRAM + 1  # in a full window
_LEVELS = ((16, 256), (64, 1024))  # words between two checks for exact copies, and words that a check reads
_WORD = re.compile(r"\w+|[^\w\s]+")  # a run of punctuation is one word, so that a ruled line is not a loop


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A detected loop.

    Attributes:
        kind: `copies`, `reuse` or `same call`.
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
    """Finds a loop in a text that arrives in parts. Keeps the first loop that it found.

    Memory is bounded: only the last 1024 words are kept.
    """

    def __init__(self) -> None:
        self.words = 0
        self.loop: Loop | None = None
        self._open = ""  # the last word, which the next part may continue
        self._tail: deque[str] = deque(maxlen=_LEVELS[-1][1])
        self._grams: deque[tuple[str, ...]] = deque()
        self._known: Counter[tuple[str, ...]] = Counter()
        self._stretch = 0  # consecutive words at which most groups were known

    def add(self, text: str) -> Loop | None:
        """Adds a part of the text. Returns the loop if one was found so far."""
        if self.loop is not None:
            return self.loop
        whole = self._open + text
        pieces = list(_WORD.finditer(whole))
        ends = bool(pieces) and pieces[-1].end() == len(whole)
        self._open = pieces[-1][0][-200:] if ends else ""
        for piece in pieces[:-1] if ends else pieces:
            if self.add_word(piece[0]) is not None:
                break
        return self.loop

    def add_word(self, word: str) -> Loop | None:
        """Adds a complete word. Returns the loop if one was found so far."""
        self._tail.append(word)
        self.words += 1
        if self.loop is None:
            self.loop = self._reuse() or self._copies()
        return self.loop

    @property
    def continues(self) -> bool:
        """Whether the last words belong to a loop."""
        return self._stretch >= _SUSTAINED or any(self._tail_period(reach) is not None for _, reach in _LEVELS)

    def _reuse(self) -> Loop | None:
        if self.words < _GRAM:
            return None
        gram = tuple(self._tail[index] for index in range(-_GRAM, 0))
        self._grams.append(gram)
        self._known[gram] += 1
        if len(self._grams) > _GROUPS:
            old = self._grams.popleft()
            self._known[old] -= 1
            if not self._known[old]:
                del self._known[old]
        reuses = len(self._grams) == _GROUPS and 1 - len(self._known) / _GROUPS >= _REUSE
        self._stretch = self._stretch + 1 if reuses else 0
        if self._stretch < _SUSTAINED:
            return None
        return Loop(kind="reuse", period=0, start=self.words - self._stretch, end=self.words)

    def _copies(self) -> Loop | None:
        """A check reads as many words as lie between two checks, times a constant: constant time per word."""
        for stride, reach in _LEVELS:
            if self.words % stride == 0 and (suffix := self._tail_period(reach)) is not None:
                period, length = suffix
                return Loop(kind="copies", period=period, start=self.words - length + period, end=self.words)
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
            if length >= _COPIED_WORDS and length >= _COPIES * period:
                longest = (period, length)
        return longest


def words_of(text: str) -> list[str]:
    """The words of a text, as the detector reads them."""
    return _WORD.findall(text)


def find_loop(text: str) -> Loop | None:
    """The first loop in a complete text."""
    return LoopDetector().add(f"{text}\n")


def find_final_loop(text: str) -> Loop | None:
    """The first loop in a text that ends in a loop, though its last word may be cut. None if other text followed."""
    detector, first = LoopDetector(), None
    for word in words_of(text)[:-1]:
        loop = detector.add_word(word)
        first, detector.loop = first or loop, None  # reads on behind a loop
    return first if detector.continues else None


class ToolLoopDetector:
    """Finds an agent that repeats a tool call and gets the same result again, also with other calls in between.

    Arguments are compared as canonical JSON: the order of keys does not matter, and 2.0 equals 2. A call that returns
    something new is progress, so polling until a result changes is not a loop.

    Args:
        calls: number of equal calls with equal results, at least 2.
    """

    def __init__(self, calls: int = 2) -> None:
        if calls < 2:
            raise ValueError(f"calls={calls!r} must be at least 2")
        self.calls = calls
        self.loop: Loop | None = None
        self._count = 0
        self._places: dict[str, list[int]] = defaultdict(list)  # call with its result -> where it was made

    def add(self, tool: str, arguments: Mapping[str, Any], result: Any) -> Loop | None:
        """Adds a call with its result or error. Returns the loop if one was found so far."""
        places = self._places[f"{tool}({canonical(arguments)}) = {canonical(result)}"]
        places.append(self._count)
        self._count += 1
        if self.loop is None and len(places) >= self.calls:
            self.loop = Loop(kind="same call", period=places[-1] - places[-2], start=places[1], end=self._count)
        return self.loop


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
