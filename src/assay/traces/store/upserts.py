"""Inserts that replace or keep the row of the same key, on SQLite and PostgreSQL."""

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import orjson
import sqlalchemy as sa

from assay.traces.store import tables as schema
from assay.traces.store.rows import as_json
from assay.traces.store.writer import Rows

POSTED = "posted"  # rubric of a score that a client of a gateway has posted
BEGINNING = (
    "run_id", "task_id", "task_type", "group_id", "split", "program", "program_version", "parameters_json", "model",
    "adapters_json", "inputs_json", "expected_json", "metadata_json", "tenant", "data_subject", "consent", "started_at",
)  # fmt: skip
"""Columns of what is known of a gateway's rollout at its beginning."""
_UNSCORED: dict[str, Any] = {  # columns of an unscored rollout
    "score": sa.null(), "coverage": sa.null(), "rubric": sa.literal_column("''"),
    "verdicts_json": sa.literal_column("'[]'"),
}  # fmt: skip


@functools.cache  # making the statement takes longer than executing it
def upsert(dialect: str, table: sa.Table, *, replace: bool = True, by_id: bool = False) -> Any:
    """An insert statement that replaces the row of the same key, or keeps it if `replace` is False.

    Some columns keep their old value on replacement: a human rating, the call that the prediction is of, the split of a
    task, owners that the new row does not name. A run keeps its first start; a later one becomes the time at which it
    was resumed.

    Args:
        by_id: of calls that have an id: the row of the same id is replaced, and keeps its turn.
    """
    insert = _insert(dialect, table)
    keys = [column.name for column in table.primary_key]
    if not replace:
        return insert.on_conflict_do_nothing(index_elements=keys)
    changed = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in keys}
    if by_id:
        columns = [schema.transitions.c.rollout_id, schema.transitions.c.id]
        return insert.on_conflict_do_update(index_elements=columns, index_where=columns[1].is_not(None), set_=changed)
    if table is schema.rollouts:
        # A rating may have been stored while the run that writes this row held an older copy.
        changed["human_rating"] = sa.func.coalesce(insert.excluded.human_rating, table.c.human_rating)
        changed["answered_at"] = table.c.answered_at
    if table is schema.runs:
        resumed = insert.excluded.started_at > table.c.started_at
        changed["started_at"] = sa.case((resumed, table.c.started_at), else_=insert.excluded.started_at)
        changed["resumed_at"] = sa.case((resumed, insert.excluded.started_at), else_=table.c.resumed_at)
    if table is schema.known_tasks:
        changed["split"] = table.c.split
        for name in ("tenant", "consent", "subject"):
            changed[name] = sa.func.coalesce(insert.excluded[name], table.c[name])
    return insert.on_conflict_do_update(index_elements=keys, set_=changed)


def begin_rollouts(dialect: str) -> Any:
    """An insert statement for rollouts that a gateway begins. Where another gateway has begun the rollout too, the row
    has what the earlier one knows of its beginning; what has happened since stays."""
    table = schema.rollouts
    insert = _insert(dialect, table)
    beginning = {name: insert.excluded[name] for name in BEGINNING}
    earlier = insert.excluded.started_at < table.c.started_at
    return insert.on_conflict_do_update(index_elements=[table.c.id], set_=beginning, where=earlier)


def put_answers() -> Any:
    """An update statement for predictions of rollouts that several gateways may hold open.

    A prediction stays if it is of a later answer, or if the rollout had ended with it before this one. A score stays if
    it is of this prediction, or was posted. Parameters: `rollout`, `prediction`, `at` (the time of the answer).
    """
    r = schema.rollouts.c
    at, prediction = sa.bindparam("at", type_=sa.Float), sa.bindparam("prediction", type_=sa.Text)
    running, posted = [sa.literal_column(f"'{text}'", sa.Text) for text in ("running", POSTED)]
    final = sa.and_(r.status != running, r.prediction_json.is_not(None), sa.func.coalesce(r.ended_at, at) < at)
    newest = sa.or_(r.answered_at.is_(None), sa.and_(r.answered_at <= at, sa.not_(final)))
    kept = sa.or_(r.prediction_json.is_not_distinct_from(prediction), r.rubric == posted)
    scores = {column: sa.case((kept, r[column]), else_=value) for column, value in _UNSCORED.items()}
    values = {"prediction_json": prediction, "answered_at": at, **scores}
    return sa.update(schema.rollouts).where(r.id == sa.bindparam("rollout"), newest).values(values)


