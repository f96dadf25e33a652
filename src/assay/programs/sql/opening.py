"""Opens a database by its name. Drivers are imported when they are needed."""

from pathlib import Path

from assay.errors import DataError
from assay.programs.sql.database import Database


def open_database(name: str) -> Database:
    """A database by its URL (`postgresql://…`) or the path of an SQLite file.

    Raises:
        DataError: there is no such file.
        MissingExtra: the driver of PostgreSQL is not installed.
    """
    if name.startswith(("postgresql://", "postgres://")):
        from assay.programs.sql.postgresql import PostgreSQL

        return PostgreSQL(name)
    path = Path(name)
    if not path.is_file():
        raise DataError(f"database={name!r} is no file and no URL of PostgreSQL")
    from assay.programs.sql.sqlite import SQLite

    return SQLite(path)
