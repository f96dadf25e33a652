"""`assay migrate`: an artifact to another model or another version of DSPy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from assay.commands.groups import InStore, JobOutput, NewArtifact, Planned, Reported, Trusting
from assay.errors import ConfigError, ModelError
from assay.jobs.groups import DecidedJob, ReflectionModel, Source
from assay.jobs.job_report import JobReport
from assay.sources.artifact_files import RUBRIC, is_artifact, read_manifest
from assay.support.options import Flag, function_of
from assay.support.report import OBJECT, Table

if TYPE_CHECKING:
    from assay.jobs.job import Job
    from assay.jobs.migration import Migration
    from assay.jobs.planning import Request

_RUNS_OF_CURES = 12  # candidates that val runs for all cures, about


# -- Report


@dataclass(frozen=True, kw_only=True, repr=False)
class MigrateReport(JobReport):
    """What `migrate` returns.

    Attributes:
        run_id: its run
        verdict: `no worse`: the new side is shown to lose at most `margin`. `worse`: it is shown to lose, and not
            shown to lose at most `margin`. `too few tasks`: neither is shown
        margin: largest loss in score that counts as no worse
        tasks_needed: tasks that would decide, if mean and spread stay as they are; null where it is decided or unknown
        split: split of `old`, `new` and `gain`: `gate`, or `test` once a cure was kept
        old: the artifact as it was, an [Evaluation](#evaluation) with `model`, `dspy`, `prompt_format`, `recorded`
            (whether these are recorded rollouts, not runs of now), and the LM calls whose answers could not be parsed
            (`parse_failures`) or were cut at their limit of tokens (`truncated`)
        new: the new artifact in the same form
        gain: score of `new` minus score of `old`, see [Gain](#gain)
        criteria: this gain for each criterion
        task_types: this gain for each type of task
        gate: the gain on gate before any cure
        cures: what was tried, in order: `cure`, `candidate`, `predictors` (for which instructions were proposed),
            `val` (mean score `before` and `after`), `gate` (gain over the new side without it), `kept`, `note`
        prompts: predictors whose prompt differs (`differs` true) or where that is unknown (null), with `reason`
    """

    artifact: Path
    verdict: str
    margin: float
    tasks_needed: int | None
    split: str
    old: Mapping[str, Any]
    new: Mapping[str, Any]
    gain: Mapping[str, Any]
    criteria: Mapping[str, Any]
    task_types: Mapping[str, Any]
    gate: Mapping[str, Any]
    cures: Sequence[Mapping[str, Any]]
    prompts: Sequence[Mapping[str, Any]]
    config: Any = field(metadata=OBJECT)  # the settings, with names in place of objects
    run_id: str

    @property
    def failure(self) -> str:
        return "the new side is worse than the old one" if self.verdict == "worse" else ""

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.markdown import cost_words, failure_lines, type_label, with_interval
        from assay.reports.training import interval
        from assay.support.numbers import calls_text

        yield from prompt_lines(self.prompts)
        yield self._sides()
        kinds = self.task_types if len(self.task_types) > 1 else {}
        gains = {**self.criteria, **{type_label(kind): gain for kind, gain in kinds.items()}}
        rows = [(name, interval(gain) or "–") for name, gain in gains.items()]
        if len(rows) > 1:  # the gain of one criterion is that of the score
            yield Table(title="gain of the new side", header=("", "paired 95 %"), rows=rows)
        yield from failure_lines(self.new)
        yield f"gain of the new side: {with_interval(self.gain)}: {self._verdict()}"
        if self.cures:
            yield self._cures()
            yield from (f"{cure['cure']}: {cure['note']}" for cure in self.cures if cure["note"])
        yield from self.opened()
        calls = calls_text(self.calls, self.cached)
        yield f"LM calls: {calls}, {self.tokens:,} tokens, {cost_words(self.cost_usd)}"
        yield from self.called()
        yield from self.limits()
        if self.artifact.name:  # not yet while its own page is written
            yield f"artifact: {self.artifact}"

    def _verdict(self) -> str:
        if self.verdict != "too few tasks":
            return f"it is {self.verdict}, by the margin {self.margin:g}"
        needed = f"; about {self.tasks_needed:,} would decide" if self.tasks_needed else ""
        return f"too few tasks to decide by the margin {self.margin:g}{needed}"

    def _sides(self) -> Table:
        from assay.commands.compile import sides_table
        from assay.support.numbers import counted

        sides = (self.old, self.new)
        facts = {"model": "model", "DSPy": "dspy", "prompt format": "prompt_format"}
        calls = {"answers not parsed": "parse_failures", "answers cut at their limit": "truncated"}
        before, after = (
            [(label, *(str(side[key]) for side in sides)) for label, key in keys.items()] for keys in (facts, calls)
        )
        table, old = sides_table(*sides), "old, recorded" if self.old["recorded"] else "old"
        title = f"{'sealed test' if self.split == 'test' else self.split} split, {counted(self.new['n'], 'tasks')}"
        return replace(table, title=title, header=("", old, "new"), rows=[*before, *table.rows, *after])

    def _cures(self) -> Table:
        from assay.reports.training import interval
        from assay.support.numbers import figure

        def val(cure: Mapping[str, Any]) -> str:
            return f"{figure(cure['val']['before'])} to {figure(cure['val']['after'])}" if cure["val"] else "–"

        rows = [
            (
                cure["cure"], cure["candidate"] or "–", val(cure), interval(cure["gate"]) or "–",
                "kept" if cure["kept"] else "not kept",
            )
            for cure in self.cures
        ]  # fmt: skip
        return Table(title="cures", header=("", "candidate", "val", "gate, paired 95 %", ""), rows=rows)


def prompt_lines(prompts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Which prompts differ, with the reason; a line for each reason."""
    for reason in dict.fromkeys(row["reason"] for row in prompts):
        rows = [row for row in prompts if row["reason"] == reason]
        words = "prompts that differ" if rows[0]["differs"] else "prompts that may differ"
        yield f"{words}: {', '.join(row['predictor'] for row in rows)} ({reason})"


# -- Settings


class MigrateOutput(Planned, JobOutput):
    """Output."""


class Migrate(Reported, Trusting, InStore, NewArtifact, ReflectionModel, DecidedJob):
    """Move ARTIFACT to another model or to the DSPy that is installed, and say whether it is worse there.

    Old and new run the same gate tasks, with the rubric of the artifact unless another is named. Only where the new
    side is worse, cures are tried, the cheapest first: the old prompt format, other formats, demonstrations collected
    from the new model, new instructions for the predictors that lose. Each is selected on val and kept if gate shows
    that it is better; the sealed test is opened once one is kept. The result is a new artifact. Exit code 1 if it stays
    worse. Without `model` the version of DSPy is what changes, and the old side is the recorded rollouts of the store.

    Raises:
        ConfigError: it is not an artifact of a program, nothing changes, or the store has no recorded rollouts.
        ProgramError: the program has other predictors or fields now than the artifact.
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; call again with `resume=True`.
    """

    OUTPUT: ClassVar[Any] = MigrateOutput
    kind: ClassVar[str] = "migrate"
    state: ClassVar[None] = None  # type: ignore[misc]  # an artifact has its own
    executor: ClassVar[str] = "threads"  # type: ignore[misc]  # the two sides have different models

    program: Annotated[Source, Flag(metavar="ARTIFACT", path=True, key=False, stored=True)] = field(kw_only=False)
    """Folder of the artifact."""
    rubric: Annotated[Source, Flag(metavar="R", path=True)] = None
    """Rubric, as for other commands; by default the one that the artifact was measured by, from its folder."""
    recorded: Annotated[bool, Flag(key=False, stored=True)] = False
    """Take recorded rollouts of the store as the old side, for a model that does not answer any more. Always so without
    another `model`."""
    margin: Annotated[float, Ge(0), Lt(1)] = 0.02
    """Largest loss in score that counts as no worse. Part of the job, so that it cannot be changed after the result is
    known."""
    threshold: Annotated[float, Gt(0), Le(1)] = 0.8
    """Minimum score at which a run counts as a success to learn from."""

    def check(self) -> None:
        if not isinstance(self.program, str | Path) or not is_artifact(self.program):
            hint = "Give the folder that compile or tune has printed"
            raise ConfigError(f"{self.program!r} is not the folder of an artifact", hint=hint)
        manifest = read_manifest(Path(self.program))
        if manifest.get("kind") == "judge":
            hint = "Compile it for the new model: assay judge compile"
            raise ConfigError(f"{self.program} is a compiled judge", hint=hint)
        if manifest.get("agent") is not None:
            hint = "Score it with the new model: assay evaluate; or compile for that model: assay compile --agent"
            raise ConfigError(f"{self.program} is an artifact of an agent, not of a program", hint=hint)
        if self.rubric is None:
            files = manifest.get("rubric_files") or {}
            name = next((name for name in files if name in ("rubric.yaml", "rubric.toml", "rubric.json")), None)
            if name is None:
                raise ConfigError(f"is missing: {self.program} has no file of its rubric", field="rubric")
            object.__setattr__(self, "rubric", str(Path(self.program) / RUBRIC / name))

    @property
    def moves(self) -> bool:
        """Whether the model changes; otherwise the version of DSPy does."""
        other = self.model is not None and self.model != read_manifest(Path(self.program))["model"]
        return other or self.lm is not None or self.api_base is not None

    def request(self, job: "Job", each: float) -> "Request":
        from assay.jobs.planning import with_report
        from assay.optimizers.budget import decision_tasks
        from assay.support.numbers import counted

        calls = round(2 * each * len(decision_tasks(job.splits, "gate", self.decisions)))
        note = (
            f"{counted(calls, 'calls')} of them compare both sides on gate; the others are for a new side that is worse"
        )
        return with_report(job, float(_RUNS_OF_CURES * job.splits.sizes()["val"]), note)

    def run(self) -> MigrateReport:
        from assay.jobs.arguments import named
        from assay.jobs.artifacts import require_portable
        from assay.jobs.job import open_job
        from assay.jobs.migration import changed_prompts
        from assay.jobs.opening import artifact_place, check_out

        progress, recorded = self.reporter, self.recorded or not self.moves
        self._require_change()
        program, lm, config = named(self)
        check_out(self.out, resume=self.resume)
        with open_job(
            config, program=program, rubric=self.rubric, lm=lm, progress=progress, store=self.store,
            resume=self.resume, need=config.needed,
        ) as job:  # fmt: skip
            job.status = "stopped"  # until the job is complete
            finished = job.finished({"margin": self.margin, "threshold": self.threshold, "recorded": recorded})
            if job.session.recorder.resumed and (stored := finished.report(progress, out=self.out)) is not None:
                job.end_as_before(stored)
                return MigrateReport.read(stored, {"config": config})
            name = f"{Path(str(self.program)).resolve().name}-migrated"
            place = artifact_place(self.store, self.out, name, resume=self.resume)
            prompts = changed_prompts(job)
            for line in prompt_lines(prompts):
                progress.say(line)
            migration, notes = _migrated(job, config, recorded=recorded)
            if migration.stopped is None:
                job.status = "done"
            report = _report(job, config, migration, prompts, notes)
            report = replace(report, artifact=_artifact(job, report, migration, place))
            finished.keep(report.to_dict())
            if config.portable:
                require_portable(job, report.artifact)
        return report

    def _require_change(self) -> None:
        """Raises `ConfigError` if neither the model nor the version of DSPy is another one."""
        import dspy

        manifest = read_manifest(Path(self.program))
        if not self.moves and manifest.get("dspy") == dspy.__version__:
            raise ConfigError(
                f"nothing changes: {self.program} was made with {manifest['model']} and DSPy {dspy.__version__} too",
                hint="Name the new model (`model=NAME`), or run this where another version of DSPy is installed",
            )


# -- Run


def _migrated(job: "Job", config: Migrate, *, recorded: bool) -> "tuple[Migration, list[str]]":
    """Preflight of both sides, comparison and cures; notes for the report."""
    from assay.jobs.anchors import replay_of_rubric
    from assay.jobs.artifacts import rehearsed
    from assay.jobs.checks import unused_settings
    from assay.jobs.migration import KnownRuns, Migration, old_side, recorded_side
    from assay.jobs.preflight import checked, preflight, see_models
    from assay.optimizers.budget import announce_splits

    splits, session, progress = job.splits, job.session, job.session.progress
    notes = [*announce_splits(splits, progress), *job.warnings, *unused_settings(job)]
    if session.rubric.needs_judge and config.own_models:
        notes.append("judges without a model of their own use the new one, for both sides: `judge_model` names another")
    old, known = old_side(job, recorded=recorded), KnownRuns()
    if recorded:
        runs = recorded_side(job, old)
        known.of(old).update(runs)
        count = sum(task.id in runs for task in splits.gate)
        notes.append(f"the old side is recorded rollouts, not run now: {count} of {len(splits.gate)} gate tasks")
        progress.say(f"note: {notes[-1]}")
    measured = checked(job, splits.val)
    notes += [*(measured.warnings if measured else ()), *see_models(job)]
    if config.preflight and not recorded:
        progress.say(f"preflight of the old side with {old.session.lm.model}")
        try:
            preflight(old.session, old, splits.gate, max_cost_usd=config.max_cost_usd)
        except ModelError as error:
            hint = "If it does not answer any more, take its recorded rollouts: `recorded=True`"
            raise ModelError(f"the old side: {error}", hint=hint) from error
    notes += [*rehearsed(job, portable=config.portable), *replay_of_rubric(session.rubric, session)]
    session.executor = old.session.executor = known
    session.meter.ends_without_server = True
    migration = Migration(job, old, known, margin=config.margin, threshold=config.threshold, recorded=recorded)
    migration.run()
    return migration, notes


def _report(
    job: "Job", config: Migrate, migration: "Migration", prompts: Sequence[Mapping[str, Any]], notes: Sequence[str]
) -> MigrateReport:
    """The report without the artifact, which is written with it."""
    from assay.jobs.migration import side_report
    from assay.optimizers.finetuning.comparison import compared

    result, standing = migration.result, migration.standing
    gains = compared(result.before, result.after, level=result.gain.level)
    return MigrateReport(
        artifact=Path(), verdict=standing.verdict, margin=config.margin, tasks_needed=standing.tasks_needed,
        split=migration.split, old=side_report(migration, old=True), new=side_report(migration, old=False),
        gain=gains["gain"], criteria=gains["criteria"], task_types=gains["task_types"],
        gate=migration.first.gain.to_dict(), cures=migration.cures, prompts=prompts, stopped=migration.stopped,
        notes=list(dict.fromkeys([*migration.notes, *notes])), config=config, run_id=job.run_id,
        **job.spent(job.models()),
    )  # fmt: skip


def _artifact(job: "Job", report: MigrateReport, migration: "Migration", place: Path) -> Path:
    """Writes the new artifact; its parent is the old one."""
    from assay.jobs.artifacts import keep_artifact
    from assay.reports.files import short_name
    from assay.reports.markdown import markdown

    result = {key: value for key, value in report.to_dict().items() if key != "artifact"}
    about = f"Migrated to `{job.session.lm.model}` and DSPy {report.new['dspy']}."
    text = markdown(report, title=short_name(str(report.config.program)), about=about)
    return keep_artifact(job, migration.new, place, result, text, unproven=report.verdict != "no worse")


migrate = function_of(Migrate, "migrate")
