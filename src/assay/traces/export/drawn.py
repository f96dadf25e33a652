"""Counts of a selection by query: rollouts, LM calls, and excluded rollouts by reason. Does not load rollouts."""

from collections import Counter
from typing import Any

import sqlalchemy as sa

from assay.errors import DataError
from assay.traces.export.selection import Selection, is_sealed, lacks_consent
from assay.traces.records import NOT_AGENTS
from assay.traces.store import Store
from assay.traces.store import tables as schema

__all__ = ["check_named", "count_drawn", "count_turns", "exclusion_counts"]

_NAMED = 10  # names listed in the error message for an unknown name


def count_turns(store: Store, selection: Selection) -> int:
    """Number of LM calls in the selection, including calls on sealed inputs."""
    r, t = schema.rollouts, schema.transitions
    with store.engine.connect() as connection:
        return int(
            connection.execute(
                sa.select(sa.func.count()).select_from(t.join(r, r.c.id == t.c.rollout_id)).where(*selection.where())
            ).scalar()
            or 0
        )


def count_drawn(store: Store, selection: Selection) -> int:
    """Number of rollouts in the selected runs, programs, task types and sources, including excluded rollouts."""
    r = schema.rollouts
    with store.engine.connect() as connection:
        return int(
            connection.execute(sa.select(sa.func.count()).select_from(r).where(*_drawn_by_index(selection))).scalar()
            or 0
        )


def _drawn_by_index(selection: Selection) -> list[Any]:
    """Conditions of `Selection.drawn`. Without named values, only indexed columns are used, so that counting reads no
    rows; preflight rollouts are counted in that case."""
    if selection.rollouts or any(values for _, values in selection.named().values()):
        return selection.drawn()
    return [schema.rollouts.c.source.not_in(("outside", *NOT_AGENTS))]


def check_named(store: Store, selection: Selection) -> None:
    """Check that at least one rollout has each selected run, program, task type, source and tenant.

    Raises:
        DataError: No rollout has the value; the message lists existing values.
    """
    with store.engine.connect() as connection:
        for kind, (column, values) in {
            **selection.named(),
            "tenant": (schema.rollouts.c.tenant, selection.tenants),
        }.items():
            for value in values:
                if connection.execute(sa.select(sa.literal(1)).where(column == value).limit(1)).first() is None:
                    existing = (
                        connection.execute(sa.select(column).where(column.is_not(None)).distinct().limit(_NAMED + 1))
                        .scalars()
                        .all()
                    )
                    names = ", ".join(sorted(map(repr, existing[:_NAMED]))) + (", …" if len(existing) > _NAMED else "")
                    raise DataError(
                        f"no rollout has the {kind} {value!r}. Give the full name; the store has {names or 'none'}"
                    )


def exclusion_counts(store: Store, selection: Selection) -> dict[str, int]:
    """Number of excluded rollouts by reason, over the selected runs, programs, task types and sources.

    Rollouts whose inputs are sealed are not included: `read_groups` counts them.
    """
    r = schema.rollouts
    reasons = {
        "of the gate or test split": is_sealed(),
        "still running": r.c.status == "running",
        "ended by an error of the model or the infrastructure": r.c.status == "error",
        "of a tenant that was not selected": sa.and_(r.c.tenant.is_not(None), r.c.tenant.not_in(selection.tenants)),
        "with a consent that was not given": lacks_consent(),
        **({"without any consent": r.c.consent.is_(None)} if selection.require_consent else {}),
        **({"without a human rating": r.c.human_rating.is_(None)} if selection.rated else {}),
    }
    counts: Counter[str] = Counter()
    drawn = _drawn_by_index(selection)
    with store.engine.connect() as connection:
        for name, condition in reasons.items():
            counts[name] = (
                connection.execute(sa.select(sa.func.count()).select_from(r).where(*drawn, condition)).scalar() or 0
            )
    return {name: count for name, count in counts.items() if count}
