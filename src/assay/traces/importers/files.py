"""Reads the rows of a trace file and sorts them by trace on disk, so that memory is bounded by the largest trace.

JSON lines are read one at a time; a file with a single JSON document is read at once. Does not interpret the rows.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from assay.errors import DataError
from assay.support.places import no_such_file

MAX_LINE_BYTES = 256 * 2**20  # maximum bytes of a line
MAX_TRACE_BYTES = 256 * 2**20  # maximum bytes of a trace as JSON
_CACHE_KIB = 16 * 1024
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK": "zip", b"PAR1": "Parquet"}


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Part of a file that was not imported.

    Args:
        where: Position as `file:line`.
        reason: Why it was skipped.
        trace: Id of its trace; empty if unknown.
        repeated: It is a duplicate; the later one was imported.
    """

    where: str
    reason: str
    trace: str = ""
    repeated: bool = False


class Row(NamedTuple):
    """A JSON value of a file and its position."""

    where: str
    value: Any


class Part(NamedTuple):
    """One row of a trace: a span, an event, a score, or the data of the trace itself."""

    kind: str
    where: str
    value: Any


def run_of(path: Path) -> str:
    """Run id of an imported file: `import-` and the first twelve hex digits of its sha256.

    Raises:
        DataError: The file does not exist, is a folder, is empty or compressed, or is UTF-16 text.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder: name one file to import")
    if not path.is_file():
        raise DataError(no_such_file(path))
    with path.open("rb") as file:
        head = file.read(4)
        if not head:
            raise DataError(f"{path} is empty")
        if packed := next((name for magic, name in _PACKED.items() if head.startswith(magic)), None):
            raise DataError(f"{path} is compressed ({packed}); decompress it first")
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError(f"{path} is UTF-16 text: convert it to UTF-8 first")
        file.seek(0)
        return f"import-{hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


def is_text(path: Path) -> bool:
    """Whether a file is text. Protobuf messages contain control characters."""
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf")
    return head[:1] in (b"{", b"[") or all(byte >= 32 or byte in b"\r\n\t" for byte in head)


def json_rows(path: Path) -> Iterator[Row | Skipped]:
    """JSON values of a file: one per line, or one document. Each element of an array is a row.

    Lines that are not JSON are `Skipped`.

    Raises:
        DataError: The file is neither JSON lines nor a JSON document.
    """
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise DataError(f"{path} contains only white space")
    if isinstance(_decoded(path, *first), Skipped):  # part of a document, or a broken line
        second = next(lines, None)
        if first[1].strip() in (b"{", b"[") or second is None or isinstance(_decoded(path, *second), Skipped):
            yield from _document(path)
            return
    for number, text in _lines(path):
        row = _decoded(path, number, text)
        if isinstance(row, Row) and isinstance(row.value, list):
            yield from (Row(f"{row.where}[{at}]", item) for at, item in enumerate(row.value))
        else:
            yield row


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without blank ones. Lines that are too long are cut."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            rest = line
            while len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES)
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                yield number, line


def _decoded(path: Path, number: int, line: bytes) -> Row | Skipped:
    where = f"{path}:{number}"
    try:
        return Row(where, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
    except UnicodeDecodeError as error:
        return Skipped(where=where, reason=f"not UTF-8 at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Skipped(where=where, reason=f"not JSON: {error}")


def _document(path: Path) -> Iterator[Row]:
    """Rows of a file that contains one JSON document or several concatenated ones."""
    decoder, at, line = json.JSONDecoder(), 0, 1
    try:
        text = path.read_text(encoding="utf-8-sig")
        while (start := _value_at(text, at)) < len(text):
            line += text.count("\n", at, start)
            value, at = decoder.raw_decode(text, start)
            where = f"{path}:{line}"
            yield from (
                [Row(f"{where}[{n}]", item) for n, item in enumerate(value)]
                if isinstance(value, list)
                else [Row(where, value)]
            )
            line += text.count("\n", start, at)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else line
        raise DataError(f"{path}:{line}: neither JSON lines nor a JSON document: {error}") from None


def _value_at(text: str, at: int) -> int:
    """Position of the next value."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


class Sorted:
    """Sorts the parts of traces on disk. Parts are added in any order; traces are returned in order of first
    occurrence.
    """

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)  # a temporary file of SQLite, deleted on close
        for line in (
            "PRAGMA journal_mode=OFF",
            "PRAGMA synchronous=OFF",
            f"PRAGMA cache_size=-{_CACHE_KIB}",
            "CREATE TABLE parts (seq INTEGER PRIMARY KEY, trace BLOB, kind TEXT, id BLOB, place TEXT, body BLOB)",
            "CREATE UNIQUE INDEX by_trace ON parts (trace, kind, id)",
            "BEGIN",
        ):
            self._db.execute(line)
        self._count = 0

    def add(self, trace: str, kind: str, part_id: str, where: str, value: Any) -> Skipped | None:
        """Add a part. A part with the kind and id of an earlier one of the trace replaces it.

        Returns:
            `Skipped` for a replaced part or one that cannot be stored, else None.
        """
        self._count += 1
        key = (
            trace.encode("utf-8", "surrogatepass"),
            kind,
            (part_id or f"#{self._count}").encode("utf-8", "surrogatepass"),
        )
        try:
            body = json.dumps(value).encode()
        except RecursionError:
            return Skipped(where=where, reason=f"the {kind} {part_id!r} is nested too deeply", trace=trace)
        added = self._db.execute(
            "INSERT OR IGNORE INTO parts VALUES (?, ?, ?, ?, ?, ?)", (self._count, *key, where, body)
        )
        if added.rowcount:
            return None
        self._db.execute("UPDATE parts SET body = ? WHERE trace = ? AND kind = ? AND id = ?", (body, *key))
        return Skipped(
            where=where,
            reason=f"the {kind} {part_id!r} is in the file twice; the later one is imported",
            trace=trace,
            repeated=True,
        )

    def traces(self) -> Iterator[tuple[str, list[Part] | Skipped]]:
        """Id and parts of each trace in file order; `Skipped` if a trace is too large."""
        for trace, _ in self._db.execute("SELECT trace, MIN(seq) AS first FROM parts GROUP BY trace ORDER BY first"):
            name = trace.decode("utf-8", "surrogatepass")
            yield name, self._parts(trace, name)

    def _parts(self, trace: bytes, name: str) -> list[Part] | Skipped:
        parts, size = list[Part](), 0
        for kind, where, body in self._db.execute(
            "SELECT kind, place, body FROM parts WHERE trace = ? ORDER BY seq", (trace,)
        ):
            size += len(body)
            if size > MAX_TRACE_BYTES:
                return Skipped(
                    where=where, reason=f"the trace is larger than {MAX_TRACE_BYTES // 2**20} MiB", trace=name
                )
            try:
                parts.append(Part(kind, where, json.loads(body)))
            except RecursionError:
                return Skipped(where=where, reason=f"a {kind} of the trace is nested too deeply", trace=name)
        return parts

    @classmethod
    @contextmanager
    def open(cls) -> Iterator["Sorted"]:
        """Open a sorter for one file.

        Raises:
            DataError: The disk is full.
        """
        parts = cls()
        try:
            yield parts
        except sqlite3.Error as error:
            raise DataError(
                f"the file cannot be sorted by trace: {error}. Free disk space, or set SQLITE_TMPDIR to another folder."
            ) from error
        finally:
            parts._db.close()
