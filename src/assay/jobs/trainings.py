"""Runs of trainings on rows of an export: their entry in the store, their folder with log and report.

They call no model, so they have no meter and no recorder: those of `assay.jobs.opening` have.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, StopRun
from assay.evaluation import Progress
from assay.jobs.ending import cancelled_by_signals
from assay.jobs.finished import FinishedRun, keep_failure
from assay.jobs.lock import job_lease
from assay.jobs.opening import new_run_id, opened_store
from assay.models import Caps, Meter
from assay.optimizers.finetuning.run_folder import rank
from assay.reports.training_log import TrainingLog
from assay.support.values import json_text
from assay.traces.store.connection import open_engine, store_id
from assay.traces.store.listing import run_folder
from assay.traces.store.location import home_of, store_address


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """An open run. Of processes that train together only the first has a folder and a log."""

    run_id: str
    folder: Path | None
    log: TrainingLog | None

    def keep(self, report: Mapping[str, Any]) -> None:
        """Writes the report to the run's folder."""
        if self.folder is not None:
            FinishedRun(self.folder, caps=Caps(), about={}).keep(report)


@contextmanager
def open_training(
    config: Mapping[str, Any], *, name: str, progress: Progress, store: str | Path | None = None, resume: bool = False
) -> Iterator[TrainingRun]:
    """Opens the run of a training, holds its lock while it is open, and stores how it ended.

    The store is open only at both ends: a training can take hours.

    Args:
        config: settings, with `algorithm` and what is trained on.
        name: of the adapter.
        resume: takes the latest unfinished run of the same training.
    Raises:
        ConfigError: the training has finished, or runs already.
    """
    if rank():
        yield TrainingRun(run_id="", folder=None, log=None)
        return
    stored = {**config, "adapter_name": name}
    key = hashlib.sha256(json_text(stored, sort_keys=True).encode()).hexdigest()[:12]
    home, started, status = home_of(store), time.time(), "failed"
    with _leased(store, home, key):
        run_id = _begun(key, stored, started, store, progress, resume=resume)
        folder = run_folder(store, run_id)
        keep_failure(folder, None)
        try:
            with cancelled_by_signals(Meter()):
                yield TrainingRun(run_id=run_id, folder=folder, log=TrainingLog(folder))
            status = "done"
        except (Exception, KeyboardInterrupt, StopRun) as error:
            status = keep_failure(folder, error)
            raise
        finally:
            with opened_store(store, progress) as opened:
                opened.put_run(run_id, kind="train", config=stored, status=status, started_at=started)


@contextmanager
def _leased(store: str | Path | None, home: Path, key: str) -> Iterator[None]:
    engine = open_engine(store_address(store))
    try:
        with job_lease(engine, store_id(engine), home, key):
            yield
    finally:
        engine.dispose()


def _begun(
    key: str,
    config: dict[str, Any],
    started: float,
    store: str | Path | None,
    progress: Progress,
    *,
    resume: bool,
) -> str:
    """Stores that the run is in progress. Returns its id."""
    with opened_store(store, progress) as opened:
        try:
            run_id, _ = new_run_id(opened, key, kind="train", started_at=started, resume=resume, cache=False)
        except ConfigError:
            raise ConfigError("this training has finished: there is nothing to resume") from None
        opened.put_run(run_id, kind="train", config=config, status="running", started_at=started)
    return run_id
