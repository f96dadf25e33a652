"""Databases that an agent can only read, with limits on every query, and what a query cost.

SQLite files are opened for reading; the cost of a query is the number of instructions of SQLite's machine. On
PostgreSQL, in read-only transactions, it is the number of blocks that the query read. Does not import DSPy. PostgreSQL
needs `pip install 'dspy-assay[postgres]'`.
"""

import contextlib
import difflib
import functools
import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from assay.errors import ConfigError, DataError, EnvironmentFailed, MissingExtra
from assay.support.addresses import DatabaseAddress
from assay.support.options import Positive, Seconds, Settings

# -- How often a nested query writes its columns out before the database counts instructions.


_QUOTED = re.compile(r'"[^"]*"|\[[^\]]*\]|`[^`]*`')
_COLUMNS_OF_TABLE = re.compile(r"(\w)\s*\([^()]*\)\s*(as\s*(?:not\s+)?(?:materialized\s*)?\()")  # WITH name (a, b) AS (
_INNERMOST = re.compile(r"(\w*)\s*\(([^()]*)\)")
_DEFINED_BY_QUERY = re.compile(r"(\w+)\s+as\s+(?:not\s+)?(?:materialized\s+)?§(\d+)")
_TOKEN = re.compile(r"§\d+|\b[^\W\d]\w*\b(?!\s*\.)")
_MOST_LEVELS = 200
_KEYWORDS = re.compile(
    "all|and|as|asc|between|by|case|cast|collate|cross|current|desc|distinct|else|end|escape|except|exists|false|"
    "filter|following|from|full|glob|group|having|in|inner|intersect|is|isnull|join|left|like|limit|natural|not|"
    "notnull|null|nulls|offset|on|or|order|outer|over|partition|preceding|range|recursive|right|row|rows|select|then|"
    "true|unbounded|union|using|values|when|where|window|with"
)


def columns_written_out(plain: str) -> float:
    """An upper bound of how often a column is written out, from a query without comments and strings.

    `SELECT x+x x FROM (SELECT x+x x FROM …)` has its innermost column 4 times: a level multiplies by how often it has
    one name. SQLite writes them out while it prepares a query, which cannot be interrupted: 350 characters took minutes
    and gigabytes.
    """
    text = _QUOTED.sub(lambda match: re.sub(r"\W", "_", f"_{match[0][1:-1]}"), plain.casefold())
    text = _COLUMNS_OF_TABLE.sub(r"\1 \2", text)
    queries: list[str] = []

    def taken_out(match: re.Match[str]) -> str:
        if not re.match(r"\s*(?:select|with|values)\b", match[2]):
            return f" {match[2]} "  # without the name of the function
        queries.append(match[2])
        return f"{match[1]} §{len(queries) - 1} "

    while (shorter := _INNERMOST.sub(taken_out, text)) != text:
        text = shorter
    return _size(text, queries, {}, 0)


def _size(text: str, queries: list[str], tables: Mapping[str, float], level: int) -> float:
    if level > _MOST_LEVELS:
        return float("inf")
    tables = dict(tables)
    for name, at in _DEFINED_BY_QUERY.findall(text):
        tables[name] = _size(queries[int(at)], queries, tables, level + 1)
    inside, names = 0.0, Counter[str]()
    for token in _TOKEN.findall(_DEFINED_BY_QUERY.sub(" ", text)):
        if token.startswith("§"):
            inside += _size(queries[int(token[1:])], queries, tables, level + 1)
        elif not _KEYWORDS.fullmatch(token):
            inside += tables.get(token, 0.0)
            names[token] += 1
    return max(names.values(), default=1) * max(1.0, inside)


class QueryLimits(Settings):
    """Limits of one query.

    Raises:
        ConfigError: a limit is not above 0.
    """

    rows: Positive = 200
    """Rows that are returned; more are cut off."""
    size: Positive = 1_000_000
    """Bytes of the result."""
    steps: Positive = 10_000_000
    """Instructions of SQLite's machine."""
    seconds: Seconds = 2.0
    """Of the clock."""
    characters: Positive = 2000
    """Of the query."""


@dataclass(frozen=True, kw_only=True)
class QueryResult:
    """Rows of a query, and its cost in the database's own unit: instructions of SQLite, blocks of PostgreSQL."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool = False
    cost: int | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. `references` maps a column to the table that it refers to."""

    name: str
    columns: tuple[str, ...]
    references: tuple[tuple[str, str], ...] = ()


