"""What a killed run left behind: its rollouts are closed, its calls billed, and what a replay did not reach is removed."""

import time
from pathlib import Path

import sqlalchemy as sa

from assay.errors import FailureKind
from assay.models import ResponseCache
from assay.models.ledger import Ledger
from assay.models.lm import bill_answered
from assay.traces import schema
from assay.traces.recorder import Recorder
from assay.traces.store import Store

__all__ = ["close_running", "drop_cut_off", "opened_ledger"]

_REASON = "cut off: the process that ran it ended before it did"


def close_running(store: Store, key: str) -> int:
    """Ends the rollouts of a job that are still `running` though nobody works on them: they become errors of kind `cap`.

    Args:
        key: the start of the ids of the job's runs; the caller holds the job's lock.
    Returns:
        How many there were.
    """
    store.flush()
    r = schema.rollouts
    mine = (r.c.run_id >= key, r.c.run_id < key + "\U0010ffff", r.c.status == "running")
    values = {"status": "error", "error": _REASON, "failure": FailureKind.CAP.value, "ended_at": time.time()}
    with store.engine.begin() as connection:
        return int(connection.execute(sa.update(r).where(*mine).values(**values)).rowcount)


def drop_cut_off(store: Store, run_id: str, before: float) -> int:
    """Removes the rollouts that a cap or a kill cut off before `before` (epoch seconds) and that the replay did not run again.

    For a run that has ended as it should: what it still needs was overwritten by then, and its start is later.
    """
    store.flush()
    r, t = schema.rollouts, schema.transitions
    cut = (r.c.run_id == run_id, r.c.status == "error", r.c.failure == FailureKind.CAP.value, r.c.started_at < before)
    with store.engine.begin() as connection:
        connection.execute(sa.delete(t).where(t.c.rollout_id.in_(sa.select(r.c.id).where(*cut))))
        return int(connection.execute(sa.delete(r).where(*cut)).rowcount)


def opened_ledger(path: Path, recorder: Recorder, store: Store, cache: ResponseCache) -> Ledger:
    """The run's ledger, in which what a killed process left open is settled as far as its answers are known."""
    known = path.is_file()
    if not recorder.resumed:
        for name in ("", "-wal", "-shm"):
            Path(f"{path}{name}").unlink(missing_ok=True)
    ledger = Ledger(path, owner=recorder.owner)
    if recorder.resumed and not known:  # begun on another machine, or before there were ledgers
        for phase, usage in store.spent(recorder.run_id).items():
            ledger.add(f"before/{phase}", phase, vars(usage))
    bill_answered(ledger, cache)
    return ledger
