"""Updates of rows that are in the database: fields of a rollout, tool results, step rewards, removed transitions.

Does not insert rows. Updates are made after the inserts of the same batch, in the same transaction.
"""

from collections.abc import Mapping
from typing import Any

import orjson
import sqlalchemy as sa

from assay.traces.store import tables as schema
from assay.traces.store.rows import as_json
from assay.traces.store.writer import Rows


def make_changes(connection: sa.Connection, rows: Rows) -> None:
    """Makes the updates of a batch: its entries `changes`, `results`, `rewards` and `trims`."""
    for row in rows.get("changes", {}).values():
        changed = {name: value for name, value in row.items() if name != "id"}
        connection.execute(sa.update(schema.rollouts).where(schema.rollouts.c.id == row["id"]).values(changed))
    for row in rows.get("results", {}).values():
        _change(connection, row, "tools_json", _with_result)
    for row in rows.get("rewards", {}).values():
        _change(connection, row, "step_rewards_json", _with_reward)
    steps = schema.transitions.c
    for trim in rows.get("trims", {}).values():
        connection.execute(sa.delete(schema.transitions).where(steps.rollout_id == trim["id"], steps.t >= trim["keep"]))


def _change(connection: sa.Connection, row: Mapping[str, Any], column: str, changed: Any) -> None:
    table = schema.transitions
    where = (table.c.rollout_id == row["rollout_id"]) & (table.c.t == row["t"])
    text = connection.execute(sa.select(table.c[column]).where(where)).scalar()
    if text is not None:  # the transition may have been trimmed
        connection.execute(sa.update(table).where(where).values({column: as_json(changed(orjson.loads(text), row))}))


def _with_result(tools: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    if row["at"] < len(tools) and tools[row["at"]].get("error") is None:
        tools[row["at"]]["result"] = row["result"]
    return tools


def _with_reward(rewards: dict[str, float], row: Mapping[str, Any]) -> dict[str, float]:
    return {**rewards, row["criterion"]: row["value"]}
