"""Public API for `assay improve`.

Alternates prompt compilation and weight training; keeps a step only if it passes the gate. Every part (preflight, step,
side of a gate) is a run of the store under an id of its own, so that a killed improvement resumes it or replays it.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from assay.commands.collect import Collect, collect
from assay.commands.compile import Compile
from assay.commands.compile import compile as compile_program
from assay.commands.export import export
from assay.commands.train import TrainRL, train
from assay.commands.train_sft import train_sft
from assay.datasets import SPLITS
from assay.datasets.rows import NO_ROWS
from assay.deployment.artifact import is_artifact
from assay.errors import AssayError, BudgetExceeded, ConfigError, DataError, Diverged
from assay.evaluation import Progress, default_progress
from assay.evaluation.comparison import Comparison, compare, losses_behind_gain, what_would_decide
from assay.evaluation.statistics import FEWEST
from assay.models import Caps, Meter
from assay.models.lora.adapters import adapter_home, find_adapter, served_as
from assay.models.meter import Usage
from assay.optimizers.budget import (
    CAPS,
    ImprovePlan,
    Turn,
    announce_splits,
    decision_tasks,
    forecast_pair,
    plan_report,
    plan_steps,
    remaining_caps,
    search_runs,
    spent_in,
)
from assay.optimizers.finetuning.comparison import compared
from assay.optimizers.finetuning.run_folder import check_free, remove_training, training_folder
from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings, settings_from
from assay.programs.loading import full_name
from assay.reports.markdown import models_text, with_interval
from assay.reports.training import interval
from assay.rubrics import Rubric
from assay.rubrics.loading import RubricSource, importable_name
from assay.runs.arguments import program_settings, resolve_model
from assay.runs.artifacts import keep_artifact
from assay.runs.finished import FinishedRun
from assay.runs.groups import PromptJob
from assay.runs.independence import independent
from assay.runs.jobs import Job, open_job
from assay.runs.loading import load_rubric
from assay.runs.opening import artifact_place, home_of, pinned
from assay.runs.policy_training import Retained, guards_of
from assay.runs.preflight import checked, preflight, require_predictors
from assay.runs.settings import DEFAULT_MODEL, ImproveSettings
from assay.runs.settings.options import ImproveOptions
from assay.runs.unused import settings_of_another_job, unused_settings
from assay.sources.artifact_files import read_manifest
from assay.sources.trust import trusts
from assay.support.formats import check_format
from assay.support.job_folders import claim_folder, remove_folder
from assay.support.keywords import takes
from assay.support.names import place_in
from assay.support.numbers import counted
from assay.support.options import options_of
from assay.support.places import write_whole
from assay.support.reprs import ReportRepr
from assay.support.scrubbing import results
from assay.support.settings import nearest, settings_of
from assay.support.values import json_text, json_value
from assay.traces.export.settings import Gates, Selection
from assay.traces.records import new_id
from assay.traces.store.sealing import openings_line

# -- The steps of an improvement: checks of their settings, models and judges, and the runs that they request.
#
# `assay improve` and its estimate (`--dry-run`) share these checks, so that neither accepts what the other refuses.
# Opens nothing and calls no model.


STATE = "state.json"  # of an unfinished improvement, in its folder
STEPS = ("prompts", "sft", "grpo")


def check_improvement(config: ImproveSettings, *, model: str | None, monitor: str | Path | None = None) -> None:
    """Refuses an improvement that would fail at a later step.

    Args:
        model: the one that was named; None where the program's own or the default is meant.
        monitor: the monitor rubric, where it is not `config.monitor`.
    Raises:
        ConfigError: an unknown step or setting, a model that cannot be trained, or a judge that is the trained model.
    """
    order, monitor = config.order, monitor or config.monitor
    if unknown := sorted(set(order) - set(STEPS)):
        hint = f". Did you mean {near!r}?" if (near := nearest(unknown[0], STEPS)) else ""
        raise ConfigError(f"order={unknown[0]!r} is not a step; the steps are {', '.join(STEPS)}{hint}")
    if not order:
        raise ConfigError(f"order is empty: name at least one of the steps {', '.join(STEPS)}", flag="--order")
    if (config.retention or monitor) and "grpo" not in order:
        raise ConfigError(
            f"retention and monitor would have no effect: they guard grpo, and the order is {', '.join(order)}"
        )
    sft, grpo = config.sft or {}, config.grpo or {}
    settings_from(SFTSettings, sft, "sft")
    if settings_from(PolicySettings, grpo, "grpo").evaluate_every == 0 and config.retention:
        raise ConfigError(
            "retention tasks are evaluated every evaluate_every steps, and evaluate_every=0 evaluates none: give "
            "grpo={'evaluate_every': STEPS}"
        )
    start_model = start_model_of(config.program, model)
    for step, trained in _trained(order, start_model, {"sft": sft, "grpo": grpo}):
        _check_trainable(step, trained)
        judge = config.judge_model or start_model
        independent(config.rubric, judge, trained)
        guards_of(
            config.retention,
            monitor,
            program=program_name(config.program),
            data=config.data,
            judge=judge,
            model=trained,
        )


def steps_of(job: Job, order: Sequence[str], *, rollouts: int, grpo: PolicySettings, retained: int) -> ImprovePlan:
    """The runs of the steps, of their gates and of the sealed test, without caps.

    Args:
        rollouts: of each train task, collected by `sft`.
        retained: number of retention tasks of `grpo`.
    """
    sizes, cap = job.splits.sizes(), None
    if isinstance(job.config, ImproveSettings | PromptJob):
        cap = job.config.max_search_calls
    pair = forecast_pair(job.recorded.program, job.session)
    return ImprovePlan(
        report=plan_report(job.splits, Meter(), job.config.decisions, pair=pair),
        steps=plan_steps(
            order, sizes, search=search_runs(cap, pair.calls / 2, sizes["val"]), rollouts=rollouts, grpo=grpo,
            retained=retained,
        ),
    )  # fmt: skip


def check_name(name: str, order: Sequence[str], folder: Path) -> None:
    """Refuses to begin an improvement under a name that is taken.

    Args:
        folder: of the improvement of this name, in which an unfinished one is kept.
    Raises:
        ConfigError: there is an unfinished improvement, or an adapter, of this name.
    """
    if (folder / STATE).is_file():
        raise ConfigError(
            f"there is an unfinished improvement {name!r} in {folder}: add resume=True, or take another name"
        )
    for adapter in adapter_names(name, order):
        check_free(adapter)


def adapter_names(name: str, order: Sequence[str]) -> list[str]:
    """Names of the adapters that the steps of an improvement create."""
    return [f"{name}-{number}" for number, step in enumerate(order, start=1) if step != "prompts"]


def start_model_of(program: str, model: str | None) -> str:
    """The first model of an improvement: that of the artifact, the named one, or the default."""
    return str(read_manifest(Path(program))["model"]) if is_artifact(program) else str(model or DEFAULT_MODEL)


def program_name(program: str) -> str:
    """Name of the program in its rollouts."""
    return str(read_manifest(Path(program))["program"]) if is_artifact(program) else program


def _trained(order: Sequence[str], model: str, settings: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each training step and the model it trains, if all steps before it are kept."""
    for step in order:
        if step != "prompts":
            model = str(settings[step].get("model", model))
            yield step, model


