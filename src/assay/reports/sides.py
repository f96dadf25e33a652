"""Two evaluations side by side: by criterion, by type of task, and task by task. Reads the store, runs nothing."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa
from markupsafe import Markup

from assay.reports.charts import interval_bar
from assay.reports.markdown import gain_claim
from assay.reports.texts import preview
from assay.support.numbers import counted, signed
from assay.traces.store import tables as schema
from assay.traces.store.evaluations import Evaluated, EvaluatedTask
from assay.traces.store.store import StoreReads

FEWEST_TASKS = 5  # tasks under which no interval is claimed
_MOST_PARTS = 40  # criteria, and types of tasks, that one page shows


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One criterion or type of task: means with 95 % intervals, and the paired difference of the tasks in both.

    `low` and `high` are None where the tasks are too few for an interval.
    """

    name: str
    n: int
    before: tuple[float, float, float] | None
    after: tuple[float, float, float] | None
    mean: float | None
    low: float | None
    high: float | None
    bar: Markup = field(default_factory=Markup)


@dataclass(frozen=True, kw_only=True)
class TaskChange:
    """A task that both evaluations ran; None for a score of a rollout that was not scored."""

    task_id: str
    text: str
    before: float | None
    after: float | None
    change: float | None
    first: str
    second: str
    worse_in: str


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What a page shows of two evaluations."""

    before: Evaluated
    after: Evaluated
    gain: Mapping[str, Any]  # `Gain.to_dict()`
    criteria: list[Difference]
    types: list[Difference]
    tasks: list[TaskChange]
    left_out: int
    better: int
    worse: int
    same: int
    unscored: int

    @property
    def words(self) -> str:
        """What the paired difference says."""
        return gain_in_words(self.gain)

    @property
    def tone(self) -> str:
        return tone_of(self.gain)


def sides_of(
    store: StoreReads, run_ids: tuple[str, str], before: Evaluated, after: Evaluated, *, rows: int, better_first: bool,
    level: float = 0.05,
) -> Sides:  # fmt: skip
    """Compares two evaluations task by task.

    Args:
        run_ids: of the runs that they belong to.
        rows: maximum number of tasks.
        level: error of the intervals, as the stored gain of a comparison has it that could stop early.
    """
    from assay.evaluation.statistics import paired_gain

    grades = [grades_of(store, run_id, side) for run_id, side in zip(run_ids, (before, after), strict=True)]
    tasks = task_changes(before, after, grades, better_first=better_first)
    changes = [task.change for task in tasks if task.change is not None]
    return Sides(
        before=before,
        after=after,
        gain=paired_gain(before.scores, after.scores, level=level).to_dict(),
        criteria=differences_by_part(*(by_criterion(of) for of in grades), level=level),
        types=differences_by_part(by_type(before), by_type(after), level=level),
        tasks=tasks[:rows],
        left_out=max(0, len(tasks) - rows),
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
        same=sum(change == 0 for change in changes),
        unscored=len(before.tasks.keys() | after.tasks.keys()) - len(changes),
    )


def mean_of(values: Mapping[str, float]) -> tuple[float, float, float] | None:
    """Mean of values in [0, 1] with its 95 % interval; None of no values."""
    from assay.evaluation.statistics import mean_interval

    if not values:
        return None
    return (sum(values.values()) / len(values), *mean_interval(list(values.values())))


def differences_by_part(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]], *, level: float = 0.05
) -> list[Difference]:
    """Differences by criterion or type of task, in the order of the evaluations.

    Args:
        before, after: values in [0, 1] by part and task.
        level: error of the intervals of the differences.
    """
    from assay.evaluation.statistics import paired_gain

    differences = []
    for name in list(dict.fromkeys([*before, *after]))[:_MOST_PARTS]:
        first, second = before.get(name, {}), after.get(name, {})
        gain = paired_gain(first, second, level=level)
        mean = None if math.isnan(gain.mean) else gain.mean
        low, high = (gain.low, gain.high) if gain.n >= FEWEST_TASKS else (None, None)
        differences.append(
            Difference(
                name=name, n=gain.n, before=mean_of(first), after=mean_of(second), mean=mean, low=low, high=high,
                bar=interval_bar(mean, low, high),
            )
        )  # fmt: skip
    return differences


def task_changes(
    before: Evaluated, after: Evaluated, grades: Sequence[Mapping[str, Mapping[str, float]]], *, better_first: bool
) -> list[TaskChange]:
    """The tasks that both evaluations ran, by change; those without two scores at the end."""
    changes = []
    for key in before.tasks.keys() & after.tasks.keys():
        first, second = before.tasks[key], after.tasks[key]
        change = None if first.score is None or second.score is None else second.score - first.score
        changes.append(
            TaskChange(
                task_id=key, text=preview(second.inputs, 160), before=first.score, after=second.score, change=change,
                first=_last_rollout(first), second=_last_rollout(second),
                worse_in=_changed_criteria(grades[0].get(key, {}), grades[1].get(key, {})),
            )
        )  # fmt: skip
    sign = -1 if better_first else 1
    return sorted(changes, key=lambda task: (task.change is None, sign * (task.change or 0.0), task.task_id))


def _last_rollout(task: EvaluatedTask) -> str:
    return task.rollouts[-1]


def _changed_criteria(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """The criteria whose grade changed, as `right 1 → 0`."""
    changed = [
        f"{name} {before[name]:.2g} → {after[name]:.2g}"
        for name in before
        if name in after and before[name] != after[name]
    ]
    return ", ".join(changed[:4]) + (", …" if len(changed) > 4 else "")


def grades_of(store: StoreReads, run_id: str, evaluated: Evaluated) -> dict[str, dict[str, float]]:
    """Mean grade of each final criterion that was decided, by task and criterion."""
    table = schema.rollouts
    of = {rollout: task.task_id for task in evaluated.tasks.values() for rollout in task.rollouts}
    query = sa.select(table.c.id, table.c.verdicts_json).where(
        table.c.run_id == run_id, table.c.split == evaluated.split, table.c.phase == evaluated.phase
    )
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with store.engine.connect() as connection:
        for row in connection.execute(query):
            for verdict in orjson.loads(row.verdicts_json) if row.id in of else ():
                grade, applies = verdict.get("grade"), verdict.get("applies", True)
                if verdict.get("scope", "final") == "final" and applies and isinstance(grade, int | float):
                    values[of[row.id]][verdict["criterion"]].append(grade)
    return {
        task: {name: sum(grades) / len(grades) for name, grades in by_name.items()} for task, by_name in values.items()
    }


def by_criterion(grades: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Grades by criterion and task."""
    by_criterion: dict[str, dict[str, float]] = defaultdict(dict)
    for task, by_name in grades.items():
        for name, grade in by_name.items():
            by_criterion[name][task] = grade
    return by_criterion


