"""What a retriever is: the Protocol, its passages, and the fusion of several rankings.

`TextRetriever` searches a few texts in memory, such as the documents that a task brings.
"""

import hashlib
import re
import sqlite3
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from assay.errors import ConfigError
from assay.programs.retrieval.fulltext import (
    TOKENIZER,
    Candidate,
    by_proximity,
    in_order,
    inverse_frequency,
    match_of,
    searched,
    words_in,
    words_of,
)

_K = 60  # Cormack, Clarke, Büttcher 2009, Reciprocal rank fusion outperforms Condorcet, section 3

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A part of a document.

    Attributes:
        id: hash of the text by default, so passages with the same text are one passage, in every index.
        source: name of the document, such as its path relative to the indexed folder.
        line: of the document, on which the text begins; 0 if unknown.
        score: higher is better. Scores of different queries or retrievers are not comparable.
    """

    id: str = ""
    text: str
    source: str = ""
    line: int = 0
    score: float = 0.0

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", passage_key(self.text))

    def to_dict(self) -> dict[str, Any]:
        """The passage without its score, as predictions contain it."""
        return {"id": self.id, "source": self.source, "line": self.line, "text": self.text}


@runtime_checkable
class Retriever(Protocol):
    """Finds passages of documents. `assay.testing.contracts.RetrieverContract` checks an implementation."""

    def search(self, query: str, k: int = 5) -> list[Passage]:
        """At most `k` passages, best first; fewer or none if no more match.

        Any text is a valid query: it is never executed, and what looks like an operator is a word. The ids are
        distinct, and equal queries have equal results. Called from several threads.

        Raises:
            ConfigError: `k` is below 1.
            StoreError: the index cannot be read, or was never built.
        """
        ...


def passage_key(text: str) -> str:
    """The id of a passage."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def check_count(k: int) -> None:
    """Raises `ConfigError` if `k` is not a number of passages."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ConfigError(f"k={k!r} must be an integer >= 1: the largest number of passages")


def fused(rankings: Iterable[Sequence[T]]) -> dict[T, float]:
    """Reciprocal rank fusion: item -> sum of 1 / (60 + rank) over the rankings that have it, best first.

    Items with equal sums are in the order in which the rankings name them.
    """
    scores: dict[T, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, 1):
            scores[item] = scores.get(item, 0.0) + 1 / (_K + rank)
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))


# -- Splits the text of a document into passages, as a stream: a document need not fit into memory.


# Ends of a passage, the best first: a blank line, a line, a sentence, a word.
_ENDS = (re.compile(r"\n[ \t]*\n"), re.compile(r"\n"), re.compile(r"[.!?]\s"), re.compile(r"\s"))
_LEAST = 3  # a passage that ends early has at least this part of the largest size: one third


def passages_of(blocks: Iterable[str], most: int) -> Iterator[tuple[int, str]]:
    """Passages of at most `most` characters, each with the line on which it begins, from 1.

    Together they have all characters of the document but white space at their ends. Passages without a letter or
    digit are left out.
    """
    rest, line = "", 1
    for block in blocks:
        rest += block
        at = 0
        while len(rest) - at > most:
            end = _end(rest, at, most)
            yield from _passage(rest[at:end], line)
            line += rest.count("\n", at, end)
            at = end
        rest = rest[at:]
    yield from _passage(rest, line)


def _end(text: str, start: int, most: int) -> int:
    """Where a passage ends: at the last end of the best kind in the window."""
    least, limit = start + most // _LEAST, start + most
    for pattern in _ENDS:
        ends = [match.end() for match in pattern.finditer(text, least, limit)]
        if ends:
            return ends[-1]
    return limit


def _passage(text: str, line: int) -> Iterator[tuple[int, str]]:
    stripped = text.strip()
    if any(map(str.isalnum, stripped)):
        before = text[: len(text) - len(text.lstrip())]
        yield line + before.count("\n"), stripped


class TextRetriever:
    """Full-text search in texts, ranked as in a SQLite store.

    Args:
        documents: name -> text; or a list of texts, or of mappings with `text` and optionally `source`.
        passage_chars: characters of a passage; longer texts are split.
    Raises:
        ConfigError: a document has no text, or `documents` is a single text.
    """

    def __init__(self, documents: Mapping[str, str] | Iterable[Any], *, passage_chars: int = 1000) -> None:
        if isinstance(documents, str | bytes) or not isinstance(documents, Iterable):
            raise ConfigError(f"documents={str(documents)[:100]!r} must be a list of texts, or of mappings with 'text'")
        self._built_from = (
            list(documents.items()) if isinstance(documents, Mapping) else list(documents),
            passage_chars,
        )
        self._passages: list[Passage] = []
        for at, document in enumerate(self._built_from[0], 1):
            source, text = _source_and_text(document, at)
            for line, part in passages_of([text], passage_chars):
                self._passages.append(Passage(id=passage_key(part), text=part, source=source, line=line))
        self._lock = threading.Lock()
        self._words = sqlite3.connect(":memory:", check_same_thread=False)
        self._words.execute(f"CREATE VIRTUAL TABLE words USING fts5(text, tokenize='{TOKENIZER}')")
        rows = [(searched(passage.text),) for passage in self._passages]
        self._words.executemany("INSERT INTO words VALUES (?)", rows)

    def __deepcopy__(self, memo: object) -> "TextRetriever":
        return self

    def __reduce__(self) -> Any:
        return _rebuilt, self._built_from

    def search(self, query: str, k: int = 5) -> list[Passage]:
        """See `Retriever.search`."""
        check_count(k)
        text = str(query).encode("utf-8", "replace").decode()
        words = words_of(text)
        if not words:
            return []
        with self._lock:
            rows = self._words.execute(
                "SELECT rowid, -rank FROM words WHERE words MATCH ? ORDER BY rank, rowid", (match_of(words),)
            ).fetchall()
            candidates = [Candidate(row - 1, score, words_in(self._passages[row - 1].text)) for row, score in rows]
            best = by_proximity(candidates, in_order(text), self._weight)
        passages: dict[str, Passage] = {}
        for at, score in fused([[candidate.id for candidate in best]]).items():
            passage = self._passages[at]
            if len(passages) < k and passage.id not in passages:
                passages[passage.id] = Passage(**{**vars(passage), "score": score})
        return list(passages.values())

    def _weight(self, word: str) -> float:
        found = self._words.execute("SELECT count(*) FROM words WHERE words MATCH ?", (match_of([word]),)).fetchone()
        return inverse_frequency(found[0], len(self._passages))


def listed_sources(documents: Mapping[str, str] | Iterable[Any]) -> list[str]:
    """Names of the documents of a `TextRetriever`.

    Raises:
        ConfigError: a document has no text.
    """
    listed = documents.items() if isinstance(documents, Mapping) else documents
    return [_source_and_text(document, at)[0] for at, document in enumerate(listed, 1)]


def _source_and_text(document: Any, at: int) -> tuple[str, str]:
    source: Any = str(at)
    if isinstance(document, Mapping):
        source, document = document.get("source", source), document.get("text")
    elif isinstance(document, tuple | list) and len(document) == 2:
        source, document = document
    if not isinstance(document, str):
        raise ConfigError(f"document {at} has no text: {str(document)[:100]!r}. Give texts, or mappings with 'text'")
    return str(source), document.encode("utf-8", "replace").decode().replace("\0", "")


def _rebuilt(documents: list[Any], passage_chars: int) -> TextRetriever:
    return TextRetriever(documents, passage_chars=passage_chars)
