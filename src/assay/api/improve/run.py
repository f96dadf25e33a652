"""Public API for `assay improve`.

Alternates prompt compilation and weight training; keeps a step only if it passes the gate.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from assay.api.collect import collect
from assay.api.compile import compile as compile_program
from assay.api.export import export
from assay.api.improve.checks import Trial, check_start, compare_on, ended_by, of_part
from assay.api.improve.report import ImproveReport
from assay.api.improve.state import ImprovementState
from assay.api.improve.steps import STEPS, check_improvement, program_name
from assay.api.sft import train_sft
from assay.api.train import Retained, train
from assay.deployment.artifact import is_artifact
from assay.errors import AssayError, BudgetExceeded, DataError, Diverged
from assay.evaluation import Progress, default_progress
from assay.evaluation.comparison import Comparison, losses_behind_gain, what_would_decide
from assay.evaluation.statistics import FEWEST
from assay.models.lora.adapters import adapter_home, find_adapter, served_as
from assay.optimizers.finetuning import SFTSettings
from assay.optimizers.finetuning.comparison import compared
from assay.optimizers.finetuning.run_folder import training_folder
from assay.optimizers.finetuning.settings import PolicySettings
from assay.programs.loading import full_name
from assay.reports.training import interval
from assay.rubrics.loading import RubricSource, importable_name
from assay.runs.arguments import program_settings, resolve_model
from assay.runs.artifacts import keep_artifact
from assay.runs.jobs import open_job
from assay.runs.loading import load_rubric
from assay.runs.opening import artifact_place, home_of
from assay.runs.settings import CollectSettings, CompileSettings, ImproveSettings, TrainSettings
from assay.runs.settings.options import ImproveOptions
from assay.runs.unused import settings_of_another_job
from assay.sources.trust import trusts
from assay.support.job_folders import remove_folder
from assay.support.keywords import takes
from assay.support.names import place_in
from assay.support.settings import settings_of
from assay.traces.export.gates import Gates
from assay.traces.export.selection import Selection

__all__ = ["STEPS", "ImproveReport", "improve"]

_NO_GATES = Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="off")  # of rows that stay on this machine
_IMPROVE_ONLY = settings_of(ImproveSettings).keys() - settings_of(CompileSettings).keys()  # what the steps do not share


@takes(ImproveSettings)
@trusts
def improve(
    program: str,
    *,
    rubric: RubricSource,
    data: str,
    name: str,
    monitor: RubricSource | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    words: Callable[[str], str] = str,
    **options: Unpack[ImproveOptions],
) -> ImproveReport:
    """Improves a program step by step and saves the result as an artifact.

    A part of the caps is reserved for the gate of each step that fits them and for the sealed test; the steps share the
    rest. A step starts only if its work, its gate and the sealed test fit the caps. When a cap is reached, the
    improvement ends with the best version so far and the report's `stopped` holds the reason; `resume` with a higher
    cap continues it.

    Args:
        program: a name or an artifact's path; its own model is trained further.
        rubric: as for `assay.compile`; a check or metric at the top level of a file, because later steps import it.
        name: name of this improvement; its adapters are NAME-1, NAME-2, and so on. Use another name when new data has
            arrived.
        monitor: a rubric that scores the rollouts of `grpo` and is not trained on.
        resume: continues the unfinished improvement of this name; finished steps are not run again.
        words: changes alarms and notes of the pages of trainings and of `report.md`; the command line puts its flags
            into them, in place of Python arguments.
        options: the fields of `assay.runs.settings.ImproveSettings`. Caps apply to all steps together. `order` lists
            steps: `prompts` (compile), `sft` (collect on train, export this program's good rollouts from the store,
            fine-tune on them) and `grpo` (policy gradient on train). `sft` and `grpo` are the settings of these steps:
            fields of `SFTSettings` and `PolicySettings`.
    Raises:
        ConfigError: an unknown step, an adapter of this name, or nothing to resume.
    """
    settings: dict[str, Any] = dict(options)
    if is_artifact(str(program)):
        _, settings = resolve_model(str(program), None, options)
    settings = {key: value for key, value in settings.items() if value is not None}
    rubric = importable_name(rubric)
    monitor = None if monitor is None else importable_name(monitor)
    watched = {} if monitor is None else {"monitor": monitor}
    config = program_settings(ImproveSettings, full_name(str(program)), rubric, data, None, {**settings, **watched})
    check_improvement(config, model=settings.get("model"))
    folder, order = place_in(home_of(store) / "improve", name), config.order
    progress, place = default_progress(progress), artifact_place(store, out, name, resume=resume)
    shared = {key: value for key, value in settings.items() if key not in _IMPROVE_ONLY}
    training = dict(config.sft or {}), dict(config.grpo or {}), list(config.retention), monitor
    run = _Improvement(
        config.program, rubric, config.data, name, folder, store, progress, shared, config.rollouts, *training
    )
    run.words = words
    if (finished := run.begin(list(order), resume)) is not None:
        return finished
    run.check_start(order)
    run.steps(order)
    run.finish(place)
    run.keep_report()
    return run.report


class _Improvement(ImprovementState):
    """A running improvement: its steps, their gates and the end."""

    words: Callable[[str], str] = str

    def check_start(self, order: Sequence[str]) -> None:
        """Runs the preflight once, before the first step.

        If it fails, the folder of the improvement is removed, as there is nothing to resume.

        Raises:
            AssayError: see `assay.runs.preflight.preflight`.
        """
        if self.report.steps or self.checked:
            return
        trial = Trial(
            program=self.program, rubric=self.rubric, data=self.data, order=order, rollouts=self.rollouts,
            monitor=self.monitor,
            grpo=self._settings(PolicySettings, self.grpo, "grpo"),
            retained=[Retained.read(part) for part in self.retention],
        )  # fmt: skip
        try:
            self.report.notes, self.plan, self.report.data = check_start(
                trial, part=self._part, options=self._start_options, store=self.store, progress=self.progress
            )
        except AssayError:
            remove_folder(self.folder, self._job)
            raise
        for step, options in (("sft", self.sft), ("grpo", self.grpo)):
            if options and step not in order:
                self.report.notes.append(
                    f"{step}={options!r} has no effect: order={','.join(order)!r} has no such step"
                )
        for line in self.plan.lines(self._caps):
            self.progress.say(line)
        self.checked = True
        self._keep()

    def _start_options(self) -> dict[str, Any]:
        return {**self._capped(self.options), "model": self._start_model()}

    # -- steps

    def steps(self, order: Sequence[str]) -> None:
        """Runs the remaining steps until a cap is reached."""
        for at, step in list(enumerate(order))[len(self.report.steps) :]:
            self.progress.say(f"step {at + 1} of {len(order)}: {step}")
            try:
                self._take(at, step)
            except BudgetExceeded as cap:
                self.report.stopped = f"step {at + 1} of {len(order)}, {step}: {cap}"
                self.progress.say(f"end of the improvement: {self.report.stopped}; the best so far is reported")
                return

    def _take(self, at: int, step: str) -> None:
        """Runs one step and its gate; keeps the result if it passes."""
        before = (self.report.program, self.report.model)
        try:
            if self.candidate is None:
                with self._part(step), settings_of_another_job():
                    self.candidate = self._prompts(at) if step == "prompts" else self._weights(at, step)
                self._keep()
        except (DataError, Diverged) as error:
            converged = False if isinstance(error, Diverged) else None
            row: dict[str, Any] = {
                "step": step, "kept": False, "gate": None, "note": str(error), "converged": converged
            }  # fmt: skip
        else:
            row = {
                "step": step, "program": self.candidate[0], "model": self.candidate[1],
                "converged": self._converged(at, step), **self._gate(before, self.candidate),
            }  # fmt: skip
            if row["kept"]:
                self.report.program, self.report.model = self.candidate
        self.candidate = None
        self.report.steps.append(row)
        self._keep()
        reason = f"gate {interval(row['gate'])}" if row["gate"] else row["note"]
        self.progress.say(f"{step}: {'kept' if row['kept'] else 'not kept'}, {reason}")

    def _prompts(self, at: int) -> tuple[str, str]:
        out = self.folder / f"prompts-{at + 1}"
        remove_folder(out, self._job)  # of an interrupted process; the replay makes it again
        report = compile_program(
            self.report.program, rubric=self.rubric, data=self.data, out=out, store=self.store, progress=self.progress,
            gate=False, test=False, words=self.words, **{**self._capped(self.options), "model": self.report.model},
        )  # fmt: skip
        stopped = report.outcome.stopped
        if (
            stopped
            and report.outcome.winner == "baseline"
            and self.options.get("max_search_calls") is None
            and not self._later_fits(at)
        ):
            raise BudgetExceeded(stopped)
        self._note_cut(at, "prompts", stopped)
        if report.outcome.winner == "baseline":
            raise DataError("; ".join(report.outcome.notes))
        return str(report.artifact), self.report.model

    def _later_fits(self, at: int) -> bool:
        """Whether a later step still fits the caps. If so, this step ended at its own share of them."""
        turn = self._turn() if self._caps.any else None
        return turn is not None and turn.end > at + 1

    def _weights(self, at: int, step: str) -> tuple[str, str]:
        name = f"{self.name}-{at + 1}"
        if (adapter_home() / name).is_dir():  # made by an interrupted process
            return self.report.program, served_as(find_adapter(name))
        begun = (training_folder(name) / "job.json").is_file()
        if step == "grpo":
            settings = self._settings(PolicySettings, self.grpo, "grpo")
            policy_options = {
                key: value
                for key, value in self._options_for(TrainSettings).items()
                if key not in ("model", "seed", "cache")
            }
            policy_options["parameters"] = {
                key: value for key, value in policy_options.get("parameters", {}).items() if key != "temperature"
            }  # `grpo` has its own
            trained = train(
                self.report.program, rubric=self.rubric, data=self.data, name=name, store=self.store,
                progress=self.progress, resume=begun,
                retention=self.retention, monitor=self.monitor, test=False, **{**policy_options, **asdict(settings)},
            )  # fmt: skip
            trained.write_page(self.words)
            if trained.name is None:
                raise DataError(f"{self.report.model} is not served by name: its adapter is in {trained.path}")
            return self.report.program, trained.name
        rows = self.folder / f"sft-{at + 1}"
        if not begun:
            collected = collect(
                self.report.program, rubric=self.rubric, data=self.data, n=self.rollouts, store=self.store,
                progress=self.progress,
                **{**self._options_for(CollectSettings), "model": self.report.model},
            )  # fmt: skip
            self._note_cut(at, "sft", collected.stopped)
            remove_folder(rows, self._job)
            chosen = Selection(programs=(program_name(self.program),))
            export("sft", rows, store=self.store, selection=chosen, gates=_NO_GATES, progress=self.progress)
        config = self._settings(SFTSettings, self.sft, "sft")
        warmed = train_sft(rows, name=name, store=self.store, resume=begun, progress=self.progress, **asdict(config))
        if warmed.name is None:
            raise DataError(f"{self.report.model} is not served by name: its adapter is in {warmed.path}")
        return self.report.program, warmed.name

    def _converged(self, at: int, step: str) -> bool | None:
        """Whether the policy gradient of this step converged by its rule; None if it took too few steps to tell."""
        if step != "grpo":
            return None
        converged: bool | None = find_adapter(f"{self.name}-{at + 1}").made.get("converged")
        return converged

    def _note_cut(self, at: int, step: str, stopped: str | None) -> None:
        """Notes that a cap ended the step early; its result so far goes to the gate."""
        if stopped:
            self.report.notes.append(
                f"step {at + 1}, {step}, ended early; its result so far goes to the gate: {stopped}"
            )

    def _gate(self, before: tuple[str, str], after: tuple[str, str]) -> dict[str, Any]:
        """Compares before and after on the gate split.

        Raises:
            BudgetExceeded: a cap ended it before it showed a gain; part of the split is no basis for a decision.
        """
        result = self._compared("gate", before, after)
        if result.cap is not None and not result.gain.is_gain:
            raise BudgetExceeded(
                f"{ended_by(result, 'gate')}, and a part of the split is not enough for a decision",
                what=result.cap.what,
            )
        sides = {"before": result.before.report()["score"], "after": result.after.report()["score"]}
        notes = [note] if (note := ended_by(result, "gate")) else []
        if not result.gain.is_gain:
            notes.append(what_would_decide(result.before, result.after, "gate"))
        noted = {"note": "; ".join(notes)} if notes else {}
        return {"gate": result.gain.to_dict(), "kept": result.gain.is_gain, **sides, **noted}

    def _compared(self, split: str, before: tuple[str, str], after: tuple[str, str]) -> Comparison:
        comparison, openings = compare_on(
            split, before, after, rubric=self.rubric, data=self.data, part=self._part, store=self.store,
            progress=self.progress,
            options=lambda: self._capped(self.options), opens_as=self.opens_as,
            plan=self.plan.report if self.plan is not None else None,
        )  # fmt: skip
        self.report.test_openings = openings
        return comparison

    # -- the end

    def finish(self, place: Path) -> None:
        """Compares start and end on the sealed test, and writes the artifact."""
        report, start = self.report, self._start_model()
        if (report.program, report.model) != (self.program, start):
            self._test((self.program, start), (report.program, report.model))
        config = of_part("improve", report.program, self.rubric, self.data, {**self.options, "model": report.model})
        opened = open_job(
            config, program=report.program, rubric=load_rubric(self.rubric), progress=self.progress, store=self.store
        )
        with self._part("end"), opened as job:
            report.models = job.models(self._runs)["models"]
            report.artifact = keep_artifact(
                job,
                job.recorded,
                place,
                {"steps": report.steps, "test": report.test},
                report.as_text(self.name, self.words),
            )
        report.program = str(report.artifact)  # intermediate versions are deleted with the folder

    def _test(self, start: tuple[str, str], end: tuple[str, str]) -> None:
        report = self.report
        try:
            comparison = self._compared("test", start, end)
        except BudgetExceeded as cap:
            report.stopped = report.stopped or f"sealed test: {cap}"
            return
        report.test = compared(comparison.before, comparison.after, level=comparison.gain.level)
        report.notes += [note] if (note := ended_by(comparison, "test")) else []
        report.notes += losses_behind_gain(comparison, "test")
        if comparison.cap is not None and comparison.gain.n < FEWEST:
            report.stopped = report.stopped or note
