"""Opening a database: creates the tables of a new store, upgrades an older store, refuses a newer one.

Upgrades are Alembic revisions (`migrations/versions`). A single query checks whether a store is up to date; Alembic is
imported only if it is not.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from assay.errors import StoreError
from assay.traces.store import tables as schema
from assay.traces.store.location import REVISION

__all__ = ["bring_up_to_date", "upgrade"]

_FOLDER = Path(__file__).with_name("migrations")
_IN_THIS_PROCESS = threading.Lock()  # `alembic.op` is global state: one upgrade at a time
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
_LOCK_POSTGRES = 0x6173736179  # key of the advisory lock: "assay" in ASCII


def bring_up_to_date(engine: sa.Engine) -> None:
    """Creates or upgrades the tables. Safe to call from several threads and processes: one upgrades, the others wait.

    Raises:
        StoreError: the store has a revision that this version of assay does not know.
    """
    if _revision(engine) == REVISION:
        return
    for pause_s in (*_PAUSES_S, None):
        try:
            with _IN_THIS_PROCESS, _alone(engine) as connection:
                if sa.inspect(connection).has_table(schema.meta.name):
                    upgrade(connection)
                else:
                    _create(connection)
            return
        except sa.exc.OperationalError as error:
            if pause_s is None or not _is_locked(error):
                raise
            time.sleep(pause_s)


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


def _create(connection: sa.Connection) -> None:
    """Creates all tables in the form of the newest revision."""
    schema.metadata.create_all(connection)
    connection.execute(sa.insert(schema.meta).values(key="schema", value=schema.SINCE_REVISIONS))
    connection.execute(sa.insert(schema.revisions).values(version_num=REVISION))


def upgrade(connection: sa.Connection, to: str = "head") -> None:
    """Runs the missing revisions inside the transaction of `connection`.

    Raises:
        StoreError: the store has a revision that this version of assay does not know.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    current = MigrationContext.configure(
        connection, opts={"version_table": schema.revisions.name}
    ).get_current_revision()
    try:
        ScriptDirectory.from_config(config).get_revision(current or REVISION)
    except CommandError:
        raise StoreError(
            f"the store has revision {current}, this version of assay knows up to {REVISION}: update assay"
        ) from None
    command.upgrade(config, to)
