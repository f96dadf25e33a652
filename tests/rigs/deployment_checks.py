"""What must hold of deployments in a store at any moment, also while a process is killed. Reads only."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.deployment.evidence import arm_of
from assay.traces.store import store_address, tables as schema

_Row = Mapping[str, Any]
_STATUS = {"promote": "promoted", "rollback": "rolled_back", "pause": "paused", "resume": "running"}


@dataclass(frozen=True)
class Rows:
    """One snapshot of the store."""

    deployments: Sequence[_Row]
    decisions: Sequence[_Row]
    aliases: Sequence[_Row]
    rollouts: Sequence[_Row]


def snapshot(store: str, *, rollouts: bool) -> Rows:
    """All rows of deployments, of one moment.

    Args:
        rollouts: also those of their rollouts.
    """
    engine = sa.create_engine(store_address(store).url, poolclass=sa.NullPool)
    r = schema.rollouts.c
    columns = (r.id, r.deployment, r.stage, r.arm, r.unit, r.propensity)
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN")  # the driver begins none for reads
        else:
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        tables = (schema.deployments, schema.deployment_decisions, schema.agent_aliases)
        rows: list[Sequence[Any]] = [connection.execute(sa.select(table)).mappings().all() for table in tables]
        query = sa.select(*columns).where(r.deployment.is_not(None), r.phase == "deployed")
        rows.append(connection.execute(query).mappings().all() if rollouts else [])
    engine.dispose()
    return Rows(*rows)


def problems_in(store: str, log: Path, *, rollouts: bool) -> list[str]:
    """What is wrong in a store; empty if nothing is.

    - Every decision is one row: their numbers are those of the deployment without a gap, and no step is taken twice.
    - Status and step are those that the decisions give.
    - Aliases were moved by exactly the decisions that move them, both aliases or none.
    - What a call has returned is in the store.
    - With `rollouts`: every rollout's arm is that of its unit at the share of its step.

    Args:
        log: a JSON line for each decision that a call has returned.
    """
    # before the snapshot: what is in the log now must be in the store
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
    rows = snapshot(store, rollouts=rollouts)
    problems, by_id = list[str](), {row["id"]: row for row in rows.deployments}
    for deployment in rows.deployments:
        history = sorted((d for d in rows.decisions if d["deployment"] == deployment["id"]), key=lambda d: d["number"])
        problems += [f"{deployment['id']}: {text}" for text in _history(deployment, history)]
        problems += [f"{deployment['id']}: {text}" for text in _aliases(deployment, history, rows.aliases)]
    problems += _champion(rows)
    stored = Counter((d["deployment"], d["action"], d["rule"], d["stage"]) for d in rows.decisions)
    returned = Counter((d["deployment"], d["action"], d["rule"], d["stage"]) for d in lines)
    problems += [f"{count} of {stored[key]} returned: {key}" for key, count in returned.items() if count > stored[key]]
    return [*problems, *_arms(rows.rollouts, by_id)]


def _history(deployment: _Row, history: Sequence[_Row]) -> Iterator[str]:
    numbers = [d["number"] for d in history]
    if numbers != list(range(1, deployment["decided"] + 1)):
        yield f"decided {deployment['decided']} times, but the decisions are numbered {numbers}"
    status, step = "running", 0
    for decision in history:
        if decision["stage"] != step:
            yield f"decision {decision['number']} was taken in step {decision['stage']}, after {step} had been reached"
        step += decision["action"] == "next"
        status = _STATUS.get(decision["action"], status)
    if (status, step) != (deployment["status"], deployment["stage"]):
        yield f"is {deployment['status']} in step {deployment['stage']}; its decisions give {status} in {step}"
    is_active = status in ("running", "paused")
    if is_active != (deployment["active"] is not None):
        yield f"is {status}, and active is {deployment['active']!r}"


def _aliases(deployment: _Row, history: Sequence[_Row], aliases: Sequence[_Row]) -> Iterator[str]:
    champion, candidate = deployment["champion"], deployment["candidate"]
    expected, is_promoted = Counter({("candidate", candidate): 1}), False
    for decision in history:
        if decision["action"] == "promote":
            expected.update([("champion", candidate), ("previous", champion)])
            is_promoted = True
        elif decision["action"] == "rollback" and is_promoted:
            expected.update([("champion", champion), ("previous", candidate)])
    moved = Counter((a["alias"], a["number"]) for a in aliases if a["why"].startswith(f"deployment {deployment['id']}"))
    if moved != expected:
        yield f"aliases were moved {dict(moved)}, expected {dict(expected)}"


def _champion(rows: Rows) -> Iterator[str]:
    """At most one deployment is active, and it compares with the champion."""
    active = [row for row in rows.deployments if row["active"] is not None]
    if len(active) > 1:
        yield f"{len(active)} deployments are active"
    moves = sorted((a for a in rows.aliases if a["alias"] == "champion"), key=lambda a: a["id"])
    for row in active:
        if row["champion"] != moves[-1]["number"]:
            yield f"the champion is {moves[-1]['number']}, and the active deployment compares with {row['champion']}"


def _arms(rollouts: Sequence[_Row], deployments: Mapping[str, _Row]) -> Iterator[str]:
    changed: dict[tuple[str, str], tuple[int, str]] = {}
    for row in sorted(rollouts, key=lambda row: (row["stage"], row["id"])):
        step = json.loads(deployments[row["deployment"]]["plan_json"])["steps"][row["stage"]]
        arm = arm_of(row["unit"], salt=row["deployment"], share=step["weight"] / 100)
        if row["arm"] != arm:
            yield f"rollout {row['id']} is on {row['arm']}; its unit is on {arm} at {step['weight']} %"
        before = changed.setdefault((row["deployment"], row["unit"]), (row["stage"], row["arm"]))
        if before[1] == "candidate" and row["arm"] != "candidate":
            yield f"unit {row['unit']} went from the candidate back to {row['arm']} in deployment {row['deployment']}"
        changed[row["deployment"], row["unit"]] = (row["stage"], row["arm"])
