"""Turns of calls that several processes record in one rollout: the store numbers them, in the order of their requests.

A call has an id of its own, by which its process may write its row again; no row of another process is replaced. A call
that is written after a later one of another process moves the later ones up. Times are those of one clock, see
`SharedClock`.
"""

import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from assay.traces.store.connection import end_if_paused
from assay.traces.store.leases import elapsed, seconds
from assay.traces.store.tables import transitions

Row = Mapping[str, Any]
_LOCKS = 256  # advisory locks of PostgreSQL that rollouts and persons share
_LOCK_CLASS = 0x7475726E  # "turn" in ASCII
_calls = transitions.c


class SharedClock:
    """The time of the database's server, which all processes of a store share; with SQLite that of the machine.

    A server's clock is read once, later times are counted from there, so that a time costs no query.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine, self._of_server = engine, engine.dialect.name == "postgresql"
        self._offset = 0.0
        self.read()

    def read(self) -> None:
        """Reads the server's clock again, from which that of the machine departs by up to a second in some hours."""
        if not self._of_server:
            return
        with self._engine.connect() as connection:
            seconds(connection)  # the first query of a connection takes longer
            before = elapsed()
            now = seconds(connection)
            self._offset = now - (before + elapsed()) / 2

    def now(self) -> float:
        """Seconds since the epoch."""
        return elapsed() + self._offset if self._of_server else time.time()

    def of_machine(self, at: float) -> float:
        """This time, where the machine's clock showed `at`."""
        return at + self.now() - time.time() if self._of_server else at


def lock_names(connection: sa.Connection, names: Collection[str]) -> None:
    """Lets no other process change what has these names until the transaction ends. Call it before its first statement
    that reads: SQLite refuses to write in a transaction that began by reading, once another process has written."""
    if connection.dialect.name == "sqlite":
        connection.execute(sa.update(transitions).where(sa.false()).values(t=0))  # changes no row, and locks the file
        return
    end_if_paused(connection)
    keys = sorted({zlib.crc32(name.encode()) % _LOCKS for name in names})
    lock = sa.text("SELECT pg_advisory_xact_lock(:of, key) FROM unnest(CAST(:keys AS integer[])) AS key")
    connection.execute(lock, {"of": _LOCK_CLASS, "keys": keys})


def with_turns(connection: sa.Connection, rows: Sequence[Row]) -> tuple[list[dict[str, Any]], set[str]]:
    """The rows of calls that have ids, with the turns with which they are inserted: those of rows that are there, else
    the next ones.

    Returns:
        The rows, and the rollouts in which some of them precede calls that are there: `in_order` moves these. The
        rollouts must be locked.
    """
    rollouts = sorted({row["rollout_id"] for row in rows})
    of_rollouts, ids = _calls.rollout_id.in_(rollouts), sorted({row["id"] for row in rows})
    there = sa.select(_calls.rollout_id, _calls.id, _calls.t).where(of_rollouts, _calls.id.in_(ids))
    known = {(rollout, call): t for rollout, call, t in connection.execute(there)}
    newest = sa.select(_calls.rollout_id, sa.func.max(_calls.t).label("t")).where(of_rollouts)
    last = newest.group_by(_calls.rollout_id).subquery()
    is_last = sa.and_(_calls.rollout_id == last.c.rollout_id, _calls.t == last.c.t)
    query = sa.select(_calls.rollout_id, _calls.t, _calls.started_at).join(last, is_last)
    ends = {rollout: (t, started_at) for rollout, t, started_at in connection.execute(query)}
    numbered, late = [], set()
    for row in sorted(rows, key=lambda row: row["started_at"]):
        rollout = row["rollout_id"]
        if (turn := known.get((rollout, row["id"]))) is None:
            before, at = ends.get(rollout, (-1, row["started_at"]))
            turn = before + 1
            ends[rollout] = turn, max(at, row["started_at"])
            if row["started_at"] < at:
                late.add(rollout)
        numbered.append({**row, "t": turn})
    return numbered, late


def in_order(connection: sa.Connection, rollout: str) -> None:
    """Numbers the calls of a rollout anew, in the order of their requests."""
    own = _calls.rollout_id == rollout
    rows = connection.execute(sa.select(_calls.t, _calls.started_at).where(own).order_by(_calls.t)).all()
    order = sorted(rows, key=lambda row: row[1])  # calls of the same time stay as they are
    moved = [{"old": before, "new": -1 - turn} for turn, (before, _) in enumerate(order) if before != turn]
    if moved:  # through negative turns: no two rows may have one turn at any time
        move = sa.update(transitions).where(own, _calls.t == sa.bindparam("old")).values(t=sa.bindparam("new"))
        connection.execute(move, moved)
        connection.execute(sa.update(transitions).where(own, _calls.t < 0).values(t=-1 - _calls.t))
