"""`assay tune`: searches agent parameters, decides on the gate, reports on the sealed test split."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt

from assay.commands.groups import InStore, JobOutput, NewArtifact, Planned, Reported, Trusting, WithPage
from assay.commands.impact import Impact, ImpactReport
from assay.errors import BudgetExceeded, ConfigError
from assay.jobs.groups import AgentJob, DecidedJob, ParameterJob, StagedJob
from assay.jobs.job_report import JobReport, JoinReport
from assay.optimizers.settings import SearchConfig
from assay.support.names import one_of
from assay.support.options import EXPERT, Count, Flag, Positive, apply_preset, function_of, options_of
from assay.support.report import OBJECT, Table
from assay.support.values import json_value

if TYPE_CHECKING:
    import optuna

    from assay.datasets import Task
    from assay.datasets.curriculum import Schedule
    from assay.evaluation import Progress, RecordedProgram
    from assay.evaluation.comparison import Comparison
    from assay.jobs.job import Job
    from assay.jobs.planning import Request
    from assay.models.meter import Usage
    from assay.optimizers.parameters import Point, ProgramObjective, SearchOutcome, Space

_METHODS = ("optuna", "policy")
_OF_LEADER = ("max_calls", "max_search_calls", "max_tokens", "max_cost_usd", "trials")
_NOT_JOINING = ("workers", "resume", "out", "into", "curriculum")
_OF_SEARCH = ("trials", "prune_at", "block", "sampler", "pruner", "objectives", "study", "storage", "also")
_OF_POLICY = ("episodes", "tasks_per_episode", "learning_rate")
_OF_PRUNING = ("prune_at", "block")
_SIDES = ("default", "tuned")
_MEANINGS = {
    "efficiency": "1 minus the share of `budget` (steps, tokens, seconds) that a run uses",
    "coherence": "how often the answer is what the reasoning or the tools ended with, "
    "and how often samples of a task agree",
    "adaptability": "mean score of the worst task type, as a share of the mean score",
    "tool_usage": "share of tool calls that were needed, ran and were used",
    "average confidence": "the agent's own estimate that its answer is right",
    "task accuracy": "share of tasks with a score of 0.8 or more",
    "response quality": "mean score",
    "overall score": "mean of the rows above it",
}

# -- Report


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneReport(JobReport):
    """What `tune` returns.

    Attributes:
        unproven: artifact of the best parameters, if gate did not prove them better; the artifact then has the default
        page: HTML page of the search; null if it could not be drawn
        importance: importance of each parameter by fANOVA and PED-ANOVA
        method: `optuna` or `policy`
        best: selected parameters
        level_with_best: numbers of the trials whose score ties with the best one's
        program: the program of the best trial, where several were searched
        trials: number of trials
        complete: trials that ran all tasks
        pruned: trials that were ended early
        failed: trials without a result
        task_runs: runs of a task
        task_runs_saved: share of runs that pruning saved, in [0, 1]
        objectives: objectives that were searched for
        front: trials of the Pareto front, with several objectives
        gate: gain on gate, with `tokens`, the relative change in tokens per task with its interval (negative if fewer),
            `margin` and `not_inferior`; null if gate was not asked
        test: `default` and `tuned`, each an [Evaluation](#evaluation), their `gain`, see [Gain](#gain), `tokens` as for
            gate, and `table`, the five metrics before and after; these are null where the default is kept
        history: one entry per trial, or per episode with `method` policy
        searched: coverage of the rubric on the tasks that were run first, where test was not opened; else null
        confirmed: scores on val of the best parameters of a policy, the initial ones first; null with `method` optuna
    """

    artifact: Path
    unproven: Path | None = None
    page: Path | None = None
    importance: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    method: str
    best: Mapping[str, Any]
    level_with_best: Sequence[int]
    program: str
    trials: int
    complete: int
    pruned: int
    failed: int
    task_runs: int
    task_runs_saved: float
    objectives: Sequence[str]
    front: Sequence[Mapping[str, Any]]
    replaces: bool
    gate: Mapping[str, Any] | None
    test: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    confirmed: Sequence[Any] | None
    searched: Mapping[str, Any] | None
    curriculum: Mapping[str, Any] | None
    search_calls: int
    config: Any = field(metadata=OBJECT)  # the settings, with names in place of objects

    def lines(self) -> Iterator[str | Table]:
        from assay.optimizers.parameters import in_figures
        from assay.reports.markdown import cost_words, curriculum_lines, with_interval
        from assay.support.numbers import calls_text, counted

        yield from self._tested()
        yield from self.opened()
        if self.gate:
            verdict = (
                "the tuned program replaces the default"
                if self.replaces
                else "no proof on gate that it is better: the default is kept, in the artifact too"
            )
            yield f"gate: {with_interval(self.gate)}; tokens {_share(self.gate['tokens'])}: {verdict}"
        best = ", ".join(f"{name} {in_figures(value)}" for name, value in self.best.items())
        if level := self.level_with_best:
            numbers = ", ".join(map(str, level[:8])) + (", …" if len(level) > 8 else "")
            best += f"; no significant difference on val from {counted(len(level), 'other trials')} ({numbers})"
        several = len({trial["program"] for trial in self.history if "program" in trial}) > 1
        yield f"best: {best}" + (f" ({self.program})" if several else "")
        if len(self.objectives) > 1:
            yield self._front()
        unit = "episodes" if self.method == "policy" else "trials"
        yield (
            f"{counted(self.trials, unit)} ({self.pruned} pruned, {self.failed} failed), "
            f"{counted(self.task_runs, 'task runs')}, {100 * self.task_runs_saved:.0f} % saved by pruning; "
            f"LM calls: {calls_text(self.calls, self.cached)}, {cost_words(self.cost_usd)}"
        )
        yield from self.called()
        yield from curriculum_lines(self.curriculum)
        yield from self.limits()
        if self.importance:
            name, weights = next(iter(self.importance.items()))
            shares = ", ".join(f"{parameter} {100 * weight:.0f} %" for parameter, weight in weights.items())
            yield f"importance: {shares} ({name})"
        if self.artifact.name:  # not yet while its own page is written
            yield f"artifact: {self.artifact}"
        if self.unproven:
            yield f"unproven program: {self.unproven}"
        if self.page:
            yield f"page: {self.page}"

    def _tested(self) -> Iterator[str | Table]:
        """The table of the sealed test split, what its rows mean, and the gain; or why there is none."""
        from assay.reports.markdown import failure_lines, gain_claim, why_sealed, with_interval
        from assay.support.numbers import counted, figure, signed

        before, after, gain = (self.test[key] for key in ("default", "tuned", "gain"))
        if not (before and after and gain):
            yield why_sealed(vars(self))
            return
        measured = [
            name for name, value in after["metrics"].items() if value is not None or before["metrics"][name] is not None
        ]
        rows = [
            ("score", figure(before["score"]), figure(after["score"])),
            *((f"  {name}", figure(before["metrics"][name]), figure(after["metrics"][name])) for name in measured),
            *(
                (label, f"{before[key]:.1f}", f"{after[key]:.1f}")
                for label, key in (("LM calls a task", "calls_per_task"), ("tokens a task", "tokens_per_task"))
            ),
        ]
        title = f"sealed test split, {counted(after['n'], 'tasks')}"
        yield Table(title=title, header=("", *_SIDES), rows=rows, strong=("score",))
        changes = [row for row in self.test["table"] if row["before"] is not None or row["after"] is not None]
        rows = [
            (
                row["name"],
                *(figure(row[key]) for key in ("before", "after")),
                *(signed(row[key], 1) for key in ("points", "percent")),
            )
            for row in changes
        ]
        yield Table(title="the agent before and after", header=("", "before", "after", "points", "per cent"), rows=rows)
        for name in [*measured, *(row["name"] for row in changes)]:
            if name in _MEANINGS:
                yield f"{name}: {_MEANINGS[name]}"
        yield from failure_lines(after)
        claim = "" if gain["low"] is None else f": {gain_claim(gain['low'], gain['high'], self.test_openings)}"
        yield f"gain, paired: {with_interval(gain)}{claim}; tokens {_share(self.test['tokens'])}"

    def _front(self) -> Table:
        from assay.optimizers.parameters import in_figures

        first, sign = self.objectives[0], -1 if self.objectives[0] == "score" else 1
        rows = [
            (
                str(trial["number"]),
                *(f"{trial['values'][name]:.4g}" for name in self.objectives),
                ", ".join(f"{name} {in_figures(value)}" for name, value in trial["parameters"].items()),
            )
            for trial in sorted(self.front, key=lambda trial: sign * (trial["values"][first] or 0))
        ]
        return Table(title="Pareto front", header=("trial", *self.objectives, "parameters"), rows=rows)

    def write_page(self, path: str | Path, *, store: str | Path | None = None) -> Path:
        from assay.reports.files import short_name, write_report
        from assay.reports.studies import tuned_page

        program = self.config.program
        return write_report(
            path, "report_study.html", title=f"Agent parameters of {short_name(program)}",
            facts=[("Program", program), ("Model", self.config.model_name)], lines=list(self.lines()),
            page=tuned_page(self.to_dict()),
        )  # fmt: skip


def _share(change: Mapping[str, Any]) -> str:
    from assay.support.numbers import signed

    if change["mean"] is None:
        return "not known"
    return f"{signed(100 * change['mean'], 0)} %" + (
        "" if change["low"] is None else f" [{signed(100 * change['low'], 0)}, {signed(100 * change['high'], 0)}]"
    )


def cheaper(gate: "Comparison", margin: float) -> bool:
    """Whether the tuned program uses fewer tokens and is not inferior, by both 95 % intervals; score above -margin."""
    fewer = saving(gate)
    return gate.gain.low > -margin and fewer["high"] is not None and fewer["high"] < 0


def saving(comparison: "Comparison") -> dict[str, float | None]:
    """Relative change of tokens per task, with a paired 95 % interval; negative if fewer are used."""
    from assay.evaluation.statistics import mean_difference

    before, after = comparison.before.tokens, comparison.after.tokens
    mean = sum(before.values()) / len(before) if before else 0.0
    if not mean:
        return {"mean": None, "low": None, "high": None}
    gap = mean_difference([after[key] - before[key] for key in before.keys() & after.keys()])
    return {
        name: None if value is None or math.isnan(value) else value / mean
        for name, value in zip(("mean", "low", "high"), gap, strict=True)
    }


# -- Settings


class Tune(Reported, Trusting, InStore, NewArtifact, AgentJob, SearchConfig, StagedJob, ParameterJob, DecidedJob):
    """Search PROGRAM's five parameters, or the temperature of an agent of any framework (`agent`), on val, decide on
    gate, and report on the sealed test split.

    PROGRAM's own parameters are the default, the baseline of the comparison. Trials that score worse are stopped after
    a few tasks; `resume` continues a study, and other processes and machines can join it. With a curriculum, trials
    run the val tasks of one stage after another. With the method policy a network learns which parameter to change; in
    one episode a parameter changes by at most min(0.5, 30 * learning rate) of its range.

    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; call again with `resume=True`.
    """

    kind: ClassVar[str] = "tune"

    into: Annotated[str | Path | None, Flag(metavar="ARTIFACT", key=False)] = None
    """Write a copy of this compiled artifact with the best parameters."""
    also: Annotated[Sequence[str | Path], Flag(metavar="ARTIFACT", path=True)] = ()
    """Compiled artifact of the same program whose prompts are tried as well; repeatable."""
    method: Annotated[str, Flag(path=True)] = "optuna"
    """Method. optuna: search by trials; policy: reinforcement learning of a network that adjusts the parameters; or a
    .toml file of settings such as optimizers/tune.toml."""
    episodes: Annotated[Positive, EXPERT] = 10
    """Number of episodes, for `method` policy."""
    tasks_per_episode: Annotated[Positive | None, EXPERT] = None
    """Number of train tasks per episode, for `method` policy; by default all."""
    learning_rate: Annotated[float, Gt(0), EXPERT] = 0.01
    """Learning rate, for `method` policy."""
    max_search_calls: Annotated[Count | None, Flag(job=False)] = None
    """Maximum number of LM calls of the search; by default no limit."""
    workers: Annotated[Positive, Flag(job=False)] = 1
    """Number of processes on this machine that work on the study. They share the caps."""
    margin: Annotated[float, Ge(0), Lt(1)] = 0.02
    """Non-inferiority margin: parameters with fewer tokens replace the default if the gate's interval excludes a loss
    in score larger than this. Part of the job, so that it cannot be changed after the result is known."""

    def check(self) -> None:
        apply_preset(self, "method", Tune, SearchConfig)
        if self.method not in _METHODS:
            raise ConfigError(f"{self.method!r} {one_of(self.method, _METHODS, other='a .toml file')}", field="method")
        if self.curriculum is not None and (unused := self.changed("method", "workers", "study", "objectives")):
            raise ConfigError(
                "cannot be used with a curriculum, which has a study for each stage, searched by one process for the "
                f"score: leave out {', '.join(f'`{name}`' for name in unused)}",
                field=unused[0],
            )
        if self.method == "policy":
            if self.workers > 1:
                raise ConfigError(
                    f"{self.workers} needs `method` optuna: a policy is trained by one process", field="workers"
                )
            if unused := self.changed(*_OF_SEARCH):
                raise ConfigError(
                    "would have no effect on a policy, which has no study. Leave out "
                    f"{', '.join(f'`{name}`' for name in unused)}, or use `method` optuna",
                    field=unused[0],
                )
        elif unused := self.changed(*_OF_POLICY):
            raise ConfigError(
                f"would have no effect on a search. Leave out {', '.join(f'`{name}`' for name in unused)}, or use "
                "`method` policy",
                field=unused[0],
            )
        elif self.pruner == "none" and (unused := self.changed(*_OF_PRUNING)):
            raise ConfigError("would have no effect with `pruner` none, which prunes no trial", field=unused[0])

    @property
    def searches_thresholds(self) -> bool:
        return self.method == "optuna"

    @property
    def artifacts(self) -> Sequence[str | Path]:
        return self.also

    @property
    def needed(self) -> tuple[str, ...]:
        return ("val", "gate", "test") if self.method == "optuna" else ("train", "val", "gate", "test")

    @property
    def to_help(self) -> str:
        joins = self.method == "optuna" and self.curriculum is None
        return "`assay tune --join` with the same settings helps it with its trials" if joins else ""

    @property
    def search(self) -> SearchConfig:
        """The settings of the search alone."""
        return SearchConfig(**{name: getattr(self, name) for name in options_of(SearchConfig)})

    def request(self, job: "Job", each: float) -> "Request":
        from assay.jobs.planning import ALL_STAGES, with_report

        val = job.splits.sizes()["val"]
        if (curriculum := job.splits.curriculum) is None:
            return with_report(job, float(self.trials * self.samples * val))
        largest = max(len(job.splits.of_stage(stage.name, "val")) for stage in curriculum.stages)
        # a trial runs the val tasks of one stage; at the end the default and the best point of each stage run all
        runs = float(self.samples * (self.trials * largest + (1 + len(curriculum.stages)) * val))
        return with_report(job, runs, ALL_STAGES)

    def run(self) -> TuneReport:
        from assay.jobs.arguments import named
        from assay.jobs.artifacts import require_portable
        from assay.jobs.job import open_job, salt_at
        from assay.jobs.opening import artifact_place, check_out, short_title
        from assay.jobs.studies import program_at, storage_of
        from assay.optimizers.parameters import Point
        from assay.traces.store.sealing import resolve_salt

        program, lm, config = named(self)
        if self.workers > 1 and not (lm is None and isinstance(program, str) and isinstance(self.rubric, str | Path)):
            reason = "are processes of their own: give program, rubric and model by their names"
            raise ConfigError(reason, field="workers")
        progress = self.reporter
        config = replace(config, salt=resolve_salt(config.salt, self.store, artifact=salt_at(program)))
        check_out(self.out, resume=self.resume)
        _check_folders(self.into, self.also)
        with open_job(
            config, program=program, rubric=self.rubric, lm=lm, progress=progress, store=self.store,
            resume=self.resume, need=config.needed,
        ) as job:  # fmt: skip
            job.status = "stopped"  # until the job is complete
            finished = job.finished({"into": self.into})
            if job.session.recorder.resumed and (stored := finished.report(progress, out=self.out)) is not None:
                job.end_as_before(stored)
                return TuneReport.read(stored, {"config": config})
            for artifact in (*config.also, *([] if self.into is None else [self.into])):
                program_at(job, Point(str(artifact), {}), config)  # refused now, not after the preflight or the search
            name = f"{short_title(job.session.program_name)}-tuned"
            place = artifact_place(self.store, self.out, name, resume=self.resume)
            warnings = _prepared(job, config, progress)
            searched = _searched(job, config, progress)
            decided = _decided(job, config, searched)
            if decided.stopped is None:
                job.status = "done"
            report = _report(job, config, searched, decided, warnings)
            report = _with_artifacts(report, job, config, searched, decided, place)
            if config.method == "optuna":
                report = _drawn(report, job, config, storage_of(config, self.store))
            finished.keep(report.to_dict())
            if config.portable and config.agent is None:
                require_portable(job, report.artifact)
        return report


_KINDS = ("impact", "join", "data")  # which only the command line has, or has in another form


class TuneOutput(WithPage, Planned, JobOutput):
    """Output."""


class TuneOrImpact(Tune):
    __doc__ = Tune.__doc__
    OUTPUT: ClassVar[Any] = TuneOutput

    impact: Annotated[bool, Flag(key=False)] = False
    """Search nothing: move each parameter alone over its range, and show what it does."""
    levels: Annotated[int, Ge(2)] = 5
    """Number of values of each parameter that `impact` measures."""
    join: Annotated[bool, Flag(key=False)] = False
    """Help a running search, from another terminal or machine on the same store: run trials until it has enough. The
    process without this flag leads: it has the caps, and runs gate and test."""

    @classmethod
    def of_file(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Without the settings that only the other of both has."""
        other = set(options_of(Tune)) - set(options_of(Impact)) if given.get("impact") else {"levels"}
        other |= {*_OF_LEADER, *_NOT_JOINING} if given.get("join") else set()
        return {name: value for name, value in super().of_file(stored, given).items() if name not in other}

    def check(self) -> None:
        if self.impact and self.join:
            raise ConfigError("cannot be used with `impact`, which has no trials", field="join")
        known = options_of(Impact if self.impact else Tune)
        mine = [name for name in options_of(TuneOrImpact) if name not in known and name not in _KINDS]
        if unused := self.changed(*mine):
            reason = "searches nothing" if self.impact else "is not given"
            raise ConfigError(f"would have no effect: `impact` {reason}", field=unused[0])

    def run(self) -> TuneReport | ImpactReport | JoinReport:  # type: ignore[override]
        kind: Any = Impact if self.impact else JoinedTune if self.join else Tune
        report: TuneReport | ImpactReport | JoinReport
        report = kind(**{name: getattr(self, name) for name in options_of(kind)}).run()  # the same job as in Python
        return report


# -- Other processes on one study: workers of this machine, and those that join


class TuneWorker(Tune):
    """Settings of another process of a search, whose run is one of its own."""

    worker: Annotated[str, Flag(key=False, shown=False, stored=True)] = ""
    """What tells it from the others: a number on the same machine, or an id."""


class JoinedTune(Tune):
    """Help a search that `tune` runs in another process or on another machine, with the same settings and store.

    Runs trials until the study has enough. The process that leads has the caps, and runs gate and test. Without one,
    this waits for a minute.

    Raises:
        ConfigError: no process leads the search; a setting differs from its own.
        Cancelled: the user stopped the run; its trial is run by another process.
    """

    def check(self) -> None:
        if unused := self.changed(*_NOT_JOINING):
            raise ConfigError("is a setting of the process that leads the search: leave it out", field=unused[0])
        if self.method != "optuna":
            raise ConfigError(f"{self.method!r} has no study to join", field="method")

    def run(self) -> JoinReport:  # type: ignore[override]
        from assay.deployment import load_artifact
        from assay.jobs.arguments import named
        from assay.jobs.job import completed
        from assay.jobs.members import leader_of, work
        from assay.jobs.studies import storage_of, study_name
        from assay.sources.artifact_files import is_artifact
        from assay.traces import Store
        from assay.traces.records import new_id

        program, lm, config = named(self)
        if lm is not None or not isinstance(program, str) or not isinstance(self.rubric, str | Path):
            raise ConfigError("needs program, rubric and model by their names to join a search", field="program")
        config = completed(config, load_artifact(program) if is_artifact(program) else None, self.store)
        with Store(self.store) as store:
            leader = leader_of(store, config, self.reporter)
            stored = json.loads(store.run_row(leader)["config"])
            study = study_name(config, leader, store)
        if other := [name for name in config.changed(*_OF_LEADER) if getattr(config, name) != stored.get(name)]:
            raise ConfigError(
                f"{getattr(config, other[0])!r} is not {stored.get(other[0])!r}, that of the process that leads the "
                "search and whose settings hold: leave it out",
                field=other[0],
            )
        settings = {**vars(config), "study": study, "storage": storage_of(config, self.store)}
        settings |= {name: stored.get(name) for name in _OF_LEADER}
        return work(TuneWorker(**settings, worker=new_id()), leader, self.reporter)


# -- A search by the stages of a curriculum: one study per stage, then the best points of all stages on the whole val


class StagedSearch:
    """Searches stage by stage, then compares the default and the best point of each stage on all val tasks.

    A stage has the trials that are left, or those of its limit, and ends as soon as its best trial reaches
    `promote_at`. Without a limit, a stage that is not passed is the last one. Later stages begin with the best points
    of earlier ones. The studies are in the storage, so that a resumed run continues with the same trials.
    """

    def __init__(
        self, job: "Job", objective: "ProgramObjective", space: "Space", default: "Point", config: Tune, url: str,
        schedule: "Schedule", progress: "Progress",
    ) -> None:  # fmt: skip
        self.job, self.objective, self.space, self.config = job, objective, space, config
        self.url, self.schedule, self.progress = url, schedule, progress
        self.points = [default]  # and the best of each stage
        self.last: SearchOutcome | None = None  # of the newest stage with a complete trial
        self.task_runs, self.states = 0, list[str]()  # of the stages that have ended
        self.report: dict[str, Any] = {}

    def run(self) -> "tuple[SearchOutcome, str | None]":
        """The outcome of the comparison, and why the search was stopped, if it was."""
        from assay.jobs.curricula import keep_schedule

        try:
            self._search()
            return self._noted(self._compared()), None
        except BudgetExceeded as cap:
            if self.last is None:
                raise
            self.progress.say(f"end of the search: {cap}; continuing with the best trial of the last stage")
            return self._noted(self.last), str(cap)
        finally:
            self.report = keep_schedule(self.schedule)

    def _search(self) -> None:
        schedule, used = self.schedule, 0
        while not schedule.complete and used < self.config.trials:
            stage, tasks = schedule.stage, schedule.val_tasks()
            limit = stage.limit(self.config.trials)
            trials = min(self.config.trials - used, limit or self.config.trials)
            self.progress.say(f"stage {stage.name}: up to {trials} trials of {len(tasks)} val tasks")
            outcome = self._searched(stage.name, trials, tasks, stage.promote_at)
            used += len(outcome.trials)
            self.states += outcome.states
            self.task_runs += outcome.task_runs
            if outcome.best.point not in self.points:
                self.points.append(outcome.best.point)
            if not schedule.scored(_top(outcome), used):
                if limit is None or trials < limit:
                    break
                schedule.leave(used)

    def _searched(self, name: str, trials: int, tasks: "Sequence[Task]", enough: float) -> "SearchOutcome":
        from assay.jobs.studies import study_of
        from assay.optimizers.parameters import outcome_of, search

        config, objective = replace(self.config.search, trials=trials), self.objective.named(f"stage {name}, ")
        study = study_of(self.job, self.config, self.config.search, self.space, self.url, stage=name)
        try:
            search(
                objective, tasks, self.space, config, study, defaults=self.points, progress=self.progress, alone=True,
                until=_reached(enough),
            )  # fmt: skip
        finally:
            if any(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False)):
                self.last = outcome_of(study, self.space, config, len(tasks))
        assert self.last is not None  # otherwise the search has raised
        return self.last

    def _compared(self) -> "SearchOutcome":
        """Each point on all val tasks. The study is that of the run, which the page shows."""
        from assay.jobs.studies import study_of
        from assay.optimizers.parameters import outcome_of, search

        val = self.job.splits.val
        self.progress.say(f"comparison of the default and the best points of the stages on all {len(val)} val tasks")
        study = study_of(self.job, self.config, self.config.search, self.space, self.url)
        config = replace(self.config.search, trials=len(self.points), pruner="none")
        search(self.objective, val, self.space, config, study, defaults=self.points, progress=self.progress, alone=True)
        return outcome_of(study, self.space, config, len(val))

    def _noted(self, outcome: "SearchOutcome") -> "SearchOutcome":
        """The outcome of the comparison, or of the last stage, with what the stages add to it."""
        notes = [*outcome.notes, *self.schedule.notes()]
        return replace(outcome, earlier=self.states, task_runs=outcome.task_runs + self.task_runs, notes=notes)


