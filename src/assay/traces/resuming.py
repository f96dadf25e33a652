"""Cleans up after a killed run: closes its rollouts, settles its ledger and removes rollouts that were not replayed."""

import time
from contextlib import suppress
from pathlib import Path

import sqlalchemy as sa

from assay.errors import FailureKind, StoreError
from assay.models import ResponseCache
from assay.models.cache import Ledger
from assay.models.recording import bill_answered
from assay.models.unrecorded import Unrecorded
from assay.traces.recorder import Recorder
from assay.traces.store import Store, tables as schema

_REASON = "interrupted: the process ended before the rollout did"


def close_running(store: Store, key: str) -> list[str]:
    """Set abandoned rollouts of a job from `running` to `error` with the failure kind `cap`.

    Args:
        key: Prefix of the ids of the job's runs. The caller must hold the job's lock.
    Returns:
        Ids of their tasks.
    """
    store.flush()
    return _close(store, key)


def _close(store: Store, key: str) -> list[str]:
    r = schema.rollouts
    abandoned = (r.c.run_id >= key, r.c.run_id < key + "\U0010ffff", r.c.status == "running")
    values = {"status": "error", "error": _REASON, "failure": FailureKind.CAP.value, "ended_at": time.time()}
    with store.changing() as connection:
        tasks = connection.execute(sa.select(r.c.task_id).where(*abandoned)).scalars().all()
        connection.execute(sa.update(r).where(*abandoned).values(**values))
    return sorted({task for task in tasks if task})


def end_on_full_disk(store: Store, run_id: str, status: str, unrecorded: Unrecorded) -> None:
    """Write that a run and its rollouts have ended, in small changes of rows that are there, if the disk allows it."""
    values = {"status": status, "ended_at": time.time(), "unseen": unrecorded.seen}
    with suppress(sa.exc.SQLAlchemyError, StoreError), store.changing() as connection:
        connection.execute(sa.update(schema.runs).where(schema.runs.c.id == run_id).values(**values))
    with suppress(sa.exc.SQLAlchemyError, StoreError):
        _close(store, run_id)


def drop_cut_off(store: Store, run_id: str, before: float) -> int:
    """Delete rollouts that a cap or a kill interrupted and that the replay did not run again.

    Call it only after the run has completed: by then, all rollouts that it needs were overwritten and started later.

    Args:
        before: Start time in epoch seconds before which interrupted rollouts are deleted.
    Returns:
        Number of deleted rollouts.
    """
    store.flush()
    r, t = schema.rollouts, schema.transitions
    interrupted = (
        r.c.run_id == run_id,
        r.c.status == "error",
        r.c.failure == FailureKind.CAP.value,
        r.c.started_at < before,
    )
    with store.changing() as connection:
        connection.execute(sa.delete(t).where(t.c.rollout_id.in_(sa.select(r.c.id).where(*interrupted))))
        return int(connection.execute(sa.delete(r).where(*interrupted)).rowcount)


def opened_ledger(path: Path, recorder: Recorder, store: Store, cache: ResponseCache) -> Ledger:
    """Open the ledger of a run and bill the calls that a killed process left open, if their answers are cached."""
    known = path.is_file()
    if not recorder.resumed:
        for name in ("", "-wal", "-shm"):
            Path(f"{path}{name}").unlink(missing_ok=True)
    ledger = Ledger(path, owner=recorder.owner)
    if recorder.resumed and not known:  # started on another machine or by a version without ledgers
        for phase, usage in store.spent(recorder.run_id).items():
            ledger.add(f"before/{phase}", phase, vars(usage))
    bill_answered(ledger, cache)
    return ledger
