"""Leases: locks in the store by name, for work that one process of any number of machines may do at a time.

A lease ends by a clock that all its processes share: that of the database server, with SQLite that of the machine since
its start, which no setting of the time changes. Its holder renews it, and writes in transactions that fail once another
process has the lease. Who lost the lease of a job changes nothing any more; its answered calls are kept under the run.

A lease that is taken while others are held, such as that of a part of an improvement, is lost with any of them.
"""

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import sqlalchemy as sa

from assay.errors import FailureKind, StoreError
from assay.traces.records import new_id
from assay.traces.store import tables as schema
from assay.traces.store.connection import end_if_paused, passes, short_waits
from assay.traces.store.tables import leases
from assay.traces.store.writer import Owner, Rows

T = TypeVar("T")
_held: ContextVar[tuple["Lease", ...]] = ContextVar("held", default=())
TAKEN_OVER = "another process has taken this job over"
_RENEWALS = 5  # in the length of a lease
_PATIENCE_S, _PAUSE_S = 60.0, 0.5  # while the database cannot be reached
_BOOTED = getattr(time, "CLOCK_BOOTTIME", None)  # of Linux, which also runs while the machine sleeps


class LostLease(StoreError):
    """Another process has taken the lease over; this one has written nothing since."""


@contextmanager
def writing(engine: sa.Engine, what: str) -> Iterator[sa.Connection]:
    """A transaction. Names a store that cannot be written, such as a read-only one.

    Args:
        what: is written, for the message.
    Raises:
        StoreError: the database refused to write, or did not answer; nothing is written.
        sqlalchemy.exc.IntegrityError: another process has written first.
    """
    try:
        with engine.begin() as connection:
            end_if_paused(connection)
            yield connection
    except sa.exc.IntegrityError:
        raise
    except sa.exc.DBAPIError as error:
        raise StoreError(f"{what} cannot be written to the store: {error.orig}") from error


