"""Queries of the store: rollouts, runs, usage, labels, erased data subjects. Does not write.

Lists with filters are in `assay.traces.store.listing`, counts in `assay.traces.store.counts`.
"""

import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from assay.errors import StoreError, UnknownRollout
from assay.models.meter import Usage
from assay.models.unrecorded import Unrecorded
from assay.traces.records import Rollout, of_tenant
from assay.traces.store import counts
from assay.traces.store import tables as schema
from assay.traces.store.costs import PAID, UNPRICED
from assay.traces.store.rows import rollout_of, transition_of

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

    def runs(self, key: str) -> list[tuple[str, str]]:
        """IDs and statuses of the runs of one job, oldest first."""
        self.flush()
        table = schema.runs
        query = (
            sa.select(table.c.id, table.c.status)
            .where(*self._starts_with(table.c.id, f"{key}-"))
            .order_by(table.c.started_at)
        )
        with self.engine.connect() as connection:
            return [(row.id, row.status) for row in connection.execute(query)]

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
                calls=int(calls),
                prompt_tokens=int(prompt),
                completion_tokens=int(completion),
                cost_usd=float(cost),
                unpriced=int(unpriced_calls),
            )
            for phase, calls, prompt, completion, cost, unpriced_calls in rows
        }

    def unrecorded(self, run_id: str) -> Unrecorded:
        """LM calls of a run that bypassed the recorder, as written when the run ended."""
        columns = schema.runs.c.unseen, schema.runs.c.unrecorded_reason
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(*columns).where(schema.runs.c.id == run_id)).first()
        return Unrecorded() if row is None else Unrecorded(int(row[0] or 0), row[1])

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
