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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.models.scope import Repeats
from assay.support.formats import check_format
from assay.support.scrubbing import mask_secrets

# -- Ledger of the LM calls of a run, written before each call is sent, so that a resumed run knows what was spent.
#
# One SQLite file per run. A row is committed before the call is sent and again when it was answered. SIGKILL loses
# nothing, because committed pages belong to the operating system. A crash of the machine may lose the rows of the last
# seconds (`synchronous=OFF`). Stores no requests and no answers: the response cache does.


_CALLS = """CREATE TABLE IF NOT EXISTS calls (
    key BLOB NOT NULL, attempt INTEGER NOT NULL, owner TEXT NOT NULL, phase TEXT NOT NULL, sends INTEGER NOT NULL,
    settled INTEGER NOT NULL DEFAULT 0, prompt_tokens INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0, cost_usd REAL NOT NULL DEFAULT 0,
    unpriced INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (key, attempt)) WITHOUT ROWID"""
_HITS = (
    "CREATE TABLE IF NOT EXISTS hits (id BLOB PRIMARY KEY, phase TEXT NOT NULL, count INTEGER NOT NULL) WITHOUT ROWID"
)
_COLUMNS = "key, attempt, owner, phase, sends, settled, prompt_tokens, completion_tokens, cost_usd, unpriced, failed"


@dataclass
class Sent:
    """One call of a run.

    `attempt`: number of times that its process had sent the same request before (after failures).
    `sends`: number of times that it was sent over all processes; more than 1 only if a process was killed.
    `settled`: how many of these are paid for in `cost_usd`.
    """

    key: bytes
    attempt: int
    owner: str
    phase: str
    sends: int = 1
    settled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    unpriced: int = 0
    failed: int = 0

    def settle(
        self, *, prompt_tokens: int | None, completion_tokens: int | None, cost_usd: float | None, failed: bool
    ) -> None:
        """Record an answer or a failure. Sends that a kill left unanswered are assumed to cost the same."""
        lost = self.sends - self.settled
        self.prompt_tokens, self.completion_tokens, self.failed = (
            prompt_tokens or 0,
            completion_tokens or 0,
            int(failed),
        )
        self.unpriced = int(cost_usd is None and not failed)
        self.cost_usd += (cost_usd or 0.0) * (lost if not failed else 1)
        self.settled = self.settled + 1 if failed else self.sends


