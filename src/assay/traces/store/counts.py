"""Counts of a store: rollouts, calls, tokens, cost. Plain SQL for SQLite and PostgreSQL, answered from indexes alone.

`file_stats` reads a SQLite file without SQLAlchemy, whose import takes four times as long as the counting.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from assay.models.unrecorded import Unrecorded
from assay.traces.store.location import REVISION

# (statement with :names, values by name) -> all rows
Execute = Callable[[str, Mapping[str, Any]], Sequence[Sequence[Any]]]

_UNPRICED = "sum(CASE WHEN cached OR transitions.cost_usd IS NOT NULL THEN 0 ELSE 1 END)"
_ROLLOUTS = "SELECT count(*), count(score), avg(score) FROM rollouts {own}"
_SPLITS = "SELECT split, count(*) FROM rollouts {own} GROUP BY split ORDER BY split"
_STATUSES = "SELECT status, count(*) FROM rollouts {own} GROUP BY status ORDER BY status"
_CALLS = (
    "SELECT count(*), sum(CAST(cached AS INTEGER)), sum(prompt_tokens), sum(completion_tokens), "
    f"sum(CASE WHEN cached THEN 0 ELSE transitions.cost_usd END), {_UNPRICED} FROM transitions {{joined}}"
)
_ERRORS = f"SELECT count(*), {_UNPRICED} FROM transitions {{joined}} {{and_}} transitions.error IS NOT NULL"
_RUNS = "SELECT sum(unseen), max(unrecorded_reason), sum(lost) FROM runs {one}"


def stats(execute: Execute, run_id: str | None = None) -> dict[str, Any]:
    """Counts of a store, or of one run.

    Returns:
        Rollouts and their mean score, splits and statuses; transitions, cached calls, failed calls (`errors`), tokens;
        unrecorded calls (None: unknown); `cost_usd` in dollars (None: a call has no known price or was not recorded).
    """
    clauses = {"own": "", "joined": "", "and_": "WHERE", "one": ""}
    if run_id:
        joined = "JOIN rollouts ON rollouts.id = transitions.rollout_id WHERE rollouts.run_id = :run"
        clauses = {"own": "WHERE run_id = :run", "joined": joined, "and_": "AND", "one": "WHERE id = :run"}
    values = {"run": run_id} if run_id else {}
    rollouts, splits, statuses, calls, errors, runs = (
        execute(statement.format(**clauses), values)
        for statement in (_ROLLOUTS, _SPLITS, _STATUSES, _CALLS, _ERRORS, _RUNS)
    )
    unrecorded = Unrecorded(int(runs[0][0] or 0), runs[0][1], lost=int(runs[0][2] or 0))
    ((count, scored, mean),), ((made, cached, prompt, completion, cost, unpriced),) = rollouts, calls
    unknown = (unpriced or 0) > (errors[0][1] or 0) or unrecorded.lost  # failed calls have no price
    return {
        "rollouts": count, "transitions": made, **unrecorded.to_dict(), "scored": scored, "mean_score": mean,
        "cached": int(cached or 0), "errors": errors[0][0], "prompt_tokens": int(prompt or 0),
        "completion_tokens": int(completion or 0), "cost_usd": None if unknown else unrecorded.cost(float(cost or 0.0)),
        "splits": {split or "none": number for split, number in splits},
        "statuses": {status or "none": number for status, number in statuses},
    }  # fmt: skip


def file_stats(path: Path, run_id: str | None = None) -> dict[str, Any] | None:
    """`stats` of a SQLite file. None if opening it as a `Store` says why it cannot be read."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            if db.execute("SELECT version_num FROM store_revision").fetchone() == (REVISION,):
                return stats(lambda statement, values: db.execute(statement, dict(values)).fetchall(), run_id)
    except sqlite3.Error:  # damaged, or not a database: opening it as a `Store` raises the reason
        pass
    return None
