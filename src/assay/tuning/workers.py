"""Further processes on one study."""

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.errors import ModelError, StopRun
from assay.jobs import open_job
from assay.optimizers import Progress
from assay.optimizers.parameters import search
from assay.tuning.config import TuneConfig
from assay.tuning.study import arena_of, space_of, study_of

__all__ = ["helped"]


@contextmanager
def helped(config: TuneConfig, study: str, url: str, store: str | Path | None, shown: Progress) -> Iterator[None]:
    """Further processes work on the study while the context is open; what they have at work at its end is finished."""
    started = multiprocessing.get_context("spawn")
    helpers = []
    for number in range(1, config.workers):
        theirs = replace(config, workers=1, worker=number, study=study, storage=url)
        helpers.append(started.Process(target=_help, args=(theirs, store), name=f"assay-tune-{number}"))
    for helper in helpers:
        helper.start()
    try:
        yield
    except BaseException:
        for helper in helpers:
            helper.terminate()  # their trials are put back
        raise
    finally:
        for helper in helpers:
            helper.join()
            if helper.exitcode not in (0, -signal.SIGTERM):
                shown.say(f"warning: {helper.name} ended with {helper.exitcode}; the others went on with its trial")


def _help(config: TuneConfig, store: str | Path | None) -> None:
    """What a further process does: trials, until there are enough. It decides and reports nothing."""
    signal.signal(signal.SIGTERM, _stopped)
    silent = Progress()
    try:
        with open_job(config, program=config.program, rubric=config.rubric, progress=silent, store=store, need=("val",)) as job:
            space = space_of(job, config, silent)
            job.session.know(job.splits.val, "val")
            study = study_of(job, config, space, str(config.storage), worker=config.worker)
            with job.session.phase("search"):
                search(arena_of(job, config, space), job.splits.val, space, config.search, study, helping=True)
    except (StopRun, KeyboardInterrupt, ModelError):
        pass  # the process that began the study says what came of it


def _stopped(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
