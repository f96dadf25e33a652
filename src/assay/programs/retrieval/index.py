"""The retriever over the documents that `assay index` has put into a store. Does not read folders."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.errors import StoreError
from assay.programs.retrieval import fulltext
from assay.programs.retrieval.dense import Vectors, embedder_of
from assay.programs.retrieval.retriever import Passage, check_count, fused
from assay.support.keywords import takes
from assay.traces.store import tables as schema
from assay.traces.store.connection import open_engine, url_without_password
from assay.traces.store.location import store_file, store_url

INDEX = "documents"  # name of an index, by default
_DEPTH = 4  # passages of each ranking that are fused, for each one that is wanted
_LEAST_DEPTH = 50


class DocumentIndex:
    """Full-text search in an index of a store; with an embedder fused with dense search.

    Args:
        store: file or URL of the database; by default `$ASSAY_STORE` or `.assay/assay.db`.
        name: of the index.
        embedder: the one with which the index was built: a `dspy.Embedder`, a model's name or a function from texts to
            vectors. None for full-text search alone.
    """

    @takes()
    def __init__(self, store: str | Path | None = None, name: str = INDEX, *, embedder: Any = None) -> None:
        self.url, self.name, self.embedder = store_url(store), name, embedder_of(embedder)
        self._vectors = Vectors(name, self.embedder) if self.embedder is not None else None
        self._opening = threading.Lock()

    def __deepcopy__(self, memo: object) -> "DocumentIndex":
        return self

    def __reduce__(self) -> Any:
        return _rebuilt, (self.url, self.name, self.embedder)

    @cached_property
    def _engine(self) -> sa.Engine:
        file = store_file(self.url)
        if file is not None and not file.is_file():
            raise StoreError(f"there is no store at {file}, so no index: {self._remedy}")
        return open_engine(self.url)

    @property
    def _remedy(self) -> str:
        return f"build it with assay index DIR --name {self.name}"

    def search(self, query: str, k: int = 5) -> list[Passage]:
        """See `Retriever.search`."""
        check_count(k)
        query, depth = str(query).encode("utf-8", "replace").decode(), max(_LEAST_DEPTH, _DEPTH * k)
        with self._connected() as connection:
            rankings = [fulltext.ranked(connection, self.name, query, depth)]
            if self._vectors is not None and query.strip():
                rankings.append(self._vectors.ranked(connection, query, depth))
            return self._passages(connection, fused(rankings), k)

    def sources(self) -> list[str]:
        """Names of the indexed documents: their paths relative to the indexed folder, in alphabetical order.

        Raises:
            StoreError: the index cannot be read, or was never built.
        """
        d = schema.documents
        of_index = sa.select(d.c.path).where(d.c.index_name == self.name, d.c.ready).distinct()
        with self._connected() as connection:
            return sorted(connection.execute(of_index).scalars())

    @contextmanager
    def _connected(self) -> Iterator[sa.Connection]:
        """A connection to a store that has the index."""
        with self._opening:
            engine = self._engine
        with engine.connect() as connection:
            if not (fulltext.is_prepared(connection) and self._has_documents(connection)):
                raise StoreError(
                    f"the store {url_without_password(self.url)} has no index {self.name!r}{self._others(connection)}: "
                    f"{self._remedy}"
                )
            yield connection

    def _passages(self, connection: sa.Connection, scores: dict[int, float], k: int) -> list[Passage]:
        """The first `k` passages with different texts."""
        p, d, ids = schema.passages, schema.documents, list(scores)
        statement = sa.select(p.c.id, p.c.key, p.c.text, p.c.line, d.c.path).join(d, d.c.id == p.c.document_id)
        rows = {row.id: row for row in connection.execute(statement.where(p.c.id.in_(ids)))} if ids else {}
        passages: dict[str, Passage] = {}
        for row in (rows[number] for number in ids if number in rows):
            if len(passages) < k and row.key not in passages:
                passages[row.key] = Passage(
                    id=row.key, text=row.text, source=row.path, line=row.line, score=scores[row.id]
                )
        return list(passages.values())

    def _others(self, connection: sa.Connection) -> str:
        """The indexes that the store has, for a message."""
        d = schema.documents
        names = connection.execute(sa.select(d.c.index_name).where(d.c.ready).distinct().order_by(d.c.index_name))
        listed = ", ".join(repr(name) for name in list(names.scalars())[:5])
        return f", but {listed}" if listed else ""

    def _has_documents(self, connection: sa.Connection) -> bool:
        d = schema.documents
        of_index = sa.select(d.c.id).where(d.c.index_name == self.name, d.c.ready)
        return connection.execute(of_index.limit(1)).first() is not None


def _rebuilt(url: str, name: str, embedder: Any) -> DocumentIndex:
    return DocumentIndex(url, name, embedder=embedder)
