"""Caps that the processes of one job spend from: each reserves amounts in the store before it sends calls.

A process reserves in blocks, which become smaller as the cap comes nearer, down to one call. The process that leads
the job has the first row; what it keeps for later phases is part of its own reservation. A process that ends gives back
what it has not used. What a killed process had reserved stays reserved; once its calls have been counted, only its
tokens and dollars do.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from assay.models.meter import Caps, Usage
from assay.models.unrecorded import Unrecorded
from assay.traces.store.leases import patiently, writing
from assay.traces.store.rows import as_json
from assay.traces.store.tables import cap_shares

_AMOUNTS = ("calls", "search_calls", "tokens", "cost_usd")  # columns, and fields of `Caps`
_BLOCK = 16  # calls that are reserved at a time at most
_PART = 8  # a block is at most this part of what is left
_NO_CAP = float("inf")
_ROUNDING = 1e-9  # share of a cap; sums of prices are not exact


class CapShare:
    """What one process of a job has reserved of the job's caps. Implements `assay.models.meter.SharedCaps`.

    Args:
        job: run of the process that leads the job, which reserves first.
        member: run of this process.
    """

    def __init__(self, engine: sa.Engine, job: str, member: str) -> None:
        self.engine, self.job, self.member = engine, job, member
        self._reserved, self._elsewhere = dict.fromkeys(_AMOUNTS, 0.0), dict.fromkeys(_AMOUNTS, 0.0)
        self._mine = sa.and_(cap_shares.c.job == job, cap_shares.c.member == member)

    def reserve(self, need: Mapping[str, float], caps: Caps) -> Mapping[str, float]:
        """See `SharedCaps`. Reads and writes the store only if `need` is more than what was reserved before.

        Raises:
            StoreError: the store cannot be reached.
        """
        capped = {name: amount for name, amount in need.items() if name == "calls" or _cap(caps, name) != _NO_CAP}
        if any(amount > self._reserved[name] for name, amount in capped.items()):
            patiently(lambda: self._extend(capped, caps))
        return self._elsewhere

    def _extend(self, need: Mapping[str, float], caps: Caps) -> None:
        table = cap_shares
        with writing(self.engine, "the calls of a job") as connection:
            # others that reserve wait until the transaction ends
            lock = sa.update(table).where(table.c.job == self.job, table.c.member == self.job).values(job=self.job)
            connection.execute(lock)
            sums = [sa.func.coalesce(sa.func.sum(table.c[name]), 0.0) for name in _AMOUNTS]
            others = connection.execute(sa.select(*sums).where(table.c.job == self.job, table.c.member != self.member))
            self._elsewhere = dict(zip(_AMOUNTS, map(float, others.one()), strict=True))
            left = {name: _cap(caps, name) - self._elsewhere[name] for name in need}
            if any(need[name] > left[name] * (1 + _ROUNDING) for name in need):
                return
            blocks = {name: need[name] + _block(name, left[name] - need[name]) for name in need}
            self._put(connection, {**self._reserved, **blocks, "usage_json": None})
        self._reserved = {**self._reserved, **blocks}

    def end(self, phases: Mapping[str, Usage], unrecorded: Unrecorded, *, killed: bool = False) -> None:
        """Give back what this process has not used, and store what it has used.

        Args:
            phases: what it has used by phase.
            killed: what its last calls cost is not known, so its tokens and dollars stay reserved.
        """
        usage, searched = Usage(), phases.get("search", Usage()).calls
        for part in phases.values():
            usage.add(part)
        values: dict[str, Any] = {
            "calls": usage.calls + usage.repeated + unrecorded.calls,
            "search_calls": searched,
            "usage_json": as_json({"usage": asdict(usage), "unrecorded": asdict(unrecorded)}),
        }
        if not killed:
            values |= {"tokens": usage.tokens, "cost_usd": usage.cost_usd}
        patiently(lambda: self._write(values))

    def _write(self, values: Mapping[str, Any]) -> None:
        with writing(self.engine, "the calls of a job") as connection:
            self._put(connection, values)

    def _put(self, connection: sa.Connection, values: Mapping[str, Any]) -> None:
        if not connection.execute(sa.update(cap_shares).where(self._mine).values(values)).rowcount:
            connection.execute(sa.insert(cap_shares).values(job=self.job, member=self.member, **values))


def leads(engine: sa.Engine, job: str) -> bool:
    """Whether the process that leads a job has reserved, so that others can."""
    with engine.connect() as connection:
        mine = sa.and_(cap_shares.c.job == job, cap_shares.c.member == job)
        return connection.execute(sa.select(cap_shares.c.job).where(mine)).first() is not None


@dataclass(frozen=True)
class Member:
    """Another process of a job.

    Attributes:
        calls: that it has reserved, or made once it has ended.
        usage: what it has used; None until it has ended.
    """

    run_id: str
    calls: int
    usage: Usage | None
    unrecorded: Unrecorded


def members_of(engine: sa.Engine, job: str) -> list[Member]:
    """The other processes of a job."""
    table = cap_shares
    with engine.connect() as connection:
        rows = connection.execute(sa.select(table).where(table.c.job == job, table.c.member != job)).all()
    return [_member(row.member, int(row.calls), json.loads(row.usage_json or "{}")) for row in rows]


def _member(run_id: str, calls: int, used: Mapping[str, Any]) -> Member:
    usage = Usage(**used["usage"]) if used else None
    return Member(run_id, calls, usage, Unrecorded(**used.get("unrecorded", {})))


def _cap(caps: Caps, name: str) -> float:
    value: float | None = getattr(caps, name)
    return _NO_CAP if value is None else value


def _block(name: str, left: float) -> float:
    """What is reserved beyond the present need."""
    if name == "cost_usd":
        return left / _PART
    part = left if left == _NO_CAP else left // _PART  # inf // 8 is nan
    return part if name == "tokens" else min(part, _BLOCK)
