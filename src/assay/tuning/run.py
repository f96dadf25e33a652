"""The users' line for agent parameters: `assay.tune`. Joins job, space, study, gate, sealed test and artifact."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dspy

from assay.anchors import replay_of_rubric
from assay.datasets import Task
from assay.deployment.artifact import check_place, is_artifact
from assay.deployment.trust import trusts
from assay.errors import BudgetExceeded, ConfigError, MissingExtra
from assay.given import given_model, given_program, takes
from assay.jobs import Job, home_of, open_job, salt_at
from assay.keeping import keep_artifact, rehearsed
from assay.models.meter import Usage
from assay.optimizers import Progress, Student
from assay.optimizers.comparison import Comparison, compare, ended_early
from assay.optimizers.estimate import price_of
from assay.optimizers.metrics import Budget
from assay.optimizers.parameters import Point, ProgramArena, SearchOutcome, Space, TrialResult, in_figures, outcome_of, search, train_policy
from assay.optimizers.parameters.page import importance, write_page
from assay.optimizers.parameters.search import put_back_all
from assay.optimizers.reserve import announce_splits, forecast_pair, plan_report
from assay.optimizers.sequential import SequentialTest
from assay.preflight import checked
from assay.rubrics import Rubric
from assay.traces import shown_url
from assay.traces.sealing import resolve_salt
from assay.tuning.config import TuneConfig
from assay.tuning.report import TuneReport, as_page, cheaper
from assay.tuning.study import arena_of, default_of, default_student, facts_of, space_of, storage_of, student_at, study_of
from assay.tuning.workers import helped

__all__ = ["tune"]

_SIDES = ("default", "tuned")


@trusts
@takes(TuneConfig)
def tune(
    program: Any,
    *,
    rubric: str | Path | Rubric,
    data: Any,
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
    program = given_program(program)
    lm, options = given_model(program, lm, options)
    config = TuneConfig.of(program, rubric, data, lm, **options)
    assert isinstance(config, TuneConfig)
    if config.workers > 1 and not (lm is None and isinstance(program, str) and isinstance(rubric, str | Path)):
        raise ConfigError("workers are processes of their own: give program, rubric and model by their names")
    shown = progress or Progress()
    config = replace(config, salt=resolve_salt(config.salt, store, artifact=salt_at(program)))
    if out is not None:
        check_place(Path(out).resolve())
    if apply is not None and not is_artifact(apply):
        why = "it has no manifest.json" if Path(apply).is_dir() else "there is no such folder"
        raise ConfigError(f"apply={str(apply)!r} is no artifact to write parameters into: {why}")
    with open_job(config.of_one_worker(), program=program, rubric=rubric, lm=lm, progress=shown, store=store, resume=resume, need=config.need) as job:
        job.status = "stopped"  # until all of it is done
        finished = job.finished(apply=apply)
        if job.session.recorder.resumed and (kept := finished.report(shown, out=out)) is not None:
            job.end_as_before(kept)
            return _as_kept(config, job, kept)
        if apply is not None:
            student_at(job, Point(str(apply), {}), config)  # refused now, and not after the search
        warnings = announce_splits(job.splits, shown)
        measured = checked(job, job.splits.val, split="val")
        warnings += [*(measured.warnings if measured else ()), *rehearsed(job)]
        price = price_of(job.session.lm, 300, 40) or 0.0
        pair = forecast_pair(job.student.program, job.session, cost_per_call=price)
        plan = plan_report(job.splits, job.session.meter, config.decisions, pair=pair, searching=True)
        shown.say(plan.shows)
        plan.hold(job.session.meter)
        _check_caps(job, config, pair)
        report = _tuned(job, config, shown, store, resume)
        report.notes += warnings
        if report.stopped is None:
            job.status = "done"
        chosen = student_at(job, report.outcome.best.point, config)
        if apply is not None:
            chosen = student_at(job, Point(str(apply), chosen.settings["parameters"]), config)
            report.notes.append(f"the parameters were written into a copy of {apply}, which was not evaluated with them")
        name = f"{job.session.program_name.rpartition(':')[2].lower()}-tuned"
        result = {key: value for key, value in report.to_dict().items() if key not in ("artifact", "page", "pictures", "importance")}
        folder = Path(out) if out else home_of(store) / "artifacts" / name
        report.artifact = keep_artifact(job, chosen, folder, result, as_page(result))
        if config.method == "optuna":
            _drawn(report, job, config, storage_of(config, store))
        finished.keep(report.to_dict())
    return report


def _check_caps(job: Job, config: TuneConfig, pair: Usage) -> None:
    """Refuses caps on calls under which not even the default and one other point are tried on all val tasks."""
    left, val = job.session.meter.search_calls_left(), len(job.splits.val)
    needed = pair.calls * val * config.samples  # of two trials
    if config.method != "optuna" or left >= needed or job.session.recorder.resumed:
        return
    caps = ", ".join(f"{name}={cap}" for name in ("max_calls", "max_search_calls") if (cap := getattr(config, name)) is not None)
    raise ConfigError(
        f"{caps}: this leaves {left:.0f} calls for the search, and two trials of "
        f"{val} val tasks take about {needed}. Raise max_calls to {2 * needed} or more, or set sizes={{'val': N}} to fewer tasks"
    )


def _as_kept(config: TuneConfig, job: Job, kept: Mapping[str, Any]) -> TuneReport:
    """The report of a run that had ended. Its outcome has the best trial alone, without scores of single tasks."""
    best = TrialResult(0, Point(kept["program"], dict(kept["best"])), "complete", {"score": None}, {}, {}, None)
    outcome = SearchOutcome(best, None, [], kept["task_runs"], kept["task_runs_saved"], [])
    page = Path(kept["page"]) if kept["page"] else None
    return TuneReport(
        Path(kept["artifact"]), config, outcome, dict(kept["best"]), job.session.meter, replaces=kept["replaces"], stopped=kept["stopped"], page=page,
        pictures=[Path(path) for path in kept["pictures"]], importance=kept["importance"], notes=kept["notes"], kept=kept,
    )  # fmt: skip


def _tuned(job: Job, config: TuneConfig, shown: Progress, store: str | Path | None, resume: bool) -> TuneReport:
    space = space_of(job, config, shown)
    arena = arena_of(job, config, space)
    for split in ("train", "val"):
        job.session.know(getattr(job.splits, split), split)
    default = default_of(job, space)
    alarms = replay_of_rubric(job.session.rubric, job.session)
    with job.session.phase("search"):
        if config.method == "policy":
            outcome, stopped = _by_policy(job, arena, space, default, config, shown)
        else:
            outcome, stopped = _by_optuna(job, arena, space, default, config, shown, store, resume)
    tuned = arena.student(outcome.best.point)
    before, unset = default_student(job, arena, default)
    notes = [*alarms, *unset]
    report = TuneReport(Path(), config, outcome, dict(tuned.settings["parameters"]), job.session.meter, stopped=stopped, notes=notes)
    try:
        _decide(report, job, before, tuned)
    except BudgetExceeded as cap:
        report.stopped = str(cap)
    return report


def _by_optuna(
    job: Job, arena: ProgramArena, space: Space, default: Point, config: TuneConfig, shown: Progress, store: str | Path | None, resume: bool
) -> tuple[SearchOutcome, str | None]:
    url, val = storage_of(config, store), job.splits.val
    study, alone = study_of(job, config, space, url), config.study is None and config.workers == 1
    shown.say(f"study {study.study_name} in {shown_url(url)}: {config.trials} trials of {len(val)} val tasks; the test split is sealed")
    if moved := [name for name, value in space.asked(default).items() if name != "program" and value != default.parameters.get(name)]:
        shown.say(f"the default's {', '.join(f'{name} {default.parameters[name]}' for name in moved)} is out of range: tried at the edge")
    stopped = None
    if config.study is None and not alone:
        put_back_all(study)  # the run's own: whoever was at work on it is gone
    try:
        with helped(config, study.study_name, url, store, shown, meter=job.session.meter, resume=resume):
            search(arena, val, space, config.search, study, defaults=[default], progress=shown, alone=alone)
    except BudgetExceeded as cap:
        if not any(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False)):
            raise
        stopped = str(cap)
        shown.say(f"end of the search: {cap}; the best so far goes on")
    return outcome_of(study, space, config.search, len(val)), stopped


def _by_policy(job: Job, arena: ProgramArena, space: Space, default: Point, config: TuneConfig, shown: Progress) -> tuple[SearchOutcome, str | None]:
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
    each = min(config.tasks_per_episode or len(train), len(train))
    runs = config.samples * (len(found.history) * each + len(found.confirmed) * len(val))
    told = [*found.notes, *(f"{e.number}: {e.meaning}" for e in found.history if e.kept and e.improvement > 0)]
    walked = {"episodes": [episode.to_dict() for episode in found.history], "confirmed": found.confirmed}
    return SearchOutcome(best, trials[0], trials, runs, 0.0, [], notes=told, walked=walked), found.stopped


def _drawn(report: TuneReport, job: Job, config: TuneConfig, url: str) -> None:
    """Writes the study's page into the artifact's folder."""
    import optuna
    import sqlalchemy as sa

    try:
        study = optuna.load_study(study_name=config.study or job.run_id, storage=url)
        report.importance = importance(study)
    except (KeyError, sa.exc.SQLAlchemyError, optuna.exceptions.OptunaError) as error:  # what was found and decided stands without pictures
        report.notes.append(f"no page: the study at {shown_url(url)} is gone ({str(error).partition(chr(10))[0]})")
        return
    facts = {**facts_of(job, config), "trials": len(report.outcome.trials), "best": ", ".join(f"{k} {in_figures(v)}" for k, v in report.best.items())}
    try:
        title = f"Agent parameters of {job.session.program_name}"
        report.page, report.pictures = write_page(report.artifact, study, config.objectives, title=title, facts=facts)
    except MissingExtra as error:
        report.notes.append(f"no page: {error}")


def _decide(report: TuneReport, job: Job, before: Student, tuned: Student) -> None:
    """Gate, then the sealed test: the tuned program replaces the default where it scores higher, or needs fewer tokens and is not inferior."""
    plan = plan_report(job.splits, job.session.meter, job.config.decisions, pair=forecast_pair(job.student.program, job.session))
    plan.hold(job.session.meter)
    report.stopped = report.stopped or plan.short
    after = tuned if tuned.settings != before.settings or report.outcome.best.point.program != job.config.program else before
    if after is before:
        tried = sum(trial.state != "failed" for trial in report.outcome.trials)
        report.notes.append(
            "no point was better on val than the default; it stays" if tried > 1 else "nothing was tried beside the default; it stays"
        )
    else:
        report.gate = _compared(report, job, before, after, job.splits.gate[: plan.gate], "gate")
        report.replaces = report.gate.gain.is_gain or cheaper(report.gate, report.config.margin)
    tasks = job.splits.unseal()[: plan.test]
    report.openings = job.openings
    report.test = _compared(report, job, before, after, tasks, "test")


def _compared(report: TuneReport, job: Job, before: Student, after: Student, tasks: Sequence[Task], split: str) -> Comparison:
    """The default beside the tuned program. It does not end as futile: equal and cheaper is a result too."""
    if not tasks:
        raise BudgetExceeded(f"the caps leave nothing for {split}")
    decisions = job.config.decisions
    rule = SequentialTest(tasks=len(tasks), difference=decisions.difference, futility=False) if decisions.early_stop else None
    found = compare(before, after, tasks, job.session, split=split, names=_SIDES, rule=rule)
    if said := ended_early(found, split):
        report.notes.append(said)
    if found.cap is not None:
        report.stopped = str(found.cap)
    return found
