"""Brings an index up to date with a folder: new and changed files are read, deleted ones removed.

A file is replaced as a whole: its passages are written in batches, and found only once all of them are. A run that is
killed leaves what it has finished; the next one continues there.
"""

import codecs
import hashlib
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.errors import ConfigError
from assay.programs.retrieval import fulltext
from assay.programs.retrieval.retriever import passage_key, passages_of
from assay.traces.store import tables as schema

# -- Reads the text files of a folder. Binary files, and files that change while they are read, are detected.
#
# Links, hidden files and special files (pipes, devices) are not opened.


_BLOCK = 1 << 16
_CONTROLS = bytes(set(range(32)) - {9, 10, 12, 13, 27})  # not in text; 27 begins colours of a terminal
_MOST_CONTROLS = 0.02  # share of a block
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_TAGS = re.compile(r"<(?:script|style)\b.*?</(?:script|style)\s*>|<!--.*?-->|<[a-zA-Z/!][^<>]*>", re.DOTALL | re.I)


class FileChanged(Exception):
    """A file changed while it was read."""


class FileIsBinary(Exception):
    """A file begins as text and continues as something else, such as an archive after the script that unpacks it."""


@dataclass(frozen=True)
class TextFile:
    """A regular file below the folder.

    Attributes:
        name: path relative to the folder, with `/`; bytes that are not UTF-8 are escaped.
    """

    path: Path
    name: str
    size: int
    mtime_ns: int


@dataclass
class FolderFiles:
    """The files below a folder, in the order of their names.

    Attributes:
        skipped: reason -> number of entries that are not read.
        unreadable: names of folders whose entries are unknown.
    """

    folder: Path
    files: list[TextFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> "FolderFiles":
        """Lists a folder. Files that vanish meanwhile are left out."""
        listed = cls(folder)
        for top, folders, names in os.walk(folder, onerror=listed._note_unreadable):
            listed.skipped["hidden"] += sum(name.startswith(".") for name in (*folders, *names))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            listed.skipped["link"] += sum(os.path.islink(os.path.join(top, name)) for name in folders)
            for name in sorted(names):
                if not name.startswith("."):
                    listed._add(Path(top, name))
        return listed

    def _add(self, path: Path) -> None:
        try:
            status = path.lstat()
        except OSError:
            return
        if stat.S_ISREG(status.st_mode):
            self.files.append(TextFile(path, self._name(path), status.st_size, status.st_mtime_ns))
        else:
            self.skipped["link" if stat.S_ISLNK(status.st_mode) else "special file"] += 1

    def _name(self, path: Path) -> str:
        return os.fsencode(path.relative_to(self.folder).as_posix()).decode("utf-8", "backslashreplace")

    def _note_unreadable(self, error: OSError) -> None:
        self.skipped["unreadable"] += 1
        self.unreadable.append(self._name(Path(os.fsdecode(error.filename))))


class open_text:
    """A file as blocks of text. A context manager; read the blocks once.

    `encoding` is None if the first block is binary. Without a byte order mark the text is UTF-8, or Latin-1 if the
    first block is not valid UTF-8. NUL is left out, and so are the tags of HTML.

    Raises:
        OSError: the file cannot be opened.
        FileChanged: its size or time changed since the listing or during the reading, or it is not a regular file.
    """

    def __init__(self, file: TextFile) -> None:
        self.file, self._hash = file, hashlib.sha256()
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        self._opened = os.fdopen(os.open(file.path, flags), "rb")
        self._check()
        self._first = self._opened.read(_BLOCK)
        self.encoding = _encoding(self._first)

    def __enter__(self) -> "open_text":
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

    def _check(self) -> None:
        status = os.fstat(self._opened.fileno())
        if not stat.S_ISREG(status.st_mode) or (status.st_size, status.st_mtime_ns) != (
            self.file.size,
            self.file.mtime_ns,
        ):
            raise FileChanged(self.file.name)

    def blocks(self) -> Iterator[str]:
        """The text. `FileChanged` is raised at the end of it, `FileIsBinary` where a part is not text."""
        if self.encoding is None:
            raise FileIsBinary(self.file.name)
        decoder = codecs.getincrementaldecoder(self.encoding)("replace")
        is_html, rest = self.file.path.suffix.lower() in (".html", ".htm", ".xhtml"), ""
        for block in self._bytes():
            if self.encoding != "utf-16" and _has_controls(block.replace(b"\0", b"")):  # logs may have runs of NUL
                raise FileIsBinary(self.file.name)
            text = decoder.decode(block).replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")
            if is_html:
                text, rest = _without_tags(rest + text)
            yield text
        yield rest + decoder.decode(b"", final=True)

    def sha256(self) -> str:
        """Hash of the content; reads what is left of it. `FileChanged` as in `blocks`."""
        for _ in self._bytes():
            pass
        return self._hash.hexdigest()

    def _bytes(self) -> Iterator[bytes]:
        size = 0
        while block := self._first or self._opened.read(_BLOCK):
            self._first = b""
            self._hash.update(block)
            size += len(block)
            if size > self.file.size:  # it grows while it is read, and may never end
                raise FileChanged(self.file.name)
            yield block
        self._check()


def _encoding(first: bytes) -> str | None:
    """Encoding of a file by its first block; None if it is binary."""
    for mark, name in _MARKS.items():
        if first.startswith(mark):
            return name
    if b"\0" in first or _has_controls(first):
        return None
    try:
        codecs.getincrementaldecoder("utf-8")().decode(first)
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"


def _has_controls(block: bytes) -> bool:
    return len(block) - len(block.translate(None, _CONTROLS)) > _MOST_CONTROLS * len(block)


def _without_tags(text: str) -> tuple[str, str]:
    """HTML without tags, scripts and comments, as far as it is complete, and the rest from an open tag on."""
    from html import unescape

    lowered = text.lower()
    opened = [lowered.rfind(mark) for mark in ("<script", "<style", "<!--", "<")]
    ends = [lowered.rfind(mark) for mark in ("</script", "</style", "-->", ">")]
    open_at = [start for start, end in zip(opened, ends, strict=True) if start > end]
    at = min(open_at, default=len(text))
    if len(text) - at > 1 << 20:  # never closed: it is text
        at = len(text)
    return unescape(_TAGS.sub(" ", text[:at])), text[at:]


_BATCH_PASSAGES, _BATCH_FILES, _BATCH_S = 2000, 500, 5.0  # of one transaction
_REMOVED = 2000  # passages that one transaction removes
_FRESH_S = 2.0  # a file that was modified less than this before it was read may change again with the same time stamp
_ATTEMPTS = 3  # at a file that changes while it is read
_NAMES = 5  # of each kind in a report

_d, _p, _v = schema.documents, schema.passages, schema.passage_vectors


@dataclass
class IndexCounts:
    """What an update did.

    Attributes:
        added, changed, unchanged, removed: files.
        skipped: reason (`binary`, `too large`, `link`, `hidden`, `special file`, `unreadable`, `changing`) -> number.
        examples: reason -> names of some of them, for `unreadable`, `changing` and `too large`.
        passages: that were written.
    """

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    passages: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, name: str) -> None:
        self.skipped[reason] += 1
        if reason != "binary" and len(names := self.examples.setdefault(reason, [])) < _NAMES:
            names.append(name)


