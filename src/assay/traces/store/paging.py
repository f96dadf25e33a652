"""Pages of rollouts and of their calls, by key and never by offset. Reads no more than a fixed number of rows.

A page continues at the start and id of a rollout (`Cursor`). Filters have no indexes of their own, so a page reads
`WINDOW` rollouts at most: those of one task or of a small run by their index, otherwise the newest ones before the
cursor. If the filters leave nothing of a window, the page says how far it looked (`RolloutPage.searched`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from assay.errors import ConfigError
from assay.traces.records import NOT_AGENTS, Rollout, Transition
from assay.traces.store import tables as schema
from assay.traces.store.rows import clean, rollout_of, transition_of
from assay.traces.store.store import PAID, UNPRICED, StoreReads

WINDOW = 10_000  # number of rollouts that one page reads at most
_CALLS_WINDOW = 2_000  # the same with a filter by tool or failure, which reads their transitions
_FIRST = 500  # of these first: most pages are full after a few
CALLS = 20  # transitions on one page
_PREVIEW = 400  # characters read of a rollout's inputs
_EQUAL = ("run_id", "task_id", "split", "status", "phase", "failure", "source", "deployment", "arm")
_NARROW = ("task_id", "run_id")  # columns with an index of their own, the narrowest first
Columns = ReadOnlyColumnCollection[str, Any]
_CURSOR = re.compile(r"(-?\d{1,12}(?:\.\d{1,20})?(?:e-?\d{1,3})?)~([^\0]{1,64})")


@dataclass(frozen=True)
class Cursor:
    """The place of a rollout in the order of time: its start in seconds, and its id."""

    started_at: float
    id: str

    def __str__(self) -> str:
        return f"{self.started_at!r}~{self.id}"

    @classmethod
    def of(cls, text: str) -> "Cursor":
        """Raises `ConfigError` if the text was not made by `str` of a cursor."""
        if (match := _CURSOR.fullmatch(text)) is None:
            raise ConfigError(f"{text[:80]!r} is not a place in a list: follow the links of the page")
        return cls(float(match[1]), match[2])


_NEWEST = Cursor(1e12, "~")  # after every rollout


@dataclass(frozen=True, kw_only=True)
class RolloutFilters:
    """Conditions that a listed rollout meets; the defaults select all.

    Args:
        equal: values by column, of `run_id`, `task_id`, `split`, `status`, `phase`, `failure`, `source`, `deployment`
            and `arm`. A `failure` is that of the rollout or of one of its calls: an agent that repeated a call until it
            was stopped may still have answered. Rollouts of judges and simulated users are listed only with their
            `source`.
        program, text: a part of the program's name and of the task's inputs. Case is ignored as the database does: that
            of ASCII letters on SQLite.
        since: earliest start, in seconds since the epoch.
        criterion: a criterion that was graded, or failed to be.
        tool: a tool that was called.
        least, most: bounds of the score, in [0, 1]; unscored rollouts are left out if one is given.
    Raises:
        ConfigError: `equal` has another column.
    """

    equal: Mapping[str, str] = field(default_factory=dict)
    program: str = ""
    text: str = ""
    criterion: str = ""
    tool: str = ""
    since: float | None = None
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        if unknown := self.equal.keys() - set(_EQUAL):
            raise ConfigError(f"no filter by {', '.join(sorted(unknown))}; there are {', '.join(_EQUAL)}")


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A row of the list: a rollout without what makes it large."""

    id: str
    run_id: str
    task_id: str
    program: str
    program_version: str
    model: str
    phase: str
    arm: str | None
    split: str
    source: str
    status: str
    failure: str | None
    score: float | None
    human_rating: float | None
    started_at: float
    ended_at: float | None
    inputs: str  # the first characters of the inputs, as JSON

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.started_at, self.id)


@dataclass(frozen=True, kw_only=True)
class RolloutPage:
    """Rollouts, newest first.

    Attributes:
        more: whether the window has more rollouts that match, in the direction of the page.
        searched: the last rollout that was read, if the window ended before the page was full and the list goes
            on behind it; None otherwise.
    """

    rows: list[Listed]
    more: bool = False
    searched: Cursor | None = None


def rollout_page(
    store: StoreReads,
    filters: RolloutFilters,
    *,
    before: Cursor | None = None,
    after: Cursor | None = None,
    limit: int = 50,
    window: int = WINDOW,
) -> RolloutPage:
    """The rollouts that match, directly before one (older) or after one (newer); without both the newest.

    Args:
        window: maximum number of rollouts that are read.
    Raises:
        ConfigError: both `before` and `after` are given.
    """
    if before is not None and after is not None:
        raise ConfigError("before and after exclude each other")
    if filters.tool or "failure" in filters.equal:
        window = min(window, _CALLS_WINDOW)
    newer = after is not None
    cursor = after or before or _NEWEST
    with store.engine.connect() as connection:
        narrow = _narrow_column(connection, filters, window)
        rows: list[Listed] = []
        for size in (window,) if narrow else (min(_FIRST, window), window):
            query = page_statement(filters, cursor, newer=newer, limit=limit, narrow=narrow, window=size)
            rows = [Listed(**row) for row in connection.execute(query).mappings()]
            if len(rows) > limit:
                break
        searched = None
        if len(rows) <= limit and narrow is None:
            searched = _end_of_window(connection, filters, cursor, newer=newer, window=window)
    more, rows = len(rows) > limit, rows[:limit]
    return RolloutPage(rows=rows[::-1] if newer else rows, more=more, searched=searched)