def patiently(change: Callable[[], T], failure: type[Exception] = StoreError) -> T:
    """The result of a change, which is tried again for a minute while the database cannot be reached.

    Args:
        failure: what it then raises, from the driver's error, as `writing` does.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return change()
        except failure as error:
            reason = error.__cause__
            if not isinstance(reason, Exception) or not passes(reason, full_passes=True) or time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)


def seconds(connection: sa.Connection, local: Callable[[], float] | None = None) -> float:
    """Seconds since the epoch by the clock of PostgreSQL, which all machines share; with SQLite by that of this one.

    Args:
        local: the clock with SQLite, in place of `time.time`.
    """
    if connection.dialect.name == "postgresql":
        return float(connection.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar() or 0.0)
    return (local or time.time)()


def elapsed() -> float:
    """Seconds since any time, for differences on this machine."""
    return time.monotonic() if _BOOTED is None else time.clock_gettime(_BOOTED)


def present(engine: sa.Engine) -> float:
    """The time by which schedules and deployments are decided, see `seconds`."""
    with engine.connect() as connection:
        return seconds(connection)


def _holder(connection: sa.Connection, name: str) -> tuple[sa.Row[Any] | None, float]:
    """The row of a lease that is held, None if nobody holds it, and the time.

    A lease that ends later than its length from now is of a clock that was set back, or of before the machine's start.

    The clock is read after the row: with an earlier time, a lease that was just taken would end too late.
    """
    row = connection.execute(sa.select(leases).where(leases.c.name == name)).one_or_none()
    now = seconds(connection, time.monotonic)
    return (row if row and _is_held(row, now) else None), now


def _is_held(row: sa.Row[Any], now: float) -> bool:
    return bool(now < row.until <= now + row.length_s)


def leases_of_run(run_id: str) -> list[str]:
    """Names of the leases that the process of a run may hold: that of its job, or of the run itself if it is a part of
    another."""
    return [f"job:{name}" for name in (run_id.rpartition("-")[0], run_id)]


def held_among(engine: sa.Engine, names: Collection[str]) -> dict[str, bool]:
    """Whether a process holds each of these leases now. Those that nobody has ever held are left out."""
    with engine.connect() as connection:
        rows = connection.execute(sa.select(leases).where(leases.c.name.in_(names))).all()
        now = seconds(connection, time.monotonic)
    return {row.name: _is_held(row, now) for row in rows}


def holder_of(engine: sa.Engine, name: str) -> str | None:
    """Host and process that hold a lease now; None if none does."""
    with engine.connect() as connection:
        row, _ = _holder(connection, name)
    return None if row is None else str(row.holder)


def held_by(engine: sa.Engine, name: str) -> str:
    """Who holds a lease, since when, and when it was last renewed, for messages; empty if nobody does."""
    with engine.connect() as connection:
        row, now = _holder(connection, name)
    if row is None:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.since))
    return f"{row.holder} since {since} (last heard of {row.length_s - row.until + now:.0f} s ago)"


def acquire(engine: sa.Engine, name: str, length_s: float, *, ended: str | None = None) -> "Lease | None":
    """The lease of a name, to be used as a context manager; None while another process holds it.

    Args:
        length_s: seconds without a renewal after which another process can take it over.
        ended: token of a holder that is known to have ended: its lease is taken over at once.
    Raises:
        StoreError: the store cannot be written.
    """
    lease, its_row = Lease(engine, name, length_s), leases.c.name == name
    try:
        with writing(engine, "the lease") as connection:
            # waits for a process that writes the lease, before the row and the clock are read
            exists = connection.execute(sa.update(leases).where(its_row).values(name=name)).rowcount
            row, now = _holder(connection, name)
            if row is not None and row.token != ended:
                return None
            values = {
                "holder": lease.holder, "token": lease.token, "length_s": length_s, "until": now + length_s,
                "since": seconds(connection),
            }  # fmt: skip
            statement = sa.update(leases).where(its_row) if exists else sa.insert(leases)
            connection.execute(statement.values(name=name, **values))
    except sa.exc.IntegrityError:  # another process has inserted it
        return None
    return lease


def announce(engine: sa.Engine, prefix: str, name: str, length_s: float | None) -> int:
    """Says that a process is there, by a lease of its own, and returns how many others of the same kind are.

    Args:
        prefix: with which the names of their leases begin.
        length_s: seconds after which it counts as ended unless it says so again; None: it only sees who else is there.
    Raises:
        sqlalchemy.exc.SQLAlchemyError: the store is away.
    """
    of_kind = leases.c.name.startswith(prefix, autoescape=True)
    with engine.begin() as connection, short_waits(connection):
        if length_s is not None:
            exists = connection.execute(sa.update(leases).where(leases.c.name == name).values(name=name)).rowcount
            now = seconds(connection, time.monotonic)
            gone = sa.or_(leases.c.until < now, leases.c.until > now + leases.c.length_s)
            connection.execute(sa.delete(leases).where(of_kind, gone, leases.c.name != name))
            values = {
                "name": name, "holder": this_process(), "token": "", "length_s": length_s, "until": now + length_s,
                "since": seconds(connection),
            }  # fmt: skip
            statement = sa.update(leases).where(leases.c.name == name) if exists else sa.insert(leases)
            connection.execute(statement.values(**values))
        now = seconds(connection, time.monotonic)
        there = sa.and_(leases.c.until > now, leases.c.until <= now + leases.c.length_s)
        others = sa.select(sa.func.count()).where(of_kind, there, leases.c.name != name)
        return int(connection.execute(others).scalar_one())


def withdraw(engine: sa.Engine, name: str) -> None:
    """Ends what `announce` said.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: the store is away.
    """
    with engine.begin() as connection, short_waits(connection):
        connection.execute(sa.delete(leases).where(leases.c.name == name))


def this_process() -> str:
    """Host and process, for messages."""
    return f"{socket.gethostname()}:{os.getpid()}"[:200]


class Lease:
    """A lease that this process holds. A thread renews it until the `with` block ends.

    Attributes:
        holder: host and process.
    """

    def __init__(self, engine: sa.Engine, name: str, length_s: float) -> None:
        self.engine, self.name, self.length_s, self.token = engine, name, length_s, new_id()
        self.holder = this_process()
        self._mine = sa.and_(leases.c.name == name, leases.c.token == self.token)
        self._all = (self, *(held for held in _held.get() if held.name != name))
        self._ended, self._lost, self._renewed = threading.Event(), False, elapsed()
        self._thread = threading.Thread(target=self._renewing, name=f"lease-{name}", daemon=True)

    @property
    def lost(self) -> bool:
        """Whether this process knows that another one has taken over the lease, or one that it is a part of."""
        return any(held._lost for held in self._all)

    @lost.setter
    def lost(self, lost: bool) -> None:
        self._lost = lost

    @property
    def is_doubtful(self) -> bool:
        """Whether another process may have taken it over, as it, or one that it is a part of, was not renewed in
        time."""
        return not self.lost and any(elapsed() >= held._renewed + held.length_s for held in self._all)

    @property
    def owner(self) -> Owner:
        """Name and token, then those that it is a part of in this database; stored with what the holder writes."""
        here = (held for held in self._all if held.engine.url == self.engine.url)
        return tuple(text for held in here for text in (held.name, held.token))

    def __enter__(self) -> "Lease":
        _held.set((*_held.get(), self))
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        _held.set(tuple(held for held in _held.get() if held is not self))
        self._ended.set()
        self._thread.join(self.length_s)
        try:
            with self.engine.begin() as connection:
                # the row stays: rows of this holder that are written later are told from those of the next one
                connection.execute(sa.update(leases).where(self._mine).values(until=0.0))
        except sa.exc.SQLAlchemyError:
            pass  # the store is away: the lease ends by itself

    def _renewing(self) -> None:
        # a part of what was lost is not renewed: who took that over is to get this lease, too
        while not self._ended.wait(self.length_s / _RENEWALS) and not self.lost:
            begun = elapsed()
            try:
                with self.engine.begin() as connection:
                    end_if_paused(connection)
                    self._renew(connection)
                self._renewed = begun
            except sa.exc.SQLAlchemyError:
                continue  # the next one may get through; `writing` finds out whether the lease is lost

    def _renew(self, connection: sa.Connection) -> bool:
        until = seconds(connection, time.monotonic) + self.length_s
        renewed = connection.execute(sa.update(leases).where(self._mine).values(until=until)).rowcount
        self._lost = not (renewed and holds(connection, self.owner[2:]))
        return not self.lost

    def check(self) -> None:
        """Raises LostLease if this process knows that another one has the lease."""
        if self.lost:
            raise LostLease(f"{TAKEN_OVER}: this one stops")

    @contextmanager
    def writing(self, what: str) -> Iterator[sa.Connection]:
        """A transaction of the holder, which renews the lease.

        Raises:
            LostLease: another process has the lease; nothing is written.
        """
        with writing(self.engine, what) as connection:
            if not self._renew(connection):
                raise LostLease(f"another process has taken {self.name} over: this one stops")
            yield connection


_LATE = "late: another process had taken the job over"
_MINE = (
    sa.update(leases)
    .where(leases.c.name == sa.bindparam("job"), leases.c.token == sa.bindparam("owned"))
    .values(token=sa.bindparam("owned"))
)


def holds(connection: sa.Connection, owner: Owner) -> bool:
    """Whether nobody has taken a job, or what it is a part of, over from its owner. Others wait with that until the
    transaction ends.

    The row is written, not read: SQLite refuses to write in a transaction that began by reading, once another process
    has written.
    """
    for name, token in zip(owner[::2], owner[1::2], strict=True):
        if not connection.execute(_MINE, {"job": name, "owned": token}).rowcount:
            return False
    return True


def late_rows(connection: sa.Connection, rows: Rows, owner: Owner) -> Rows:
    """The rows that are still written: transitions, each under a rollout of its own beside the one that it is of.

    The rollout itself may have been replaced by the new owner. The one beside it has the same run and phase, so that
    its calls are counted and priced there, no score, and `late` as its failure. A rollout that the store does not have
    gets one at once, because its calls may come in later batches.

    Raises:
        StoreError: the store has no rollout for a transition.
    """
    late: Rows = {"rollouts": {}, "transitions": {}}
    put = {**rows.get("begun", {}), **rows.get("rollouts", {})}
    for name, row in put.items():
        if _stored(connection, name) is None:
            late["rollouts"][_beside(name, owner)] = row
    for (name, t), transition in rows.get("transitions", {}).items():
        beside = _beside(name, owner)
        found = put.get(name) or _stored(connection, name) or _stored(connection, beside)
        if found is None:
            raise StoreError(f"the store has no rollout {name} for a late call")
        late["rollouts"][beside] = found
        late["transitions"][beside, t] = {**transition, "rollout_id": beside}
    late["rollouts"] = {beside: {**row, **_UNSCORED, "id": beside} for beside, row in late["rollouts"].items()}
    return {name: by_key for name, by_key in late.items() if by_key}


def _beside(name: str, owner: Owner) -> str:
    return hashlib.sha256(f"{name}\0{owner[1]}".encode()).hexdigest()[:32]


def _stored(connection: sa.Connection, name: str) -> sa.RowMapping | None:
    table = schema.rollouts
    return connection.execute(sa.select(table).where(table.c.id == name)).mappings().first()


_UNSCORED: dict[str, Any] = {
    "status": "error", "error": _LATE, "failure": FailureKind.LATE.value, "prediction_json": None, "score": None,
    "coverage": None, "verdicts_json": "[]", "human_rating": None,
}  # fmt: skip
