"""The retriever over the documents that `assay index` has put into a store. Does not read folders."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from assay.errors import ConfigError, ModelError, StoreError
from assay.programs.retrieval import fulltext
from assay.programs.retrieval.retriever import Passage, check_count, fused
from assay.sources.modules import public
from assay.support.options import takes
from assay.traces.store import tables as schema
from assay.traces.store.connection import open_engine
from assay.traces.store.location import store_address
from assay.traces.store.upserts import upsert

# -- Dense vectors of passages: stored next to them, and searched by the cosine. The vectors are held in memory.


_BATCH = 128  # passages of one request
_NAME = 200

Matrix = npt.NDArray[np.float32]


def embedder_of(embedder: Any) -> Any:
    """A `dspy.Embedder` of a model's name or of a function from texts to vectors; None stays None.

    Raises:
        ConfigError: it is neither, or litellm knows no provider for the name.
    """
    import dspy

    from assay.models.lm import has_provider

    if embedder is None or isinstance(embedder, dspy.Embedder):
        return embedder
    if not isinstance(embedder, str) and not callable(embedder):
        raise ConfigError(f"`embedder={embedder!r}` must be a dspy.Embedder, a model's name or a function of texts")
    if isinstance(embedder, str) and ".py:" in embedder:
        raise ConfigError(
            f"`embedder={embedder!r}` names a function in a file: import it, and pass the function itself"
        )
    if isinstance(embedder, str) and not has_provider(embedder):
        raise ConfigError(
            f"`embedder={embedder!r}` names no provider: write openai/{embedder} for an OpenAI-compatible server, "
            "PROVIDER/NAME, or file.py:NAME for a function of texts"
        )
    return dspy.Embedder(embedder, caching=False)  # DSPy's cache on disk is unpickled


def embedder_name(embedder: Any) -> str:
    """The name under which vectors are stored: the model's, or the function's."""
    model = embedder.model
    if not isinstance(model, str):
        # the private package of a module from a file has a hash of its path, which differs between machines
        model = f"{public(getattr(model, '__module__', ''))}:{getattr(model, '__qualname__', type(model).__qualname__)}"
    return str(model)[:_NAME]


def _vectors(embedder: Any, texts: Sequence[str]) -> Matrix:
    """Vectors of length 1; a vector of zeros stays one.

    Raises:
        ModelError: the embedder failed, or its vectors are not one finite row for each text.
    """
    try:
        vectors = np.asarray(embedder(list(texts)), dtype=np.float32)
    except Exception as error:  # of any provider
        raise ModelError(f"the embedder {embedder_name(embedder)} failed: {error}") from error
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise ModelError(
            f"the embedder {embedder_name(embedder)} returned an array of shape {vectors.shape} for {len(texts)} "
            "texts; "
            "expected one finite vector for each"
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths == 0, 1, lengths), dtype="<f4")


def embed_missing(engine: sa.Engine, index: str, embedder: Any, advance: Callable[[int], None]) -> int:
    """Stores vectors of the passages that have none by this embedder, and returns their number."""
    name, p, v = embedder_name(embedder), schema.passages, schema.passage_vectors
    statement = (
        sa.select(p.c.id, p.c.text)
        .where(
            p.c.document_id.in_(_documents(index)), ~sa.exists().where(v.c.embedder == name, v.c.passage_id == p.c.id)
        )
        .order_by(p.c.id)
        .limit(_BATCH)
    )
    done = 0
    while True:
        with engine.connect() as connection:
            rows = connection.execute(statement).all()
        if not rows:
            return done
        vectors = _vectors(embedder, [row.text for row in rows])
        values = [
            {"embedder": name, "passage_id": row.id, "vector": vector.tobytes()}
            for row, vector in zip(rows, vectors, strict=True)
        ]
        with engine.begin() as connection:
            connection.execute(upsert(engine.dialect.name, v), values)
        done += len(rows)
        advance(len(rows))


def _documents(index: str) -> Any:
    d = schema.documents
    return sa.select(d.c.id).where(d.c.index_name == index, d.c.ready)


class Vectors:
    """The vectors of an index in memory. Loaded again when the index has changed."""

    def __init__(self, index: str, embedder: Any) -> None:
        self._index, self._embedder = index, embedder
        self._lock = threading.Lock()
        self._version: Any = None
        self._ids: list[int] = []
        self._matrix: Matrix = np.zeros((0, 0), dtype=np.float32)

    def ranked(self, connection: sa.Connection, query: str, most: int) -> list[int]:
        """Ids of the passages with the highest cosine to the query, best first.

        Raises:
            StoreError: the index has no vectors by this embedder.
        """
        ids, matrix = self._loaded(connection)
        if not ids:
            raise StoreError(self._absence(connection))
        vector = _vectors(self._embedder, [query])[0]
        if len(vector) != matrix.shape[1]:
            raise ModelError(
                f"the embedder {embedder_name(self._embedder)} now has vectors of {len(vector)} numbers, the index "
                f"has {matrix.shape[1]}: remove the documents with assay index --remove, and index them again"
            )
        scores = matrix @ vector
        return [ids[at] for at in np.argsort(-scores, kind="stable")[:most]]

    def _absence(self, connection: sa.Connection) -> str:
        """What is wrong if the index has no vectors by this embedder."""
        p, v = schema.passages, schema.passage_vectors
        joined = v.join(p, p.c.id == v.c.passage_id)
        used = sa.select(v.c.embedder).select_from(joined).where(p.c.document_id.in_(_documents(self._index)))
        others = ", ".join(sorted(connection.execute(used.distinct()).scalars())) or "none"
        return (
            f"the index {self._index!r} has no vectors by the embedder {embedder_name(self._embedder)} "
            f"(embedders of its vectors: {others}): add them with assay index DIR --name {self._index} "
            "--embedder, or search without an embedder"
        )

    def _loaded(self, connection: sa.Connection) -> tuple[list[int], Matrix]:
        p, v, d = schema.passages, schema.passage_vectors, schema.documents
        of_index = (v.c.embedder == embedder_name(self._embedder)) & (d.c.index_name == self._index) & d.c.ready
        joined = v.join(p, p.c.id == v.c.passage_id).join(d, d.c.id == p.c.document_id)
        counted = sa.select(sa.func.count(), sa.func.max(p.c.id), sa.func.max(d.c.read_at))
        with self._lock:
            version = tuple(connection.execute(counted.select_from(joined).where(of_index)).one())
            if version != self._version:
                rows = connection.execute(sa.select(p.c.id, v.c.vector).select_from(joined).where(of_index)).all()
                if len({len(row.vector) for row in rows}) > 1:
                    raise ModelError(f"vectors of {embedder_name(self._embedder)} differ in length: index anew")
                self._ids = [row.id for row in rows]
                parts = [np.frombuffer(row.vector, dtype="<f4") for row in rows]
                self._matrix = np.stack(parts) if parts else np.zeros((0, 0), dtype=np.float32)
                self._version = version
            return self._ids, self._matrix


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

    @takes
    def __init__(self, store: str | Path | None = None, name: str = INDEX, *, embedder: Any = None) -> None:
        self.address, self.name, self.embedder = store_address(store), name, embedder_of(embedder)
        self._vectors = Vectors(name, self.embedder) if self.embedder is not None else None
        self._opening = threading.Lock()

    def __deepcopy__(self, memo: object) -> "DocumentIndex":
        return self

    def __reduce__(self) -> Any:
        return _rebuilt, (self.address.url, self.name, self.embedder)

    @cached_property
    def _engine(self) -> sa.Engine:
        if not self.address.exists:
            raise StoreError(f"there is no store at {self.address.shown}, so no index: {self._remedy}")
        return open_engine(self.address)

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
                    f"the store {self.address.shown} has no index {self.name!r}{self._others(connection)}: "
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
