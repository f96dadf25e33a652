"""Public API for `assay improve`.

Alternates prompt compilation and weight training; keeps a step only if it passes the gate.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Unpack

from assay.api.collect import collect
from assay.api.compile import compile as compile_program
from assay.api.export import export
from assay.api.improve.caps import ImprovePlan, Turn
from assay.api.improve.checks import CAPS, Trial, check_start, compare_on, ended_by, left_of, of_part, spent_in
from assay.api.improve.report import ImproveReport, finished_report, write_json
from assay.api.improve.steps import STATE, STEPS, adapter_names, check_improvement, check_name, own_model, own_name
from assay.api.train import Retained, train
from assay.deployment.artifact import check_place, is_artifact
from assay.errors import AssayError, BudgetExceeded, ConfigError, DataError, Diverged
from assay.evaluation import Progress, SilentProgress
from assay.evaluation.comparison import Comparison
from assay.models import Caps
from assay.models.lora.adapters import adapter_home, find_adapter, served_as
from assay.models.meter import Usage
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.optimizers.finetuning.comparison import compared
from assay.optimizers.finetuning.settings import PolicySettings, settings_from
from assay.optimizers.prompts.reserve import FEWEST
from assay.programs.loading import full_name
from assay.reports.training import interval
from assay.runs.arguments import given_model, program_settings, takes
from assay.runs.artifacts import keep_artifact
from assay.runs.finished import FinishedRun
from assay.runs.jobs import open_job
from assay.runs.loading import load_rubric
from assay.runs.opening import home_of, pinned
from assay.runs.settings import CollectSettings, CompileSettings, ImproveSettings, TrainSettings
from assay.runs.settings.options import ImproveOptions
from assay.sources.trust import trusts
from assay.support.settings import Settings, settings_of
from assay.traces.export.gates import Gates
from assay.traces.export.selection import Selection
from assay.traces.records import new_id

T = TypeVar("T", bound=Settings)

__all__ = ["STEPS", "ImproveReport", "improve"]

_NO_GATES = Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="off")  # of rows that stay on this machine
_FORMAT = 3
_OWN = settings_of(ImproveSettings).keys() - settings_of(CompileSettings).keys()  # what the steps do not share


@trusts
@takes(ImproveSettings)
def improve(
    program: str,
    *,
    rubric: str | Path,
    data: str,
    name: str,
    monitor: str | Path | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Unpack[ImproveOptions],
) -> ImproveReport:
    """Improves a program step by step and saves the result as an artifact.

    A part of the caps is reserved for the gate of each step that fits them and for the sealed test; the steps share the
    rest. A step starts only if its work, its gate and the sealed test fit the caps. When a cap is reached, the
    improvement ends with the best version so far and the report's `stopped` holds the reason; `resume` with a higher
    cap continues it.

    Args:
        program: a name or an artifact's path; its own model is trained further.
        name: name of this improvement; its adapters are NAME-1, NAME-2, and so on. Use another name when new data has
            arrived.
        monitor: a rubric that scores the rollouts of `grpo` and is not trained on.
        resume: continues the unfinished improvement of this name; finished steps are not run again.
        options: the fields of `assay.runs.settings.ImproveSettings`. Caps apply to all steps together. `order` lists
            steps: `prompts` (compile), `sft` (collect on train, export this program's good rollouts from the store,
            fine-tune on them) and `grpo` (policy gradient on train). `sft` and `grpo` are the settings of these steps:
            fields of `SFTSettings` and `PolicySettings`.
    Raises:
        ConfigError: an unknown step, an adapter of this name, or nothing to resume.
    """
    found: dict[str, Any] = dict(options)
    if is_artifact(str(program)):
        _, found = given_model(str(program), None, options)
    found = {key: value for key, value in found.items() if value is not None}
    watched = {} if monitor is None else {"monitor": str(monitor)}
    config = program_settings(ImproveSettings, full_name(str(program)), rubric, data, None, {**found, **watched})
    check_improvement(config, model=found.get("model"))
    folder, order = home_of(store) / "improve" / name, config.order
    shown, place = progress or SilentProgress(), Path(out) if out else home_of(store) / "artifacts" / name
    check_place(place.resolve())
    shared = {key: value for key, value in found.items() if key not in _OWN}
    own = dict(config.sft or {}), dict(config.grpo or {}), list(config.retention), monitor
    run = _Improvement(config.program, rubric, config.data, name, folder, store, shown, shared, config.rollouts, *own)
    if (finished := run.begin(list(order), resume)) is not None:
        return finished
    run.check_start(order)
    run.steps(order)
    run.finish(place)
    run.keep_report()
    return run.report


@dataclass
class _Improvement:
    """A running improvement. `report` holds the best program and model so far."""

    program: str
    rubric: str | Path
    data: str
    name: str
    folder: Path
    store: str | Path | None
    shown: Progress
    options: dict[str, Any]
    rollouts: int
    sft: dict[str, Any]
    grpo: dict[str, Any]
    retention: list[str]
    monitor: str | Path | None
    report: ImproveReport = field(init=False)
    checked: bool = False  # the preflight is done
    made: tuple[str, str] | None = None  # program and model made by the current step, until its gate has decided
    plan: ImprovePlan | None = None  # None before the preflight
    part: str = ""  # id of the current part
    opens_as: str = ""  # job that test openings are counted for; both sides of the comparison count once

    def begin(self, order: list[str], resume: bool) -> ImproveReport | None:
        """Reads the state to resume from, or writes a new one. Returns the report of a finished improvement."""
        job = {
            "format": _FORMAT, "program": self.program, "rubric": str(self.rubric), "data": self.data, "order": order,
            "options": self.options,
            "rollouts": self.rollouts, "sft": self.sft, "grpo": self.grpo, "retention": self.retention,
            "monitor": self.monitor,
        }  # fmt: skip
        # without the caps, which may be raised on resume
        job["options"] = {key: value for key, value in self.options.items() if key not in CAPS}
        job = json.loads(json.dumps(job, default=str))
        state_file = self.folder / STATE
        self.opens_as = f"improve-{self.name}-{new_id()[:12]}"
        if resume and not state_file.is_file() and (done := finished_report(self._report_file, job)) is not None:
            return done
        if resume and state_file.is_file():  # without a state there is nothing to resume, and a new one begins
            state = json.loads(state_file.read_text(encoding="utf-8"))
            if state["job"] != job:
                raise ConfigError(
                    f"the improvement {self.name!r} was begun with other settings: resume with the same, or take "
                    "another name"
                )
            self.job, self.report = (
                job,
                ImproveReport(None, state["program"], state["model"], state["steps"], notes=state.get("notes", [])),
            )
            self.opens_as = state.get("opens_as", self.opens_as)
            self.checked = state.get("checked", False)
            self.made = tuple(state["made"]) if state.get("made") else None
            self.plan = ImprovePlan.of(state["plan"]) if state.get("plan") else None
            return ImproveReport.of(kept) if (kept := self._ended.report(self.shown)) is not None else None
        check_name(self.name, order, self.folder)
        self.job, self.report = job, ImproveReport(None, self.program, self._own_model())
        for adapter in adapter_names(self.name, order):
            # an abandoned training of an earlier improvement with the same name
            shutil.rmtree(adapter_home().parent / "training" / adapter, ignore_errors=True)
        self._keep()
        return None

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Makes runs opened inside parts of this improvement: interrupted ones resume, finished ones are replayed."""
        before, self.part = self.part, f"{len(self.report.steps)}.{name}"
        try:
            with pinned(f"{self._runs}.{self.part}"):
                yield
        finally:
            self.part = before

    @property
    def _runs(self) -> str:
        """Common prefix of the ids of its runs."""
        return f"improve-{self.opens_as.rpartition('-')[2]}"

    def keep_report(self) -> None:
        """Writes the report. `resume` returns it if the process was killed before printing it or no cap was raised."""
        if self.report.stopped is not None:
            self._ended.keep(self.report.to_dict())
        else:
            write_json(self._report_file, {"job": self.job, "report": self.report.to_dict()})
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _caps(self) -> Caps:
        return Caps(
            calls=self.options.get("max_calls"),
            tokens=self.options.get("max_tokens"),
            cost_usd=self.options.get("max_cost_usd"),
        )

    @property
    def _ended(self) -> FinishedRun:
        """Report of an improvement that ended at a cap."""
        return FinishedRun(self.folder, caps=self._caps, about=self.job)

    @property
    def _report_file(self) -> Path:
        return self.folder.parent / f"{self.name}.json"

    def _settings(self, kind: type[T], given: Mapping[str, Any], what: str) -> T:
        return settings_from(kind, {"model": self.report.model, "seed": self.options.get("seed", 0), **given}, what)

    def _own_model(self) -> str:
        return own_model(self.program, self.options.get("model"))

    def _keep(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "job": self.job,
            "program": self.report.program,
            "model": self.report.model,
            "steps": self.report.steps,
            "notes": self.report.notes,
            "opens_as": self.opens_as,
            "checked": self.checked,
            "made": self.made,
            "plan": asdict(self.plan) if self.plan is not None else None,
        }
        write_json(self.folder / STATE, state)

    def _capped(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with the caps reduced to what the current part may use; see `left_of`."""
        if not self._caps.any:
            return dict(options)
        spent, turn = self._spent(), self._turn()
        kept, least = dict[str, float](), dict[str, float]()
        if self.plan is not None and turn is not None:
            gate = self.part.endswith(".gate")
            kept = self.plan.amounts(turn.after if gate else turn.kept)
            least = {} if gate else self.plan.amounts(self.plan.steps[len(self.report.steps)].least)
        return left_of(options, spent, kept=kept, least=least)

    def _shared(self, kind: type[Settings]) -> dict[str, Any]:
        """The options with what is left of the caps, as far as a step has them."""
        return {name: value for name, value in self._capped(self.options).items() if name in settings_of(kind)}

    def _turn(self) -> Turn | None:
        """What the current step may use of the caps; None before the preflight and after the last step."""
        at = len(self.report.steps)
        if self.plan is None or at >= len(self.plan.steps) or self.part.endswith(".test"):
            return None
        return self.plan.turn(
            at, self._caps, self.plan.left(self._caps, self._spent()), worked=self.part.endswith(".gate")
        )

    def _spent(self) -> Usage:
        """Usage of all parts except the current one."""
        return spent_in(home_of(self.store) / "runs", self._runs, but=self.part)

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
            self.report.notes, self.plan = check_start(
                trial, part=self._part, options=self._start_options, store=self.store, progress=self.shown
            )
        except AssayError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        for line in self.plan.lines(self._caps):
            self.shown.say(line)
        self.checked = True
        self._keep()

    def _start_options(self) -> dict[str, Any]:
        return {**self._capped(self.options), "model": self._own_model()}

    # -- steps

    def steps(self, order: Sequence[str]) -> None:
        """Runs the remaining steps until a cap is reached."""
        for at, step in list(enumerate(order))[len(self.report.steps) :]:
            self.shown.say(f"step {at + 1} of {len(order)}: {step}")
            try:
                self._take(at, step)
            except BudgetExceeded as cap:
                self.report.stopped = f"step {at + 1} of {len(order)}, {step}: {cap}"
                self.shown.say(f"end of the improvement: {self.report.stopped}; the best so far is reported")
                return

    def _take(self, at: int, step: str) -> None:
        """Runs one step and its gate; keeps the result if it passes."""
        before = (self.report.program, self.report.model)
        try:
            if self.made is None:
                with self._part(step):
                    self.made = self._prompts(at) if step == "prompts" else self._weights(at, step)
                self._keep()
        except (DataError, Diverged) as error:
            row: dict[str, Any] = {"step": step, "kept": False, "gate": None, "note": str(error)}
        else:
            row = {"step": step, "program": self.made[0], "model": self.made[1], **self._gate(before, self.made)}
            if row["kept"]:
                self.report.program, self.report.model = self.made
        self.made = None
        self.report.steps.append(row)
        self._keep()
        reason = f"gate {interval(row['gate'])}" if row["gate"] else row["note"]
        self.shown.say(f"{step}: {'kept' if row['kept'] else 'not kept'}, {reason}")

    def _prompts(self, at: int) -> tuple[str, str]:
        out = self.folder / f"prompts-{at + 1}"
        shutil.rmtree(out, ignore_errors=True)  # of an interrupted process; the replay makes it again
        made = compile_program(
            self.report.program, rubric=self.rubric, data=self.data, out=out, store=self.store, progress=self.shown,
            gate=False, test=False, **{**self._capped(self.options), "model": self.report.model},
        )  # fmt: skip
        stopped = made.outcome.stopped
        if (
            stopped
            and made.outcome.winner == "baseline"
            and self.options.get("max_search_calls") is None
            and not self._later_fits(at)
        ):
            raise BudgetExceeded(stopped)
        self._note_cut(at, "prompts", stopped)
        if made.outcome.winner == "baseline":
            raise DataError("nothing beat the program as it is")
        return str(made.artifact), self.report.model

    def _later_fits(self, at: int) -> bool:
        """Whether a later step still fits the caps. If so, this step ended at its own share of them."""
        turn = self._turn() if self._caps.any else None
        return turn is not None and turn.end > at + 1

    def _weights(self, at: int, step: str) -> tuple[str, str]:
        name = f"{self.name}-{at + 1}"
        if (adapter_home() / name).is_dir():  # made by an interrupted process
            return self.report.program, served_as(find_adapter(name))
        begun = (adapter_home().parent / "training" / name / "job.json").is_file()
        if step == "grpo":
            settings = self._settings(PolicySettings, self.grpo, "grpo")
            kept = {
                key: value
                for key, value in self._shared(TrainSettings).items()
                if key not in ("model", "seed", "cache")
            }
            kept["parameters"] = {
                key: value for key, value in kept.get("parameters", {}).items() if key != "temperature"
            }  # `grpo` has its own
            trained = train(
                self.report.program, rubric=self.rubric, data=self.data, name=name, store=self.store,
                progress=self.shown, resume=begun,
                retention=self.retention, monitor=self.monitor, test=False, **{**kept, **asdict(settings)},
            )  # fmt: skip
            if trained.name is None:
                raise DataError(f"{self.report.model} is not served by name: its adapter is in {trained.path}")
            return self.report.program, trained.name
        rows = self.folder / f"sft-{at + 1}"
        if not begun:
            collected = collect(
                self.report.program, rubric=self.rubric, data=self.data, n=self.rollouts, store=self.store,
                progress=self.shown,
                **{**self._shared(CollectSettings), "model": self.report.model},
            )  # fmt: skip
            self._note_cut(at, "sft", collected.stopped)
            shutil.rmtree(rows, ignore_errors=True)
            chosen = Selection(programs=(own_name(self.program),))
            export("sft", rows, store=self.store, selection=chosen, gates=_NO_GATES, progress=self.shown)
        config = self._settings(SFTSettings, self.sft, "sft")
        warmed = train_sft(rows, name, config, resume=begun, progress=self.shown)
        if warmed.name is None:
            raise DataError(f"{self.report.model} is not served by name: its adapter is in {warmed.path}")
        return self.report.program, warmed.name

    def _note_cut(self, at: int, step: str, stopped: str | None) -> None:
        """Notes that a cap ended the step early; its result so far goes to the gate."""
        if stopped:
            self.report.notes.append(f"step {at + 1}, {step}, ended early and went on with what it had: {stopped}")

    def _gate(self, before: tuple[str, str], after: tuple[str, str]) -> dict[str, Any]:
        """Compares before and after on the gate split.

        Raises:
            BudgetExceeded: a cap ended it before it showed a gain; part of the split is no basis for a decision.
        """
        result = self._compared("gate", before, after)
        if result.cap is not None and not result.gain.is_gain:
            raise BudgetExceeded(f"{ended_by(result, 'gate')}, and these decide nothing", what=result.cap.what)
        sides = {"before": result.before.report()["score"], "after": result.after.report()["score"]}
        note = ended_by(result, "gate")
        return {"gate": result.gain.to_dict(), "kept": result.gain.is_gain, **sides, **({"note": note} if note else {})}

    def _compared(self, split: str, before: tuple[str, str], after: tuple[str, str]) -> Comparison:
        found, openings = compare_on(
            split, before, after, rubric=self.rubric, data=self.data, part=self._part, store=self.store,
            progress=self.shown,
            options=lambda: self._capped(self.options), opens_as=self.opens_as,
            plan=self.plan.report if self.plan is not None else None,
        )  # fmt: skip
        self.report.test_openings = openings
        return found

    # -- the end

    def finish(self, place: Path) -> None:
        """Compares start and end on the sealed test, and writes the artifact."""
        report, start = self.report, self._own_model()
        if (report.program, report.model) != (self.program, start):
            self._test((self.program, start), (report.program, report.model))
        config = of_part("improve", report.program, self.rubric, self.data, {**self.options, "model": report.model})
        opened = open_job(
            config, program=report.program, rubric=load_rubric(self.rubric), progress=self.shown, store=self.store
        )
        with self._part("end"), opened as job:
            report.artifact = keep_artifact(
                job, job.student, place, {"steps": report.steps, "test": report.test}, report.as_text(self.name)
            )
        report.program = str(report.artifact)  # intermediate versions are deleted with the folder

    def _test(self, start: tuple[str, str], end: tuple[str, str]) -> None:
        report = self.report
        try:
            found = self._compared("test", start, end)
        except BudgetExceeded as cap:
            report.stopped = report.stopped or f"sealed test: {cap}"
            return
        report.test = compared(found.before, found.after, level=found.level, guarded=found.ended != "")
        report.notes += [note] if (note := ended_by(found, "test")) else []
        if found.cap is not None and found.gain.n < FEWEST:
            report.stopped = report.stopped or note