class QueryError(Exception):
    """A query was refused or failed. The message is for the agent that wrote it, with the nearest existing name.

    Attributes:
        kind: `syntax`, `table`, `column`, `ambiguous`, `write`, `limit` or `other`.
    """

    def __init__(self, message: str, kind: str = "other") -> None:
        super().__init__(message)
        self.kind = kind


class Database(Protocol):
    """A database that is only read. Its methods can be called from several threads."""

    dialect: str

    def tables(self) -> tuple[Table, ...]:
        """The tables and views, by name."""

    def query(self, sql: str, limits: QueryLimits) -> QueryResult:
        """The rows of one query.

        Raises:
            QueryError: it is not a reading query, the database refused it, or it exceeded a limit.
            EnvironmentFailed: the database cannot be used: it is away, locked or damaged.
        """


_COMMENTS = re.compile(r"--[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_STRINGS = re.compile(r"'(?:[^']|'')*'")
_READS = re.compile(r"\s*(?:\(\s*)*(?:select|with|values)\b", re.IGNORECASE)
_NAME = r"""(?:\w+|"[^"]+"|\[[^\]]+\]|`[^`]+`)"""
_DEFINED = re.compile(rf"({_NAME})\s*(?:\([^()]*\)\s*)?\bas\s*(?:not\s+)?(?:materialized\s*)?\(", re.IGNORECASE)
_MOST_TABLES = 200  # that the tables of `WITH` are written out to
_MOST_COLUMNS = 100_000  # SQLite prepares so many in 0.1 s


def checked_query(sql: str, limits: QueryLimits) -> str:
    """A query without what follows its end.

    Raises:
        QueryError: too long, no reading query, or tables of WITH or columns of subqueries that name each other too
            often. SQLite and PostgreSQL write these out before they count instructions: 20 of them, each naming the one
            before twice, are a million tables, and preparing such a query cannot be interrupted.
    """
    sql = sql.strip().rstrip(";").strip()
    if len(sql) > limits.characters:
        raise QueryError(f"the query has more than {limits.characters} characters", "limit")
    if "\0" in sql:
        raise QueryError("the query has a null character", "syntax")
    plain = _STRINGS.sub("''", _COMMENTS.sub(" ", sql))
    if not _READS.match(plain):
        raise QueryError("only reading queries are possible: begin with SELECT or WITH", "write")
    if _written_out(plain) > _MOST_TABLES:
        raise QueryError("the tables of WITH name each other too often", "limit")
    if columns_written_out(plain) > _MOST_COLUMNS:
        raise QueryError("nested queries name a column too often: it is written out at each place", "limit")
    return sql


