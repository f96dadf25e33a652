"""Public API for `assay tune`: searches agent parameters, decides on the gate, reports on the sealed test split."""

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import dspy

from assay.api.tune.report import TuneReport, as_page, cheaper
from assay.api.tune.study import (
    default_of,
    default_program,
    facts_of,
    objective_of,
    program_at,
    space_of,
    storage_of,
    study_of,
)
from assay.datasets import Task
from assay.datasets.schedule import Schedule
from assay.deployment.artifact import is_artifact
from assay.errors import BudgetExceeded, ConfigError, ModelError, StopRun
from assay.evaluation import Progress, RecordedProgram, SilentProgress, default_progress
from assay.evaluation.comparison import (
    Comparison,
    compare,
    losses_behind_gain,
    what_would_decide,
)
from assay.evaluation.metrics import Budget
from assay.evaluation.statistics import POWER, detectable_difference, tasks_needed
from assay.models import Meter
from assay.models.meter import Usage
from assay.optimizers.budget import announce_splits, forecast_pair, plan_report
from assay.optimizers.parameters import (
    Point,
    ProgramObjective,
    SearchOutcome,
    Space,
    TrialResult,
    in_figures,
    outcome_of,
    search,
    train_policy,
)
from assay.optimizers.parameters.impact import importance, write_page
from assay.optimizers.parameters.search import requeue_all
from assay.programs.budgets import thresholds_of
from assay.rubrics.loading import RubricSource
from assay.runs.anchors import replay_of_rubric
from assay.runs.arguments import program_settings, resolve_model, resolve_program
from assay.runs.artifacts import keep_artifact, rehearsed, require_portable
from assay.runs.curricula import keep_schedule, schedule_of
from assay.runs.jobs import Job, open_job, salt_at
from assay.runs.opening import artifact_place, check_out
from assay.runs.preflight import checked, see_models
from assay.runs.settings import TuneSettings
from assay.runs.settings.options import TuneOptions
from assay.runs.unused import unused_settings
from assay.sources.modules import without_call
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.numbers import counted, figure
from assay.traces import Store, url_without_password
from assay.traces.store.sealing import resolve_salt

if TYPE_CHECKING:
    import optuna

# -- Worker processes on one study.


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


# -- A search by the stages of a curriculum: one study per stage, then the best points of all stages on the whole val.


class StagedSearch:
    """Searches stage by stage, then compares the default and the best point of each stage on all val tasks.

    A stage has the trials that are left, or those of its limit, and ends as soon as its best trial reaches
    `promote_at`. Without a limit, a stage that is not passed is the last one. Later stages begin with the best points
    of earlier ones. The studies are in the storage, so that a resumed run continues with the same trials.
    """

    def __init__(
        self, job: Job, objective: ProgramObjective, space: Space, default: Point, config: TuneSettings, url: str,
        schedule: Schedule, progress: Progress,
    ) -> None:  # fmt: skip
        self.job, self.objective, self.space, self.config = job, objective, space, config
        self.url, self.schedule, self.progress = url, schedule, progress
        self.points = [default]  # and the best of each stage
        self.last: SearchOutcome | None = None  # of the newest stage with a complete trial
        self.task_runs, self.states = 0, list[str]()  # of the stages that have ended
        self.report: dict[str, Any] = {}

    def run(self) -> tuple[SearchOutcome, str | None]:
        """The outcome of the comparison, and why the search was stopped, if it was."""
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

    def _searched(self, name: str, trials: int, tasks: Sequence[Task], enough: float) -> SearchOutcome:
        study = study_of(self.job, self.config, self.space, self.url, stage=name)
        config, objective = replace(self.config.search, trials=trials), self.objective.named(f"stage {name}, ")
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

    def _compared(self) -> SearchOutcome:
        """Each point on all val tasks. The study is that of the run, which the page shows."""
        val = self.job.splits.val
        self.progress.say(f"comparison of the default and the best points of the stages on all {len(val)} val tasks")
        study = study_of(self.job, self.config, self.space, self.url)
        config = replace(self.config.search, trials=len(self.points), pruner="none")
        search(self.objective, val, self.space, config, study, defaults=self.points, progress=self.progress, alone=True)
        return outcome_of(study, self.space, config, len(val))

    def _noted(self, outcome: SearchOutcome) -> SearchOutcome:
        """The outcome of the comparison, or of the last stage, with what the stages add to it."""
        notes = [*outcome.notes, *self.schedule.notes()]
        return replace(outcome, earlier=self.states, task_runs=outcome.task_runs + self.task_runs, notes=notes)


def _top(outcome: SearchOutcome) -> float:
    """The highest score of a complete trial."""
    scores = [trial.values["score"] for trial in outcome.trials if trial.state == "complete"]
    return max((score for score in scores if score is not None), default=math.nan)


