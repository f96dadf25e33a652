"""Share of one text that is contained in others, by word n-grams of eight words. Calls no model."""

import hashlib
import re
from collections.abc import Iterable

from assay.datasets.keys import folded_text

__all__ = ["RUN", "overlap", "word_runs"]

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
