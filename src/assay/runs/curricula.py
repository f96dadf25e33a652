"""The curriculum of a run: reads it, makes its schedule, and keeps the schedule's state and log in the run's folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.datasets import Splits
from assay.datasets.curriculum import PREFIX, Curriculum, load_curriculum
from assay.datasets.schedule import Schedule
from assay.evaluation import Progress
from assay.runs.settings import ProgramSettings

__all__ = ["FILE", "curriculum_of", "keep_schedule", "schedule_of", "stored_schedule"]

FILE = "curriculum.json"


def curriculum_of(config: ProgramSettings, progress: Progress) -> Curriculum | None:
    """The curriculum that the settings name, if any.

    Raises:
        DataError: it cannot be read.
    """
    source = getattr(config, "curriculum", None)
    if source is None:
        return None
    curriculum = load_curriculum(source)
    if not curriculum.needs_data and not config.data.startswith(PREFIX):
        progress.say(f"note: {config.data} is not used: every stage of {source} names its own data")
    return curriculum


def schedule_of(splits: Splits, *, seed: int, steps: int | None, progress: Progress) -> Schedule | None:
    """The schedule of a run of `steps`; None without a curriculum."""
    curriculum = splits.curriculum
    if curriculum is None:
        return None
    train, val = (
        {stage.name: splits.of_stage(stage.name, split) for stage in curriculum.stages} for split in ("train", "val")
    )
    sizes = ", ".join(f"{stage.name} {len(train[stage.name])}" for stage in curriculum.stages)
    progress.say(f"curriculum {curriculum.name}: train tasks by stage: {sizes}")
    return Schedule(curriculum, train, val, seed=seed, steps=steps, say=progress.say)


def stored_schedule(folder: Path) -> dict[str, Any] | None:
    """The state that an earlier process kept in the folder of this run; None if there is none."""
    path = folder / FILE
    if not path.is_file():
        return None
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["state"]
    return state


def keep_schedule(schedule: Schedule, folder: Path, log: dict[str, Any]) -> Mapping[str, Any]:
    """Writes state and report into the run's folder, and stages and events into the log of the run in the store.

    Returns:
        The report.
    """
    report = schedule.report()
    log["curriculum_log"] = {name: report[name] for name in ("name", "sha256", "stages", "events")}
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{FILE}"
    scratch.write_text(json.dumps({"state": schedule.state(), "report": report}), encoding="utf-8")
    scratch.replace(folder / FILE)  # a killed process leaves no partial file
    return report
