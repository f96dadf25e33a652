"""Trainings: by reward, with program, rubric, data, policy, retention tasks and monitor rubric, and on rows of an
export.

`assay.optimizers.finetuning` implements them. An agent of any framework becomes a program, to which the policy is
served. A training on rows calls no model, so it has no meter and no recorder: the runs of `assay.jobs.opening` have. It
has an entry in the store, and a folder with log and report.
"""

import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy

from assay.datasets import Task
from assay.errors import ConfigError, ProgramError, StopRun, StoreError
from assay.evaluation import Progress, SilentProgress
from assay.jobs.agents import program_or_agent
from assay.jobs.arguments import program_settings
from assay.jobs.checks import independent, unused_settings
from assay.jobs.curricula import scheduled
from assay.jobs.ending import FinishedRun, cancelled_by_signals, status_and_reason
from assay.jobs.groups import ProgramJob
from assay.jobs.job import Job, open_job
from assay.jobs.members import lead
from assay.jobs.opening import job_lease, new_run_id, opened_store, pinned
from assay.jobs.preflight import preflight, preflight_judges
from assay.jobs.project_file import is_of_project
from assay.jobs.rl_settings import ROLLOUTS_ONLY, RLSettings
from assay.models import Caps, Meter
from assay.models.meter import Usage
from assay.models.roles import is_embedded
from assay.models.unrecorded import Unrecorded
from assay.optimizers.finetuning.base import check_trainable
from assay.optimizers.finetuning.comparison import EvalTask
from assay.optimizers.finetuning.engines import LlamaPolicy, PolicyEngine, TrainerPolicy
from assay.optimizers.finetuning.policy_gradient import train_policy
from assay.optimizers.finetuning.report import PolicyReport
from assay.optimizers.finetuning.run_folder import check_free, from_first, rank, world
from assay.optimizers.finetuning.settings import PolicySettings
from assay.optimizers.finetuning.sources import Recorded, Rollouts, export_temperature
from assay.programs.foreign_agent import ForeignAgent
from assay.reports.training import TrainingLog
from assay.rubrics import Rubric
from assay.rubrics.loading import RubricSource, rubric_name
from assay.support.report import count_refused
from assay.support.values import json_text
from assay.traces import Store
from assay.traces.store.connection import open_engine, store_id
from assay.traces.store.leases import Lease
from assay.traces.store.listing import run_folder
from assay.traces.store.location import home_of, store_address
from assay.traces.store.sealing import Openings
from assay.traces.store.shares import CapShare


@dataclass(kw_only=True)
class TrainingRun:
    """An open run, with the report that is stored at its end. Of processes that train together only the first has a
    folder and a log."""

    run_id: str
    folder: Path | None
    log: TrainingLog | None
    report: Mapping[str, Any] | None = None


