"""Public API for `assay train`: `assay.train`.

Combines program, rubric, data, policy, retention tasks and monitor rubric. Does not implement the training:
`assay.optimizers.finetuning` does.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import dspy

from assay.api.agent import agent_program, serving
from assay.datasets import Task
from assay.errors import ConfigError, ProgramError
from assay.evaluation import Progress, SilentProgress, default_progress
from assay.models.roles import is_embedded
from assay.optimizers.finetuning.comparison import EvalTask
from assay.optimizers.finetuning.engines import LlamaPolicy, PolicyEngine, TrainerPolicy
from assay.optimizers.finetuning.policy_gradient import PolicyReport, train_policy
from assay.optimizers.finetuning.run_folder import rank, world
from assay.optimizers.finetuning.settings import PolicySettings
from assay.optimizers.finetuning.sources import Recorded, Rollouts, export_temperature
from assay.programs.foreign.agent import ForeignAgent
from assay.reports.training_log import TrainingLog
from assay.rubrics import Rubric
from assay.rubrics.loading import RubricSource, rubric_name
from assay.runs.arguments import program_settings
from assay.runs.curricula import scheduled
from assay.runs.finished import FinishedRun
from assay.runs.independence import independent
from assay.runs.jobs import Job, open_job
from assay.runs.opening import home_of
from assay.runs.preflight import preflight, preflight_judges
from assay.runs.settings import ProgramSettings, TrainSettings
from assay.runs.settings.options import OfflineOptions, TrainOptions
from assay.runs.settings.train import ROLLOUTS_ONLY
from assay.runs.trainings import open_training
from assay.runs.unused import unused_settings
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.traces.store.sealing import Openings


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


@takes(TrainSettings, without=("cache",))  # a policy in training is never answered from a cache
@trusts
def train(
    program: str | dspy.Module | None = None,
    *,
    agent: str | Callable[..., Any] | None = None,
    agent_key: str | None = None,
    rubric: RubricSource,
    data: str | None = None,
    name: str,
    monitor: RubricSource | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    test: bool = True,
    progress: Progress | None = None,
    **options: Unpack[TrainOptions],
) -> PolicyReport:
    """Trains weights by policy gradient on rollouts of a program.

    Trains on `train`, evaluates on `val`, and compares old and new weights on the sealed `test`, greedy and sampled.
    The adapter is served as `MODEL+NAME`. With a `curriculum`, steps take train tasks of its stages, and evaluations
    val tasks of the current stage.

    Args:
        program: a name, an artifact's path (its prompts and demonstrations stay), or a `dspy.Module`.
        agent: in place of a program: a function of the task, `MODULE:CALLABLE` or a command; see `ForeignAgent`.
        agent_key: key of the runners on other machines (`agent="remote"`), see `agent_listen`.
        data: None if the stages of a curriculum name their data.
        monitor: a second rubric that scores the rollouts and is not trained on.
        test: whether old and new weights are compared on the sealed test split at the end, for `validation`.
        options: the fields of `assay.runs.settings.TrainSettings`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: a signal came; call again with `resume=True`.
    """
    program = agent_program(agent, program)
    progress, store = _of_this_process(progress, store)
    config = program_settings(TrainSettings, program, rubric, data, None, _values(options, monitor, program))
    if "temperature" in config.parameters:
        raise ConfigError("the agent parameter temperature would have no effect: temperature=… is that of rollouts")
    settings = config.policy
    measure = independent(rubric, config.judge_model, settings.model, forced=config.judged_by_itself)
    retention, monitoring = _guards(config, monitor, program)
    engine = _engine(settings)
    served = replace(config, model=engine.lm.model, cache=False, adapter_name=name)
    with ExitStack() as opened:
        opener = _EvalTasks(served, engine, progress, store, resume, test, opened)
        main, job = opener.open(program, measure, config.data, config.parameters)
        opened.enter_context(serving(program, job.store, config, agent_key, progress))
        retained = [opener.open(task.program, task.rubric, task.data)[0] for task in retention]
        for one, other in itertools.permutations([main, *retained], 2):
            one.session.meter.share_caps_with(other.session.meter)  # the caps are of the whole training
        monitored = job.additional_rubric(monitoring) if monitoring is not None else None
        unused = _unused(job, retained, monitored)
        if config.preflight and not rank():
            _tried_all(main, retained, job, engine, monitored, settings.rollout_timeout_s)
        plan = scheduled(job, seed=settings.seed, steps=settings.rollout_steps, progress=progress)
        schedule, tasks = opened.enter_context(plan), job.splits.train
        rollouts = Rollouts(main, tasks, settings, engine, monitor=monitored, schedule=schedule, log=_log(job))
        report = train_policy(rollouts, name, settings, retained=retained, resume=resume, progress=progress)
    report.notes[:0] = unused
    return _stored(report, job, config)


def _log(job: Job) -> TrainingLog | None:
    """The log of the run, which the first of the processes that train together writes."""
    return None if rank() else TrainingLog(job.folder)


def _stored(report: PolicyReport, job: Job, config: TrainSettings) -> PolicyReport:
    """Writes the report to the run's folder, without samples: these stay in the store, where they can be erased."""
    if not rank():
        FinishedRun(job.folder, caps=config.caps, about={}).keep({**report.to_dict(), "samples": []})
    return report


