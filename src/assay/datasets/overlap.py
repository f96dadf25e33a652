"""How much of one text is in another: runs of eight words. Asks no model."""

import hashlib
import re
from collections.abc import Iterable

__all__ = ["RUN", "overlap", "word_runs"]

RUN = 8  # words in a row that are not equal by chance


def word_runs(text: str) -> set[bytes]:
    """Digests of all runs of `RUN` words, upper and lower case alike, without punctuation; a shorter text is one run as a whole."""
    words = re.findall(r"\w+", text.casefold())
    runs = [" ".join(words[at : at + RUN]) for at in range(max(1, len(words) - RUN + 1))] if words else []
    return {hashlib.blake2b(run.encode("utf-8", "replace"), digest_size=8).digest() for run in runs}


def overlap(text: str, sources: Iterable[str], *, before: str = "") -> float:
    """Share of the text's runs of words that are in one of the sources, in [0, 1]; those of `before` are left out."""
    runs = word_runs(text) - word_runs(before)
    if not runs:
        return 0.0
    copied = set[bytes]()
    for source in sources:
        copied |= runs & word_runs(source)
    return len(copied) / len(runs)