def _check_trainable(step: str, model: str) -> None:
    """Raises if the model is not `embedded/NAME`; only those are served by name for the comparison afterwards."""
    if model.startswith("embedded/"):
        return
    raise ConfigError(
        f"{step} cannot train {model!r}: improve trains embedded models (embedded/NAME), which it can serve. Improve "
        "the prompts alone "
        f"(order=['prompts']), or name the model to train ({step}={{'model': 'embedded/NAME'}})",
        flag=f"--order prompts, --{step} model=embedded/NAME",
    )


# -- Run.


_FORMAT = 4  # of the state of an unfinished improvement
_NO_GATES = Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="off")  # of rows that stay on this machine
_IMPROVE_ONLY = settings_of(ImproveSettings).keys() - options_of(Compile).keys()  # what the steps do not share


class _Preflight(Compile):
    """Settings of the parts that run no step."""

    kind = "improve"


class _Side(Compile):
    """Settings of a side of gate or test."""

    kind = "evaluate"


_KINDS: dict[str, type[Compile]] = {"improve": _Preflight, "evaluate": _Side}


@dataclass(repr=False)
class ImproveReport(ReportRepr):
    """What `improve` returns.

    `steps`: each step with the decision of its gate, and `converged`: whether its policy gradient converged; False if
    a training diverged, None for other steps and where too few optimizer steps were made to tell. `test`: comparison
    of start and result on the sealed test. `stopped`: the cap that ended the improvement early. `models`: LM calls,
    tokens and dollars of all steps by model.
    """

    artifact: Path | None
    program: str
    model: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    test: dict[str, Any] | None = None
    test_openings: dict[str, int] | None = None
    notes: list[str] = field(default_factory=list)
    stopped: str | None = None
    data: dict[str, Any] = field(default_factory=lambda: NO_ROWS.to_dict())
    models: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "artifact": str(self.artifact) if self.artifact else None}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "ImproveReport":
        """From the output of `to_dict`."""
        return cls(**{**stored, "artifact": Path(stored["artifact"]) if stored["artifact"] else None})

    def as_text(self, name: str, words: Callable[[str], str] = str) -> str:
        """The report of the improvement `name` as Markdown. `words` changes notes, and why it was stopped."""
        lines = [
            "; ".join(
                [
                    f"- {step['step']}: {'kept' if step['kept'] else 'not kept'}",
                    *([f"gate {with_interval(step['gate'])}"] if step["gate"] else []),
                    *([words(str(step["note"]))] if step.get("note") else []),
                ]
            )
            for step in self.steps
        ]
        cut = [f"Stopped early: {words(self.stopped)}."] if self.stopped else []
        gain = (self.test or {}).get("gain")
        called = [f"LM calls by model: {text}."] if (text := models_text(asdict(self))) else []
        parts = [
            f"# {name}",
            f"Model `{self.model}`.",
            *cut,
            "\n".join(lines),
            f"Sealed test, paired: {'not run' if gain is None else with_interval(gain)}.",
            openings_line(self.test_openings),
            *called,
        ]
        return "\n\n".join(parts) + "\n"


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
    watched = {} if monitor is None else {"monitor": importable_name(monitor)}
    config = program_settings(ImproveSettings, full_name(str(program)), rubric, data, None, {**settings, **watched})
    check_improvement(config, model=settings.get("model"))
    folder, progress = place_in(home_of(store) / "improve", name), default_progress(progress)
    place = artifact_place(store, out, name, resume=resume)
    shared = {key: value for key, value in settings.items() if key not in _IMPROVE_ONLY}
    run = _Improvement(config, rubric, watched.get("monitor"), shared, name, folder, store, progress, words)
    if (finished := run.begin(resume)) is not None:
        return finished
    run.check_start()
    run.steps()
    run.finish(place)
    return run.report