def _top(outcome: "SearchOutcome") -> float:
    """The highest score of a complete trial."""
    scores = [trial.values["score"] for trial in outcome.trials if trial.state == "complete"]
    return max((score for score in scores if score is not None), default=math.nan)


def _reached(score: float) -> "Callable[[optuna.Study], bool]":
    def reached(study: "optuna.Study") -> bool:
        complete = [trial.value for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
        return any(value is not None and value >= score for value in complete)

    return reached


# -- Search


@dataclass(frozen=True, kw_only=True)
class _Searched:
    """What the search found: the default and the best program, the parameters of the latter, and how it ended."""

    outcome: "SearchOutcome"
    space: "Space"
    before: "RecordedProgram"
    tuned: "RecordedProgram"
    best: Mapping[str, Any]
    stopped: str | None
    notes: Sequence[str]
    curriculum: Mapping[str, Any] | None
    coverage: Mapping[str, Any] | None  # of the rubric, on the tasks that were run first


def _check_folders(into: str | Path | None, also: "Sequence[str | Path]") -> None:
    from assay.sources.artifact_files import is_artifact

    named = [("into", into, "write parameters into"), *(("also", name, "try as well") for name in also)]
    for argument, folder, purpose in named:
        if folder is not None and not is_artifact(folder):
            reason = "it has no manifest.json" if Path(folder).is_dir() else "there is no such folder"
            raise ConfigError(f"{str(folder)!r} is not an artifact to {purpose}: {reason}", field=argument)


def _prepared(job: "Job", config: Tune, progress: "Progress") -> list[str]:
    """Preflight, and the reserve of gate and test; returns notes for the report."""
    from assay.jobs.artifacts import rehearsed
    from assay.jobs.checks import unused_settings
    from assay.jobs.preflight import checked, see_models
    from assay.optimizers.budget import announce_splits, forecast_pair, plan_report

    warnings = [*announce_splits(job.splits, progress), *job.warnings, *unused_settings(job)]
    measured = checked(job, job.splits.val)
    warnings += [*(measured.warnings if measured else ()), *see_models(job)]
    warnings += rehearsed(job, portable=config.portable) if config.agent is None else []
    pair = forecast_pair(job.recorded.program, job.session)
    plan = plan_report(job.splits, job.session.meter, config.decisions, pair=pair, searching=True)
    progress.say(plan.detectable_gain)
    plan.reserve(job.session.meter)
    _check_caps(job, config, pair)
    return warnings


def _check_caps(job: "Job", config: Tune, pair: "Usage") -> None:
    """Refuses caps on calls that do not allow two trials, the default and another, on all val tasks."""
    available, val = job.session.meter.search_calls_left(), len(job.splits.val)
    needed = pair.calls * val * config.samples  # for two trials: a pair of runs per task
    if config.method != "optuna" or available >= needed or job.session.recorder.resumed:
        return
    caps = ", ".join(
        f"`{name}={cap}`" for name in ("max_calls", "max_search_calls") if (cap := getattr(config, name)) is not None
    )
    raise ConfigError(
        f"{caps}: this leaves {available:.0f} calls for the search, and two trials of "
        f"{val} val tasks take about {needed}. Raise `max_calls` to {2 * needed} or more, or lower `val_size` to "
        "fewer tasks"
    )


def _searched(job: "Job", config: Tune, progress: "Progress") -> _Searched:
    from assay.jobs.anchors import replay_of_rubric
    from assay.jobs.curricula import schedule_of
    from assay.jobs.studies import default_of, default_program, objective_of, space_of, storage_of

    space = space_of(job, config, progress)
    objective = objective_of(job, config, space)
    default = default_of(job, space)
    alarms = replay_of_rubric(job.session.rubric, job.session)
    schedule = schedule_of(job, seed=config.seed, steps=config.trials, progress=progress)
    url, staged = storage_of(config, config.store), None
    if schedule is not None:
        staged = StagedSearch(job, objective, space, default, config, url, schedule, progress)
    with job.session.phase("search"):
        if staged is not None:
            outcome, stopped = staged.run()
        elif config.method == "policy":
            outcome, stopped = _by_policy(job, objective, space, default, config, progress)
        else:
            outcome, stopped = _by_optuna(job, objective, space, default, config, progress, url)
    tuned = objective.program_at(outcome.best.point)
    before, unset = default_program(job, objective, default)
    return _Searched(
        outcome=outcome, space=space, before=before, tuned=tuned, best=_parameters(tuned, space), stopped=stopped,
        notes=[*alarms, *unset], curriculum=None if staged is None else staged.report,
        coverage=objective.coverage or None,
    )  # fmt: skip


def _parameters(tuned: "RecordedProgram", space: "Space") -> dict[str, Any]:
    """The parameters of a program, with those thresholds of its thinking policy that are searched."""
    from assay.programs.budgets import thresholds_of

    thresholds = thresholds_of(tuned.program)
    return {**tuned.settings["parameters"], **{name: thresholds[name] for name in thresholds if name in space.ranges}}


def _by_optuna(
    job: "Job", objective: "ProgramObjective", space: "Space", default: "Point", config: Tune, progress: "Progress",
    url: str,
) -> "tuple[SearchOutcome, str | None]":  # fmt: skip
    from assay.jobs.members import await_members, helped, is_cut_off, lead
    from assay.jobs.studies import study_of
    from assay.optimizers.parameters import outcome_of, search
    from assay.optimizers.parameters.search import close_all, requeue_all
    from assay.support.addresses import DatabaseAddress
    from assay.traces.store.shares import members_of

    val = job.splits.val
    study = study_of(job, config, config.search, space, url)
    alone = config.study is None and config.workers == 1
    progress.say(
        f"study {study.study_name} in {DatabaseAddress.of(url)}: {config.trials} trials of {len(val)} val tasks; "
        "the test split is sealed"
    )
    if moved := [
        name
        for name, value in space.trial_parameters(default).items()
        if name != "program" and value != default.parameters.get(name)
    ]:
        progress.say(
            f"the default's {', '.join(f'{name} {default.parameters[name]}' for name in moved)} is not searched: tried "
            "at the nearest value"
        )
    stopped: BudgetExceeded | None = None

    def cut_off(trial: Any) -> bool:
        mine = {None, job.run_id} if config.study is None else {job.run_id}
        members = {member.run_id for member in members_of(job.store.engine, job.run_id)}
        return is_cut_off(job, trial, of_run=(members | mine - ({job.run_id} if alone else set())).__contains__)

    if config.study is None and not alone:  # a study of this run alone: the others are processes that help it
        requeue_all(study, cut_off)
    try:
        lead(job)
        workers = [_worker(config, number, study.study_name, url) for number in range(1, config.workers)]
        with helped(job, workers, progress):
            search(
                objective, val, space, config.search, study, defaults=[default], progress=progress, run=job.run_id,
                alone=alone,
            )  # fmt: skip
    except BudgetExceeded as cap:
        stopped = cap
    await_members(job)
    close_all(study, cut_off)
    if stopped is not None:
        if not any(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False)):
            raise stopped
        progress.say(f"end of the search: {stopped}; continuing with the best candidate so far")
    return outcome_of(study, space, config.search, len(val)), None if stopped is None else str(stopped)


