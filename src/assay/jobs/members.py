"""Processes that help a job: they share its caps, and its report counts what they used.

The process that leads the job holds its lease, decides and reports. Each of the others has a run and a lease of its
own.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import sqlalchemy as sa

from assay.errors import BudgetExceeded, ConfigError, ModelError, StopRun
from assay.evaluation import Progress, SilentProgress
from assay.jobs.groups import KeyedJob
from assay.jobs.job import Job, open_job
from assay.jobs.job_report import JoinReport
from assay.jobs.studies import objective_of, space_of, study_of
from assay.models.meter import Usage, spent_before
from assay.models.unrecorded import Unrecorded
from assay.optimizers.parameters import search
from assay.optimizers.parameters.search import run_of
from assay.traces import Store
from assay.traces.resuming import close_running, ledger_of, ledger_place
from assay.traces.store import tables as schema
from assay.traces.store.leases import acquire, held_among, leases_of_run
from assay.traces.store.shares import CapShare, Member, leads, members_of

Worker: TypeAlias = Any  # settings of a search, see `assay.commands.tune.TuneWorker`
_ENDING_S = 5.0  # between the end of a process's lease and its last row
_PAUSE_S = 0.5
_LEADER_S = 60.0  # that a process which joins waits for the one that leads


def lead(job: Job) -> None:
    """Lets other processes help the job. What this one keeps for later phases is reserved before they can begin.

    Raises:
        BudgetExceeded: a cap is reached.
    """
    settle_killed(job.store, job.run_id)
    job.session.meter.shared = CapShare(job.store.engine, job.run_id, job.run_id)
    job.session.meter.check()


def is_cut_off(job: Job, trial: Any, *, of_run: Callable[[str | None], bool]) -> bool:
    """Whether a running trial is of this process's run or of a process that is gone.

    Args:
        of_run: whether trials of a run can be the job's; None for a trial whose process was killed before it said so.
    """
    run = run_of(trial)
    return of_run(run) and (run is None or run == job.run_id or not is_running(job.store, run))


def is_running(store: Store, run_id: str) -> bool:
    """Whether a process holds the lease of a run."""
    return any(held_among(store.engine, leases_of_run(run_id)).values())


def _taken_over(store: Store, run_id: str) -> bool:
    """Whether the process of a run has ended. If it only was cut off, it makes no further call once it is back."""
    if is_running(store, run_id):
        return False
    return all(acquire(store.engine, name, 0.0) is not None for name in leases_of_run(run_id))


def await_members(job: Job) -> None:
    """Returns once no process helps the job any more. Those that were killed are then counted too."""
    quiet_since: dict[str, float] = {}
    while True:
        now, waiting = time.monotonic(), False
        for member in _begun(job.store, job.run_id):
            if is_running(job.store, member.run_id):
                quiet_since.pop(member.run_id, None)
            since = quiet_since.setdefault(member.run_id, now)
            waiting |= since == now or now - since < _ENDING_S
        if not waiting:
            break
        time.sleep(_PAUSE_S)
    settle_killed(job.store, job.run_id)


def settle_killed(store: Store, run_id: str) -> None:
    """Counts what killed processes have used, and ends their runs. Calls that they may have made are unrecorded.

    Args:
        run_id: of the process that leads the job.
    """
    for member in _begun(store, run_id):
        if not _taken_over(store, member.run_id):
            continue
        phases, unrecorded = _used(store, member)
        CapShare(store.engine, run_id, member.run_id).end(phases, unrecorded, killed=True)
        close_running(store, member.run_id)
        r = schema.runs
        with store.changing() as connection:
            ended = sa.update(r).where(r.c.id == member.run_id, r.c.status == "running")
            missed = {"unseen": unrecorded.calls, "lost": unrecorded.lost}
            connection.execute(ended.values(status="failed", ended_at=store.clock.now(), **missed))


def _begun(store: Store, run_id: str) -> list[Member]:
    return [member for member in members_of(store.engine, run_id) if member.usage is None]


def _used(store: Store, member: Member) -> tuple[dict[str, Usage], Unrecorded]:
    """Usage of a killed process by phase: of its ledger, where this machine has it, else of the calls in the store."""
    stored, place = store.spent(member.run_id), ledger_place(store, member.run_id)
    rows = sum(usage.calls for usage in stored.values())
    if isinstance(place, Path) and not place.is_file():
        return stored, Unrecorded(max(0, member.calls - rows))
    ledger = ledger_of(store, member.run_id)
    try:
        phases = spent_before(ledger)
    finally:
        ledger.close()
    return phases, Unrecorded(lost=max(0, sum(usage.calls + usage.repeated for usage in phases.values()) - rows))


# -- Processes that run trials of a study that another one leads


def leader_of(store: Store, config: KeyedJob, progress: Progress) -> str:
    """Run of the process that leads the search with these settings.

    Raises:
        ConfigError: none has led it for a minute.
    """
    until, said = time.monotonic() + _LEADER_S, False
    while True:
        latest = next(iter(store.runs(config.key)[::-1]), None)
        if latest is not None and is_running(store, latest[0]) and leads(store.engine, latest[0]):
            return latest[0]
        if time.monotonic() > until:
            reason = "no process with these settings searches" if latest is None else f"run {latest[0]} has ended"
            raise ConfigError(f"{reason}: there is nothing to join on this store", field="join")
        if not said:
            progress.say(f"waiting for the process that leads the search, {_LEADER_S:g} s at most")
            said = True
        time.sleep(1.0)


@contextmanager
def helped(job: Job, workers: Sequence[Worker], progress: Progress) -> Iterator[None]:
    """Context in which worker processes run trials of the study. At its end they finish their current trials."""
    started = multiprocessing.get_context("spawn")
    helpers = [
        started.Process(target=_help, args=(worker, job.run_id), name=f"assay-tune-{worker.worker}")
        for worker in workers
    ]
    for helper in helpers:
        helper.start()
    try:
        yield
    except BaseException:
        for helper in helpers:
            helper.terminate()  # their trials return to the queue
        raise
    finally:
        for helper in helpers:
            helper.join()
            if helper.exitcode not in (0, -signal.SIGTERM):
                progress.say(f"warning: {helper.name} ended with {helper.exitcode}; its trial is tried again")


def _help(config: Worker, leader: str) -> None:
    """Main function of a worker process."""
    signal.signal(signal.SIGTERM, _stopped)
    threading.Thread(
        target=_end_with, args=(multiprocessing.parent_process(),), daemon=True, name="assay-parent"
    ).start()
    try:
        work(config, leader, SilentProgress())
    except (StopRun, KeyboardInterrupt, ModelError):
        pass  # the main process reports the outcome


def work(config: Worker, leader: str, progress: Progress) -> JoinReport:
    """Runs trials until there are enough, under the caps of the job that another process leads. Decides nothing."""
    stopped, share = None, None
    with Store(config.store) as store:
        resume = config.resume and any(status != "done" for _, status in store.runs(config.key))
        try:
            with open_job(
                config, program=config.program, rubric=config.rubric, progress=progress, store=config.store,
                resume=resume, need=("val",),
            ) as job:  # fmt: skip
                job.status = "stopped"
                share = CapShare(store.engine, leader, job.run_id)
                job.session.meter.shared = share
                space = space_of(job, config, progress)
                study = study_of(job, config, config.search, space, str(config.storage), begun=True)
                objective, val = objective_of(job, config, space), job.splits.val
                try:
                    with job.session.phase("search"):
                        job.session.meter.check()  # reserves, so that the one that leads knows of this process
                        search(objective, val, space, config.search, study, run=job.run_id, helping=True)
                    job.status = "done"
                except BudgetExceeded as cap:
                    stopped = job.reason = str(cap)
                states = [trial.state.name for trial in study.get_trials(deepcopy=False) if run_of(trial) == job.run_id]
                return JoinReport(
                    run_id=job.run_id, leads=leader, study=study.study_name, trials=len(states),
                    complete=states.count("COMPLETE"), pruned=states.count("PRUNED"), failed=states.count("FAIL"),
                    stopped=stopped, notes=[], **job.spent(job.models()),
                )  # fmt: skip
        finally:
            if share is not None:  # its last calls have landed
                share.end(job.session.meter.phases, job.session.recorder.unrecorded)


def _stopped(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _end_with(parent: Any) -> None:
    """Ends this process when the main process has ended: its trials would not be decided about."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