def _guards(
    config: TrainSettings, monitor: RubricSource | None, program: str | dspy.Module
) -> tuple[list[Retained], Rubric | None]:
    """Retention tasks and the monitor rubric, see `guards_of`."""
    return guards_of(
        config.retention, monitor, program=str(program), data=config.data, judge=config.judge_model,
        model=config.policy.model,
    )  # fmt: skip


def _unused(job: Job, retained: Sequence[EvalTask], monitor: Rubric | None) -> list[str]:
    """Warnings about the data, and notes about settings without effect.

    Judges may be those of a retention task or of the monitor rubric.
    """
    rubrics = [*(task.session.rubric for task in retained), *([] if monitor is None else [monitor])]
    return [*job.warnings, *unused_settings(job, read=("train", "val", "test"), rubrics=rubrics)]


def _values(options: Mapping[str, Any], monitor: RubricSource | None, program: str | dspy.Module) -> dict[str, Any]:
    """The options of this process as settings, with the names of the arguments that may be objects."""
    values = {key: value for key, value in _divided_caps(options).items() if value is not None}
    if monitor is not None:
        values["monitor"] = rubric_name(monitor)
    return values | ({"agent": program.name} if isinstance(program, ForeignAgent) else {})


def _of_this_process(progress: Progress | None, store: str | Path | None) -> tuple[Progress, str | Path | None]:
    """Progress and store; of processes that train together, all but the first are silent and use another store."""
    if rank():
        return SilentProgress(), home_of(store) / f"rank-{rank()}" / "assay.db"
    return default_progress(progress), store


