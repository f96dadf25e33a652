"""Estimates of the commands that the former settings classes declare."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from assay.api.improve.run import check_improvement, check_name, steps_of
from assay.commands import COMMANDS, command_class
from assay.optimizers.budget import too_small
from assay.optimizers.finetuning.settings import PolicySettings, settings_from
from assay.programs.loading import full_name
from assay.runs.arguments import program_settings, resolve_model
from assay.runs.jobs import Job
from assay.runs.opening import home_of
from assay.runs.planning import ALL_STAGES, Plan, Request, plan_of, planned, with_report
from assay.runs.settings import ImproveSettings, ProgramSettings, TuneSettings
from assay.support.names import place_in

_SETTINGS: dict[str, type[ProgramSettings]] = {
    "tune": TuneSettings,
    "improve": ImproveSettings,
}


def plan(kind: str, program: Any, *, store: Any = None, name: str | None = None, **options: Any) -> Plan:
    """Estimates `compile`, `tune`, `collect`, `evaluate` or `improve`. Checks the settings as the command does.

    Args:
        name: name of the improvement, refused if it is taken; None to resume an existing one.
    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    if kind in COMMANDS:
        return plan_of(command_class(kind)(program, store=store, **options))
    rubric, data, lm = options.pop("rubric"), options.pop("data", None), options.pop("lm", None)
    program = full_name(program) if isinstance(program, str) else program
    lm, settings = resolve_model(program, lm, options)
    config: Any = program_settings(_SETTINGS[kind], program, rubric, data, lm, settings)
    request: Callable[[Job, float], Request] = lambda job, each: _tuning(job, config)  # noqa: E731
    if isinstance(config, ImproveSettings):
        check_improvement(config, model=settings.get("model"))
        if name is not None:
            check_name(name, config.order, place_in(home_of(store) / "improve", name))
        request = lambda job, each: _improvement(job, config)  # noqa: E731
    return planned(config, program, ("val", "gate", "test"), request, rubric=rubric, lm=lm, store=store)


def _improvement(job: Job, config: ImproveSettings) -> Request:
    grpo = settings_from(PolicySettings, config.grpo or {}, "grpo")
    plan = steps_of(job, config.order, rollouts=config.rollouts, grpo=grpo, retained=len(config.retention))
    small, caps = too_small(job.splits.sizes()), replace(config.caps, search_calls=None)
    notes = [*([] if small is None else [f"warning: {small}"]), *plan.lines(caps)]
    return Request(runs=plan.runs, notes=notes, steps=plan.rows(caps))


def _tuning(job: Job, config: TuneSettings) -> Request:
    sizes, notes = job.splits.sizes(), list[str]()
    search = float(config.trials * config.samples * sizes["val"])
    if (curriculum := job.splits.curriculum) is not None:
        largest = max(len(job.splits.of_stage(stage.name, "val")) for stage in curriculum.stages)
        # a trial runs the val tasks of one stage; at the end the default and the best point of each stage run all
        search = float(config.samples * (config.trials * largest + (1 + len(curriculum.stages)) * sizes["val"]))
        notes.append(ALL_STAGES)
    return with_report(job, search, *notes)
