"""The users' line that shows what each parameter does: `assay.parameter_impact`, `assay tune --impact`."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy

from assay.deployment.trust import trusts
from assay.errors import ConfigError, MissingExtra
from assay.given import given_model, given_program, takes
from assay.jobs import home_of, open_job, salt_at
from assay.models import Meter
from assay.optimizers import Progress
from assay.optimizers.metrics import Budget
from assay.optimizers.parameters import Point
from assay.optimizers.parameters.impact import Impact, draw_impact, impact
from assay.optimizers.parameters.page import importance, write_page
from assay.optimizers.reserve import too_few_to_score
from assay.preflight import checked
from assay.programs import AgentParameters
from assay.reprs import Shown
from assay.rubrics import Rubric
from assay.traces.sealing import resolve_salt
from assay.tuning.config import TuneConfig
from assay.tuning.study import arena_of, facts_of, space_of, storage_of, study_to_show

__all__ = ["ImpactReport", "parameter_impact"]


@dataclass(repr=False)
class ImpactReport(Shown):
    """What `parameter_impact` returns. `to_dict()` is the `--json` object; it lies in `folder` as `impact.json`.

    `page` holds the effects, and the pictures of the study `study` where one has searched the same.
    """

    found: Impact
    folder: Path
    meter: Meter
    picture: Path | None = None
    page: Path | None = None
    study: str | None = None
    importance: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        usage = self.meter.usage
        return {
            **self.found.to_dict(), "folder": str(self.folder), "picture": str(self.picture) if self.picture else None,
            "page": str(self.page) if self.page else None, "study": self.study, "importance": self.importance, "notes": self.notes,
            "calls": usage.calls, "cached": usage.cached, "repeated_calls": usage.repeated, "tokens": usage.tokens, "cost_usd": usage.known_cost_usd,
        }  # fmt: skip


@trusts
@takes(TuneConfig)
def parameter_impact(
    program: Any,
    *,
    rubric: str | Path | Rubric,
    data: Any,
    lm: dspy.LM | None = None,
    out: str | Path | None = None,
    levels: int = 5,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> ImpactReport:
    """Moves each agent parameter alone over its range on val, the others as the program has them, and measures every metric.

    Args:
        out: folder of the table, the page and the pictures; by default `.assay/impact/PROGRAM`.
        levels: values of each parameter, spread over its range.
        options: the fields of `TuneConfig`. `study` names one whose pictures go on the page as well; by default it is the newest
            that searched the same.
    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    program = given_program(program)
    lm, options = given_model(program, lm, options)
    config = TuneConfig.of(program, rubric, data, lm, **{"kind": "impact", **options})
    assert isinstance(config, TuneConfig)
    if config.also:
        raise ConfigError("the impact is shown of one program; give the artifact itself as the program")
    shown = progress or Progress()
    config = replace(config, salt=resolve_salt(config.salt, store, artifact=salt_at(program)))
    with open_job(config, program=program, rubric=rubric, lm=lm, progress=shown, store=store, resume=resume, need=("val",)) as job:
        few = too_few_to_score(job.splits.sizes(), "val")
        if few is not None:
            shown.say(f"warning: {few}")
        space = space_of(job, config, shown)
        name = space.programs[0]
        job.session.know(job.splits.val, "val")
        defaults = {**AgentParameters().model_dump(), **job.student.settings["parameters"]}
        study = study_to_show(job, config, space, storage_of(config, store))
        folder = Path(out) if out else home_of(store) / "impact" / job.session.program_name.rpartition(":")[2].lower()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error}. Choose another folder with --out") from error
        measured = checked(job, job.splits.val, split="val")
        start = Point(name, {parameter: defaults[parameter] for parameter in space.searched(name)})
        with job.session.phase("impact"):
            found = impact(arena_of(job, config, space), job.splits.val, space, start, levels=levels, budget=Budget(**config.budget), progress=shown)
        report = ImpactReport(found, folder, job.session.meter)
        facts = facts_of(job, config)
    if study is not None:
        report.study, report.importance = study.study_name, importance(study)
        facts["study"] = f"{study.study_name}, {len(study.get_trials(deepcopy=False))} trials"
    try:
        report.picture = draw_impact(found, folder / "impact.png")
        objectives = config.objectives if study is None else study.user_attrs["assay"]["objectives"]
        report.page, _ = write_page(folder, study, objectives, title=f"What the agent parameters of {config.program} do", facts=facts, impact=found)
    except MissingExtra as error:
        report.notes.append(f"no picture: {error}")
    report.notes += [*([few] if few is not None else []), *(measured.warnings if measured else ())]
    report.notes += [f"could not be run: {why}" for why in found.failed]
    report.notes += [f"{parameter} had no effect on any run" for parameter in found.without_effect]
    if study is None:
        report.notes.append("importance, slices and contours need a study of the same: run `assay tune` with these ranges and tasks first")
    (folder / "impact.json").write_text(json.dumps(report.to_dict(), indent=1))
    return report