def _worker(config: Tune, number: int, study: str, url: str) -> TuneWorker:
    values = {**vars(config), "workers": 1, "study": study, "storage": url, "progress": None}
    return TuneWorker(**values, worker=str(number))


def _by_policy(
    job: "Job", objective: "ProgramObjective", space: "Space", default: "Point", config: Tune, progress: "Progress"
) -> "tuple[SearchOutcome, str | None]":
    """Learns on train and confirms on val. On resume, the runs before a cap are answered from the response cache."""
    from assay.optimizers.parameters import Point, SearchOutcome, TrialResult, train_policy

    train, val = job.splits.train, job.splits.val
    progress.say(
        f"policy: {config.episodes} episodes of {config.tasks_per_episode or len(train)} train tasks; {len(val)} val "
        "tasks confirm the best"
    )
    result = train_policy(
        objective, train, val, space, default, episodes=config.episodes, tasks_per_episode=config.tasks_per_episode,
        learning_rate=config.learning_rate, seed=config.seed, budget=config.run_budget, progress=progress,
    )  # fmt: skip
    trials = [
        TrialResult(
            e.number,
            Point(default.program, e.parameters),
            "complete",
            {"score": e.metrics["accuracy"]},
            {},
            e.metrics,
            None,
        )
        for e in result.history
    ]
    best = TrialResult(len(trials), result.best, "complete", {"score": None}, {}, {}, None)
    each = min(config.tasks_per_episode or len(train), len(train))
    runs = config.samples * (len(result.history) * each + len(result.confirmed) * len(val))
    notes = [*result.notes, *(f"{e.number}: {e.meaning}" for e in result.history if e.accepted and e.improvement > 0)]
    training = {"episodes": json_value(result.history), "confirmed": result.confirmed}
    return SearchOutcome(best, trials[0], trials, runs, 0.0, [], notes=notes, policy_training=training), result.stopped


