"""The calls of judges about a rollout, and the rollout that a judge's call is about.

A judge's call is a rollout of its own, of the same run and task. The store has no link between them: calls are told
apart by the output that was judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa

from assay.traces.records import NOT_AGENTS, Rollout
from assay.traces.store import Store
from assay.traces.store import tables as schema

__all__ = ["JudgeCall", "judge_calls", "judged_rollout"]

_MOST = 2_000  # rollouts of a task that are read


@dataclass(frozen=True, kw_only=True)
class JudgeCall:
    """A judge's call about a rollout; `verdict` is empty if it gave none."""

    rollout_id: str
    question: str
    verdict: str
    confidence: float | None


def judge_calls(store: Store, rollout: Rollout) -> list[JudgeCall]:
    """The calls of judges about the output of a rollout: of each question the first one after the rollout began."""
    if rollout.source in NOT_AGENTS or not rollout.verdicts or not rollout.prediction:
        return []
    table = schema.rollouts
    columns = (table.c.id, table.c.program, table.c.inputs_json, table.c.prediction_json, table.c.started_at)
    of_task = sa.and_(table.c.task_id == rollout.task_id, table.c.group_id == rollout.task_id)
    found: dict[str, JudgeCall] = {}
    for row in sorted(_rows(store, columns, of_task, rollout.run_id), key=lambda row: row.started_at):
        if row.source != "judge" or row.started_at < rollout.started_at or row.program in found:
            continue
        if _is_about(orjson.loads(row.inputs_json), rollout.prediction):
            said = orjson.loads(row.prediction_json or "null") or {}
            found[row.program] = JudgeCall(
                rollout_id=row.id, question=row.program, verdict=str(said.get("verdict") or ""),
                confidence=said.get("confidence"),
            )  # fmt: skip
    return list(found.values())


def judged_rollout(store: Store, call: Rollout) -> str:
    """The id of the rollout that a judge's call is about: the last one before it with this output; else empty."""
    if call.source != "judge" or not call.task_id:
        return ""
    table = schema.rollouts
    columns = (table.c.id, table.c.prediction_json, table.c.started_at)
    rows = _rows(store, columns, table.c.task_id == call.task_id, call.run_id)
    for row in sorted(rows, key=lambda row: -row.started_at):
        is_before = row.source not in NOT_AGENTS and row.started_at <= call.started_at
        if is_before and _is_about(call.inputs, orjson.loads(row.prediction_json or "{}") or {}):
            return str(row.id)
    return ""


def _rows(store: Store, columns: tuple[Any, ...], of_task: Any, run_id: str) -> list[Any]:
    """Rollouts of a task in one run, found by the index of tasks, of which at most `_MOST` are read."""
    table = schema.rollouts
    some = sa.select(table.c.id, table.c.run_id).where(of_task).limit(_MOST).subquery("found")
    query = sa.select(*columns, table.c.source).join_from(some, table, some.c.id == table.c.id)
    with store.engine.connect() as connection:
        return list(connection.execute(query.where(table.c.run_id == run_id)))


def _is_about(shown: Mapping[str, Any], prediction: Mapping[str, Any]) -> bool:
    """Whether a judge that was shown these fields judged this prediction."""
    from assay.judges.questions import output_of

    outputs = {name: value for name, value in shown.items() if name.startswith("output")}
    if outputs:
        return any(
            value == (prediction.get(field) if dot else output_of(prediction))
            for (_, dot, field), value in ((name.partition("."), value) for name, value in outputs.items())
        )
    return any(shown.get(name) == value for name, value in prediction.items())
