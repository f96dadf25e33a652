"""Lists of the store's content: rollouts by filters, and runs. Does not import DSPy."""

import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.errors import DataError, StoreError
from assay.models.unrecorded import Unrecorded
from assay.support.names import is_name, place_in
from assay.traces.records import NOT_AGENTS, Rollout, Transition
from assay.traces.store import Store, tables as schema
from assay.traces.store.leases import held_among, leases_of_run
from assay.traces.store.location import home_of
from assay.traces.store.rows import rollout_of
from assay.traces.store.store import PAID, UNPRICED, StoreReads

INTERRUPTED = "interrupted"  # status of `interrupted_runs`
_NEWEST = 10_000  # rollouts that `known_programs` reads: DISTINCT over a whole store takes seconds


def find_rollouts(
    store: Store,
    *,
    equal: dict[str, str],
    program: str | None = None,
    since: float | None = None,
    least: float | None = None,
    most: float | None = None,
    limit: int | None = None,
) -> Iterator[Rollout]:
    """Rollouts without their transitions, newest first.

    Args:
        equal: values by column: `run_id`, `task_id`, `split`, `status`, `phase`, `failure`, `source`, …; rollouts of
            judges and simulated users are included only with their `source`.
        program: a part of the program's name; case is ignored.
        since: earliest start, in seconds since the epoch.
        least: lowest score, in [0, 1]; unscored rollouts are left out if it or `most` is given.
        most: highest score, in [0, 1].
        limit: maximum number of rollouts; None for all.
    """
    table = schema.rollouts
    query = sa.select(table).order_by(table.c.started_at.desc(), table.c.id.desc()).limit(limit)
    for name, value in equal.items():
        query = query.where(table.c[name] == value)
    if "source" not in equal:
        query = query.where(table.c.source.not_in(NOT_AGENTS))
    if program is not None:
        query = query.where(table.c.program.icontains(program, autoescape=True))
    if since is not None:
        query = query.where(table.c.started_at >= since)
    if least is not None:
        query = query.where(table.c.score >= least)
    if most is not None:
        query = query.where(table.c.score <= most)
    with store.engine.connect() as connection:
        for row in connection.execution_options(yield_per=500).execute(query).mappings():
            yield rollout_of(row)


def known_programs(store: Store) -> list[str]:
    """Sorted names of the programs of the newest 10,000 rollouts."""
    table = schema.rollouts
    newest = sa.select(table.c.program).order_by(table.c.started_at.desc(), table.c.id.desc()).limit(_NEWEST).subquery()
    with store.engine.connect() as connection:
        return sorted(name for name in connection.execute(sa.select(newest.c.program).distinct()).scalars() if name)


