"""Opening a database: tables and indexes that are missing, columns that older stores lack. What a store holds is kept."""

import hashlib
import importlib
import time
from typing import Any

import sqlalchemy as sa

from assay.errors import StoreError
from assay.traces import schema

__all__ = ["bring_up_to_date", "upsert"]

_LAYOUT = "layout"  # key in `meta` of what tables, columns and indexes the store was last brought to


def bring_up_to_date(engine: sa.Engine) -> None:
    """Creates what is missing; several processes may do so at once. A store that has this layout already is not inspected: that took
    longer than most commands need to read it.

    Raises:
        StoreError: the store was written by a newer assay.
    """
    layout = _layout()
    if (known := _known(engine)).get(_LAYOUT) != layout or known.get("schema") != str(schema.SCHEMA_VERSION):
        _refuse_newer(known)
        known = _create(engine, layout)
    _refuse_newer(known)


def _refuse_newer(known: dict[str, str]) -> None:
    if (version := int(known.get("schema", 0))) > schema.SCHEMA_VERSION:
        raise StoreError(f"the store has schema {version}, this assay knows up to {schema.SCHEMA_VERSION}: update assay")


def _layout() -> str:
    parts = [
        (table.name, [column.name for column in table.columns], sorted(str(index.name) for index in table.indexes))
        for table in schema.metadata.sorted_tables
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _known(engine: sa.Engine) -> dict[str, str]:
    try:
        with engine.connect() as connection:
            return {row.key: row.value for row in connection.execute(sa.select(schema.meta.c.key, schema.meta.c.value))}
    except (sa.exc.OperationalError, sa.exc.ProgrammingError):  # there is no such table yet
        return {}


def _create(engine: sa.Engine, layout: str) -> dict[str, str]:
    for attempt in range(5):
        try:
            schema.metadata.create_all(engine)
            _upgrade(engine)
            with engine.begin() as connection:
                rows = {"schema": str(schema.SCHEMA_VERSION), _LAYOUT: layout}
                connection.execute(upsert(engine.dialect.name, schema.meta, replace=False), [{"key": key, "value": rows[key]} for key in rows])
                connection.execute(sa.update(schema.meta).where(schema.meta.c.key == _LAYOUT).values(value=layout))
            return _known(engine)
        except (sa.exc.OperationalError, sa.exc.ProgrammingError, sa.exc.IntegrityError):
            if attempt == 4:
                raise
            time.sleep(0.1 * 2**attempt)
    return {}


def _upgrade(engine: sa.Engine) -> None:
    """Brings an older schema to this one: missing columns, indexes that changed, and until 3 what is now `made_from`."""
    inspector = sa.inspect(engine)
    with engine.begin() as connection:
        for table in schema.metadata.sorted_tables:
            known = {column["name"] for column in inspector.get_columns(table.name)}
            for column in table.columns:
                if column.name not in known:
                    declared = sa.schema.CreateColumn(column).compile(dialect=engine.dialect)
                    connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {declared}")
        if inspector.has_table("compiled_judges"):
            connection.execute(sa.text("INSERT INTO made_from SELECT artifact, raters_json, created_at FROM compiled_judges"))
            connection.execute(sa.text("DROP TABLE compiled_judges"))
        for name in schema.FORMER_INDEXES:
            connection.exec_driver_sql(f"DROP INDEX IF EXISTS {name}")
        for table in schema.metadata.sorted_tables:
            for index in table.indexes:
                if index.name != "rollouts_by_prefix" or engine.dialect.name == "postgresql":
                    index.create(connection, checkfirst=True)
        older = [str(version) for version in range(1, schema.SCHEMA_VERSION)]
        where = (schema.meta.c.key == "schema") & schema.meta.c.value.in_(older)
        connection.execute(sa.update(schema.meta).where(where).values(value=str(schema.SCHEMA_VERSION)))


def upsert(dialect: str, table: sa.Table, *, replace: bool = True) -> Any:
    """An insert that replaces, or leaves, the row of the same key."""
    insert: Any = importlib.import_module(f"sqlalchemy.dialects.{dialect}").insert(table)  # only the dialect in use is loaded
    keys = [column.name for column in table.primary_key]
    if not replace:
        return insert.on_conflict_do_nothing(index_elements=keys)
    changed = {column.name: insert.excluded[column.name] for column in table.columns if column.name not in keys}
    if table is schema.rollouts:  # a person's rating may have come while the run that writes the rollout did not know of it
        changed["human_rating"] = sa.func.coalesce(insert.excluded.human_rating, table.c.human_rating)
    if table is schema.known_tasks:
        sealed = sa.or_(table.c.split == "gate", table.c.split == "test")
        changed["split"] = sa.case((sealed, table.c.split), else_=insert.excluded.split)
        changed["text"] = sa.case((insert.excluded.text == "", table.c.text), else_=insert.excluded.text)
        for name in ("tenant", "consent", "subject"):
            changed[name] = sa.func.coalesce(insert.excluded[name], table.c[name])
    return insert.on_conflict_do_update(index_elements=keys, set_=changed)