@dataclass
class _EvalTasks:
    """Opens the jobs of a training: the program that is trained on, and the retention tasks."""

    config: TrainSettings
    engine: PolicyEngine
    progress: Progress
    store: str | Path | None
    resume: bool
    test: bool
    opened: ExitStack
    titles: list[str] = field(default_factory=list)

    def open(
        self, program: str | dspy.Module, rubric: Any, data: str, parameters: Mapping[str, Any] | None = None
    ) -> tuple[EvalTask, Job]:
        """An evaluation task and its job. `parameters`: of the trained program; None for a retention task."""
        names = program_settings(ProgramSettings, program, rubric, data, None, {"model": self.config.model})
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
        job = self.opened.enter_context(
            open_job(
                config,
                program=program,
                rubric=rubric,
                lm=self.engine.lm,
                progress=self.progress,
                store=self.store,
                resume=self.resume,
                need=need,
            )
        )
        job.session.lm.recording.cache = None  # a policy in training is never answered from a cache
        for split in need[:-1]:
            job.session.register(getattr(job.splits, split), split)
        self.titles.append(_title(job.session.program_name, data, self.titles))
        # run at the end only; its keys identify the training
        sealed = job.splits.parts()["test"] if self.test else []
        opens = functools.partial(_open, job) if self.test else None
        return EvalTask(self.titles[-1], job.recorded, job.session, job.splits.val, sealed, trained, opens), job


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
        AssayError: as `assay.runs.preflight.preflight`.
    """
    session, split = eval_task.session, "train" if eval_task.trained else "val"
    watching = [replace(session, rubric=watcher)] if watcher is not None and watcher.needs_judge else []
    for tried in [session, *watching]:
        if engine.answers_before:
            measured = preflight(tried, eval_task.recorded, tasks, split=split, max_cost_usd=max_cost_usd)
            if eval_task.trained and not measured.calls and not isinstance(eval_task.recorded.program, ForeignAgent):
                raise ProgramError(
                    f"{session.program_name} made no recorded LM call on its first task, so there is nothing to train. "
                    "Call the model with `dspy.Predict`; preflight=False skips this check"
                )
        elif tried.judge_lm is not None and tried.judge_lm.recording.backend is not engine.lm.recording.backend:
            preflight_judges(tried, tasks, split=split, max_cost_usd=max_cost_usd)


def _open(job: Job) -> Openings | None:
    job.session.register(job.splits.unseal(), "test")
    return job.openings


def _divided_caps(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with this process's share of the caps, which apply to all training processes together."""
    portion = dict(options)
    for cap in ("max_calls", "max_tokens", "max_cost_usd"):
        if portion.get(cap) is not None and world() > 1:
            portion[cap] = portion[cap] / world() if cap == "max_cost_usd" else max(1, portion[cap] // world())
    return portion


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
            f"{repeated[0][0]} on {repeated[0][1]} is named twice: once is enough, and what is trained on is no "
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


@takes(PolicySettings)
def train_offline(
    export: str | Path,
    *,
    name: str,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Unpack[OfflineOptions],
) -> PolicyReport:
    """Trains weights by policy gradient on the folder of a transitions export, with the rewards stored in it.

    Importance ratios are relative to the weights that made the calls. Runs no program; score the result with
    `assay evaluate`.

    Args:
        store: gets the run, with its curves; the rollouts are those of the export.
        options: the fields of `PolicySettings` without `ROLLOUTS_ONLY`; the temperature is that of the export.
    Raises:
        DataError: no transitions export, changed since, of another tokenizer, or with nothing to learn from.
        ConfigError: a setting that would have no effect.
    """
    if ignored := sorted(set(ROLLOUTS_ONLY) & options.keys()):
        raise ConfigError(
            f"{', '.join(ignored)} would have no effect: an export brings its tasks and rewards, and nothing is run"
        )
    values: dict[str, Any] = {**options, "temperature": export_temperature(export, options.get("temperature"))}
    settings = PolicySettings(**values)
    progress, store = _of_this_process(progress, store)
    source, config = Recorded(export, settings), {**asdict(settings), "export": str(export)}
    with open_training(config, name=name, progress=progress, store=store, resume=resume) as run:
        source.log = run.log
        report = train_policy(source, name, settings, resume=resume, progress=progress)
        run.keep(report.to_dict())
    return report


def _engine(settings: PolicySettings) -> PolicyEngine:
    if is_embedded(settings.model):
        if settings.vllm != "none":
            raise ConfigError(
                f"vllm={settings.vllm!r} serves models of the hub or of a folder; an embedded one is served by "
                "llama.cpp"
            )
        return LlamaPolicy(
            settings.model, temperature=settings.temperature, max_completion=settings.max_completion, seed=settings.seed
        )
    return TrainerPolicy(settings.model, max_completion=settings.max_completion)
