"""Continuous loops in the store: who may run one (a lease), and the steps of its cycles.

A lease needs no clock that machines share: its holder counts beats, and another process takes it over only after it
has seen no beat for the length of the lease by its own monotonic clock. Every write of a step is made in one
transaction with a beat, which fails without the lease, so that a process that was considered ended writes nothing more.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from assay.deployment.registry import current_user
from assay.deployment.writing import writing
from assay.errors import DeploymentError
from assay.traces.records import new_id
from assay.traces.store import tables as schema
from assay.traces.store.rows import as_json, clean

__all__ = [
    "DONE",
    "ENDED",
    "FAILED",
    "RUNNING",
    "STEPS",
    "WAITING",
    "Lease",
    "Loop",
    "LoopStep",
    "Loops",
    "LostLease",
    "time_of",
]

STEPS = ("pool", "gates", "improve", "register", "deploy")  # of a cycle, in order
RUNNING, DONE, WAITING, ENDED, FAILED = "running", "done", "waiting", "ended", "failed"
_LOOPS, _STEPS = schema.loops, schema.loop_steps
_BEATS = 5  # in the length of a lease


class LostLease(DeploymentError):
    """Another process has taken the loop over; this one has written nothing since."""


def time_of(connection: sa.Connection) -> float:
    """Seconds since the epoch by the clock of PostgreSQL, which all machines share; with SQLite by that of this one."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar() or 0.0)
    return time.time()


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The loop of an agent. `holder` is the process that runs it now."""

    agent: str
    file: str
    sha256: str
    enabled: bool
    holder: str | None
    beat_at: float | None
    changed_at: float
    changed_by: str


@dataclass(frozen=True, kw_only=True)
class LoopStep:
    """One step of a cycle.

    Attributes:
        status: running (also if its process was killed), done, waiting (the pool has too little), ended (nothing more
            to do in this cycle) or failed.
        attempts: how often it was started since it last ended without a failure.
    """

    agent: str
    cycle: int
    step: str
    status: str
    attempts: int
    detail: Mapping[str, Any]
    started_at: float
    ended_at: float | None
    by: str


class Loops:
    """The loops in a store.

    Args:
        engine: of an open `Store`.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine

    def get(self, agent: str) -> Loop | None:
        """The loop of an agent; None if it was never started."""
        if (row := self._row(agent)) is None:
            return None
        return Loop(**{name: value for name, value in row.items() if name not in ("token", "beats")})

    def _row(self, agent: str) -> Mapping[str, Any] | None:
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(_LOOPS).where(_LOOPS.c.agent == agent)).mappings().first()
        return None if row is None else dict(row)

    def enable(self, agent: str, file: str, sha256: str, *, by: str | None = None) -> None:
        """Lets processes run the loop, by the settings in `file`."""
        changes = {
            "file": file, "sha256": sha256, "enabled": True, "changed_at": time.time(),
            "changed_by": clean(by or current_user())[:200],
        }  # fmt: skip
        for _ in range(2):  # another process may insert the row
            with writing(self.engine, "the loop") as connection:
                if connection.execute(sa.update(_LOOPS).where(_LOOPS.c.agent == agent).values(**changes)).rowcount:
                    return
            try:
                with writing(self.engine, "the loop") as connection:
                    connection.execute(sa.insert(_LOOPS).values(agent=agent, beats=0, **changes))
                return
            except sa.exc.IntegrityError:
                continue

    def disable(self, agent: str, *, by: str | None = None) -> None:
        """Ends the loop: a process that runs it stops before its next step.

        Raises:
            DeploymentError: the agent has no loop.
        """
        changes = {"enabled": False, "changed_at": time.time(), "changed_by": clean(by or current_user())[:200]}
        with writing(self.engine, "the loop") as connection:
            if not connection.execute(sa.update(_LOOPS).where(_LOOPS.c.agent == agent).values(**changes)).rowcount:
                raise DeploymentError(f"agent {agent!r} has no loop: assay loop start {agent} --file FILE starts one")

    def acquire(
        self,
        agent: str,
        *,
        lease_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> "Lease | None":
        """The lease of an agent's loop; None while another process has it.

        If the lease is held, this waits for a sign of life of its holder, at most `lease_s` seconds.

        Raises:
            DeploymentError: the agent has no loop.
        """
        if (row := self._row(agent)) is None:
            raise DeploymentError(f"agent {agent!r} has no loop: assay loop start {agent} --file FILE starts one")
        token, beats, until = row["token"], row["beats"], clock() + lease_s
        while token is not None and clock() < until:
            sleep(lease_s / _BEATS / 4)
            row = self._row(agent) or {}
            if row.get("beats") != beats:
                if row.get("token") is not None:
                    return None
                token, beats = None, row.get("beats")
        new, holder = new_id(), f"{socket.gethostname()}:{os.getpid()}"[:200]
        with writing(self.engine, "the loop") as connection:
            taken = connection.execute(
                sa.update(_LOOPS)
                .where(_LOOPS.c.agent == agent, _LOOPS.c.beats == beats)
                .values(token=new, holder=holder, beats=_LOOPS.c.beats + 1, beat_at=time.time())
            ).rowcount
        return Lease(self.engine, agent, new, holder, lease_s) if taken else None

    def steps(self, agent: str) -> list[LoopStep]:
        """All steps of an agent's cycles, in the order of cycles and steps."""
        query = sa.select(_STEPS).where(_STEPS.c.agent == agent).order_by(_STEPS.c.cycle)
        with self.engine.connect() as connection:
            rows = connection.execute(query).mappings().all()
        steps = [
            LoopStep(**{n: v for n, v in row.items() if n != "detail_json"}, detail=json.loads(row["detail_json"]))
            for row in rows
        ]
        return sorted(steps, key=lambda step: (step.cycle, STEPS.index(step.step)))


class Lease:
    """The right to run the loop of an agent, as a context manager. A thread beats until it ends."""

    def __init__(self, engine: sa.Engine, agent: str, token: str, holder: str, lease_s: float) -> None:
        self.engine, self.agent, self.token, self.holder, self.lease_s = engine, agent, token, holder, lease_s
        self.lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beating, name=f"loop-{agent}", daemon=True)

    def __enter__(self) -> "Lease":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(self.lease_s)
        try:
            with self.engine.begin() as connection:
                self._update(connection, token=None, holder=None)
        except sa.exc.SQLAlchemyError:
            pass  # the store is away: the lease runs out

    def _beating(self) -> None:
        while not self._ended.wait(self.lease_s / _BEATS):
            try:
                with self.engine.begin() as connection:
                    self.lost = self.lost or not self._update(connection)
            except sa.exc.SQLAlchemyError:
                continue  # the next beat may get through; `begin` and `end` find out whether the lease is lost

    def _update(self, connection: sa.Connection, **values: Any) -> bool:
        """Beats in the transaction of `connection`. False if another process has the lease."""
        mine = sa.and_(_LOOPS.c.agent == self.agent, _LOOPS.c.token == self.token)
        changes = {"beats": _LOOPS.c.beats + 1, "beat_at": time.time(), **values}
        return bool(connection.execute(sa.update(_LOOPS).where(mine).values(**changes)).rowcount)

    def _beat(self, connection: sa.Connection) -> None:
        if not self._update(connection):
            self.lost = True
            raise LostLease(f"another process has taken the loop of agent {self.agent!r} over: this one stops")

    def begin(self, cycle: int, step: str) -> None:
        """Writes that a step has begun: in its first attempt, again after a kill or failure, or, with the pool, anew.

        Steps of the cycle that come after it are removed.

        Raises:
            LostLease: another process has the lease.
        """
        of_cycle = sa.and_(_STEPS.c.agent == self.agent, _STEPS.c.cycle == cycle)
        attempts = sa.case((_STEPS.c.status.in_((RUNNING, FAILED)), _STEPS.c.attempts + 1), else_=1)
        again = {"status": RUNNING, "attempts": attempts, "ended_at": None, "by": self.holder}
        with writing(self.engine, "the loop") as connection:
            self._beat(connection)
            connection.execute(sa.delete(_STEPS).where(of_cycle, _STEPS.c.step.in_(STEPS[STEPS.index(step) + 1 :])))
            if not connection.execute(
                sa.update(_STEPS).where(of_cycle, _STEPS.c.step == step).values(**again)
            ).rowcount:
                row = {
                    "agent": self.agent, "cycle": cycle, "step": step, "detail_json": "{}", "by": self.holder,
                    "status": RUNNING, "attempts": 1, "started_at": time_of(connection),
                }  # fmt: skip
                connection.execute(sa.insert(_STEPS).values(**row))

    def end(self, cycle: int, step: str, status: str, detail: Mapping[str, Any]) -> None:
        """Writes how a step ended.

        Raises:
            LostLease: another process has the lease.
        """
        where = sa.and_(_STEPS.c.agent == self.agent, _STEPS.c.cycle == cycle, _STEPS.c.step == step)
        values = {"status": status, "detail_json": as_json(dict(detail))}
        with writing(self.engine, "the loop") as connection:
            self._beat(connection)
            connection.execute(sa.update(_STEPS).where(where).values(**values, ended_at=time_of(connection)))