class _Improvement:
    """A running improvement. `report` has the best program and model so far.

    Args:
        options: the settings that its steps share, with the caps of all of them.
    """

    def __init__(
        self,
        config: ImproveSettings,
        rubric: str | Path,
        monitor: str | Path | None,
        options: dict[str, Any],
        name: str,
        folder: Path,
        store: str | Path | None,
        progress: Progress,
        words: Callable[[str], str],
    ) -> None:
        self.config, self.rubric, self.monitor, self.options = config, rubric, monitor, options
        self.name, self.folder, self.store, self.progress, self.words = name, folder, store, progress, words
        self.order = list(config.order)
        self.start = (config.program, start_model_of(config.program, options.get("model")))
        self.caps = Caps(**{amount: options.get(cap) for cap, amount in CAPS.items()})
        self.report = ImproveReport(None, *self.start)
        self.job = json_value(
            {
                "format": _FORMAT, "program": config.program, "rubric": str(rubric), "data": config.data,
                "order": self.order, "rollouts": config.rollouts, "sft": config.sft, "grpo": config.grpo,
                "retention": list(config.retention), "monitor": monitor,
                # without the caps, which may be raised on resume
                "options": {key: value for key, value in options.items() if key not in CAPS},
            },
            placeholders=True,
        )  # fmt: skip
        # the job that openings of the test are counted for; both sides of a comparison count once
        self.opens_as = f"improve-{name}-{new_id()[:12]}"
        self.plan: ImprovePlan | None = None  # None before the preflight
        self.candidate: tuple[str, str] | None = None  # program and model of the current step, until its gate
        self.part = ""  # id of the current part
        self.owner = f"improvement {name}"  # by which its folder is its own
        self.report_file = place_in(folder.parent, name, ending=".json")  # after its end, without a folder

    @property
    def best(self) -> tuple[str, str]:
        return self.report.program, self.report.model

    # -- state

    def begin(self, resume: bool) -> ImproveReport | None:
        """Reads the state to resume from, or writes a new one. Returns the report of a finished improvement."""
        state_file = self.folder / STATE
        if resume and not state_file.is_file() and self.report_file.is_file():
            stored = json.loads(self.report_file.read_text(encoding="utf-8"))
            if stored["job"] == self.job:
                return ImproveReport.of(stored["report"])
        if resume and state_file.is_file():  # without a state there is nothing to resume, and a new one begins
            self._remember(json.loads(state_file.read_text(encoding="utf-8")))
            ended = self._ended.report(self.progress)
            return ImproveReport.of(ended) if ended is not None else None
        check_name(self.name, self.order, self.folder)
        for adapter in adapter_names(self.name, self.order):
            remove_training(adapter)  # an abandoned one of an earlier improvement with the same name
        claim_folder(self.folder, self.owner)
        self._keep()
        return None

    def _remember(self, state: Mapping[str, Any]) -> None:
        check_format(
            f"the improvement {self.name!r}", state["job"]["format"], _FORMAT, remake="take another name",
            error=ConfigError,
        )  # fmt: skip
        if state["job"] != self.job:
            raise ConfigError(
                f"the improvement {self.name!r} was begun with other settings: resume with the same, or take another "
                "name"
            )
        self.report, self.opens_as = ImproveReport.of(state["report"]), state["opens_as"]
        self.candidate = tuple(state["candidate"]) if state["candidate"] else None
        self.plan = ImprovePlan.of(state["plan"]) if state["plan"] else None

    def _keep(self) -> None:
        state = {
            "job": self.job, "report": self.report.to_dict(), "opens_as": self.opens_as, "candidate": self.candidate,
            "plan": asdict(self.plan) if self.plan is not None else None,
        }  # fmt: skip
        write_whole(self.folder / STATE, json_text(results(state)))

    @property
    def _ended(self) -> FinishedRun:
        """Report of an improvement that ended at a cap."""
        return FinishedRun(self.folder, caps=self.caps, about=self.job)

    @property
    def _runs(self) -> str:
        """Common prefix of the ids of its runs."""
        return f"improve-{self.opens_as.rpartition('-')[2]}"

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Makes runs opened inside parts of this improvement: interrupted ones resume, finished ones are replayed."""
        before, self.part = self.part, f"{len(self.report.steps)}.{name}"
        try:
            with pinned(f"{self._runs}.{self.part}"):
                yield
        finally:
            self.part = before

    # -- caps

    def _capped(self) -> dict[str, Any]:
        """The options with the caps reduced to what the current part may use; see `remaining_caps`."""
        if not self.caps.any:
            return dict(self.options)
        reserved, least = dict[str, float](), dict[str, float]()
        if (turn := self._turn()) is not None and self.plan is not None:
            gate = self.part.endswith(".gate")
            reserved = self.plan.amounts(turn.after if gate else turn.reserved)
            least = {} if gate else self.plan.amounts(self.plan.steps[len(self.report.steps)].least)
        return remaining_caps(self.options, self._spent(), reserved=reserved, least=least)

    def _turn(self) -> Turn | None:
        """What the current step may use of the caps; None before the preflight and after the last step."""
        at = len(self.report.steps)
        if self.plan is None or at >= len(self.plan.steps) or self.part.endswith(".test"):
            return None
        available = self.plan.remaining(self.caps, self._spent())
        return self.plan.turn(at, self.caps, available, worked=self.part.endswith(".gate"))

    def _spent(self) -> Usage:
        """Usage of all parts except the current one."""
        return spent_in(home_of(self.store) / "runs", self._runs, but=self.part)

    def _options_for(self, names: Collection[str]) -> dict[str, Any]:
        """Options for a step, with the remaining caps; only those that it has."""
        return {name: value for name, value in self._capped().items() if name in names}

    def _trained(self, kind: type[Any], values: Mapping[str, Any] | None, argument: str) -> Any:
        """The settings of a training step."""
        seed = self.options.get("seed", 0)
        return settings_from(kind, {"model": self.report.model, "seed": seed, **(values or {})}, argument)

    # -- preflight

    def check_start(self) -> None:
        """Runs the program on one task and asks each judge once, those of monitor and retention tasks too.

        If it fails, the folder of the improvement is removed, as there is nothing to resume.

        Raises:
            AssayError: see `assay.runs.preflight.preflight`; settings with `preflight=False` try nothing.
        """
        if self.report.steps or self.plan is not None:
            return
        retained = [Retained.read(text) for text in self.config.retention]
        try:
            plan = self._check_program(retained)
            for at, task in enumerate(retained if self.options.get("preflight", True) else ()):
                self._check_retained(at, task)
        except AssayError:
            remove_folder(self.folder, self.owner)
            raise
        for step, options in (("sft", self.config.sft), ("grpo", self.config.grpo)):
            if options and step not in self.order:
                self.report.notes.append(
                    f"{step}={dict(options)!r} has no effect: order={','.join(self.order)!r} has no such step"
                )
        for line in plan.lines(self.caps):
            self.progress.say(line)
        self.plan = plan
        self._keep()

    @contextmanager
    def _opened(
        self, kind: str, program: str, rubric: str | Path, data: str, options: Mapping[str, Any], **more: Any
    ) -> Iterator[Job]:
        """A job with the settings of a compile, under the part's own kind of run."""
        config = program_settings(_KINDS[kind], program, rubric, data, None, options)
        with open_job(
            config, program=program, rubric=load_rubric(rubric), progress=self.progress, store=self.store, **more
        ) as job:
            yield job

    def _check_program(self, retained: Sequence[Retained]) -> ImprovePlan:
        """Notes what is said of data and settings, and returns the runs of steps, gates and test without caps."""
        program, model = self.start
        with (
            self._part("preflight"),
            self._opened(
                "improve", program, self.rubric, self.config.data, {**self._capped(), "model": model}, need=SPLITS
            ) as job,
        ):
            monitor = None if self.monitor is None else job.additional_rubric(self.monitor)
            guards = [*([] if monitor is None else [monitor]), *(job.additional_rubric(t.rubric) for t in retained)]
            self.report.notes = [
                *announce_splits(job.splits, self.progress),
                *job.warnings,
                *unused_settings(job, rubrics=guards, order=self.order),
            ]
            self.report.data = job.rows.to_dict()
            if "prompts" in self.order:
                require_predictors(job)
            split = "val" if self.order[0] == "prompts" else "train"  # which the first step runs
            checked(job, getattr(job.splits, split), split=split)
            self._check_monitor(job, monitor, split)
            grpo = self._trained(PolicySettings, self.config.grpo, "grpo")
            return steps_of(job, self.order, rollouts=self.config.rollouts, grpo=grpo, retained=len(retained))

    def _check_monitor(self, job: Job, monitor: Rubric | None, split: str) -> None:
        """Asks the judges of the monitor rubric once; the program's run comes from the response cache."""
        if monitor is not None and monitor.needs_judge and job.config.preflight:
            session, tasks = replace(job.session, rubric=monitor), getattr(job.splits, split)
            preflight(session, job.recorded, tasks, split=split, max_cost_usd=job.config.max_cost_usd)

    def _check_retained(self, at: int, task: Retained) -> None:
        with self._part(f"preflight-{at + 1}"):
            # a retention task has its own program, to whose parameters and fields these settings do not belong
            options = {**self._capped(), "model": self.start[1]}
            settings = {key: options[key] for key in options if key not in ("parameters", "sizes", "rename")}
            need = ("val", "test")
            with self._opened("improve", task.program, task.rubric, task.data, settings, need=need) as job:
                checked(job, job.splits.val, split="val")

    # -- steps

    def steps(self) -> None:
        """Runs the remaining steps until a cap is reached."""
        for at, step in list(enumerate(self.order))[len(self.report.steps) :]:
            self.progress.say(f"step {at + 1} of {len(self.order)}: {step}")
            try:
                self._take(at, step)
            except BudgetExceeded as cap:
                self.report.stopped = f"step {at + 1} of {len(self.order)}, {step}: {cap}"
                self.progress.say(f"end of the improvement: {self.report.stopped}; the best so far is reported")
                return

    def _take(self, at: int, step: str) -> None:
        """Runs one step and its gate; keeps the result if it passes."""
        try:
            if self.candidate is None:
                with self._part(step), settings_of_another_job():
                    self.candidate = {"prompts": self._prompts, "sft": self._sft, "grpo": self._grpo}[step](at)
                self._keep()
        except (DataError, Diverged) as error:
            converged = False if isinstance(error, Diverged) else None
            row: dict[str, Any] = {
                "step": step, "kept": False, "gate": None, "note": str(error), "converged": converged
            }  # fmt: skip
        else:
            program, model = self.candidate
            converged = find_adapter(f"{self.name}-{at + 1}").made.get("converged") if step == "grpo" else None
            row = {
                "step": step, "program": program, "model": model, "converged": converged, **self._gate(self.candidate)
            }  # fmt: skip
            if row["kept"]:
                self.report.program, self.report.model = program, model
        self.candidate = None
        self.report.steps.append(row)
        self._keep()
        reason = f"gate {interval(row['gate'])}" if row["gate"] else row["note"]
        self.progress.say(f"{step}: {'kept' if row['kept'] else 'not kept'}, {reason}")

    def _prompts(self, at: int) -> tuple[str, str]:
        out = self.folder / f"prompts-{at + 1}"
        remove_folder(out, self.owner)  # of an interrupted process; the replay makes it again
        report = compile_program(
            self.report.program, rubric=self.rubric, data=self.config.data, out=out, store=self.store,
            progress=self.progress, gate=False, test=False, words=self.words,
            **{**self._capped(), "model": self.report.model},
        )  # fmt: skip
        stopped, unchanged = report.stopped, report.winner == "baseline"
        if stopped and unchanged and self.options.get("max_search_calls") is None:
            turn = self._turn() if self.caps.any else None
            if turn is None or turn.end <= at + 1:  # otherwise the step ended at its own share: a later one still fits
                raise BudgetExceeded(stopped)
        self._note_cut(at, "prompts", stopped)
        if unchanged:
            raise DataError("; ".join(report.notes))
        return str(report.artifact), self.report.model

    def _sft(self, at: int) -> tuple[str, str]:
        def trained(name: str, begun: bool) -> Any:
            rows = self.folder / f"sft-{at + 1}"
            if not begun:
                collected = collect(
                    self.report.program, rubric=self.rubric, data=self.config.data, n=self.config.rollouts,
                    store=self.store, progress=self.progress,
                    **{**self._options_for(options_of(Collect)), "model": self.report.model},
                )  # fmt: skip
                self._note_cut(at, "sft", collected.stopped)
                remove_folder(rows, self.owner)
                chosen = Selection(programs=(program_name(self.config.program),))
                export("sft", rows, store=self.store, selection=chosen, gates=_NO_GATES, progress=self.progress)
            config = self._trained(SFTSettings, self.config.sft, "sft")
            return train_sft(rows, name=name, store=self.store, resume=begun, progress=self.progress, **asdict(config))

        return self._weights(at, trained)

    def _grpo(self, at: int) -> tuple[str, str]:
        def trained(name: str, begun: bool) -> Any:
            settings = asdict(self._trained(PolicySettings, self.config.grpo, "grpo"))
            options = {
                key: value
                for key, value in self._options_for(options_of(TrainRL)).items()
                if key not in ("model", "seed", "cache")
            }
            parameters = dict(options.get("parameters", {}))
            parameters.pop("temperature", None)  # `grpo` has its own
            return train(
                self.report.program, rubric=self.rubric, data=self.config.data, name=name, store=self.store,
                progress=self.progress, resume=begun, retention=list(self.config.retention), monitor=self.monitor,
                test=False, words=self.words, **{**options, "parameters": parameters, **settings},
            )  # fmt: skip

        return self._weights(at, trained)

    def _weights(self, at: int, trained: Callable[[str, bool], Any]) -> tuple[str, str]:
        """The program with the adapter of this step; `trained` makes the adapter, from its checkpoint if it has one."""
        name = f"{self.name}-{at + 1}"
        if (adapter_home() / name).is_dir():  # made by an interrupted process
            return self.report.program, served_as(find_adapter(name))
        report = trained(name, (training_folder(name) / "job.json").is_file())
        if report.name is None:
            raise DataError(f"{self.report.model} is not served by name: its adapter is in {report.path}")
        return self.report.program, report.name

    def _note_cut(self, at: int, step: str, stopped: str | None) -> None:
        """Notes that a cap ended the step early; its result so far goes to the gate."""
        if stopped:
            self.report.notes.append(
                f"step {at + 1}, {step}, ended early; its result so far goes to the gate: {stopped}"
            )

    # -- gate and test

    def _gate(self, after: tuple[str, str]) -> dict[str, Any]:
        """Compares the best so far and the result of a step on the gate split.

        Raises:
            BudgetExceeded: a cap ended it before it showed a gain; part of the split is not a basis for a decision.
        """
        result = self._compared("gate", self.best, after)
        if result.cap is not None and not result.gain.is_gain:
            raise BudgetExceeded(
                f"{result.end_of('gate')}, and a part of the split is not enough for a decision", what=result.cap.what
            )
        notes = [note] if (note := result.end_of("gate")) else []
        if not result.gain.is_gain:
            notes.append(what_would_decide(result.before, result.after, "gate"))
        return {
            "gate": result.gain.to_dict(),
            "kept": result.gain.is_gain,
            "before": result.before.report()["score"],
            "after": result.after.report()["score"],
            **({"note": "; ".join(notes)} if notes else {}),
        }

    def _compared(self, split: str, before: tuple[str, str], after: tuple[str, str]) -> Comparison:
        """Compares two programs, each with its model, on as many tasks of gate or test as their common caps allow.

        Ends early once the sequential test has decided, as the gate of a compile does. Test is opened once, for both.

        Raises:
            BudgetExceeded: a cap was reached before any pair was complete.
            ModelError: one of them could not be scored at all.
        """
        jobs = list[Job]()
        with self._part(split), ExitStack() as opened:
            options = self._capped()
            for side, (program, model) in (("before", before), ("after", after)):
                with self._part(f"{split}-{side}"):
                    job = self._opened(
                        "evaluate", program, self.rubric, self.config.data, {**options, "model": model},
                        need=(split,), opens_as=self.opens_as,
                    )  # fmt: skip
                    jobs.append(opened.enter_context(job))
            comparison = self._compare_jobs(jobs[0], jobs[1], split)
        self.report.test_openings = jobs[0].openings.to_dict() if jobs[0].openings is not None else None
        return comparison

    def _compare_jobs(self, before: Job, after: Job, split: str) -> Comparison:
        first, second = before.session, after.session
        # each side has a meter of its own, and the caps are of both together
        first.meter.share_caps_with(second.meter)
        second.meter.share_caps_with(first.meter)
        decisions, fitting = before.config.decisions, self._fitting(split, first.meter)
        if split == "test":
            before.splits.unseal()
        planned = decision_tasks(before.splits, split, decisions)
        tasks = planned[:fitting]
        comparison = compare(
            before.recorded, after.recorded, tasks, first, after_session=second, split=split,
            names=("before", "after"), rule=decisions.rule(len(tasks)),
        )  # fmt: skip
        if len(tasks) < len(planned) and not comparison.ended:
            cap = BudgetExceeded(f"the caps leave {counted(len(tasks), 'tasks')} for {split}")
            comparison = replace(comparison, planned=len(planned), cap=cap)
        return comparison

    def _fitting(self, split: str, meter: Meter) -> int | None:
        """Tasks of gate or test that the caps allow; None before there is a plan.

        Raises:
            BudgetExceeded: none. The test is not opened then.
        """
        if self.plan is None:
            return None
        report = self.plan.report
        alone = replace(report, test=0, tested=False) if split == "gate" else replace(report, gate=0)
        if (fitting := getattr(alone.within(meter), split)) < 1:
            raise BudgetExceeded(f"the caps leave nothing for {split}")
        return int(fitting)

    def finish(self, place: Path) -> None:
        """Compares start and end on the sealed test, writes the artifact, and keeps the report.

        `resume` returns the report if the process was killed before printing it, or if no cap was raised.
        """
        report = self.report
        if self.best != self.start:
            self._test()
        options = {**self.options, "model": report.model}
        with (
            self._part("end"),
            self._opened("improve", report.program, self.rubric, self.config.data, options) as job,
        ):
            report.models = job.models(self._runs)["models"]
            kept = {"steps": report.steps, "test": report.test}
            report.artifact = keep_artifact(job, job.recorded, place, kept, report.as_text(self.name, self.words))
        report.program = str(report.artifact)  # intermediate versions are deleted with the folder
        if report.stopped is not None:
            self._ended.keep(report.to_dict())
        else:
            write_whole(self.report_file, json_text(results({"job": self.job, "report": report.to_dict()})))
            remove_folder(self.folder, self.owner)

    def _test(self) -> None:
        report = self.report
        try:
            comparison = self._compared("test", self.start, self.best)
        except BudgetExceeded as cap:
            report.stopped = report.stopped or f"sealed test: {cap}"
            return
        report.test = compared(comparison.before, comparison.after, level=comparison.gain.level)
        note = comparison.end_of("test")
        report.notes += [*([note] if note else []), *losses_behind_gain(comparison, "test")]
        if comparison.cap is not None and comparison.gain.n < FEWEST:
            report.stopped = report.stopped or note
