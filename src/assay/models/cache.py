"""Response cache: exact requests to exact responses, stored across runs in one SQLite file.

The key contains the request, the hashes of weights and adapters, and the sample (DSPy's `rollout_id`), so that a
retrained adapter or another rollout never gets an old text. Values are compressed JSON: nothing is unpickled. DSPy's
own cache stays off for models made by assay, because it answers above the engine and does not know the weights.
"""

import hashlib
import json
import sqlite3
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.models.ledger import KeyLocks
from assay.support.scrubbing import mask_secrets

__all__ = ["CacheError", "ResponseCache"]


class CacheError(AssayError, OSError):
    """Answers in the response cache could not be erased."""


class ResponseCache:
    """Thread-safe response cache; several processes may share one file. `path=None` keeps it in memory.

    If the cache cannot be written (a full disk, a read-only folder), the run continues without it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.locks = KeyLocks()
        self._lock = threading.Lock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = self._connect(path)
        except sqlite3.Error:  # a damaged or unwritable file: this run caches in memory
            self._db = self._connect(None)
        self._has_former = bool(
            self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'responses'").fetchone()[0]
        )

    @staticmethod
    def _connect(path: Path | None) -> sqlite3.Connection:
        db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None, timeout=30)
        if path is not None:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")
        # The id of a row is the start of its key's hash: a look-up is one descent of the B-tree and needs no index.
        db.execute(
            "CREATE TABLE IF NOT EXISTS answers (id INTEGER PRIMARY KEY, key TEXT NOT NULL, answer BLOB NOT NULL)"
        )
        db.execute(
            "CREATE TABLE IF NOT EXISTS asked (request BLOB, key BLOB, PRIMARY KEY (request, key)) WITHOUT ROWID"
        )
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
                former = self._former(key) if row is None and self._has_former else None
            if former is not None:
                self.put(key, record := json.loads(former))
            else:
                record = None if row is None else json.loads(zlib.decompress(row[0]).decode("utf-8", "surrogatepass"))
        except (sqlite3.Error, ValueError, TypeError, zlib.error):
            return None
        return record if isinstance(record, dict) else None

    def _former(self, key: str) -> str | None:
        """Record from the table that was used before answers were compressed."""
        row = self._db.execute("SELECT response FROM responses WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, record: dict[str, Any], *, request: dict[str, Any] | None = None) -> None:
        """Store a record; never raises. With `request`, `forget` can find and erase it."""
        if request is not None:
            self._note(key, request)
        answer = zlib.compress(mask_secrets(json.dumps(record, ensure_ascii=False)).encode("utf-8", "surrogatepass"))
        try:
            with self._lock:
                self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (_row_id(key), key, answer))
        except sqlite3.Error:  # not cached: the model is called again
            pass

    def remove(self, key: str) -> None:
        """Remove a record, so that its request is sent again; never raises."""
        try:
            with self._lock:
                self._delete(key)
        except sqlite3.Error:
            pass

    def _note(self, key: str, request: dict[str, Any]) -> None:
        try:
            with self._lock:
                self._db.execute(
                    "INSERT OR IGNORE INTO asked VALUES (?, ?)", (_request_hash(request), bytes.fromhex(key))
                )
        except (sqlite3.Error, ValueError):
            pass

    def forget(self, requests: Iterable[dict[str, Any]]) -> int:
        """Erase the answers to these requests, for all weights, adapters and samples; return their number.

        Raises:
            CacheError: the file could not be written.
        """
        removed = 0
        try:
            with self._lock:
                for request in requests:
                    digest = _request_hash(request)
                    for (key,) in self._db.execute("SELECT key FROM asked WHERE request = ?", (digest,)).fetchall():
                        removed += self._delete(key.hex())
                    self._db.execute("DELETE FROM asked WHERE request = ?", (digest,))
        except sqlite3.Error as error:
            raise CacheError(f"cannot erase answers in {self.path}: {error}") from error
        return removed

    def forget_unowned(self) -> int:
        """Erase the answers without a recorded request, written by older versions: their owner is unknown.

        Raises:
            CacheError: the file could not be written.
        """
        try:
            with self._lock:
                owned = "SELECT lower(hex(key)) FROM asked"
                removed = self._db.execute(f"DELETE FROM answers WHERE key NOT IN ({owned})").rowcount
                return removed + (self._db.execute("DELETE FROM responses").rowcount if self._has_former else 0)
        except sqlite3.Error as error:
            raise CacheError(f"cannot erase answers in {self.path}: {error}") from error

    def _delete(self, key: str) -> int:
        removed = self._db.execute("DELETE FROM answers WHERE id = ? AND key = ?", (_row_id(key), key)).rowcount
        former = self._db.execute("DELETE FROM responses WHERE key = ?", (key,)).rowcount if self._has_former else 0
        return max(removed, former)  # `get` copies a former record, which is then in both tables

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _request_hash(request: dict[str, Any]) -> bytes:
    return hashlib.sha256(
        json.dumps(request, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).digest()[:16]


def _row_id(key: str) -> int:
    """First 64 bits of the key as SQLite's signed integer. Of two keys with the same id, the later one is stored."""
    return int.from_bytes(bytes.fromhex(key[:16]), "big", signed=True)