# -- Decision, report and artifact


@dataclass(kw_only=True)
class _Decided:
    """The decision on gate and the comparison on test. `kept`: the default, if it was not proven worse on gate."""

    stopped: str | None
    notes: list[str]
    gate: "Comparison | None" = None
    test: "Comparison | None" = None
    replaces: bool = False
    kept: "RecordedProgram | None" = None


def _decided(job: "Job", config: Tune, searched: _Searched) -> _Decided:
    """Runs the gate, then the sealed test if the tuned program replaces the default.

    The tuned program replaces the default if it scores higher, or uses fewer tokens and is not inferior.
    """
    decided = _Decided(stopped=searched.stopped, notes=list(searched.notes))
    try:
        _decide(decided, job, config, searched)
    except BudgetExceeded as cap:
        decided.stopped = str(cap)
    return decided


def _decide(decided: _Decided, job: "Job", config: Tune, searched: _Searched) -> None:
    from assay.evaluation.comparison import what_would_decide
    from assay.evaluation.statistics import POWER, detectable_difference, tasks_needed
    from assay.optimizers.budget import forecast_pair, plan_report
    from assay.programs.budgets import thresholds_of
    from assay.support.numbers import counted, figure

    before, tuned, decisions = searched.before, searched.tuned, config.decisions
    plan = plan_report(job.splits, job.session.meter, decisions, pair=forecast_pair(job.recorded.program, job.session))
    plan.reserve(job.session.meter)
    decided.stopped = decided.stopped or plan.short
    if (
        tuned.settings == before.settings
        and thresholds_of(tuned.program) == thresholds_of(before.program)
        and searched.outcome.best.point.program == config.program
    ):
        tried = sum(state != "failed" for state in searched.outcome.states)
        on_val = len(job.splits.val)
        decided.notes += [
            "no point was better on val than the default; it stays"
            if tried > 1
            else "nothing but the default was tried; it stays",
            f"{counted(on_val, 'val tasks')} can show a gain of {figure(detectable_difference(on_val))} or more with "
            f"{POWER:.0%} power; {tasks_needed(decisions.difference):,} would show {decisions.difference:g}",
        ]
        return
    decided.kept = before
    gate = decided.gate = _compared(decided, job, searched, job.splits.gate[: plan.gate], "gate")
    decided.replaces = gate.gain.is_gain or cheaper(gate, config.margin)
    if not decided.replaces:
        decided.notes.append(what_would_decide(gate.before, gate.after, "gate"))
        return
    decided.kept = None
    decided.test = _compared(decided, job, searched, job.splits.unseal()[: plan.test], "test")