def update_index(
    engine: sa.Engine,
    folder: Path,
    index: str,
    *,
    passage_chars: int = 1000,
    max_file_mb: int = 500,
    advance: Callable[[int], None] = lambda _: None,
    listed: FolderFiles | None = None,
) -> IndexCounts:
    """Reads what is new or changed in a folder.

    Args:
        advance: called with the number of files that are done.
        listed: the folder's files, if they are known.
    Raises:
        ConfigError: the folder has no files, but the index has documents of it.
        StoreError: SQLite without FTS5.
    """
    fulltext.prepare(engine)
    listed = listed or FolderFiles.of(folder)
    update = _Update(engine, str(folder), index, passage_chars)
    counts = update.counts
    known = update.known()
    if known and not listed.files:
        raise ConfigError(
            f"the folder {str(folder)!r} has no files, but the index {index!r} has documents of it ({len(known)}). "
            "To remove them, run assay index DIR --remove"
        )
    counts.skipped.update(listed.skipped)
    counts.examples.update({"unreadable": listed.unreadable[:_NAMES]} if listed.unreadable else {})
    update.remove_unfinished()
    try:
        for file in listed.files:
            if file.size > max_file_mb << 20:
                counts.skip("too large", file.name)
            else:
                update.read(file, known.pop(file.name, None))
            advance(1)
    except KeyboardInterrupt:  # what was read need not be read again
        update.flush()
        raise
    update.flush()
    gone = [row.id for name, row in known.items() if not any(_is_below(name, top) for top in listed.unreadable)]
    counts.removed += len(gone)
    update.retire(gone)
    update.remove_unfinished()
    counts.skipped = Counter({reason: n for reason, n in sorted(counts.skipped.items()) if n})
    return counts


