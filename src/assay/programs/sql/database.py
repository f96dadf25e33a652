"""Databases that are only read, with limits on every query, and what a query cost.

Does not import DSPy. PostgreSQL needs `pip install 'dspy-assay[postgres]'`.
"""

import difflib
import functools
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from assay.errors import EnvironmentFailed
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
