"""Selects the rollouts of an export and reads them task by task and group by group, in constant memory.

Sealed rollouts are never read: those of the gate and test splits, by the recorded split and by the store's salt, and
all rollouts with the same inputs.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from assay.datasets.overlap import RUN, word_runs
from assay.datasets.tasks import task_key
from assay.traces.export.turns import Turn, loaded
from assay.traces.messages.chaining import complete_requests
from assay.traces.records import NOT_AGENTS, Rollout, subject_digest
from assay.traces.store import Store
from assay.traces.store import tables as schema
from assay.traces.store.rows import rollout_of
from assay.traces.store.sealing import SEALED, SplitFinder

__all__ = [
    "Episode",
    "Overlap",
    "Selection",
    "is_sealed",
    "lacks_consent",
    "read_groups",
    "sealed_tasks",
]

_CONSENT_GIVEN = (
    "given",
    "granted",
    "yes",
    "y",
    "true",
    "1",
    "agreed",
    "obtained",
    "explicit",
    "opt-in",
    "opted-in",
)  # any other text means that consent was not given
# A preflight is no rollout of a job; by the val scores of `promotion` a curriculum moves on.
NOT_EXPORTED = ("preflight", "promotion")  # phases
_SEALED_INPUTS = "with the inputs of a sealed task"
_SEALED_SPLIT = "of a task that the store's salt assigns to gate or test"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Filter for rollouts. An empty tuple does not restrict.

    Exception: rollouts of a tenant are selected only if `tenants` contains it.

    Args:
        runs: Ids of runs.
        programs: Names of programs.
        task_types: Task types.
        sources: Sources of rollouts, such as `compile` or `gateway`.
        tenants: Tenants whose rollouts are selected in addition to rollouts without a tenant.
        require_consent: Select only rollouts with a recorded consent.
        rated: Select only rollouts with a human rating.
        rollouts: Ids of rollouts, at most a few thousand.
    """

    runs: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    task_types: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    require_consent: bool = False
    rated: bool = False
    rollouts: tuple[str, ...] = ()

    def named(self) -> dict[str, tuple[Any, tuple[str, ...]]]:
        """Column and selected values of each filter, by display name."""
        r = schema.rollouts
        return {
            "run": (r.c.run_id, self.runs),
            "program": (r.c.program, self.programs),
            "task type": (r.c.task_type, self.task_types),
            "source": (r.c.source, self.sources),
        }

    def drawn(self) -> list[Any]:
        """SQL conditions for the selected runs, programs, task types, sources and ids, regardless of status and
        consent."""
        r = schema.rollouts
        filters = [column.in_(values) for column, values in self.named().values() if values]
        if self.rollouts:
            filters.append(r.c.id.in_(self.rollouts))
        agents = [] if self.sources else [r.c.source.not_in(NOT_AGENTS)]
        return [*filters, *agents, r.c.phase.not_in(NOT_EXPORTED), r.c.source != "outside"]

    def where(self) -> list[Any]:
        """SQL conditions on rollouts, including consent and tenants, but not sealed inputs."""
        r = schema.rollouts
        rated = [r.c.human_rating.is_not(None)] if self.rated else []
        return [
            *self.drawn(),
            r.c.status.in_(("done", "failed")),
            sa.not_(is_sealed()),
            *self.permitted(),
            *rated,
        ]

    def permitted(self) -> list[Any]:
        """SQL conditions on rollouts by tenant and consent alone."""
        r = schema.rollouts
        consent = [r.c.consent.is_not(None)] if self.require_consent else []
        return [
            sa.or_(r.c.tenant.is_(None), r.c.tenant.in_(self.tenants)),
            sa.not_(lacks_consent()),
            *consent,
        ]


def _plain_column(column: Any) -> Any:
    return sa.func.lower(sa.func.trim(sa.func.coalesce(column, "")))


def is_sealed() -> Any:
    """SQL condition: the recorded split of the rollout is gate or test."""
    return _plain_column(schema.rollouts.c.split).in_(SEALED)


