"""Ends rollouts that earlier gateways left open. Reads and writes the store only; no gateway needs to run."""

import time

from assay.errors import FailureKind
from assay.traces.store import Store

__all__ = ["NEVER_CLOSED", "close_abandoned"]

NEVER_CLOSED = "the rollout was never closed"  # also how such a rollout is recognised when it continues


def close_abandoned(store: Store, *, idle_s: float) -> dict[str, int]:
    """Ends rollouts that killed gateways left open: `done` with an answer, else `error` (never closed).

    Args:
        idle_s: seconds since the last call, or since the start, after which a rollout is ended.
    Returns:
        Number of rollouts ended as `done`, ended as `error`, and still `running` because of a later call.
    """
    ended = {"done": 0, "error": 0, "running": 0}
    store.flush()
    for rollout_id in [r.id for r in store.rollouts(limit=None) if r.source == "gateway" and r.status == "running"]:
        rollout = store.rollout(rollout_id)
        last_call = max([rollout.started_at, *(t.started_at + t.latency_ms / 1000 for t in rollout.transitions)])
        if time.time() - last_call < idle_s:
            ended["running"] += 1
            continue
        answered = rollout.prediction is not None
        rollout.status = "done" if answered else "error"
        rollout.failure = None if answered else FailureKind.AGENT
        rollout.error = None if answered else NEVER_CLOSED
        rollout.ended_at, rollout.transitions = time.time(), []
        store.put_rollout(rollout)
        ended[rollout.status] += 1
    return ended
