"""Rows that the store writes at once, not in batches: labels, ratings, artifacts, splits, openings of the test split.

They are few, and the caller depends on them: an error is raised here, not reported by a later `flush`.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.errors import ConfigError, StoreError, UnknownRollout
from assay.support.scrubbing import mask_secrets
from assay.traces.records import subject_digest
from assay.traces.store import tables as schema
from assay.traces.store.reads import QUESTION, StoreReads
from assay.traces.store.rows import as_json, clean
from assay.traces.store.upserts import upsert

_RATER_CHARS = 200  # the width of the column `labels.rater`


class DirectWrites(StoreReads):
    """The part of `Store` that writes single rows in transactions of their own."""

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
        row = {
            "question": question,
            "item_id": item_id,
            "rater": clean(rater)[:_RATER_CHARS],
            "label": clean(label),
            "rationale": clean(mask_secrets(rationale)),
            "shown_json": mask_secrets(as_json(fields)),
            "rollout_id": rollout_id,
            "created_at": time.time(),
        }
        self._now(schema.labels, row)

    def withdraw_label(self, question: str, item_id: str, rater: str) -> bool:
        """Removes one rater's label of one item. Returns whether there was one."""
        table = schema.labels
        one = sa.and_(
            table.c.question == question, table.c.item_id == item_id, table.c.rater == clean(rater)[:_RATER_CHARS]
        )
        with self.engine.begin() as connection:
            return bool(connection.execute(sa.delete(table).where(one)).rowcount)

    def forget_rater(self, rater: str) -> int:
        """Removes all labels of a rater. Returns their number."""
        table = schema.labels
        with self.engine.begin() as connection:
            result = connection.execute(sa.delete(table).where(table.c.rater == clean(rater)[:_RATER_CHARS]))
        return int(result.rowcount)

    def rate(self, rollout_id: str, rating: float) -> None:
        """Stores a human rating of a rollout, in [0, 1]. A second rating replaces the first.

        Raises:
            ConfigError: `rating` is out of range.
            UnknownRollout: no rollout has this id.
        """
        if not 0 <= rating <= 1:
            raise ConfigError(f"rating={rating!r} must be between 0 and 1")
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
        self._now(schema.made_from, _made_from(artifact, people))

    def put_searched(self, *paths: Path) -> None:
        """Stores files in which an erasure looks for texts of the person. What is known of their people stays."""
        if paths:
            self._now(schema.made_from, *(_made_from(str(path.resolve()), []) for path in paths), replace=False)

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

    def _now(self, table: sa.Table, *rows: dict[str, Any], replace: bool = True) -> None:
        try:
            with self.engine.begin() as connection:
                connection.execute(upsert(self.engine.dialect.name, table, replace=replace), list(rows))
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(
                f"the store did not take a row of {table.name}: {getattr(error, 'orig', error)}"
            ) from error


def _made_from(artifact: str, people: Sequence[str]) -> dict[str, Any]:
    return {"artifact": artifact, "people_json": as_json(sorted(people)), "created_at": time.time()}
