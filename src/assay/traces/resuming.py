"""Cleans up after a killed run: closes its rollouts, settles its ledger and removes rollouts that were not replayed."""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from assay.errors import FailureKind, StoreError
from assay.models import ResponseCache
from assay.models.ledger import Ledger
from assay.models.meter import Usage, spent_before
from assay.models.recording import bill_answered
from assay.models.unrecorded import Unrecorded
from assay.traces.recorder import Recorder
from assay.traces.store import Store, tables as schema
from assay.traces.store.listing import run_folder
from assay.traces.store.rows import as_json
from assay.traces.store.upserts import upsert

_PAUSE_S = 5.0  # before a change is tried again, after the database did not take one
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
    values = {"status": "error", "error": _REASON, "failure": FailureKind.CAP.value, "ended_at": store.clock.now()}
    with store.changing() as connection:
        tasks = connection.execute(sa.select(r.c.task_id).where(*abandoned)).scalars().all()
        connection.execute(sa.update(r).where(*abandoned).values(**values))
    return sorted({task for task in tasks if task})


class DeathsInStore:
    """The tasks of a run that ended its processes, for `assay.evaluation.failures.Deaths`, on all machines."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._again_at = 0.0

    def read(self) -> dict[str, list[str]]:
        table = schema.deaths
        with self._store.engine.connect() as connection:
            text = connection.execute(sa.select(table.c.tasks_json).where(table.c.run_id == self._run_id)).scalar()
        return json.loads(text) if text else {}

    def write(self, tasks: Mapping[str, Collection[str]], *, last: bool = False) -> None:
        """Commits them. Tasks do not fail with a database that is out of reach, and few of them wait for it.

        Args:
            last: the process ends, so it is tried in any case.
        """
        if not last and time.monotonic() < self._again_at:
            return
        table, store = schema.deaths, self._store
        values = {"run_id": self._run_id, "tasks_json": as_json({name: sorted(ids) for name, ids in tasks.items()})}
        try:
            with store.changing() as connection:
                connection.execute(upsert(store.engine.dialect.name, table), [values])
        except (sa.exc.SQLAlchemyError, StoreError):
            self._again_at = time.monotonic() + _PAUSE_S


def end_on_full_disk(store: Store, run_id: str, status: str, unrecorded: Unrecorded, failure: str | None) -> None:
    """Write that a run and its rollouts have ended, in small changes of rows that are there, if the disk allows it."""
    missed = {"unseen": unrecorded.seen - unrecorded.lost, "lost": unrecorded.lost}
    values = {"status": status, "failure": failure, "ended_at": store.clock.now(), **missed}
    with suppress(sa.exc.SQLAlchemyError, StoreError), store.changing() as connection:
        connection.execute(sa.update(schema.runs).where(schema.runs.c.id == run_id).values(**values))
    with suppress(sa.exc.SQLAlchemyError, StoreError):
        _close(store, run_id)


def drop_cut_off(store: Store, run_id: str, before: float) -> int:
    """Delete rollouts that a cap or a kill interrupted and that the replay did not run again.

    Call it only after the run has completed: by then, all rollouts that it needs were overwritten and started later.

    Args:
        before: Start time by the clock of the store, before which interrupted rollouts are deleted.
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


def opened_ledger(store: Store, recorder: Recorder, cache: ResponseCache) -> Ledger:
    """Open the ledger of a run and bill the calls that a killed process left open, if their answers are cached."""
    place = ledger_place(store, recorder.run_id)
    if not recorder.resumed and isinstance(place, Path):
        for name in ("", "-wal", "-shm"):
            Path(f"{place}{name}").unlink(missing_ok=True)
    known = not isinstance(place, Path) or place.is_file()
    ledger = ledger_of(store, recorder.run_id, owner=recorder.owner)
    if recorder.resumed and not known:  # the file was removed, or is on another machine
        for phase, usage in store.spent(recorder.run_id).items():
            _carry(ledger, phase, usage)
        ledger.close()
        ledger = ledger_of(store, recorder.run_id, owner=recorder.owner)
    bill_answered(ledger, cache)
    return ledger


def ledger_place(store: Store, run_id: str) -> sa.Engine | Path:
    """Where the ledger of a run is: in the store if it is on a server, else in the folder of the run."""
    return run_folder(store.url, run_id) / "calls.db" if store.address.file is not None else store.engine


def ledger_of(store: Store, run_id: str, *, owner: Callable[[], str] = str) -> Ledger:
    """The ledger of a run of a store."""
    place = ledger_place(store, run_id)
    aside = None if isinstance(place, Path) else run_folder(store.url, run_id) / "calls.waiting"
    return Ledger(place, run_id, owner=owner, aside=aside)


def _carry(ledger: Ledger, phase: str, usage: Usage) -> None:
    """Write calls that are in the store and of which no ledger is left; the first has the amounts of all."""
    for number in range(usage.calls):
        sent = ledger.send(hashlib.sha256(f"before/{phase}/{number}".encode()).hexdigest(), phase, owner="")
        before, cost = replace(sent), None if number < usage.unpriced else 0.0
        sent.settle(prompt_tokens=0, completion_tokens=0, cost_usd=cost, failed=False)
        if not number:
            sent.prompt_tokens, sent.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            sent.cost_usd = usage.cost_usd
        ledger.settled(sent, before)


def spent_in(where: str | Path | None, job: str, *, but: str) -> Usage:
    """Usage of the runs of a job with several parts, from their ledgers, which survive a kill: what counts against the
    caps of the job. `calls` has those that were sent again after a kill, and those that bypassed the recorder.

    Args:
        job: begins the ids of its runs.
        but: a part that is left out: a run that is resumed counts by itself what it had spent.
    """
    total = Usage()
    with Store(where) as store:
        for run_id, _ in store.runs(job, "."):
            if not run_id.startswith(f"{job}.{but}-"):
                total.add(spent_of(store, run_id))
    return total


def spent_of(store: Store, run_id: str) -> Usage:
    """Usage of a run by its ledger, also of calls that were sent and never stored; empty without a ledger here."""
    total, place = Usage(), ledger_place(store, run_id)
    if not isinstance(place, Path) or place.is_file():
        ledger = ledger_of(store, run_id)
        for usage in spent_before(ledger).values():
            total.add(usage)
        total.calls += ledger.again
        ledger.close()
    total.calls += store.unrecorded(run_id).calls
    return total


def unrecorded_in(store: Store, job: str) -> Unrecorded:
    """Unrecorded calls of the runs of a job with several parts, as these runs ended. `job` begins the ids."""
    return sum((store.unrecorded(run_id) for run_id, _ in store.runs(job, ".")), Unrecorded())
