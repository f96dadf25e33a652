"""Texts that are nearly the same: Jaccard similarity of their 5-character shingles. Calls no model."""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from assay.datasets.keys import folded_text

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
