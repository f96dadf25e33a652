"""Continuous loops in the store: who may run one, and the steps of its cycles.

One process holds the lease of a loop. Every write of a step fails without it, so that a process that was considered
ended writes nothing more.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from assay.deployment.registry import current_user
from assay.errors import DeploymentError
from assay.traces.store import leases
from assay.traces.store import tables as schema
from assay.traces.store.leases import Lease, seconds, writing
from assay.traces.store.rows import as_json, clean
from assay.traces.store.upserts import upsert

STEPS = ("pool", "gates", "improve", "register", "deploy")  # of a cycle, in order
RUNNING, DONE, WAITING, ENDED, FAILED = "running", "done", "waiting", "ended", "failed"
_LOOPS, _STEPS = schema.loops, schema.loop_steps


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The loop of an agent. `holder` is the process that runs it now."""

    agent: str
    file: str
    sha256: str
    enabled: bool
    holder: str | None
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
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(_LOOPS).where(_LOOPS.c.agent == agent)).mappings().first()
        return None if row is None else Loop(**row, holder=leases.holder_of(self.engine, _lease(agent)))

    def known(self, agent: str) -> Loop:
        """The loop of an agent.

        Raises:
            DeploymentError: it was never started.
        """
        if (loop := self.get(agent)) is None:
            raise DeploymentError(f"agent {agent!r} has no loop: assay loop start {agent} --file FILE starts one")
        return loop

    def enable(self, agent: str, file: str, sha256: str, *, by: str | None = None) -> None:
        """Lets processes run the loop, by the settings in `file`."""
        row = {
            "agent": agent, "file": file, "sha256": sha256, "enabled": True, "changed_at": time.time(),
            "changed_by": clean(by or current_user())[:200],
        }  # fmt: skip
        with writing(self.engine, "the loop") as connection:
            connection.execute(upsert(self.engine.dialect.name, _LOOPS).values(**row))

    def disable(self, agent: str, *, by: str | None = None) -> None:
        """Ends the loop: a process that runs it stops before its next step.

        Raises:
            DeploymentError: the agent has no loop.
        """
        self.known(agent)
        changes = {"enabled": False, "changed_at": time.time(), "changed_by": clean(by or current_user())[:200]}
        with writing(self.engine, "the loop") as connection:
            connection.execute(sa.update(_LOOPS).where(_LOOPS.c.agent == agent).values(**changes))

    def acquire(self, agent: str, *, lease_s: float = 30.0) -> Lease | None:
        """The lease of an agent's loop; None while another process has it.

        Raises:
            DeploymentError: the agent has no loop.
        """
        self.known(agent)
        return leases.acquire(self.engine, _lease(agent), lease_s)

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

    def begin(self, lease: Lease, agent: str, cycle: int, step: str) -> None:
        """Writes that a step has begun: in its first attempt, again after a kill or failure, or, with the pool, anew.

        Steps of the cycle that come after it are removed.

        Raises:
            LostLease: another process has the lease.
        """
        of_cycle = sa.and_(_STEPS.c.agent == agent, _STEPS.c.cycle == cycle)
        attempts = sa.case((_STEPS.c.status.in_((RUNNING, FAILED)), _STEPS.c.attempts + 1), else_=1)
        again = {"status": RUNNING, "attempts": attempts, "ended_at": None, "by": lease.holder}
        with lease.writing("the loop") as connection:
            connection.execute(sa.delete(_STEPS).where(of_cycle, _STEPS.c.step.in_(STEPS[STEPS.index(step) + 1 :])))
            if not connection.execute(
                sa.update(_STEPS).where(of_cycle, _STEPS.c.step == step).values(**again)
            ).rowcount:
                row = {
                    "agent": agent, "cycle": cycle, "step": step, "detail_json": "{}", "by": lease.holder,
                    "status": RUNNING, "attempts": 1, "started_at": seconds(connection),
                }  # fmt: skip
                connection.execute(sa.insert(_STEPS).values(**row))

    def end(self, lease: Lease, agent: str, cycle: int, step: str, status: str, detail: Mapping[str, Any]) -> None:
        """Writes how a step ended.

        Raises:
            LostLease: another process has the lease.
        """
        where = sa.and_(_STEPS.c.agent == agent, _STEPS.c.cycle == cycle, _STEPS.c.step == step)
        values = {"status": status, "detail_json": as_json(dict(detail))}
        with lease.writing("the loop") as connection:
            connection.execute(sa.update(_STEPS).where(where).values(**values, ended_at=seconds(connection)))


def _lease(agent: str) -> str:
    return f"the loop of agent {agent!r}"
