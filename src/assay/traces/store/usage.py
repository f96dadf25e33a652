"""LM calls, tokens and dollars of a run, by phase or by model. Reads every call of the run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from assay.traces.records import Transition
from assay.traces.store import tables as schema
from assay.traces.store.costs import PAID, UNPRICED
from assay.traces.store.reads import StoreReads


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


def usage_of_models(store: StoreReads, run_id: str) -> list[ModelUsage]:
    """Usage of a run by model, the most calls first; also of the runs that are parts of it (`RUN_ID.PART`)."""
    column, parts = _ROLLOUTS.c.run_id, f"{run_id}."
    query = _query(_STEPS.c.model, tokens=_TOKENS * (1 - _CACHED)).where(
        sa.or_(column == run_id, sa.and_(column > parts, column < f"{run_id}/"))  # "/" follows "."
    )
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
