"""PostgreSQL, in read-only transactions. The cost of a query is the number of blocks that it read."""

import functools
import re
from typing import Any

from assay.errors import ConfigError, MissingExtra
from assay.programs.sql.database import (
    QueryError,
    QueryLimits,
    QueryResult,
    Table,
    checked_query,
    missing_name,
    unusable,
    within_size,
)

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
            return _tables(self._url)
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
def _tables(url: str) -> tuple[Table, ...]:
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
