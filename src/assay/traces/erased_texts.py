"""Finds texts that repeat what an erased person wrote. Reads and writes no store.

Texts are compared by their letters and digits alone: case, spaces, punctuation, escapes of JSON and HTML and the
Unicode form do not matter. A text repeats another one if `LETTERS` of them in a row are the same (`FEW_LETTERS` of a
script without spaces between words), or if it holds all of a shorter text of `IDENTIFYING` letters (half of them in
such a script), address or number (an `@`, or `DIGITS` digits). Other short texts, such as `yes` or a first name,
identify nobody and are not searched.
"""

import html
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from assay.datasets.keys import IDENTIFYING

ERASED = "[erased]"
"""Stands in place of an erased text."""
LETTERS, FEW_LETTERS, DIGITS = 20, 8, 9
_IDEOGRAPHS = 0x2E80  # code points from here on are of scripts in which a letter says about as much as a word
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[bfnrt])")
_NO_LETTER = re.compile(r"[\W_]+")
_EXAMPLES = frozenset(("demos", "pool", "traces", "train"))  # lists in a program's state whose items are removed whole


class ErasedTexts:
    """The texts of a person.

    Attributes:
        short: number of texts that are too short to be searched.
    """

    def __init__(self) -> None:
        self.short = 0
        self._texts: list[set[str]] = []  # the runs of letters of each text
        self._runs: set[str] = set()
        self._parts: dict[int, set[str]] = {}  # halves of runs, by their length

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def shared(self) -> int:
        """Number of texts that others wrote too, so that they are not searched."""
        return sum(not runs & self._runs for runs in self._texts)

    def add(self, value: Any) -> None:
        """Adds all texts within a value as JSON has it."""
        if isinstance(value, Mapping):
            for part in value.values():
                self.add(part)
        elif isinstance(value, list | tuple):
            for part in value:
                self.add(part)
        elif (text := _text(value)).strip():
            letters = _letters(text)
            runs = set(_runs_of(letters)) or ({letters} if _identifies(text, letters) else set())
            if not runs:
                self.short += 1
                return
            self._texts.append(runs)
            self._runs |= runs
            for run in runs:
                half = len(run) // 2
                self._parts.setdefault(len(run), set()).update(run[at : at + half] for at in range(len(run) - half + 1))

    def runs_in(self, text: str) -> set[str]:
        """The runs of letters that a text shares with them."""
        return set(self._found(_letters(text)))

    def keep(self, text: str) -> None:
        """Stops searching for what is in this text too: somebody else wrote it."""
        self._runs -= self.runs_in(text)

    def are_in(self, text: str) -> bool:
        """Whether a text repeats one of them. Looks at every tenth letter only, and closer where one fits."""
        return bool(self._runs) and next(self._found(_letters(text)), None) is not None

    def without(self, value: Any, key: str = "") -> Any:
        """A value as JSON has it, with every text that repeats one of them replaced by `ERASED`.

        Examples in a program's state are removed whole.
        """
        if isinstance(value, dict):
            return {self.without(name): self.without(part, str(name)) for name, part in value.items()}
        if isinstance(value, list):
            kept = [part for part in value if not (key in _EXAMPLES and self._are_within(part))]
            return [self.without(part, key) for part in kept]
        return ERASED if self.are_in(_text(value)) else value

    def without_lines(self, text: str) -> str:
        """A text without the lines that repeat one of them; empty but for a mark if they run over several lines."""
        plain = "".join(f"{ERASED}\n" if self.are_in(line) else line for line in text.splitlines(keepends=True))
        return f"{ERASED}\n" if self.are_in(plain) else plain

    def _are_within(self, value: Any) -> bool:
        return self.without(value) != value

    def _found(self, letters: str) -> Iterator[str]:
        for size, parts in self._parts.items():
            half = size // 2
            for at in range(0, len(letters) - half + 1, half):
                if letters[at : at + half] in parts:
                    for start in range(max(0, at - half), at + 1):
                        if (run := letters[start : start + size]) in self._runs:
                            yield run


def _text(value: Any) -> str:
    """A text, or a whole number, as text; empty for other values."""
    return value if isinstance(value, str) else str(value) if type(value) is int else ""


def _identifies(text: str, letters: str) -> bool:
    """Whether a short text is long enough to be somebody's, or an address or a number: of a telephone, a passport."""
    if sum(2 if ord(letter) >= _IDEOGRAPHS else 1 for letter in letters) >= IDENTIFYING:
        return True
    return len(letters) >= FEW_LETTERS and ("@" in text or sum(letter.isdigit() for letter in letters) >= DIGITS)


def _letters(text: str) -> str:
    if "\\" in text:
        text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else " ", text)
    if "&" in text:
        text = html.unescape(text)
    return _NO_LETTER.sub("", unicodedata.normalize("NFKC", text).casefold())


def _runs_of(letters: str) -> Iterator[str]:
    yield from (letters[at : at + LETTERS] for at in range(len(letters) - LETTERS + 1))
    for at in range(len(letters) - FEW_LETTERS + 1):
        run = letters[at : at + FEW_LETTERS]
        if all(ord(letter) >= _IDEOGRAPHS for letter in run):
            yield run
