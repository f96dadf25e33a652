"""The users' line around everything that can be improved: `assay.improve`. Prompts, then weights, then prompts again, in whatever order;
each step is kept only where the gate favours it, and the sealed test is reported at the end."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from assay.api import compile as compile_program
from assay.api import evaluate
from assay.deployment.artifact import check_place, is_artifact
from assay.errors import BudgetExceeded, ConfigError, DataError, Diverged
from assay.exporting import collect, export
from assay.jobs import RunConfig, home_of, keep_artifact, load_rubric, open_job
from assay.models.adapters import adapter_home, find_adapter, served_as
from assay.optimizers import Progress, paired_gain
from assay.optimizers.weights import SFTConfig, train_sft
from assay.optimizers.weights.config import PolicyConfig, made_of
from assay.optimizers.weights.page import interval
from assay.optimizers.weights.validation import compared
from assay.optimizers.weights.work import check_free
from assay.traces.selection import Selection
from assay.training import guards_of, independent, train

T = TypeVar("T")

__all__ = ["STEPS", "ImproveReport", "improve"]

STEPS = ("prompts", "sft", "grpo")
CAPS = ("max_calls", "max_tokens", "max_cost_usd")
_FORMAT = 1


@dataclass
class ImproveReport:
    """What `improve` did. `steps` has each step with the gate's decision; `test` compares the start with what was kept."""

    artifact: Path | None
    program: str
    model: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    test: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "artifact": str(self.artifact) if self.artifact else None}


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
        options: the fields of `RunConfig`.
    Raises:
        ConfigError: an unknown step, an adapter of this name, or nothing to resume.
    """
    if unknown := sorted(set(order) - set(STEPS)):
        raise ConfigError(f"order names {unknown}; the steps are {', '.join(STEPS)}")
    if not order:
        raise ConfigError("order is empty: there is nothing to do")
    if (retain or watch) and "grpo" not in order:
        raise ConfigError(f"retain and watch would have no effect: they guard grpo, and the order is {', '.join(order)}")
    folder = home_of(store) / "improve" / name
    shown, place = progress or Progress(), Path(out) if out else home_of(store) / "artifacts" / name
    check_place(place.resolve())
    settings = dict(sft or {}), dict(grpo or {}), list(retain), watch
    run = _Improvement(program, rubric, data, name, folder, store, shown, dict(options), rollouts, *settings)
    run.begin(list(order), resume)
    for at, step in enumerate(order):
        if at >= len(run.report.steps):
            shown.say(f"step {at + 1} of {len(order)}: {step}")
            run.take(at, step)
    run.finish(place)
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

    def begin(self, order: list[str], resume: bool) -> None:
        job = {
            "format": _FORMAT, "program": self.program, "rubric": str(self.rubric), "data": self.data, "order": order, "options": self.options,
            "rollouts": self.rollouts, "sft": self.sft, "grpo": self.grpo, "retain": self.retain, "watch": self.watch,
        }  # fmt: skip
        job["options"] = {key: value for key, value in self.options.items() if key not in CAPS}  # they may be raised
        job = json.loads(json.dumps(job, default=str))
        told = self.folder / "state.json"
        judge, model = self.options.get("judge_model"), self._own_model()
        if {"sft", "grpo"} & set(order):
            independent(self.rubric, judge, model)
        guards_of(self.retain, self.watch, program=self._name(), data=self.data, judge=judge, model=model)
        if self.retain and self.grpo.get("evaluate_every") == 0:
            raise ConfigError("what is to be retained is looked at every evaluate_every steps, and 0 is never: give --grpo a number of steps")
        if resume:
            if not told.is_file():
                raise ConfigError(f"there is no unfinished improvement {self.name!r} to resume in {self.folder.parent}")
            state = json.loads(told.read_text(encoding="utf-8"))
            if state["job"] != job:
                raise ConfigError(f"the improvement {self.name!r} was begun with other settings: resume with the same, or take another name")
            self.job, self.report = job, ImproveReport(None, state["program"], state["model"], state["steps"])
            return
        if told.is_file():
            raise ConfigError(f"there is an unfinished improvement {self.name!r} in {self.folder}: add --resume, or take another name")
        self.job, self.report = job, ImproveReport(None, self.program, self._own_model())
        self._settings(SFTConfig, self.sft, "sft")
        self._settings(PolicyConfig, self.grpo, "grpo")
        for at, step in enumerate(order):
            if step != "prompts":
                check_free(f"{self.name}-{at + 1}")
                shutil.rmtree(adapter_home().parent / "training" / f"{self.name}-{at + 1}", ignore_errors=True)  # of another one, begun and left
        self._keep()

    def _settings(self, kind: type[T], given: Mapping[str, Any], what: str) -> T:
        return made_of(kind, {"model": self.report.model, "seed": self.options.get("seed", 0), **given}, what)

    def _name(self) -> str:
        """Of the program, as its rollouts have it."""
        if is_artifact(self.program):
            return str(json.loads((Path(self.program) / "manifest.json").read_text(encoding="utf-8"))["program"])
        return self.program

    def _own_model(self) -> str:
        if is_artifact(self.program):
            return str(json.loads((Path(self.program) / "manifest.json").read_text(encoding="utf-8"))["model"])
        return str(self.options.get("model") or RunConfig(program="", rubric="", data="").model)

    def _keep(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {"job": self.job, "program": self.report.program, "model": self.report.model, "steps": self.report.steps}
        scratch = self.folder / ".state.json"
        scratch.write_text(json.dumps(state, default=str), encoding="utf-8")
        scratch.replace(self.folder / "state.json")

    # -- steps

    def take(self, at: int, step: str) -> None:
        """One step, and whether the gate favours what came of it."""
        before = (self.report.program, self.report.model)
        try:
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
        made = compile_program(
            self.report.program, rubric=self.rubric, data=self.data, out=out, store=self.store, progress=self.shown,
            **{**self.options, "model": self.report.model},
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
            kept = {key: value for key, value in self.options.items() if key not in ("model", "seed", "optimizer")}
            kept["parameters"] = {key: value for key, value in kept.get("parameters", {}).items() if key != "temperature"}  # that of grpo counts
            given = {key: value for key, value in asdict(settings).items() if key != "algorithm"}
            trained = train(
                self.report.program, rubric=self.rubric, data=self.data, name=name, algorithm=settings.algorithm, store=self.store,
                progress=self.shown, resume=begun, retain=self.retain, watch=self.watch, **{**kept, **given},
            )  # fmt: skip
            if trained.name is None:
                raise DataError(f"{self.report.model} is not served by name: its adapter is in {trained.path}")
            return self.report.program, trained.name
        rows = self.folder / f"sft-{at + 1}"
        if not begun:
            collect(
                self.report.program, rubric=self.rubric, data=self.data, n=self.rollouts, store=self.store, progress=self.shown,
                **{**self.options, "model": self.report.model},
            )  # fmt: skip
            shutil.rmtree(rows, ignore_errors=True)
            export("sft", rows, store=self.store, selection=Selection(programs=(self._name(),)), allow_ungated=True, progress=self.shown)
        config = self._settings(SFTConfig, self.sft, "sft")
        warmed = train_sft(rows, name, config, resume=begun, progress=self.shown)
        if warmed.name is None:
            raise DataError(f"{self.report.model} is not served by name: its adapter is in {warmed.path}")
        return self.report.program, warmed.name

    def _gate(self, before: tuple[str, str], after: tuple[str, str]) -> dict[str, Any]:
        old, new = (self._scores(*one, split="gate") for one in (before, after))
        gain = paired_gain(old.scores, new.scores)
        return {"gate": gain.to_dict(), "kept": gain.is_gain, "before": old.report()["score"], "after": new.report()["score"]}

    def _scores(self, program: str, model: str, *, split: str) -> Any:
        found = evaluate(
            program, rubric=self.rubric, data=self.data, split=split, store=self.store, progress=self.shown, **{**self.options, "model": model}
        )
        if found.stopped:
            raise BudgetExceeded(f"{found.stopped}; a part of the {split} split decides nothing. Raise the cap, and add --resume")
        return found.evaluation

    # -- the end

    def finish(self, place: Path) -> None:
        """The sealed test, start beside end, and the artifact."""
        report, start = self.report, self._own_model()
        if (report.program, report.model) != (self.program, start):
            before = self._scores(self.program, start, split="test")
            report.test = compared(before, self._scores(report.program, report.model, split="test"))
        config = RunConfig.of(report.program, self.rubric, self.data, None, **{**self.options, "kind": "improve", "model": report.model})
        with open_job(config, program=report.program, rubric=load_rubric(self.rubric), progress=self.shown, store=self.store) as job:
            lines = [f"- {told['step']}: {'kept' if told['kept'] else 'not kept'} {told['gate'] or told.get('note', '')}" for told in report.steps]
            text = (
                f"# {self.name}\n\nModel `{report.model}`.\n\n" + "\n".join(lines) + f"\n\nSealed test, paired: {(report.test or {}).get('gain')}\n"
            )
            report.artifact = keep_artifact(job, job.student, place, {"steps": report.steps, "test": report.test}, text)
        report.program = str(report.artifact)  # what it was on the way goes with its folder
