"""Values of a deployment's rollouts, summed by the database where it can."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa

from assay.deployment.evidence import CANDIDATE, CHAMPION, Arms, Cell, Stratum, cell_of
from assay.deployment.plan import Metric
from assay.deployment.readings import Paired
from assay.traces.store import tables as schema
from assay.traces.store.tables import rollouts

SHADOW = "shadow"  # phase of replayed rollouts; their group is the id of the recorded one
LOST_S = 600.0  # after which a rollout that has not ended is missing; the default time limit of a rollout
_BATCH = 5000
_ROLLOUTS, _CALLS = schema.rollouts, schema.transitions


def _live(deployment: str) -> list[Any]:
    return [_ROLLOUTS.c.deployment == deployment, _ROLLOUTS.c.phase != SHADOW]


def columns_of(metric: Metric) -> list[Any]:
    """Columns from which `value_of` reads the metric, besides those of the stratum."""
    calls = _CALLS.c
    sums = {
        "cost_usd": sa.func.sum(calls.cost_usd),
        "tokens": sa.func.sum(sa.func.coalesce(calls.prompt_tokens, 0) + sa.func.coalesce(calls.completion_tokens, 0)),
        "tool_error_rate": sa.func.aggregate_strings(calls.tools_json, ","),
        "parse_error_rate": sa.func.avg(sa.case((calls.failure == "parse", 1.0), else_=0.0)),
    }
    if metric.name in sums:
        value = sa.select(sums[metric.name]).where(calls.rollout_id == _ROLLOUTS.c.id).scalar_subquery()
        return [value.label("amount")]
    return [
        _ROLLOUTS.c.score, _ROLLOUTS.c.human_rating, _ROLLOUTS.c.verdicts_json, _ROLLOUTS.c.status,
        _ROLLOUTS.c.started_at, _ROLLOUTS.c.ended_at, _ROLLOUTS.c.failure,
    ]  # fmt: skip


def value_of(metric: Metric, row: Any) -> float:
    """Value of a metric on one rollout, in the scale in which arms are compared; NaN where it has none.

    Args:
        row: of the table of rollouts, or the columns of it that the metric needs.
    """
    return metric.value(_raw(metric, row))


def _raw(metric: Metric, row: Any) -> float:
    name = metric.name
    value: float | None
    if name in ("score", "human_rating"):
        value = row[name]
    elif name == "error_rate":
        value = float(row["status"] in ("failed", "error"))
    elif name == "refusal_rate":
        value = next((v["grade"] for v in json.loads(row["verdicts_json"]) if v["criterion"] == "refusal"), None)
    elif name == "latency_s":
        value = None if row["ended_at"] is None else row["ended_at"] - row["started_at"]
    elif name in ("cost_usd", "tokens", "parse_error_rate"):
        value = row["amount"]
    elif name == "tool_error_rate":
        tools = [tool for call in json.loads(f"[{row['amount'] or ''}]") for tool in call]
        value = sum(tool["error"] is not None for tool in tools) / len(tools) if tools else None
    else:
        criterion = name.partition(":")[2]
        value = next((v["grade"] for v in json.loads(row["verdicts_json"]) if v["criterion"] == criterion), None)
    return math.nan if value is None else float(value)


def arms_of(
    engine: sa.Engine,
    deployment: str,
    metric: Metric,
    now: float,
    expected: Callable[[str, str], float] = lambda task, unit: 0.0,
) -> Arms:
    """Cells of a metric by stratum and arm, of live rollouts that ended at least `horizon_s` before `now`.

    One that has not ended after `LOST_S` (and `horizon_s`) is missing: it hangs, or its process was killed. Rollouts
    of a stage for which a flag set another share are a stratum of their own: base rates change with the time.

    Args:
        expected: the covariate of a task and a unit.
    """
    middles = _middles(engine, deployment)
    by_share: dict[tuple[int, str, float], dict[str, Cell]] = {}
    for (stage, kind, arm, propensity), entries in _rows(engine, deployment, metric, now):
        every, newer = _Sums(), _Sums()
        for unit, task, value, started_at in entries:
            shift = expected(task, unit)
            every.add(unit, value, shift)
            if started_at > middles.get(stage, math.inf):
                newer.add(unit, value, shift)
        share = round(propensity if arm == CANDIDATE else 1 - propensity, 6)
        by_share.setdefault((stage, kind, share), {})[arm] = every.cell(deployment, newer.cell(deployment))
    cells: dict[Stratum, dict[str, Cell]] = {}
    for (stage, kind, share), of_share in by_share.items():
        cells[stage, kind if (stage, kind) not in cells else f"{kind}, {share:.4%} on the candidate"] = of_share
    for of_arm in cells.values():
        for arm in (CHAMPION, CANDIDATE):
            of_arm.setdefault(arm, Cell())
    return cells


@dataclass
class _Sums:
    """Rollouts by unit: number of values, their sum and that of the covariate; of the others number and covariate."""

    scored: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    missing: dict[str, tuple[int, float]] = field(default_factory=dict)
    running: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, unit: str, value: float | None, expected: float) -> None:
        if value is not None and not math.isnan(value):
            count, total, shift = self.scored.get(unit, (0, 0.0, 0.0))
            self.scored[unit] = (count + 1, total + value, shift + expected)
            return
        without = self.running if value is None else self.missing
        count, shift = without.get(unit, (0, 0.0))
        without[unit] = (count + 1, shift + expected)

    def cell(self, salt: str, newer: Cell | None = None) -> Cell:
        rows = ((unit, *sums) for unit, sums in self.scored.items())
        return cell_of(rows, salt=salt, missing=self.missing, running=self.running, newer=newer)


def _middles(engine: sa.Engine, deployment: str) -> dict[int, float]:
    """The time between the first and the last start of a rollout, by stage."""
    columns = _ROLLOUTS.c
    query = (
        sa.select(columns.stage, (sa.func.min(columns.started_at) + sa.func.max(columns.started_at)) / 2)
        .where(*_live(deployment))
        .group_by(columns.stage)
    )
    with engine.connect() as connection:
        return {stage: float(middle) for stage, middle in connection.execute(query)}


def _rows(
    engine: sa.Engine, deployment: str, metric: Metric, now: float
) -> Iterator[tuple[tuple[int, str, str, float], Iterator[tuple[str, str, float | None, float]]]]:
    """Rollouts grouped by stage, task type, arm and propensity: (unit, task, value, start); None: it is running.

    They are read in batches.
    """
    columns = _ROLLOUTS.c
    running, lost = columns.ended_at.is_(None), now - max(metric.horizon_s, LOST_S)
    state = sa.case((sa.not_(running), 0), (columns.started_at <= lost, 1), else_=2).label("state")
    query = (
        sa.select(columns.stage, columns.task_type, columns.arm, sa.func.coalesce(columns.propensity, 0.5).label("p"),
                  columns.unit, columns.task_id, columns.started_at.label("began"), state, *columns_of(metric))
        .where(*_live(deployment), sa.or_(running, columns.ended_at <= now - metric.horizon_s))
        .order_by(columns.stage, columns.task_type, columns.arm, sa.text("p"))
    )  # fmt: skip

    def value(row: Any) -> float | None:
        return value_of(metric, row) if row["state"] == 0 else math.nan if row["state"] == 1 else None

    with engine.connect() as connection:
        result = connection.execution_options(yield_per=_BATCH).execute(query).mappings()
        for key, group in itertools.groupby(
            result, key=lambda row: (row["stage"], row["task_type"], row["arm"], row["p"])
        ):
            yield key, ((row["unit"] or "", row["task_id"], value(row), row["began"]) for row in group)


def pairs_of(engine: sa.Engine, deployment: str, metric: Metric) -> Paired:
    """Differences of replayed rollouts to the recorded ones.

    One that ended as an error has none: its model failed, or a tool with side effects had no recorded answer.
    """
    replayed, recorded = _ROLLOUTS.alias("replayed"), _ROLLOUTS.alias("recorded")
    on = recorded.c.id == replayed.c.group_id
    query = (
        sa.select(replayed.c.id, recorded.c.id, replayed.c.status)
        .select_from(replayed.join(recorded, on))
        .where(replayed.c.deployment == deployment, replayed.c.phase == SHADOW, replayed.c.ended_at.is_not(None))
    )
    differences, champions, missing = [], [], 0
    with engine.connect() as connection:
        ids = connection.execute(query).all()
        values = _values(connection, metric, {name for pair in ids for name in pair[:2]})
    for one, other, status in ids:
        candidate = values.get(one, math.nan) if status != "error" else math.nan
        champion = values.get(other, math.nan)
        if math.isnan(candidate) or math.isnan(champion):
            missing += 1
            continue
        differences.append(candidate - champion)
        champions.append(champion)
    mean = math.fsum(champions) / len(champions) if champions else math.nan
    return Paired(differences=differences, champion=mean, missing=missing)


def _values(connection: sa.Connection, metric: Metric, ids: set[str]) -> dict[str, float]:
    values, names = dict[str, float](), sorted(ids)
    for at in range(0, len(names), 500):
        query = sa.select(
            _ROLLOUTS.c.id, *[column for column in columns_of(metric) if column is not _ROLLOUTS.c.id]
        ).where(_ROLLOUTS.c.id.in_(names[at : at + 500]))
        for row in connection.execute(query).mappings():
            values[row["id"]] = value_of(metric, row)
    return values


def units_of(engine: sa.Engine, deployment: str, stage: int, share: float) -> dict[str, int]:
    """Units by arm whose first rollout of the deployment was in this stage, assigned with its share."""
    columns = _ROLLOUTS.c
    planned = sa.case((columns.arm == CANDIDATE, share), else_=1 - share)  # another one: a flag was set
    first = (
        sa.select(columns.unit, columns.arm)
        .where(*_live(deployment), sa.func.abs(columns.propensity - planned) < 1e-9)
        .group_by(columns.unit, columns.arm)
        .having(sa.func.min(columns.stage) == stage)
        .subquery()
    )
    with engine.connect() as connection:
        rows = connection.execute(sa.select(first.c.arm, sa.func.count()).group_by(first.c.arm)).all()
    return {str(arm): int(count) for arm, count in rows}


def requests_of(engine: sa.Engine, deployment: str, stage: int) -> dict[str, int]:
    """Ended rollouts of a stage by arm; replayed ones as those of the candidate."""
    columns = _ROLLOUTS.c
    query = (
        sa.select(columns.arm, sa.func.count())
        .where(columns.deployment == deployment, columns.stage == stage, columns.ended_at.is_not(None))
        .group_by(columns.arm)
    )
    with engine.connect() as connection:
        return {str(arm): int(count) for arm, count in connection.execute(query)}


# -- The covariate of a deployment: what is known of a rollout's value before the candidate has live traffic.
#
# From recorded rollouts of the champion and from the replays of the shadow step: how their task and their unit scored.
# A live rollout's value less its covariate has a smaller variance, and the difference of the arms the same expectation,
# because nothing of the covariate depends on the assignment (CUPED, Deng et al. 2013). It is fitted on these rollouts
# alone and does not change while the deployment runs, so the confidence sequences stay valid however often they are
# read.


FEWEST = 100  # recorded rollouts below which there is no covariate
_LEAST = 10.0  # explained share of their variance times their number that is not chance: about the square of a t value
_FOLDS = 5
_SHRINKAGES = (1.0, 3.0, 10.0, 30.0)  # number of values at which half of a task's or unit's mean counts
_RECORDED = 5000  # rollouts of the champion that the covariate is fitted on, at most
_RECENT_S = 90 * 86_400.0  # of this long before the deployment: older users and tasks say less, and cost a scan
_MOST_FIXED = 32  # covariates in memory, of at most some 10,000 numbers each


@dataclass(frozen=True, kw_only=True)
class Known:
    """Values that were measured before the first live step. Tasks and units are numbers from 0.

    Attributes:
        values, tasks, units, kinds: of each row; `kinds` is the task type.
        replayed: whether the row is a replay on the candidate. These count for their task alone.
    """

    values: np.ndarray
    tasks: np.ndarray
    units: np.ndarray
    kinds: np.ndarray
    replayed: np.ndarray


class Effects(NamedTuple):
    """What tasks and units add to a value, by their number."""

    tasks: np.ndarray
    units: np.ndarray


@dataclass(frozen=True)
class Covariate:
    """Expected deviation of a rollout's value from the mean of its task type, by task and unit."""

    tasks: Mapping[str, float] = field(default_factory=dict)
    units: Mapping[str, float] = field(default_factory=dict)

    def of(self, task: str, unit: str) -> float:
        """0 for a task and a unit that were not seen before."""
        return self.tasks.get(task, 0.0) + self.units.get(unit, 0.0)


