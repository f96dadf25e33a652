"""The store: SQLite in WAL mode by default, PostgreSQL by a URL, the same schema and calls on both.

One background thread commits the writes in batches, at least every 0.25 s; a rollout never waits for the disk. A killed
process loses at most what was put in the last second, also while the database is locked or unreachable: rows then wait
in a file (`assay.traces.store.writer`). Queries and writes of single rows are here too.
"""

import itertools
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.errors import ConfigError, StoreError, UnknownRollout
from assay.models.meter import Usage
from assay.models.unrecorded import NOTHING, Unrecorded
from assay.support.report import count_refused, waiting
from assay.support.scrubbing import fields, mask_secrets, message, results
from assay.traces.records import Rollout, Transition, of_tenant, subject_digest
from assay.traces.store import counts, tables as schema
from assay.traces.store.connection import end_if_paused, is_full, open_engine, passes, short_waits, store_id
from assay.traces.store.leases import TAKEN_OVER, Lease, LostLease, holds, late_rows
from assay.traces.store.location import store_address
from assay.traces.store.rows import as_json, clean, rollout_of, rollout_row, transition_of, transition_row
from assay.traces.store.tables import transitions
from assay.traces.store.turns import SharedClock, in_order, lock_names, with_turns
from assay.traces.store.upserts import begin_rollouts, make_changes, put_answers, upsert
from assay.traces.store.writer import Keeper, Owner, Rows, Spill, Writer, leftover_batches, rows_waiting, spill_path

# -- What calls cost, in queries. Cached answers cost nothing, and a failed call has no price.


_columns = transitions.c
PAID = sa.case((_columns.cached, 0.0), else_=sa.func.coalesce(_columns.cost_usd, 0.0))  # dollars
# 1 where the price is not known
UNPRICED = sa.case((sa.or_(_columns.cached, _columns.cost_usd.is_not(None), _columns.error.is_not(None)), 0), else_=1)

# -- Queries of the store: rollouts, runs, usage, labels, erased data subjects. Does not write.
#
# Lists with filters are in `assay.traces.store.listing`, counts in `assay.traces.store.counts`.


QUESTION = "question:"  # prefix of keys in `meta`
_LAST = "\U0010ffff"  # the greatest code point: sorts after every other character


class Forgotten(frozenset[str]):
    """Digests of erased data subjects, of all tenants or of one."""

    def covers(self, subject: str | None, tenant: str | None) -> bool:
        """Whether rows of a subject (`subject_digest`) and tenant are erased."""
        if subject is None or not self:
            return False
        return subject in self or (tenant is not None and of_tenant(subject, tenant) in self)


