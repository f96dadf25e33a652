"""Public API for `assay tune --impact`: measures what each agent parameter does."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import dspy

from assay.api.tune.study import facts_of, objective_of, space_of, storage_of, study_to_show
from assay.errors import ConfigError
from assay.evaluation import Progress, default_progress
from assay.evaluation.metrics import Budget
from assay.models import Meter
from assay.optimizers.budget import too_few_to_score
from assay.optimizers.parameters import Point
from assay.optimizers.parameters.impact import Impact, impact, importance, write_page
from assay.programs import AgentParameters
from assay.programs.budgets import thresholds_of
from assay.rubrics.loading import RubricSource
from assay.runs.arguments import program_settings, resolve_model, resolve_program
from assay.runs.jobs import open_job, salt_at
from assay.runs.opening import home_of
from assay.runs.preflight import checked, see_models
from assay.runs.settings import ImpactSettings
from assay.runs.settings.options import ImpactOptions
from assay.sources.modules import without_call
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.names import place_in
from assay.support.places import write_whole
from assay.support.reprs import ReportRepr
from assay.traces.store.sealing import resolve_salt

if TYPE_CHECKING:
    import optuna


@dataclass(repr=False)
class ImpactReport(ReportRepr):
    """What `parameter_impact` returns. `to_dict()` is the `--json` object; `folder` has it as `impact.json`.

    `page` shows the effects, and the charts of `study` if a study has searched the same space.
    """

    impact: Impact
    folder: Path
    meter: Meter
    page: Path | None = None
    study: str | None = None
    importance: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    called: Mapping[str, Any] = field(default_factory=dict)  # see `Job.models`

    def to_dict(self) -> dict[str, Any]:
        usage = self.meter.usage
        return {
            **self.impact.to_dict(), "folder": str(self.folder),
            "page": str(self.page) if self.page else None, "study": self.study, "importance": self.importance,
            "notes": self.notes,
            "calls": usage.calls, "cached": usage.cached, "repeated_calls": usage.repeated, "tokens": usage.tokens,
            "cost_usd": usage.known_cost_usd,
            "model": self.called.get("model"), "models": self.called.get("models", []),
        }  # fmt: skip


@takes(ImpactSettings)
@trusts
def parameter_impact(
    program: Any,
    *,
    rubric: RubricSource,
    data: Any,
    lm: dspy.LM | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Unpack[ImpactOptions],
) -> ImpactReport:
    """Varies one agent parameter at a time over its range on val, and measures every metric.

    The other parameters keep the program's values.

    Args:
        out: folder of the table and the page; by default `.assay/impact/PROGRAM`.
        options: the fields of `assay.runs.settings.ImpactSettings`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    program = resolve_program(program)
    lm, settings = resolve_model(program, lm, options)
    config = program_settings(ImpactSettings, program, rubric, data, lm, settings)
    progress = default_progress(progress)
    # tasks keep the splits that they had for the artifact, or val would contain what it was compiled on
    config = replace(config, salt=resolve_salt(config.salt, store, artifact=salt_at(program)))
    with open_job(
        config, program=program, rubric=rubric, lm=lm, progress=progress, store=store, resume=resume, need=("val",)
    ) as job:
        if (warning := too_few_to_score(job.splits.sizes(), "val")) is not None:
            progress.say(f"warning: {warning}")
        measured = checked(job, job.splits.val, split="val")
        idle = see_models(job)
        space = space_of(job, config, progress)
        name = space.programs[0]
        job.session.register(job.splits.val, "val")
        settings = job.recorded.settings["parameters"]
        defaults = {**AgentParameters().model_dump(), **settings, **thresholds_of(job.recorded.program)}
        study = study_to_show(job, config, space, storage_of(config, store))
        class_name = without_call(job.session.program_name).rpartition(":")[2].lower()
        folder = _create_folder(Path(out) if out else place_in(home_of(store) / "impact", class_name))
        start = Point(name, {parameter: defaults[parameter] for parameter in space.searched(name)})
        with job.session.phase("impact"):
            effects = impact(
                objective_of(job, config, space),
                job.splits.val,
                space,
                start,
                levels=config.levels,
                budget=Budget(**config.budget),
                progress=progress,
            )
        report = ImpactReport(effects, folder, job.session.meter, called=job.models())
        facts = facts_of(job, config)
    _draw(report, config, study, facts)
    report.notes += [*([warning] if warning is not None else []), *(measured.warnings if measured else ()), *idle]
    report.notes += _notes(effects, study)
    write_whole(folder / "impact.json", json.dumps(report.to_dict(), indent=1))
    return report


def _notes(effects: Any, study: Any) -> list[str]:
    notes = [f"could not be run: {reason}" for reason in effects.failed]
    notes += [f"{parameter} had no effect on any run" for parameter in effects.without_effect]
    if study is None:
        notes.append(
            "importance, slices and contours need a study of the same: run `assay tune` with these ranges and tasks "
            "first"
        )
    return notes


def _create_folder(folder: Path) -> Path:
    """Creates the folder of the report, before anything is run."""
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a symbolic link, and nothing is written through it: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}. Choose another folder with out=…") from error
    return folder


def _draw(report: ImpactReport, config: ImpactSettings, study: "optuna.Study | None", facts: dict[str, Any]) -> None:
    """Writes the page."""
    if study is not None:
        report.study, report.importance = study.study_name, importance(study)
        facts["study"] = f"{study.study_name}, {len(study.get_trials(deepcopy=False))} trials"
    objectives = config.objectives if study is None else study.user_attrs["assay"]["objectives"]
    title = f"What the agent parameters of {config.program} do"
    report.page = write_page(report.folder, study, objectives, title=title, facts=facts, impact=report.impact)