def page_statement(
    filters: RolloutFilters, cursor: Cursor, *, newer: bool, limit: int, narrow: str | None, window: int = WINDOW
) -> sa.Select[Any]:
    """The query of one page.

    The innermost query finds the rows of the window by an index, with the columns that the filters compare, the next
    one those that match. Their limits keep PostgreSQL from comparing all rollouts first.

    Args:
        narrow: the column whose index finds the rows; None for the index by time.
    """
    table = schema.rollouts
    compared = [table.c[name] for name in _compared(filters)]
    if narrow is None:
        inner = _by_time(filters, cursor, newer=newer).with_only_columns(*compared)
    else:
        inner = sa.select(*compared).where(table.c[narrow] == filters.equal[narrow])
    window_rows = inner.limit(window).subquery("found")
    matching = sa.select(window_rows.c.id).where(
        *_conditions(filters, window_rows.c), _beyond(cursor, window_rows.c, newer=newer)
    )
    found = matching.order_by(*_order(window_rows.c, newer=newer)).limit(limit + 1).subquery("matching")
    columns = [table.c[name] for name in Listed.__dataclass_fields__ if name != "inputs"]
    inputs = sa.func.substr(table.c.inputs_json, 1, _PREVIEW).label("inputs")
    query = sa.select(*columns, inputs).join_from(found, table, table.c.id == found.c.id)
    return query.order_by(*_order(table.c, newer=newer))


def _compared(filters: RolloutFilters) -> list[str]:
    """Names of the columns that the filters and the order of the list compare."""
    used = {
        "program": filters.program,
        "inputs_json": filters.text,
        "verdicts_json": filters.criterion,
        "early_tools_json": filters.tool,
        "score": filters.least is not None or filters.most is not None,
    }
    return sorted({"id", "started_at", "source", *filters.equal, *(name for name, is_set in used.items() if is_set)})


def _by_time(filters: RolloutFilters, cursor: Cursor, *, newer: bool) -> sa.Select[Any]:
    """Ids of rollouts in the order of time, by the index `rollouts_by_time` alone."""
    table = schema.rollouts
    query = sa.select(table.c.id).where(_beyond(cursor, table.c, newer=newer))
    if filters.since is not None:
        query = query.where(table.c.started_at >= filters.since)
    return query.order_by(*_order(table.c, newer=newer))


def _end_of_window(
    connection: sa.Connection, filters: RolloutFilters, cursor: Cursor, *, newer: bool, window: int
) -> Cursor | None:
    """The last rollout of the window, if the list continues after it."""
    table = schema.rollouts
    ids = _by_time(filters, cursor, newer=newer).with_only_columns(table.c.started_at, table.c.id).limit(window + 1)
    rows = connection.execute(ids).all()
    return Cursor(rows[window - 1][0], rows[window - 1][1]) if len(rows) > window else None


def _beyond(cursor: Cursor, columns: Columns, *, newer: bool) -> sa.ColumnElement[bool]:
    place, cursor_place = sa.tuple_(columns.started_at, columns.id), sa.tuple_(cursor.started_at, cursor.id)
    return place > cursor_place if newer else place < cursor_place


def _order(columns: Columns, *, newer: bool) -> list[Any]:
    return [column.asc() if newer else column.desc() for column in (columns.started_at, columns.id)]


def _conditions(filters: RolloutFilters, columns: Columns) -> list[sa.ColumnElement[bool]]:
    conditions = [columns[name] == value for name, value in filters.equal.items() if name != "failure"]
    if (failure := filters.equal.get("failure")) is not None:
        calls = schema.transitions
        failed = sa.select(calls.c.t).where(calls.c.rollout_id == columns.id, calls.c.failure == failure)
        conditions.append((columns.failure == failure) | failed.exists())
    if "source" not in filters.equal:
        conditions.append(columns.source.not_in(NOT_AGENTS))
    if filters.program:
        conditions.append(columns.program.icontains(filters.program, autoescape=True))
    if filters.text:
        written = orjson.dumps(clean(filters.text)).decode()[1:-1]  # as the column has it
        conditions.append(columns.inputs_json.icontains(written, autoescape=True))
    if filters.criterion:
        conditions.append(_names(columns.verdicts_json, "criterion", filters.criterion))
    if filters.tool:
        calls, names_tool = schema.transitions, _names(schema.transitions.c.tools_json, "name", filters.tool)
        called = sa.select(calls.c.t).where(calls.c.rollout_id == columns.id, names_tool)
        conditions.append(_names(columns.early_tools_json, "name", filters.tool) | called.exists())
    if filters.since is not None:
        conditions.append(columns.started_at >= filters.since)
    if filters.least is not None:
        conditions.append(columns.score >= filters.least)
    if filters.most is not None:
        conditions.append(columns.score <= filters.most)
    return conditions


