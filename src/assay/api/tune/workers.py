"""Worker processes on one study."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.api.tune.study import objective_of, space_of, study_of
from assay.errors import ModelError, StopRun
from assay.evaluation import Progress, SilentProgress
from assay.models import Meter
from assay.optimizers.parameters import search
from assay.runs.jobs import open_job
from assay.runs.settings import TuneSettings
from assay.traces import Store


@contextmanager
def helped(
    config: TuneSettings, study: str, url: str, store: str | Path | None, progress: Progress, *, meter: Meter,
    resume: bool,
) -> Iterator[None]:  # fmt: skip
    """Context in which worker processes run trials of the study.

    At its end they finish their current trials, and `meter` counts their usage; its caps are then those of all
    processes together.
    """
    if config.workers == 1:
        yield
        return
    started = multiprocessing.get_context("spawn")
    helpers, spent = [], started.SimpleQueue()
    for number in range(1, config.workers):
        worker_config = replace(replace(config, worker=number).of_one_worker(), workers=1, study=study, storage=url)
        helpers.append(
            started.Process(target=_help, args=(worker_config, store, resume, spent), name=f"assay-tune-{number}")
        )
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
        meter.caps = config.caps
        while not spent.empty():
            meter.add(spent.get())


def _help(config: TuneSettings, store: str | Path | None, resume: bool, spent: Any) -> None:
    """Main function of a worker process: runs trials until there are enough, and reports its usage. Decides nothing."""
    signal.signal(signal.SIGTERM, _stopped)
    threading.Thread(
        target=_end_with, args=(multiprocessing.parent_process(),), daemon=True, name="assay-parent"
    ).start()
    silent = SilentProgress()
    with Store(store) as opened:
        goes_on = resume and any(status != "done" for _, status in opened.runs(config.key))
    try:
        with (
            open_job(
                config,
                program=config.program,
                rubric=config.rubric,
                progress=silent,
                store=store,
                resume=goes_on,
                need=("val",),
            ) as job,
            ExitStack() as closing,
        ):
            job.status = "stopped"  # complete only with the whole study; resumed together with it
            closing.callback(lambda: spent.put(job.session.meter.usage))
            space = space_of(job, config, silent)
            job.session.register(job.splits.val, "val")
            study = study_of(job, config, space, str(config.storage))
            with job.session.phase("search"):
                search(objective_of(job, config, space), job.splits.val, space, config.search, study, helping=True)
    except (StopRun, KeyboardInterrupt, ModelError):
        pass  # the main process reports the outcome


def _stopped(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _end_with(parent: Any) -> None:
    """Ends this process when the main process has ended: nothing would count its usage any more."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