def remove_folder(engine: sa.Engine, folder: Path, index: str) -> int:
    """Removes the documents of a folder from an index, and returns their number.

    Raises:
        ConfigError: the index has none of this folder; the message names the folders of which it has some.
    """
    fulltext.prepare(engine)
    update = _Update(engine, str(folder), index, 0)
    known, roots = update.known(), update.roots()
    if _text(str(folder)) not in roots:
        others = f"it has those of {', '.join(map(repr, roots[:_NAMES]))}" if roots else "it is empty"
        raise ConfigError(f"the index {index!r} has no documents of the folder {str(folder)!r}: {others}")
    update.retire([row.id for row in known.values()])
    update.remove_unfinished()
    return len(known)


def _is_below(name: str, top: str) -> bool:
    return top == "." or name.startswith(f"{top}/")


@dataclass(eq=False)
class _Document:
    """A document that is read.

    Attributes:
        replaces: id of the row with its former content.
        id: of its row; None until the row is written.
        passages: line and text of those that are not written yet.
        read: size, time, hash; empty until it is read to its end.
    """

    name: str
    replaces: int | None
    id: int | None = None
    passages: list[tuple[int, str]] = field(default_factory=list)
    read: dict[str, Any] = field(default_factory=dict)


class _Update:
    """The state of an update: documents that wait for the next transaction."""

    def __init__(self, engine: sa.Engine, root: str, index: str, passage_chars: int) -> None:
        self.engine, self.root, self.index = engine, _text(root), index
        self.form, self.passage_chars = f"1 {passage_chars}", passage_chars
        self.counts = IndexCounts()
        self._waiting: list[_Document] = []  # read to their ends
        self._passages = 0  # of these
        self._touched: list[dict[str, Any]] = []
        self._since = time.monotonic()

    def known(self) -> dict[str, Any]:
        """The documents of the folder, by name."""
        columns = (_d.c.id, _d.c.path, _d.c.size, _d.c.mtime_ns, _d.c.read_at, _d.c.sha256, _d.c.form)
        statement = sa.select(*columns).where(_d.c.index_name == self.index, _d.c.root == self.root, _d.c.ready)
        with self.engine.connect() as connection:
            return {row.path: row for row in connection.execute(statement.order_by(_d.c.id))}

    def roots(self) -> list[str]:
        """The folders of which the index has documents."""
        statement = sa.select(_d.c.root).where(_d.c.index_name == self.index).distinct().order_by(_d.c.root)
        with self.engine.connect() as connection:
            return list(connection.execute(statement).scalars())

    def read(self, file: TextFile, known: Any) -> None:
        """Reads one file, if it is new or changed. One that vanished is removed; one that cannot be read keeps its
        former passages."""
        for _ in range(_ATTEMPTS):
            try:
                return self._read(file, known)
            except FileChanged:
                if (status := _status(file.path)) is not None:
                    file = TextFile(file.path, file.name, status.st_size, status.st_mtime_ns)
            except FileNotFoundError:
                if known is not None:
                    self.counts.removed += 1
                    self.retire([known.id])
                return
            except OSError:
                return self.counts.skip("unreadable", file.name)
        self.counts.skip("changing", file.name)

    def _read(self, file: TextFile, known: Any) -> None:
        read_at = time.time()
        if known is not None and known.form == self.form and known.size == file.size:
            settled = known.mtime_ns < (known.read_at - _FRESH_S) * 1e9
            if settled and known.mtime_ns == file.mtime_ns:
                self.counts.unchanged += 1
                return
            with open_text(file) as opened:
                if opened.sha256() == known.sha256:
                    self.counts.unchanged += 1
                    self._touched.append({"of": known.id, "mtime": file.mtime_ns, "at": read_at})
                    return
        document, passages = _Document(file.name, None if known is None else known.id), 0
        with open_text(file) as opened:
            try:
                for line, text in passages_of(opened.blocks(), self.passage_chars):
                    document.passages.append((line, _text(text)))
                    passages += 1
                    if len(document.passages) >= _BATCH_PASSAGES:  # removed as unfinished, if it cannot be read further
                        with self.engine.begin() as connection:
                            self._write(connection, [document])
            except FileIsBinary:
                self.counts.skip("binary", file.name)
                self.retire([] if known is None else [known.id])  # it was text before
                return
            document.read = {"size": file.size, "mtime_ns": file.mtime_ns, "read_at": read_at}
            document.read["sha256"] = opened.sha256()
        self._waiting.append(document)
        self.counts.passages += passages
        self.counts.added += known is None
        self.counts.changed += known is not None
        waiting = sum(len(document.passages) for document in self._waiting)
        if (
            waiting >= _BATCH_PASSAGES
            or len(self._waiting) >= _BATCH_FILES
            or time.monotonic() - self._since > _BATCH_S
        ):
            self.flush()

    def flush(self) -> None:
        """Writes what waits, in one transaction. The documents are found from then on."""
        replaced = [document.replaces for document in self._waiting if document.replaces is not None]
        with self.engine.begin() as connection:
            self._write(connection, self._waiting)
            for at in replaced:
                connection.execute(sa.update(_d).where(_d.c.id == at).values(ready=False))
            if self._touched:
                touch = sa.update(_d).where(_d.c.id == sa.bindparam("of"))
                connection.execute(
                    touch.values(mtime_ns=sa.bindparam("mtime"), read_at=sa.bindparam("at")), self._touched
                )
        self._waiting, self._passages, self._touched, self._since = [], 0, [], time.monotonic()
        self._remove_rows(replaced)

    def _write(self, connection: sa.Connection, documents: list[_Document]) -> None:
        """Writes the rows of documents and their passages. Those that are read to their ends become ready."""
        rows = [
            {
                **{"index_name": self.index, "root": self.root, "form": self.form, "path": _text(document.name)},
                **(document.read or {"size": 0, "mtime_ns": 0, "read_at": 0.0, "sha256": ""}),
                "ready": bool(document.read),
            }
            for document in documents
        ]
        new = [row for row, document in zip(rows, documents, strict=True) if document.id is None]
        insert = sa.insert(_d).returning(_d.c.id, sort_by_parameter_order=True)
        numbers = iter(connection.execute(insert, new).scalars().all() if new else ())
        passages: list[dict[str, Any]] = []
        for row, document in zip(rows, documents, strict=True):
            if document.id is None:
                document.id = next(numbers)
            else:  # its row is from an earlier transaction
                connection.execute(sa.update(_d).where(_d.c.id == document.id).values(row))
            for line, text in document.passages:
                passages.append({"document_id": document.id, "key": passage_key(text), "line": line, "text": text})
            document.passages = []
        if passages and connection.dialect.name == "sqlite":
            with_words = [{**row, "words": fulltext.searched(str(row["text"]))} for row in passages]
            connection.execute(sa.insert(_p), with_words)
        elif passages:
            searched = [{**row, "text_of_words": row["text"]} for row in passages]
            connection.execute(sa.insert(_p).values(words=fulltext.WORDS), searched)

    def retire(self, documents: list[int]) -> None:
        """Removes documents from the index."""
        for at in range(0, len(documents), _BATCH_FILES):
            with self.engine.begin() as connection:
                statement = sa.update(_d).where(_d.c.id.in_(documents[at : at + _BATCH_FILES])).values(ready=False)
                connection.execute(statement)
        self._remove_rows(documents)

    def remove_unfinished(self) -> None:
        """Removes the rows of documents that a killed or changed run has left unfinished."""
        statement = sa.select(_d.c.id).where(_d.c.index_name == self.index, _d.c.root == self.root, ~_d.c.ready)
        with self.engine.connect() as connection:
            numbers = list(connection.execute(statement).scalars())
        self._remove_rows(numbers)

    def _remove_rows(self, documents: list[int]) -> None:
        """Removes documents that are not ready, with their passages, in transactions that others need not wait for."""
        for at in range(0, len(documents), _BATCH_FILES):
            some = documents[at : at + _BATCH_FILES]
            passages = sa.select(_p.c.id).where(_p.c.document_id.in_(some)).limit(_REMOVED)
            while True:
                with self.engine.begin() as connection:
                    numbers = list(connection.execute(passages).scalars())
                    if not numbers:
                        connection.execute(sa.delete(_d).where(_d.c.id.in_(some)))
                        break
                    low, high = min(numbers), max(numbers)
                    for table, column in ((_v, _v.c.passage_id), (_p, _p.c.id)):
                        chosen = column.in_(numbers) if high - low >= len(numbers) else column.between(low, high)
                        connection.execute(sa.delete(table).where(chosen))


def _status(path: Path) -> os.stat_result | None:
    """The status of a file; None if it has none, which the next reading says."""
    with suppress(OSError):
        return path.lstat()
    return None


def _text(text: str) -> str:
    """Text that both databases accept."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()
