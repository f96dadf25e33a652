"""The store: SQLite in WAL mode by default, PostgreSQL by a URL, the same schema and calls on both.

Writes go to one background thread that commits in batches, at least every quarter of a second; a rollout never
waits for the disk. A killed process loses at most what was put in the last second, also while the database is locked or away: rows then wait in
a file (`assay.traces.keeping`).
"""

import hashlib
import itertools
import json
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.errors import ConfigError, MissingExtra, StoreError, UnknownRollout
from assay.models.meter import Usage
from assay.scrubbing import fields, know, known, message
from assay.traces import counts, schema
from assay.traces.changes import make_changes
from assay.traces.keeping import Keeper
from assay.traces.location import store_url
from assay.traces.migration import bring_up_to_date, upsert
from assay.traces.missed import NOTHING, Unrecorded
from assay.traces.records import Rollout, Transition
from assay.traces.rows import as_json, clean, rollout_of, rollout_row, transition_of, transition_row
from assay.traces.spill import Spill, left_over
from assay.traces.writer import Rows, Writer

__all__ = ["Store", "check_url", "shown_url", "sqlite_pragmas", "store_url"]

_LAST = "\U0010ffff"  # sorts behind every other character
_SPILLED = 1 << 30  # bytes that may wait in a file while the database is away
_PATIENCE_S = 0.3  # of tries before it counts as away
_RETRY_S = 0.5
_CONNECT_S = 10
_LOCKED_MS, _LOCKED_OTHERS_MS = 300, 30_000  # that the writer waits for another process's lock at once, and others
# SQLite's codes of what passes by itself: busy, locked, an error of the disk, a file that cannot be opened, a protocol of locks that failed.
_PASSING_SQLITE = frozenset((5, 6, 10, 14, 15))
_FULL_SQLITE = 13
_LASTING_POSTGRES = ("3D", "28")  # classes of SQLSTATE: there is no such database, or nobody by that name may use it


def check_url(url: str) -> None:
    """Raises `ConfigError` where this is no database's URL."""
    try:
        sa.engine.make_url(store_url(url))
    except sa.exc.ArgumentError:
        raise ConfigError(f"{url!r} is no database URL: sqlite:///FILE, or postgresql://USER@HOST/NAME") from None


def shown_url(url: str) -> str:
    """A database's URL as it may be shown and kept: without its password."""
    return sa.engine.make_url(url).render_as_string(hide_password=True) if "://" in url else url


def _password_of(url: str) -> str | None:
    try:
        return sa.engine.make_url(url).password
    except sa.exc.ArgumentError:  # said when it is opened
        return None


