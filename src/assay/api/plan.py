"""Estimates of a job without running it: calls, tokens, dollars and minutes. Calls no model and stores nothing."""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import dspy
import sqlalchemy as sa

from assay.api.improve.run import check_improvement, check_name, steps_of
from assay.commands.collect import Collect
from assay.commands.evaluate import Evaluate
from assay.datasets.rows import near_notes
from assay.errors import ConfigError
from assay.evaluation import SilentProgress
from assay.optimizers.budget import (
    cost_text,
    estimated,
    forecast_pair,
    minutes_text,
    plan_report,
    run_calls,
    search_cap,
    search_runs,
    too_few_to_score,
    too_small,
)
from assay.optimizers.finetuning.settings import PolicySettings, settings_from
from assay.optimizers.prompts.config import CompileConfig
from assay.programs.loading import full_name
from assay.rubrics.loading import RubricSource
from assay.runs.arguments import named, program_settings, resolve_model
from assay.runs.curricula import schedule_of
from assay.runs.groups import AnyJob, OneSplit, Sampled
from assay.runs.jobs import Job, open_job, salt_at
from assay.runs.opening import home_of
from assay.runs.settings import (
    CompileSettings,
    ImproveSettings,
    ProgramSettings,
    TuneSettings,
)
from assay.runs.settings.options import PlanOptions
from assay.runs.settings.shared import PromptSettings
from assay.support.names import place_in
from assay.support.numbers import counted
from assay.support.report import Report
from assay.support.settings import one_of, settings_of
from assay.traces import Store, store_url
from assay.traces.store import tables as schema
from assay.traces.store.sealing import known_splits, resolve_salt

_ALL_STAGES = "the estimate is of a run that reaches every stage of the curriculum"
_LATEST = 1000  # rollouts whose calls give the mean latency


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Report):
    """An estimate.

    `cost_usd`: None if a price is unknown. `minutes`: None if the store has no call of the model yet.
    """

    kind: str
    sizes: Mapping[str, int]
    calls: int
    tokens: int
    cost_usd: float | None
    minutes: float | None
    data: Mapping[str, Any]  # see `assay.datasets.rows.RowFindings`
    cautions: Sequence[str] = ()  # `warnings` of the JSON object
    # of an improvement: `step`, requested `calls`, `share` of the caps (None: does not fit)
    steps: Sequence[Mapping[str, Any]] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "sizes": self.sizes, "calls": self.calls, "tokens": self.tokens,
            "cost_usd": self.cost_usd, "minutes": self.minutes, "data": self.data, "warnings": list(self.cautions),
            "steps": list(self.steps),
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        minutes = (
            "minutes unknown: the store has no call of this model yet"
            if self.minutes is None
            else minutes_text(self.minutes)
        )
        splits = ", ".join(f"{name} {count}" for name, count in self.sizes.items())
        yield f"tasks: {splits}"
        yield (
            f"estimate: {counted(self.calls, 'calls')}, about {counted(self.tokens, 'tokens')}, "
            f"{cost_text(self.cost_usd)}, {minutes}"
        )
        yield from self.cautions
        yield from (f"note: {note}" for note in near_notes(self.data))


_COMMANDS = {"evaluate": Evaluate, "collect": Collect}
_SETTINGS: dict[str, type[ProgramSettings]] = {
    "compile": CompileSettings,
    "tune": TuneSettings,
    "improve": ImproveSettings,
}


