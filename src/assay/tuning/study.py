"""What a job searches, and the study it searches in."""

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.datasets.tasks import content_hash
from assay.deployment import load_artifact
from assay.errors import ConfigError, StoreError
from assay.jobs import Job, home_of
from assay.optimizers import Progress, Student
from assay.optimizers.parameters import Point, ProgramArena, Space, open_study
from assay.optimizers.session import acting_parameters
from assay.programs import RANGES, AgentParameters, program_version
from assay.traces import shown_url, store_url
from assay.tuning.config import TuneConfig

if TYPE_CHECKING:
    import optuna

__all__ = ["arena_of", "default_of", "default_student", "facts_of", "space_of", "storage_of", "student_at", "study_of", "study_to_show"]


def space_of(job: Job, config: TuneConfig, shown: Progress) -> Space:
    """The parameters that do something in the program, and in each artifact that is tried beside it."""
    names = [config.program, *(str(path) for path in config.also)]
    acting = {name: acting_parameters(student_at(job, Point(name, {}), config)) for name in names}
    ranges = dict(config.ranges) or {name: limits for name, limits in RANGES.items() if name not in config.parameters}
    for name, found in acting.items():
        if idle := [parameter for parameter in ranges if parameter not in found]:
            shown.say(f"{name} ignores {', '.join(idle)}: not searched for it")
    return Space(programs=names, acting=acting, ranges=ranges, fixed=dict(config.parameters))


def student_at(job: Job, point: Point, config: TuneConfig) -> Student:
    """The program of a point: the job's own, or an artifact of the same program."""
    if point.program == config.program:
        student = copy.deepcopy(job.student)
    else:
        artifact = load_artifact(point.program)
        if artifact.manifest["program"] != job.session.program_name:
            raise ConfigError(f"{point.program} is of {artifact.manifest['program']}, not of {job.session.program_name}")
        if artifact.manifest["data"]["salt"] != config.salt:
            raise ConfigError(
                f"{point.program} was compiled with the salt {artifact.manifest['data']['salt']!r}: its tasks may be in this test split"
            )
        student = Student(artifact.program, job.session, adapter=artifact.settings["adapter"])
        student.set_parameters(artifact.settings["parameters"])
    student.set_parameters(point.parameters)
    return student


def default_of(job: Job, space: Space) -> Point:
    """The program as it is. Where it has no temperature of its own: its model's, within the range, else that of an agent."""
    own, asked = dict(job.student.settings["parameters"]), job.session.lm.kwargs.get("temperature")
    low, high = RANGES["temperature"]
    temperature = AgentParameters().temperature if asked is None else min(max(float(asked), low), high)
    searched = space.searched(space.programs[0])
    return Point(space.programs[0], {**({"temperature": temperature} if "temperature" in searched else {}), **own})


def default_student(job: Job, arena: ProgramArena, default: Point) -> tuple[Student, list[str]]:
    """What gate and test compare the tuned program with: the program at the point of the first trial, and what the user should know of it.

    Where the model has a temperature that agent parameters cannot have, the program stays as it is.
    """
    asked, (low, high) = job.session.lm.kwargs.get("temperature"), RANGES["temperature"]
    if "temperature" not in default.parameters or "temperature" in job.student.settings["parameters"]:
        return job.student, []
    first = f"{default.parameters['temperature']:g}"
    if asked is None:
        note = f"{default.program} and its model set no temperature: the default is {first}, in the first trial as on gate and test"
        return arena.student(default), [note]
    if low <= asked <= high:
        return arena.student(default), []
    note = f"the model's temperature {asked:g} is outside {low:g} to {high:g}: the first trial has {first}, the default on gate and test keeps it"
    return job.student, [note]


def arena_of(job: Job, config: TuneConfig, space: Space) -> ProgramArena:
    """Where the programs of a space run."""
    return ProgramArena({name: student_at(job, Point(name, {}), config) for name in space.programs}, job.session, samples=config.samples)


def storage_of(config: TuneConfig, store: str | Path | None) -> str:
    """Where the study is kept: as asked, else in the store's database where that is a server, else in a file beside it."""
    if config.storage:
        return store_url(config.storage)
    url = store_url(store)
    return url if not url.startswith("sqlite:///") else f"sqlite:///{(home_of(store) / 'studies.db').resolve()}"


def study_of(job: Job, config: TuneConfig, space: Space, url: str) -> "optuna.Study":
    """The study, new or joined: what is searched on must be the same in all its processes."""
    return open_study(config.study or job.run_id, url, space, config.search, of=_searched_on(job, config))


def study_to_show(job: Job, config: TuneConfig, space: Space, url: str) -> "optuna.Study | None":
    """A study that is there already: the one that is named, else the newest that searched the same.

    Raises:
        ConfigError: none has the name.
    """
    import optuna

    file = url.removeprefix("sqlite:///") if url.startswith("sqlite:///") else None
    try:
        known = optuna.get_all_study_summaries(storage=url, include_best_trial=False) if file is None or Path(file).is_file() else []
    except Exception as error:
        raise StoreError(f"the studies at {shown_url(url)} cannot be read: {str(error).partition(chr(10))[0]}") from error
    if config.study:
        known = [summary for summary in known if summary.study_name == config.study]
        if not known:
            raise ConfigError(f"there is no study {config.study!r} at {shown_url(url)}")
    else:
        wanted = json.loads(json.dumps({**space.describe(), **_searched_on(job, config)}))
        known = [summary for summary in known if summary.user_attrs.get("assay", {}).get("space") == wanted]
    newest = max(known, key=lambda summary: str(summary.datetime_start or ""), default=None)
    return None if newest is None else optuna.load_study(study_name=newest.study_name, storage=url)


def facts_of(job: Job, config: TuneConfig) -> dict[str, Any]:
    """What a page of pictures says it is of."""
    return {
        "program": config.program,
        "rubric": job.session.rubric.name,
        "model": config.model,
        "data": config.data,
        "val tasks": len(job.splits.val),
    }


def _searched_on(job: Job, config: TuneConfig) -> dict[str, Any]:
    tasks = sorted(task.content_hash for task in job.splits.val)
    return {
        "tasks": content_hash({"tasks": tasks})[:16], "salt": config.salt, "rubric": job.session.rubric.version, "model": config.model,
        "judge_model": config.judge_model, "samples": config.samples, "adapter": config.adapter,
        "versions": [_version(student_at(job, Point(name, {}), config)) for name in (config.program, *map(str, config.also))],
    }  # fmt: skip


def _version(student: Student) -> str:
    """Of what a program is, its parameters included."""
    return content_hash({"program": program_version(student.program, student.settings["adapter"]), "settings": student.settings})[:12]
