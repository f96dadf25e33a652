"""The response cache: exact requests to exact responses, kept over runs in one SQLite file.

The key holds the request, the hashes of weights and adapters, and the sample (DSPy's `rollout_id`), so a
retrained adapter or a second rollout is never served an older text. Values are compressed JSON: nothing is unpickled.
DSPy's own cache stays off for models made by assay: it answers above the engine and knows no weights.
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
from assay.scrubbing import known

__all__ = ["CacheError", "ResponseCache"]


class CacheError(AssayError, OSError):
    """The response cache could not be changed, where that must not be passed over."""


class ResponseCache:
    """Thread-safe; several processes may share one file. `path=None` keeps it in memory.

    A cache that cannot be written (a full disk, a read-only folder) is only slower: the failure is counted in
    `write_errors` and the run goes on.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.write_errors = 0
        self.locks = KeyLocks()
        self._lock = threading.Lock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = self._connect(path)
        except sqlite3.Error:  # a damaged or unwritable file: this run keeps its answers in memory
            self.write_errors += 1
            self._db = self._connect(None)
        self._has_former = bool(self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'responses'").fetchone()[0])

    @staticmethod
    def _connect(path: Path | None) -> sqlite3.Connection:
        db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None, timeout=30)
        if path is not None:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")
        # The row's id is the start of the key's hash, so that a look-up is one descent of the tree and needs no index.
        db.execute("CREATE TABLE IF NOT EXISTS answers (id INTEGER PRIMARY KEY, key TEXT NOT NULL, answer BLOB NOT NULL)")
        db.execute("CREATE TABLE IF NOT EXISTS asked (request BLOB, key BLOB, PRIMARY KEY (request, key)) WITHOUT ROWID")
        return db

    def __deepcopy__(self, memo: object) -> "ResponseCache":
        return self

    @staticmethod
    def key(request: dict[str, Any], *, weights: str, adapters: Iterable[str], sample: int | None) -> str:
        """sha256 over everything that decides the answer."""
        whole = {"request": request, "weights": weights, "adapters": list(adapters), "sample": sample}
        return hashlib.sha256(json.dumps(whole, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    def get(self, key: str) -> dict[str, Any] | None:
        """The stored record, or None."""
        try:
            with self._lock:
                row = self._db.execute("SELECT answer FROM answers WHERE id = ? AND key = ?", (_row_id(key), key)).fetchone()
                former = self._former(key) if row is None and self._has_former else None
            if former is not None:
                self.put(key, record := json.loads(former))
            else:
                record = None if row is None else json.loads(zlib.decompress(row[0]).decode("utf-8", "surrogatepass"))
        except (sqlite3.Error, ValueError, TypeError, zlib.error):
            return None
        return record if isinstance(record, dict) else None

    def _former(self, key: str) -> str | None:
        """From the table of files written before answers were compressed."""
        row = self._db.execute("SELECT response FROM responses WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, record: dict[str, Any], *, asked: dict[str, Any] | None = None) -> None:
        """Stores the record; never raises. By its request (`asked`) it can be found again to be erased."""
        if asked is not None:
            self._note(key, asked)
        answer = zlib.compress(known(json.dumps(record, ensure_ascii=False)).encode("utf-8", "surrogatepass"))
        try:
            with self._lock:
                self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (_row_id(key), key, answer))
        except sqlite3.Error:
            self.write_errors += 1

    def _note(self, key: str, asked: dict[str, Any]) -> None:
        try:
            with self._lock:
                self._db.execute("INSERT OR IGNORE INTO asked VALUES (?, ?)", (_request_hash(asked), bytes.fromhex(key)))
        except (sqlite3.Error, ValueError):
            self.write_errors += 1

    def forget(self, requests: Iterable[dict[str, Any]]) -> int:
        """Erases the answers to these requests, whatever the weights, adapters and samples; returns how many there were.

        Raises:
            CacheError: the file could not be written.
        """
        removed = 0
        try:
            with self._lock:
                for asked in requests:
                    found = _request_hash(asked)
                    for (key,) in self._db.execute("SELECT key FROM asked WHERE request = ?", (found,)).fetchall():
                        removed += self._delete(key.hex())
                    self._db.execute("DELETE FROM asked WHERE request = ?", (found,))
        except sqlite3.Error as error:
            raise CacheError(f"answers in {self.path} could not be erased: {error}") from error
        return removed

    def forget_unowned(self) -> int:
        """Erases the answers of which no request is on record, as older versions kept them: whose they are cannot be told.

        Raises:
            CacheError: the file could not be written.
        """
        try:
            with self._lock:
                owned = "SELECT lower(hex(key)) FROM asked"
                removed = self._db.execute(f"DELETE FROM answers WHERE key NOT IN ({owned})").rowcount
                return removed + (self._db.execute("DELETE FROM responses").rowcount if self._has_former else 0)
        except sqlite3.Error as error:
            raise CacheError(f"answers in {self.path} could not be erased: {error}") from error

    def _delete(self, key: str) -> int:
        removed = self._db.execute("DELETE FROM answers WHERE id = ? AND key = ?", (_row_id(key), key)).rowcount
        former = self._db.execute("DELETE FROM responses WHERE key = ?", (key,)).rowcount if self._has_former else 0
        return max(removed, former)  # one that was taken over is in both

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _request_hash(request: dict[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(request, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")).digest()[:16]


def _row_id(key: str) -> int:
    """The first 64 bits of the key as SQLite's signed integer. Of two keys that share them the later one is kept."""
    return int.from_bytes(bytes.fromhex(key[:16]), "big", signed=True)
