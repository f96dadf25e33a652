"""SQLite functions that run long in one instruction, and views that cannot be read."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from assay.programs.sql.database import QueryError, QueryLimits
from assay.programs.sql.sqlite import SQLite


@pytest.fixture
def database(tmp_path: Path) -> SQLite:
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as made:
        made.executescript("CREATE TABLE City (Name TEXT); CREATE VIEW Gone AS SELECT * FROM Dropped")
    return SQLite(tmp_path / "a.sqlite")


@pytest.mark.parametrize(
    "call", ["printf('%.*c', 2000000000, 'x')", "format('%.2000000000c', 'x')", "printf('%-2000000000s', 'x')"]
)
def test_long_lengths_of_printf_give_null(database: SQLite, call: str) -> None:
    started = time.monotonic()
    assert database.query(f"SELECT {call}", QueryLimits()).rows == ((None,),)
    assert time.monotonic() - started < 1


def test_printf_formats_as_that_of_sqlite(database: SQLite) -> None:
    sql = "SELECT printf('%.2f|%05d|%-4s|%,d|%%', 3.14159, 42, 'ab', 1234567), format('%d * %s', 2, NULL), printf()"
    assert database.query(sql, QueryLimits()).rows == (("3.14|00042|ab  |1,234,567|%", "2 * ", None),)


def test_long_patterns_are_refused(database: SQLite) -> None:
    pattern = "'*[' || substr(hex(zeroblob(49999)), 1, 30000) || '1]2'"
    with pytest.raises(QueryError, match="pattern too complex"):
        database.query(f"SELECT hex(zeroblob(49999)) GLOB {pattern}", QueryLimits())


def test_a_view_of_a_table_that_does_not_exist_is_left_out(database: SQLite) -> None:
    assert [table.name for table in database.tables()] == ["City"]
    with pytest.raises(QueryError, match="no such table"):
        database.query("SELECT * FROM Gone", QueryLimits())
