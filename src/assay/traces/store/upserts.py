"""Inserts that replace or keep the row of the same key, on SQLite and PostgreSQL."""

import importlib
from collections.abc import Mapping
from typing import Any

import orjson
import sqlalchemy as sa

from assay.traces.store import tables as schema
from assay.traces.store.rows import as_json
from assay.traces.store.writer import Rows

_UNSCORED = {"score": None, "coverage": None, "rubric": "", "verdicts_json": "[]"}  # columns of an unscored rollout


def upsert(dialect: str, table: sa.Table, *, replace: bool = True) -> Any:
    """An insert statement that replaces the row of the same key, or keeps it if `replace` is False.

    Some columns keep their old value on replacement: a human rating, a score set while the gateway held the rollout
    open, the split of a task, owners that the new row does not name. A run keeps its first start; a later one
    becomes the time at which it was resumed.
    """
    # Imported by name, so that only the dialect in use is loaded.
    insert: Any = importlib.import_module(f"sqlalchemy.dialects.{dialect}").insert(table)
    keys = [column.name for column in table.primary_key]
    if not replace:
        return insert.on_conflict_do_nothing(index_elements=keys)
    changed = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in keys}
    if table is schema.rollouts:
        # A rating may have been stored while the run that writes this row held an older copy.
        changed["human_rating"] = sa.func.coalesce(insert.excluded.human_rating, table.c.human_rating)
        changed |= _preserved_scores(insert.excluded, table)
    if table is schema.runs:
        resumed = insert.excluded.started_at > table.c.started_at
        changed["started_at"] = sa.case((resumed, table.c.started_at), else_=insert.excluded.started_at)
        changed["resumed_at"] = sa.case((resumed, insert.excluded.started_at), else_=table.c.resumed_at)
    if table is schema.known_tasks:
        changed["split"] = table.c.split
        for name in ("tenant", "consent", "subject"):
            changed[name] = sa.func.coalesce(insert.excluded[name], table.c[name])
    return insert.on_conflict_do_update(index_elements=keys, set_=changed)


def _preserved_scores(new: Any, table: sa.Table) -> dict[str, Any]:
    """Score columns that keep their value if the gateway writes an unscored rollout again with the same prediction.

    Such a rollout was scored in the store while the gateway held it open with an older copy.
    """
    same = sa.and_(
        new.source == sa.literal_column("'gateway'"),
        new.score.is_(None),
        new.prediction_json == table.c.prediction_json,
    )
    return {name: sa.case((same, table.c[name]), else_=new[name]) for name in _UNSCORED}


# -- Updates of rows that are in the database: fields of a rollout, tool results, step rewards, removed transitions.
#
# Does not insert rows. Updates are made after the inserts of the same batch, in the same transaction.


def make_changes(connection: sa.Connection, rows: Rows) -> None:
    """Makes the updates of a batch: its entries `changes`, `results`, `rewards` and `trims`."""
    for row in rows.get("changes", {}).values():
        changed = {name: value for name, value in row.items() if name != "id"}
        if "score" not in changed and "prediction_json" in changed:  # a score in the store is of the prediction there
            columns, prediction = schema.rollouts.c, changed["prediction_json"]
            same = columns.prediction_json.is_not_distinct_from(prediction)
            changed |= {name: sa.case((same, columns[name]), else_=value) for name, value in _UNSCORED.items()}
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
        tools[row["at"]][row["field"]] = row["text"]
    return tools


def _with_reward(rewards: dict[str, float], row: Mapping[str, Any]) -> dict[str, float]:
    return {**rewards, row["criterion"]: row["value"]}