class Store:
    """Rollouts and transitions, for any number of threads and processes.

    Raises:
        StoreError: the database cannot be opened, or its schema is newer than this assay.
    """

    def __init__(self, where: str | Path | None = None) -> None:
        self.url = store_url(where)
        know(_password_of(self.url))
        self.dropped = 0  # rows the database refused (a full disk); the run goes on and says so
        self.dropped_calls = 0  # transitions among them
        self._spill = Spill(self._spill_path(), _SPILLED)
        self._numbers = itertools.count()
        self._error: Exception | None = None
        self._reported = 0
        self._upserts: dict[str, tuple[str, list[str] | None]] = {}
        self.engine = self._open()
        self._never_waits = False
        self._keeper = Keeper(self._spill, partial(self._written, patience_s=_PATIENCE_S), self._take_left_over, retry_s=_RETRY_S)
        self._writer = Writer(self._commit, away=self.behind)

    def __deepcopy__(self, memo: object) -> "Store":
        return self

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> sa.Engine:
        try:
            if self.url.startswith("sqlite:///"):
                Path(self.url.removeprefix("sqlite:///")).absolute().parent.mkdir(parents=True, exist_ok=True)
            served = not self.url.startswith("sqlite")  # an answer that never comes must not hold the writer for minutes
            timeout = {"connect_timeout": _CONNECT_S} if served and "connect_timeout" not in self.url else {}
            engine = sa.create_engine(self.url, pool_pre_ping=served, connect_args=timeout)
            if engine.dialect.name == "sqlite":
                sa.event.listen(engine, "connect", sqlite_pragmas)
            bring_up_to_date(engine)
        except ModuleNotFoundError as error:
            raise MissingExtra(str(error.name), "postgres") from error
        except (sa.exc.SQLAlchemyError, OSError) as error:
            raise StoreError(f"cannot open the store {shown_url(self.url)}: {getattr(error, 'orig', error)}") from error
        return engine

    # -- writing

    def put_rollout(self, rollout: Rollout, *, interim: bool = False) -> None:
        """Inserts or replaces the rollout's row (its transitions are put one by one).

        Args:
            interim: the rollout is put again soon, so its row is made only if it is written before: of its fields as they are now, whose
                contents may have changed by then.
        """
        values = {**vars(rollout), "transitions": None}
        self._writer.put("rollouts", rollout.id, partial(rollout_row, values) if interim else rollout_row(values))

    def put_changes(self, rollout: Rollout, *, without: Collection[str] = ()) -> None:
        """Changes the row of a rollout that was put before, but for some fields: what they held need not stay in memory."""
        fields = {name: value for name, value in vars(rollout).items() if name not in without} | {"transitions": None}
        if rollout.human_rating is None:
            del fields["human_rating"]  # it may have come by another way
        row = rollout_row(fields)  # of several in one batch each is made: a later one may leave out what an earlier one changes
        self._writer.put("changes", (rollout.id, next(self._numbers)), row, size=len(row.get("prediction_json") or ""))

    def put_tool_result(self, rollout_id: str, t: int, at: int, result: str) -> None:
        """Adds the result of a tool call to a transition that was put before, unless the call has an error."""
        self._writer.put("results", (rollout_id, t, at), {"rollout_id": rollout_id, "t": t, "at": at, "result": clean(result)}, size=len(result))

    def put_step_reward(self, rollout_id: str, t: int, criterion: str, value: float) -> None:
        """Adds a step reward to a transition that was put before; a second one of the same criterion replaces it."""
        self._writer.put("rewards", (rollout_id, t, criterion), {"rollout_id": rollout_id, "t": t, "criterion": clean(criterion), "value": value})

    def put_transition(self, rollout_id: str, transition: Transition, *, request_json: str | None = None) -> None:
        """Inserts or replaces one transition.

        Args:
            request_json: its request as `as_json` writes it, without fields for credentials, where it was written before.
        """
        row = transition_row(vars(transition), request_json=request_json)
        row["rollout_id"] = rollout_id
        size = len(row["request_json"]) + len(row["response_json"] or "")
        self._writer.put("transitions", (rollout_id, transition.t), row, size=size)

    def trim(self, rollout_id: str, keep: int) -> None:
        """Removes the rollout's transitions from the `keep`-th on: they are of an earlier attempt, which a replay has overwritten."""
        self._writer.put("trims", rollout_id, {"id": rollout_id, "keep": keep})

    def put_run(
        self, run_id: str, *, kind: str, config: dict[str, Any], status: str, started_at: float, unrecorded: Unrecorded = NOTHING
    ) -> None:  # fmt: skip
        """Inserts or replaces the row of a run (`status`: running, done, stopped, failed)."""
        ended = None if status == "running" else time.time()
        reason = None if unrecorded.reason is None else message(unrecorded.reason)
        row = {"id": run_id, "kind": kind, "config": as_json(fields(config)), "status": status, "unseen": unrecorded.calls}
        self._writer.put("runs", run_id, {**row, "unrecorded_reason": reason, "started_at": started_at, "ended_at": ended})

    def flush(self, timeout_s: float = 60.0) -> None:
        """Returns once everything put before is committed.

        Raises:
            StoreError: the database refused rows, or did not answer in time.
        """
        if not self._writer.alive:
            raise StoreError(f"the writer of the store {shown_url(self.url)!r} has ended; rows that were waiting are lost")
        if not self._writer.flush(timeout_s):
            where = f" {self._spill.rows} wait in {self._spill.path} and are written when the store is opened again." if self._spill.rows else ""
            told = f": {self._error}." if self._error else "."
            raise StoreError(f"the store {shown_url(self.url)!r} did not take its rows within {timeout_s:g} s{told}{where}")
        if self.dropped > self._reported:
            self._reported = self.dropped
            raise StoreError(f"the store refused {self.dropped} rows: {self._error}. What was stored before is intact.")

    def close(self, timeout_s: float = 60.0) -> None:
        """Commits what is waiting and closes. Safe to call twice.

        Raises:
            StoreError: see `flush`.
        """
        try:
            if self._writer.alive:
                self.flush(timeout_s)
        finally:
            if self._writer.end(5.0 if self._spill.rows else 0.0):
                self._spill.leave()
            self.engine.dispose()

    @property
    def waiting(self) -> int:
        """Rows that are not in the database yet, about."""
        return self._writer.waiting + self._keeper.waiting

    @property
    def behind(self) -> bool:
        """Whether what earlier processes left is not in the database yet."""
        return self._keeper.behind

    def never_wait(self) -> None:
        """From now on rows that come while too many wait, in memory and in the file, are dropped and counted: putting one never takes long. Those
        of a full disk wait too, where others are refused."""
        self._never_waits = True
        self._writer.refuse = partial(self._drop, 1)

    def _drop(self, count: int, table: str) -> None:
        self.dropped += count
        self.dropped_calls += count if table == "transitions" else 0
        self._error = self._error or StoreError("too many rows waited for it")

    def _commit(self, rows: Rows) -> bool:
        """Whether all that was put so far is in the database, or was refused by it."""
        made = {table: {key: row for key, given in of.items() if (row := self._made(table, given)) is not None} for table, of in rows.items()}
        return self._keeper.commit({table: of for table, of in made.items() if of})

    def _written(self, rows: Rows, *, patience_s: float) -> bool:
        """All rows in one transaction; where the database refuses it, row by row, so that one bad row costs only itself. False: it is away."""
        if (taken := self._try(rows, patience_s)) is None:
            return False
        for table, of in rows.items() if not taken else ():
            for row in of.values():
                if (taken := self._try({table: {0: row}}, patience_s)) is None:
                    return False  # those that were taken are written again, which changes nothing
                if not taken:
                    self._drop(1, table)
        return True

    def _spill_path(self) -> Path:
        """Next to the database, or where it is no file, in the project's folder."""
        if self.url.startswith("sqlite:///"):
            return Path(self.url.removeprefix("sqlite:///"))
        return Path(".assay", "spill", hashlib.sha256(self.url.encode()).hexdigest()[:16]).absolute()

    def _take_left_over(self) -> bool:
        """Writes what processes that are gone could not; False where the database is away."""
        for batches in left_over(self._spill_path()):
            for batch in batches:
                if not self._written(batch, patience_s=0.0):
                    return False
        return True

    def _made(self, table: str, row: Any) -> dict[str, Any] | None:
        """A row as it is written; None where it cannot be made, which is told like a row that the database refused."""
        try:
            made: dict[str, Any] = row() if isinstance(row, partial) else row
        except Exception as error:
            self._error = error
            self._drop(1, table)
            return None
        return made

    def _try(self, rows: Rows, patience_s: float) -> bool | None:
        """Whether the database took the rows; None where it is away, or another process holds its lock, for longer than `patience_s`."""
        tables = {"runs": schema.runs, "rollouts": schema.rollouts, "transitions": schema.transitions}
        until, wait = time.monotonic() + patience_s, 0.1
        while True:
            try:
                with self.engine.begin() as connection, self._short_waits(connection):
                    for name, table in tables.items():
                        if rows.get(name):
                            self._put_rows(connection, table, list(rows[name].values()))
                    make_changes(connection, rows)
                return True
            except Exception as error:  # whatever a driver raises, the writer must live; flush() reports what was dropped
                self._error = getattr(error, "orig", None) or error
                if not self._passes(error):
                    return False
                if time.monotonic() + wait > until:
                    return None
                time.sleep(wait)  # another process holds the lock, or the server is coming back
                wait *= 2

    @contextmanager
    def _short_waits(self, connection: sa.Connection) -> Iterator[None]:
        """In it, the lock of another process is not waited for long."""
        if self.engine.dialect.name != "sqlite":
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {_LOCKED_MS}")
            yield
            return
        connection.exec_driver_sql(f"PRAGMA busy_timeout={_LOCKED_MS}")
        try:
            yield
        finally:  # the connection goes back to a pool, from which others take it
            connection.exec_driver_sql(f"PRAGMA busy_timeout={_LOCKED_OTHERS_MS}")

    def _passes(self, error: Exception) -> bool:
        """Whether a database that raises this is away, locked or full for now, and may take the same rows later."""
        if not isinstance(error, sa.exc.DBAPIError):
            return False
        if isinstance(error.orig, sqlite3.Error):
            code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
            return code in _PASSING_SQLITE or (code == _FULL_SQLITE and self._never_waits)
        state = getattr(error.orig, "sqlstate", None) or ""
        return (error.connection_invalidated or isinstance(error, sa.exc.OperationalError)) and not state.startswith(_LASTING_POSTGRES)

    def _put_rows(self, connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
        """The upsert, compiled once a table and given to the driver as it is: twice the rows a second of `execute`."""
        if table.name not in self._upserts:
            compiled = upsert(self.engine.dialect.name, table).compile(dialect=self.engine.dialect)
            self._upserts[table.name] = (str(compiled), compiled.positiontup)
        statement, order = self._upserts[table.name]
        connection.exec_driver_sql(statement, rows if order is None else [tuple(row[name] for name in order) for row in rows])

    # -- people's labels: few, and each written before the next is asked for

    def put_label(
        self, question: str, item_id: str, rater: str, label: str, *, shown: Mapping[str, Any], rationale: str = "", rollout_id: str = ""
    ) -> None:
        """Keeps one rater's label of one item; a second one of the same replaces it.

        Raises:
            StoreError: the database refused it.
        """
        row = {
            "question": question, "item_id": item_id, "rater": clean(rater)[:200], "label": clean(label), "rationale": clean(known(rationale)),
            "shown_json": known(as_json(shown)), "rollout_id": rollout_id, "created_at": time.time(),
        }  # fmt: skip
        self._now(schema.labels, row)

    def labels(self, question: str) -> Iterator[dict[str, Any]]:
        """Ratings as rows of a labels file: `item_id`, what was shown, `rater`, `label`, `rationale`; oldest first."""
        table = schema.labels
        query = sa.select(table).where(table.c.question == question).order_by(table.c.created_at, table.c.item_id)
        with self.engine.connect() as connection:
            for row in connection.execute(query).mappings():
                kept = {name: row[name] for name in ("item_id", "rater", "label", "rationale")}
                yield {**json.loads(row["shown_json"]), **kept}

    def forget_rater(self, rater: str) -> int:
        """Removes all labels of a person, and returns how many there were."""
        with self.engine.begin() as connection:
            found = connection.execute(sa.delete(schema.labels).where(schema.labels.c.rater == clean(rater)[:200]))
        return int(found.rowcount)

    def rate(self, rollout_id: str, rating: float) -> None:
        """Keeps a person's rating of a rollout, in [0, 1]; a second one replaces it.

        Raises:
            ConfigError: out of range.
            StoreError: there is no such rollout.
        """
        if not 0 <= rating <= 1:
            raise ConfigError(f"rating={rating!r} must be between 0 and 1")
        self.flush()
        table = schema.rollouts
        with self.engine.begin() as connection:
            found = connection.execute(sa.update(table).where(table.c.id == rollout_id).values(human_rating=float(rating)))
        if not found.rowcount:
            raise UnknownRollout(f"there is no rollout {rollout_id!r}")

    def forget_subject(self, subject: str) -> int:
        """Removes all rollouts of a data subject with their transitions and labels, and returns how many rollouts there were.

        Case and spaces do not matter. What is written of them later, by a run that was under way or an import, is kept out of exports.
        """
        from assay.traces.erasure import erase_subject

        return erase_subject(self, subject).removed

    def forgotten(self) -> set[str]:
        """Digests (`subject_digest`) of the people who were forgotten."""
        with self.engine.connect() as connection:
            return set(connection.execute(sa.select(schema.forgotten.c.person)).scalars())

    def put_artifact(self, artifact: str, people: Sequence[str]) -> None:
        """Remembers whose data an artifact or an export was made from: by hashes of their names (`person_digest`)."""
        self._now(schema.made_from, {"artifact": artifact, "people_json": as_json(sorted(people)), "created_at": time.time()})

    def artifacts_of(self, person: str) -> list[str]:
        """What was made from somebody's data, by the hash of the name; oldest first."""
        table = schema.made_from
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(table.c.artifact, table.c.people_json).order_by(table.c.created_at)).all()
        return [artifact for artifact, people in rows if person in json.loads(people)]

    # -- what the store knows of splits, see `assay.traces.sealing`

    def put_meta(self, key: str, value: str) -> None:
        """Keeps a value of the store itself; one that is there stays."""
        self._now(schema.meta, {"key": key, "value": value}, replace=False)

    def put_splits(self, rows: Sequence[Mapping[str, str | None]]) -> None:
        """Keeps the splits of tasks. One that is sealed already stays sealed."""
        if rows:
            self._now(schema.known_tasks, *map(dict, rows))

    def put_opening(self, row: Mapping[str, Any]) -> None:
        """Keeps that a job opened test tasks."""
        self._now(schema.test_openings, dict(row))

    def _now(self, table: sa.Table, *rows: dict[str, Any], replace: bool = True) -> None:
        try:
            with self.engine.begin() as connection:
                connection.execute(upsert(self.engine.dialect.name, table, replace=replace), list(rows))
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the store did not take a row of {table.name}: {getattr(error, 'orig', error)}") from error

    # -- reading

    def rollouts(
        self, *, run_id: str | None = None, task_id: str | None = None, split: str | None = None, limit: int | None = None
    ) -> Iterator[Rollout]:
        """Rollouts without their transitions, newest first."""
        table = schema.rollouts
        query = sa.select(table).order_by(table.c.started_at.desc(), table.c.id.desc()).limit(limit)
        for column, value in ((table.c.run_id, run_id), (table.c.task_id, task_id), (table.c.split, split)):
            if value is not None:
                query = query.where(column == value)
        with self.engine.connect() as connection:
            for row in connection.execution_options(yield_per=500).execute(query).mappings():
                yield rollout_of(row)

    def rollout(self, id_prefix: str) -> Rollout:
        """One rollout with its transitions, by the start of its id.

        Raises:
            StoreError: no rollout's id starts so, or several do.
        """
        table, steps = schema.rollouts, schema.transitions
        with self.engine.connect() as connection:
            found = connection.execute(sa.select(table).where(*self._starts_with(table.c.id, id_prefix)).limit(2)).mappings()
            rows = list(found)
            if not rows:
                raise UnknownRollout(f"no rollout's id starts with {id_prefix!r}")
            if len(rows) > 1:
                raise StoreError(f"more than one rollout's id starts with {id_prefix!r}")
            rollout = rollout_of(rows[0])
            query = sa.select(steps).where(steps.c.rollout_id == rollout.id).order_by(steps.c.t)
            rollout.transitions = [transition_of(row) for row in connection.execute(query).mappings()]
        return rollout

    def _starts_with(self, column: Any, prefix: str) -> list[Any]:
        """As conditions that an index serves: SQLite makes no range of LIKE, PostgreSQL does (`rollouts_by_prefix`)."""
        like = column.startswith(prefix, autoescape=True)
        return [column >= prefix, column <= prefix + _LAST, like] if self.engine.dialect.name == "sqlite" else [like]

    def runs(self, key: str) -> list[tuple[str, str]]:
        """Ids and statuses of the runs of one job, oldest first."""
        self.flush()
        table = schema.runs
        query = sa.select(table.c.id, table.c.status).where(*self._starts_with(table.c.id, f"{key}-")).order_by(table.c.started_at)
        with self.engine.connect() as connection:
            return [(row.id, row.status) for row in connection.execute(query)]

    def spent(self, run_id: str) -> dict[str, Usage]:
        """What a run has spent so far, by phase: how a resumed run knows where it stands under its caps."""
        r, t = schema.rollouts, schema.transitions
        asked = sa.case((t.c.cached, 0), else_=1)
        query = (
            sa.select(
                r.c.phase, sa.func.sum(asked), sa.func.sum(asked * sa.func.coalesce(t.c.prompt_tokens, 0)),
                sa.func.sum(asked * sa.func.coalesce(t.c.completion_tokens, 0)), sa.func.sum(asked * sa.func.coalesce(t.c.cost_usd, 0.0)),
                sa.func.sum(sa.case((sa.and_(t.c.cost_usd.is_(None), t.c.error.is_(None)), asked), else_=0)),
            ).select_from(t.join(r, r.c.id == t.c.rollout_id)).where(r.c.run_id == run_id).group_by(r.c.phase)
        )  # fmt: skip
        with self.engine.connect() as connection:
            rows = connection.execute(query).all()
        return {
            phase or "search": Usage(
                calls=int(calls), prompt_tokens=int(prompt), completion_tokens=int(completion), cost_usd=float(cost), unpriced=int(unpriced)
            )
            for phase, calls, prompt, completion, cost, unpriced in rows
        }

    def unrecorded(self, run_id: str) -> Unrecorded:
        """LM calls of a run that went past the recorder, as far as it was written when it ended."""
        columns = schema.runs.c.unseen, schema.runs.c.unrecorded_reason
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(*columns).where(schema.runs.c.id == run_id)).first()
        return Unrecorded() if row is None else Unrecorded(int(row[0] or 0), row[1])

    def stats(self, *, run_id: str | None = None) -> dict[str, Any]:
        """Counts of the store, or of one run; see `assay.traces.counts.stats`."""
        with self.engine.connect() as connection:
            return counts.stats(lambda statement, values: connection.execute(sa.text(statement), dict(values)).all(), run_id)


def sqlite_pragmas(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={_LOCKED_OTHERS_MS}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
