"""Jobs: run, rubric, program, splits and session, shared by every command that runs a program."""

import functools
import hashlib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import dspy

from assay.datasets import SPLITS, Splits, load_splits
from assay.datasets.curriculum import PREFIX, load_curriculum
from assay.datasets.fields import Fields
from assay.datasets.rows import NO_ROWS, RowFindings
from assay.datasets.splits import column_lines
from assay.deployment import Artifact, load_artifact
from assay.deployment.artifact import check_pinned
from assay.errors import ConfigError
from assay.evaluation import Evaluation, Progress, RecordedProgram, Session
from assay.evaluation.evaluation import finished_runs, scored_otherwise
from assay.evaluation.executors import RayExecutor
from assay.evaluation.hosts import HostMeter, Outbox
from assay.jobs.agents import serving
from assay.jobs.arguments import check_state
from assay.jobs.documents import absent_sources
from assay.jobs.ending import FinishedRun
from assay.jobs.groups import AgentServing, ProgramJob, StagedJob
from assay.jobs.hosts import Consignment
from assay.jobs.loading import JUDGE_TEMPERATURE, load_rubric, portable_rubric, with_judges, without_graders
from assay.jobs.opening import Run, budgeted, client_of, open_run
from assay.models import LanguageModel, Meter, ResponseCache, Thinking, get_lm
from assay.models.hosted import HostedBackend
from assay.models.meter import Usage
from assay.models.roles import DEFAULT_MODEL
from assay.programs import load_program, program_fields, program_version
from assay.programs.budgets import check_budget, set_thinking
from assay.programs.foreign_agent import foreign_agent_in
from assay.programs.isolation import copied
from assay.programs.loading import BuiltFromTasks, full_name, models_in_state, program_class
from assay.programs.state import with_saved_state
from assay.programs.wrapping import is_wrapped
from assay.rubrics import Rubric
from assay.rubrics.calling import definition_of
from assay.rubrics.checks import equality_of
from assay.rubrics.loading import RubricSource
from assay.sources.artifact_files import is_artifact, read_json, unproven_note
from assay.sources.files import SourceFiles
from assay.sources.trust import accept, entries
from assay.support.numbers import counted
from assay.support.values import json_value
from assay.traces import Recorder, Store
from assay.traces.places import carried_by
from assay.traces.store.listing import usage_of_models
from assay.traces.store.sealing import (
    DEFAULT_SALT,
    SEALED,
    Openings,
    known_splits,
    open_test,
    resolve_salt,
    store_splits,
    store_tasks,
)
from assay.traces.store.shares import members_of

_Config = TypeVar("_Config", bound=ProgramJob)


