"""Search space, objective and Optuna study of a job."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.deployment import load_artifact
from assay.errors import ConfigError, StoreError
from assay.evaluation import Progress, RecordedProgram
from assay.evaluation.session import acting_parameters
from assay.jobs.groups import ParameterJob
from assay.jobs.job import Job
from assay.models import Thinking, supports
from assay.optimizers.parameters import Point, ProgramObjective, Space, open_study
from assay.optimizers.parameters.objective import set_point
from assay.optimizers.settings import SearchConfig
from assay.programs import RANGES, AgentParameters, program_version
from assay.programs.budgets import allocates, set_thinking, thresholds_of
from assay.programs.thinking import THRESHOLDS
from assay.support.addresses import DatabaseAddress
from assay.support.values import digest_of
from assay.traces import Store, store_address
from assay.traces.records import short_id
from assay.traces.store.leases import patiently
from assay.traces.store.location import home_of

if TYPE_CHECKING:
    import optuna


def space_of(job: Job, config: ParameterJob, progress: Progress) -> Space:
    """The parameters that have an effect in the program and in each artifact that is tried as an alternative."""
    names = [config.program, *(str(path) for path in config.artifacts)]
    acting = {name: _acting(program_at(job, Point(name, {}), config), config) for name in names}
    thresholds = {name: THRESHOLDS[name] for name in THRESHOLDS if any(name in acting[program] for program in names)}
    searched = {**RANGES, **thresholds}
    ranges = dict(config.ranges) or {name: limits for name, limits in searched.items() if name not in config.parameters}
    for name, effective in acting.items():
        if idle := [parameter for parameter in ranges if parameter not in effective]:
            progress.say(f"{name} ignores {', '.join(idle)}: not searched for it")
    return Space(programs=names, acting=acting, ranges=ranges, fixed=dict(config.parameters))


def _acting(recorded: RecordedProgram, config: ParameterJob) -> list[str]:
    """The parameters with an effect. Without log-probabilities a thinking policy has no margins."""
    if recorded.session.only_own_models or not (config.searches_thresholds and allocates(recorded.program)):
        return acting_parameters(recorded)
    margins = () if supports(recorded.session.lm, "top_logprobs") else ("probe_margin", "confidence")
    return [*acting_parameters(recorded), *(name for name in THRESHOLDS if name not in margins)]


def program_at(job: Job, point: Point, config: ParameterJob) -> RecordedProgram:
    """The program at a point: the job's own, or an artifact of the same program."""
    if point.program == config.program:
        recorded = copy.deepcopy(job.recorded)
    else:
        artifact = load_artifact(point.program)
        if artifact.manifest["program"] != job.session.program_name:
            raise ConfigError(
                f"{point.program} is of {artifact.manifest['program']}, not of {job.session.program_name}"
            )
        if artifact.manifest["data"]["salt"] != config.salt:
            raise ConfigError(
                f"{point.program} was compiled with the salt {artifact.manifest['data']['salt']!r}: its tasks may be "
                "in this test split"
            )
        session = job.session
        if config.thinking is None:  # the session has the budget of the job's program
            session = replace(session, thinking=Thinking.of(artifact.settings.get("thinking")))
        elif session.thinking is not None:
            set_thinking(artifact.program, session.thinking)
        recorded = RecordedProgram(artifact.program, session, prompt_format=artifact.settings["adapter"])
        recorded.set_parameters(artifact.settings["parameters"])
    set_point(recorded, point.parameters)
    return recorded


def default_of(job: Job, space: Space) -> Point:
    """The program's own parameters.

    A missing temperature is the model's, clipped to the range, else an agent's default.
    """
    parameters, model_temperature = dict(job.recorded.settings["parameters"]), job.session.lm.kwargs.get("temperature")
    low, high = RANGES["temperature"]
    temperature = (
        AgentParameters().temperature if model_temperature is None else min(max(float(model_temperature), low), high)
    )
    searched = space.searched(space.programs[0])
    return Point(
        space.programs[0],
        {
            **({"temperature": temperature} if "temperature" in searched else {}),
            **parameters,
            **{name: value for name, value in thresholds_of(job.recorded.program).items() if name in searched},
        },
    )


def default_program(job: Job, objective: ProgramObjective, default: Point) -> tuple[RecordedProgram, list[str]]:
    """The baseline of gate and test: the program at the point of the first trial; and notes for the user.

    If the model's temperature is outside the range of agent parameters, the baseline is the unchanged program.
    """
    model_temperature, (low, high) = job.session.lm.kwargs.get("temperature"), RANGES["temperature"]
    if "temperature" not in default.parameters or "temperature" in job.recorded.settings["parameters"]:
        return job.recorded, []
    first = f"{default.parameters['temperature']:g}"
    if model_temperature is None:
        note = (
            f"{default.program} and its model set no temperature: the default is {first}, in the first trial as on "
            "gate and test"
        )
        return objective.program_at(default), [note]
    if low <= model_temperature <= high:
        return objective.program_at(default), []
    note = (
        f"the model's temperature {model_temperature:g} is outside {low:g} to {high:g}: the first trial has {first}, "
        "the default on gate and test keeps it"
    )
    return job.recorded, [note]


