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
from assay.deployment.artifact import check_place
from assay.errors import AssayError, BudgetExceeded, ConfigError, DataError, Diverged
from assay.exporting import collect, export
from assay.given import takes
from assay.improvechecks import Trial, check_start, compare_on, spent_in
from assay.improveorder import STEPS, check_order, own_model, own_name
from assay.jobs import RunConfig, home_of, load_rubric, open_job, pinned
from assay.keeping import keep_artifact
from assay.models.adapters import adapter_home, find_adapter, served_as
from assay.optimizers import Progress
from assay.optimizers.comparison import Comparison, ended_early
from assay.optimizers.weights import SFTConfig, train_sft
from assay.optimizers.weights.config import PolicyConfig, made_of
from assay.optimizers.weights.page import interval
from assay.optimizers.weights.validation import compared
from assay.optimizers.weights.work import check_free
from assay.programs.loading import full_name
from assay.reprs import Shown
from assay.traces.gates import Gates
from assay.traces.records import new_id
from assay.traces.sealing import openings_line
from assay.traces.selection import Selection
from assay.training import Retained, train

T = TypeVar("T")

__all__ = ["STEPS", "ImproveReport", "improve"]

_NO_GATES = Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="off")  # of rows that stay on this machine
CAPS = ("max_calls", "max_tokens", "max_cost_usd")
_WHAT = {"max_calls": "calls", "max_tokens": "tokens", "max_cost_usd": "dollars"}
_FORMAT = 1