def list_runs(
    store: Store,
    *,
    limit: int | None = None,
    kind: str | None = None,
    status: str | None = None,
    program: str | None = None,
    since: float | None = None,
    before: tuple[float, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs, newest first: id, kind, status, program, model, times, settings, number of unrecorded calls.

    Args:
        kind: the command, such as `compile`.
        status: see `interrupted_runs`.
        program: a part of the program's name; case is ignored.
        since: earliest start, in seconds since the epoch.
        before: start and id of a run; only older ones are listed.
    """
    table = schema.runs
    query = sa.select(table).order_by(table.c.started_at.desc(), table.c.id.desc())
    interrupted = interrupted_runs(store)
    if kind is not None:
        query = query.where(table.c.kind == kind)
    if status == INTERRUPTED:
        query = query.where(table.c.id.in_(interrupted))
    elif status is not None:
        query = query.where(table.c.status == status, table.c.id.not_in(interrupted))
    if since is not None:
        query = query.where(table.c.started_at >= since)
    if before is not None:
        query = query.where(sa.tuple_(table.c.started_at, table.c.id) < sa.tuple_(*before))
    if program is None:
        query = query.limit(limit)
    with store.engine.connect() as connection:
        runs = (_run(row, interrupted) for row in connection.execution_options(yield_per=200).execute(query).mappings())
        # The program is inside the settings, so that it is compared here.
        matching = (run for run in runs if program is None or program.lower() in str(run["program"] or "").lower())
        return list(itertools.islice(matching, limit))


def check_run(store: Store, run_id: str | None) -> None:
    """Refuses a run that is neither recorded nor named by a rollout; None is not a run.

    Raises:
        DataError: there is no such run.
    """
    if run_id is None:
        return
    runs, rollouts = schema.runs.c.id, schema.rollouts.c.run_id
    with store.engine.connect() as connection:
        for column in (runs, rollouts):
            if connection.execute(sa.select(column).where(column == run_id).limit(1)).first() is not None:
                return
        begun = connection.execute(sa.select(runs).where(runs.startswith(run_id, autoescape=True)).limit(2)).scalars()
        hint = f". Did you mean {full[0]!r}?" if len(full := list(begun)) == 1 else ""
    raise DataError(f"there is no run {run_id!r}; `assay runs list` shows the runs{hint}")


def find_run(store: Store, id_prefix: str) -> dict[str, Any]:
    """One run, with its settings.

    Args:
        id_prefix: the run's id, or the beginning of it.
    Raises:
        StoreError: no run's id begins with `id_prefix`, or several do.
    """
    table = schema.runs
    query = sa.select(table).where(table.c.id.startswith(id_prefix, autoescape=True)).order_by(table.c.id).limit(2)
    with store.engine.connect() as connection:
        rows = list(connection.execute(query).mappings())
    exact = [row for row in rows if row["id"] == id_prefix]  # the first, as it is shorter than the others
    if len(exact or rows) != 1:
        raise StoreError(
            f"{'no' if not rows else 'more than one'} run's id starts with {id_prefix!r}; see assay runs list"
        )
    return _run((exact or rows)[0], interrupted_runs(store))


def phases_of(store: Store, run_id: str) -> list[dict[str, Any]]:
    """Counts and mean scores of a run's rollouts by phase, status and source. Reads every rollout of the run.

    The source separates rollouts of judges from rollouts of tasks.
    """
    rollouts = schema.rollouts
    columns = (rollouts.c.phase, rollouts.c.status, rollouts.c.source)
    counted = (
        sa.select(*columns, sa.func.count(), sa.func.avg(rollouts.c.score))
        .where(rollouts.c.run_id == run_id)
        .group_by(*columns)
    )
    names = ("phase", "status", "source", "n", "mean_score")
    with store.engine.connect() as connection:
        rows = [dict(zip(names, row, strict=True)) for row in connection.execute(counted.order_by(*columns))]
    return [row | ({} if row["mean_score"] is None else {"mean_score": float(row["mean_score"])}) for row in rows]


def show_run(store: Store, id_prefix: str) -> dict[str, Any]:
    """`find_run`, with `phases_of` the run as `rollouts`."""
    run = find_run(store, id_prefix)
    return {**run, "rollouts": phases_of(store, run["id"])}


def run_folder(where: str | Path | None, run_id: str) -> Path:
    """The folder of a run next to the store. Whether there is one is not checked.

    An id that is not a file name, such as one of another program, is replaced by its hash.
    """
    name = run_id if is_name(run_id) else hashlib.sha256(run_id.encode("utf-8", "replace")).hexdigest()
    return place_in(home_of(where) / "runs", name, "run_id")


def finished_reports(store: StoreReads, *run_ids: str) -> dict[str, dict[str, Any]]:
    """The reports of runs; without those that are in progress or whose command writes none."""
    return {run: state["report"] for run, state in store.states(*run_ids).items()}


def finished_report(store: StoreReads, run_id: str) -> dict[str, Any] | None:
    """The report of a run; None if the run is in progress or its command writes none."""
    return finished_reports(store, run_id).get(run_id)


def result_of(store: StoreReads, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """The report of a run, with `stopped` for one that ended before its report; None if it is in progress."""
    report, reason = finished_report(store, run["id"]), failure_of(store, run["id"])
    if reason is None and (report is not None or run["status"] not in ("stopped", "failed")):
        return report
    return {**(report or {}), "stopped": reason or "by the user"}


def failure_of(store: StoreReads, run_id: str) -> str | None:
    """Why a run failed or was stopped before its report; None if that is not known."""
    table = schema.runs
    with store.engine.connect() as connection:
        return connection.execute(sa.select(table.c.failure).where(table.c.id == run_id)).scalar()


def interrupted_runs(store: StoreReads) -> set[str]:
    """Runs that the store has as running although their process has ended: nobody holds the lease of their job, or a
    later run of the job has it. They can be resumed. Runs without a lease, such as gateways, are not among them."""
    table = schema.runs
    with store.engine.connect() as connection:
        running = list(connection.execute(sa.select(table.c.id).where(table.c.status == "running")).scalars())
    if not running:
        return set()
    names = {run: leases_of_run(run) for run in sorted(running, key=lambda run: (len(run), run))}
    latest = {name: run for run, of_run in names.items() for name in of_run}
    held = held_among(store.engine, latest)
    return {
        run for run, of_run in names.items()
        if any(name in held for name in of_run) and not any(held.get(name) and latest[name] == run for name in of_run)
    }  # fmt: skip


def _run(row: Any, interrupted: Collection[str]) -> dict[str, Any]:
    config = _json_object(row["config"])
    ended, resumed = row["ended_at"], row["resumed_at"]
    begun = row["started_at"] if resumed is None else resumed
    return {
        "id": row["id"], "kind": row["kind"], "status": INTERRUPTED if row["id"] in interrupted else row["status"],
        "program": config.get("program") or config.get("judge"), "model": config.get("model"),
        "started_at": row["started_at"], "resumed_at": resumed, "ended_at": ended,
        "seconds": None if ended is None else ended - begun, "config": config,
        **Unrecorded(int(row["unseen"] or 0), row["unrecorded_reason"], lost=int(row["lost"] or 0)).to_dict(),
    }  # fmt: skip


def _json_object(text: Any) -> dict[str, Any]:
    import orjson

    parsed: dict[str, Any] = orjson.loads(text) if isinstance(text, str | bytes) else dict(text)
    return parsed


# -- LM calls, tokens and dollars of a run, by phase or by model. Reads every call of the run.


@dataclass(frozen=True, kw_only=True)
class PhaseUsage:
    """Usage of one phase and source of rollouts: calls that were made, and those that equal calls answered (`cached`).

    `cost_usd` is None if a call has no known price.
    """

    phase: str
    source: str
    calls: int
    cached: int
    tokens: int
    cost_usd: float | None


@dataclass(frozen=True, kw_only=True)
class ModelUsage:
    """Usage of one model, counted as that of a job: answers from a cache have no tokens and cost nothing.

    `cost_usd` is None if a call has no known price.
    """

    model: str
    calls: int
    cached: int
    tokens: int
    cost_usd: float | None


_ROLLOUTS, _STEPS = schema.rollouts, schema.transitions
_CACHED = sa.case((_STEPS.c.cached, 1), else_=0)
_TOKENS = sa.func.coalesce(_STEPS.c.prompt_tokens, 0) + sa.func.coalesce(_STEPS.c.completion_tokens, 0)


def usage_of_phases(store: StoreReads, run_id: str) -> list[PhaseUsage]:
    """Usage by phase and source, the most calls first."""
    query = _query(_ROLLOUTS.c.phase, _ROLLOUTS.c.source, tokens=_TOKENS).where(_ROLLOUTS.c.run_id == run_id)
    with store.engine.connect() as connection:
        usage = [
            PhaseUsage(phase=phase, source=source, **_amounts(*amounts))
            for phase, source, *amounts in connection.execute(query)
        ]
    return sorted(usage, key=lambda row: -row.calls)


def usage_of_models(store: StoreReads, *run_ids: str) -> list[ModelUsage]:
    """Usage of runs by model, the most calls first; also of the runs that are parts of them (`RUN_ID.PART`)."""
    column = _ROLLOUTS.c.run_id
    parts = [sa.and_(column > f"{run_id}.", column < f"{run_id}/") for run_id in run_ids]  # "/" follows "."
    query = _query(_STEPS.c.model, tokens=_TOKENS * (1 - _CACHED)).where(sa.or_(column.in_(run_ids), *parts))
    with store.engine.connect() as connection:
        return added_up(ModelUsage(model=model, **_amounts(*amounts)) for model, *amounts in connection.execute(query))


def usage_by_model(transitions: Iterable[Transition]) -> list[ModelUsage]:
    """Usage of calls by model, the most calls first."""
    return added_up(
        ModelUsage(
            model=call.model, calls=int(not call.cached), cached=int(call.cached),
            tokens=0 if call.cached else (call.prompt_tokens or 0) + (call.completion_tokens or 0),
            cost_usd=0.0 if call.cached or (call.cost_usd is None and call.error is not None) else call.cost_usd,
        )
        for call in transitions
    )  # fmt: skip


def added_up(usages: Iterable[ModelUsage]) -> list[ModelUsage]:
    """One row for each model, the most calls first."""
    rows: dict[str, ModelUsage] = {}
    for one in usages:
        before = rows.get(one.model, ModelUsage(model=one.model, calls=0, cached=0, tokens=0, cost_usd=0.0))
        rows[one.model] = ModelUsage(
            model=one.model, calls=before.calls + one.calls, cached=before.cached + one.cached,
            tokens=before.tokens + one.tokens,
            cost_usd=None if before.cost_usd is None or one.cost_usd is None else before.cost_usd + one.cost_usd,
        )  # fmt: skip
    return sorted(rows.values(), key=lambda row: (-row.calls, -row.cached, row.model))


def _query(*columns: Any, tokens: Any) -> Any:
    return (
        sa.select(
            *columns, sa.func.count(), sa.func.sum(_CACHED), sa.func.sum(tokens), sa.func.sum(PAID),
            sa.func.sum(UNPRICED),
        )
        .select_from(_ROLLOUTS.join(_STEPS, _STEPS.c.rollout_id == _ROLLOUTS.c.id))
        .group_by(*columns)
    )  # fmt: skip


def _amounts(count: int, cached: int, tokens: int, cost: float, unpriced: int) -> dict[str, Any]:
    return {
        "calls": count - int(cached), "cached": int(cached), "tokens": int(tokens),
        "cost_usd": None if unpriced else float(cost or 0.0),
    }  # fmt: skip
