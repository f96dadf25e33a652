"""Ledger of the LM calls of a run, written before each call is sent, so that a resumed run knows what was spent.

The rows are where the run is: in the store of a PostgreSQL server, for every machine that resumes the run; else in one
SQLite file a run. A row is committed before the call is sent and again when it was answered. SIGKILL of a process loses
nothing. A crash of the machine or the server may lose the rows of the last second (`synchronous=OFF`,
`synchronous_commit=off`). What a server does not take waits in a file, for the next process of the run on this machine.
Stores no requests and no answers: the response cache does.
"""

import functools
import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import sqlalchemy as sa

from assay.errors import StoreError
from assay.models.scope import Repeats
from assay.support.places import left_files, opened_own, own_path, remove_own

tables = sa.MetaData()

calls = sa.Table(
    "calls",
    tables,
    sa.Column("run", sa.String(64), primary_key=True),
    sa.Column("key", sa.LargeBinary, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("phase", sa.Text, nullable=False),
    sa.Column("sends", sa.Integer, nullable=False),
    sa.Column("settled", sa.Integer, nullable=False),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("completion_tokens", sa.Integer, nullable=False),
    sa.Column("cost_usd", sa.Float, nullable=False),
    sa.Column("unpriced", sa.Integer, nullable=False),
    sa.Column("failed", sa.Integer, nullable=False),
    sa.Column("again", sa.Integer, nullable=False),
)

# Answers from the response cache.
hits = sa.Table(
    "hits",
    tables,
    sa.Column("run", sa.String(64), primary_key=True),
    sa.Column("id", sa.LargeBinary, primary_key=True),
    sa.Column("phase", sa.Text, nullable=False),
    sa.Column("count", sa.Integer, nullable=False),
)


@dataclass
class Sent:
    """One call of a run.

    `attempt`: number of times that its process had sent the same request before (after failures).
    `sends`: number of times that it was sent over all processes; more than 1 only if a process was killed.
    `settled`: how many of these are paid for in `cost_usd`.
    `again`: how many of these repeated one that had not failed: its process was killed before the answer was stored.
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
    again: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether the last time that it was sent it failed."""
        return bool(self.failed and self.settled)

    def settle(
        self, *, prompt_tokens: int | None, completion_tokens: int | None, cost_usd: float | None, failed: bool
    ) -> None:
        """Record an answer or a failure. Sends that a kill left unanswered are assumed to cost the same."""
        unpaid = self.sends - self.settled
        self.prompt_tokens, self.completion_tokens, self.failed = (
            prompt_tokens or 0,
            completion_tokens or 0,
            int(failed),
        )
        self.unpriced = int(cost_usd is None and not failed)
        self.cost_usd += (cost_usd or 0.0) * (unpaid if not failed else 1)
        self.settled = self.settled + 1 if failed else self.sends


_COLUMNS = ", ".join(column.name for column in calls.c if column.name != "run")
_ROW = f"INSERT INTO calls (run, {_COLUMNS}) VALUES (:run, :{_COLUMNS.replace(', ', ', :')})"
# Amounts are added: a process that has lost its job may settle its last calls beside the one that took it over.
_SEND = f"{_ROW} ON CONFLICT (run, key, attempt) DO UPDATE SET sends = calls.sends + 1, owner = excluded.owner, \
again = calls.again + excluded.again"
_SETTLE = """UPDATE calls SET settled = settled + :settled, cost_usd = cost_usd + :cost_usd,
    prompt_tokens = :prompt_tokens, completion_tokens = :completion_tokens, unpriced = :unpriced, failed = :failed
    WHERE run = :run AND key = :key AND attempt = :attempt"""
_HIT = "INSERT INTO hits (run, id, phase, count) VALUES (:run, :id, :phase, :count) ON CONFLICT DO NOTHING"
_EARLIER = f"SELECT {_COLUMNS} FROM calls WHERE run = :run"
_EARLIER_HITS = "SELECT id, phase, count FROM hits WHERE run = :run"
_WRITES = (_SEND, _SETTLE, _HIT)
_NAME = re.compile(r":(\w+)")
_LOCK_MS = 300  # that a write waits for a lock on a server
_PAUSE, _LONGEST_PAUSE_S = 20, 10.0  # times as long as an attempt to write took, before the next one; at most


class Ledger:
    """Thread-safe ledger of a run, for one process at a time. What earlier processes wrote is read once, at the start.

    Args:
        place: the database of a store, or the file of a run; None keeps the ledger in memory.
        run: id of the run, in a place that has several.
        aside: begins the names of files for what the place does not take, one a process. What ended processes left in
            them is written first; if one was killed while it wrote it, some calls count twice.
        owner: returns the id of the rollout that makes the current call. A call belongs to the rollout that sent it. In
            that rollout, its answer from the response cache replays a call that was paid for; in any other rollout it
            is an answer without cost.
    Raises:
        StoreError: the database of the store cannot be read.
    """

    def __init__(
        self,
        place: sa.Engine | Path | None = None,
        run: str = "",
        *,
        owner: Callable[[], str] = str,
        aside: Path | None = None,
    ) -> None:
        self.run, self.owner, self._aside = run, owner, aside
        self._own_file: tuple[BinaryIO, Path] | None = None
        self.repeats = Repeats()  # of calls that only their own rollout repeats, see `RecordingEngine.as_requested`
        self._lock = threading.Lock()
        self._sent: Counter[bytes] = Counter()
        self._claimed: set[bytes] = set()
        self._hit: Counter[bytes] = Counter()
        self._waiting: list[tuple[str, Mapping[str, Any]]] = []  # writes that the database did not take; in their order
        self._connection: sa.Connection | None = None
        self._retry_at = 0.0
        try:
            self._engine = place if isinstance(place, sa.Engine) else _file(place)
            self._take_up()
            earlier, earlier_hits = self._read(_EARLIER), self._read(_EARLIER_HITS)
        except sa.exc.DBAPIError as error:
            if isinstance(place, sa.Engine):
                self._disconnect()
                raise StoreError(f"the ledger of run {run} cannot be read: {error.orig}") from error
            self._engine, earlier, earlier_hits = _file(None), [], []  # the file is damaged or cannot be written
        self._earlier = {(row.key, row.attempt): row for row in (Sent(*values) for values in earlier)}
        self._earlier_hits = {name: (phase, count) for name, phase, count in earlier_hits}

    def __deepcopy__(self, memo: object) -> "Ledger":
        return self

    def known(self, key: str) -> Sent | None:
        """Row of the call that this process would send next under `key`; None if no process has sent it."""
        digest = bytes.fromhex(key)
        with self._lock:
            return self._earlier.get((digest, self._sent[digest]))

    def send(self, key: str, phase: str, *, owner: str | None = None) -> Sent:
        """Record that a call is about to be sent.

        Args:
            owner: id of its rollout, for a call that another process makes.
        """
        digest, owner = bytes.fromhex(key), self.owner() if owner is None else owner
        with self._lock:
            attempt = self._sent[digest]
            self._sent[digest] += 1
            self._claimed.add(digest)
            row = self._earlier.get((digest, attempt)) or Sent(digest, attempt, owner, phase, sends=0)
            again = int(row.sends > 0 and not row.has_failed)
            row.sends, row.owner, row.again = row.sends + 1, owner, row.again + again
            self._write(_SEND, {**vars(row), "sends": 1, "again": again})
        return row

    def settled(self, row: Sent, before: Sent) -> None:
        """Store a row after `row.settle`.

        Args:
            before: the row as it was.
        """
        paid = {"settled": row.settled - before.settled, "cost_usd": row.cost_usd - before.cost_usd}
        with self._lock:
            self._write(_SETTLE, {**vars(row), **paid})

    def claim(self, key: str) -> Sent | None:
        """The call that an answer from the response cache replays: one sent by this rollout before a kill."""
        digest, owner, last = bytes.fromhex(key), self.owner(), None
        with self._lock:
            if digest in self._claimed:
                return None
            attempt = 0
            while (row := self._earlier.get((digest, attempt))) is not None:
                last, attempt = row, attempt + 1
            if last is None or last.owner != owner:
                return None
            self._claimed.add(digest)
            return last

    def hit(self, key: str, phase: str, *, owner: str | None = None) -> bool:
        """Record an answer from the response cache; return False if an earlier process already recorded it."""
        owner = self.owner() if owner is None else owner
        digest = hashlib.blake2b(f"{owner}/{key}".encode(), digest_size=16).digest()
        with self._lock:
            name = digest + self._hit[digest].to_bytes(4, "big")
            self._hit[digest] += 1
            new = name not in self._earlier_hits
            if new:
                self._write(_HIT, {"id": name, "phase": phase, "count": 1})
        return new

    def is_complete(self) -> bool:
        """Whether the database has all that was to be written; what waits is tried again."""
        with self._lock:
            self._write_waiting()
            return not self._waiting

    def unsettled(self) -> list[Sent]:
        """Calls of earlier processes that were sent, and neither answered nor failed before a kill."""
        with self._lock:
            return [row for row in self._earlier.values() if row.settled < row.sends]

    @property
    def again(self) -> int:
        """How often earlier processes sent a call again that had not failed."""
        with self._lock:
            return sum(row.again for row in self._earlier.values())

    def totals(self) -> list[tuple[str, dict[str, float]]]:
        """Spending of earlier processes by phase, as fields of `assay.models.meter.Usage`."""
        phases: dict[str, dict[str, float]] = {}
        with self._lock:
            for row in self._earlier.values():
                amounts = {
                    "calls": 1, "errors": row.failed, "prompt_tokens": row.prompt_tokens, "unpriced": row.unpriced,
                    "completion_tokens": row.completion_tokens, "cost_usd": row.cost_usd, "repeated": row.sends - 1,
                }  # fmt: skip
                _add(phases.setdefault(row.phase, {}), amounts)
            for phase, count in self._earlier_hits.values():
                _add(phases.setdefault(phase, {}), {"cached": count})
        return list(phases.items())

    def close(self) -> None:
        """Write what the database did not take before; what it refuses again is in the file `aside`, or is lost."""
        with self._lock:
            self._retry_at = 0.0
            self._write_waiting()
            self._disconnect()
            if self._own_file is not None:  # without its lock the next process takes it up
                self._own_file[0].close()
                self._own_file = None

    def _read(self, statement: str) -> list[Any]:
        rows = self._execute(statement, {"run": self.run}).all()
        return [tuple(bytes(value) if isinstance(value, memoryview) else value for value in row) for row in rows]

    def _write(self, statement: str, values: Mapping[str, Any]) -> None:
        self._waiting.append((statement, {**values, "run": self.run}))
        self._write_waiting()
        if self._waiting:
            self._put_aside(*self._waiting[-1])

    def _put_aside(self, statement: str, values: Mapping[str, Any]) -> None:
        if self._aside is None:
            return
        written = {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()}
        with suppress(OSError):
            if self._own_file is None:
                path = own_path(self._aside)
                self._own_file = opened_own(path), path
            # the line break comes first: a line that a full disk cut off does not join the next one
            self._own_file[0].write(b"\n" + orjson.dumps([_WRITES.index(statement), written]))

    def _take_up(self) -> None:
        """Writes what ended processes of the run could not write.

        Raises:
            sqlalchemy.exc.DBAPIError: the database does not take it; it stays in the file.
        """
        for file, path in left_files(self._aside) if self._aside is not None else ():
            with self._engine.begin() as connection:  # all of it or nothing: amounts are added
                for line in file:
                    with suppress(ValueError):  # a line may be incomplete
                        statement, values = orjson.loads(line)
                        digests = {name: bytes.fromhex(values[name]) for name in ("key", "id") if name in values}
                        connection.exec_driver_sql(*self._spelled(_WRITES[statement], {**values, **digests}))
            remove_own(file, path)

    def _write_waiting(self) -> None:
        while self._waiting and (began := time.monotonic()) >= self._retry_at:
            try:
                self._execute(*self._waiting[0])
            except sa.exc.DBAPIError:
                # A full disk, a locked table, or a server that is away: later calls write it, see `is_complete`. A
                # server that hangs is waited for: a time limit would need a thread a write, three times the cost.
                self._disconnect()
                now = time.monotonic()
                self._retry_at = now + min(_LONGEST_PAUSE_S, _PAUSE * (now - began))
                return
            self._waiting.pop(0)
            if self._own_file is not None and not self._waiting:
                remove_own(*self._own_file)
                self._own_file = None

    def _execute(self, statement: str, values: Mapping[str, Any]) -> sa.CursorResult[Any]:
        return self._connected().exec_driver_sql(*self._spelled(statement, values))

    def _connected(self) -> sa.Connection:
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            if self._engine.dialect.name == "postgresql":
                self._connection.exec_driver_sql(f"SET synchronous_commit = off; SET lock_timeout = {_LOCK_MS}")
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sa.exc.SQLAlchemyError):
                self._connection.invalidate()  # its settings must not return to the pool
                self._connection.close()
            self._connection = None

    def _spelled(self, statement: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """A statement with the names of its values as the driver writes them, and these values."""
        text, names = _spelling(statement, self._engine.dialect.name)
        return text, {name: values[name] for name in names}


@functools.cache
def _spelling(statement: str, dialect: str) -> tuple[str, list[str]]:
    return statement if dialect == "sqlite" else _NAME.sub(r"%(\1)s", statement), _NAME.findall(statement)


def _add(total: dict[str, float], amounts: Mapping[str, float]) -> None:
    for name, value in amounts.items():
        total[name] = total.get(name, 0) + value


def _file(path: Path | None) -> sa.Engine:
    """The database in a file, or in memory, with the tables of a ledger."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(
        "sqlite://" if path is None else sa.URL.create("sqlite", database=str(path)),
        poolclass=sa.StaticPool,
        connect_args={"check_same_thread": False, "timeout": 30},
    )
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        connection.exec_driver_sql("PRAGMA synchronous=OFF")
        tables.create_all(connection)
        connection.commit()
    return engine