_FIXED: dict[tuple[str, str], Covariate] = {}


def recorded_covariate(
    engine: sa.Engine, deployment: str, metric: Metric, *, champion: str, before: float, fixed: bool
) -> Covariate:
    """The covariate of a deployment: from the champion's newest rollouts of the 90 days before it started, and from its
    replays.

    Args:
        champion: name of the version.
        before: when the deployment started; seconds since the epoch.
        fixed: whether the shadow step is over: then it does not change, and is read once by each process.
    """
    if (deployment, metric.name) in _FIXED:
        return _FIXED[deployment, metric.name]
    columns = rollouts.c
    of_row = (columns.task_id, columns.unit, columns.task_type, columns.phase, *columns_of(metric))
    recorded = (
        sa.select(*of_row)
        .where(columns.version == champion, columns.phase == "deployed", columns.ended_at <= before)
        .where(columns.started_at.between(before - _RECENT_S, before))
        .order_by(columns.started_at.desc())
        .limit(_RECORDED)
    )
    replayed = sa.select(*of_row).where(
        columns.deployment == deployment, columns.phase == SHADOW, columns.status.in_(("done", "failed"))
    )
    rows = []
    with engine.connect() as connection:
        for query in (recorded, replayed):
            for row in connection.execute(query).mappings():
                if row["task_id"] and not math.isnan(value := value_of(metric, row)):
                    rows.append((row["task_id"], row["unit"] or "", row["task_type"], value, row["phase"] == SHADOW))
    covariate = covariate_of(rows)
    if fixed:
        while len(_FIXED) >= _MOST_FIXED:
            _FIXED.pop(next(iter(_FIXED)), None)
        _FIXED[deployment, metric.name] = covariate
    return covariate


