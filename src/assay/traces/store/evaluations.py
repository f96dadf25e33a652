"""The scores of a run by task, for a comparison of two runs. Does not run anything.

A run may hold several evaluations: those of `compile` are its baseline, candidates and the compiled program, on the
splits val, gate and test. They differ in phase, split, version or parameters of the program; those of a training on
a program also in the weights that were served.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from assay.errors import StoreError
from assay.traces.records import NOT_AGENTS
from assay.traces.store import tables as schema
from assay.traces.store.paging import WINDOW, rollouts_of_run
from assay.traces.store.store import StoreReads

_PREVIEW = 400  # characters read of a task's inputs


@dataclass(kw_only=True)
class EvaluatedTask:
    """A task of an evaluation: its scored rollouts, and the first characters of its inputs as JSON."""

    task_id: str
    inputs: str
    task_type: str = ""
    scores: list[float] = field(default_factory=list)
    rollouts: list[str] = field(default_factory=list)

    @property
    def score(self) -> float | None:
        """Mean over its scored rollouts; None if none is scored."""
        return sum(self.scores) / len(self.scores) if self.scores else None


@dataclass(kw_only=True)
class Evaluated:
    """Rollouts of one program version with one set of parameters in one phase on one split of a run, by task.

    Attributes:
        parameters: of the agent, as JSON.
        condition: of a training: `before` or `after` it, or its step, and how the model was sampled.
        name: identifies it within its run.
        runs: places of its scored rollouts among all rollouts of the run, and their scores.
    """

    phase: str
    split: str
    version: str
    parameters: str = "{}"
    program: str = ""
    condition: str = ""
    name: str = ""
    tasks: dict[str, EvaluatedTask] = field(default_factory=dict)
    runs: list[tuple[int, float]] = field(default_factory=list)

    @property
    def scores(self) -> dict[str, float]:
        """Mean score by task, of the tasks that are scored."""
        return {key: task.score for key, task in self.tasks.items() if task.score is not None}


def is_training(before: Evaluated, after: Evaluated) -> bool:
    """Whether two evaluations of a run are the same one, before a training and after it."""
    what = [(one.program, one.phase, one.split, one.version, one.parameters) for one in (before, after)]
    when, _, mode = before.condition.partition(", ")
    return what[0] == what[1] and when == "before" and after.condition == f"after, {mode}"


def before_and_after(store: StoreReads, runs: Sequence[str], mode: str) -> tuple[Evaluated, Evaluated] | None:
    """The evaluations on the test split before and after a training; None if the store has not both of them.

    Args:
        runs: ids of the two runs; equal if one run holds both evaluations.
        mode: how the model was sampled, `greedy` or `sampled`.
    Raises:
        StoreError: a run is too large, as for `evaluations_of`.
    """
    sides = [evaluations_of(store, run_id, split="test") for run_id in dict.fromkeys(runs)]
    if len(sides) == 2:
        found = [[one for one in side if one.phase == "evaluate"] for side in sides]
        return (found[0][0], found[1][0]) if all(found) else None
    pairs = itertools.combinations(sides[0], 2)
    return next((pair for pair in pairs if is_training(*pair) and pair[0].condition == f"before, {mode}"), None)


def mean_scores(store: StoreReads, run_ids: Sequence[str], *, phase: str) -> dict[str, float]:
    """Mean score of the rollouts of a phase by run; without runs that have none."""
    table = schema.rollouts
    query = (
        sa.select(table.c.run_id, sa.func.avg(table.c.score))
        .where(table.c.run_id.in_(run_ids), table.c.phase == phase, table.c.score.is_not(None))
        .group_by(table.c.run_id)
    )
    with store.engine.connect() as connection:
        return {run_id: float(mean) for run_id, mean in connection.execute(query)} if run_ids else {}


def evaluations_of(store: StoreReads, run_id: str, *, split: str | None = None, most: int = WINDOW) -> list[Evaluated]:
    """Evaluations of a run in the order of their first rollout. Judges, simulated users and single calls have none.

    Args:
        split: only those on this split. Of a run with more than `most` rollouts they are those on `test` alone.
    Raises:
        StoreError: the run has more than `most` rollouts there.
    """
    large = rollouts_of_run(store, run_id, split=split, most=most) > most
    if large and split is None and 0 < rollouts_of_run(store, run_id, split="test", most=most) <= most:
        split, large = "test", False
    if large:
        raise StoreError(f"the run {run_id} has more than {most:,} rollouts: too many to compare on a page")
    table = schema.rollouts
    query = sa.select(*_columns()).where(table.c.run_id == run_id, *_of_agents())
    if split is not None:
        query = query.where(table.c.split == split)
    with store.engine.connect() as connection:
        return _grouped(run_id, connection.execute(query.order_by(table.c.started_at, table.c.id)))


def evaluations_of_task(
    store: StoreReads, run_id: str, task_id: str, *, phase: str, split: str, most: int = 2_000
) -> list[Evaluated]:
    """The evaluations of a run in one phase on one split, of one task alone, which is found by the index of tasks.

    Args:
        most: maximum number of rollouts of the task, of all runs, that are read.
    """
    table = schema.rollouts
    some = sa.select(table.c.id).where(table.c.task_id == task_id).limit(most).subquery("found")
    query = (
        sa.select(*_columns(), table.c.run_id, table.c.started_at)
        .join_from(some, table, some.c.id == table.c.id)
        .where(table.c.phase == phase, table.c.split == split, *_of_agents())
    )
    with store.engine.connect() as connection:
        rows = [row for row in connection.execute(query) if row.run_id == run_id]
    return _grouped(run_id, sorted(rows, key=lambda row: (row.started_at, row.id)))


def _columns() -> tuple[Any, ...]:
    table = schema.rollouts
    return (
        table.c.id, table.c.task_id, table.c.task_type, table.c.phase, table.c.split, table.c.program_version,
        table.c.parameters_json, table.c.score, table.c.program, table.c.group_id,
        sa.func.substr(table.c.inputs_json, 1, _PREVIEW).label("inputs"),
    )  # fmt: skip


def _of_agents() -> tuple[Any, ...]:
    """Conditions of rollouts of programs on tasks."""
    table = schema.rollouts
    return table.c.source.not_in(("outside", *NOT_AGENTS)), table.c.task_id != ""


def _grouped(run_id: str, rows: Iterable[Any]) -> list[Evaluated]:
    """The evaluations that rollouts of a run belong to."""
    evaluations: dict[tuple[str, str, str, str, str], Evaluated] = {}
    for place, row in enumerate(rows):
        condition = _condition(run_id, row.group_id, row.task_id)
        key = (row.phase, row.split, row.program_version, row.parameters_json, condition)
        if (evaluated := evaluations.get(key)) is None:
            evaluated = evaluations[key] = Evaluated(
                phase=row.phase, split=row.split, version=row.program_version, parameters=row.parameters_json,
                program=row.program, condition=condition,
            )  # fmt: skip
        if (task := evaluated.tasks.get(row.task_id)) is None:
            task = EvaluatedTask(task_id=row.task_id, inputs=row.inputs, task_type=row.task_type)
            evaluated.tasks[row.task_id] = task
        task.rollouts.append(row.id)
        if row.score is not None:
            task.scores.append(row.score)
            evaluated.runs.append((place, row.score))
    _name(list(evaluations.values()))
    return list(evaluations.values())


def _condition(run_id: str, group_id: str, task_id: str) -> str:
    """The prefix of a group id; empty for groups to sample from, whose prefix is their run and step."""
    prefix = group_id.removesuffix(f"/{task_id}") if group_id != task_id else ""
    return "" if prefix == group_id or prefix.startswith(run_id) else prefix


def _name(evaluations: list[Evaluated]) -> None:
    """Names each by what it differs in: by version if there are several, by parameters only those of the same version
    on the same tasks."""
    versions = {one.version for one in evaluations}
    groups: dict[tuple[str, str, str, str], list[Evaluated]] = {}
    for one in evaluations:
        groups.setdefault((one.phase, one.split, one.version, one.condition), []).append(one)
    for key, group in groups.items():
        values = [json.loads(one.parameters) for one in group]
        same = {name for name, value in values[0].items() if all(other.get(name) == value for other in values)}
        for one, parameters in zip(group, values, strict=True):
            differing = ", ".join(f"{name} {value:g}" for name, value in parameters.items() if name not in same)
            own = differing or ("own parameters" if len(group) > 1 else "")
            phase, split, version, condition = key
            parts = (phase, split if split != phase else "", version if len(versions) > 1 else "", condition, own)
            one.name = " · ".join(part for part in parts if part) or "all"
