"""Databases that are only read, with limits on every query, and what a query cost.

Does not import DSPy. PostgreSQL needs `pip install 'dspy-assay[postgres]'`.
"""

import difflib
import functools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from assay.errors import ConfigError, EnvironmentFailed
from assay.programs.sql.nesting import columns_written_out

__all__ = ["Database", "QueryError", "QueryLimits", "QueryResult", "Table"]


@dataclass(frozen=True, kw_only=True)
class QueryLimits:
    """Limits of one query.

    Attributes:
        rows: that are returned; more are cut off.
        size: bytes of the result.
        steps: instructions of SQLite's machine.
        seconds: of the clock.
        characters: of the query.
    Raises:
        ConfigError: a limit is not above 0.
    """

    rows: int = 200
    size: int = 1_000_000
    steps: int = 10_000_000
    seconds: float = 2.0
    characters: int = 2000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"{name}={value!r} must be above 0")


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
            QueryError: it is no reading query, the database refused it, or it exceeded a limit.
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
