"""The users' line around everything that can be improved: `assay.improve`. Prompts, then weights, then prompts again, in whatever order;
each step is kept only where the gate favours it, and the sealed test is reported at the end."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from assay.api import compile as compile_program
from assay.datasets.memory import data_spec
from assay.deployment.artifact import check_place, is_artifact
from assay.deployment.trust import trusts
from assay.errors import AssayError, BudgetExceeded, ConfigError, DataError, Diverged
from assay.exporting import collect, export
from assay.finished import FinishedRun
from assay.given import given_model, takes
from assay.improvechecks import CAPS, Trial, check_start, compare_on, ended_by, left_of, spent_in
from assay.improveorder import STATE, STEPS, adapter_names, check_name, check_order, own_model, own_name
from assay.improveplan import ImprovePlan, Turn
from assay.improvereport import ImproveReport, finished_report, write_json
from assay.jobs import RunConfig, home_of, load_rubric, open_job, pinned
from assay.keeping import keep_artifact
from assay.models import Caps
from assay.models.adapters import adapter_home, find_adapter, served_as
from assay.models.meter import Usage
from assay.optimizers import Progress
from assay.optimizers.comparison import Comparison
from assay.optimizers.reserve import FEWEST
from assay.optimizers.weights import SFTConfig, train_sft
from assay.optimizers.weights.config import PolicyConfig, made_of
from assay.optimizers.weights.page import interval
from assay.optimizers.weights.validation import compared
from assay.programs.loading import full_name
from assay.traces.gates import Gates
from assay.traces.records import new_id
from assay.traces.selection import Selection
from assay.training import Retained, train

T = TypeVar("T")

__all__ = ["STEPS", "ImproveReport", "improve"]

_NO_GATES = Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="off")  # of rows that stay on this machine
_FORMAT = 2


@trusts
@takes(RunConfig)
def improve(
    program: str,
    *,
    rubric: str | Path,
    data: str,
    name: str,
    order: Sequence[str] = ("prompts", "sft", "prompts"),
    rollouts: int = 2,
    sft: Mapping[str, Any] | None = None,
    grpo: Mapping[str, Any] | None = None,
    retain: Sequence[str] = (),
    watch: str | Path | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> ImproveReport:
    """Improves a program step by step, and keeps what it became as an artifact.

    From the start a part of the caps is kept for the gate of each step that fits them and for the sealed test; the work of these steps shares the
    rest. A step begins only where its work fits beside its gate and the sealed test. A cap that is reached ends the improvement with the best
    version so far; the report's `stopped` says so, and `resume` with a higher cap continues.

    Args:
        program: a name or an artifact's path; its own model is trained further.
        name: of this improvement: its adapters are NAME-1, NAME-2, and so on. Run it again under another name as data arrives.
        order: steps out of `prompts` (compile), `sft` (collect on train, export the good rollouts that the store has of this program, warm up) and
            `grpo` (policy gradient on train).
        rollouts: of each task that `sft` collects.
        sft, grpo: settings of the two, by field of `SFTConfig` and `PolicyConfig`.
        retain, watch: guards of `grpo`, as in `assay.train`: what must not be forgotten, and a rubric that only looks on.
        resume: continues this name's unfinished improvement: finished steps are not run again.
        options: the fields of `RunConfig`; the caps are of all steps together.
    Raises:
        ConfigError: an unknown step, an adapter of this name, or nothing to resume.
    """
    if is_artifact(str(program)):
        _, options = given_model(str(program), None, options)
    check_order(
        order, program=full_name(str(program)), rubric=rubric, data=data_spec(data), model=options.get("model"), judge=options.get("judge_model"),
        sft=sft, grpo=grpo, retain=retain, watch=watch,
    )  # fmt: skip
    folder = home_of(store) / "improve" / name
    shown, place = progress or Progress(), Path(out) if out else home_of(store) / "artifacts" / name
    check_place(place.resolve())
    settings = dict(sft or {}), dict(grpo or {}), list(retain), watch
    run = _Improvement(full_name(str(program)), rubric, data_spec(data), name, folder, store, shown, dict(options), rollouts, *settings)
    if (finished := run.begin(list(order), resume)) is not None:
        return finished
    run.check_start(order)
    run.steps(order)
    run.finish(place)
    run.keep_report()
    return run.report


@dataclass
class _Improvement:
    """One improvement on its way: the program and the model that are kept so far stand in `report`."""

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
    retain: list[str]
    watch: str | Path | None
    report: ImproveReport = field(init=False)
    checked: bool = False  # whether the preflight is done
    made: tuple[str, str] | None = None  # program and model that came of the step at work, once they wait for the gate
    plan: ImprovePlan | None = None  # None before the preflight
    part: str = ""  # the one at work
    opens_as: str = ""  # the job that the opening of the test split is counted for: start and end are one

    def begin(self, order: list[str], resume: bool) -> ImproveReport | None:
        """Reads or writes the state; returns the report where it is to be resumed and had finished."""
        job = {
            "format": _FORMAT, "program": self.program, "rubric": str(self.rubric), "data": self.data, "order": order, "options": self.options,
            "rollouts": self.rollouts, "sft": self.sft, "grpo": self.grpo, "retain": self.retain, "watch": self.watch,
        }  # fmt: skip
        job["options"] = {key: value for key, value in self.options.items() if key not in CAPS}  # they may be raised
        job = json.loads(json.dumps(job, default=str))
        told = self.folder / STATE
        self.opens_as = f"improve-{self.name}-{new_id()[:12]}"
        if resume and not told.is_file() and (done := finished_report(self._report_file, job)) is not None:
            return done
        if resume and told.is_file():  # an improvement that was never begun begins
            state = json.loads(told.read_text(encoding="utf-8"))
            if state["job"] != job:
                raise ConfigError(f"the improvement {self.name!r} was begun with other settings: resume with the same, or take another name")
            self.job, self.report = job, ImproveReport(None, state["program"], state["model"], state["steps"], notes=state.get("notes", []))
            self.opens_as = state.get("opens_as", self.opens_as)
            self.checked = state.get("checked", False)
            self.made = tuple(state["made"]) if state.get("made") else None
            self.plan = ImprovePlan.of(state["plan"]) if state.get("plan") else None
            return ImproveReport.of(kept) if (kept := self._ended.report(self.shown)) is not None else None
        check_name(self.name, order, self.folder)
        self.job, self.report = job, ImproveReport(None, self.program, self._own_model())
        for adapter in adapter_names(self.name, order):
            shutil.rmtree(adapter_home().parent / "training" / adapter, ignore_errors=True)  # of another one, begun and left
        self._keep()
        return None

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """A run inside is a part of this improvement: what a kill cut off is continued, and what had ended is replayed, not done twice."""
        before, self.part = self.part, f"{len(self.report.steps)}.{name}"
        try:
            with pinned(f"{self._runs}.{self.part}"):
                yield
        finally:
            self.part = before

    @property
    def _runs(self) -> str:
        """What the ids of its runs begin with."""
        return f"improve-{self.opens_as.rpartition('-')[2]}"

    def keep_report(self) -> None:
        """Writes the report, which `resume` gives again where the process was killed before it could be shown, or where no cap was raised."""
        if self.report.stopped is not None:
            self._ended.keep(self.report.to_dict())
        else:
            write_json(self._report_file, {"job": self.job, "report": self.report.to_dict()})
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _caps(self) -> Caps:
        return Caps(calls=self.options.get("max_calls"), tokens=self.options.get("max_tokens"), cost_usd=self.options.get("max_cost_usd"))

    @property
    def _ended(self) -> FinishedRun:
        """The report of an improvement that its caps ended."""
        return FinishedRun(self.folder, caps=self._caps, about=self.job)

    @property
    def _report_file(self) -> Path:
        return self.folder.parent / f"{self.name}.json"

    def _settings(self, kind: type[T], given: Mapping[str, Any], what: str) -> T:
        return made_of(kind, {"model": self.report.model, "seed": self.options.get("seed", 0), **given}, what)

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
        """The options with what is left of the caps, which are of the whole improvement, for the part at work; see `left_of`."""
        if not self._caps.any:
            return dict(options)
        spent, turn = self._spent(), self._turn()
        kept, least = dict[str, float](), dict[str, float]()
        if self.plan is not None and turn is not None:
            gate = self.part.endswith(".gate")
            kept = self.plan.amounts(turn.after if gate else turn.kept)
            least = {} if gate else self.plan.amounts(self.plan.steps[len(self.report.steps)].least)
        return left_of(options, spent, kept=kept, least=least)

    def _turn(self) -> Turn | None:
        """What the step at work may take of the caps; None before the preflight and after the last step."""
        at = len(self.report.steps)
        if self.plan is None or at >= len(self.plan.steps) or self.part.endswith(".test"):
            return None
        return self.plan.turn(at, self._caps, self.plan.left(self._caps, self._spent()), worked=self.part.endswith(".gate"))

    def _spent(self) -> Usage:
        """By all parts but the one at work."""
        return spent_in(home_of(self.store) / "runs", self._runs, but=self.part)

    def check_start(self, order: Sequence[str]) -> None:
        """The preflight, once, before the first step. Where it fails nothing has begun, so nothing is left that would have to be resumed.

        Raises:
            AssayError: see `assay.preflight.preflight`.
        """
        if self.report.steps or self.checked:
            return
        trial = Trial(
            program=self.program, rubric=self.rubric, data=self.data, order=order, rollouts=self.rollouts, watch=self.watch,
            grpo=self._settings(PolicyConfig, self.grpo, "grpo"), retained=[Retained.read(part) for part in self.retain],
        )  # fmt: skip
        try:
            self.report.notes, self.plan = check_start(trial, part=self._part, options=self._start_options, store=self.store, progress=self.shown)
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
        """Those that are still to be done, until a cap is reached."""
        for at, step in list(enumerate(order))[len(self.report.steps) :]:
            self.shown.say(f"step {at + 1} of {len(order)}: {step}")
            try:
                self._take(at, step)
            except BudgetExceeded as cap:
                self.report.stopped = f"step {at + 1} of {len(order)}, {step}: {cap}"
                self.shown.say(f"end of the improvement: {self.report.stopped}; the best so far is reported")
                return

    def _take(self, at: int, step: str) -> None:
        """One step, and whether the gate favours what came of it."""
        before = (self.report.program, self.report.model)
        try:
            if self.made is None:
                with self._part(step):
                    self.made = self._prompts(at) if step == "prompts" else self._weights(at, step)
                self._keep()
        except (DataError, Diverged) as error:
            told: dict[str, Any] = {"step": step, "kept": False, "gate": None, "note": str(error)}
        else:
            told = {"step": step, "program": self.made[0], "model": self.made[1], **self._gate(before, self.made)}
            if told["kept"]:
                self.report.program, self.report.model = self.made
        self.made = None
        self.report.steps.append(told)
        self._keep()
        said = f"gate {interval(told['gate'])}" if told["gate"] else told["note"]
        self.shown.say(f"{step}: {'kept' if told['kept'] else 'not kept'}, {said}")

    def _prompts(self, at: int) -> tuple[str, str]:
        out = self.folder / f"prompts-{at + 1}"
        shutil.rmtree(out, ignore_errors=True)  # made before this improvement was cut off; the replay makes it again
        made = compile_program(
            self.report.program, rubric=self.rubric, data=self.data, out=out, store=self.store, progress=self.shown,
            gate=False, test=False, **{**self._capped(self.options), "model": self.report.model},
        )  # fmt: skip
        stopped = made.outcome.stopped
        if stopped and made.outcome.winner == "baseline" and self.options.get("max_search_calls") is None and not self._later_fits(at):
            raise BudgetExceeded(stopped)
        self._note_cut(at, "prompts", stopped)
        if made.outcome.winner == "baseline":
            raise DataError("nothing beat the program as it is")
        return str(made.artifact), self.report.model

    def _later_fits(self, at: int) -> bool:
        """Whether the caps keep a part for steps after this one: then what ended it is its share, and the improvement continues."""
        turn = self._turn() if self._caps.any else None
        return turn is not None and turn.end > at + 1

    def _weights(self, at: int, step: str) -> tuple[str, str]:
        name = f"{self.name}-{at + 1}"
        if (adapter_home() / name).is_dir():  # made before this improvement was cut off
            return self.report.program, served_as(find_adapter(name))
        begun = (adapter_home().parent / "training" / name / "job.json").is_file()
        if step == "grpo":
            settings = self._settings(PolicyConfig, self.grpo, "grpo")
            kept = {key: value for key, value in self._capped(self.options).items() if key not in ("model", "seed", "optimizer")}
            kept["parameters"] = {key: value for key, value in kept.get("parameters", {}).items() if key != "temperature"}  # that of grpo counts
            given = {key: value for key, value in asdict(settings).items() if key != "algorithm"}
            trained = train(
                self.report.program, rubric=self.rubric, data=self.data, name=name, algorithm=settings.algorithm, store=self.store,
                progress=self.shown, resume=begun, retain=self.retain, watch=self.watch, test=False, **{**kept, **given},
            )  # fmt: skip
            if trained.name is None:
                raise DataError(f"{self.report.model} is not served by name: its adapter is in {trained.path}")
            return self.report.program, trained.name
        rows = self.folder / f"sft-{at + 1}"
        if not begun:
            collected = collect(
                self.report.program, rubric=self.rubric, data=self.data, n=self.rollouts, store=self.store, progress=self.shown,
                **{**self._capped(self.options), "model": self.report.model},
            )  # fmt: skip
            self._note_cut(at, "sft", collected.stopped)
            shutil.rmtree(rows, ignore_errors=True)
            chosen = Selection(programs=(own_name(self.program),))
            export("sft", rows, store=self.store, selection=chosen, gates=_NO_GATES, progress=self.shown)
        config = self._settings(SFTConfig, self.sft, "sft")
        warmed = train_sft(rows, name, config, resume=begun, progress=self.shown)
        if warmed.name is None:
            raise DataError(f"{self.report.model} is not served by name: its adapter is in {warmed.path}")
        return self.report.program, warmed.name

    def _note_cut(self, at: int, step: str, stopped: str | None) -> None:
        """What a step had found when a cap ended its search goes on to the gate."""
        if stopped:
            self.report.notes.append(f"step {at + 1}, {step}, ended early and went on with what it had: {stopped}")

    def _gate(self, before: tuple[str, str], after: tuple[str, str]) -> dict[str, Any]:
        """
        Raises:
            BudgetExceeded: a cap ended it before it had shown a gain: a part of the split decides nothing else.
        """
        found = self._compared("gate", before, after)
        if found.cap is not None and not found.gain.is_gain:
            raise BudgetExceeded(f"{ended_by(found, 'gate')}, and these decide nothing", what=found.cap.what)
        sides = {"before": found.before.report()["score"], "after": found.after.report()["score"]}
        note = ended_by(found, "gate")
        return {"gate": found.gain.to_dict(), "kept": found.gain.is_gain, **sides, **({"note": note} if note else {})}

    def _compared(self, split: str, before: tuple[str, str], after: tuple[str, str]) -> Comparison:
        found, openings = compare_on(
            split, before, after, rubric=self.rubric, data=self.data, part=self._part, store=self.store, progress=self.shown,
            options=lambda: self._capped(self.options), opens_as=self.opens_as, plan=self.plan.report if self.plan is not None else None,
        )  # fmt: skip
        self.report.test_openings = openings
        return found

    # -- the end

    def finish(self, place: Path) -> None:
        """The sealed test, start beside end, and the artifact."""
        report, start = self.report, self._own_model()
        if (report.program, report.model) != (self.program, start):
            self._test((self.program, start), (report.program, report.model))
        config = RunConfig.of(report.program, self.rubric, self.data, None, **{**self.options, "kind": "improve", "model": report.model})
        opened = open_job(config, program=report.program, rubric=load_rubric(self.rubric), progress=self.shown, store=self.store)
        with self._part("end"), opened as job:
            report.artifact = keep_artifact(job, job.student, place, {"steps": report.steps, "test": report.test}, report.as_text(self.name))
        report.program = str(report.artifact)  # what it was on the way goes with its folder

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