class StoreReads:
    """The part of `Store` that reads. Needs `engine` and, for `runs`, `flush`."""

    engine: sa.Engine
    clock: SharedClock

    def flush(self, timeout_s: float = 60.0) -> None:
        """Returns once everything put before is committed; see `Store.flush`."""
        raise NotImplementedError

    def rollouts(
        self,
        *,
        run_id: str | None = None,
        task_id: str | None = None,
        split: str | None = None,
        limit: int | None = None,
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
        """One rollout with its transitions, by a prefix of its id.

        Raises:
            StoreError: no rollout's id starts with the prefix, or several do.
        """
        table, steps = schema.rollouts, schema.transitions
        with self.engine.connect() as connection:
            query = sa.select(table).where(*self._starts_with(table.c.id, id_prefix)).limit(2)
            rows = list(connection.execute(query).mappings())
            if not rows:
                raise UnknownRollout(f"no rollout's id starts with {id_prefix!r}")
            if len(rows) > 1:
                raise StoreError(f"more than one rollout's id starts with {id_prefix!r}")
            rollout = rollout_of(rows[0])
            query = sa.select(steps).where(steps.c.rollout_id == rollout.id).order_by(steps.c.t)
            rollout.transitions = [transition_of(row) for row in connection.execute(query).mappings()]
        return rollout

    def _starts_with(self, column: Any, prefix: str) -> list[Any]:
        """Conditions that select a prefix through an index.

        SQLite does not use an index for LIKE, so it gets a range; PostgreSQL does (`rollouts_by_prefix`).
        """
        like = column.startswith(prefix, autoescape=True)
        return [column >= prefix, column <= prefix + _LAST, like] if self.engine.dialect.name == "sqlite" else [like]

    def runs(self, key: str, separator: str = "-") -> list[tuple[str, str]]:
        """IDs and statuses of the runs of one job, by their numbers: clocks of machines may differ.

        Args:
            separator: follows the key; a dot in the ids of the parts of a larger job.
        """
        self.flush()
        table = schema.runs
        query = (
            sa.select(table.c.id, table.c.status)
            .where(*self._starts_with(table.c.id, f"{key}{separator}"))
            .order_by(sa.func.length(table.c.id), table.c.id)
        )
        with self.engine.connect() as connection:
            return [(row.id, row.status) for row in connection.execute(query)]

    def run_row(self, run_id: str) -> dict[str, Any]:
        """The stored row of a run."""
        self.flush()
        with self.engine.connect() as connection:
            query = sa.select(schema.runs).where(schema.runs.c.id == run_id)
            return dict(connection.execute(query).mappings().one())

    def states(self, *jobs: str) -> dict[str, dict[str, Any]]:
        """What `put_state` has stored of these jobs."""
        table = schema.job_states
        query = sa.select(table.c.job, table.c.state_json).where(table.c.job.in_(jobs))
        with self.engine.connect() as connection:
            return {job: json.loads(text) for job, text in connection.execute(query)}

    def spent(self, run_id: str) -> dict[str, Usage]:
        """Usage of a run so far, by phase. A resumed run counts it against its caps; cached answers cost nothing."""
        r, t = schema.rollouts, schema.transitions
        uncached = sa.case((t.c.cached, 0), else_=1)
        query = (
            sa.select(
                r.c.phase,
                sa.func.sum(uncached),
                sa.func.sum(uncached * sa.func.coalesce(t.c.prompt_tokens, 0)),
                sa.func.sum(uncached * sa.func.coalesce(t.c.completion_tokens, 0)),
                sa.func.sum(PAID),
                sa.func.sum(UNPRICED),
            )
            .select_from(t.join(r, r.c.id == t.c.rollout_id))
            .where(r.c.run_id == run_id)
            .group_by(r.c.phase)
        )
        with self.engine.connect() as connection:
            rows = connection.execute(query).all()
        return {
            phase or "search": Usage(
                calls=int(calls), prompt_tokens=int(prompt), completion_tokens=int(completion), cost_usd=float(cost),
                unpriced=int(unpriced),
            )
            for phase, calls, prompt, completion, cost, unpriced in rows
        }  # fmt: skip

    def unrecorded(self, run_id: str) -> Unrecorded:
        """LM calls of a run that bypassed the recorder, as written when the run ended."""
        columns = schema.runs.c.unseen, schema.runs.c.unrecorded_reason, schema.runs.c.lost
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(*columns).where(schema.runs.c.id == run_id)).first()
        return Unrecorded() if row is None else Unrecorded(int(row[0] or 0), row[1], lost=int(row[2] or 0))

    def stats(self, *, run_id: str | None = None) -> dict[str, Any]:
        """Counts of the store, or of one run; see `assay.traces.store.counts.stats`."""
        with self.engine.connect() as connection:
            return counts.stats(
                lambda statement, values: connection.execute(sa.text(statement), dict(values)).all(), run_id
            )

    def labels(self, question: str) -> Iterator[dict[str, Any]]:
        """Labels of a question as rows of a labels file, oldest first.

        Each row holds `item_id`, the shown fields, `rater`, `label` and `rationale`.
        """
        table = schema.labels
        query = sa.select(table).where(table.c.question == question).order_by(table.c.created_at, table.c.item_id)
        with self.engine.connect() as connection:
            for row in connection.execute(query).mappings():
                columns = {name: row[name] for name in ("item_id", "rater", "label", "rationale")}
                yield {**json.loads(row["shown_json"]), **columns}

    def labelled_subjects(self, question: str) -> set[str]:
        """Names of the data subjects whose rollouts have a label of this question."""
        r, labels = schema.rollouts, schema.labels
        query = sa.select(r.c.data_subject).distinct().select_from(labels.join(r, labels.c.rollout_id == r.c.id))
        query = query.where(labels.c.question == question, r.c.data_subject.is_not(None))
        with self.engine.connect() as connection:
            return set(connection.execute(query).scalars())

    def questions(self) -> dict[str, str]:
        """Questions that raters can answer, as JSON by key; see `assay.judges.questions`."""
        table = schema.meta
        query = sa.select(table.c.key, table.c.value).where(table.c.key.startswith(QUESTION))
        with self.engine.connect() as connection:
            return {key.removeprefix(QUESTION): value for key, value in connection.execute(query).all()}

    def forgotten(self) -> Forgotten:
        """The erased data subjects."""
        with self.engine.connect() as connection:
            return Forgotten(connection.execute(sa.select(schema.forgotten.c.person)).scalars())

    def artifacts(self) -> list[str]:
        """Artifacts, exports, data sets and reports that were made of data of the store, oldest first."""
        table = schema.made_from
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(table.c.artifact).order_by(table.c.created_at)).scalars())

    def artifacts_of(self, *person: str) -> list[str]:
        """Artifacts and exports made from a person's data (`person_digest` of each form of the name), oldest first."""
        table = schema.made_from
        with self.engine.connect() as connection:
            rows = connection.execute(
                sa.select(table.c.artifact, table.c.people_json).order_by(table.c.created_at)
            ).all()
        return [artifact for artifact, people in rows if not set(person).isdisjoint(json.loads(people))]


