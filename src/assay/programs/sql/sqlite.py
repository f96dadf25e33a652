"""SQLite files, opened for reading. The cost of a query is the number of instructions of SQLite's machine."""

import contextlib
import functools
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any

from assay.errors import DataError
from assay.programs.sql.database import (
    Database,
    QueryError,
    QueryLimits,
    QueryResult,
    Table,
    checked_query,
    deadline,
    missing_name,
    unusable,
    within_size,
)
from assay.support.addresses import DatabaseAddress

# -- Functions of SQLite that take long in one instruction, which cannot be interrupted, in bounded time.
#
# `rtrim(x, y)` of two texts of 100 kB takes seconds, `printf('%.*c', 2000000000, 'x')` took 10 s: these two are
# replaced. LIKE, GLOB, `instr`, `replace` and `json_patch` stay SQLite's own, because LIKE would lose its use of
# indexes and `json_patch` its type; what is limited is how often a query calls them, or how long their patterns are.


MOST_OF_VALUE = 100_000  # bytes of a value; also of a row that the database sorts
_MOST_OF_PATTERN = 1000  # bytes of a LIKE or GLOB pattern: a set of 30,000 characters took 8 s for one value
_MOST_OF_PATTERNS = 2500  # of all patterns that one row is compared with: 1 s for values of 100 kB
_MOST_CALLS = (  # in a query, as its instructions are: a column of a subquery counts wherever it is used
    (("instr", "replace"), 30),  # 0.05 s each for texts of 100 and 50 kB
    (("json_patch",), 5),  # 0.2 s each for two documents of 100 kB
)
_COUNTED = re.compile(r"\b(?:like|glob|instr|replace|json_patch)\b", re.IGNORECASE)
_LONG = re.compile(r"%[-+ 0#!,]*(?:\*|\d{5,}|\d*\.(?:\*|\d{5,}))")  # a conversion with a length of printf


def bound_functions(opened: sqlite3.Connection) -> None:
    """Replaces the functions that can be replaced."""
    for name in ("printf", "format"):
        opened.create_function(name, -1, _printf, deterministic=True)
    for name, left, right in (("trim", True, True), ("ltrim", True, False), ("rtrim", False, True)):
        opened.create_function(name, 2, _trimming(left, right), deterministic=True)


def limit_calls(opened: sqlite3.Connection, sql: str) -> None:
    """Limits the calls of the other functions by how often the compiled query has them.

    Raises:
        QueryError: too many.
        sqlite3.Error: the query cannot be compiled.
    """
    calls: Counter[str] = Counter()
    if _COUNTED.search(sql):
        for _, operation, *_, called, _, _ in opened.execute(f"EXPLAIN {sql}"):
            if operation in ("Function", "PureFunc"):
                calls[str(called).partition("(")[0]] += 1
    for names, most in _MOST_CALLS:
        if _sum(calls, names) > most:
            raise QueryError(f"a query can have at most {most} calls of {' and '.join(names)}", "limit")
    patterns = max(1, _sum(calls, ("like", "glob")))
    longest = min(_MOST_OF_PATTERN, _MOST_OF_PATTERNS // patterns)
    opened.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, longest)


def _sum(calls: Counter[str], names: Collection[str]) -> int:
    return sum(calls[name] for name in names)


def _printf(*values: Any) -> Any:
    """SQLite's printf; NULL where it has a long or computed length, as for a result above the limit."""
    if not values or (isinstance(values[0], str) and _LONG.search(values[0])):
        return None
    return _sqlite(f"SELECT printf({', '.join('?' * len(values))})", *values)


def _trimming(left: bool, right: bool) -> Callable[[Any, Any], str | None]:
    def trim(value: Any, characters: Any) -> str | None:
        """SQLite's trim with two arguments, in a time of their lengths added instead of multiplied."""
        if value is None or characters is None:
            return None
        text, stripped = _text(value), set(_text(characters))
        begin, end = 0, len(text)
        while left and begin < end and text[begin] in stripped:
            begin += 1
        while right and begin < end and text[end - 1] in stripped:
            end -= 1
        return text[begin:end]

    return trim


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(_sqlite("SELECT CAST(? AS TEXT)", value))


def _sqlite(sql: str, *values: Any) -> Any:
    with closing(sqlite3.connect(":memory:")) as other:
        other.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_OF_VALUE)
        return other.execute(sql, values).fetchone()[0]


_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_UNIT = 10  # instructions between two calls of the progress handler: the cost is exact to so many
_UNUSABLE = frozenset(
    {
        sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB,
    }
)  # fmt: skip
_UNSAFE = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})


