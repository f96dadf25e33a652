"""Counts over a store: rollouts, calls, tokens, dollars. Plain SQL that SQLite and PostgreSQL both read, answered from indexes alone.

`file_stats` reads a SQLite file without SQLAlchemy, whose import takes four times as long as the counting.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from assay.traces.location import SCHEMA_VERSION
from assay.traces.missed import Unrecorded

__all__ = ["file_stats", "stats"]

Execute = Callable[[str, Mapping[str, Any]], Sequence[Sequence[Any]]]  # a statement with :names, and their values -> all rows

_ROLLOUTS = "SELECT count(*), count(score), avg(score) FROM rollouts {own}"
_SPLITS = "SELECT split, count(*) FROM rollouts {own} GROUP BY split ORDER BY split"
_STATUSES = "SELECT status, count(*) FROM rollouts {own} GROUP BY status ORDER BY status"
_CALLS = (
    "SELECT count(*), sum(CAST(cached AS INTEGER)), sum(prompt_tokens), sum(completion_tokens), sum(transitions.cost_usd), "
    "count(transitions.cost_usd) FROM transitions {joined}"
)
_ERRORS = "SELECT count(*) FROM transitions {joined} {and_} transitions.error IS NOT NULL"
_RUNS = "SELECT sum(unseen), max(unrecorded_reason) FROM runs {one}"


def stats(execute: Execute, run_id: str | None = None) -> dict[str, Any]:
    """Counts of a store, or of one run: rollouts, transitions, unrecorded calls (None: unknown), cached, errors, tokens, dollars (None: a call has
    no known price, or went past the recorder), mean score, rollouts by split and by status. `errors` are LM calls that failed."""
    clauses = {"own": "", "joined": "", "and_": "WHERE", "one": ""}
    if run_id:
        joined = "JOIN rollouts ON rollouts.id = transitions.rollout_id WHERE rollouts.run_id = :run"
        clauses = {"own": "WHERE run_id = :run", "joined": joined, "and_": "AND", "one": "WHERE id = :run"}
    values = {"run": run_id} if run_id else {}
    rollouts, splits, statuses, calls, errors, runs = (
        execute(statement.format(**clauses), values) for statement in (_ROLLOUTS, _SPLITS, _STATUSES, _CALLS, _ERRORS, _RUNS)
    )
    unrecorded = Unrecorded(int(runs[0][0] or 0), runs[0][1])
    ((count, scored, mean),), ((made, cached, prompt, completion, cost, priced),) = rollouts, calls
    unknown = priced < made - errors[0][0]  # a call without a price; failed ones have none
    return {
        "rollouts": count, "transitions": made, **unrecorded.to_dict(), "scored": scored, "mean_score": mean,
        "cached": int(cached or 0), "errors": errors[0][0], "prompt_tokens": int(prompt or 0),
        "completion_tokens": int(completion or 0), "cost_usd": None if unknown else unrecorded.cost(float(cost or 0.0)),
        "splits": {split or "none": number for split, number in splits},
        "statuses": {status or "none": number for status, number in statuses},
    }  # fmt: skip


def file_stats(path: Path, run_id: str | None = None) -> dict[str, Any] | None:
    """The same of a SQLite store's file; None where it has to be opened as a `Store` first: an older one lacks the indexes."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            version = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
            indexed = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'transitions_failed'").fetchone()[0]
            if indexed and version == (str(SCHEMA_VERSION),):
                return stats(lambda statement, values: db.execute(statement, dict(values)).fetchall(), run_id)
    except sqlite3.Error:  # damaged, or no database: the store says what is wrong with it
        pass
    return None