def objective_of(job: Job, config: ParameterJob, space: Space) -> ProgramObjective:
    """The objective over the programs of a space."""
    return ProgramObjective(
        {name: program_at(job, Point(name, {}), config) for name in space.programs}, job.session, samples=config.samples
    )


def storage_of(config: ParameterJob, store: str | Path | None) -> str:
    """URL of the study's storage: as set, else the store's server, else a file next to the SQLite store."""
    address = DatabaseAddress.of(config.storage, "storage") if config.storage else store_address(store)
    if config.storage or address.file is None:
        return address.url
    return DatabaseAddress.of(str((home_of(store) / "studies.db").resolve())).url


def study_name(config: ParameterJob, run_id: str, store: Store) -> str:
    """Name of the study of a run: as set, else that of the run, with the store's id, as other stores have equal runs.

    The id of a run as the set name means the study of that run.
    """
    named = config.study or run_id
    known = config.study is None or any(run == named for run, _ in store.runs(named.rpartition("-")[0]))
    return f"{named}-{short_id(store.id)}" if known else named


def study_of(
    job: Job,
    config: ParameterJob,
    search: SearchConfig,
    space: Space,
    url: str,
    *,
    stage: str = "",
    begun: bool = False,
) -> "optuna.Study":
    """Creates or joins the study. All its processes must have one store, and search the same space on the same tasks.

    Once another process has taken the job over, this one changes the study no more.

    Args:
        stage: of a curriculum, which has a study of its own.
        begun: another process leads the search.
    """
    name = study_name(config, job.run_id, job.store) + (f"-{stage}" if stage else "")
    of = {"store": job.store.id, **_searched_on(job, config)}
    guard = lambda: patiently(lambda: check_lease(job.store))  # noqa: E731
    return open_study(name, url, space, search, of=of, guard=guard, begun=begun)


def check_lease(store: Store) -> None:
    """Raises `LostLease` if another process has taken the job over; otherwise none can for the length of a lease."""
    if store.lease is not None:
        with store.lease.writing("the lease"):
            pass


def study_to_show(job: Job, config: ParameterJob, space: Space, url: str) -> "optuna.Study | None":
    """An existing study: the one named in the settings, else the newest that searched the same; None if there is none.

    Raises:
        ConfigError: no study has the name.
        StoreError: the storage cannot be read.
    """
    import optuna

    address = DatabaseAddress.of(url)
    name = study_name(config, "", job.store) if config.study else ""
    try:
        summaries = optuna.get_all_study_summaries(storage=url, include_best_trial=False) if address.exists else []
    except Exception as error:
        raise StoreError(
            f"the studies at {address.shown} cannot be read: {str(error).partition(chr(10))[0]}"
        ) from error
    if config.study:
        summaries = [summary for summary in summaries if summary.study_name == name]
        if not summaries:
            raise ConfigError(f"there is no study {config.study!r} at {address.shown}")
    else:
        searched_on = {"store": job.store.id, **_searched_on(job, config)}
        space_description = json.loads(json.dumps({**space.describe(), **searched_on}))
        summaries = [
            summary for summary in summaries if summary.user_attrs.get("assay", {}).get("space") == space_description
        ]
    newest = max(summaries, key=lambda summary: str(summary.datetime_start or ""), default=None)
    return None if newest is None else optuna.load_study(study_name=newest.study_name, storage=url)


def facts_of(job: Job, config: ParameterJob) -> dict[str, Any]:
    """Description of the job for a page of charts."""
    return {
        "program": config.program,
        "rubric": job.session.rubric.name,
        "model": config.model_name,
        "data": config.data,
        "val tasks": len(job.splits.val),
    }


def _searched_on(job: Job, config: ParameterJob) -> dict[str, Any]:
    tasks = sorted(task.key for task in job.splits.val)
    names = [config.program, *map(str, config.artifacts)]
    return {
        "tasks": digest_of(tasks), "salt": config.salt, "rubric": job.session.rubric.version,
        "model": config.model_name,
        "judge_model": config.judge_model, "samples": config.samples, "prompt_format": config.prompt_format,
        **({} if config.judge_thinking is None else {"judge_thinking": config.judge_thinking}),
        "versions": [_version(program_at(job, Point(name, {}), config)) for name in names],
    }  # fmt: skip


def _version(recorded: RecordedProgram) -> str:
    """Hash of a program, including its parameters."""
    return digest_of(
        {"program": program_version(recorded.program, recorded.settings["adapter"]), "settings": recorded.settings}
    )[:12]