def _names(column: sa.Column[Any], field_name: str, value: str) -> sa.ColumnElement[bool]:
    """Whether a column of JSON has a field with this text, as the two serializers of `rows.as_json` write it."""
    text = orjson.dumps(clean(value)).decode()
    return sa.or_(*(column.contains(f'"{field_name}":{space}{text}', autoescape=True) for space in ("", " ")))


def _narrow_column(connection: sa.Connection, filters: RolloutFilters, window: int) -> str | None:
    """The filtered column whose index has fewer rows than the window; None if there is none."""
    for name in _NARROW:
        if name in filters.equal and _count(connection, {name: filters.equal[name]}, window) <= window:
            return name
    return None


def _count(connection: sa.Connection, values: Mapping[str, str], most: int) -> int:
    """Number of rollouts with these values, counted up to one above `most` from the index alone."""
    columns = schema.rollouts.c
    having = [columns[name] == value for name, value in values.items()]
    some = sa.select(*(columns[name] for name in values)).where(*having).limit(most + 1).subquery()
    return int(connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one())


def newest_rollouts(store: StoreReads, *, run_id: str | None = None, limit: int = WINDOW) -> list[Rollout]:
    """Rollouts without their transitions, newest first, found by an index.

    Args:
        run_id: of one run; of a run with more than `limit` rollouts only some are read.
    """
    table = schema.rollouts
    if run_id is None:
        newest = _by_time(RolloutFilters(), _NEWEST, newer=False).limit(limit).subquery("found")
    else:
        newest = sa.select(table.c.id).where(table.c.run_id == run_id).limit(limit).subquery("found")
    query = sa.select(table).join_from(newest, table, table.c.id == newest.c.id).order_by(*_order(table.c, newer=False))
    with store.engine.connect() as connection:
        return [rollout_of(row) for row in connection.execute(query).mappings()]


def count_newest(store: StoreReads, *, most: int = WINDOW) -> int:
    """Number of rollouts of the store, counted up to one above `most` from an index alone."""
    some = _by_time(RolloutFilters(), _NEWEST, newer=False).limit(most + 1).subquery()
    with store.engine.connect() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one())


def rollouts_of_run(store: StoreReads, run_id: str, *, split: str | None = None, most: int = WINDOW) -> int:
    """Number of rollouts of a run, on one split or on all, counted up to one above `most` from the index alone."""
    with store.engine.connect() as connection:
        return _count(connection, {"run_id": run_id} | ({} if split is None else {"split": split}), most)


def small_runs(store: StoreReads, run_ids: Sequence[str], *, most: int) -> set[str]:
    """Those of the runs that have at most `most` rollouts, from an index alone, in one query."""
    runs, table = schema.runs, schema.rollouts
    own = sa.select(table.c.run_id).where(table.c.run_id == runs.c.id).correlate(runs).limit(most + 1).subquery()
    count = sa.select(sa.func.count()).select_from(own).scalar_subquery()
    with store.engine.connect() as connection:
        rows = connection.execute(sa.select(runs.c.id, count).where(runs.c.id.in_(run_ids))) if run_ids else ()
        return {run_id for run_id, rollouts in rows if rollouts <= most}


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Some transitions of a rollout.

    Attributes:
        before: the transition before the first one; None if there is none.
        more: whether there are later ones.
        count: number of all transitions of the rollout.
        prompt_tokens, completion_tokens, cost_usd: sums over all of them; the cost is None if a price is unknown.
    """

    rows: list[Transition]
    before: Transition | None
    more: bool
    count: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None


def calls_from(store: StoreReads, rollout_id: str, first: int = 0, *, limit: int = CALLS) -> Calls:
    """Transitions of a rollout from `t` = `first` on, and the sums over all of them."""
    steps = schema.transitions
    own = steps.c.rollout_id == rollout_id
    query = sa.select(steps).where(own, steps.c.t >= first - 1).order_by(steps.c.t).limit(limit + 2)
    sums = sa.select(
        sa.func.count(),
        sa.func.sum(steps.c.prompt_tokens),
        sa.func.sum(steps.c.completion_tokens),
        sa.func.sum(PAID),
        sa.func.sum(UNPRICED),
    ).where(own)
    with store.engine.connect() as connection:
        calls = [transition_of(row) for row in connection.execute(query).mappings()]
        count, prompt, completion, cost, unknown = connection.execute(sums).one()
    rows = [row for row in calls if row.t >= first]
    return Calls(
        rows=rows[:limit],
        before=next((row for row in calls if row.t < first), None),
        more=len(rows) > limit,
        count=count,
        prompt_tokens=int(prompt or 0),
        completion_tokens=int(completion or 0),
        cost_usd=None if unknown else float(cost or 0.0),
    )
