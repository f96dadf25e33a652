"""The scores of a run by task, for a comparison of two runs. Does not run anything.

A run may hold several evaluations: those of `compile` are its baseline, candidates and the compiled program, on the
splits val, gate and test. They differ in phase, split or version of the program.
"""

from dataclasses import dataclass, field

import sqlalchemy as sa

from assay.errors import StoreError
from assay.traces.records import NOT_AGENTS
from assay.traces.store import tables as schema
from assay.traces.store.paging import WINDOW, rollouts_of_run
from assay.traces.store.reads import StoreReads

__all__ = ["Evaluated", "EvaluatedTask", "evaluations_of"]

_PREVIEW = 400  # characters read of a task's inputs


@dataclass(kw_only=True)
class EvaluatedTask:
    """A task of an evaluation: its scored rollouts, and the first characters of its inputs as JSON."""

    task_id: str
    inputs: str
    scores: list[float] = field(default_factory=list)
    rollouts: list[str] = field(default_factory=list)

    @property
    def score(self) -> float | None:
        """Mean over its scored rollouts; None if none is scored."""
        return sum(self.scores) / len(self.scores) if self.scores else None


@dataclass(kw_only=True)
class Evaluated:
    """Rollouts of one program version in one phase on one split of a run, by task."""

    phase: str
    split: str
    version: str
    tasks: dict[str, EvaluatedTask] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Identifies it within its run."""
        return " · ".join(part for part in (self.phase, self.split, self.version) if part) or "all"

    @property
    def scores(self) -> dict[str, float]:
        """Mean score by task, of the tasks that are scored."""
        return {key: task.score for key, task in self.tasks.items() if task.score is not None}


def evaluations_of(store: StoreReads, run_id: str, *, most: int = WINDOW) -> list[Evaluated]:
    """Evaluations of a run in the order of their first rollout. Judges, simulated users and single calls have none.

    Raises:
        StoreError: the run has more than `most` rollouts.
    """
    if rollouts_of_run(store, run_id, most=most) > most:
        raise StoreError(f"the run {run_id} has more than {most:,} rollouts: too many to compare on a page")
    table = schema.rollouts
    columns = (table.c.id, table.c.task_id, table.c.phase, table.c.split, table.c.program_version, table.c.score)
    query = (
        sa.select(*columns, sa.func.substr(table.c.inputs_json, 1, _PREVIEW).label("inputs"))
        .where(table.c.run_id == run_id, table.c.source.not_in(("outside", *NOT_AGENTS)), table.c.task_id != "")
        .order_by(table.c.started_at, table.c.id)
    )
    found: dict[tuple[str, str, str], Evaluated] = {}
    with store.engine.connect() as connection:
        for row in connection.execute(query):
            key = (row.phase, row.split, row.program_version)
            evaluated = found.setdefault(key, Evaluated(phase=key[0], split=key[1], version=key[2]))
            task = evaluated.tasks.setdefault(row.task_id, EvaluatedTask(task_id=row.task_id, inputs=row.inputs))
            task.rollouts.append(row.id)
            if row.score is not None:
                task.scores.append(row.score)
    return list(found.values())