def covariate_of(rows: Sequence[tuple[str, str, str, float, bool]]) -> Covariate:
    """The covariate from rows of task, unit, task type, value and whether it is a replay; empty where it explains
    nothing."""
    (tasks, task_codes), (units, unit_codes), (kinds, _) = (
        _numbered([row[0] for row in rows]), _numbered([row[1] for row in rows]), _numbered([row[2] for row in rows])
    )  # fmt: skip
    values, replayed = np.array([row[3] for row in rows], dtype=float), np.array([row[4] for row in rows], dtype=bool)
    known = Known(values=values, tasks=tasks, units=units, kinds=kinds, replayed=replayed)
    effects = fitted(known, tasks=len(task_codes), units=len(unit_codes))
    if effects is None:
        return Covariate()
    return Covariate(
        {name: float(effects.tasks[at]) for name, at in task_codes.items()},
        {name: float(effects.units[at]) for name, at in unit_codes.items()},
    )


def _numbered(names: Sequence[str]) -> tuple[np.ndarray, dict[str, int]]:
    """Names as numbers from 0, and the number of each name."""
    codes: dict[str, int] = {}
    return np.array([codes.setdefault(name, len(codes)) for name in names], dtype=int), codes


def fitted(known: Known, *, tasks: int, units: int) -> Effects | None:
    """Effects of tasks and units by least squares; None with too few rows, or where they explain too little.

    The two predictors of a recorded value are the means of its task and of its unit in the other folds, as deviations
    from the mean of the task type and arm, shrunk by n / (n + k). The k that explain most are used; weights are not
    negative. Each value is predicted without its own fold, as live values will be.

    Args:
        tasks, units: how many there are.
    """
    recorded = ~known.replayed
    if int(recorded.sum()) < FEWEST:
        return None
    deviations = _deviations(known)
    own = deviations[recorded]
    whole = float(own @ own)
    if whole <= 1e-9 * len(own):
        return None
    folds = np.full(len(recorded), -1)
    folds[recorded] = np.random.default_rng(0).integers(0, _FOLDS, len(own))
    of_tasks = _FoldSums(known.tasks, deviations, folds, tasks)
    of_units = _FoldSums(known.units[recorded], own, folds[recorded], units)
    best = _best(of_tasks, of_units, own)
    if (1 - best.left / whole) * len(own) < _LEAST:
        return None
    (weight_of_tasks, weight_of_units), (k_tasks, k_units) = best.weights, best.shrinkages
    return Effects(
        tasks=weight_of_tasks * of_tasks.total / (of_tasks.count + k_tasks),
        units=weight_of_units * of_units.total / (of_units.count + k_units),
    )


