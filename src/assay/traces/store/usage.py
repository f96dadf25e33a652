"""LM calls, tokens and dollars of a run by phase. Reads every call of the run by an index that covers them."""

from dataclasses import dataclass

import sqlalchemy as sa

from assay.traces.store import tables as schema
from assay.traces.store.costs import PAID, UNPRICED
from assay.traces.store.reads import StoreReads

__all__ = ["PhaseUsage", "usage_of_phases"]


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


def usage_of_phases(store: StoreReads, run_id: str) -> list[PhaseUsage]:
    """Usage by phase and source, the most calls first."""
    rollouts, steps = schema.rollouts, schema.transitions
    columns = (rollouts.c.phase, rollouts.c.source)
    tokens = sa.func.coalesce(steps.c.prompt_tokens, 0) + sa.func.coalesce(steps.c.completion_tokens, 0)
    query = (
        sa.select(
            *columns, sa.func.count(), sa.func.sum(sa.case((steps.c.cached, 1), else_=0)), sa.func.sum(tokens),
            sa.func.sum(PAID), sa.func.sum(UNPRICED),
        )
        .select_from(rollouts.join(steps, steps.c.rollout_id == rollouts.c.id))
        .where(rollouts.c.run_id == run_id)
        .group_by(*columns)
    )  # fmt: skip
    with store.engine.connect() as connection:
        usage = [
            PhaseUsage(
                phase=phase, source=source, calls=count - int(cached), cached=int(cached), tokens=int(tokens),
                cost_usd=None if unknown else float(cost or 0.0),
            )
            for phase, source, count, cached, tokens, cost, unknown in connection.execute(query)
        ]  # fmt: skip
    return sorted(usage, key=lambda row: -row.calls)