@contextmanager
def open_training(
    config: Mapping[str, Any], *, name: str, progress: Progress, store: str | Path | None = None, resume: bool = False
) -> Iterator[TrainingRun]:
    """Opens the run of a training, holds its lock while it is open, and stores how it ended.

    The store is open only at both ends: a training can take hours. A training whose lock another process has taken over
    ends at its next step and changes the run no more.

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
    home, status, failure = home_of(store), "failed", None
    with _leased(store, home, key) as lease:
        run_id, started = _begun(key, stored, store, progress, lease, resume=resume)
        folder = run_folder(store, run_id)
        run = TrainingRun(run_id=run_id, folder=folder, log=TrainingLog(folder, lease.check))
        try:
            with cancelled_by_signals(Meter()):
                yield run
            status = "done"
        except (Exception, KeyboardInterrupt, StopRun) as error:
            status, failure = status_and_reason(error)
            raise
        finally:
            try:
                with opened_store(store, progress, patient=True) as opened:
                    opened.belong_to(lease)
                    if run.report is not None:
                        FinishedRun(opened, run_id, caps=Caps(), about={}).keep(run.report)
                    opened.put_run(
                        run_id, kind="train", config=stored, status=status, started_at=started, failure=failure
                    )
            except StoreError as error:  # the report, or the error that ended the training, must not be lost with it
                progress.say(f"warning: how this training ended is not stored: {error}")
                count_refused(rows=1 + (run.report is not None))


@contextmanager
def _leased(store: str | Path | None, home: Path, key: str) -> Iterator[Lease]:
    engine = open_engine(store_address(store))
    try:
        with job_lease(engine, store_id(engine), home, key) as lease:
            yield lease
    finally:
        engine.dispose()


def _begun(
    key: str,
    config: dict[str, Any],
    store: str | Path | None,
    progress: Progress,
    lease: Lease,
    *,
    resume: bool,
) -> tuple[str, float]:
    """Stores that the run is in progress. Returns its id and start."""
    with opened_store(store, progress) as opened:
        opened.belong_to(lease)
        started = opened.clock.now()
        try:
            run_id, _ = new_run_id(opened, key, kind="train", started_at=started, resume=resume, cache=False)
        except ConfigError:
            raise ConfigError("this training has finished: there is nothing to resume") from None
        opened.put_run(run_id, kind="train", config=config, status="running", started_at=started)
    return run_id, started


@dataclass(frozen=True)
class Retained:
    """A retention task: another program whose score must not fall, with its rubric and its data."""

    program: str
    rubric: str
    data: str

    @classmethod
    def read(cls, text: str) -> "Retained":
        """Of `PROGRAM,RUBRIC,DATA`."""
        parts = [part.strip() for part in text.split(",", 2)]
        if len(parts) != 3 or not all(parts):
            raise ConfigError(f"{text!r} must be PROGRAM,RUBRIC,DATA, such as extract,extract,data/mails.jsonl")
        return cls(*parts)


def train_on_rollouts(command: RLSettings, *, store: str | Path | None, progress: Progress) -> PolicyReport:
    """Trains on rollouts of a program.

    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: a signal came.
    """
    program = program_or_agent(command.agent, command.program, trains=True)
    progress = _of_this_process(progress)
    options = {name: value for name, value in vars(command).items() if value is not None}
    if command.monitor is not None:
        options["monitor"] = rubric_name(command.monitor)
    config = program_settings(type(command), program, command.rubric, command.data, None, options)
    if "temperature" in config.parameters:
        raise ConfigError("temperature would have no effect: `temperature` is that of rollouts", field="parameters")
    settings = config.policy
    if not rank():  # refused before a model is called
        check_trainable(settings.model)
        if not config.resume:
            check_free(config.name)
    measure = independent(command.rubric, config.judge_model, settings.model, forced=config.judged_by_itself)
    retention, monitoring = guards_of(
        config.retention, command.monitor, program=str(program), data=config.data, judge=config.judge_model,
        model=settings.model,
    )  # fmt: skip
    engine = _engine(settings)
    with ExitStack() as opened:
        opener = _EvalTasks(replace(config, model=engine.lm.model), engine, progress, store, opened)
        if rank():
            opener.runs = from_first(opener.runs)
        main, job = opener.open(program, measure, config.data, config.parameters)
        retained = [opener.open(task.program, task.rubric, task.data)[0] for task in retention]
        for one, other in itertools.permutations([main, *retained], 2):
            one.session.meter.share_caps_with(other.session.meter)  # the caps are of the whole training
        if world() > 1:
            _share_caps(job, opener.runs, [main, *retained], opened)
        if not rank():
            from_first(opener.runs)
        monitored = job.additional_rubric(monitoring) if monitoring is not None else None
        # judges may be those of a retention task or of the monitor rubric
        judged = [*(task.session.rubric for task in retained), *([] if monitored is None else [monitored])]
        unused = [*job.warnings, *unused_settings(job, read=("train", "val", "test"), rubrics=judged)]
        if config.preflight and not rank():
            _tried_all(main, retained, job, engine, monitored, settings.rollout_timeout_s)
        plan = scheduled(job, seed=settings.seed, steps=settings.rollout_steps, progress=progress)
        schedule, tasks = opened.enter_context(plan), job.splits.train
        rollouts = Rollouts(main, tasks, settings, engine, monitor=monitored, schedule=schedule, log=_log(job))
        report = train_policy(
            rollouts, config.name, settings, retained=retained, resume=config.resume, progress=progress
        )
        report.notes[:0] = unused
        if report.report is not None:
            report.write_own_page()
        _store(report, job, config)
    return report


def train_on_export(command: RLSettings, *, store: str | Path | None, progress: Progress) -> PolicyReport:
    """Trains on the folder of a transitions export, with the rewards stored in it.

    Importance ratios are relative to the weights that made the calls. Runs no program; score the result with
    `assay evaluate`. The store gets the run, with its curves; the rollouts are those of the export.

    Raises:
        DataError: no transitions export, changed since, of another tokenizer, or with nothing to learn from.
    """
    given = [name for name in command.changed("temperature") if not is_of_project(name, command.temperature)]
    values = {name: value for name, value in asdict(command.policy).items() if name not in ROLLOUTS_ONLY}
    values["temperature"] = export_temperature(command.program, command.temperature if given else None)
    settings = PolicySettings(**values)
    progress = _of_this_process(progress)
    source, config = Recorded(command.program, settings), {**asdict(settings), "export": str(command.program)}
    with open_training(config, name=command.name, progress=progress, store=store, resume=command.resume) as run:
        source.log = run.log
        report = train_policy(source, command.name, settings, resume=command.resume, progress=progress)
        run.report = report.to_dict()
    return report


def _log(job: Job) -> TrainingLog | None:
    """The log of the run, which the first of the processes that train together writes."""
    return None if rank() else TrainingLog(job.folder)


def _store(report: PolicyReport, job: Job, config: RLSettings) -> None:
    """Stores the report, without samples: these are rollouts."""
    if not rank():
        FinishedRun(job.store, job.run_id, caps=config.caps, about={}).keep({**report.to_dict(), "samples": []})


def _of_this_process(progress: Progress) -> Progress:
    """Of processes that train together all but the first are silent."""
    return SilentProgress() if rank() else progress


def _share_caps(job: Job, runs: Sequence[str], tasks: Sequence[EvalTask], opened: ExitStack) -> None:
    """Lets the processes that train together spend from one set of caps.

    Args:
        runs: of the first process.
    """
    if not rank():
        lead(job)
        share = job.session.meter.shared
    else:
        share = CapShare(job.store.engine, runs[0], job.run_id)
        opened.callback(lambda: share.end(*_used_by(tasks)))
    for task in tasks:
        task.session.meter.shared = share


def _used_by(tasks: Sequence[EvalTask]) -> tuple[dict[str, Usage], Unrecorded]:
    """Usage of this process by phase, and its calls that were not recorded."""
    phases, unrecorded = dict[str, Usage](), Unrecorded()
    for task in tasks:
        for phase, usage in task.session.meter.phases.items():
            phases.setdefault(phase, Usage()).add(usage)
        unrecorded += task.session.recorder.unrecorded
    return phases, unrecorded


@dataclass
class _EvalTasks:
    """Opens the jobs of a training: the program that is trained on, and the retention tasks.

    Of processes that train together, all write to one store; a run of another process than the first is a part of the
    run of the first one.

    Attributes:
        runs: of the first process, in their order.
    """

    config: RLSettings
    engine: PolicyEngine
    progress: Progress
    store: str | Path | None
    opened: ExitStack
    titles: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    def open(
        self, program: str | dspy.Module, rubric: Any, data: str, parameters: Mapping[str, Any] | None = None
    ) -> tuple[EvalTask, Job]:
        """An evaluation task and its job. `parameters`: of the trained program; None for a retention task."""
        names = program_settings(ProgramJob, program, rubric, data, None, {"model": self.config.model})
        sampled = {**(parameters or {}), "temperature": self.config.temperature}
        trained = parameters is not None
        config = replace(
            self.config,
            program=names.program,
            rubric=self.config.rubric if trained else names.rubric,  # as it was named
            data=names.data,
            parameters=sampled,
            curriculum=self.config.curriculum if trained else None,
        )
        need = ("train", "val", "test") if trained else ("val", "test")
        with pinned(part_of(self.runs[len(self.titles)], rank(), self.store)) if rank() else nullcontext():
            job = self.opened.enter_context(
                open_job(
                    config,
                    program=program,
                    rubric=rubric,
                    lm=self.engine.lm,
                    progress=self.progress,
                    store=self.store,
                    resume=self.config.resume,
                    need=need,
                )
            )
        if not rank():
            self.runs.append(job.run_id)
        job.session.lm.recording.cache = None  # a policy in training is never answered from a cache
        self.titles.append(_title(job.session.program_name, data, self.titles))
        # run at the end only; its keys identify the training
        sealed = job.splits.parts()["test"] if self.config.test else []
        opens = functools.partial(_open, job) if self.config.test else None
        return EvalTask(self.titles[-1], job.recorded, job.session, job.splits.val, sealed, trained, opens), job


def part_of(run_id: str, number: int, store: str | Path | None) -> str:
    """The name of what another process than the first runs of a run.

    Raises:
        ConfigError: its store is not that of the first process.
    """
    with Store(store) as opened:
        if not any(run == run_id for run, _ in opened.runs(run_id.rpartition("-")[0])):
            raise ConfigError(
                f"process {number} of this training does not find its run {run_id} in {opened.address.shown}: "
                "processes that train together need one store, on several machines a PostgreSQL server (`store`)"
            )
    return f"{run_id}.rank-{number}"


def _tried_all(
    main: EvalTask,
    retained: Sequence[EvalTask],
    job: Job,
    engine: PolicyEngine,
    monitor: Rubric | None,
    timeout_s: float,
) -> None:
    """The preflight of a training: `_tried` for the program that is trained and for each retention task."""
    job.session.progress.say(f"preflight with {job.session.lm.model}: one task, each judge once")
    usual_s = main.session.task_timeout
    if isinstance(main.recorded.program, ForeignAgent):  # one that hangs is found as soon as in a step
        main.session.task_timeout = min(usual_s, timeout_s)
    try:
        _tried(main, job.splits.train, engine, monitor, job.config.max_cost_usd)
    finally:
        main.session.task_timeout = usual_s
    for eval_task in retained:
        _tried(eval_task, eval_task.val, engine, None, job.config.max_cost_usd)


def _tried(
    eval_task: EvalTask, tasks: Sequence[Task], engine: PolicyEngine, watcher: Rubric | None, max_cost_usd: float | None
) -> None:
    """Runs one task and asks each judge once, before weights are loaded; judges only if the engine cannot answer yet.

    Raises:
        ProgramError: the program that is trained made no LM call.
        AssayError: as `assay.jobs.preflight.preflight`.
    """
    session = eval_task.session
    watching = [replace(session, rubric=watcher)] if watcher is not None and watcher.needs_judge else []
    for tried in [session, *watching]:
        if engine.answers_before:
            measured = preflight(tried, eval_task.recorded, tasks, max_cost_usd=max_cost_usd)
            if eval_task.trained and not measured.calls and not isinstance(eval_task.recorded.program, ForeignAgent):
                raise ProgramError(
                    f"{session.program_name} made no recorded LM call on its first task, so there is nothing to train. "
                    "Call the model with `dspy.Predict`; `preflight=False` skips this check"
                )
        elif tried.judge_lm is not None and tried.judge_lm.recording.backend is not engine.lm.recording.backend:
            preflight_judges(tried, tasks, max_cost_usd=max_cost_usd)


def _open(job: Job) -> Openings | None:
    job.splits.unseal()
    return job.openings


def guards_of(
    retention: Sequence[str],
    monitor: RubricSource | None,
    *,
    program: str,
    data: str,
    judge: str | None,
    model: str,
) -> tuple[list[Retained], Rubric | None]:
    """Reads the retention tasks and the monitor rubric, and refuses any that the model in training would judge.

    Raises:
        ConfigError: a task is named twice or is the one trained on, is judged by that model, or is not
            PROGRAM,RUBRIC,DATA.
        RubricError: the rubric does not exist.
    """
    retained = [Retained.read(part) for part in retention]
    tasks = [(program, data), *((task.program, task.data) for task in retained)]
    if repeated := [name for at, name in enumerate(tasks) if name in tasks[:at]]:
        raise ConfigError(
            f"{repeated[0][0]} on {repeated[0][1]} is named twice: once is enough, and what is trained on is not an "
            "retention task"
        )
    for task in retained:
        independent(task.rubric, judge, model)
    return retained, independent(monitor, judge, model) if monitor is not None else None


def _title(program: str, data: str, used: Sequence[str]) -> str:
    """The shortest name that no other evaluation task has."""
    class_name = program.rpartition(":")[2]
    names = itertools.chain(
        (class_name, f"{class_name} on {data}", f"{program} on {data}"),
        (f"{program} on {data} ({at})" for at in itertools.count(2)),
    )
    return next(name for name in names if name not in used)


def _engine(settings: PolicySettings) -> PolicyEngine:
    if is_embedded(settings.model):
        if settings.vllm != "none":
            raise ConfigError(
                "serves models of the hub or of a folder; an embedded one is served by llama.cpp", field="vllm"
            )
        return LlamaPolicy(
            settings.model, temperature=settings.temperature, max_completion=settings.max_completion, seed=settings.seed
        )
    return TrainerPolicy(settings.model, max_completion=settings.max_completion)
