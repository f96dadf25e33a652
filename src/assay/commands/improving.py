"""The steps of an improvement: their checks, their runs, and the gates that keep them.

Every part (preflight, step, side of a gate) is a run of the store under an id of its own, so that a killed improvement
resumes it or replays it.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from assay.commands.collect import Collect, collect
from assay.commands.compile import compile as compile_program
from assay.commands.export import export
from assay.commands.improve_settings import ImproveReport, ImproveSettings
from assay.commands.train import TrainRL, train
from assay.commands.train_sft import train_sft
from assay.errors import AssayError, BudgetExceeded, ConfigError, DataError, Diverged
from assay.evaluation.comparison import Comparison, compare, losses_behind_gain, what_would_decide
from assay.evaluation.statistics import FEWEST
from assay.models import Caps, Meter
from assay.models.defaults import DEFAULT_MODEL
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
from assay.reports.markdown import markdown
from assay.reports.training import interval
from assay.rubrics import Rubric
from assay.rubrics.loading import importable_name
from assay.runs.arguments import program_settings, resolve_model
from assay.runs.artifacts import keep_artifact
from assay.runs.finished import FinishedRun
from assay.runs.groups import PromptJob
from assay.runs.independence import independent
from assay.runs.jobs import Job, open_job
from assay.runs.loading import load_rubric
from assay.runs.opening import artifact_place, pinned
from assay.runs.policy_training import Retained, guards_of
from assay.runs.preflight import checked, preflight, require_predictors
from assay.runs.unused import settings_of_another_job, unused_settings
from assay.sources.artifact_files import is_artifact, read_manifest
from assay.support.formats import check_format
from assay.support.job_folders import claim_folder, remove_folder
from assay.support.names import place_in
from assay.support.numbers import counted
from assay.support.options import options_of
from assay.support.places import write_whole
from assay.support.scrubbing import results
from assay.support.values import json_text, json_value
from assay.traces.export.settings import Gates, Selection
from assay.traces.records import new_id
from assay.traces.store.location import home_of

STATE = "state.json"  # of an unfinished improvement, in its folder
_FORMAT = 4  # of this state
_NO_GATES = Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="off")  # of rows that stay on this machine
# settings that a step is given apart, or that `sizes` has
_APART = ("program", "rubric", "data", "resume", "train_size", "val_size", "gate_size", "test_size")


_Settings = TypeVar("_Settings", bound=ImproveSettings)


class _Preflight(PromptJob):
    """Settings of the parts that run no step."""

    kind = "improve"


class _Side(PromptJob):
    """Settings of a side of gate or test."""

    kind = "evaluate"


# -- Checks of settings, models and judges, and the runs that the steps request. Calls no model.


def with_names(command: _Settings) -> _Settings:
    """The settings with names in place of objects, and the model of an artifact.

    Raises:
        ConfigError: a model that cannot be trained, or a judge that is the trained model.
        RubricError: a rubric that has no name by which a later step could import it.
    """
    program, monitor, options = str(command.program), command.monitor, vars(command)
    if is_artifact(program):
        _, options = resolve_model(program, None, options)
    if monitor is not None:
        options = {**options, "monitor": importable_name(monitor)}
    settings = program_settings(
        type(command), full_name(program), importable_name(command.rubric), command.data, None, options
    )
    start = start_model_of(settings)
    for step, model in _trained(settings, start):
        _check_trainable(step, model)
        judge = settings.judge_model or start
        independent(settings.rubric, judge, model)
        guards_of(
            settings.retention, settings.monitor, program=program_name(settings.program), data=settings.data,
            judge=judge, model=model,
        )  # fmt: skip
    return settings


def steps_of(command: ImproveSettings, job: Job) -> ImprovePlan:
    """The runs of the steps, of their gates and of the sealed test, without caps."""
    sizes, pair = job.splits.sizes(), forecast_pair(job.recorded.program, job.session)
    return ImprovePlan(
        report=plan_report(job.splits, Meter(), job.config.decisions, pair=pair),
        steps=plan_steps(
            command.order, sizes, search=search_runs(command.max_search_calls, pair.calls / 2, sizes["val"]),
            rollouts=command.rollouts, grpo=settings_from(PolicySettings, command.grpo or {}, "grpo"),
            retained=len(command.retention),
        ),
    )  # fmt: skip


def check_name(command: ImproveSettings) -> None:
    """Refuses to begin an improvement under a name that is taken.

    Raises:
        ConfigError: there is an unfinished improvement, or an adapter, of this name.
    """
    folder = folder_of(command)
    if (folder / STATE).is_file():
        raise ConfigError(
            f"there is an unfinished improvement {command.name!r} in {folder}: add `resume`, or take another name"
        )
    for adapter in adapter_names(command):
        check_free(adapter)


def folder_of(command: ImproveSettings) -> Path:
    """Where an unfinished improvement of this name is kept."""
    return place_in(home_of(command.store) / "improve", command.name)


def adapter_names(command: ImproveSettings) -> list[str]:
    """Names of the adapters that the steps of an improvement create."""
    return [f"{command.name}-{at}" for at, step in enumerate(command.order, start=1) if step != "prompts"]


def start_model_of(command: ImproveSettings) -> str:
    """The first model of an improvement: that of the artifact, the named one, or the default."""
    if is_artifact(command.program):
        return str(read_manifest(Path(command.program))["model"])
    return str(command.model or DEFAULT_MODEL)


def program_name(program: str) -> str:
    """Name of the program in its rollouts."""
    return str(read_manifest(Path(program))["program"]) if is_artifact(program) else program


def _trained(command: ImproveSettings, model: str) -> Iterator[tuple[str, str]]:
    """Each training step and the model it trains, if all steps before it are kept."""
    given = {"sft": command.sft or {}, "grpo": command.grpo or {}}
    for step in command.order:
        if step != "prompts":
            model = str(given[step].get("model", model))
            yield step, model


def _check_trainable(step: str, model: str) -> None:
    """Raises if the model is not `embedded/NAME`; only those are served by name for the comparison afterwards."""
    if model.startswith("embedded/"):
        return
    raise ConfigError(
        f"{step} cannot train {model!r}: improve trains embedded models (embedded/NAME), which it can serve",
        hint=f"Improve the prompts alone (`order` prompts), or name the model to train (`{step}` model=embedded/NAME)",
    )


# -- Run.


def improved(command: ImproveSettings) -> ImproveReport:
    """Runs or continues an improvement."""
    settings = with_names(command)
    run = Improvement(settings)
    place = artifact_place(settings.store, settings.out, settings.name, resume=settings.resume)
    if (finished := run.begin()) is not None:
        return finished
    run.check_start()
    run.steps()
    run.finish(place)
    return run.report


class Improvement:
    """A running improvement. `report` has the best program and model so far."""

    def __init__(self, settings: ImproveSettings) -> None:
        self.settings, self.progress = settings, settings.reporter
        self.name, self.folder, self.store = settings.name, folder_of(settings), settings.store
        self.order = list(settings.order)
        kind: Any = PromptJob
        own: Any = type(settings)
        shared = [name for name in options_of(own) if name in options_of(kind) and name not in _APART]
        # the settings that the steps share, but for their defaults, with the caps of all of them
        self.options = {name: getattr(settings, name) for name in settings.changed(*shared)}
        self.start = (str(settings.program), start_model_of(settings))
        self.caps = Caps(**{amount: getattr(settings, cap) for cap, amount in CAPS.items()})
        self.report = ImproveReport(program=self.start[0], model=self.start[1])
        about = ("program", "rubric", "data", "rollouts", "sft", "grpo", "monitor")
        self.job = json_value(
            {
                "format": _FORMAT, **{name: getattr(settings, name) for name in about}, "order": self.order,
                "retention": list(settings.retention),
                # without the caps, which may be raised on resume
                "options": {key: value for key, value in self.options.items() if key not in CAPS},
            },
            placeholders=True,
        )  # fmt: skip
        # the job that openings of the test are counted for; both sides of a comparison count once
        self.opens_as = f"improve-{self.name}-{new_id()[:12]}"
        self.plan: ImprovePlan | None = None  # None before the preflight
        self.candidate: tuple[str, str] | None = None  # program and model of the current step, until its gate
        self.part = ""  # id of the current part
        self.owner = f"improvement {self.name}"  # by which its folder is its own
        self.report_file = place_in(self.folder.parent, self.name, ending=".json")  # after its end, without a folder

    @property
    def best(self) -> tuple[str, str]:
        return self.report.program, self.report.model

    @property
    def _same(self) -> dict[str, Any]:
        """What every step is given."""
        settings = self.settings
        return {"rubric": settings.rubric, "data": settings.data, "store": self.store, "progress": self.progress}

    # -- state

    def _now(self, **values: Any) -> None:
        self.report = replace(self.report, **values)

    def begin(self) -> ImproveReport | None:
        """Reads the state to resume from, or writes a new one. Returns the report of a finished improvement."""
        state_file, resume = self.folder / STATE, self.settings.resume
        if resume and not state_file.is_file() and self.report_file.is_file():
            stored = json.loads(self.report_file.read_text(encoding="utf-8"))
            if stored["job"] == self.job:
                return ImproveReport.read(stored["report"])
        if resume and state_file.is_file():  # without a state there is nothing to resume, and a new one begins
            self._remember(json.loads(state_file.read_text(encoding="utf-8")))
            ended = self._ended.report(self.progress)
            return ImproveReport.read(ended) if ended is not None else None
        check_name(self.settings)
        for adapter in adapter_names(self.settings):
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
        self.report, self.opens_as = ImproveReport.read(state["report"]), state["opens_as"]
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
        given = {"model": self.report.model, "seed": self.settings.seed, **(values or {})}
        return settings_from(kind, given, argument)

    # -- preflight

    def check_start(self) -> None:
        """Runs the program on one task and asks each judge once, those of monitor and retention tasks too.

        If it fails, the folder of the improvement is removed, as there is nothing to resume.

        Raises:
            AssayError: see `assay.runs.preflight.preflight`; settings with `preflight=False` try nothing.
        """
        if self.report.steps or self.plan is not None:
            return
        retained = [Retained.read(text) for text in self.settings.retention]
        try:
            plan = self._check_program(retained)
            for at, task in enumerate(retained if self.settings.preflight else ()):
                self._check_retained(at, task)
        except AssayError:
            remove_folder(self.folder, self.owner)
            raise
        for step, options in (("sft", self.settings.sft), ("grpo", self.settings.grpo)):
            if options and step not in self.order:
                self.report.notes.append(
                    f"`{step}={dict(options)!r}` has no effect: `order={','.join(self.order)}` has no such step"
                )
        for line in plan.lines(self.caps):
            self.progress.say(line)
        self.plan = plan
        self._keep()

    @contextmanager
    def _opened(
        self, kind: type[PromptJob], program: str, rubric: str, data: str, options: Mapping[str, Any], **more: Any
    ) -> Iterator[Job]:
        """A job with the settings of a compile, under the part's own kind of run."""
        config = program_settings(kind, program, rubric, data, None, options)
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
                _Preflight,
                program,
                self.settings.rubric,
                self.settings.data,
                {**self._capped(), "model": model},
                need=self.settings.needed,
            ) as job,
        ):
            monitor = None if self.settings.monitor is None else job.additional_rubric(self.settings.monitor)
            guards = [*([] if monitor is None else [monitor]), *(job.additional_rubric(t.rubric) for t in retained)]
            notes = [
                *announce_splits(job.splits, self.progress),
                *job.warnings,
                *unused_settings(job, rubrics=guards, order=self.order),
            ]
            self._now(notes=notes, data=job.rows.to_dict())
            if "prompts" in self.order:
                require_predictors(job)
            split = "val" if self.order[0] == "prompts" else "train"  # which the first step runs
            checked(job, getattr(job.splits, split))
            self._check_monitor(job, monitor, split)
            return steps_of(self.settings, job)

    def _check_monitor(self, job: Job, monitor: Rubric | None, split: str) -> None:
        """Asks the judges of the monitor rubric once; the program's run comes from the response cache."""
        if monitor is not None and monitor.needs_judge and job.config.preflight:
            session, tasks = replace(job.session, rubric=monitor), getattr(job.splits, split)
            preflight(session, job.recorded, tasks, max_cost_usd=job.config.max_cost_usd)

    def _check_retained(self, at: int, task: Retained) -> None:
        with self._part(f"preflight-{at + 1}"):
            # a retention task has its own program, to whose parameters and fields these settings do not belong
            options = {**self._capped(), "model": self.start[1]}
            settings = {key: options[key] for key in options if key not in ("parameters", "sizes", "rename")}
            need = ("val", "test")
            with self._opened(_Preflight, task.program, task.rubric, task.data, settings, need=need) as job:
                checked(job, job.splits.val)

    # -- steps

    def steps(self) -> None:
        """Runs the remaining steps until a cap is reached."""
        for at, step in list(enumerate(self.order))[len(self.report.steps) :]:
            self.progress.say(f"step {at + 1} of {len(self.order)}: {step}")
            try:
                self._take(at, step)
            except BudgetExceeded as cap:
                self._now(stopped=f"step {at + 1} of {len(self.order)}, {step}: {cap}")
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
                self._now(program=program, model=model)
        self.candidate = None
        self.report.steps.append(row)
        self._keep()
        reason = f"gate {interval(row['gate'])}" if row["gate"] else row["note"]
        self.progress.say(f"{step}: {'kept' if row['kept'] else 'not kept'}, {reason}")

    def _prompts(self, at: int) -> tuple[str, str]:
        out = self.folder / f"prompts-{at + 1}"
        remove_folder(out, self.owner)  # of an interrupted process; the replay makes it again
        report = compile_program(
            self.report.program, out=out, gate=False, test=False,
            **self._same, **{**self._capped(), "model": self.report.model},
        )  # fmt: skip
        stopped, unchanged = report.stopped, report.winner == "baseline"
        # `auto` always spends its search calls, so another cap ended it; other optimizers may end at that of the search
        if stopped and unchanged and (self.settings.optimizer == "auto" or self.settings.max_search_calls is None):
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
                    self.report.program, n=self.settings.rollouts, **self._same,
                    **{**self._options_for(options_of(Collect)), "model": self.report.model},
                )  # fmt: skip
                self._note_cut(at, "sft", collected.stopped)
                remove_folder(rows, self.owner)
                chosen = Selection(programs=(program_name(self.settings.program),))
                export("sft", rows, store=self.store, selection=chosen, gates=_NO_GATES, progress=self.progress)
            config = self._trained(SFTSettings, self.settings.sft, "sft")
            return train_sft(rows, name=name, store=self.store, resume=begun, progress=self.progress, **asdict(config))

        return self._weights(at, trained)

    def _grpo(self, at: int) -> tuple[str, str]:
        def trained(name: str, begun: bool) -> Any:
            settings = asdict(self._trained(PolicySettings, self.settings.grpo, "grpo"))
            options = {
                key: value
                for key, value in self._options_for(options_of(TrainRL)).items()
                if key not in ("model", "seed", "cache")
            }
            parameters = dict(options.get("parameters", {}))
            parameters.pop("temperature", None)  # `grpo` has its own
            return train(
                self.report.program, name=name, resume=begun, retention=list(self.settings.retention),
                monitor=self.settings.monitor, test=False, **self._same,
                **{**options, "parameters": parameters, **settings},
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
                        _Side, program, self.settings.rubric, self.settings.data, {**options, "model": model},
                        need=(split,), opens_as=self.opens_as,
                    )  # fmt: skip
                    jobs.append(opened.enter_context(job))
            comparison = self._compare_jobs(jobs[0], jobs[1], split)
        self._now(test_openings=None if jobs[0].openings is None else jobs[0].openings.to_dict())
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
        if self.best != self.start:
            self._test()
        options = {**self.options, "model": self.report.model}
        with (
            self._part("end"),
            self._opened(_Preflight, self.report.program, self.settings.rubric, self.settings.data, options) as job,
        ):
            self._now(models=job.models(self._runs)["models"])
            kept = {"steps": self.report.steps, "test": self.report.test}
            about = f"Improved in the steps {', '.join(self.order)}."
            text = markdown(self.report, title=self.name, about=about)
            artifact = keep_artifact(job, job.recorded, place, kept, text)
        self._now(artifact=artifact, program=str(artifact))  # intermediate versions are deleted with the folder
        if self.report.stopped is not None:
            self._ended.keep(self.report.to_dict())
        else:
            write_whole(self.report_file, json_text(results({"job": self.job, "report": self.report.to_dict()})))
            remove_folder(self.folder, self.owner)

    def _test(self) -> None:
        try:
            comparison = self._compared("test", self.start, self.best)
        except BudgetExceeded as cap:
            self._now(stopped=self.report.stopped or f"sealed test: {cap}")
            return
        note = comparison.end_of("test")
        self.report.notes.extend([*([note] if note else []), *losses_behind_gain(comparison, "test")])
        self._now(test=compared(comparison.before, comparison.after, level=comparison.gain.level))
        if comparison.cap is not None and comparison.gain.n < FEWEST:
            self._now(stopped=self.report.stopped or note)