def plan(
    kind: str,
    program: str | dspy.Module,
    *,
    rubric: RubricSource,
    data: str | None = None,
    lm: dspy.LM | None = None,
    store: str | Path | None = None,
    name: str | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Estimates `compile`, `tune`, `collect`, `evaluate` or `improve`. Checks the settings as the command does.

    Args:
        kind: the command's name.
        data: None if the stages of a curriculum name their data.
        name: name of the improvement, refused if it is taken; None to resume an existing one.
        options: the settings of the command. The estimate does not include the judges of a monitor rubric.
    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    if kind in _COMMANDS:
        values: dict[str, Any] = {"rubric": rubric, "data": data, "lm": lm, "store": store, **options}
        return plan_command(_COMMANDS[kind](program, **values))
    if kind not in _SETTINGS:
        raise ConfigError(f"kind={kind!r} {one_of(kind, (*_COMMANDS, *_SETTINGS))}")
    program = full_name(program) if isinstance(program, str) else program
    lm, settings = resolve_model(program, lm, options)
    if unknown := sorted(settings.keys() - settings_of(_SETTINGS[kind]).keys()):
        raise ConfigError(f"{kind} has no setting {', '.join(unknown)}")
    config = program_settings(_SETTINGS[kind], program, rubric, data, lm, settings)
    if isinstance(config, PromptSettings):
        CompileConfig(optimizer=config.optimizer, demos=config.demos, settings=config.optimizer_settings or {})
    if isinstance(config, ImproveSettings):
        check_improvement(config, model=settings.get("model"))
        if name is not None:
            check_name(name, config.order, place_in(home_of(store) / "improve", name))
    return plan_of(config, program, rubric=rubric, lm=lm, store=store)


def plan_command(command: Any) -> Plan:
    """Estimates the job of a command."""
    program, lm, config = named(command)
    return plan_of(config, program, rubric=command.rubric, lm=lm, store=command.store)


def plan_of(
    config: AnyJob, program: Any, *, rubric: RubricSource, lm: dspy.LM | None, store: str | Path | None
) -> Plan:
    """Estimates a job with these settings.

    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    config = replace(config, salt=resolve_salt(config.salt, store, artifact=salt_at(program)))
    need: tuple[str, ...] = ("val", "gate", "test")
    if isinstance(config, OneSplit):
        need = config.needed
    with (
        tempfile.TemporaryDirectory() as folder,
        open_job(
            config,
            program=program,
            rubric=rubric,
            lm=lm,
            progress=SilentProgress(),
            store=Path(folder) / "plan.db",
            need=need,
            known=known_splits(store),
        ) as job,
    ):
        each, sizes = sum(run_calls(job.recorded.program, job.session)), job.splits.sizes()
        warnings, steps = [f"warning: {warning}" for warning in job.warnings], list[dict[str, Any]]()
        small = too_few_to_score(sizes, config.split) if isinstance(config, OneSplit) else too_small(sizes)
        if small is not None and not isinstance(config, Collect):
            warnings.append(f"warning: {small}")
        if isinstance(config, ImproveSettings):
            grpo = settings_from(PolicySettings, config.grpo or {}, "grpo")
            improvement = steps_of(
                job, config.order, rollouts=config.rollouts, grpo=grpo, retained=len(config.retention)
            )
            caps, runs = replace(config.caps, search_calls=None), improvement.runs
            steps = improvement.rows(caps)
            warnings += improvement.lines(caps)
        else:
            runs, notes = _runs(job, config, each)
            warnings += notes
        calls = int(min(int(runs * each), config.max_calls if config.max_calls is not None else math.inf))
        latency = _latency_s(store, job.session.lm.model)
        guess = estimated(
            calls, job.recorded.program, job.splits, job.session, demos=job.config.shown_demos, latency_s=latency
        )
        return Plan(
            kind=config.kind, sizes=sizes, data=job.rows.to_dict(), cautions=warnings, steps=steps, **asdict(guess)
        )


def _runs(job: Job, config: AnyJob, each: float) -> tuple[float, list[str]]:
    """Runs of the program in the job, and lines for the user."""
    sizes = job.splits.sizes()
    if isinstance(config, Collect):
        if job.splits.curriculum is not None:
            return _staged_collection(job, config), [_ALL_STAGES]
        return config.n * sizes[config.split], []
    if isinstance(config, Sampled):
        return config.samples * sum(sizes[name] for name in config.splits), []
    pair = forecast_pair(job.recorded.program, job.session)
    report = plan_report(job.splits, job.session.meter, config.decisions, pair=pair, searching=True)
    notes, search = [report.detectable_gain], 0.0
    if isinstance(config, TuneSettings):
        search = float(config.trials * config.samples * sizes["val"])
        if (curriculum := job.splits.curriculum) is not None:
            largest = max(len(job.splits.of_stage(stage.name, "val")) for stage in curriculum.stages)
            # a trial runs the val tasks of one stage; at the end the default and the best point of each stage run all
            search = float(config.samples * (config.trials * largest + (1 + len(curriculum.stages)) * sizes["val"]))
            notes.insert(0, _ALL_STAGES)
    if isinstance(config, PromptSettings):
        search = search_runs(search_cap(config.max_search_calls, config.optimizer), each, sizes["val"])
    return search + report.runs, notes


def _staged_collection(job: Job, config: Collect) -> float:
    """Runs of a collection that passes every stage."""
    schedule = schedule_of(job, seed=config.seed, steps=None, progress=SilentProgress())
    runs, step = 0, 0
    while schedule is not None and not schedule.complete:
        runs += config.n * len(schedule.whole_stage(step)) + len(schedule.val_tasks())
        step += 1
        schedule.scored(1.0, step)
    return runs


def _latency_s(store: str | Path | None, model: str) -> float | None:
    """Mean seconds per call of a model in the latest rollouts of the store; None if there are none."""
    url = store_url(store)
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).is_file():
        return None
    r, t = schema.rollouts, schema.transitions
    # ordered as the index is, so that a large store is not sorted
    latest = sa.select(r.c.id).order_by(r.c.started_at.desc(), r.c.id.desc()).limit(_LATEST).scalar_subquery()
    mean = sa.select(sa.func.avg(t.c.latency_ms)).where(
        t.c.rollout_id.in_(latest), t.c.model == model, t.c.error.is_(None), t.c.latency_ms > 0
    )
    with Store(store) as opened, opened.engine.connect() as connection:
        mean_ms = connection.execute(mean).scalar()
    return None if mean_ms is None else float(mean_ms) / 1000
