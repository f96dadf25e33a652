"""Response cache: exact requests to exact responses, stored across runs in one SQLite file.

The key contains the request, the hashes of weights and adapters, and the sample (DSPy's `rollout_id`), so that a
retrained adapter or another rollout never gets an old text. Equal calls of one rollout are samples of their own: a
replay answers them in the order in which they were sent (`assay.models.lm`). Values are compressed JSON: nothing is
unpickled. DSPy's own cache stays off for models made by assay, because it answers above the engine and does not know
the weights.
"""

import hashlib
import json
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.support.scrubbing import mask_secrets
from assay.support.values import check_format


def _opened(path: Path | None, connect: Callable[[Path | None], sqlite3.Connection]) -> sqlite3.Connection:
    """A connection to a file; to memory if the file is damaged or cannot be written."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return connect(path)
    except sqlite3.Error:
        return connect(None)


class KeyLocks:
    """One lock per key: of identical concurrent requests, one is sent, and the others wait for its answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Hold the lock of `key` inside."""
        with self._lock:
            lock, waiting = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, waiting + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, waiting = self._locks[key]
                if waiting == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = (lock, waiting - 1)


_FORMAT = 1  # stored as `user_version` of the file


class CacheError(AssayError, OSError):
    """The response cache has another format, or answers in it could not be erased."""


class ResponseCache:
    """Thread-safe response cache; several processes may share one file. `path=None` keeps it in memory.

    If the cache cannot be written (a full disk, a read-only folder), the run continues without it.

    Raises:
        CacheError: the file has another format.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.locks = KeyLocks()
        self._lock = threading.Lock()
        self._db = _opened(path, self._connect)

    @staticmethod
    def _connect(path: Path | None) -> sqlite3.Connection:
        db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None, timeout=30)
        if path is not None:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")
        if _format_of(db) == _FORMAT:
            return db
        db.execute("BEGIN IMMEDIATE")  # another process may be creating the tables
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            # The id of a row is the start of its key's hash: a look-up is one descent of the B-tree and needs no index.
            db.execute("CREATE TABLE answers (id INTEGER PRIMARY KEY, key TEXT NOT NULL, answer BLOB NOT NULL)")
            db.execute("CREATE TABLE asked (request BLOB, key BLOB, PRIMARY KEY (request, key)) WITHOUT ROWID")
            db.execute(f"PRAGMA user_version = {_FORMAT}")
        db.execute("COMMIT")
        remake = "remove the file; a model is then asked again for its answers"
        check_format(f"the response cache {path}", _format_of(db), _FORMAT, remake=remake, error=CacheError)
        return db

    def __deepcopy__(self, memo: object) -> "ResponseCache":
        return self

    @staticmethod
    def key(request: dict[str, Any], *, weights: str, adapters: Iterable[str], sample: int | None) -> str:
        """sha256 of everything that determines the answer."""
        content = {"request": request, "weights": weights, "adapters": list(adapters), "sample": sample}
        return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    def get(self, key: str) -> dict[str, Any] | None:
        """The stored record, or None if there is none or it cannot be read."""
        try:
            with self._lock:
                row = self._db.execute(
                    "SELECT answer FROM answers WHERE id = ? AND key = ?", (_row_id(key), key)
                ).fetchone()
            record = None if row is None else json.loads(zlib.decompress(row[0]).decode("utf-8", "surrogatepass"))
        except (sqlite3.Error, ValueError, TypeError, zlib.error):
            return None
        return record if isinstance(record, dict) else None

    def put(self, key: str, record: dict[str, Any], *, request: dict[str, Any] | None = None) -> None:
        """Store a record; never raises. With `request`, `forget` can find and erase it."""
        asked = None if request is None else (_request_hash(request), bytes.fromhex(key))
        answer = zlib.compress(mask_secrets(json.dumps(record, ensure_ascii=False)).encode("utf-8", "surrogatepass"))
        try:
            with self._lock:
                if asked is not None:
                    self._db.execute("INSERT OR IGNORE INTO asked VALUES (?, ?)", asked)
                self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (_row_id(key), key, answer))
        except sqlite3.Error:  # not cached: the model is called again
            pass

    def remove(self, key: str) -> None:
        """Remove a record, so that its request is sent again; never raises."""
        with suppress(sqlite3.Error), self._lock:
            self._delete(key)

    @contextmanager
    def _erasing(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except (sqlite3.Error, zlib.error) as error:
            raise CacheError(f"cannot erase answers in {self.path}: {error}") from error

    def forget(self, requests: Iterable[dict[str, Any]]) -> int:
        """Erase the answers to these requests, for all weights, adapters and samples; return their number.

        Raises:
            CacheError: the file could not be written; so do `forget_texts` and `forget_unowned`.
        """
        removed = 0
        with self._erasing():
            for request in requests:
                digest = _request_hash(request)
                for (key,) in self._db.execute("SELECT key FROM asked WHERE request = ?", (digest,)).fetchall():
                    removed += self._delete(key.hex())
                self._db.execute("DELETE FROM asked WHERE request = ?", (digest,))
        return removed

    def forget_texts(self, found: Callable[[str], bool]) -> int:
        """Erase the answers whose JSON `found` accepts; return their number."""
        with self._erasing():
            self._db.execute("PRAGMA secure_delete=ON")
            keys = [
                key
                for key, answer in self._db.execute("SELECT key, answer FROM answers")
                if found(zlib.decompress(answer).decode("utf-8", "surrogatepass"))
            ]
            for key in keys:
                self._db.execute("DELETE FROM asked WHERE key = ?", (bytes.fromhex(key),))
            return sum(map(self._delete, keys))

    def forget_unowned(self) -> int:
        """Erase the answers without a recorded request and return their number: their owner is unknown."""
        with self._erasing():
            owned = "SELECT lower(hex(key)) FROM asked"
            return self._db.execute(f"DELETE FROM answers WHERE key NOT IN ({owned})").rowcount

    def _delete(self, key: str) -> int:
        return self._db.execute("DELETE FROM answers WHERE id = ? AND key = ?", (_row_id(key), key)).rowcount

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _format_of(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _request_hash(request: dict[str, Any]) -> bytes:
    return hashlib.sha256(
        json.dumps(request, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).digest()[:16]


def _row_id(key: str) -> int:
    """First 64 bits of the key as SQLite's signed integer. Of two keys with the same id, the later one is stored."""
    return int.from_bytes(bytes.fromhex(key[:16]), "big", signed=True)
