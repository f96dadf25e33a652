"""Changes of rows that are in the database already: parts of a rollout, results of tool calls, step rewards, transitions that are removed.

Does not insert rows. They come after the rows of the same batch, in the same transaction.
"""

from collections.abc import Mapping
from typing import Any

import orjson
import sqlalchemy as sa

from assay.traces import schema
from assay.traces.rows import as_json
from assay.traces.writer import Rows

__all__ = ["make_changes"]


def make_changes(connection: sa.Connection, rows: Rows) -> None:
    """Makes the changes of a batch: of its tables `changes`, `results`, `rewards` and `trims`."""
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
    told = connection.execute(sa.select(table.c[column]).where(where)).scalar()
    if told is not None:
        connection.execute(sa.update(table).where(where).values({column: as_json(changed(orjson.loads(told), row))}))


def _with_result(tools: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    if row["at"] < len(tools) and tools[row["at"]].get("error") is None:
        tools[row["at"]]["result"] = row["result"]
    return tools


def _with_reward(rewards: dict[str, float], row: Mapping[str, Any]) -> dict[str, float]:
    return {**rewards, row["criterion"]: row["value"]}