def _insert(dialect: str, table: sa.Table) -> Any:
    # Imported by name, so that only the dialect in use is loaded.
    return importlib.import_module(f"sqlalchemy.dialects.{dialect}").insert(table)


# -- Updates of rows that are in the database: fields of a rollout, tool results, step rewards, removed transitions.
#
# Does not insert rows. Updates are made after the inserts of the same batch, in the same transaction.


def make_changes(connection: sa.Connection, rows: Rows) -> None:
    """Makes the updates of a batch: its entries `changes`, `results`, `rewards`, `keys` and `trims`."""
    if keys := list(rows.get("keys", {}).values()):
        connection.execute(upsert(connection.dialect.name, schema.conversation_keys, replace=False), keys)
    for row in rows.get("changes", {}).values():
        _change_rollout(connection, row["id"], row["values"], row["only"], row["at"])
    for row in rows.get("results", {}).values():
        _change(connection, row, "tools_json", _with_result)
    for row in rows.get("rewards", {}).values():
        _change(connection, row, "step_rewards_json", _with_reward)
    steps = schema.transitions.c
    for trim in rows.get("trims", {}).values():
        connection.execute(sa.delete(schema.transitions).where(steps.rollout_id == trim["id"], steps.t >= trim["keep"]))


def _change_rollout(connection: sa.Connection, name: str, values: dict[str, Any], only: str, at: float) -> None:
    """Updates a rollout that several gateways may hold open.

    Args:
        only: `begun`: what a call tells of its beginning, unless another gateway has begun it with an earlier call.
            `idle`: its end, unless it has ended, or another gateway has had a later call. `unassigned`: its version,
            unless it has one. "": in any case.
        at: the time that `only` compares: of the first call of the gateway, or of its last one.
    """
    r, steps = schema.rollouts.c, schema.transitions.c
    where = [r.id == name]
    if only == "begun":
        where.append(sa.or_(r.started_at >= at, r.inputs_json == "{}"))
    if only == "unassigned":
        where.append(r.version.is_(None))
    if only == "idle":
        last = sa.select(steps.started_at).where(steps.rollout_id == name).order_by(steps.t.desc()).limit(1)
        where += [r.status == "running", sa.func.coalesce(last.scalar_subquery(), at) <= at]
    changed = connection.execute(sa.update(schema.rollouts).where(*where).values(values)).rowcount
    if changed and values.get("ended_at") is not None:  # no call continues its conversation
        keys = schema.conversation_keys
        connection.execute(sa.delete(keys).where(keys.c.rollout_id == name))


def _change(connection: sa.Connection, row: Mapping[str, Any], column: str, changed: Any) -> None:
    table = schema.transitions
    call = table.c.t if isinstance(row["call"], int) else table.c.id
    where = (table.c.rollout_id == row["rollout_id"]) & (call == row["call"])
    text = connection.execute(sa.select(table.c[column]).where(where)).scalar()
    if text is not None:  # the transition may have been trimmed
        connection.execute(sa.update(table).where(where).values({column: as_json(changed(orjson.loads(text), row))}))


def _with_result(tools: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    if row["at"] < len(tools) and tools[row["at"]].get("error") is None:
        tools[row["at"]][row["field"]] = row["text"]
    return tools


def _with_reward(rewards: dict[str, float], row: Mapping[str, Any]) -> dict[str, float]:
    return {**rewards, row["criterion"]: row["value"]}
