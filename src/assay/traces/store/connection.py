"""Connections to the store's database: opening, lock timeouts, transient errors. Does not read or write rows."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.errors import MissingExtra, NoStore, StoreError
from assay.support.addresses import DatabaseAddress
from assay.support.values import check_format
from assay.traces.records import new_id
from assay.traces.store import tables as schema
from assay.traces.store.location import REVISION, store_address

# -- Opening a database: creates the tables of a new store, and refuses a store whose tables are not those of `tables`.


_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
_ID = "id"  # key in `meta`
_LOCK_POSTGRES = 0x6173736179  # key of the advisory lock: "assay" in ASCII


def create_or_check(engine: sa.Engine, name: str) -> None:
    """Creates the tables of a new store. Safe to call from several threads and processes: one creates, the others wait.

    Args:
        name: of the store, for messages.
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
                    connection.execute(sa.insert(schema.meta).values(key=_ID, value=new_id()))
            break
        except sa.exc.OperationalError as error:
            if pause_s is None or not _is_locked(error):
                raise
            time.sleep(pause_s)
    check_format(
        f"the store {name}",
        _revision(engine),
        REVISION,
        remake="name another store, which is created, and run the jobs again; stores are not converted",
        error=StoreError,
    )


def store_id(engine: sa.Engine) -> str:
    """The store's own id, whatever address and password it is opened by."""
    with engine.connect() as connection:
        return str(connection.execute(sa.select(schema.meta.c.value).where(schema.meta.c.key == _ID)).scalar_one())


def id_of_store(where: str | Path | None) -> str:
    """The id of a store by its address; a new store is created."""
    engine = open_engine(store_address(where))
    try:
        return store_id(engine)
    finally:
        engine.dispose()


def _is_locked(error: sa.exc.OperationalError) -> bool:
    """Whether SQLite reports a busy file. Its timeout does not apply while another process switches the file to WAL."""
    return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _revision(engine: sa.Engine) -> str | None:
    try:
        with engine.connect() as connection:
            return connection.execute(sa.select(schema.revisions.c.version_num)).scalar()
    except (sa.exc.OperationalError, sa.exc.ProgrammingError) as error:
        if getattr(error.orig, "sqlstate", None) == _NO_RIGHTS:
            raise
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


# -- Connection.


_TIMEOUTS = {"connect_timeout": 10, "tcp_user_timeout": 15_000}  # of libpq: seconds; milliseconds without an answer
LOCK_TIMEOUT_MS = 300  # that the writer waits for another process's lock; it retries by itself
_LOCKED_OTHERS_MS = 30_000  # that every other statement waits
IDLE_MS = 15_000  # without a statement, after which PostgreSQL ends a transaction that others may wait for
# Transient result codes of SQLite: SQLITE_PERM, SQLITE_BUSY, SQLITE_LOCKED, SQLITE_READONLY, SQLITE_IOERR,
# SQLITE_CANTOPEN, SQLITE_PROTOCOL.
_PASSING_SQLITE = frozenset((3, 5, 6, 8, 10, 14, 15))
_FULL_SQLITE = 13
_WRITE_SQLITE = 778  # SQLITE_IOERR_WRITE: also for EDQUOT and EFBIG
_MAGIC = b"SQLite format 3\0"  # how a database file begins; an empty file is a new one
# SQLSTATE of outages that psycopg does not raise as OperationalError: a read-only server, rights taken away, also those
# on the schema, whose tables are then out of sight
_NO_RIGHTS = "42501"
_PASSING_POSTGRES = ("25006", _NO_RIGHTS, "42P01", "3F000")


def open_engine(address: DatabaseAddress) -> sa.Engine:
    """Opens the database. Creates the tables of a new one.

    Raises:
        NoStore: the file is a folder, or no database.
        StoreError: it cannot be opened, or another version of assay wrote it.
        MissingExtra: its driver is not installed.
    """
    try:
        if address.file is not None:
            address.file.absolute().parent.mkdir(parents=True, exist_ok=True)
        served = address.file is None  # a server that never answers must not block the writer for minutes
        timeouts = {name: value for name, value in _TIMEOUTS.items() if served and name not in address.url}
        engine = sa.create_engine(address.url, pool_pre_ping=served, connect_args=timeouts)
        if address.file is not None:
            sa.event.listen(engine, "connect", sqlite_pragmas)
        create_or_check(engine, address.shown)
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "postgres") from error
    except (sa.exc.SQLAlchemyError, OSError) as error:
        if (reason := _no_database(address.file)) is not None:
            raise NoStore(f"`store={address.shown!r}` {reason}. Name another file") from None
        raise StoreError(f"cannot open the store {address.shown}: {getattr(error, 'orig', error)}") from error
    return engine


def _no_database(file: Path | None) -> str | None:
    """Why the file of SQLite is not a database; None if it may be one, or for other databases."""
    if file is None or not file.exists():
        return None
    if file.is_dir():
        return "is a folder"
    try:
        with file.open("rb") as stream:
            return None if stream.read(len(_MAGIC)) in (b"", _MAGIC) else "is not an SQLite database"
    except OSError:
        return None


def sqlite_pragmas(connection: Any, _: object) -> None:
    """Sets the pragmas of a SQLite connection. A listener of SQLAlchemy's `connect` event."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={_LOCKED_OTHERS_MS}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def end_if_paused(connection: sa.Connection) -> None:
    """Lets PostgreSQL end this transaction if its process stands still in it, because it was paused or its machine is
    gone. Otherwise its locks would keep other machines from taking its job over."""
    if connection.dialect.name != "sqlite":
        connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_MS}")


@contextmanager
def short_waits(connection: sa.Connection) -> Iterator[None]:
    """Context in which statements wait only briefly for another process's lock."""
    if connection.dialect.name != "sqlite":
        end_if_paused(connection)
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        yield
        return
    connection.exec_driver_sql(f"PRAGMA busy_timeout={LOCK_TIMEOUT_MS}")
    try:
        yield
    finally:  # the connection goes back to a pool that others use
        connection.exec_driver_sql(f"PRAGMA busy_timeout={_LOCKED_OTHERS_MS}")


def is_full(error: Exception) -> bool:
    """Whether SQLite could not write rows because its disk, a quota or the largest size of a file is exhausted."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0)
    return isinstance(code, int) and (code & 0xFF == _FULL_SQLITE or code == _WRITE_SQLITE)


def passes(error: Exception, *, full_passes: bool) -> bool:
    """Whether rows wait for the database: it is unreachable, locked, read-only, has taken away rights or changed the
    password, or with `full_passes` its disk is full."""
    if not isinstance(error, sa.exc.DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        return code in _PASSING_SQLITE or (code == _FULL_SQLITE and full_passes)
    state = getattr(error.orig, "sqlstate", None)
    return error.connection_invalidated or isinstance(error, sa.exc.OperationalError) or state in _PASSING_POSTGRES
