"""SQLite functions that run long in one instruction, columns that are written out, and views that cannot be read."""

import contextlib
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from assay.programs.sql import QueryError, QueryLimits, SQLite

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def database(tmp_path: Path) -> SQLite:
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as made:
        made.executescript("CREATE TABLE City (Name TEXT); CREATE VIEW Gone AS SELECT * FROM Dropped")
    return SQLite(tmp_path / "a.sqlite")


@pytest.mark.parametrize(
    "call", ["printf('%.*c', 2000000000, 'x')", "format('%.2000000000c', 'x')", "printf('%-2000000000s', 'x')"]
)
def test_long_lengths_of_printf_give_null(database: SQLite, call: str) -> None:
    assert database.query(f"SELECT {call}", QueryLimits()).rows == ((None,),)


LARGE = "hex(zeroblob(49999))"  # 99,998 zeros
SETS = (  # p: a pattern of 999 bytes; s: 50,000 and more characters to strip; j: an object with 8,000 keys
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 8000), v AS MATERIALIZED (SELECT "
    f"{LARGE} x, substr({LARGE}, 1, 50000) || '1' s, '*' || replace(substr({LARGE}, 1, 332), '0', '[0]') || '1' g, "
    f"'%' || substr({LARGE}, 1, 990) || '1' p, replace(substr({LARGE}, 1, 14000), '0', '%9999d') f, "
    "(SELECT '{' || group_concat('\"' || i || '\":1') || '}' FROM n) j) SELECT "
)


@pytest.mark.parametrize(
    "call",
    [
        "length(rtrim(x, replace(s, '0', '12')))", "length(ltrim(x, s))", "length(trim(s, x))", "instr(x, s)",
        "length(replace(x, s, ''))", "x GLOB g", "x LIKE p", "length(json_patch(j, j))", "length(printf(f))",
        "length(quote(x))", "soundex(x)", "length(json_set(j, '$.x', 1, '$.y', 1, '$.z', 1))", "json_valid(x)",
        "length(strftime(x, 'now'))", "x COLLATE NOCASE < s", "CAST(x AS REAL)", "length(upper(x))", "unicode(x)",
    ],
)  # fmt: skip
def test_a_slow_function_does_not_outrun_the_time_limit(database: SQLite, call: str) -> None:
    calls = ", ".join([call] * min(150, 1400 // len(call)))
    for sql in (f"{SETS}{call} FROM v", f"{SETS}{calls} FROM v"):
        with contextlib.suppress(QueryError):
            database.query(sql, QueryLimits(seconds=0.5))


@pytest.mark.parametrize(
    "arguments",
    [
        "'xxaxyx', 'yx'", "'abc', 'abc'", "'abc', ''", "'', 'a'", "NULL, 'a'", "'a', NULL", "1001, 1", "1.50, 0",
        "x'61626361', 'a'", "'abca', x'61'", "'ééaé', 'é'", "' a ', ' '", "'[a]', '][ '", "-0.0, '-'", "1e300, '+0'",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["trim", "ltrim", "rtrim"])
def test_trim_strips_as_that_of_sqlite(database: SQLite, name: str, arguments: str) -> None:
    sql = f"SELECT {name}({arguments}), typeof({name}({arguments})), {name}('  a '), {name}(NULL), {name}(12)"
    with closing(sqlite3.connect(":memory:")) as plain:
        assert database.query(sql, QueryLimits()).rows == (plain.execute(sql).fetchone(),)


def test_many_calls_and_long_patterns_are_refused_with_the_limit(database: SQLite) -> None:
    for sql, message in (
        (f"SELECT {', '.join(['c'] * 40)} FROM (SELECT instr(Name, 'a') c FROM City)", "30 calls of instr and replace"),
        (f"SELECT {', '.join(['json_patch(Name, Name)'] * 6)} FROM City", "5 calls of json_patch"),
        (
            f"WITH v AS MATERIALIZED (SELECT 'x' y) SELECT {', '.join(['c'] * 50)} FROM (SELECT y LIKE '{'a' * 60}' c "
            "FROM v)",
            "2500 bytes",
        ),
    ):
        with pytest.raises(QueryError, match=message) as refused:
            database.query(sql, QueryLimits())
        assert refused.value.kind == "limit"
    many = " OR ".join(f"Name LIKE '%town {at}%'" for at in range(50))
    assert database.query(f"SELECT Name FROM City WHERE {many}", QueryLimits()).rows == ()


@pytest.mark.parametrize(
    "level", ["SELECT {} x FROM ({})", "SELECT {} AS 'x' FROM ({}) AS t", 'SELECT {} "x" FROM ({})']
)
def test_columns_that_are_written_out_20_to_the_12_times_are_refused(database: SQLite, level: str) -> None:
    sql = "SELECT Name x FROM City"
    for _ in range(12):
        sql = level.format("+".join(["x"] * 20), sql)
    with pytest.raises(QueryError, match="name a column too often"):
        database.query(sql, QueryLimits())
    tables = ", ".join(f"t{at}(x) AS (SELECT {'+'.join(['x'] * 20)} FROM t{at - 1})" for at in range(1, 13))
    with pytest.raises(QueryError, match="name a column too often"):
        database.query(f"WITH t0(x) AS (SELECT Name FROM City), {tables} SELECT x FROM t12", QueryLimits())


def test_long_patterns_are_refused(database: SQLite) -> None:
    pattern = "'*[' || substr(hex(zeroblob(49999)), 1, 30000) || '1]2'"
    with pytest.raises(QueryError, match="pattern too complex"):
        database.query(f"SELECT hex(zeroblob(49999)) GLOB {pattern}", QueryLimits())


def test_a_view_of_a_table_that_does_not_exist_is_left_out(database: SQLite) -> None:
    assert [table.name for table in database.tables()] == ["City"]
    with pytest.raises(QueryError, match="no such table"):
        database.query("SELECT * FROM Gone", QueryLimits())
