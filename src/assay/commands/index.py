"""`assay index`: documents of a folder, for retrieval."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from assay.commands.groups import InStore, Reported, Trusting
from assay.errors import ConfigError
from assay.support.names import check_name
from assay.support.numbers import counted
from assay.support.options import Flag, Positive, function_of
from assay.support.report import Report

if TYPE_CHECKING:
    import sqlalchemy as sa

    from assay.programs.retrieval.building import IndexCounts
    from assay.support.addresses import DatabaseAddress

_NAME = 64  # characters; the width of the column


@dataclass(frozen=True, kw_only=True, repr=False)
class IndexReport(Report):
    """What `assay.index` did.

    Attributes:
        index: its name.
        folder: absolute path of the folder.
        store: the database, without a password.
        added: files that were not in the index before.
        changed: files whose passages were replaced.
        unchanged: files that were not read, or have the same hash.
        removed: files whose passages were removed.
        skipped: reason -> number of entries that were not read.
        examples: reason -> names of some of them.
        passages_written: passages of the added and changed files.
        documents: files in the index now, of all folders.
        passages: passages in the index now.
        embedded: passages that got a vector; None without an embedder.
    """

    index: str
    folder: str
    store: str
    added: int
    changed: int
    unchanged: int
    removed: int
    skipped: dict[str, int]
    examples: dict[str, list[str]]
    passages_written: int
    documents: int
    passages: int
    embedded: int | None = None

    def lines(self) -> Iterator[str]:
        files = {name: getattr(self, name) for name in ("added", "changed", "unchanged", "removed")}
        documents, passages = counted(self.documents, "documents"), counted(self.passages, "passages")
        yield f"index {self.index} in {self.store}: {documents}, {passages}"
        yield f"files: {', '.join(f'{count:,} {name}' for name, count in files.items())}"
        if self.skipped:
            yield f"skipped: {', '.join(f'{count:,} {reason}' for reason, count in self.skipped.items())}"
        yield from (f"  {reason}: {', '.join(names)}" for reason, names in self.examples.items())
        if self.embedded is not None:
            yield f"vectors: {self.embedded:,} added"
        if not any(files.values()):
            yield f"note: {self.folder} has no text files, so nothing was indexed"


class Index(Trusting, Reported, InStore):
    """Index the text files of DIR for agents that retrieve documents, such as answer_from_documents.

    Run it again after changes: only new and changed files (by size and time, then by hash) are read, and deleted ones
    are removed. Binary and hidden files, links and special files are skipped and counted. If it is interrupted, the
    next call continues. In Python `assay.programs.DocumentIndex` searches the index.

    Raises:
        ConfigError: no such folder; it has no files, but the index has documents of it; the index has none of a folder
            to remove; or another process indexes it.
        StoreError: the store cannot be opened, or its SQLite has no full-text search.
        ModelError: the embedder failed; the full-text index is complete.
    """

    folder: Annotated[str | Path, Flag(metavar="DIR", key=False)] = field(kw_only=False)
    """Folder whose text files are indexed."""
    name: str = "documents"
    """Name of the index. A store may have several."""
    passage_chars: Annotated[int, Ge(100), Le(20_000)] = 1000
    """Maximum number of characters of a passage. After a change all files are read again."""
    max_file_mb: Positive = 500
    """Maximum size of a file in MiB; larger files are skipped."""
    embedder: Annotated[str | Callable[..., Any] | None, Flag(metavar="MODEL")] = None
    """Also store dense vectors: a litellm embedding model (PROVIDER/NAME), or a function from texts to vectors
    (file.py:NAME); in Python also a `dspy.Embedder` or a function. By default only full-text search."""
    remove: bool = False
    """Remove the documents of the folder from the index instead."""

    def check(self) -> None:
        if len(check_name(self.name)) > _NAME:
            raise ConfigError(f"must have at most {_NAME} characters, not {self.name!r}", field="name")
        if self.remove and (others := self.changed("passage_chars", "max_file_mb", "embedder")):
            raise ConfigError("would have no effect with `remove`", field=others[0])

    def run(self) -> IndexReport:
        from assay.programs.retrieval.building import IndexCounts, remove_folder
        from assay.programs.retrieval.index import embed_missing, embedder_of
        from assay.traces.store.connection import open_engine
        from assay.traces.store.location import store_address

        root, progress = Path(self.folder).expanduser().resolve(), self.reporter
        if not root.is_dir() and not self.remove:
            is_file = root.is_file()
            raise ConfigError(
                f"{str(self.folder)!r} is a file" if is_file else f"there is no folder {str(self.folder)!r}",
                hint="Name the folder whose files are to be indexed",
            )
        vectors, address = embedder_of(_loaded(self.embedder)), store_address(self.store)
        engine = open_engine(address)
        try:
            with _alone(engine, address, self.name):
                embedded = None
                if self.remove:
                    counts = IndexCounts(removed=remove_folder(engine, root, self.name))
                else:
                    counts = self._update(engine, root)
                    if vectors is not None:
                        with progress.bar("embed", None) as advance:
                            embedded = embed_missing(engine, self.name, vectors, advance)
            documents, passages = _sizes(engine, self.name)
        finally:
            engine.dispose()
        return IndexReport(
            index=self.name, folder=str(root), store=address.shown,
            added=counts.added, changed=counts.changed, unchanged=counts.unchanged, removed=counts.removed,
            skipped=dict(counts.skipped), examples=dict(counts.examples), passages_written=counts.passages,
            documents=documents, passages=passages, embedded=embedded,
        )  # fmt: skip

    def _update(self, engine: "sa.Engine", root: Path) -> "IndexCounts":
        from assay.programs.retrieval.building import FolderFiles, update_index

        listed = FolderFiles.of(root)
        with self.reporter.bar(f"index {root.name}", len(listed.files)) as advance:
            return update_index(
                engine, root, self.name, passage_chars=self.passage_chars, max_file_mb=self.max_file_mb,
                advance=advance, listed=listed,
            )  # fmt: skip


def _loaded(embedder: Any) -> Any:
    """The function that `file.py:NAME` names; anything else as it is. Running the file runs its code."""
    from assay.sources.modules import located

    if not isinstance(embedder, str) or ".py:" not in embedder:
        return embedder
    try:
        module, name = located(embedder)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {embedder.rpartition(':')[0]!r}", field="embedder") from None
    if not callable(function := getattr(module, name, None)):
        raise ConfigError(f"the file of {embedder!r} has no function {name!r}", field="embedder")
    return function


@contextmanager
def _alone(engine: "sa.Engine", address: "DatabaseAddress", name: str) -> Iterator[None]:
    """No other process changes the index meanwhile. Searching it is possible.

    Raises:
        ConfigError: another process does.
    """
    import sqlalchemy as sa
    from filelock import Timeout

    from assay.jobs.opening import exclusive_lock

    digest = hashlib.sha256(name.encode()).digest()
    file = address.file
    if file is not None:
        with ExitStack() as locked:
            try:
                locked.enter_context(exclusive_lock(file.with_name(f"{file.name}.index-{digest.hex()[:8]}.lock")))
            except Timeout:
                raise ConfigError(f"another process changes the index {name!r}: wait until it has finished") from None
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


def _sizes(engine: "sa.Engine", name: str) -> tuple[int, int]:
    """Documents and passages of an index."""
    import sqlalchemy as sa

    from assay.traces.store import tables as schema

    d, p = schema.documents, schema.passages
    of_index = (d.c.index_name == name) & d.c.ready
    with engine.connect() as connection:
        documents = connection.execute(sa.select(sa.func.count()).select_from(d).where(of_index)).scalar_one()
        joined = sa.select(sa.func.count()).select_from(p.join(d, d.c.id == p.c.document_id)).where(of_index)
        return documents, connection.execute(joined).scalar_one()


index = function_of(Index, "index")
