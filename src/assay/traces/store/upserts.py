"""Inserts that replace or keep the row of the same key, on SQLite and PostgreSQL."""

import importlib
from typing import Any

import sqlalchemy as sa

from assay.traces.store import tables as schema


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
    return {
        name: sa.case((same, table.c[name]), else_=new[name])
        for name in ("score", "coverage", "rubric", "verdicts_json")
    }