@dataclass
class Job:
    """An opened job. Changes to `status` and `ended` are written to the store when it is closed."""

    config: ProgramJob
    folder: Path
    run_id: str
    splits: Splits
    recorded: RecordedProgram
    session: Session
    store: Store
    artifact: Artifact | None
    rubric_path: str | Path | None  # file or shipped name; None for a rubric made in Python
    status: str = "done"
    reason: str | None = None  # why it was stopped, if no report says it
    openings: Openings | None = None  # of the test split, once this job has opened it
    ended: bool = False  # an earlier process had ended it; its report was returned and nothing was run
    was_done: bool = False  # an earlier process had completed it
    rows: RowFindings = NO_ROWS  # of the data
    warnings: Sequence[str] = ()  # of the data, already shown to the user; reports repeat them

    @functools.cached_property
    def rubric_files(self) -> dict[str, bytes]:
        """The rubric's file with everything it names; of a rubric made in Python, the source files of its checks."""
        if self.rubric_path is not None:
            return portable_rubric(self.rubric_path)
        source = SourceFiles()
        for check in [c.check for c in self.session.rubric.criteria if c.check is not None]:
            definition = definition_of(check)
            source.add(definition.__qualname__, definition.__module__, definition.__qualname__)
        return {f"code/{place}": content for place, content in source.files.items()}

    def additional_rubric(self, source: RubricSource) -> Rubric:
        """Loads another rubric, with the same judge models as the job's own."""
        return load_rubric(source, judge_model=self.session.judge_lm, own_models=self.session.own_models)

    def runs_before(self, phase: str) -> dict[tuple[str, int], Any]:
        """Runs of a phase that an earlier process finished, see `finished_runs`.

        For a completed job, failed runs are included: it is only reported again.
        """
        if not self.session.recorder.resumed:
            return {}
        return finished_runs(self.recorded, phase, errors=self.was_done)

    def models(self, run_id: str | None = None) -> dict[str, Any]:
        """`model`, the one of the job, and `models`: LM calls, tokens and dollars by model.

        `model` is None where the program wraps a function or an agent that never called it.

        Args:
            run_id: the run, by default its own with those of processes that helped; see `usage_of_models`.
        """
        self.store.settle()
        members = members_of(self.store.engine, self.run_id) if run_id is None else ()
        usages = usage_of_models(self.store, run_id or self.run_id, *(member.run_id for member in members))
        unused = is_wrapped(self.recorded.program) and self.session.lm.model not in {usage.model for usage in usages}
        return {"model": None if unused else self.session.lm.model, "models": [asdict(usage) for usage in usages]}

    def spent(self, called: Mapping[str, Any]) -> dict[str, Any]:
        """What the job has used so far, by the names that its report has, with the processes that helped and ended.

        Args:
            called: see `models`.
        """
        usage, unrecorded = self.session.meter.usage, self.session.recorder.unrecorded
        for member in members_of(self.store.engine, self.run_id):
            usage.add(member.usage or Usage())
            unrecorded += member.unrecorded
        return {
            "calls": usage.calls, "cached": usage.cached, "repeated_calls": usage.repeated, "tokens": usage.tokens,
            "cost_usd": unrecorded.cost(usage.known_cost_usd), "unpriced_calls": usage.unpriced, **called,
            **unrecorded.to_dict(), "rows_not_stored": self.store.not_stored, "data": self.rows.to_dict(),
            "test_openings": self.openings.to_dict() if self.openings else None,
        }  # fmt: skip

    @property
    def search_calls(self) -> int:
        """LM calls of the search so far, also of processes that helped it: they only search."""
        members = members_of(self.store.engine, self.run_id)
        return self.session.meter.of("search").calls + sum(member.usage.calls for member in members if member.usage)

    def priced(self, evaluation: Evaluation) -> dict[str, Any]:
        """The report of an evaluation of this job; its cost is unknown if LM calls were not recorded."""
        return self.session.recorder.unrecorded.priced(evaluation.report())

    def finished(self, arguments: Mapping[str, Any]) -> FinishedRun:
        """The stored report of this run. `arguments`: those that the report depends on and that `config` lacks."""
        rubric, recorded = self.session.rubric, self.recorded
        names = ("difference", "early_stop", "token_margin", "trials")
        about = {
            **{name: getattr(self.config, name, None) for name in names}, **arguments,
            "rubric": [rubric.name, rubric.version], "source": _source_of(recorded.program),
            "program": [program_version(recorded.program, recorded.settings["adapter"]), recorded.settings],
            "data": self.splits.manifest()["sha256"],
        }  # fmt: skip
        if self.splits.curriculum is not None:
            about["curriculum"] = self.splits.curriculum.sha256
        return FinishedRun(self.store, self.run_id, caps=self.config.caps, about=about)

    def tasks_of_artifact(self) -> dict[str, list[str]]:
        """Keys of the tasks the artifact was made with, by split; empty without an artifact."""
        return _tasks_of(self.artifact)

    def training_splits(self) -> set[str]:
        """Those of them that the artifact learned from or was selected on."""
        return {key for name in ("train", "val") for key in self.tasks_of_artifact().get(name, ())}

    def end_as_before(self, report: Mapping[str, Any]) -> None:
        """Ends the job with the report of an earlier process; the store entry of the run is not changed."""
        self.ended, self.status = True, "done" if report["stopped"] is None else "stopped"


def _session(
    config: ProgramJob, rubric: Rubric, name: str, lm: LanguageModel, make: Callable[..., LanguageModel],
    recorder: Recorder, meter: Meter, *, threads: int,
) -> Session:  # fmt: skip
    """The session of a program.

    Args:
        make: makes another model, by name.
    """
    judge = _judge_lm(config, rubric, lm, make)
    return Session(
        lm=lm.copy(**config.generation), rubric=with_judges(rubric, judge, own_models=config.own_models),
        recorder=recorder, meter=meter, program_name=name, seed=config.seed, threads=threads, judge_lm=judge,
        own_models=config.own_models, replace_lms=config.replace_lms, task_timeout=config.task_timeout,
        thinking=Thinking.of(config.thinking),
    )  # fmt: skip