class Ledger:
    """Thread-safe ledger, for one process at a time.

    Args:
        path: the file; None keeps the ledger in memory.
        owner: returns the id of the rollout that makes the current call. A call belongs to the rollout that sent it. In
            that rollout, its answer from the response cache replays a call that was paid for; in any other rollout it
            is an answer without cost.
    """

    def __init__(self, path: Path | None = None, *, owner: Callable[[], str] = str) -> None:
        self.owner = owner
        self.repeats = Repeats()  # of calls that only their own rollout repeats, see `RecordingEngine.as_requested`
        self._lock = threading.Lock()
        self._sent: Counter[bytes] = Counter()
        self._claimed: set[bytes] = set()
        self._hit: Counter[bytes] = Counter()
        self._refused: dict[tuple[bytes, int], Sent] = {}  # rows that a full disk did not take; written by `close`
        self._db = _opened(path, self._connect)

    @staticmethod
    def _connect(path: Path | None) -> sqlite3.Connection:
        db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None, timeout=30)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=OFF")
        db.execute(_CALLS)
        db.execute(_HITS)
        return db

    def __deepcopy__(self, memo: object) -> "Ledger":
        return self

    def known(self, key: str) -> Sent | None:
        """Row of the call that this process would send next under `key`; None if no process has sent it."""
        digest = bytes.fromhex(key)
        with self._lock:
            return self._row(digest, self._sent[digest])

    def send(self, key: str, phase: str) -> Sent:
        """Record that a call is about to be sent."""
        digest, owner = bytes.fromhex(key), self.owner()
        with self._lock:
            attempt = self._sent[digest]
            self._sent[digest] += 1
            self._claimed.add(digest)
            row = self._row(digest, attempt)
            if row is None:
                row = Sent(digest, attempt, owner, phase)
            else:
                row.sends, row.owner = row.sends + 1, owner
            self._write_row(row)
        return row

    def settled(self, row: Sent) -> None:
        """Store a row after `row.settle`."""
        with self._lock:
            self._write_row(row)

    def claim(self, key: str) -> Sent | None:
        """The call that an answer from the response cache replays: one sent by this rollout before a kill."""
        digest, owner, last = bytes.fromhex(key), self.owner(), None
        with self._lock:
            if digest in self._claimed:
                return None
            attempt = 0
            while (row := self._row(digest, attempt)) is not None:
                last, attempt = row, attempt + 1
            if last is None or last.owner != owner:
                return None
            self._claimed.add(digest)
            return last

    def hit(self, key: str, phase: str) -> bool:
        """Record an answer from the response cache; return False if an earlier process already recorded it."""
        digest = hashlib.blake2b(f"{self.owner()}/{key}".encode(), digest_size=16).digest()
        with self._lock:
            number = self._hit[digest]
            self._hit[digest] += 1
            row = (digest + number.to_bytes(4, "big"), phase, 1)
            return self._execute("INSERT OR IGNORE INTO hits VALUES (?, ?, ?)", row) != 0

    def add(self, name: str, phase: str, spent: Mapping[str, float]) -> bool:
        """Add what was counted elsewhere, under a unique name; return False if it is a repetition of that name."""
        digest, calls = hashlib.sha256(name.encode()).digest(), int(spent["calls"])
        with self._lock:
            before = [self._row(digest, attempt) for attempt in range(max(1, calls))]
            for attempt, row in enumerate(before[:calls]):
                row = row or Sent(digest, attempt, "", phase, sends=0)
                row.sends = row.settled = row.sends + 1
                if attempt == 0:
                    row.cost_usd += spent["cost_usd"]
                    row.prompt_tokens, row.completion_tokens = (
                        int(spent["prompt_tokens"]),
                        int(spent["completion_tokens"]),
                    )
                row.failed, row.unpriced = int(attempt < spent["errors"]), int(attempt < spent["unpriced"])
                self._write_row(row)
            if spent["cached"]:
                self._execute("INSERT OR IGNORE INTO hits VALUES (?, ?, ?)", (digest, phase, int(spent["cached"])))
        return before[0] is None

    def unsettled(self) -> list[Sent]:
        """Calls that were sent, and neither answered nor failed before a kill."""
        with self._lock:
            return [Sent(*row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM calls WHERE settled < sends")]

    def totals(self) -> list[tuple[str, dict[str, float]]]:
        """Spending by phase, as fields of `assay.models.meter.Usage`."""
        query = """SELECT phase, count(*), 0, sum(failed), sum(prompt_tokens), sum(completion_tokens), sum(cost_usd),
            sum(unpriced), sum(sends - 1) FROM calls GROUP BY phase
            UNION ALL SELECT phase, 0, sum(count), 0, 0, 0, 0, 0, 0 FROM hits GROUP BY phase"""
        names = ("calls", "cached", "errors", "prompt_tokens", "completion_tokens", "cost_usd", "unpriced", "repeated")
        with self._lock:
            return [(phase, dict(zip(names, values, strict=True))) for phase, *values in self._db.execute(query)]

    def close(self) -> None:
        """Write the rows that the disk refused before; what it refuses again is lost, and the count is too low."""
        with self._lock:
            for row in list(self._refused.values()):
                self._write_row(row)
            self._db.close()

    def _row(self, digest: bytes, attempt: int) -> Sent | None:
        try:
            values = self._db.execute(
                f"SELECT {_COLUMNS} FROM calls WHERE key = ? AND attempt = ?", (digest, attempt)
            ).fetchone()
        except sqlite3.Error:
            return None
        return None if values is None else Sent(*values)

    def _write_row(self, row: Sent) -> None:
        statement = f"INSERT OR REPLACE INTO calls ({_COLUMNS}) VALUES ({', '.join('?' * 11)})"
        if self._execute(statement, tuple(vars(row).values())) is None:
            self._refused[row.key, row.attempt] = row
        else:
            self._refused.pop((row.key, row.attempt), None)

    def _execute(self, statement: str, values: tuple[object, ...]) -> int | None:
        """Number of rows written; None if the disk refused them."""
        try:
            return self._db.execute(statement, values).rowcount
        except sqlite3.Error:
            return None


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
