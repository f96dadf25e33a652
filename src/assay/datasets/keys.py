"""The key of a task: decides whether two tasks, texts or labelled items are the same. Texts that are nearly the same.

Splits, seals, labels, exports, the pool and counts of overlap compare by this key and by nothing else. Near-duplicates
have a high Jaccard similarity of their 5-character shingles.
"""

import hashlib
import json
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IDENTIFYING = 12  # characters from which a text identifies a task by itself; shorter texts are equal by chance
DIGITS = 16  # hexadecimal digits of a key
_MOST_BITS = 10_000  # of an integer that Python writes in digits
# invisible letters and marks (Default_Ignorable_Code_Point), such as the variation selector of an emoji
_IGNORED = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
_NUMBER = re.compile(r"(-?)(0|[1-9][0-9]*)(?:\.([0-9]+))?(?:e([+-]?[0-9]{1,6}))?")  # a number in JSON
_encode = json.JSONEncoder(ensure_ascii=False).encode


def task_key(inputs: Mapping[str, Any]) -> str:
    """Key of a task by its inputs: 16 hexadecimal digits; "" without a value.

    Equal are inputs that differ in:

    - Unicode form (NFKC, so that full-width letters and non-breaking spaces are plain ones), invisible characters, case
      and white space;
    - the order of keys, at any depth;
    - the format of numbers: 3, 3.0, 3e0 and the texts "3" and "3.0". A text is a number if it is one in JSON, so "007",
      "+3" and "1,000" are texts. A boolean is the text `true` or `false`, not a number;
    - form: a text that is a JSON object or list equals that object or list, as a cell of a CSV file has it;
    - missing values: null and an empty text equal an absent field;
    - the names of the inputs. Texts of `IDENTIFYING` characters and more identify a task whatever its columns are
      called, in any order. Other values count in the order of the names: {"a": 3, "b": 5} is not {"a": 5, "b": 3}, and
      renamed columns match as long as their alphabetical order is the same. Keys inside of a value count.

    Tasks with one key are in one split and are never merged: too wide a key only moves a task.
    """
    named = _named(inputs)
    texts = sorted(value for _, value in named if _identifies(value))
    others = [value for _, value in named if not _identifies(value)]
    if not texts and not others:
        return ""
    return hashlib.sha256(_encode([texts, others]).encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


def task_text(inputs: Mapping[str, Any]) -> str:
    """The inputs in the form in which they are compared, as one text."""
    return "\n".join(value if isinstance(value, str) else _encode(value) for _, value in _named(inputs))


def _named(inputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    try:
        pairs = _pairs(inputs)
    except RecursionError:
        pairs = _pairs(_plain(dict(inputs)))
    return sorted(pairs, key=_encode)


def _plain(value: Any) -> Any:
    from assay.support.values import json_value  # imports pydantic, which most inputs do not need

    return json_value(value, placeholders=True)


def _identifies(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= IDENTIFYING


def _pairs(mapping: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Normalised names and values of an object, without missing values."""
    pairs = [(folded_text(str(name)), _normal(value)) for name, value in mapping.items()]
    return [pair for pair in pairs if pair[1] is not None]


def _normal(value: Any) -> Any:
    """A value in the form in which it is compared; None if it is missing."""
    if type(value) is str:
        return _of_text(value)
    if type(value) is dict:
        return {"fields": sorted(_pairs(value), key=_encode)}
    if type(value) is list:
        return [_normal(item) for item in value]
    if type(value) is bool or (type(value) is int and value.bit_length() < _MOST_BITS):
        return _of_text(repr(value))
    if type(value) is float:
        return _of_text(repr(value)) if math.isfinite(value) else None
    return None if value is None or (plain := _plain(value)) is None else _normal(plain)


def _of_text(text: str) -> Any:
    folded = folded_text(text)
    if number := _NUMBER.fullmatch(folded):
        return _of_number(*number.groups())
    if folded[:1] + folded[-1:] in ("{}", "[]"):
        try:
            return _normal(json.loads(folded, parse_int=str, parse_float=str, parse_constant=str))
        except (ValueError, RecursionError):
            return folded
    return folded or None


def _of_number(sign: str, whole: str, fraction: str | None, exponent: str | None) -> str:
    """Significant digits and a power of ten: exact for numbers of any length."""
    digits = whole + (fraction or "")
    significant = digits.rstrip("0")
    power = int(exponent or 0) - len(fraction or "") + len(digits) - len(significant)
    return f"{sign}{significant.lstrip('0')}e{power}" if significant else "0e0"


def folded_text(text: str) -> str:
    """A text without differences of Unicode form, invisible characters, case and white space."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        text = "".join(character for character in text if unicodedata.category(character) != "Cf")
        text = _IGNORED.sub("", text)
    return " ".join(text.casefold().split())


ALIKE = 0.8  # similarity from which two texts are near-duplicates
_SHINGLE = 5  # characters
_MOST_TEXTS, _MOST_CHARACTERS, _MOST_STEPS = 10_000, 2_000_000, 10_000_000  # a few seconds


@dataclass(frozen=True, kw_only=True)
class NearDuplicate:
    """A text and the text of another group that is most similar to it, by their indices."""

    text: int
    other: int
    similarity: float


def near_duplicates(texts: Sequence[str], groups: Sequence[str]) -> list[NearDuplicate] | None:
    """The texts that are near-duplicates of a text of another group, each with one of those, the most similar first.

    Exact: only texts that share one of their rarest shingles can reach the similarity, so only these are compared.

    Returns:
        None if there is too much text to look in a few seconds.
    """
    if len(texts) > _MOST_TEXTS or sum(map(len, texts)) > _MOST_CHARACTERS:
        return None
    if len(set(groups)) < 2:
        return []
    by_rarity = _by_rarity([_shingles(text) for text in texts])
    sets = [frozenset(shingles) for shingles in by_rarity]
    holders: dict[int, list[int]] = defaultdict(list)  # texts by the shingles among which similar ones share one
    found: dict[int, NearDuplicate] = {}
    steps = 0
    for at, shingles in enumerate(by_rarity):
        size, seen = len(shingles), {at}
        for shingle in shingles[: size - math.ceil(ALIKE * size) + 1]:
            for other in holders[shingle]:
                steps += 1
                if other in seen or groups[other] == groups[at] or (at in found and other in found):
                    continue
                seen.add(other)
                if min(size, len(sets[other])) < ALIKE * max(size, len(sets[other])):
                    continue
                steps += min(size, len(sets[other]))
                shared = len(sets[at] & sets[other])
                similarity = shared / (size + len(sets[other]) - shared)
                for one, two in ((at, other), (other, at)) if similarity >= ALIKE else ():
                    found.setdefault(one, NearDuplicate(text=one, other=two, similarity=similarity))
            holders[shingle].append(at)
            if steps > _MOST_STEPS:
                return None
    return sorted(found.values(), key=lambda pair: (-pair.similarity, pair.text))


def _shingles(text: str) -> Any:
    """Hashes of the distinct shingles of a text; a shorter text is one shingle."""
    import numpy as np

    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    width = min(_SHINGLE, len(codes))
    hashes = np.zeros(len(codes) - width + 1 if width else 0, dtype=np.uint64)
    for place in range(width):
        hashes = hashes * np.uint64(6_364_136_223_846_793_005) + codes[place : len(codes) - width + 1 + place]
    return np.unique(hashes)


def _by_rarity(texts: list[Any]) -> list[list[int]]:
    """The shingles of each text, those in the fewest texts first."""
    import numpy as np

    if not texts:
        return []
    every, counts = np.unique(np.concatenate(texts), return_counts=True)
    ordered = []
    for shingles in texts:
        numbers = np.searchsorted(every, shingles)
        ordered.append(numbers[np.lexsort((numbers, counts[numbers]))].tolist())
    return ordered


# -- Share of one text that is contained in others, by word n-grams of eight words. Calls no model.


RUN = 8  # words of an n-gram: two unrelated texts rarely share eight consecutive words


def word_runs(text: str) -> set[bytes]:
    """Digests of all n-grams of `RUN` words, without case, Unicode form and punctuation; of a shorter text one."""
    words = re.findall(r"\w+", folded_text(text))
    runs = [" ".join(words[at : at + RUN]) for at in range(max(1, len(words) - RUN + 1))] if words else []
    return {hashlib.blake2b(run.encode("utf-8", "replace"), digest_size=8).digest() for run in runs}


def overlap(text: str, sources: Iterable[str], *, before: str = "") -> float:
    """Share of the n-grams of `text` that occur in one of `sources`, in [0, 1].

    Args:
        before: text whose n-grams are not counted, such as the prompt before an answer.
    Returns:
        0.0 if `text` has no n-gram outside `before`.
    """
    runs = word_runs(text) - word_runs(before)
    if not runs:
        return 0.0
    copied = set[bytes]()
    for source in sources:
        copied |= runs & word_runs(source)
    return len(copied) / len(runs)