def _reached(score: float) -> "Callable[[optuna.Study], bool]":
    def reached(study: "optuna.Study") -> bool:
        complete = [trial.value for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
        return any(value is not None and value >= score for value in complete)

    return reached


# -- Run.


_SIDES = ("default", "tuned")


@takes(TuneSettings)
@trusts
def tune(
    program: Any,
    *,
    rubric: RubricSource,
    data: Any = None,
    lm: dspy.LM | None = None,
    out: str | Path | None = None,
    apply: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Unpack[TuneOptions],
) -> TuneReport:
    """Searches the five agent parameters on val, decides on gate, and reports on the sealed test split.

    With a `curriculum`, trials run the val tasks of one stage after another.

    Args:
        program: as for `assay.compile`; its own parameters are the default, the baseline of the comparison.
        rubric: as for `assay.compile`.
        data: as for `assay.compile`; None if the stages of a curriculum name their data.
        lm: as for `assay.compile`.
        out: new folder of the artifact; by default `.assay/artifacts/PROGRAM-tuned`, with a number if it exists.
        apply: a compiled artifact; the result is a copy of it with the best parameters.
        options: the fields of `assay.runs.settings.TuneSettings`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; call again with `resume=True`.
    """
    program = resolve_program(program)
    lm, settings = resolve_model(program, lm, options)
    config = program_settings(TuneSettings, program, rubric, data, lm, settings)
    if config.workers > 1 and not (lm is None and isinstance(program, str) and isinstance(rubric, str | Path)):
        raise ConfigError("workers are processes of their own: give program, rubric and model by their names")
    progress = default_progress(progress)
    config = replace(config, salt=resolve_salt(config.salt, store, artifact=salt_at(program)))
    check_out(out, resume=resume)
    _check_folders(apply, config.also)
    single = config.of_one_worker()
    with open_job(
        single, program=program, rubric=rubric, lm=lm, progress=progress, store=store, resume=resume, need=config.need
    ) as job:
        job.status = "stopped"  # until the job is complete
        finished = job.finished({"apply": apply})
        if job.session.recorder.resumed and (stored := finished.report(progress, out=out)) is not None:
            job.end_as_before(stored)
            return _as_stored(config, job, stored)
        for artifact in (*config.also, *([] if apply is None else [apply])):
            program_at(job, Point(str(artifact), {}), config)  # refuses it now, not after the preflight or the search
        name = f"{without_call(job.session.program_name).rpartition(':')[2].lower()}-tuned"
        place = artifact_place(store, out, name, resume=resume)
        warnings = _prepared(job, config, progress)
        report = _tuned(job, config, progress, store, resume)
        report.notes, report.called = report.notes + warnings, job.models()
        if report.stopped is None:
            job.status = "done"
        _save(report, job, config, place, apply)
        if config.method == "optuna":
            _drawn(report, job, config, storage_of(config, store))
        finished.keep(report.to_dict())
        if config.portable:
            require_portable(job, report.artifact)
    return report


def _check_folders(apply: str | Path | None, also: Sequence[str]) -> None:
    named = [("apply", apply, "write parameters into"), *(("also", name, "try as well") for name in also)]
    for argument, folder, purpose in named:
        if folder is not None and not is_artifact(folder):
            reason = "it has no manifest.json" if Path(folder).is_dir() else "there is no such folder"
            raise ConfigError(f"{argument}={str(folder)!r} is not an artifact to {purpose}: {reason}")


def _prepared(job: Job, config: TuneSettings, progress: Progress) -> list[str]:
    """Preflight, and the reserve of gate and test; returns notes for the report."""
    warnings = [*announce_splits(job.splits, progress), *job.warnings, *unused_settings(job)]
    measured = checked(job, job.splits.val, split="val")
    warnings += [*(measured.warnings if measured else ()), *see_models(job)]
    warnings += rehearsed(job, portable=config.portable)
    pair = forecast_pair(job.recorded.program, job.session)
    plan = plan_report(job.splits, job.session.meter, config.decisions, pair=pair, searching=True)
    progress.say(plan.detectable_gain)
    plan.reserve(job.session.meter)
    _check_caps(job, config, pair)
    return warnings


def _check_caps(job: Job, config: TuneSettings, pair: Usage) -> None:
    """Refuses caps on calls that do not allow two trials, the default and another, on all val tasks."""
    available, val = job.session.meter.search_calls_left(), len(job.splits.val)
    needed = pair.calls * val * config.samples  # for two trials: a pair of runs per task
    if config.method != "optuna" or available >= needed or job.session.recorder.resumed:
        return
    caps = ", ".join(
        f"{name}={cap}" for name in ("max_calls", "max_search_calls") if (cap := getattr(config, name)) is not None
    )
    raise ConfigError(
        f"{caps}: this leaves {available:.0f} calls for the search, and two trials of "
        f"{val} val tasks take about {needed}. Raise max_calls to {2 * needed} or more, or set sizes={{'val': N}} to "
        "fewer tasks"
    )


def _as_stored(config: TuneSettings, job: Job, stored: Mapping[str, Any]) -> TuneReport:
    """The report of a run that had already ended. Its outcome has the best trial only, without scores per task."""
    best = TrialResult(0, Point(stored["program"], dict(stored["best"])), "complete", {"score": None}, {}, {}, None)
    outcome = SearchOutcome(best, None, [], stored["task_runs"], stored["task_runs_saved"], [])
    page = Path(stored["page"]) if stored["page"] else None
    return TuneReport(
        Path(stored["artifact"]), config, outcome, dict(stored["best"]), job.session.meter, replaces=stored["replaces"],
        stopped=stored["stopped"], page=page, importance=stored["importance"], notes=stored["notes"],
        stored=stored,
    )  # fmt: skip


def _tuned(job: Job, config: TuneSettings, progress: Progress, store: str | Path | None, resume: bool) -> TuneReport:
    space = space_of(job, config, progress)
    objective = objective_of(job, config, space)
    for split in ("train", "val"):
        job.session.register(getattr(job.splits, split), split)
    default = default_of(job, space)
    alarms = replay_of_rubric(job.session.rubric, job.session)
    staged = _staged(job, objective, space, default, config, progress, store)
    with job.session.phase("search"):
        if staged is not None:
            outcome, stopped = staged.run()
        elif config.method == "policy":
            outcome, stopped = _by_policy(job, objective, space, default, config, progress)
        else:
            outcome, stopped = _by_optuna(job, objective, space, default, config, progress, store, resume)
    tuned = objective.program_at(outcome.best.point)
    before, unset = default_program(job, objective, default)
    notes = [*alarms, *unset]
    report = TuneReport(
        Path(), config, outcome, _parameters(tuned, space), job.session.meter, stopped=stopped, notes=notes,
        curriculum=None if staged is None else staged.report, rows=job.rows, coverage=objective.coverage or None,
    )  # fmt: skip
    try:
        _decide(report, job, before, tuned)
    except BudgetExceeded as cap:
        report.stopped = str(cap)
    return report


def _staged(
    job: Job, objective: ProgramObjective, space: Space, default: Point, config: TuneSettings, progress: Progress,
    store: str | Path | None,
) -> StagedSearch | None:  # fmt: skip
    """The search by the stages of a curriculum; None without one."""
    schedule = schedule_of(job, seed=config.seed, steps=config.trials, progress=progress)
    if schedule is None:
        return None
    return StagedSearch(job, objective, space, default, config, storage_of(config, store), schedule, progress)


def _parameters(tuned: RecordedProgram, space: Space) -> dict[str, Any]:
    """The parameters of a program, with those thresholds of its thinking policy that are searched."""
    thresholds = thresholds_of(tuned.program)
    return {**tuned.settings["parameters"], **{name: thresholds[name] for name in thresholds if name in space.ranges}}


def _by_optuna(
    job: Job,
    objective: ProgramObjective,
    space: Space,
    default: Point,
    config: TuneSettings,
    progress: Progress,
    store: str | Path | None,
    resume: bool,
) -> tuple[SearchOutcome, str | None]:
    url, val = storage_of(config, store), job.splits.val
    study, alone = study_of(job, config, space, url), config.study is None and config.workers == 1
    progress.say(
        f"study {study.study_name} in {url_without_password(url)}: {config.trials} trials of {len(val)} val tasks; "
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
    stopped = None
    if config.study is None and not alone:
        requeue_all(study)  # a study of this run alone: processes that held its running trials are gone
    try:
        with helped(config, study.study_name, url, store, progress, meter=job.session.meter, resume=resume):
            search(objective, val, space, config.search, study, defaults=[default], progress=progress, alone=alone)
    except BudgetExceeded as cap:
        if not any(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False)):
            raise
        stopped = str(cap)
        progress.say(f"end of the search: {cap}; continuing with the best candidate so far")
    return outcome_of(study, space, config.search, len(val)), stopped


def _by_policy(
    job: Job, objective: ProgramObjective, space: Space, default: Point, config: TuneSettings, progress: Progress
) -> tuple[SearchOutcome, str | None]:
    """Learns on train and confirms on val. On resume, the runs before a cap are answered from the response cache."""
    train, val = job.splits.train, job.splits.val
    progress.say(
        f"policy: {config.episodes} episodes of {config.tasks_per_episode or len(train)} train tasks; {len(val)} val "
        "tasks confirm the best"
    )
    result = train_policy(
        objective, train, val, space, default, episodes=config.episodes, tasks_per_episode=config.tasks_per_episode,
        learning_rate=config.learning_rate, seed=config.seed, budget=Budget(**config.budget), progress=progress,
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
    training = {"episodes": [episode.to_dict() for episode in result.history], "confirmed": result.confirmed}
    return SearchOutcome(best, trials[0], trials, runs, 0.0, [], notes=notes, policy_training=training), result.stopped


def _save(report: TuneReport, job: Job, config: TuneSettings, folder: Path, apply: str | Path | None) -> None:
    """Writes the artifact: the best program, or a copy of `apply` with the best parameters.

    If gate did not prove them better, the artifact has the default, and the best program is written beside it.
    """
    chosen = program_at(job, report.outcome.best.point, config)
    if apply is not None:
        chosen = program_at(job, Point(str(apply), report.best), config)
        report.notes.append(f"the parameters were written into a copy of {apply}, which was not evaluated with them")
    omitted = ("artifact", "unproven", "page", "importance")
    result = {key: value for key, value in report.to_dict().items() if key not in omitted}
    text, kept = as_page(result), chosen if report.kept is None or apply is not None else report.kept
    if kept is not chosen:
        beside = folder.with_name(f"{folder.name}-unproven")
        report.unproven = keep_artifact(job, chosen, beside, result, text, unproven=True)
    report.artifact = keep_artifact(
        job, kept, folder, result, text, unproven=kept is chosen and report.kept is not None
    )


def _drawn(report: TuneReport, job: Job, config: TuneSettings, url: str) -> None:
    """Writes the study's page into the artifact's folder."""
    import optuna
    import sqlalchemy as sa

    try:
        study = optuna.load_study(study_name=config.study or job.run_id, storage=url)
        report.importance = importance(study)
    except (KeyError, sa.exc.SQLAlchemyError, optuna.exceptions.OptunaError) as error:  # the result needs no charts
        report.notes.append(
            f"no page: the study at {url_without_password(url)} is gone ({str(error).partition(chr(10))[0]})"
        )
        return
    facts = {
        **facts_of(job, config),
        "trials": len(report.outcome.trials),
        "best": ", ".join(f"{k} {in_figures(v)}" for k, v in report.best.items()),
    }
    title = f"Agent parameters of {job.session.program_name}"
    report.page = write_page(report.artifact, study, config.objectives, title=title, facts=facts)


def _decide(report: TuneReport, job: Job, before: RecordedProgram, tuned: RecordedProgram) -> None:
    """Runs the gate, then the sealed test if the tuned program replaces the default.

    The tuned program replaces the default if it scores higher, or uses fewer tokens and is not inferior.
    """
    plan = plan_report(
        job.splits, job.session.meter, job.config.decisions, pair=forecast_pair(job.recorded.program, job.session)
    )
    plan.reserve(job.session.meter)
    report.stopped = report.stopped or plan.short
    after = (
        tuned
        if tuned.settings != before.settings
        or thresholds_of(tuned.program) != thresholds_of(before.program)
        or report.outcome.best.point.program != job.config.program
        else before
    )
    if after is before:
        tried = sum(state != "failed" for state in report.outcome.states)
        report.notes.append(
            "no point was better on val than the default; it stays"
            if tried > 1
            else "nothing but the default was tried; it stays"
        )
        on_val, wanted = len(job.splits.val), job.config.decisions.difference
        report.notes.append(
            f"{counted(on_val, 'val tasks')} can show a gain of {figure(detectable_difference(on_val))} or more with "
            f"{POWER:.0%} power; {tasks_needed(wanted):,} would show {wanted:g}"
        )
        return
    report.kept = before
    report.gate = _compared(report, job, before, after, job.splits.gate[: plan.gate], "gate")
    report.replaces = report.gate.gain.is_gain or cheaper(report.gate, report.config.margin)
    if not report.replaces:
        report.notes.append(what_would_decide(report.gate.before, report.gate.after, "gate"))
        return
    report.kept = None
    tasks = job.splits.unseal()[: plan.test]
    report.openings = job.openings
    report.test = _compared(report, job, before, after, tasks, "test")


def _compared(
    report: TuneReport, job: Job, before: RecordedProgram, after: RecordedProgram, tasks: Sequence[Task], split: str
) -> Comparison:
    """Compares default and tuned program. Does not stop for futility: equal quality at a lower cost is a result too."""
    rule = job.config.decisions.rule(len(tasks), futility=False)
    comparison = compare(before, after, tasks, job.session, split=split, names=_SIDES, rule=rule)
    if comparison.cap is not None:
        report.stopped = str(comparison.cap)
    elif note := comparison.end_of(split):
        report.notes.append(note)
    report.notes += losses_behind_gain(comparison, split)
    return comparison