def _compared(decided: _Decided, job: "Job", searched: _Searched, tasks: "Sequence[Task]", split: str) -> "Comparison":
    """Compares default and tuned program. Does not stop for futility: equal quality at a lower cost is a result too."""
    from assay.evaluation.comparison import compare, losses_behind_gain

    rule = job.config.decisions.rule(len(tasks), futility=False)
    comparison = compare(searched.before, searched.tuned, tasks, job.session, split=split, names=_SIDES, rule=rule)
    if comparison.cap is not None:
        decided.stopped = str(comparison.cap)
    elif note := comparison.end_of(split):
        decided.notes.append(note)
    decided.notes += losses_behind_gain(comparison, split)
    return comparison


def _report(job: "Job", config: Tune, searched: _Searched, decided: _Decided, warnings: Sequence[str]) -> TuneReport:
    """The report without artifact and page, which are written with it."""
    from assay.evaluation.metrics import before_and_after

    outcome, gate, test, policy = searched.outcome, decided.gate, decided.test, searched.outcome.policy_training
    states, budget = outcome.states, config.run_budget
    return TuneReport(
        artifact=Path(), method=config.method, best=searched.best, level_with_best=outcome.level,
        program=outcome.best.point.program, trials=len(states), complete=states.count("complete"),
        pruned=states.count("pruned"), failed=states.count("failed"), task_runs=outcome.task_runs,
        task_runs_saved=outcome.saved, objectives=list(config.objectives),
        front=[trial.to_dict() for trial in outcome.trials if trial.number in outcome.front],
        replaces=decided.replaces,
        gate=None if gate is None else {
            **gate.gain.to_dict(), "tokens": saving(gate), "margin": config.margin,
            "not_inferior": gate.gain.low > -config.margin,
        },
        test=dict.fromkeys((*_SIDES, "gain", "tokens", "table")) if test is None else {
            "default": test.before.report(budget=budget), "tuned": test.after.report(budget=budget),
            "gain": test.gain.to_dict(), "tokens": saving(test),
            "table": before_and_after(list(test.before.runs.values()), list(test.after.runs.values())),
        },
        history=[{**trial.to_dict(), "expected": outcome.expected.get(trial.number)} for trial in outcome.trials]
        if policy is None else policy["episodes"],
        confirmed=None if policy is None else policy["confirmed"], stopped=decided.stopped,
        searched=searched.coverage if test is None else None, notes=[*outcome.notes, *decided.notes, *warnings],
        curriculum=searched.curriculum, search_calls=job.search_calls, config=config,
        **job.spent(job.models()),
    )  # fmt: skip