def consents(text: str) -> bool:
    """Whether a recorded consent text means that consent was given. Unknown texts mean that it was not."""
    return text.strip().lower() in _CONSENT_GIVEN


def lacks_consent() -> Any:
    """SQL condition: a consent is recorded and does not mean that consent was given."""
    column = schema.rollouts.c.consent
    return sa.and_(column.is_not(None), _plain_column(column).not_in(_CONSENT_GIVEN))


@dataclass
class Episode:
    """A rollout with its turns in order; `rollout.transitions` is empty.

    `difficulty` is the task's own, else derived from the mean score of its selected rollouts: `easy` from 2/3, `hard`
    below 1/3, else `medium`.
    """

    rollout: Rollout
    turns: list[Turn] = field(default_factory=list)
    difficulty: str = "medium"
    group: str = ""
    credited: tuple[list[float], list[float]] | tuple[()] | None = None  # cached by the export

    @property
    def quality(self) -> float | None:
        """Quality of the rollout in [0, 1], see `Rollout.quality`."""
        return self.rollout.quality

    @property
    def agents(self) -> list[str]:
        """Name of the agent of each turn."""
        return [turn.agent for turn in self.turns]

    @property
    def rewards(self) -> list[float]:
        """Sum of the step rewards of each turn, without the outcome; NaN if one of them is not a number."""
        return [_sum(turn.step_rewards.values()) for turn in self.turns]


def _sum(values: Iterable[Any]) -> float:
    total = 0.0
    for value in values:
        total += value if isinstance(value, int | float) else math.nan
    return total


def difficulty_of(metadata: Mapping[str, Any], mean: float | None) -> str:
    """The task's `difficulty`, else one derived from the mean score of its rollouts, else `unknown`."""
    if metadata.get("difficulty") is not None:
        return str(metadata["difficulty"])
    return "unknown" if mean is None else "easy" if mean >= 2 / 3 else "hard" if mean < 1 / 3 else "medium"


def read_groups(
    store: Store,
    selection: Selection,
    sealed: set[str],
    *,
    splits: SplitFinder | None = None,
    light: bool = False,
    means: bool = False,
    by_task: bool = False,
    exclusions: Counter[str] | None = None,
) -> Iterator[list[Episode]]:
    """Iterate over groups of rollouts of one task, ordered by task, with one group in memory at a time.

    A rollout without a group is its own group. Sealed rollouts are left out: those with inputs in `sealed`, and those
    of tasks that the store's salt assigns to gate or test.

    Args:
        light: Read only the number, the step rewards and the agents of the turns.
        means: Derive the difficulty from the mean score where the task has none; otherwise it is `unknown`.
        by_task: Treat all rollouts of a task as one group.
        exclusions: Counter of excluded rollouts by reason.
    """
    r, t, where = schema.rollouts, schema.transitions, selection.where()
    order = (r.c.task_id, r.c.group_id, r.c.id)
    mean = sa.func.avg(r.c.score).over(partition_by=r.c.task_id) if means else sa.null()
    columns = [
        t.c[name] if not light or name in ("t", "step_rewards_json", "agent") else sa.literal_column("''").label(name)
        for name in Turn.COLUMNS
    ]
    calls = (
        sa.select(t.c.rollout_id, *columns)
        .select_from(t.join(r, r.c.id == t.c.rollout_id))
        .where(*where)
        .order_by(*order, t.c.t)
    )
    forgotten, splits = store.forgotten(), splits or SplitFinder(store)
    with snapshot(store) as connection:
        turns = groupby(connection.execute(calls), key=lambda row: row[0])
        waiting = next(turns, None)
        group: list[Episode] = []
        for row in connection.execute(sa.select(r, mean.label("task_mean")).where(*where).order_by(*order)).mappings():
            rollout = rollout_of({name: value for name, value in row.items() if name != "task_mean"})
            group_id = rollout.task_id if by_task and rollout.task_id else rollout.group_id or rollout.id
            episode = Episode(rollout, difficulty=difficulty_of(rollout.metadata, row["task_mean"]), group=group_id)
            if waiting is not None and waiting[0] == rollout.id:
                episode.turns = [Turn(values[1:]) for values in waiting[1]]
                complete_requests(episode.turns)
                waiting = next(turns, None)
            if rollout.data_subject and forgotten.covers(subject_digest(rollout.data_subject), rollout.tenant):
                episode.turns = []
            if (reason := _exclusion(episode, sealed, splits)) is not None:
                if exclusions is not None:
                    exclusions[reason] += 1
                continue
            if group and (group[0].group, group[0].rollout.task_id) != (episode.group, rollout.task_id):
                yield group
                group = []
            group.append(episode)
        if group:
            yield group