def by_type(evaluated: Evaluated) -> dict[str, dict[str, float]]:
    """Scores by type of task and task; empty if all tasks are of one type."""
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    for key, score in evaluated.scores.items():
        scores[evaluated.tasks[key].task_type or "default"][key] = score
    return scores if len(scores) > 1 else {}


def gain_in_words(gain: Mapping[str, Any], openings: Mapping[str, int] | None = None) -> str:
    """What a paired difference says: a gain, a loss, or that neither is shown; on the sealed test with its openings."""
    if not gain["n"]:
        return "No task was scored in both."
    if gain["n"] < FEWEST_TASKS or gain["low"] is None:
        return f"{signed(gain['mean'])} on {counted(gain['n'], 'tasks')}, too few for an interval."
    interval = f"95 % interval {signed(gain['low'])} to {signed(gain['high'])}"
    claim = gain_claim(gain["low"], gain["high"], openings)
    return f"{signed(gain['mean'])} on {gain['n']} tasks, {interval}: {claim}."


def tone_of(gain: Mapping[str, Any]) -> str:
    """`better` or `worse` where the interval of a difference excludes zero, else empty."""
    if gain["low"] is None:
        return ""
    return "better" if gain["low"] > 0 else "worse" if gain["high"] < 0 else ""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A sentence on a split. `tone` is `better`, `worse` or empty."""

    split: str = ""
    text: str
    tone: str = ""
