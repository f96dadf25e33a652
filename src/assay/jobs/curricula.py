"""The schedule of a job with a curriculum: makes it, and writes its log to the run's folder."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from assay.datasets.curriculum import Schedule
from assay.errors import ConfigError
from assay.evaluation import Progress
from assay.jobs.job import Job
from assay.support.places import write_whole

FILE = "curriculum.json"


def schedule_of(job: Job, *, seed: int, steps: int | None, progress: Progress) -> Schedule | None:
    """The schedule of a job of `steps`; None without a curriculum. Begins its log in the folder of the run.

    Raises:
        ConfigError: the run was begun with another content of the file.
    """
    splits, curriculum = job.splits, job.splits.curriculum
    if curriculum is None:
        return None
    log = job.folder / FILE
    if log.is_file() and json.loads(log.read_text(encoding="utf-8"))["sha256"] != curriculum.sha256:
        raise ConfigError(
            f"the curriculum {curriculum.source} has changed since this run was begun: resume it with the same file, "
            "or begin a new run"
        )
    train, val = (
        {stage.name: splits.of_stage(stage.name, split) for stage in curriculum.stages} for split in ("train", "val")
    )
    sizes = ", ".join(f"{name} {len(train[name])} and {len(val[name])}" for name in train)
    progress.say(f"curriculum {curriculum.name}: train and val tasks by stage: {sizes}")
    schedule = Schedule(curriculum, train, val, log, seed=seed, steps=steps, say=progress.say)
    keep_schedule(schedule)
    return schedule


def keep_schedule(schedule: Schedule) -> dict[str, Any]:
    """Writes the report of the schedule to its log, and returns it."""
    report = schedule.report()
    schedule.log.parent.mkdir(parents=True, exist_ok=True)
    write_whole(schedule.log, json.dumps(report))
    return report


@contextmanager
def scheduled(job: Job, *, seed: int, steps: int, progress: Progress) -> Iterator[Schedule | None]:
    """`schedule_of` a job. At the end, also that of an interrupted one, its log is written."""
    schedule = schedule_of(job, seed=seed, steps=steps, progress=progress)
    try:
        yield schedule
    finally:
        if schedule is not None:
            keep_schedule(schedule)