# -- Rows that the store writes at once, not in batches: labels, ratings, artifacts, splits, openings of the test split.
#
# They are few, and the caller depends on them: an error is raised here, not reported by a later `flush`.


_RATER_CHARS = 200  # the width of the column `labels.rater`


class DirectWrites(StoreReads):
    """The part of `Store` that writes single rows in transactions of their own."""

    lease: Lease | None = None  # of the job that has this store

    def put_label(
        self,
        question: str,
        item_id: str,
        rater: str,
        label: str,
        *,
        fields: Mapping[str, Any],
        rationale: str = "",
        rollout_id: str = "",
    ) -> None:
        """Stores one rater's label of one item. A second label of the same rater and item replaces it.

        Raises:
            StoreError: the database refused it.
        """
        row = {"question": question, "item_id": item_id, "rater": clean(rater)[:_RATER_CHARS], "label": clean(label)}
        told = {"rationale": clean(mask_secrets(rationale)), "shown_json": mask_secrets(as_json(fields))}
        self._now(schema.labels, {**row, **told, "rollout_id": rollout_id, "created_at": self.clock.now()})

    def withdraw_label(self, question: str, item_id: str, rater: str) -> bool:
        """Removes one rater's label of one item. Returns whether there was one."""
        labels = schema.labels.c
        return bool(self._without_labels(rater, labels.question == question, labels.item_id == item_id))

    def forget_rater(self, rater: str) -> int:
        """Removes all labels of a rater. Returns their number."""
        return self._without_labels(rater)

    def _without_labels(self, rater: str, *conditions: sa.ColumnElement[bool]) -> int:
        of_rater = schema.labels.c.rater == clean(rater)[:_RATER_CHARS]
        with self.engine.begin() as connection:
            return int(connection.execute(sa.delete(schema.labels).where(of_rater, *conditions)).rowcount)

    def rate(self, rollout_id: str, rating: float) -> None:
        """Stores a human rating of a rollout, in [0, 1]. A second rating replaces the first.

        Raises:
            ConfigError: `rating` is out of range.
            UnknownRollout: no rollout has this id.
        """
        if not 0 <= rating <= 1:
            raise ConfigError(f"`rating={rating!r}` must be between 0 and 1")
        self.flush()
        table = schema.rollouts
        with self.engine.begin() as connection:
            result = connection.execute(
                sa.update(table).where(table.c.id == rollout_id).values(human_rating=float(rating))
            )
        if not result.rowcount:
            raise UnknownRollout(f"there is no rollout {rollout_id!r}")

    def put_artifact(self, artifact: str, people: Sequence[str]) -> None:
        """Stores whose data an artifact or an export was made from, as hashes of names (`person_digest`)."""
        self._now(schema.made_from, self._made_from(artifact, people))

    def put_searched(self, *paths: Path) -> None:
        """Stores files in which an erasure looks for texts of the person. What is known of their people stays."""
        if paths:
            self._now(schema.made_from, *(self._made_from(str(path.resolve()), []) for path in paths), replace=False)

    def put_report(self, path: str | Path, *runs: str) -> None:
        """Stores that a file shows tasks of these runs, with hashes of their data subjects. Call it before writing."""
        self.flush()
        r = schema.rollouts
        query = sa.select(r.c.data_subject).where(r.c.run_id.in_(runs), r.c.data_subject.is_not(None)).distinct()
        with self.engine.connect() as connection:
            people = {subject_digest(name) for name in connection.execute(query).scalars()}
        self.put_artifact(str(Path(path).resolve()), sorted(people))

    def put_meta(self, key: str, value: str) -> None:
        """Stores a value of the store itself. An existing value is not replaced."""
        self._now(schema.meta, {"key": key, "value": value}, replace=False)

    def put_question(self, key: str, question: Mapping[str, Any]) -> None:
        """Stores a question that raters can answer; it replaces an earlier one with this key."""
        self._now(schema.meta, {"key": f"{QUESTION}{key}", "value": as_json(question)})

    def put_splits(self, rows: Sequence[Mapping[str, str | None]]) -> None:
        """Stores the splits of tasks. A task that has one keeps it."""
        if rows:
            self._now(schema.known_tasks, *map(dict, rows))

    def put_opening(self, row: Mapping[str, Any]) -> None:
        """Stores that a job opened test tasks."""
        self._now(schema.test_openings, dict(row))

    def reserve_run(self, run_id: str, *, kind: str, started_at: float) -> bool:
        """Takes the id of a run; False if there is a run of this id."""
        row = {"id": run_id, "kind": kind, "config": "{}", "status": "running", "started_at": started_at}
        try:
            with self.changing() as connection:
                connection.execute(sa.insert(schema.runs).values(**row))
        except sa.exc.IntegrityError:
            return False
        return True

    @contextmanager
    def changing(self) -> Iterator[sa.Connection]:
        """A transaction of the job that has this store.

        Raises:
            LostLease: another process has taken the job over; nothing is written.
        """
        with self.engine.begin() as connection:
            end_if_paused(connection)
            if self.lease is not None and not holds(connection, self.lease.owner):
                self.lease.lost = True
                raise LostLease(f"{TAKEN_OVER}: nothing more is written")
            yield connection

    def _now(self, table: sa.Table, *rows: dict[str, Any], replace: bool = True) -> None:
        try:
            with self.changing() as connection:
                connection.execute(upsert(self.engine.dialect.name, table, replace=replace), list(rows))
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(
                f"the store did not take a row of {table.name}: {getattr(error, 'orig', error)}"
            ) from error

    def _made_from(self, artifact: str, people: Sequence[str]) -> dict[str, Any]:
        return {"artifact": artifact, "people_json": as_json(sorted(people)), "created_at": self.clock.now()}