@contextmanager
def open_job(
    config: ProgramJob,
    *,
    program: str | dspy.Module,
    rubric: RubricSource,
    lm: dspy.LM | None = None,
    progress: Progress,
    store: str | Path | None = None,
    resume: bool = False,
    need: tuple[str, ...] = SPLITS,
    opens_as: str | None = None,
    known: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """Opens a job, holds its lock while it is open, and stores how it ended (`Job.status`).

    Args:
        need: splits that must not be empty.
        opens_as: id that an opening of the test split is counted for, if several runs are one job; by default the
            run's own.
        known: splits of tasks by key, besides those of the store.
    Raises:
        AssayError: what was wrong, which rule, what to do. No model has been called by then.
    """
    module = None if isinstance(program, str) else program
    artifact = load_artifact(config.program) if module is None and is_artifact(config.program) else None
    config = completed(config, artifact, store)
    if artifact is not None:
        check_state(config.program, config.state)
    loaded = artifact.program if artifact else module
    name = artifact.manifest.get("agent") or artifact.manifest["program"] if artifact else config.program
    built_from_tasks = None if loaded is not None else _built_from_tasks(name)
    if loaded is None and built_from_tasks is None:
        loaded = load_program(name)
    if loaded is not None:
        loaded = _from_state(loaded, config)
    fields = program_fields(loaded if built_from_tasks is None else built_from_tasks)
    checked = load_rubric(rubric)
    of_artifact = {key: split for split, keys in _tasks_of(artifact).items() for key in keys}
    known = {**of_artifact, **(known or {}), **known_splits(store)}
    splits = _splits(config, fields, checked, need, progress, known=known)
    fixed = loaded  # None: the program is built from the tasks
    if loaded is None:
        loaded = _from_state(load_program(name, tasks=splits.train + splits.val), config)
    if config.executor == "ray" and lm is not None:
        raise ConfigError(
            "`executor='ray'` needs the model by its name: an object of this process cannot travel to the hosts"
        )
    if lm is None and config.model_name == DEFAULT_MODEL:
        calls = f", for what {name} calls through DSPy" if loaded is not None and is_wrapped(loaded) else ""
        progress.say(f"model: {DEFAULT_MODEL}, the default{calls}; `model=NAME` names another")
    with open_run(config, lm=lm, progress=progress, store=store, resume=resume) as run, ExitStack() as closing:
        moved = store_splits(run.store, _tasks_of(artifact))
        while store_tasks(run.store, splits.parts()):  # another job has assigned them since they were read
            splits = _splits(config, fields, checked, need, progress, known=known_splits(run.store))
            if fixed is None:
                loaded = _from_state(load_program(name, tasks=splits.train + splits.val), config)
        session = _session(config, checked, name, run.lm, run.model, run.recorder, run.meter, threads=run.threads)
        session.progress, session.prompt_lm, session.given_lm = progress, run.reflection, lm
        session.deaths = run.deaths
        session.register([*splits.train, *splits.val, *splits.gate])
        if config.executor == "ray":
            sender = Consignment(
                config, checked, loaded, name, is_object=module is not None, artifact=artifact, say=progress.say
            )
            session.executor = _ray_executor(config, checked, name, run, loaded, sender)
            closing.callback(session.executor.close)
        if artifact is not None:
            check_pinned(artifact, run.lm)
        settings = artifact.settings if artifact else {"adapter": None, "parameters": {}}
        recorded = _recorded(loaded, session, config.prompt_format or settings["adapter"], own=module is None)
        splits.outputs = frozenset(
            name for predictor in recorded.program.predictors() for name in predictor.signature.output_fields
        ) | frozenset(fields.outputs if fields is not None else ())
        recorded.set_parameters({**settings["parameters"], **config.parameters})
        path = rubric if isinstance(rubric, str | Path) else None
        job = Job(
            config, run.folder, run.run_id, splits, recorded, session, run.store, artifact, path, was_done=run.was_done
        )
        if artifact is not None:
            session.recorder.carried = carried_by(artifact.program)
        if (agent := foreign_agent_in(recorded.program)) is not None:
            options = config.part(AgentServing) if isinstance(config, AgentServing) else AgentServing()
            if isinstance(run.lm.recording.backend, HostedBackend):  # the agent's SDK looks at what is imported so far
                run.lm.recording.backend.load()
            closing.enter_context(serving(agent, run.store, run.lm.model, options, progress))
        _count_openings(job, opens_as or run.run_id)
        for line in column_lines(splits.columns, fields, checked.expected_names):
            progress.say(line)
        _warn(job, progress, moved)
        if session.recorder.resumed and (others := scored_otherwise(run.store, run.run_id, session.rubric)):
            progress.say(
                f"note: {counted(others, 'rollouts')} of this run were scored by another version of the rubric: they "
                "are run again, and answers that the response cache of this machine does not have are paid again"
            )
        yield job
        run.status, run.reason, run.ended = job.status, job.reason, job.ended


def completed(config: _Config, artifact: Artifact | None, store: str | Path | None) -> _Config:
    """The settings with what the store and the artifact decide, as they identify the job."""
    return replace(
        config,
        salt=resolve_salt(config.salt, store, artifact=salt_in(artifact)),
        thinking=artifact.settings.get("thinking") if artifact and config.thinking is None else config.thinking,
    )


def _from_state(program: dspy.Module, config: ProgramJob) -> dspy.Module:
    return program if config.state is None else with_saved_state(program, config.state)


def _built_from_tasks(name: str) -> type | None:
    """The class of a program that is built from the data, so after it."""
    target = program_class(full_name(name))
    return target if isinstance(target, type) and isinstance(target, BuiltFromTasks) else None


def _tasks_of(artifact: Artifact | None) -> dict[str, list[str]]:
    """Keys of the tasks that an artifact was made with, by split."""
    if artifact is None:
        return {}
    tasks = read_json(artifact.path / "splits.json", artifact.path).get("tasks") or {}
    return {name: keys for name, keys in tasks.items() if name in SPLITS}


def _warn(job: Job, progress: Progress, moved: Mapping[str, str]) -> None:
    """Warnings about the data.

    Args:
        moved: tasks of the artifact that the store has in another split than the artifact.
    """
    tasks = itertools.chain.from_iterable(job.splits.parts().values())
    job.rows = job.splits.report(same=equality_of(job.session.rubric.criteria))
    learned = job.training_splits()
    leaked = sum(split in SEALED and key in learned for key, split in moved.items())
    unproven = None if job.artifact is None else unproven_note(job.artifact.path, job.artifact.manifest)
    job.warnings = [
        *([] if unproven is None else [unproven]),
        *absent_sources(job.recorded.program, job.session.rubric, tasks),
        *job.rows.notes(),
        *_unfilled(job),
        *(
            [
                f"{job.config.program} learned from {counted(leaked, 'tasks')} that this store has in gate or test: "
                "its score on them is biased upwards"
            ]
            if leaked
            else []
        ),
        *(
            [
                f"{job.config.state} has demonstrations of {counted(shown, 'tasks')} of gate or test: the score on "
                "them is biased upwards. Give its training tasks the split train"
            ]
            if (shown := _shown_by_state(job))
            else []
        ),
        *_models_of_state(job.config.state),
    ]
    for warning in job.warnings:
        progress.say(f"warning: {warning}")


def _unfilled(job: Job) -> list[str]:
    """Which splits are smaller than the sizes that the user set for them."""
    available = job.splits.sizes()
    return [
        f"{name} has {counted(available[name], 'tasks')}, fewer than its size of {size}: the data has no more for it"
        for name, size in job.config.sizes.items()
        if size is not None and available[name] < size
    ]


def _models_of_state(state: str | Path | None) -> list[str]:
    """Which models a saved state names, for a warning that they are left out."""
    models = {} if state is None else models_in_state(Path(state))
    named = ", ".join(f"{model} for {predictor}" for predictor, model in models.items())
    return [f"{state} names {named}: models come from the program's code or --model, not from a state"] if named else []


def _shown_by_state(job: Job) -> int:
    """Number of gate and test tasks whose inputs are those of a demonstration in the saved state."""
    if job.config.state is None:
        return 0
    tasks = [json_value(task.inputs, placeholders=True) for name in SEALED for task in job.splits.parts()[name]]
    predictors = job.recorded.program.predictors()
    demos = [json_value(dict(demo), placeholders=True) for predictor in predictors for demo in predictor.demos]
    return sum(any(inputs.items() <= demo.items() for demo in demos) for inputs in tasks) if demos else 0


def _splits(
    config: ProgramJob,
    inputs: Fields | None,
    rubric: Rubric,
    need: Sequence[str],
    progress: Progress,
    *,
    known: Mapping[str, str],
) -> Splits:
    """The splits of the data; with a curriculum those of its stages."""
    source = config.curriculum if isinstance(config, StagedJob) else None
    curriculum = None if source is None else load_curriculum(source)
    if curriculum is not None and not curriculum.needs_data and not config.data.startswith(PREFIX):
        progress.say(f"note: {config.data} is not used: every stage of {source} names its own data")
    return load_splits(
        config.data,
        inputs=inputs,
        outputs=rubric.expected_names,  # an agent must not be shown what it is to answer
        rename=config.rename,
        salt=config.salt or DEFAULT_SALT,
        limits=config.limits,
        need=need if curriculum is None or "val" in need else (*need, "val"),  # promotion is decided on val
        curriculum=curriculum,
        known=known,
    )


def _recorded(program: dspy.Module, session: Session, prompt_format: str | None, *, own: bool) -> RecordedProgram:
    """The program under recording, with the thinking budget of the settings if they have one.

    Args:
        own: whether the program was loaded here; a caller's object does not get the budget, but a copy of it.
    Raises:
        ThinkingError: a call of the program could not keep the budget.
    """
    if session.thinking is None:
        return RecordedProgram(program, session, prompt_format=prompt_format)
    program = program if own else copied(program)
    set_thinking(program, session.thinking)
    recorded = RecordedProgram(program, session, prompt_format=prompt_format)
    check_budget(program, session.lm, session.thinking, prompt_format=prompt_format)
    return recorded


def _ray_executor(
    config: ProgramJob, rubric: Rubric, name: str, run: Run, program: dspy.Module, sender: Consignment
) -> RayExecutor:
    """An executor whose hosts open sessions of their own and trust what this process trusts."""
    trusted = frozenset(entry.sha256 for entry in entries())
    here: dict[str, Any] = {"progress": None} if hasattr(config, "progress") else {}  # it prints on this machine
    config = replace(config, **here)
    make_session = functools.partial(_session_on_a_host, config, without_graders(rubric), name, run.run_id, trusted)
    return RayExecutor(make_session, program, sender, threads=run.threads, caps=run.meter.caps)


def salt_in(artifact: Artifact | None) -> tuple[str, str] | None:
    """An artifact's path and the salt of its splits; None for a judge's artifact, which has no tasks."""
    salt = (artifact.manifest.get("data") or {}).get("salt") if artifact is not None else None
    return (str(artifact.path), str(salt)) if artifact is not None and salt else None


def salt_at(program: Any) -> tuple[str, str] | None:
    """`salt_in` of a program given by path; None if it is not an artifact."""
    return salt_in(load_artifact(program)) if isinstance(program, str) and is_artifact(program) else None


def _count_openings(job: Job, opens_as: str) -> None:
    """Counts openings of the test split in the store; the tasks are known to the session from then on."""
    splits = job.splits

    def opened() -> None:
        tasks = splits.parts()["test"]
        job.openings = open_test(job.store, opens_as, data=job.config.data, tasks=[task.key for task in tasks])
        job.session.register(tasks)

    splits.on_open = opened


def _judge_lm(
    config: ProgramJob, rubric: Rubric, lm: LanguageModel, make: Callable[..., LanguageModel]
) -> LanguageModel:
    """The model of the rubric's judges: the program's model, unless settings name another model or address."""
    if config.own_models:
        judge = lm.copy(temperature=JUDGE_TEMPERATURE)
    else:
        name = config.judge_model or lm.model
        judge = make(name, temperature=JUDGE_TEMPERATURE, **client_of(config, "judge", name, lm))
    return budgeted(judge, config.judge_thinking, "judge_thinking") if rubric.takes_model else judge


def _session_on_a_host(
    config: ProgramJob,
    rubric: Rubric,
    program: str,
    run_id: str,
    trusted: frozenset[str],
    outbox: Outbox,
    meter: HostMeter,
) -> Session:
    """A job's session on a cluster host, with its own model and cache. Records wait in the outbox.

    Trusts the same artifacts as the driver.
    """
    accept(trusted)
    logging.getLogger("dspy").setLevel(logging.ERROR)
    recorder = Recorder(outbox, run_id=run_id, replayable=True)  # type: ignore[arg-type]
    lm_options: dict[str, Any] = {
        "cache": ResponseCache(),
        "meter": meter,
        "observers": [recorder.observe],
        "seed": config.seed,
    }
    lm = get_lm(config.model_name, **lm_options, **client_of(config, "program", config.model_name))
    make = functools.partial(get_lm, **lm_options)
    return _session(config, rubric, program, lm, make, recorder, meter, threads=1)


def _source_of(program: dspy.Module) -> str:
    """Hash of the source file of a program's class; empty if there is none."""
    try:
        return hashlib.sha256(Path(inspect.getsourcefile(type(program)) or "").read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""
