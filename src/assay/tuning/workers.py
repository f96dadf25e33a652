"""Further processes on one study."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.errors import ModelError, StopRun
from assay.jobs import open_job
from assay.models import Meter
from assay.optimizers import Progress
from assay.optimizers.parameters import search
from assay.traces import Store
from assay.tuning.config import TuneConfig
from assay.tuning.study import arena_of, space_of, study_of

__all__ = ["helped"]


@contextmanager
def helped(
    config: TuneConfig, study: str, url: str, store: str | Path | None, shown: Progress, *, meter: Meter, resume: bool
) -> Iterator[None]:  # fmt: skip
    """Further processes work on the study while the context is open; what they have at work at its end is finished, and what
    they spent is counted by `meter`, whose caps are from then on those of all processes together."""
    if config.workers == 1:
        yield
        return
    started = multiprocessing.get_context("spawn")
    helpers, spent = [], started.SimpleQueue()
    for number in range(1, config.workers):
        theirs = replace(replace(config, worker=number).of_one_worker(), workers=1, study=study, storage=url)
        helpers.append(started.Process(target=_help, args=(theirs, store, resume, spent), name=f"assay-tune-{number}"))
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
                shown.say(f"warning: {helper.name} ended with {helper.exitcode}; its trial is tried again")
        meter.caps = config.caps
        while not spent.empty():
            meter.add(spent.get())


def _help(config: TuneConfig, store: str | Path | None, resume: bool, spent: Any) -> None:
    """What a further process does: trials, until there are enough. It decides nothing, and reports what it spent."""
    signal.signal(signal.SIGTERM, _stopped)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True, name="assay-parent").start()
    silent = Progress()
    with Store(store) as opened:
        goes_on = resume and any(status != "done" for _, status in opened.runs(config.key))
    try:
        with (
            open_job(config, program=config.program, rubric=config.rubric, progress=silent, store=store, resume=goes_on, need=("val",)) as job,
            ExitStack() as closing,
        ):
            job.status = "stopped"  # it is done when the whole is, and resumed together with it
            closing.callback(lambda: spent.put(job.session.meter.usage))
            space = space_of(job, config, silent)
            job.session.know(job.splits.val, "val")
            study = study_of(job, config, space, str(config.storage))
            with job.session.phase("search"):
                search(arena_of(job, config, space), job.splits.val, space, config.search, study, helping=True)
    except (StopRun, KeyboardInterrupt, ModelError):
        pass  # the process that began the study says what came of it


def _stopped(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _end_with(parent: Any) -> None:
    """Ends this process once the one that began the study is gone, however it went: nobody would count what is spent from then on."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
