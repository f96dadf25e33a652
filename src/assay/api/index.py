"""Public API for `assay index`: documents of a folder, for retrieval."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import sqlalchemy as sa

from assay.errors import ConfigError
from assay.evaluation import Progress, default_progress
from assay.programs.retrieval.building import FolderFiles, IndexCounts, remove_folder, update_index
from assay.programs.retrieval.dense import embed_missing, embedder_of
from assay.runs.lock import exclusive_lock
from assay.runs.settings.index import IndexSettings
from assay.runs.settings.store_options import IndexOptions
from assay.sources.modules import located
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.reprs import ReportRepr
from assay.traces.store import tables as schema
from assay.traces.store.connection import open_engine, url_without_password
from assay.traces.store.location import store_file, store_url


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexReport(ReportRepr):
    """What `assay.index` did.

    Attributes:
        index: its name.
        folder: absolute path of the folder.
        store: the database, without a password.
        counts: files that were added, changed, unchanged, removed and skipped.
        documents: files in the index now, of all folders.
        passages: passages in the index now.
        embedded: passages that got a vector; None without an embedder.
    """

    index: str
    folder: str
    store: str
    counts: IndexCounts = field(default_factory=IndexCounts)
    documents: int = 0
    passages: int = 0
    embedded: int | None = None

    def to_dict(self) -> dict[str, Any]:
        counts = self.counts
        return {
            "index": self.index,
            "folder": self.folder,
            "store": self.store,
            "added": counts.added,
            "changed": counts.changed,
            "unchanged": counts.unchanged,
            "removed": counts.removed,
            "skipped": dict(counts.skipped),
            "examples": dict(counts.examples),
            "passages_written": counts.passages,
            "documents": self.documents,
            "passages": self.passages,
            "embedded": self.embedded,
        }


@takes(IndexSettings, without=("embedder",))
@trusts
def index(
    folder: str | Path,
    *,
    store: str | Path | None = None,
    embedder: Any = None,
    progress: Progress | None = None,
    **options: Unpack[IndexOptions],
) -> IndexReport:
    """Brings an index up to date with the text files of a folder; `assay.programs.DocumentIndex` searches it.

    New and changed files (by size and time, then by hash) are read, deleted ones removed. Binary and hidden files,
    links and special files are skipped and counted. If it is interrupted, the next call continues.

    Args:
        embedder: also stores dense vectors: a `dspy.Embedder`, the name of a litellm model, `file.py:NAME`, or a
            function from texts to vectors.
        options: the fields of `assay.runs.settings.IndexSettings`.
    Raises:
        ConfigError: no such folder; it has no files, but the index has documents of it; the index has none of a folder
            to remove; or another process indexes it.
        StoreError: the store cannot be opened, or its SQLite has no full-text search.
        ModelError: the embedder failed; the full-text index is complete.
    """
    settings = IndexSettings(**options)
    if settings.remove and embedder is not None:
        raise ConfigError("embedder would have no effect with remove=True")
    root, progress = Path(folder).expanduser().resolve(), default_progress(progress)
    if not root.is_dir() and not settings.remove:
        if root.is_file():
            raise ConfigError(f"{str(folder)!r} is a file: name the folder whose files are to be indexed")
        raise ConfigError(f"there is no folder {str(folder)!r}: name one whose files are to be indexed")
    vectors, url = embedder_of(_loaded(embedder)), store_url(store)
    engine = open_engine(url)
    try:
        with _alone(engine, url, settings.name):
            embedded = None
            if settings.remove:
                counts = IndexCounts(removed=remove_folder(engine, root, settings.name))
            else:
                counts = _update(engine, root, settings, progress)
                if vectors is not None:
                    with progress.bar("embed", None) as advance:
                        embedded = embed_missing(engine, settings.name, vectors, advance)
        documents, passages = _sizes(engine, settings.name)
    finally:
        engine.dispose()
    location = url_without_password(url).removeprefix("sqlite:///")
    return IndexReport(
        index=settings.name, folder=str(root), store=location, counts=counts, documents=documents, passages=passages,
        embedded=embedded,
    )  # fmt: skip


def _loaded(embedder: Any) -> Any:
    """The function that `file.py:NAME` names; anything else as it is. Running the file runs its code."""
    if not isinstance(embedder, str) or ".py:" not in embedder:
        return embedder
    try:
        module, name = located(embedder)
    except FileNotFoundError:
        raise ConfigError(f"embedder={embedder!r}: there is no such file") from None
    if not callable(function := getattr(module, name, None)):
        raise ConfigError(f"embedder={embedder!r}: the file has no function {name!r}")
    return function


def _update(engine: sa.Engine, root: Path, settings: IndexSettings, progress: Progress) -> IndexCounts:
    listed = FolderFiles.of(root)
    with progress.bar(f"index {root.name}", len(listed.files)) as advance:
        return update_index(
            engine,
            root,
            settings.name,
            passage_chars=settings.passage_chars,
            max_file_mb=settings.max_file_mb,
            advance=advance,
            listed=listed,
        )


@contextmanager
def _alone(engine: sa.Engine, url: str, name: str) -> Iterator[None]:
    """No other process changes the index meanwhile. Searching it is possible.

    Raises:
        ConfigError: another process does.
    """
    digest = hashlib.sha256(name.encode()).digest()
    file = store_file(url)
    if file is not None:
        with exclusive_lock(file.with_name(f"{file.name}.index-{digest.hex()[:8]}.lock")):
            yield
        return
    key = int.from_bytes(digest[:8], "big", signed=True)
    with engine.connect() as connection:  # the server releases the lock when the connection ends, also by a kill
        if not connection.execute(sa.text("SELECT pg_try_advisory_lock(:key)"), {"key": key}).scalar():
            raise ConfigError(f"another process changes the index {name!r}: wait until it has finished")
        connection.commit()
        try:
            yield
        finally:
            connection.invalidate()


def _sizes(engine: sa.Engine, name: str) -> tuple[int, int]:
    """Documents and passages of an index."""
    d, p = schema.documents, schema.passages
    of_index = (d.c.index_name == name) & d.c.ready
    with engine.connect() as connection:
        documents = connection.execute(sa.select(sa.func.count()).select_from(d).where(of_index)).scalar_one()
        joined = sa.select(sa.func.count()).select_from(p.join(d, d.c.id == p.c.document_id)).where(of_index)
        return documents, connection.execute(joined).scalar_one()