class _FoldSums:
    """Sums of deviations by task or unit, and those of all folds but the own one for each recorded value."""

    def __init__(self, numbers: np.ndarray, values: np.ndarray, folds: np.ndarray, size: int) -> None:
        self.total, self.count = _sums(numbers, values, size)
        own = folds >= 0
        in_fold, counts = _sums(numbers[own] * _FOLDS + folds[own], values[own], size * _FOLDS)
        at = numbers[own] * _FOLDS + folds[own]
        self.others = self.total[numbers[own]] - in_fold[at]
        self.number = self.count[numbers[own]] - counts[at]


@dataclass(frozen=True)
class _Fit:
    left: float
    weights: tuple[float, float]
    shrinkages: tuple[float, float]


def _best(tasks: _FoldSums, units: _FoldSums, values: np.ndarray) -> _Fit:
    """The fit that leaves the smallest sum of squares."""
    from scipy import optimize

    fits = []
    for of_task, of_unit in itertools.product(_SHRINKAGES, repeat=2):
        design = np.stack([tasks.others / (tasks.number + of_task), units.others / (units.number + of_unit)], axis=1)
        weights, norm = optimize.nnls(design, values)
        fits.append(_Fit(float(norm) ** 2, (float(weights[0]), float(weights[1])), (of_task, of_unit)))
    return min(fits, key=lambda fit: fit.left)


def _deviations(known: Known) -> np.ndarray:
    """Values less the mean of their task type, recorded and replayed ones apart."""
    groups = 2 * known.kinds + known.replayed
    total, count = _sums(groups, known.values, int(groups.max()) + 1)
    return known.values - (total / np.maximum(count, 1))[groups]


def _sums(numbers: np.ndarray, values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum and count of values by number."""
    return np.bincount(numbers, values, minlength=size), np.bincount(numbers, minlength=size).astype(float)
