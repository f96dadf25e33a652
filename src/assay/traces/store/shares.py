"""Caps that the processes of one job spend from: each reserves amounts in the store before it sends calls.

A process reserves in blocks, which become smaller as the cap comes nearer, down to one call. The process that leads
the job has the first row; what it keeps for later phases is part of its own reservation. A process that ends gives back
what it has not used. What a killed process had reserved stays reserved.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import sqlalchemy as sa

from assay.errors import StoreError
from assay.models.meter import Caps, Usage
from assay.models.unrecorded import Unrecorded
from assay.traces.store.connection import passes
from assay.traces.store.leases import writing
from assay.traces.store.rows import as_json
from assay.traces.store.tables import cap_shares

T = TypeVar("T")
_AMOUNTS = ("calls", "search_calls", "tokens", "cost_usd")  # columns, and fields of `Caps`
_BLOCK = 16  # calls that are reserved at a time at most
_PART = 8  # a block is at most this part of what is left
_NO_CAP = float("inf")
_ROUNDING = 1e-9  # share of a cap; sums of prices are not exact
_PATIENCE_S, _PAUSE_S = 60.0, 0.5  # while the database cannot be reached


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
            _patiently(lambda: self._extend(capped, caps))
        return self._elsewhere

    def _extend(self, need: Mapping[str, float], caps: Caps) -> None:
        table, leads = cap_shares, self.member == self.job
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
            values = {**self._reserved, **blocks, **({"caps_json": as_json(asdict(caps))} if leads else {})}
            if not connection.execute(sa.update(table).where(self._mine).values(values)).rowcount:
                connection.execute(sa.insert(table).values(job=self.job, member=self.member, **values))
        self._reserved = {**self._reserved, **blocks}

    def end(self, phases: Mapping[str, Usage], unrecorded: Unrecorded) -> None:
        """Give back what this process has not used, and store what it has used.

        Args:
            phases: what it has used by phase.
        """
        usage, searched = Usage(), phases.get("search", Usage()).calls
        for part in phases.values():
            usage.add(part)
        values = {
            "calls": usage.calls + unrecorded.calls, "search_calls": searched, "tokens": usage.tokens,
            "cost_usd": usage.cost_usd,
            "usage_json": as_json({"usage": asdict(usage), "unrecorded": asdict(unrecorded)}),
        }  # fmt: skip
        _patiently(lambda: self._write(values))

    def _write(self, values: Mapping[str, object]) -> None:
        with writing(self.engine, "the calls of a job") as connection:
            connection.execute(sa.update(cap_shares).where(self._mine).values(values))


def caps_of(engine: sa.Engine, job: str) -> Caps | None:
    """The caps of a job, from the row of the process that leads it; None if it has not reserved yet."""
    table = cap_shares
    query = sa.select(table.c.caps_json).where(table.c.job == job, table.c.member == job)
    with engine.connect() as connection:
        text = connection.execute(query).scalar()
    return None if text is None else Caps(**json.loads(text))


def members_of(engine: sa.Engine, job: str) -> dict[str, tuple[Usage, Unrecorded] | int]:
    """Runs of the other processes of a job, and what each has used; its reserved calls if it has not ended."""
    table = cap_shares
    rows: dict[str, tuple[Usage, Unrecorded] | int] = {}
    with engine.connect() as connection:
        for row in connection.execute(sa.select(table).where(table.c.job == job, table.c.member != job)):
            rows[str(row.member)] = int(row.calls) if row.usage_json is None else _ended(json.loads(row.usage_json))
    return rows


def _ended(stored: Mapping[str, Mapping[str, Any]]) -> tuple[Usage, Unrecorded]:
    return Usage(**stored["usage"]), Unrecorded(**stored["unrecorded"])


def _cap(caps: Caps, name: str) -> float:
    value: float | None = getattr(caps, name)
    return _NO_CAP if value is None else value


def _block(name: str, left: float) -> float:
    """What is reserved beyond the present need."""
    if name == "cost_usd":
        return left / _PART
    part = left if left == _NO_CAP else left // _PART  # inf // 8 is nan
    return part if name == "tokens" else min(part, _BLOCK)


def _patiently(change: Callable[[], T]) -> T:
    """The result of a change of the store, which is tried again while the database cannot be reached."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return change()
        except StoreError as error:
            reason = error.__cause__
            if not isinstance(reason, Exception) or not passes(reason, full_passes=True) or time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)
