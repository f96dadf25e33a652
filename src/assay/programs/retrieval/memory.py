"""A retriever over a few texts in memory, such as the documents that a task brings."""

import sqlite3
import threading
from collections.abc import Iterable, Mapping
from typing import Any

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
from assay.programs.retrieval.retriever import Passage, check_count, fused, passage_key, passages_of


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
