"""Functions of SQLite that take long in one instruction, which cannot be interrupted, in bounded time.

`rtrim(x, y)` of two texts of 100 kB takes seconds, `printf('%.*c', 2000000000, 'x')` took 10 s: these two are replaced.
LIKE, GLOB, `instr`, `replace` and `json_patch` stay SQLite's own, because LIKE would lose its use of indexes and
`json_patch` its type; what is limited is how often a query calls them, or how long their patterns are.
"""

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any

from assay.programs.sql.database import QueryError

__all__ = ["MOST_OF_VALUE", "bound_functions", "limit_calls"]

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
