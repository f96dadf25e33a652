"""The users' line for agent parameters: `assay.tune`. Joins job, space, study, gate, sealed test and artifact."""

import copy
import math
import multiprocessing
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy
import numpy as np

from assay.datasets.tasks import content_hash
from assay.deployment import load_artifact, save_artifact
from assay.deployment.artifact import check_place, is_artifact
from assay.errors import BudgetExceeded, ConfigError, ModelError, StopRun
from assay.jobs import Job, RunConfig, home_of, open_job, program_manifest, without_password
from assay.models import Meter
from assay.optimizers import Progress, Student
from assay.optimizers.comparison import Comparison, compare
from assay.optimizers.metrics import Budget, before_and_after
from assay.optimizers.parameters import Point, ProgramArena, SearchConfig, SearchOutcome, Space, TrialResult, open_study, search, train_policy
from assay.optimizers.parameters.search import outcome_of
from assay.optimizers.session import has_tools
from assay.optimizers.statistics import mean_difference
from assay.programs import RANGES
from assay.programs.compose import is_agent
from assay.rubrics import Rubric
from assay.traces import store_url

__all__ = ["TuneConfig", "TuneReport", "space_of", "student_at", "tune"]

METHODS = ("optuna", "policy")
_SIDES = ("default", "tuned")


@dataclass(frozen=True, kw_only=True)
class TuneConfig(RunConfig):
    """Settings of a search over agent parameters; `parameters` are fixed ones. See `SearchConfig` for those of the search.

    Attributes:
        ranges: of searched parameters, (lowest, highest); all that act where empty.
        also: folders of further compiled artifacts of this program, tried as one more dimension.
        samples: runs of each task in a trial.
        study: name of a study to begin or to join; by default the run's own.
        storage: database URL of the study; by default beside the store, or its own database where that is a server.
        workers: processes on this machine that share the study; each has its part of the caps. `worker` is a process's number.
        method: `optuna`, or `policy`: a network that learns which parameter to move, for `episodes` of `tasks_per_episode` train
            tasks (all where None), by `learning_rate`.
    """

    kind: str = "tune"
    optimizer: str = "parameters"
    method: str = "optuna"
    trials: int = 60
    sampler: str = "tpe"
    pruner: str = "auto"
    objectives: Sequence[str] = ("score",)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    also: Sequence[str] = ()
    block: int = 5
    samples: int = 1
    budget: Mapping[str, float] = field(default_factory=dict)
    study: str | None = None
    storage: str | None = None
    workers: int = 1
    worker: int = 0
    episodes: int = 10
    tasks_per_episode: int | None = None
    learning_rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise ConfigError(f"method={self.method!r} must be one of {', '.join(METHODS)}")
        if self.episodes < 1 or self.learning_rate < 0 or (self.tasks_per_episode or 1) < 1:
            raise ConfigError("episodes and tasks_per_episode must be at least 1, and learning_rate at least 0")
        if self.workers < 1 or (self.workers > 1 and self.method == "policy"):
            raise ConfigError(f"workers={self.workers!r} must be at least 1, and a policy walks alone")
        if self.method == "policy" and (tuple(self.objectives) != ("score",) or self.study or self.storage):
            raise ConfigError("a policy learns from the metrics and keeps no study; objectives, study and storage go with method='optuna'")
        if self.method == "policy" and self.also:
            raise ConfigError("a policy moves the parameters of one program; choices among artifacts go with method='optuna'")
        if self.samples < 1:
            raise ConfigError(f"samples={self.samples!r} must be at least 1")
        if wrong := sorted(set(self.budget) - set(asdict(Budget()))):
            raise ConfigError(f"a budget has {', '.join(asdict(Budget()))}, not {wrong}")
        self.search  # noqa: B018 - its settings are checked before anything is opened

    @property
    def need(self) -> tuple[str, ...]:
        """Splits that must not be empty."""
        return ("val", "gate", "test") if self.method == "optuna" else ("train", "val", "gate", "test")

    @property
    def search(self) -> SearchConfig:
        return SearchConfig(
            trials=self.trials, sampler=self.sampler, pruner=self.pruner, objectives=tuple(self.objectives), block=self.block, seed=self.seed,
            budget=Budget(**self.budget),
        )  # fmt: skip