@dataclass(repr=False)
class ImproveReport(Shown):
    """What `improve` did. `steps` has each step with the gate's decision; `test` compares the start with what was kept."""

    artifact: Path | None
    program: str
    model: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    test: dict[str, Any] | None = None
    test_openings: dict[str, int] | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "artifact": str(self.artifact) if self.artifact else None}


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

    Args:
        program: a name or an artifact's path; its own model goes on from where it was.
        name: of this improvement: its adapters are NAME-1, NAME-2, and so on. Run it again under another name as data arrives.
        order: steps out of `prompts` (compile), `sft` (collect on train, export the good rollouts that the store has of this program, warm up) and
            `grpo` (policy gradient on train).
        rollouts: of each task that `sft` collects.
        sft, grpo: settings of the two, by field of `SFTConfig` and `PolicyConfig`.
        retain, watch: guards of `grpo`, as in `assay.train`: what must not be forgotten, and a rubric that only looks on.
        resume: goes on with this name's unfinished improvement: finished steps are not run again.
        options: the fields of `RunConfig`; the caps are of all steps together.
    Raises:
        ConfigError: an unknown step, an adapter of this name, or nothing to resume.
    """
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
    run.check_start(order[0])
    for at, step in enumerate(order):
        if at >= len(run.report.steps):
            shown.say(f"step {at + 1} of {len(order)}: {step}")
            run.take(at, step)
    run.finish(place)
    run.keep_report()
    shutil.rmtree(folder, ignore_errors=True)
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
        told = self.folder / "state.json"
        self.opens_as = f"improve-{self.name}-{new_id()[:12]}"
        if resume and not told.is_file() and (done := self._finished(job)) is not None:
            return done
        if resume and told.is_file():  # an improvement that was never begun begins
            state = json.loads(told.read_text(encoding="utf-8"))
            if state["job"] != job:
                raise ConfigError(f"the improvement {self.name!r} was begun with other settings: resume with the same, or take another name")
            self.job, self.report = job, ImproveReport(None, state["program"], state["model"], state["steps"], notes=state.get("notes", []))
            self.opens_as = state.get("opens_as", self.opens_as)
            self.checked = state.get("checked", False)
            return None
        if told.is_file():
            raise ConfigError(f"there is an unfinished improvement {self.name!r} in {self.folder}: add --resume, or take another name")
        self.job, self.report = job, ImproveReport(None, self.program, self._own_model())
        for at, step in enumerate(order):
            if step != "prompts":
                check_free(f"{self.name}-{at + 1}")
                shutil.rmtree(adapter_home().parent / "training" / f"{self.name}-{at + 1}", ignore_errors=True)  # of another one, begun and left
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
        """Writes the report, which `resume` gives again where the process was killed before it could be shown."""
        self._written(self._report_file, {"job": self.job, "report": self.report.to_dict()})

    @property
    def _report_file(self) -> Path:
        return self.folder.parent / f"{self.name}.json"

    def _finished(self, job: Mapping[str, Any]) -> ImproveReport | None:
        """The report of this very improvement, where it had finished."""
        if not self._report_file.is_file():
            return None
        kept = json.loads(self._report_file.read_text(encoding="utf-8"))
        if kept["job"] != job:
            return None
        artifact = kept["report"]["artifact"]
        return ImproveReport(**{**kept["report"], "artifact": Path(artifact) if artifact else None})

    @staticmethod
    def _written(path: Path, what: Mapping[str, Any]) -> None:
        scratch = path.with_name(f".{path.name}")
        scratch.write_text(json.dumps(what, default=str), encoding="utf-8")
        scratch.replace(path)

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
        }
        self._written(self.folder / "state.json", state)

    def _capped(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with what is left of the caps, which are of the whole improvement.

        Raises:
            BudgetExceeded: nothing is left.
        """
        left = dict(options)
        if all(left.get(name) is None for name in CAPS):
            return left
        spent = spent_in(home_of(self.store) / "runs", self._runs, but=self.part)
        for name, used in zip(CAPS, (spent.calls, spent.tokens, spent.cost_usd), strict=True):
            if left.get(name) is not None:
                rest = left[name] - used
                if rest <= 0:
                    raise BudgetExceeded(f"the cap of {left[name]:g} {_WHAT[name]} of the whole improvement is reached", what=_WHAT[name])
                left[name] = rest if name == "max_cost_usd" else int(rest)
        return left

    def check_start(self, step: str) -> None:
        """The preflight, once, before the first step. Where it fails nothing has begun, so nothing is left that would have to be resumed.

        Raises:
            AssayError: see `assay.preflight.preflight`.
        """
        if self.report.steps or self.checked:
            return
        kept = [Retained.read(part) for part in self.retain]
        trial = Trial(
            program=self.program, rubric=self.rubric, data=self.data, split="val" if step == "prompts" else "train", watch=self.watch, retained=kept
        )
        try:
            self.report.notes = check_start(trial, part=self._part, options=self._start_options, store=self.store, progress=self.shown)
        except AssayError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.checked = True
        self._keep()

    def _start_options(self) -> dict[str, Any]:
        return {**self._capped(self.options), "model": self._own_model()}

    # -- steps

    def take(self, at: int, step: str) -> None:
        """One step, and whether the gate favours what came of it."""
        before = (self.report.program, self.report.model)
        try:
            with self._part(step):
                after = self._prompts(at) if step == "prompts" else self._weights(at, step)
        except (DataError, Diverged) as error:
            told: dict[str, Any] = {"step": step, "kept": False, "gate": None, "note": str(error)}
        else:
            told = {"step": step, "program": after[0], "model": after[1], **self._gate(before, after)}
            if told["kept"]:
                self.report.program, self.report.model = after
        self.report.steps.append(told)
        self._keep()
        said = f"gate {interval(told['gate'])}" if told["gate"] else told["note"]
        self.shown.say(f"{step}: {'kept' if told['kept'] else 'not kept'}, {said}")

    def _prompts(self, at: int) -> tuple[str, str]:
        out = self.folder / f"prompts-{at + 1}"
        shutil.rmtree(out, ignore_errors=True)  # made before this improvement was cut off; the replay makes it again
        made = compile_program(
            self.report.program, rubric=self.rubric, data=self.data, out=out, store=self.store, progress=self.shown,
            test=False, **{**self._capped(self.options), "model": self.report.model},
        )  # fmt: skip
        if made.outcome.winner == "baseline":
            raise DataError("nothing beat the program as it is")
        return str(made.artifact), self.report.model

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
            collect(
                self.report.program, rubric=self.rubric, data=self.data, n=self.rollouts, store=self.store, progress=self.shown,
                **{**self._capped(self.options), "model": self.report.model},
            )  # fmt: skip
            shutil.rmtree(rows, ignore_errors=True)
            chosen = Selection(programs=(own_name(self.program),))
            export("sft", rows, store=self.store, selection=chosen, gates=_NO_GATES, progress=self.shown)
        config = self._settings(SFTConfig, self.sft, "sft")
        warmed = train_sft(rows, name, config, resume=begun, progress=self.shown)
        if warmed.name is None:
            raise DataError(f"{self.report.model} is not served by name: its adapter is in {warmed.path}")
        return self.report.program, warmed.name

    def _gate(self, before: tuple[str, str], after: tuple[str, str]) -> dict[str, Any]:
        found = self._compared("gate", before, after)
        sides = {"before": found.before.report()["score"], "after": found.after.report()["score"]}
        note = ended_early(found, "gate")
        return {"gate": found.gain.to_dict(), "kept": found.gain.is_gain, **sides, **({"note": note} if note else {})}

    def _compared(self, split: str, before: tuple[str, str], after: tuple[str, str]) -> Comparison:
        found, openings = compare_on(
            split, before, after, rubric=self.rubric, data=self.data, part=self._part, store=self.store, progress=self.shown,
            options=lambda: self._capped(self.options), opens_as=self.opens_as,
        )  # fmt: skip
        self.report.test_openings = openings
        return found

    # -- the end

    def finish(self, place: Path) -> None:
        """The sealed test, start beside end, and the artifact."""
        report, start = self.report, self._own_model()
        if (report.program, report.model) != (self.program, start):
            found = self._compared("test", (self.program, start), (report.program, report.model))
            report.test = compared(found.before, found.after, level=found.level, guarded=found.ended != "")
            report.notes += [note] if (note := ended_early(found, "test")) else []
        config = RunConfig.of(report.program, self.rubric, self.data, None, **{**self.options, "kind": "improve", "model": report.model})
        opened = open_job(config, program=report.program, rubric=load_rubric(self.rubric), progress=self.shown, store=self.store)
        with self._part("end"), opened as job:
            lines = [f"- {told['step']}: {'kept' if told['kept'] else 'not kept'} {told['gate'] or told.get('note', '')}" for told in report.steps]
            gain = (report.test or {}).get("gain")
            opened_line = openings_line(report.test_openings)
            parts = [f"# {self.name}", f"Model `{report.model}`.", "\n".join(lines), f"Sealed test, paired: {gain}", opened_line]
            text = "\n\n".join(parts) + "\n"
            report.artifact = keep_artifact(job, job.student, place, {"steps": report.steps, "test": report.test}, text)
        report.program = str(report.artifact)  # what it was on the way goes with its folder
