"""Opening a database: creates the tables of a new store, and refuses a store whose tables are not those of `tables`."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from assay.errors import StoreError
from assay.support.formats import check_format
from assay.traces.store import tables as schema
from assay.traces.store.location import REVISION

_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
_LOCK_POSTGRES = 0x6173736179  # key of the advisory lock: "assay" in ASCII


def create_or_check(engine: sa.Engine) -> None:
    """Creates the tables of a new store. Safe to call from several threads and processes: one creates, the others wait.

    Raises:
        StoreError: another version of assay wrote the store, or another program has tables of the same names.
    """
    if _revision(engine) == REVISION:
        return
    for pause_s in (*_PAUSES_S, None):
        try:
            with _alone(engine) as connection:
                if schema.metadata.tables.keys().isdisjoint(sa.inspect(connection).get_table_names()):
                    schema.metadata.create_all(connection)
                    connection.execute(sa.insert(schema.revisions).values(version_num=REVISION))
            break
        except sa.exc.OperationalError as error:
            if pause_s is None or not _is_locked(error):
                raise
            time.sleep(pause_s)
    check_format(
        f"the store {engine.url.render_as_string().removeprefix('sqlite:///')}",
        _revision(engine),
        REVISION,
        remake="name another store, which is created, and run the jobs again; stores are not converted",
        error=StoreError,
    )


def _is_locked(error: sa.exc.OperationalError) -> bool:
    """Whether SQLite reports a busy file. Its timeout does not apply while another process switches the file to WAL."""
    return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _revision(engine: sa.Engine) -> str | None:
    try:
        with engine.connect() as connection:
            return connection.execute(sa.select(schema.revisions.c.version_num)).scalar()
    except (sa.exc.OperationalError, sa.exc.ProgrammingError):
        return None  # the table does not exist; another cause (no connection) raises again when it is created


@contextmanager
def _alone(engine: sa.Engine) -> Iterator[sa.Connection]:
    """An exclusive transaction. It is rolled back if the process is killed."""
    with engine.connect() as connection:
        if engine.dialect.name != "sqlite":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_POSTGRES})
            yield connection
            connection.commit()
            return
        # By default sqlite3 begins no transaction before DDL.
        connection.connection.dbapi_connection.isolation_level = None  # type: ignore[union-attr]
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.commit()
        finally:
            connection.invalidate()  # must not return to the pool with this isolation level; rolls back what is open