def _with_artifacts(
    report: TuneReport, job: "Job", config: Tune, searched: _Searched, decided: _Decided, folder: Path
) -> TuneReport:
    """Writes the artifact: the best program, or a copy of `into` with the best parameters.

    If gate did not prove them better, the artifact has the default, and the best program is written beside it.
    """
    from assay.jobs.artifacts import keep_artifact
    from assay.jobs.studies import program_at
    from assay.optimizers.parameters import Point, in_figures
    from assay.reports.markdown import markdown

    chosen, into, kept = program_at(job, searched.outcome.best.point, config), config.into, decided.kept
    if into is not None:
        chosen = program_at(job, Point(str(into), dict(report.best)), config)
        note = f"the parameters were written into a copy of {into}, which was not evaluated with them"
        report = replace(report, notes=[*report.notes, note])
    omitted = ("artifact", "unproven", "page", "importance")
    result = {key: value for key, value in report.to_dict().items() if key not in omitted}
    settings = ", ".join(f"{name} {in_figures(value)}" for name, value in report.best.items())
    text = markdown(report, title="Tuned agent parameters", about=f"Best: {settings}.")
    if kept is not None and into is None:
        beside = folder.with_name(f"{folder.name}-unproven")
        report = replace(report, unproven=keep_artifact(job, chosen, beside, result, text, unproven=True))
        chosen = kept
    unproven = kept is not None and chosen is not kept
    return replace(report, artifact=keep_artifact(job, chosen, folder, result, text, unproven=unproven))


