"""Rows of a process that lost its job's lease: its answered calls are kept under the run, nothing else is changed."""

import hashlib
from typing import Any

import sqlalchemy as sa

from assay.errors import FailureKind, StoreError
from assay.traces.store import tables as schema
from assay.traces.store.tables import leases
from assay.traces.store.writer import Owner, Rows

_LATE = "late: another process had taken the job over"


def holds(connection: sa.Connection, owner: Owner) -> bool:
    """Whether nobody has taken a job over from its owner. Others wait with that until the transaction ends.

    The row is written, not read: SQLite refuses to write in a transaction that began by reading, once another process
    has written.
    """
    name, token = owner
    mine = sa.update(leases).where(leases.c.name == name, leases.c.token == token).values(token=token)
    return bool(connection.execute(mine).rowcount)


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
