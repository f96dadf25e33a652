"""Checks of SQL queries, of scope `final`. The prediction's `sql` is run again, on the database of the task's input
`database`, next to the query in `expected.sql`; what the prediction says of its own rows is not read."""

import functools
import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt

from assay.datasets import Task
from assay.errors import AssayError, EnvironmentFailed
from assay.programs.sql import QueryError, QueryLimits, QueryResult, open_database
from assay.rubrics.criteria import Grade, NoGrade, not_expected
from assay.traces.records import Rollout

__all__ = ["query_cost", "query_runs", "rows_match"]

_LIMITS = QueryLimits(rows=10_000, seconds=5.0)
_WHOLE = 1e9  # from here on nine digits do not tell whole numbers apart


@functools.lru_cache(maxsize=4096)
def _ran(database: str, sql: str, changed: tuple[int, int] | None) -> QueryResult | str:
    """The result of a query, or why it failed.

    Args:
        changed: time and size of the file, so that changed content is queried again.
    """
    try:
        return open_database(database).query(sql, _LIMITS)
    except QueryError as error:
        return str(error)


def _result(task: Task, sql: Any) -> QueryResult | str:
    database = task.inputs.get("database")
    if not isinstance(database, str):
        raise NoGrade(f"task {task.id!r} has no input 'database'")
    if not isinstance(sql, str) or not sql.strip():
        return "there is no query"
    try:
        return _ran(database, sql, _changed(database))
    except (AssayError, EnvironmentFailed) as error:
        raise NoGrade(str(error)) from None


def _changed(database: str) -> tuple[int, int] | None:
    """Time and size of a file; None for a URL."""
    try:
        status = Path(database).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _wanted(task: Task) -> QueryResult:
    sql = task.expected.get("sql")
    if not isinstance(sql, str):
        raise not_expected(task, "sql")
    wanted = _result(task, sql)
    if isinstance(wanted, str):
        raise NoGrade(f"the expected query of task {task.id!r} failed: {wanted}")
    return wanted


def query_runs(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if the database accepts the query."""
    result = _result(task, prediction.get("sql"))
    return Grade.of(not isinstance(result, str), str(result))


def rows_match(task: Task, prediction: dict[str, Any], rollout: Rollout | None, *, ordered: bool = False) -> Grade:
    """Grade 1 if the query returns the rows that the expected one returns; names of columns do not count.

    Args:
        ordered: the order of the rows counts.
    """
    wanted, actual = _wanted(task), _result(task, prediction.get("sql"))
    if isinstance(actual, str):
        return Grade.of(False, f"The query failed: {actual}.")
    ours, theirs = [list(map(_comparable, result.rows)) for result in (actual, wanted)]
    same = ours == theirs if ordered else Counter(ours) == Counter(theirs)
    reason = f"The query returns {len(ours)} rows that differ from the {len(theirs)} expected ones."
    return Grade(value=float(same and actual.truncated == wanted.truncated), reason="" if same else reason)


def _comparable(row: tuple[Any, ...]) -> tuple[str, ...]:
    """A row in which equal numbers are equal texts."""
    return tuple(map(_text_of, row))


def _text_of(value: Any) -> str:
    """Whole numbers are compared exactly, others up to nine digits: their sums depend on the order."""
    if isinstance(value, int):
        return str(int(value))
    if not isinstance(value, float | Decimal):
        return repr(value)
    number = float(value)
    if abs(number) >= _WHOLE and number.is_integer():
        return str(int(value))
    return f"{number + 0.0:.9g}"  # -0.0 + 0.0 is 0.0


def query_cost(
    task: Task, prediction: dict[str, Any], rollout: Rollout | None, *, factor: Annotated[float, Gt(1)] = 10.0
) -> Grade:
    """How cheap a query is next to the expected one; give the criterion `when: rows_match`, so that only right answers
    are compared.

    The grade is linear in the logarithm of the ratio of their costs: 0.5 if they are equal, 1 if the query costs 1 /
    `factor` of the expected one or less, 0 if it costs `factor` times as much or more. The unit is the database's own
    (instructions of SQLite, blocks of PostgreSQL), which repeats, unlike time.

    Args:
        factor: ratio of costs for the grades 1 and 0.
    """
    wanted, result = _wanted(task), _result(task, prediction.get("sql"))
    if isinstance(result, str):
        raise NoGrade(f"the query failed: {result}")
    if result.cost is None or wanted.cost is None:
        raise NoGrade("the database reports no cost")
    ratio = math.log(max(1, result.cost) / max(1, wanted.cost)) / math.log(factor)
    return Grade(
        value=min(1.0, max(0.0, 0.5 - ratio / 2)),
        reason=f"The query costs {result.cost:,}, the expected one {wanted.cost:,}.",
    )