@dataclass
class TuneReport:
    """What `tune` returns. `to_dict()` is the `--json` object."""

    artifact: Path
    config: TuneConfig
    outcome: SearchOutcome
    best: dict[str, Any]
    meter: Meter
    gate: Comparison | None = None
    test: Comparison | None = None
    replaces: bool = False
    stopped: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        usage, search, found = self.meter.usage, self.meter.of("search"), self.outcome
        states = [trial.state for trial in found.trials]
        return {
            "artifact": str(self.artifact),
            "method": self.config.method,
            "best": self.best,
            "program": found.best.point.program,
            "trials": len(states),
            "complete": states.count("complete"),
            "pruned": states.count("pruned"),
            "failed": states.count("failed"),
            "task_runs": found.task_runs,
            "task_runs_saved": found.saved,
            "objectives": list(self.config.objectives),
            "front": [trial.to_dict() for trial in found.trials if trial.number in found.front],
            "replaces": self.replaces,
            "gate": None if self.gate is None else {**self.gate.gain.to_dict(), "tokens": _saving(self.gate)},
            "test": {
                "default": None if self.test is None else self.test.before.report(),
                "tuned": None if self.test is None else self.test.after.report(),
                "gain": None if self.test is None else self.test.gain.to_dict(),
                "tokens": None if self.test is None else _saving(self.test),
                "table": None if self.test is None else _table(self.test),
            },
            "history": [trial.to_dict() for trial in found.trials],
            "stopped": self.stopped,
            "notes": [*found.notes, *self.notes],
            "search_calls": search.calls,
            "calls": usage.calls,
            "cached": usage.cached,
            "tokens": usage.tokens,
            "cost_usd": usage.cost_usd,
        }


def tune(
    program: str | dspy.Module,
    *,
    rubric: str | Path | Rubric,
    data: str,
    lm: dspy.LM | None = None,
    out: str | Path | None = None,
    apply: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> TuneReport:
    """Searches the five agent parameters on val, decides on gate, and reports on the sealed test split.

    Args:
        program, rubric, data, lm: as for `assay.compile`; the program's own parameters are the default it is held against.
        out: folder of the artifact; by default `.assay/artifacts/PROGRAM-tuned`.
        apply: a compiled artifact; a copy of it with the best parameters is what is written.
        options: the fields of `TuneConfig`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; call again with `resume=True`.
    """
    config = TuneConfig.of(program, rubric, data, lm, **options)
    assert isinstance(config, TuneConfig)
    if config.workers > 1 and not (lm is None and isinstance(program, str) and isinstance(rubric, str | Path)):
        raise ConfigError("workers are processes of their own: give program, rubric and model by their names")
    shown = progress or Progress()
    if out is not None:
        check_place(Path(out).resolve())
    if apply is not None and not is_artifact(apply):
        raise ConfigError(f"{apply} is no artifact to write parameters into")
    if config.workers > 1:  # each process has its part of the caps
        config = replace(config, **_part(config))
    with open_job(config, program=program, rubric=rubric, lm=lm, progress=shown, store=store, resume=resume, need=config.need) as job:
        job.status = "stopped"  # until all of it is done
        report = _tuned(job, config, shown, store)
        if report.stopped is None:
            job.status = "done"
        chosen = student_at(job, report.outcome.best.point, config)
        if apply is not None:
            chosen = student_at(job, Point(str(apply), chosen.settings["parameters"]), config)
            report.notes.append(f"the parameters were written into a copy of {apply}, which was not evaluated with them")
        name = f"{job.session.program_name.rpartition(':')[2].lower()}-tuned"
        result = {key: value for key, value in report.to_dict().items() if key != "artifact"}
        folder = Path(out) if out else home_of(store) / "artifacts" / name
        report.artifact = save_artifact(
            folder.resolve(), chosen.program, program_manifest(job, chosen, result), splits=job.splits.manifest(), report=_markdown(result)
        )
    return report


def _tuned(job: Job, config: TuneConfig, shown: Progress, store: str | Path | None) -> TuneReport:
    space = space_of(job, config, shown)
    students = {name: student_at(job, Point(name, {}), config) for name in space.programs}
    arena = ProgramArena(students, job.session, samples=config.samples)
    for split in ("train", "val"):
        job.session.know(getattr(job.splits, split), split)
    default = Point(space.programs[0], dict(job.student.settings["parameters"]))
    with job.session.phase("search"):
        by = _by_policy if config.method == "policy" else _by_optuna
        outcome, stopped = by(job, arena, space, default, config, shown, store)
    tuned = arena.student(outcome.best.point)
    report = TuneReport(Path(), config, outcome, dict(tuned.settings["parameters"]), job.session.meter, stopped=stopped)
    try:
        _decide(report, job, tuned)
    except BudgetExceeded as cap:
        report.stopped = str(cap)
    return report


def _by_optuna(
    job: Job, arena: ProgramArena, space: Space, default: Point, config: TuneConfig, shown: Progress, store: str | Path | None
) -> tuple[SearchOutcome, str | None]:
    url, val = config.storage or _beside(store), job.splits.val
    # where others may join, what is tried here must not repeat what they try
    worker = 0 if config.study is None else uuid.uuid4().int % 2**31
    study = open_study(config.study or job.run_id, url, space, config.search, worker=worker, of=_searched_on(job, config))
    where = without_password(url)
    shown.say(f"study {study.study_name} in {where}: {config.trials} trials of {len(val)} val tasks; the test split is sealed")
    stopped = None
    try:
        with _helped(config, study.study_name, url, store):
            search(arena, val, space, config.search, study, defaults=[default], progress=shown)
    except BudgetExceeded as cap:
        if not any(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False)):
            raise
        stopped = str(cap)
        shown.say(f"end of the search: {cap}; the best so far goes on")
    return outcome_of(study, space, config.search, len(val)), stopped


