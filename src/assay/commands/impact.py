"""`assay tune --impact`: measures what each agent parameter does."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from assay.commands.groups import InStore, NewArtifact, Reported, Trusting
from assay.errors import ConfigError
from assay.jobs.groups import ParameterJob
from assay.support.options import function_of
from assay.support.report import OBJECT, Report, Table

if TYPE_CHECKING:
    from assay.optimizers.parameters.impact import Impact as Effects


@dataclass(frozen=True, kw_only=True, repr=False)
class ImpactReport(Report):
    """What `parameter_impact` returns; `folder` has it as `impact.json`.

    `page` shows the effects, and the charts of `study` if a study has searched the same space.

    Attributes:
        folder: folder of the table and the page
        page: HTML page; null if it could not be drawn
        study: name of the Optuna study
        importance: importance of each parameter by fANOVA and PED-ANOVA
    """

    impact: "Effects" = field(metadata=OBJECT)
    folder: Path
    page: Path | None = None
    study: str | None = None
    importance: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    calls: int
    cached: int
    repeated_calls: int
    tokens: int
    cost_usd: float | None
    model: str | None
    models: Sequence[Mapping[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        return {**self.impact.to_dict(), **super().to_dict()}

    def lines(self) -> Iterator[str | Table]:
        from assay.optimizers.parameters import in_figures
        from assay.reports.markdown import cost_words, models_text
        from assay.support.numbers import calls_text

        rows, last = list[Sequence[str]](), None
        for effect in self.impact.effects:
            name = "" if effect.parameter == last else effect.parameter
            rows.append((name, in_figures(effect.value), *map(effect.cell, self.impact.measured)))
            last = effect.parameter
        title = f"each parameter moved alone, {self.impact.n} val tasks; * off the start, 95 %"
        yield Table(title=title, header=("parameter", "value", *self.impact.measured), rows=rows)
        yield from (f"note: {note}" for note in self.notes)
        yield f"LM calls: {calls_text(self.calls, self.cached)}, {cost_words(self.cost_usd)}"
        if text := models_text(vars(self)):
            yield f"LM calls by model: {text}"
        yield f"written: {self.page or self.folder}"

    def write_page(self, path: str | Path, *, store: str | Path | None = None) -> Path:
        from assay.support.places import write_whole

        write_whole(path, b"" if self.page is None else self.page.read_bytes())
        return Path(path)


class Impact(Reported, Trusting, InStore, NewArtifact, ParameterJob):
    """Vary one agent parameter at a time over its range on val, and measure every metric.

    The other parameters keep the program's values. `out` is the folder of the table and the page; by default
    `.assay/impact/PROGRAM`. The page also shows the plots of `study`; by default of the newest study of the same
    search.

    Raises:
        AssayError: what was wrong, which rule, what to do.
    """

    kind: ClassVar[str] = "impact"

    levels: Annotated[int, Ge(2)] = 5
    """Number of values of each parameter that are measured."""

    @property
    def needed(self) -> tuple[str, ...]:
        return ("val",)

    def run(self) -> ImpactReport:
        from assay.jobs.arguments import named
        from assay.jobs.job import open_job, salt_at
        from assay.jobs.preflight import checked, see_models
        from assay.jobs.studies import facts_of, objective_of, space_of, storage_of, study_to_show
        from assay.optimizers.budget import too_few_to_score
        from assay.optimizers.parameters import Point
        from assay.optimizers.parameters.impact import impact, importance, write_page
        from assay.programs import AgentParameters
        from assay.programs.budgets import thresholds_of
        from assay.sources.modules import without_call
        from assay.support.names import place_in
        from assay.support.places import write_whole
        from assay.support.values import json_text
        from assay.traces.store.location import home_of
        from assay.traces.store.sealing import resolve_salt

        program, lm, config = named(self)
        progress = self.reporter
        # tasks keep the splits that they had for the artifact, or val would contain what it was compiled on
        config = replace(config, salt=resolve_salt(config.salt, self.store, artifact=salt_at(program)))
        with open_job(
            config, program=program, rubric=self.rubric, lm=lm, progress=progress, store=self.store,
            resume=self.resume, need=self.needed,
        ) as job:  # fmt: skip
            notes = []
            if (warning := too_few_to_score(job.splits.sizes(), "val")) is not None:
                progress.say(f"warning: {warning}")
                notes.append(warning)
            space = space_of(job, config, progress)
            name = space.programs[0]
            parameters = job.recorded.settings["parameters"]
            defaults = {**AgentParameters().model_dump(), **parameters, **thresholds_of(job.recorded.program)}
            study = study_to_show(job, config, space, storage_of(config, self.store))
            class_name = without_call(job.session.program_name).rpartition(":")[2].lower()
            folder = _create_folder(
                Path(self.out) if self.out else place_in(home_of(self.store) / "impact", class_name)
            )
            measured = checked(job, job.splits.val)
            notes += [*(measured.warnings if measured else ()), *see_models(job)]
            start = Point(name, {parameter: defaults[parameter] for parameter in space.searched(name)})
            with job.session.phase("impact"):
                effects = impact(
                    objective_of(job, config, space), job.splits.val, space, start, levels=config.levels,
                    budget=config.run_budget, progress=progress,
                )  # fmt: skip
            usage, called, facts = job.session.meter.usage, job.models(), facts_of(job, config)
        if study is not None:
            facts["study"] = f"{study.study_name}, {len(study.get_trials(deepcopy=False))} trials"
        objectives = config.objectives if study is None else study.user_attrs["assay"]["objectives"]
        title = f"What the agent parameters of {config.program} do"
        report = ImpactReport(
            impact=effects, folder=folder, study=None if study is None else study.study_name,
            importance={} if study is None else importance(study), notes=[*notes, *_notes(effects, study)],
            page=write_page(folder, study, objectives, title=title, facts=facts, impact=effects),
            calls=usage.calls, cached=usage.cached, repeated_calls=usage.repeated, tokens=usage.tokens,
            cost_usd=usage.known_cost_usd, **called,
        )  # fmt: skip
        write_whole(folder / "impact.json", json_text(report.to_dict(), indent=1))
        return report


def _notes(effects: "Effects", study: Any) -> list[str]:
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
        raise ConfigError(f"cannot write to {folder}: {error}. Choose another folder", field="out") from error
    return folder


parameter_impact = function_of(Impact, "parameter_impact")