def _written_out(plain: str) -> int:
    """About how many tables the tables of WITH are written out to; at most `_MOST_TABLES` + 1."""
    definitions = list(_DEFINED.finditer(plain))
    if not definitions:
        return 0
    names = [match[1].strip('"[]`').casefold() for match in definitions]
    ends = [*(match.start() for match in definitions[1:]), len(plain)]
    bodies = [plain[match.end() : end].casefold() for match, end in zip(definitions, ends, strict=True)]

    @functools.cache
    def size(at: int) -> int:
        total = 1
        for other, name in enumerate(names[:at]):
            total += size(other) * len(re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", bodies[at]))
            if total > _MOST_TABLES:
                return _MOST_TABLES + 1
        return total

    return max(map(size, range(len(definitions))))


def near(name: str, among: Sequence[str]) -> str:
    """`; there is X` with the existing names that are most like a missing one; "" if none is."""
    last = name.rsplit(".", 1)[-1].casefold()
    by_folded = {other.rsplit(".", 1)[-1].casefold(): other for other in among}
    close = difflib.get_close_matches(last, by_folded, 3, 0.5)
    close += [folded for folded in by_folded if folded not in close and (last in folded or folded in last)]
    return f"; there is {', '.join(by_folded[folded] for folded in close[:3])}" if close else ""


def missing_name(kind: str, name: str, tables: Sequence[Table]) -> QueryError:
    """The error for a table or column that does not exist.

    Args:
        kind: `table` or `column`.
    """
    if kind == "table":
        return QueryError(f"no such table: {name}{near(name, [table.name for table in tables])}", kind)
    qualifier, _, column = name.rpartition(".")
    owners = [table.name for table in tables if column.casefold() in map(str.casefold, table.columns)]
    if owners:
        where = f"; {column} is a column of {', '.join(owners[:3])}"
        return QueryError(f"no such column: {name}{where}", kind)
    own = [table for table in tables if table.name.casefold() == qualifier.casefold()] or tables
    columns = [f"{table.name}.{column}" for table in own for column in table.columns]
    return QueryError(f"no such column: {name}{near(name, columns)}", kind)


def unusable(error: Exception) -> EnvironmentFailed:
    """The error for a database that failed itself, which is not the fault of the query."""
    return EnvironmentFailed(f"the database cannot be used: {str(error).strip().splitlines()[0]}")


def within_size(row: Sequence[Any], size: int, limits: QueryLimits) -> int:
    """The size of a result with another row.

    Raises:
        QueryError: it is too large.
    """
    size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
    if size > limits.size:
        raise QueryError(f"the result is larger than {limits.size} bytes", "limit")
    return size


def deadline(limits: QueryLimits) -> float:
    """The time of `time.monotonic` at which a query that begins now must have ended."""
    return time.monotonic() + limits.seconds


# -- A schema as text for a prompt: all tables if they fit, otherwise those that the question is about.


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_IGNORED = frozenset(
    (
        *("a", "an", "and", "are", "by", "do", "does", "for", "from", "has", "have", "how", "id", "in", "is", "it"),
        *("many", "much", "of", "on", "s", "the", "there", "to", "what", "which", "who"),
    )
)


def words_of(text: str) -> list[str]:
    """Words in lower case without plural endings; `customerId`, `customer_id` and `CustomerID` have the same."""
    return [_stem(word.lower()) for word in _WORD.findall(text)]


def _stem(word: str) -> str:
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ses", "xes", "ches", "shes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def schema_text(tables: Sequence[Table], question: str, characters: int) -> str:
    """The tables with their columns, one a line, in at most about so many characters.

    If they do not fit, tables that share words with the question come first, rare words counting most, then the tables
    that these refer to. The names of others follow as far as there is room, and the number of those that are left out.
    """
    lines = [_line(table) for table in tables]
    if sum(map(len, lines)) + len(lines) <= characters:
        return "\n".join(lines)
    chosen: list[int] = []
    used = 0
    rest = max(100, characters // 5)  # for the names of other tables
    for at in _by_relevance(tables, question):
        if used + len(lines[at]) + 1 > characters - rest and chosen:
            break
        chosen.append(at)
        used += len(lines[at]) + 1
    others, names = [table.name for at, table in enumerate(tables) if at not in set(chosen)], ""
    for count, name in enumerate(others):
        if used + len(names) + len(name) + 40 > characters:
            names += f" and {len(others) - count} more"
            break
        names += f", {name}" if names else name
    text = "\n".join(lines[at] for at in sorted(chosen))
    return f"{text}\nother tables: {names}" if names else text


def _line(table: Table) -> str:
    refers = dict(table.references)
    columns = [f"{name} -> {refers[name]}" if name in refers else name for name in table.columns]
    return f"{table.name}({', '.join(columns)})"


def _by_relevance(tables: Sequence[Table], question: str) -> list[int]:
    """Positions of the tables that share words with the question or are referred to by one that does, the most relevant
    first; all if there are none."""
    asked = set(words_of(question)) - _IGNORED
    names = [set(words_of(table.name)) for table in tables]
    columns = [set(words_of(" ".join(table.columns))) for table in tables]
    spread = Counter(word for own, of in zip(names, columns, strict=True) for word in own | of)

    def weight(word: str) -> float:
        return math.log(1 + len(tables) / spread[word])

    scores = [
        sum(2 * weight(word) for word in asked & own) + sum(weight(word) for word in (asked & of) - own)
        for own, of in zip(names, columns, strict=True)
    ]
    place = {table.name: at for at, table in enumerate(tables)}
    reached = list(scores)
    for at, table in enumerate(tables):
        for _, other in table.references:
            if other in place:  # a table next to a relevant one is needed to join it
                reached[place[other]] = max(reached[place[other]], scores[at] / 2)
    relevant = [at for at in range(len(tables)) if reached[at] > 0] or list(range(len(tables)))
    return sorted(relevant, key=lambda at: (-reached[at], tables[at].name))


# Functions that reach other connections, which may be those of other runs, or that execute a text as a query. Their
# names are looked for in strings and comments too: what begins there depends on settings of the server.
_CONTROL = re.compile(
    r"\b(pg_(?:terminate|cancel)_backend|pg_(?:try_)?advisory_\w+|pg_notify|(?:query|cursor)_to_\w+|ts_stat|ts_rewrite"
    r"|dblink\w*)\b|\bU&\"",
    re.IGNORECASE,
)


class PostgreSQL:
    """A database of PostgreSQL, with a connection and a read-only transaction for each query.

    The role must not be a superuser: such a role reads and writes files of the server also in a read-only transaction.
    """

    dialect = "PostgreSQL"

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtra("psycopg", "postgres") from error
        self._psycopg, self._url = psycopg, url

    def tables(self) -> tuple[Table, ...]:
        try:
            return _tables_of_server(self._url)
        except self._psycopg.Error as error:
            raise unusable(error) from error

    def query(self, sql: str, limits: QueryLimits) -> QueryResult:
        sql = checked_query(sql, limits)
        if (control := _CONTROL.search(sql)) is not None:
            raise QueryError(f"only reading queries are possible: {control[1] or control[0]} is not allowed", "write")
        try:
            with self._psycopg.connect(self._url, autocommit=True) as connection:
                roles = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchall()
                if any(role[0] for role in roles):
                    raise ConfigError(
                        "the role of the database is a superuser, who can write files of the server also in a "
                        "read-only transaction: use a role that may only read"
                    )
                # A query may change settings with `set_config`. Inside one transaction it cannot make it writing again.
                connection.execute("BEGIN READ ONLY")
                return self._rows(connection, sql, limits)
        except self._psycopg.Error as error:
            if self._is_away(error):
                raise unusable(error) from error
            raise self._explained(error, limits) from None

    def _is_away(self, error: Any) -> bool:
        """Whether the server failed: no connection, no resources, shut down."""
        state = error.sqlstate or ""
        failed = state[:2] in ("08", "53", "58") or state in ("57P01", "57P02", "57P03")
        return failed or (not state and isinstance(error, self._psycopg.OperationalError))

    def _rows(self, connection: Any, sql: str, limits: QueryLimits) -> QueryResult:
        _limit_time(connection, limits)
        # prepared: only one statement is accepted; a cursor: rows beyond the limit are not sent
        connection.execute(f"DECLARE answer NO SCROLL CURSOR FOR {sql}", prepare=True)
        cursor = connection.execute(f"FETCH {limits.rows + 1} FROM answer")
        fetched = cursor.fetchall()
        rows, size = [], 0
        for row in fetched[: limits.rows]:
            size = within_size(row, size, limits)
            rows.append(tuple(row))
        _limit_time(connection, limits)  # the query may have changed it for what follows
        plan = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", prepare=True).fetchone()[0]
        top = plan[0]["Plan"]
        return QueryResult(
            columns=tuple(column.name for column in cursor.description or ()),
            rows=tuple(rows),
            truncated=len(fetched) > limits.rows,
            cost=int(top.get("Shared Hit Blocks", 0)) + int(top.get("Shared Read Blocks", 0)),
        )

    def _explained(self, error: Any, limits: QueryLimits) -> QueryError:
        text = str(error).split("\n")[0]
        kinds = {"42601": "syntax", "42P01": "table", "42703": "column", "42702": "ambiguous", "25006": "write"}
        kind = kinds.get(str(error.sqlstate), "other")
        if error.sqlstate == "57014":
            return QueryError(f"the query was stopped: it needs more than {limits.seconds:g} s", "limit")
        if kind in ("table", "column") and (match := re.search(r'"([^"]+)"|column ([\w.]+)', text)):
            return missing_name(kind, match[1] or match[2], self.tables())
        if "DECLARE CURSOR" in text:  # it refuses a WITH that writes
            return QueryError("only reading queries are possible", "write")
        if error.sqlstate == "42501":
            kind = "write"
        return QueryError(text, kind)


def _limit_time(connection: Any, limits: QueryLimits) -> None:
    connection.execute(f"SET LOCAL statement_timeout = {max(1, int(1000 * limits.seconds))}")


@functools.lru_cache(maxsize=16)
def _tables_of_server(url: str) -> tuple[Table, ...]:
    import psycopg

    with psycopg.connect(url) as connection:
        columns = connection.execute(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = ANY "
            "(current_schemas(false)) ORDER BY table_name, ordinal_position"
        ).fetchall()
        keys = connection.execute(
            "SELECT c.conrelid::regclass::text, a.attname, c.confrelid::regclass::text FROM pg_constraint c "
            "JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1] WHERE c.contype = 'f'"
        ).fetchall()
    by_table: dict[str, list[str]] = {}
    for table, column in columns:
        by_table.setdefault(str(table), []).append(str(column))
    return tuple(
        Table(
            name=name,
            columns=tuple(names),
            references=tuple((str(column), str(other)) for table, column, other in keys if str(table) == name),
        )
        for name, names in by_table.items()
    )


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
            return _tables_of_file(self._uri, self._path.stat().st_mtime_ns)
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
def _tables_of_file(uri: str, changed: int) -> tuple[Table, ...]:
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
        return PostgreSQL(address.conninfo)
    path = address.file
    if not path.is_file():
        raise DataError(f"database={name!r} is neither a file nor a URL of PostgreSQL")
    return SQLite(path)