def _searched_on(job: Job, config: TuneConfig) -> dict[str, Any]:
    """What must be the same in all processes of a study."""
    tasks = sorted(task.content_hash for task in job.splits.val)
    return {
        "tasks": content_hash({"tasks": tasks})[:16], "salt": config.salt, "rubric": job.session.rubric.version, "model": config.model,
        "judge_model": config.judge_model, "samples": config.samples, "adapter": config.adapter,
    }  # fmt: skip


@contextmanager
def _helped(config: TuneConfig, study: str, url: str, store: str | Path | None) -> Iterator[None]:
    """Further processes work on the study while the context is open; what they have at work at its end is finished."""
    started = multiprocessing.get_context("spawn")
    helpers = []
    for number in range(1, config.workers):
        theirs = replace(config, workers=1, worker=number, study=study, storage=url, **_part(config))
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


def _part(config: TuneConfig) -> dict[str, Any]:
    whole = {name: getattr(config, name) for name in ("max_calls", "max_search_calls", "max_tokens", "max_cost_usd")}
    caps = {name: cap for name, cap in whole.items() if cap is not None}
    return {name: cap / config.workers if name == "max_cost_usd" else max(1, cap // config.workers) for name, cap in caps.items()}


def _help(config: TuneConfig, store: str | Path | None) -> None:
    """What a further process does: trials, until there are enough. It decides and reports nothing."""
    signal.signal(signal.SIGTERM, _stopped)
    silent = Progress()
    try:
        with open_job(config, program=config.program, rubric=config.rubric, progress=silent, store=store, need=("val",)) as job:
            space = space_of(job, config, silent)
            arena = ProgramArena({name: student_at(job, Point(name, {}), config) for name in space.programs}, job.session, samples=config.samples)
            job.session.know(job.splits.val, "val")
            study = open_study(str(config.study), str(config.storage), space, config.search, worker=config.worker, of=_searched_on(job, config))
            with job.session.phase("search"):
                search(arena, job.splits.val, space, config.search, study, helping=True)
    except (StopRun, KeyboardInterrupt, ModelError):
        pass  # the process that began the study says what came of it


def _stopped(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _by_policy(
    job: Job, arena: ProgramArena, space: Space, default: Point, config: TuneConfig, shown: Progress, store: str | Path | None
) -> tuple[SearchOutcome, str | None]:
    """Learns on train, and has val confirm; what was run before a cap is answered from the cache when it goes on."""
    train, val = job.splits.train, job.splits.val
    shown.say(f"policy: {config.episodes} episodes of {config.tasks_per_episode or len(train)} train tasks; {len(val)} val tasks confirm the best")
    found = train_policy(
        arena, train, val, space, default, episodes=config.episodes, tasks_per_episode=config.tasks_per_episode,
        learning_rate=config.learning_rate, seed=config.seed, budget=Budget(**config.budget), progress=shown,
    )  # fmt: skip
    trials = [
        TrialResult(e.number, Point(default.program, e.parameters), "complete", {"score": e.metrics["accuracy"]}, {}, e.metrics, None)
        for e in found.history
    ]
    best = TrialResult(len(trials), found.best, "complete", {"score": None}, {}, {}, None)
    runs = len(found.history) * (config.tasks_per_episode or len(train)) + len(found.confirmed) * len(val)
    told = [*found.notes, *(f"{e.number}: {e.meaning}" for e in found.history if e.kept and e.improvement > 0)]
    return SearchOutcome(best, trials[0], trials, runs, 0.0, [], None, told), None


def _decide(report: TuneReport, job: Job, tuned: Student) -> None:
    """Gate, then the sealed test: the tuned program replaces the default where it scores higher, or as high with fewer tokens."""
    after = tuned if tuned.settings != job.student.settings or report.outcome.best.point.program != job.config.program else job.student
    if after is job.student:
        tried = sum(trial.state != "failed" for trial in report.outcome.trials)
        report.notes.append(
            "no point was better on val than the default; it stays" if tried > 1 else "nothing was tried beside the default; it stays"
        )
    else:
        report.gate = compare(job.student, after, job.splits.gate, job.session, split="gate", names=_SIDES)
        fewer = _saving(report.gate)
        report.replaces = report.gate.gain.is_gain or (report.gate.gain.mean >= 0 and fewer["high"] is not None and fewer["high"] < 0)
    report.test = compare(job.student, after, job.splits.unseal(), job.session, split="test", names=_SIDES)


def _table(found: Comparison) -> list[dict[str, Any]]:
    return before_and_after(list(found.before.runs.values()), list(found.after.runs.values()))


def _saving(found: Comparison) -> dict[str, float | None]:
    """The change of tokens a task, as a share of before, with a paired 95 % interval; negative where fewer are used."""
    before, after = found.before.tokens, found.after.tokens
    mean = float(np.mean(list(before.values()))) if before else 0.0
    if not mean:
        return {"mean": None, "low": None, "high": None}
    gap = mean_difference([after[key] - before[key] for key in before.keys() & after.keys()])
    return {name: None if value is None or math.isnan(value) else value / mean for name, value in zip(("mean", "low", "high"), gap, strict=True)}


def space_of(job: Job, config: TuneConfig, shown: Progress) -> Space:
    names = [config.program, *(str(path) for path in config.also)]
    acting = {name: _acting(student_at(job, Point(name, {}), config)) for name in names}
    ranges = dict(config.ranges) or {name: limits for name, limits in RANGES.items() if name not in config.parameters}
    for name, found in acting.items():
        if idle := [parameter for parameter in ranges if parameter not in found]:
            shown.say(f"{name} ignores {', '.join(idle)}: not searched for it")
    return Space(programs=names, acting=acting, ranges=ranges, fixed=dict(config.parameters))


def _acting(student: Student) -> list[str]:
    """The parameters that do something in a program: a plain module has only a temperature."""
    if not is_agent(student.program):
        return ["temperature"]
    return [name for name in RANGES if name != "tool_usage_threshold" or has_tools(student.program)]


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


def _beside(store: str | Path | None) -> str:
    """Where a study is kept by default: in the store's database where that is a server, else in a file beside it."""
    url = store_url(store)
    return url if not url.startswith("sqlite:///") else f"sqlite:///{(home_of(store) / 'studies.db').resolve()}"


def _markdown(data: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in data["best"].items())
    lines = ["# Tuned agent parameters", "", f"Best: {settings}.", ""]
    before, after = data["test"]["default"], data["test"]["tuned"]
    if before and after:
        lines += ["| sealed test | default | tuned |", "|---|---|---|", f"| score | {before['score']} | {after['score']} |"]
        lines += [f"| tokens a task | {before['tokens_per_task']} | {after['tokens_per_task']} |"]
        lines += [f"| {name} | {before['metrics'][name]} | {after['metrics'][name]} |" for name in after["metrics"]]
        lines += ["", f"Gain, paired, 95 %: {data['test']['gain']}. Replaces the default (gate): {data['replaces']}."]
    lines += [
        "",
        f"{data['trials']} trials, {data['pruned']} of them pruned; {data['calls']} calls, {data['tokens']} tokens, {data['cost_usd']} USD.",
    ]
    return "\n".join(lines) + "\n"