class SQLite:
    """An SQLite file. Each query has a connection of its own, so that threads share nothing.

    A file opened for reading is not enough: `VACUUM INTO` and `ATTACH` would write others, so every action but reading
    is refused by the database itself.
    """

    dialect = "SQLite"

    def __init__(self, path: Path) -> None:
        self._uri = f"{path.resolve().as_uri()}?mode=ro"
        self._path = path

    def tables(self) -> tuple[Table, ...]:
        try:
            return _tables(self._uri, self._path.stat().st_mtime_ns)
        except sqlite3.Error as error:
            raise unusable(error) from error

    def query(self, sql: str, limits: QueryLimits) -> QueryResult:
        sql = checked_query(sql, limits)
        ticks, until = [0], deadline(limits)
        most = limits.steps // _UNIT

        def tick() -> int:
            ticks[0] += 1
            return int(ticks[0] > most or time.monotonic() > until)  # one instruction may take tenths of a second

        with closing(sqlite3.connect(self._uri, uri=True, timeout=limits.seconds)) as opened:
            try:
                _connect_virtual_tables(opened)
            except sqlite3.Error as error:
                raise unusable(error) from error
            opened.set_authorizer(_allowed)
            for limit, value in (
                (sqlite3.SQLITE_LIMIT_LENGTH, MOST_OF_VALUE),
                (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4 * limits.characters + 8),  # bytes, with EXPLAIN
                (sqlite3.SQLITE_LIMIT_COLUMN, 200),
                (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
                (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 20),
            ):
                opened.setlimit(limit, value)
            bound_functions(opened)
            try:
                limit_calls(opened, sql)
                opened.set_progress_handler(tick, _UNIT)
                return self._rows(opened, sql, limits, ticks)
            except sqlite3.Error as error:
                if _is_unusable(error):
                    raise unusable(error) from error
                raise self._explained(error, ticks[0] > most or time.monotonic() > until, limits) from None

    def _rows(self, opened: sqlite3.Connection, sql: str, limits: QueryLimits, ticks: list[int]) -> QueryResult:
        cursor = opened.execute(sql)
        if cursor.description is None:
            raise QueryError("this is not a query", "write")
        rows: list[tuple[Any, ...]] = []
        size, truncated = 0, False
        for row in cursor:
            if len(rows) == limits.rows:
                truncated = True
                break
            size = within_size(row, size, limits)
            rows.append(tuple(row))
        # a query of a few instructions makes no tick
        return QueryResult(
            columns=tuple(str(column[0]) for column in cursor.description),
            rows=tuple(rows),
            truncated=truncated,
            cost=max(1, ticks[0]) * _UNIT,
        )

    def _explained(self, error: sqlite3.Error, over: bool, limits: QueryLimits) -> QueryError:
        text = str(error)
        if "interrupted" in text and over:
            return QueryError(
                f"the query was stopped: it needs more than {limits.seconds:g} s or {limits.steps:,} instructions",
                "limit",
            )
        if match := re.match(r"no such (table|column): (.+)", text):
            return missing_name(match[1], match[2], self.tables())
        if "not authorized" in text or "prohibited" in text or "readonly" in text:
            return QueryError(f"only reading queries are possible ({text})", "write")
        if "ambiguous column name" in text:
            return QueryError(f"{text}: write it as TABLE.COLUMN", "ambiguous")
        if "pattern too complex" in text:
            return QueryError(f"{text}: patterns can have 1000 bytes, 2500 bytes in all uses of LIKE and GLOB", "limit")
        kind = "syntax" if "syntax error" in text or "incomplete input" in text or "unrecognized" in text else "other"
        return QueryError(text, "limit" if "too big" in text or "too many" in text else kind)


def _is_unusable(error: sqlite3.Error) -> bool:
    """Whether the file itself failed: locked, damaged, away."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _UNUSABLE


def _allowed(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action == sqlite3.SQLITE_PRAGMA:  # FTS5 asks for it before it reads its index
        return sqlite3.SQLITE_OK if first == "data_version" and second is None else sqlite3.SQLITE_DENY
    unsafe = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in _UNSAFE
    return sqlite3.SQLITE_OK if action in _READING and not unsafe else sqlite3.SQLITE_DENY


def _connect_virtual_tables(opened: sqlite3.Connection) -> None:
    """Makes the virtual tables of the file known to a connection, such as those of a full-text index.

    A module declares the columns of its table by a CREATE TABLE statement, which the authorizer would refuse.
    """
    names = opened.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL TABLE%'").fetchall()
    for (name,) in names:
        with contextlib.suppress(sqlite3.OperationalError):  # its module is not in this SQLite
            opened.execute("SELECT count(*) FROM pragma_table_info(?)", (name,)).fetchone()


@functools.lru_cache(maxsize=64)
def _tables(uri: str, changed: int) -> tuple[Table, ...]:
    with closing(sqlite3.connect(uri, uri=True)) as opened:
        names = opened.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' "
            "ORDER BY name"
        ).fetchall()
        internal = _shadow_tables(opened)
        tables = (_table(opened, name) for (name,) in names if name not in internal)
        return tuple(table for table in tables if table is not None)


def _shadow_tables(opened: sqlite3.Connection) -> set[str]:
    """The tables in which virtual tables, such as full-text indexes, keep their data. No question is about them."""
    try:
        rows = opened.execute("SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'shadow'")
    except sqlite3.OperationalError as error:
        if _is_unusable(error):
            raise
        return set()  # SQLite before 3.37 has no such list
    return {name for (name,) in rows}


def _table(opened: sqlite3.Connection, name: str) -> Table | None:
    """A table or view; None for a view of tables that do not exist, which no query can read."""
    try:
        columns = opened.execute("SELECT name FROM pragma_table_info(?)", (name,)).fetchall()
    except sqlite3.OperationalError as error:
        if _is_unusable(error):
            raise
        return None
    references = opened.execute('SELECT "from", "table" FROM pragma_foreign_key_list(?)', (name,)).fetchall()
    return Table(
        name=name,
        columns=tuple(row[0] for row in columns),
        references=tuple((str(row[0]), str(row[1])) for row in references),
    )


def open_database(name: str) -> Database:
    """A database by its URL (`postgresql://…`) or the path of an SQLite file.

    Raises:
        ConfigError: it is a URL of another database.
        DataError: there is no such file.
        MissingExtra: the driver of PostgreSQL is not installed.
    """
    address = DatabaseAddress.of(name, "database")
    if address.file is None:
        from assay.programs.sql.postgresql import PostgreSQL

        return PostgreSQL(address.conninfo)
    path = address.file
    if not path.is_file():
        raise DataError(f"database={name!r} is neither a file nor a URL of PostgreSQL")
    return SQLite(path)