def _exclusion(episode: Episode, sealed: set[str], splits: SplitFinder) -> str | None:
    """Why a rollout that matches the selection is left out, or None."""
    rollout = episode.rollout
    if sealed and task_key(rollout.inputs) in sealed:
        return _SEALED_INPUTS
    if splits.of_inputs(rollout.inputs, rollout.split) in SEALED:
        return _SEALED_SPLIT
    return None if episode.turns else "without LM calls or of erased people"


@contextmanager
def snapshot(store: Store) -> Iterator[sa.Connection]:
    """Connection whose queries see one snapshot of the store. Rows are streamed."""
    level = {"isolation_level": "REPEATABLE READ"} if store.engine.dialect.name == "postgresql" else {}
    with store.engine.connect().execution_options(yield_per=500, **level) as connection:
        if store.engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN")
        yield connection


def sealed_tasks(
    store: Store, splits: SplitFinder | None = None, *, by_salt: bool = True
) -> tuple[set[str], "Overlap"]:
    """Known gate and test tasks.

    Args:
        by_salt: Whether a task counts that only the store's salt assigns to a sealed split.
    Returns:
        Their keys, and an `Overlap` with the n-grams of those whose rollouts are stored.
    """
    r, splits, overlap = schema.rollouts, splits or SplitFinder(store), Overlap()
    keys = set(splits.sealed)
    with store.engine.connect() as connection:
        query = sa.select(r.c.inputs_json, r.c.split).order_by(r.c.task_id, r.c.group_id, r.c.id)
        last = None  # rollouts of a task are consecutive
        for text, recorded in connection.execution_options(yield_per=500).execute(query):
            if (text, recorded) == last:
                continue
            last = (text, recorded)
            inputs = loaded(text)
            known = recorded.strip().lower() in SEALED
            if inputs and (known or (by_salt and splits.of_inputs(inputs, recorded) in SEALED)):
                keys.add(task_key(inputs))
                overlap.seal(inputs)
    return keys, overlap


class Overlap:
    """Share of the exported inputs' text that also occurs in sealed inputs, by n-grams of 8 words.

    A shorter text counts as one n-gram.
    """

    def __init__(self) -> None:
        self._sealed: set[bytes] = set()
        self._last_grams: set[bytes] = set()
        self.tasks = self.shared = 0
        self.worst: list[tuple[float, str]] = []

    def seal(self, inputs: Mapping[str, Any]) -> None:
        """Add the inputs of a sealed task."""
        self._sealed.update(_runs(inputs))

    def see(self, task_id: str, inputs: Mapping[str, Any]) -> None:
        """Count an exported task. Tasks are passed in order; consecutive calls with the same task count once."""
        grams = _runs(inputs)
        if not self._sealed or grams == self._last_grams:
            self.tasks += grams != self._last_grams
            self._last_grams = grams
            return
        self._last_grams = grams
        self.tasks += 1
        share = len(grams & self._sealed) / len(grams) if grams else 0.0
        if share:
            self.shared += 1
            self.worst = sorted([*self.worst, (share, task_id)], reverse=True)[:5]

    def to_dict(self) -> dict[str, Any]:
        """`tasks`, the number of them that share an n-gram (`shared`), and the five `worst` with their sealed share."""
        worst = [{"task": task, "share": round(share, 4)} for share, task in self.worst]
        return {"ngram": RUN, "tasks": self.tasks, "shared": self.shared, "worst": worst}


def _runs(inputs: Mapping[str, Any]) -> set[bytes]:
    return word_runs(" ".join(str(value) for value in inputs.values()))
