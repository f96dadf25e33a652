"""Rollouts of the same task by other versions: those of the same run, and the other side of a comparison."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from assay.reports.compiled import evaluation_labels
from assay.traces.records import NOT_AGENTS, Rollout
from assay.traces.store import Store
from assay.traces.store import tables as schema
from assay.traces.store.evaluations import Evaluated, evaluations_of_task, is_training
from assay.traces.store.listing import finished_report
from assay.web.rendering import link

__all__ = ["OtherSide", "other_sides"]

_MOST_SIDES = 8


@dataclass(frozen=True, kw_only=True)
class OtherSide:
    """A rollout of the same task: of what version, with its score and address."""

    rollout_id: str
    name: str
    score: float | None
    address: str


def other_sides(
    store: Store, rollout: Rollout, query: Mapping[str, str], filters: Mapping[str, str], *, where: str | Path | None
) -> list[OtherSide]:
    """Rollouts of the task of a rollout, at most `_MOST_SIDES`: first that of the comparison from which it was
    opened, then
    the last ones of the other versions that its run evaluated in the same phase on the same split: those of the other
    side of its training, of a winner and of a baseline before others.

    Args:
        query: of the address; `other` is the id of the rollout on the other side of a comparison.
        filters: of the list of rollouts, which the addresses keep.
        where: the store's location, next to which the report of the run is, with the names of candidates.
    """
    if not rollout.task_id or rollout.source in NOT_AGENTS:
        return []
    sides: dict[str, tuple[str, float | None]] = {}
    evaluations = evaluations_of_task(
        store, rollout.run_id, rollout.task_id, phase=rollout.phase, split=rollout.split
    )  # fmt: skip
    own = next((one for one in evaluations if rollout.id in _rollouts(one)), None)
    if own is not None and len(evaluations) > 1:
        labels = evaluation_labels(evaluations, finished_report(where, rollout.run_id) or {})
        others = [one for one in evaluations if one is not own]
        # of a training the other side is sampled in the same way
        for one in sorted(others, key=lambda other: not (is_training(own, other) or is_training(other, own))):
            task = one.tasks[rollout.task_id]
            sides[task.rollouts[-1]] = (_short(labels[one.name], one), task.score)
    sides = dict(sorted(sides.items(), key=lambda side: not side[1][0].startswith(("winner", "baseline"))))
    compared = _compared(store, rollout, query.get("other", ""))
    if compared is not None:
        other, score = compared
        sides = {other: sides.get(other, ("the other side of the comparison", score)), **sides}
    back = {**filters, "other": rollout.id}
    return [
        OtherSide(rollout_id=other, name=name, score=score, address=link("rollouts", other, **back))
        for other, (name, score) in list(sides.items())[:_MOST_SIDES]
    ]


def _rollouts(evaluated: Evaluated) -> list[str]:
    return [rollout for task in evaluated.tasks.values() for rollout in task.rollouts]


def _short(label: str, evaluated: Evaluated) -> str:
    """The name of an evaluation without its phase and split, which are those of the rollout."""
    for part in (evaluated.phase, evaluated.split):
        label = label.removeprefix(f"{part} · ")
    return f"version {label[:10]}" if label == evaluated.version else label


def _compared(store: Store, rollout: Rollout, other: str) -> tuple[str, float | None] | None:
    """Id and score of the other rollout, if it is one of the same task."""
    table = schema.rollouts
    columns = (table.c.id, table.c.task_id, table.c.score, table.c.source)
    with store.engine.connect() as connection:
        row = connection.execute(sa.select(*columns).where(table.c.id == other)).first() if other else None
    if row is None or row.id == rollout.id or row.task_id != rollout.task_id or row.source in NOT_AGENTS:
        return None
    return str(row.id), row.score