# -- Store.


MAX_SPILL_BYTES = 1 << 30  # bytes that may wait in a file while the database is unreachable
PATIENCE_S = 0.3  # of retries before the database counts as unreachable
_FULL_S = 3.0  # of waiting for a full disk
ROOM_BYTES = 512 << 10  # of disk for the last rows of a run
RETRY_S = 0.5  # between two attempts while it is unreachable
# Entries of a batch whose rows are inserted, and the table of each; `begun` are rollouts that a gateway begins.
_TABLES = {
    "runs": schema.runs, "states": schema.job_states, "begun": schema.rollouts, "rollouts": schema.rollouts,
    "transitions": schema.transitions,
}  # fmt: skip


class Store(DirectWrites):
    """Rollouts and transitions, for any number of threads and processes.

    Raises:
        ConfigError: `where` is neither text nor a path.
        StoreError: the database cannot be opened, or another version of assay wrote it.
    """

    def __init__(self, where: str | Path | None = None) -> None:
        if not isinstance(where, str | Path | None):
            raise ConfigError(f"where={where!r} must be a database's file or URL")
        self.address = store_address(where)
        self.dropped = 0  # rows that the database refused (a full disk); the run continues and reports them
        self.dropped_calls = 0  # transitions among them
        self.full = False  # rows were refused because the disk is full
        self.left = 0  # rows that waited in the file when the store was closed
        self._numbers = itertools.count()
        self._error: Exception | None = None
        self._reported = 0
        self._statements: dict[str, tuple[str, list[str] | None]] = {}
        self.engine = open_engine(self.address)
        self.id = store_id(self.engine)
        self.clock = SharedClock(self.engine)
        self._spill_path = spill_path(self.address.file, self.id)
        self.spill = Spill(self._spill_path, MAX_SPILL_BYTES)
        self._never_waits = self._closed = False
        self._rooms: list[Path] = []
        self._refused: set[tuple[str, Any]] = set()  # table and key of rows
        self.on_ended: Callable[[str], None] | None = None
        self._keeper = Keeper(
            self.spill, partial(self.write_batch, patience_s=PATIENCE_S), self._write_leftovers, retry_s=RETRY_S
        )
        self._note_waiting()
        self._writer = Writer(self._commit, unreachable=self.behind)

    def belong_to(self, lease: Lease) -> None:
        """From now on what is written belongs to the job of a lease: once it is lost, no row is changed any more."""
        self.lease, self.spill.owner = lease, lease.owner

    @property
    def obstacle(self) -> str | None:
        """Why the job that has this store can make no further call; None if it can."""
        return TAKEN_OVER if self.lease is not None and self.lease.lost else None

    @property
    def url(self) -> str:
        """The address with its password, to open the store again."""
        return self.address.url

    def __deepcopy__(self, memo: object) -> "Store":
        return self

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- writing
    def put_rollout(self, rollout: Rollout, *, interim: bool = False) -> None:
        """Inserts or replaces the rollout's row. Its transitions are put one by one.

        Args:
            interim: the rollout is put again soon, so the row is built only if a batch is written before that. It
                then holds the present fields; mutable values may have changed meanwhile.
        """
        values = {**vars(rollout), "transitions": None, "answered_at": None}
        self._writer.put("rollouts", rollout.id, partial(rollout_row, values) if interim else rollout_row(values))
        self._tell_ended(rollout.id, rollout.ended_at)

    def _tell_ended(self, rollout_id: str, ended_at: float | None) -> None:
        if self.on_ended is not None and ended_at is not None:
            self.on_ended(rollout_id)

    def begin_rollout(self, rollout: Rollout) -> None:
        """Inserts a rollout that a gateway begins. Where another one began it too, the earlier beginning is stored."""
        row = rollout_row({**vars(rollout), "transitions": None, "answered_at": None})
        self._writer.put("begun", rollout.id, row, size=len(row["inputs_json"]))

    def put_changes(self, rollout_id: str, values: Mapping[str, Any], *, only: str = "", at: float = 0.0) -> None:
        """Updates fields of a rollout that is in the store or was put before, and that others may change too.

        Args:
            only, at: on which condition, see `assay.traces.store.upserts`.
        """
        row = rollout_row({**values, "transitions": None})
        change = {"id": rollout_id, "values": row, "only": only, "at": at}
        # Every change has a key of its own: a later one may leave out a field that an earlier one of the batch changes.
        key = (rollout_id, next(self._numbers))
        self._writer.put("changes", key, change, size=len(row.get("prediction_json") or ""))
        self._tell_ended(rollout_id, values.get("ended_at"))

    def put_answer(self, rollout_id: str, prediction: Mapping[str, Any] | None, at: float) -> None:
        """Sets the prediction of a rollout of a gateway, unless another gateway has had a later answer.

        Args:
            at: the time of the answer.
        """
        row = rollout_row({"prediction": prediction, "transitions": None})
        answer = {"rollout": rollout_id, "prediction": row["prediction_json"], "at": at}
        self._writer.put("answers", rollout_id, answer, size=len(answer["prediction"] or ""))

    def put_keys(self, rollout_id: str, keys: Collection[str]) -> None:
        """Adds keys by which other gateways find the rollout: its conversation continues at one of them."""
        for key in keys:
            self._writer.put("keys", (key, rollout_id), {"key": key, "rollout_id": rollout_id})

    def put_tool_result(
        self, rollout_id: str, call: str | int, index: int, result: str, *, failed: bool = False
    ) -> None:
        """Adds the result of a tool call to a transition that was put before, unless the tool call has an error.

        Args:
            call: `Transition.key`.
            index: position of the tool call among those of the transition, from 0.
            failed: the result is an error.
        """
        field = "error" if failed else "result"
        row = {"rollout_id": rollout_id, "call": call, "at": index, "field": field, "text": clean(result)}
        self._writer.put("results", (rollout_id, call, index), row, size=len(result))

    def put_step_reward(self, rollout_id: str, call: str | int, criterion: str, value: float) -> None:
        """Adds a step reward to a transition that was put before. A second one of the same criterion replaces it.

        Args:
            call: `Transition.key`.
        """
        row = {"rollout_id": rollout_id, "call": call, "criterion": clean(criterion), "value": value}
        self._writer.put("rewards", (rollout_id, call, criterion), row)

    def put_transition(self, rollout_id: str, transition: Transition, *, request_json: str | None = None) -> None:
        """Inserts or replaces one transition. If it has an id, the store gives it its turn, see
        `assay.traces.store.turns`.

        Args:
            request_json: the request as `as_json` writes it, without credential fields, if the caller has it already.
        """
        row = transition_row(vars(transition), request_json=request_json)
        row["rollout_id"] = rollout_id
        size = len(row["request_json"]) + len(row["response_json"] or "")
        self._writer.put("transitions", (rollout_id, transition.key), row, size=size)

    def trim(self, rollout_id: str, keep: int) -> None:
        """Removes the rollout's transitions with t >= `keep`, which belong to an attempt that a replay overwrote."""
        self._writer.put("trims", rollout_id, {"id": rollout_id, "keep": keep})

    def put_run(
        self,
        run_id: str,
        *,
        kind: str,
        config: dict[str, Any],
        status: str,
        started_at: float,
        unrecorded: Unrecorded = NOTHING,
        failure: str | None = None,
    ) -> None:
        """Inserts or replaces the row of a run.

        Args:
            status: running, done, stopped or failed.
            started_at: start of the process. One that resumes a run leaves the run's first start as it is.
            unrecorded: LM calls that bypassed the recorder.
            failure: why the run did not end well.
        """
        ended = None if status == "running" else self.clock.now()
        reason = None if unrecorded.reason is None else message(unrecorded.reason)
        row = {"id": run_id, "kind": kind, "config": as_json(fields(config)), "status": status, "failure": failure}
        times = {"started_at": started_at, "ended_at": ended, "resumed_at": None}
        missed = {"unseen": unrecorded.seen - unrecorded.lost, "unrecorded_reason": reason, "lost": unrecorded.lost}
        self._writer.put("runs", run_id, {**row, **missed, **times})

    def put_state(self, job: str, state: Mapping[str, Any]) -> None:
        """Inserts or replaces what other machines need of a job."""
        row = {"job": job, "state_json": as_json(results(state))}
        self._writer.put("states", job, row, size=len(row["state_json"]))

    def put_run_back(self, row: Mapping[str, Any]) -> None:
        """Writes the row of a run as `run_row` has read it, for a process that resumed the run and ran nothing.

        Raises:
            StoreError: the database did not take it.
        """
        self.flush()
        table = schema.runs
        try:
            with self.changing() as connection:
                connection.execute(sa.update(table).where(table.c.id == row["id"]).values(row))
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the store did not take the row of a run: {getattr(error, 'orig', error)}") from error

    def flush(self, timeout_s: float = 60.0) -> None:
        """Returns once everything put before is committed.

        Raises:
            StoreError: the database refused rows, or did not answer in time.
        """
        if not self._writer.alive:
            raise StoreError(
                f"the writer of the store {self.address.shown!r} has ended; rows that were waiting are lost"
            )
        if self.full and not self._never_waits:
            timeout_s = min(timeout_s, _FULL_S)  # nobody waits for space
        if not self._writer.flush(timeout_s):
            text = f"the store {self.address.shown!r} did not take its rows within {timeout_s:g} s"
            text += f": {self._error}." if self._error else "."
            if self.spill.rows:
                text += f" {self.spill.rows} wait in {self.spill.path} and are written when the store is opened again."
            raise StoreError(text)
        if self.dropped > self._reported:
            self._reported = self.dropped
            raise StoreError(f"the store refused {self.dropped} rows: {self._error}. What was stored before is intact.")

    def written(self, timeout_s: float) -> bool:
        """Waits until everything put before is committed or refused. False if it took longer than `timeout_s`."""
        return self._writer.alive and self._writer.flush(timeout_s)

    def settle(self) -> None:
        """As `flush`, but rows that the database refuses are only counted: for reports of what was stored."""
        with suppress(StoreError):
            self.flush()

    def close(self, timeout_s: float = 60.0) -> None:
        """Commits the waiting rows and closes the store. Safe to call twice.

        Raises:
            StoreError: see `flush`.
        """
        closed_before, self._closed = self._closed, True
        if self._rooms:
            self.use_room(whole=True)
        try:
            if self._writer.alive and not closed_before:  # a writer that is ending does not answer another flush
                self.flush(timeout_s)
        finally:
            if self._writer.end(5.0 if self.spill.rows or self.full else 0.0):
                self.spill.leave()
            if not closed_before:
                self._count_waiting()
                self._note_waiting()
            self.engine.dispose()

    def _note_waiting(self) -> None:
        """Counts the rows of other processes that wait in files for this store."""
        waiting[f"{self._spill_path}.*"] = rows_waiting(self._spill_path, but=self.spill.path)

    def _count_waiting(self) -> None:
        """Counts the rows that the database did not take until the end: those in the file wait, the others are lost."""
        self.left = self.spill.rows
        self.dropped += self.waiting - self.left
        self.dropped_calls += self._calls_waiting
        count_refused(rows=self.waiting)

    @property
    def not_stored(self) -> int:
        """Rows that the database did not take: refused, or left behind when the store was closed."""
        return self.dropped + self.left

    @property
    def calls_not_stored(self) -> int:
        """Transitions that are lost; while the disk is full, also those that wait in memory."""
        return self.dropped_calls + (self._calls_waiting if self.full and not self._closed else 0)

    @property
    def _calls_waiting(self) -> int:
        return self._writer.calls_waiting + self._keeper.calls_in_hand

    @property
    def waiting(self) -> int:
        """Approximate number of rows that are not in the database yet."""
        return self._writer.waiting + self._keeper.waiting

    @property
    def behind(self) -> bool:
        """Whether rows left by earlier processes are not in the database yet."""
        return self._keeper.behind

    def never_wait(self) -> None:
        """From now on putting a row never blocks: rows that come while too many wait are dropped and counted.

        Rows that a full disk does not take wait as well; without this mode they are dropped.
        """
        self._never_waits = True
        self._writer.refuse = partial(self._drop, 1)

    def keep_room(self) -> None:
        """Sets disk space aside, next to an SQLite file. On a full disk, half of it takes the rows in flight when the
        first row is refused, and the other half what is written after `use_room`."""
        file = self.address.file
        if file is None:
            return
        self._rooms = [Path(f"{file}.room{number}") for number in (1, 2)]
        with suppress(OSError):
            for room in self._rooms:
                room.write_bytes(bytes(ROOM_BYTES // 2))

    def use_room(self, *, whole: bool = False) -> None:
        """Gives half of the space that `keep_room` set aside back, or all that is left of it, and that of the WAL."""
        rooms, self._rooms = (self._rooms, []) if whole else (self._rooms[:1], self._rooms[1:])
        for room in rooms:
            with suppress(OSError):
                room.unlink()
        if self.engine.dialect.name == "sqlite":
            with suppress(sa.exc.SQLAlchemyError), self.engine.connect() as connection, short_waits(connection):
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def _drop(self, count: int, table: str) -> None:
        self.dropped += count
        count_refused(rows=count)
        self.dropped_calls += count if table == "transitions" else 0
        self._error = self._error or StoreError("too many rows were waiting for the database")

    def _commit(self, rows: Rows) -> bool:
        """Commits a batch. True if the database has taken or refused every row put so far."""
        built = {
            table: {key: row for key, item in by_key.items() if (row := self._built(table, item)) is not None}
            for table, by_key in rows.items()
        }
        return self._keeper.commit({table: by_key for table, by_key in built.items() if by_key})

    def write_batch(self, rows: Rows, *, patience_s: float, owner: Owner | None = None) -> bool:
        """Writes all rows in one transaction. False if the database is unreachable.

        Once another process has taken over the job of the rows' owner, by default this process, only its answered calls
        are written, see `assay.traces.store.leases`. If the database refuses the transaction, the rows are written one
        by one, so that one bad row costs only itself.
        """
        owner = owner or self.spill.owner
        if (accepted := self._try(rows, patience_s, owner)) is None:
            return False
        for table, by_key in rows.items():
            for key, row in by_key.items() if not accepted or self._refused else ():
                taken: bool | None = accepted
                if not accepted and (taken := self._try({table: {key: row}}, patience_s, owner)) is None:
                    return False  # rows that were accepted are written again later, which changes nothing
                self._count(table, key, taken=bool(taken))
        return True

    def _count(self, table: str, key: Any, *, taken: bool) -> None:
        """Counts a refused row once, and no longer if it is taken after all."""
        if taken == ((table, key) in self._refused):
            self._refused.symmetric_difference_update({(table, key)})
            self._drop(-1 if taken else 1, table)

    def _write_leftovers(self) -> bool:
        """Writes the rows that ended processes left in files. False if the database is unreachable.

        Raises:
            StoreError: another version of assay left them; the file is kept.
        """
        path = self._spill_path
        for batches in leftover_batches(path):
            for owner, batch in batches:
                rows = [(table, row) for name, table in _TABLES.items() for row in batch.get(name, {}).values()]
                if any(row.keys() != set(table.columns.keys()) for table, row in rows):
                    raise StoreError(
                        f"a file {path}.*.spill has rows that another version of assay left, and this version has "
                        "other columns. Move the file away: its rows are then not in the store"
                    )
                if not self.write_batch(batch, patience_s=0.0, owner=owner):
                    return False
                count_refused(recovered=sum(map(len, batch.values())))
        return True

    def _built(self, table: str, item: Any) -> dict[str, Any] | None:
        """The row as it is written. None if it cannot be built, which counts as a row that the database refused."""
        try:
            row: dict[str, Any] = item() if isinstance(item, partial) else item
        except Exception as error:
            self._error = error
            self._drop(1, table)
            return None
        return row

    def _try(self, rows: Rows, patience_s: float, owner: Owner | None) -> bool | None:
        """Whether the database took the rows. None if it is unreachable or locked for longer than `patience_s`."""
        until, wait = time.monotonic() + patience_s, 0.1
        while True:
            try:
                with self.engine.begin() as connection, short_waits(connection):
                    written = rows
                    if owner is not None and not holds(connection, owner):
                        written = late_rows(connection, rows, owner)
                        if self.lease is not None and self.lease.owner == owner:
                            self.lease.lost = True
                    self._write(connection, written)
                return True
            except Exception as error:  # the writer must survive any driver error; flush() reports what was dropped
                self._error = getattr(error, "orig", None) or error
                if not self.full and is_full(error):
                    self.full = True
                    count_refused(full_disks=1)
                    self.use_room()
                    continue
                if not passes(error, full_passes=self._never_waits):
                    return False
                if time.monotonic() + wait > until:
                    return None
                time.sleep(wait)  # another process holds the lock, or the server is coming back
                wait *= 2

    def _write(self, connection: sa.Connection, rows: Rows) -> None:
        """Makes the inserts and changes of a batch."""
        calls = list(rows.get("transitions", {}).values())
        unnumbered = [row for row in calls if row["id"] is not None]
        shared = {row["rollout_id"] for row in unnumbered} | set(rows.get("begun", ()))
        shared |= {change["id"] for change in rows.get("changes", {}).values()} | set(rows.get("answers", ()))
        if shared:
            lock_names(connection, shared)
        own = {name: list(rows.get(name, {}).values()) for name in ("runs", "states", "begun", "rollouts")}
        for name, inserted in (own | {"transitions": [row for row in calls if row["id"] is None]}).items():
            if inserted:
                self._write_rows(connection, name, inserted)
        if unnumbered:
            numbered, late = with_turns(connection, unnumbered)
            self._write_rows(connection, "numbered", numbered)
            for rollout in sorted(late):
                in_order(connection, rollout)
        make_changes(connection, rows)
        if answers := list(rows.get("answers", {}).values()):
            self._write_rows(connection, "answers", answers)

    def _write_rows(self, connection: sa.Connection, name: str, rows: list[dict[str, Any]]) -> None:
        """Writes rows with a statement compiled once per entry: twice the rows per second of `Connection.execute`.

        Args:
            name: entry of the batch; `numbered`: transitions whose turns the store gives.
        """
        if name not in self._statements:
            dialect, table = self.engine.dialect, _TABLES.get(name, schema.transitions)
            if name == "answers":
                made = put_answers()
            elif name == "begun":
                made = begin_rollouts(dialect.name)
            else:
                made = upsert(dialect.name, table, by_id=name == "numbered")
            compiled = made.compile(dialect=dialect)
            self._statements[name] = (str(compiled), compiled.positiontup)
        statement, order = self._statements[name]
        connection.exec_driver_sql(
            statement, rows if order is None else [tuple(row[name] for name in order) for row in rows]
        )
