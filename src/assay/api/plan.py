"""Estimates of the commands that the former settings classes declare."""

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
from assay.runs.planning import Plan, Request, plan_of, planned
from assay.runs.settings import ImproveSettings
from assay.support.names import place_in


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
    config: Any = program_settings(ImproveSettings, program, rubric, data, lm, settings)
    check_improvement(config, model=settings.get("model"))
    if name is not None:
        check_name(name, config.order, place_in(home_of(store) / "improve", name))
    need = ("val", "gate", "test")
    return planned(config, program, need, lambda job, _: _improvement(job, config), rubric=rubric, lm=lm, store=store)


def _improvement(job: Job, config: ImproveSettings) -> Request:
    grpo = settings_from(PolicySettings, config.grpo or {}, "grpo")
    plan = steps_of(job, config.order, rollouts=config.rollouts, grpo=grpo, retained=len(config.retention))
    small, caps = too_small(job.splits.sizes()), replace(config.caps, search_calls=None)
    notes = [*([] if small is None else [f"warning: {small}"]), *plan.lines(caps)]
    return Request(runs=plan.runs, notes=notes, steps=plan.rows(caps))