def _drawn(report: TuneReport, job: "Job", config: Tune, url: str) -> TuneReport:
    """Writes the study's page into the artifact's folder."""
    import optuna
    import sqlalchemy as sa

    from assay.jobs.studies import facts_of, study_name
    from assay.optimizers.parameters import in_figures
    from assay.optimizers.parameters.impact import importance, write_page
    from assay.support.addresses import DatabaseAddress

    try:
        study = optuna.load_study(study_name=study_name(config, job.run_id, job.store), storage=url)
        report = replace(report, importance=importance(study))
    except (KeyError, sa.exc.SQLAlchemyError, optuna.exceptions.OptunaError) as error:  # the result needs no charts
        reason = str(error).partition("\n")[0]
        note = f"no page: the study at {DatabaseAddress.of(url).shown} is gone ({reason})"
        return replace(report, notes=[*report.notes, note])
    best = ", ".join(f"{name} {in_figures(value)}" for name, value in report.best.items())
    facts = {**facts_of(job, config), "trials": len(report.history), "best": best}
    title = f"Agent parameters of {job.session.program_name}"
    return replace(report, page=write_page(report.artifact, study, config.objectives, title=title, facts=facts))


tune = function_of(Tune, "tune")
join_tune = function_of(JoinedTune, "join_tune")
