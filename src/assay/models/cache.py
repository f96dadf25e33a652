"""The response cache: exact requests to exact responses, kept over runs in one SQLite file.

The key holds the request, the hashes of weights and adapters, and the sample (DSPy's `rollout_id`), so a
retrained adapter or a second rollout is never served an older text. Values are JSON: nothing is unpickled.
DSPy's own cache stays off for models made by assay: it answers above the engine and knows no weights.
"""

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["ResponseCache"]


class ResponseCache:
    """Thread-safe; several processes may share one file. `path=None` keeps it in memory.

    A cache that cannot be written (a full disk, a read-only folder) is only slower: the failure is counted in
    `write_errors` and the run goes on.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.write_errors = 0
        self._lock = threading.Lock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = self._connect(path)
        except sqlite3.Error:  # a damaged or unwritable file: this run keeps its answers in memory
            self.write_errors += 1
            self._db = self._connect(None)

    @staticmethod
    def _connect(path: Path | None) -> sqlite3.Connection:
        db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None, timeout=30)
        if path is not None:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")
        db.execute("CREATE TABLE IF NOT EXISTS responses (key TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID")
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
                row = self._db.execute("SELECT response FROM responses WHERE key = ?", (key,)).fetchone()
            record = None if row is None else json.loads(row[0])
        except (sqlite3.Error, json.JSONDecodeError):
            return None
        return record if isinstance(record, dict) else None

    def put(self, key: str, record: dict[str, Any]) -> None:
        """Stores the record; never raises."""
        text = json.dumps(record, ensure_ascii=False)
        try:
            with self._lock:
                self._db.execute("INSERT OR REPLACE INTO responses VALUES (?, ?)", (key, text))
        except sqlite3.Error:
            self.write_errors += 1

    def close(self) -> None:
        with self._lock:
            self._db.close()
