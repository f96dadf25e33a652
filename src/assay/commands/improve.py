"""`assay improve`: prompt compilation and weight training in turn.

The steps are calls of `compile`, `collect`, `export`, `train sft` and `train rl`. This file has what concerns all of
them: the checks before the first, their shares of the caps, the gate that keeps a step, and the sealed test at the end.
Every part (preflight, step, side of a gate) is a run of the store under an id of its own, so that a killed improvement
resumes it or replays it.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from assay.commands.collect import Collect, collect
from assay.commands.compile import Compile, compile as compile_program
from assay.commands.export import export
from assay.commands.groups import InStore, JobOutput, NewArtifact, Planned, Reported, Trusting
from assay.commands.train import TrainRL, train, train_sft
from assay.errors import AssayError, BudgetExceeded, ConfigError, DataError, Diverged, StoreError
from assay.jobs.groups import Capped, PromptJob, Source
from assay.jobs.job_report import EndedReport
from assay.models.lora import adapter_home, find_adapter, served_as
from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings, settings_from
from assay.sources.artifact_files import is_artifact, read_manifest
from assay.support.names import one_of, place_in
from assay.support.numbers import counted
from assay.support.options import Flag, Parse, Positive, Settings, function_of, options_of
from assay.support.places import claim_folder, owner_of, remove_folder
from assay.support.report import Table
from assay.support.values import check_format, digest_of, json_value
from assay.traces.export.settings import Gates, Selection
from assay.traces.records import new_id

if TYPE_CHECKING:
    from typing import Self

    from assay.evaluation.comparison import Comparison
    from assay.jobs.ending import FinishedRun
    from assay.jobs.job import Job
    from assay.jobs.planning import Request
    from assay.models.meter import Usage
    from assay.optimizers.budget import ImprovePlan, Turn
    from assay.traces import Store

STEPS = ("prompts", "sft", "grpo")
_FORMAT = 6  # of the state of an unfinished improvement
# settings of a compile that a step is given apart, or that `sizes` has
_APART = ("program", "state", "lm", "rubric", "data", "resume", "train_size", "val_size", "gate_size", "test_size")
_OWN = ("program", "rubric", "data", "order", "rollouts", "sft", "grpo", "retention", "monitor")

# -- Report


@dataclass(frozen=True, kw_only=True, repr=False)
class ImproveReport(EndedReport):
    """What `improve` returns.

    Attributes:
        program: name of the program
        steps: one entry per step with its gate, whether it was kept, and whether its training converged: false if it
            diverged, null for other steps and where too few optimizer steps were made to tell
        test: comparison of start and result on the sealed test
        unrecorded: LM calls that could not be recorded; null if unknown
    """

    artifact: Path | None = None
    program: str
    model: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    test: Mapping[str, Any] | None = None
    test_openings: Mapping[str, int] | None = None
    notes: list[str] = field(default_factory=list)
    stopped: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    models: Sequence[Mapping[str, Any]] = ()
    unrecorded: int | None = 0

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.markdown import gap_lines
        from assay.reports.training import in_numbers, interval

        rows = [
            (step["step"], interval(step["gate"]), "kept" if step["kept"] else "not kept", step.get("model", ""))
            for step in self.steps
        ]
        yield Table(title="steps", header=("step", "gate, paired 95 %", "", "model"), rows=rows)
        yield from (f"note: {step['step']}: {step['note']}" for step in self.steps if step.get("note"))
        yield from self.limits()
        if self.test:
            title, header = f"sealed tasks, {self.test['before']['n']}", ("", "start", "end", "gain, paired 95 %")
            yield Table(title=title, header=header, rows=list(in_numbers({"test": self.test})))
        elif not any(step["kept"] for step in self.steps):
            yield "no step was kept, so there is nothing to compare: the program is unchanged"
        yield from self.opened()
        yield from self.called()
        yield from gap_lines(vars(self))
        yield f"model: {self.model}"
        if self.artifact is not None:  # not yet while its own page is written
            yield f"artifact: {self.artifact}"


# -- Settings, and what is checked before the first step


def _by_field(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that may be named by the flags of `assay train`."""
    return {name.replace("-", "_"): value for name, value in settings.items()}


class Stepwise(Settings):
    """Steps."""

    name: Annotated[str, Flag(key=False)]
    """Name of this improvement; its adapters are called NAME-1, NAME-2, …"""
    order: Annotated[Sequence[str], Flag(commas=True)] = ("prompts", "sft", "prompts")
    """Steps in order, separated by commas: prompts (compile), sft (collect on train, export this program's good
    rollouts from the store, fine-tune on them), grpo (policy gradient on train)."""
    rollouts: Positive = 2
    """Number of rollouts of each train task that sft collects."""
    sft: Annotated[Mapping[str, Any] | None, Flag(metavar="NAME=VALUE"), Parse(_by_field)] = None
    """Setting of sft, named as in `assay train sft`: epochs=2."""
    grpo: Annotated[Mapping[str, Any] | None, Flag(metavar="NAME=VALUE"), Parse(_by_field)] = None
    """Setting of grpo, named as in `assay train grpo`: steps=12, beta=0."""
    retention: Annotated[Sequence[str], Flag(metavar="PROGRAM,RUBRIC,DATA")] = ()
    """Retention task: a program, rubric and data whose score grpo must not lower; repeatable."""
    monitor: Annotated[Source | None, Flag(metavar="R", path=True)] = None
    """Monitor rubric: scores the rollouts of grpo, but gives no reward."""

    def check(self) -> None:
        if unknown := [step for step in self.order if step not in STEPS]:
            raise ConfigError(f"{unknown[0]!r} {one_of(unknown[0], STEPS)}", field="order")
        if not self.order:
            raise ConfigError(f"must name at least one of the steps {', '.join(STEPS)}", field="order")
        if "grpo" not in self.order and (guards := self.changed("retention", "monitor")):
            raise ConfigError(
                f"would have no effect: it guards grpo, and the `order` is {', '.join(self.order)}", field=guards[0]
            )
        settings_from(SFTSettings, self.sft or {}, "sft")
        if settings_from(PolicySettings, self.grpo or {}, "grpo").evaluate_every == 0 and self.retention:
            raise ConfigError(
                "needs evaluations, and evaluate_every=0 evaluates none: give `grpo` evaluate_every=STEPS",
                field="retention",
            )

    def unused_steps(self) -> Iterator[str]:
        """Notes on settings of a training that is not in the order."""
        for step in ("sft", "grpo"):
            if (options := getattr(self, step)) and step not in self.order:
                order = ",".join(self.order)
                yield f"`{step}={dict(options)!r}` has no effect: `order={order}` has no such step"

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that the steps create."""
        return [f"{self.name}-{at}" for at, step in enumerate(self.order, start=1) if step != "prompts"]


class ImproveOutput(Planned, JobOutput):
    """Output."""


class Improve(Trusting, Stepwise, Reported, InStore, NewArtifact, PromptJob):
    """Improve PROGRAM: prompts, then weights, then prompts again.

    Each step is kept only if it passes the gate; the sealed test is reported at the end. A part of the caps is kept for
    the gate of each step that fits them and for the sealed test; the steps share the rest. A step starts only if its
    work, its gate and the sealed test fit. A reached cap ends the command with the best version so far; with a higher
    cap `resume` continues. When new data arrives, run it again on the artifact with another name.

    Raises:
        ConfigError: an unknown step, an adapter of this name, or nothing to resume.
        AssayError: what was wrong, which rule, what to do.
    """

    OUTPUT: ClassVar[Any] = ImproveOutput
    kind: ClassVar[str] = "improve"
    state: ClassVar[None] = None  # type: ignore[misc]
    lm: ClassVar[None] = None  # type: ignore[misc]  # later steps load the model by its name

    @property
    def origin(self) -> tuple[str, str]:
        """Name of the program in its rollouts, and the first model: those of an artifact, else as they are given."""
        if is_artifact(self.program):
            manifest = read_manifest(Path(self.program))
            return str(manifest["program"]), str(manifest["model"])
        return str(self.program), self.model_name

    @property
    def folder(self) -> Path:
        """Where this machine has the programs and rows of an unfinished improvement of this name."""
        from assay.traces.store.location import home_of

        return place_in(home_of(self.store) / "improve", self.name)

    @property
    def state_key(self) -> str:
        """Of the improvement of this name in the store: its lease, its state, and its report once it is done."""
        return f"improve-{digest_of(self.folder.name)[:12]}"  # which checks the name

    @property
    def is_unfinished(self) -> bool:
        """Whether the store has an unfinished improvement of this name."""
        from assay.traces import Store, store_address

        if not store_address(self.store).exists:
            return False
        with Store(self.store) as store:
            return _is_state(store.states(self.state_key).get(self.state_key))

    def prepared(self) -> "Self":
        """The settings with names in place of objects, and the model of an artifact.

        Raises:
            ConfigError: a model that cannot be trained, or a judge that is the trained model.
            RubricError: a rubric that has no name by which a later step could import it.
        """
        from assay.jobs.arguments import program_settings, resolve_model
        from assay.programs.loading import full_name
        from assay.rubrics.loading import importable_name

        program, options = str(self.program), vars(self)
        if is_artifact(program):
            _, options = resolve_model(program, None, options)
        if self.monitor is not None:
            options = {**options, "monitor": importable_name(self.monitor)}
        settings = program_settings(
            type(self), full_name(program), importable_name(self.rubric), self.data, None, options
        )
        settings.check_trained()
        return settings

    def check_trained(self) -> None:
        """Checks the model that each training step trains if all steps before it are kept, and who judges it.

        Raises:
            ConfigError: it is not `embedded/NAME`; only those are served by name for the comparison afterwards. Or it
                would judge itself.
        """
        from assay.jobs.checks import independent
        from assay.jobs.trainings import guards_of

        name, start = self.origin
        judge, model = self.judge_model or start, start
        for step in self.order:
            if step == "prompts":
                continue
            model = str((getattr(self, step) or {}).get("model", model))
            if not model.startswith("embedded/"):
                raise ConfigError(
                    f"{step} cannot train {model!r}: improve trains embedded models (embedded/NAME), which it can "
                    "serve",
                    hint=f"Improve the prompts alone (`order` prompts), or name the model to train (`{step}` "
                    "model=embedded/NAME)",
                )
            independent(self.rubric, judge, model)
            guards_of(self.retention, self.monitor, program=name, data=self.data, judge=judge, model=model)

    def check_name(self) -> None:
        """Refuses to begin an improvement under a name that is taken.

        Raises:
            ConfigError: there is an unfinished improvement, or an adapter, of this name.
        """
        from assay.optimizers.finetuning.run_folder import check_free

        if self.is_unfinished:
            raise ConfigError(f"there is an unfinished improvement {self.name!r}: add `resume`, or take another name")
        for adapter in self.adapters:
            check_free(adapter)

    def plan(self, job: "Job") -> "ImprovePlan":
        """The runs of the steps, of their gates and of the sealed test, without caps."""
        from assay.models import Meter
        from assay.optimizers.budget import ImprovePlan, forecast_pair, plan_report, plan_steps, search_runs

        sizes, pair = job.splits.sizes(), forecast_pair(job.recorded.program, job.session)
        steps = plan_steps(
            self.order, sizes, search=search_runs(self.max_search_calls, pair.calls / 2, sizes["val"]),
            rollouts=self.rollouts, grpo=settings_from(PolicySettings, self.grpo or {}, "grpo"),
            retained=len(self.retention),
        )  # fmt: skip
        return ImprovePlan(report=plan_report(job.splits, Meter(), self.decisions, pair=pair), steps=steps)

    def request(self, job: "Job", each: float) -> "Request":
        from assay.jobs.planning import Request
        from assay.optimizers.budget import too_small

        if not self.resume:
            self.check_name()
        plan, caps = self.plan(job), replace(self.caps, search_calls=None)
        small = too_small(job.splits.sizes())
        notes = [*([] if small is None else [f"warning: {small}"]), *plan.lines(caps)]
        return Request(runs=plan.runs, notes=notes, steps=plan.rows(caps))

    def run(self) -> ImproveReport:
        from assay.jobs.opening import job_lease, opened_store
        from assay.traces.store.location import home_of

        settings = self.prepared()
        with (
            opened_store(self.store, self.reporter) as store,
            job_lease(store.engine, store.id, home_of(self.store), self.state_key) as lease,
        ):
            store.belong_to(lease)
            return _Improvement(settings, store).run()


# -- Run


class _Preflight(PromptJob):
    """Settings of the parts that run no step."""

    kind = "improve"


class _Side(PromptJob):
    """Settings of a side of gate or test."""

    kind = "evaluate"


def _is_state(stored: Mapping[str, Any] | None) -> bool:
    """Whether this is the state of an unfinished improvement, not the report of one that is done."""
    return stored is not None and "opens_as" in stored


class _Improvement:
    """A running improvement. `report` has the best program and model so far.

    Args:
        opened: store that belongs to the lease of this improvement.
    """

    def __init__(self, settings: Improve, opened: "Store") -> None:
        self.settings, self.progress, self.store, self.opened = settings, settings.reporter, settings.store, opened
        # by which the folder is its own: another store may have an improvement of this name
        self.folder, self.owner = settings.folder, f"improvement {settings.name} of {opened.id}"
        shared = [name for name in options_of(PromptJob) if name not in _APART]
        # the settings that the steps share, but for their defaults, with the caps of all of them
        self.options = {name: getattr(settings, name) for name in settings.changed(*shared)}
        self.caps = replace(settings.caps, search_calls=None)
        self.start = (str(settings.program), settings.origin[1])
        self.report = ImproveReport(program=self.start[0], model=self.start[1])
        job: dict[str, Any] = {name: getattr(settings, name) for name in _OWN}
        # without the caps, which may be raised on resume
        job["options"] = {name: value for name, value in self.options.items() if name not in options_of(Capped)}
        self.job = json_value({"format": _FORMAT, **job}, placeholders=True)
        # the job that openings of the test are counted for; both sides of a comparison count once
        self.opens_as = f"improve-{settings.name}-{new_id()[:12]}"
        self.plan: ImprovePlan | None = None  # None before the preflight
        self.candidate: tuple[str, str] | None = None  # program and model of the current step, until its gate

    def run(self) -> ImproveReport:
        """Runs or continues the improvement."""
        from assay.jobs.opening import artifact_place
        from assay.traces.store.leases import LostLease

        settings = self.settings
        place = artifact_place(self.store, settings.out, settings.name, resume=settings.resume)
        if (ended := self._begin()) is not None:
            return ended
        if self.plan is None:
            try:
                self._check_start()
            except LostLease:  # its state and its folder are those of another process now
                raise
            except AssayError:  # then there is nothing to resume
                self.opened.put_state(settings.state_key, {})
                remove_folder(self.folder, self.owner)
                raise
        for at, step in list(enumerate(settings.order))[len(self.report.steps) :]:
            title = f"step {at + 1} of {len(settings.order)}"
            self.progress.say(f"{title}: {step}")
            try:
                self._take(at, step)
            except BudgetExceeded as cap:
                self._now(stopped=f"{title}, {step}: {cap}")
                self.progress.say(f"end of the improvement: {self.report.stopped}; the best so far is reported")
                break
        self._check_lease()  # before the test is opened
        if self.best != self.start:
            self._test()
        self._finish(place)
        return self.report

    @property
    def best(self) -> tuple[str, str]:
        return self.report.program, self.report.model

    # -- state

    def _now(self, **values: Any) -> None:
        self.report = replace(self.report, **values)

    def _begin(self) -> ImproveReport | None:
        """Reads the state to resume from, or writes a new one. Returns the report of an improvement that has ended."""
        from assay.optimizers.finetuning.run_folder import remove_abandoned

        resume, key, owner = self.settings.resume, self.settings.state_key, owner_of(self.folder)
        if owner is not None and owner.startswith(f"improvement {self.settings.name} of ") and owner != self.owner:
            raise ConfigError(
                f"the improvement {self.settings.name!r} was begun on another store: name that one (`store`), or take "
                f"another name. Its files are in {self.folder}: remove them if that store is gone"
            )
        state = self.opened.states(key).get(key)
        begun = resume and _is_state(state)
        if begun and state is not None:
            self._remember(state)
        if resume and (stored := self._ended(done=not begun).report(self.progress)) is not None:
            return ImproveReport.read(stored)
        if not begun:  # with `resume` too: there is nothing to resume
            self.settings.check_name()
            for adapter in self.settings.adapters:
                remove_abandoned(adapter)  # of an earlier improvement with the same name
        if begun and state is not None:
            self._check_files(state)
        if not begun or not self.folder.exists():  # another machine has begun it
            claim_folder(self.folder, self.owner)
        self._keep()
        return None

    def _remember(self, state: Mapping[str, Any]) -> None:
        from assay.optimizers.budget import ImprovePlan

        title = f"the improvement {self.settings.name!r}"
        check_format(title, state["job"]["format"], _FORMAT, remake="take another name", error=ConfigError)
        if state["job"] != self.job:
            raise ConfigError(f"{title} was begun with other settings: resume with the same, or take another name")
        self.report, self.opens_as = ImproveReport.read(state["report"]), state["opens_as"]
        self.candidate = tuple(state["candidate"]) if state["candidate"] else None
        self.plan = ImprovePlan.of(state["plan"]) if state["plan"] else None

    def _check_files(self, state: Mapping[str, Any]) -> None:
        """Refuses to continue where programs and adapters of the steps so far are missing.

        Raises:
            ConfigError: they are on another machine.
        """
        versions = [self.best, *([self.candidate] if self.candidate else [])]
        programs = [Path(program) for program, _ in versions if program != self.start[0]]
        models = [f"{model}+" for _, model in versions]
        adapters = [adapter_home() / name for name in self.settings.adapters if any(f"+{name}+" in m for m in models)]
        places = [*(place for place in programs if place.is_absolute()), *adapters]
        missing = [place for place in places if not place.exists()]
        if missing:
            raise ConfigError(
                f"the improvement {self.settings.name!r} was run on {state['host']}, which has {missing[0]}: resume it "
                "there, or take another name"
            )

    def _keep(self) -> None:
        """Stores the state.

        Raises:
            LostLease: another process has taken this improvement over.
            StoreError: the store does not take it.
        """
        state = {
            "job": self.job, "report": self.report.to_dict(), "opens_as": self.opens_as, "candidate": self.candidate,
            "plan": asdict(self.plan) if self.plan is not None else None, "host": socket.gethostname(),
        }  # fmt: skip
        self.opened.put_state(self.settings.state_key, state)
        self.opened.flush()
        self._check_lease()

    def _check_lease(self) -> None:
        """Raises `LostLease` if another process has taken this improvement over. Waits for a store that is away."""
        from assay.jobs.studies import check_lease
        from assay.traces.store.leases import patiently

        patiently(lambda: check_lease(self.opened))

    def _ended(self, *, done: bool) -> "FinishedRun":
        """The stored report: in place of the state, or beside it if a cap ended the improvement."""
        from assay.jobs.ending import FinishedRun
        from assay.models import Caps

        name, caps = (self.settings.state_key, Caps()) if done else (self._runs, self.caps)
        return FinishedRun(self.opened, name, caps=caps, about=self.job)

    # -- parts and caps

    @property
    def _runs(self) -> str:
        """Common prefix of the ids of its runs."""
        return f"improve-{self.opens_as.rpartition('-')[2]}"

    def _part(self, name: str) -> AbstractContextManager[None]:
        """Makes runs opened inside parts of this improvement: interrupted ones resume, finished ones are replayed."""
        from assay.jobs.opening import pinned

        self._check_lease()  # who has taken the improvement over may have finished the part
        return pinned(f"{self._runs}.{len(self.report.steps)}.{name}")

    @contextmanager
    def _opened(
        self, kind: type[PromptJob], part: str, program: str, options: Mapping[str, Any], *,
        rubric: str = "", data: str = "", **more: Any,
    ) -> "Iterator[Job]":  # fmt: skip
        """A job with the settings of a compile, as a part. `rubric`, `data`: by default those of the improvement."""
        from assay.jobs.arguments import program_settings
        from assay.jobs.job import open_job
        from assay.jobs.loading import load_rubric

        rubric, data = rubric or self.settings.rubric, data or self.settings.data
        config = program_settings(kind, program, rubric, data, None, options)
        with (
            self._part(part),
            open_job(
                config, program=program, rubric=load_rubric(rubric), progress=self.progress, store=self.store, **more
            ) as job,
        ):
            yield job

    def _capped(self, part: str) -> dict[str, Any]:
        """The options with the caps reduced to what a part may use; see `remaining_caps`."""
        from assay.optimizers.budget import remaining_caps

        if not self.caps.any:
            return dict(self.options)
        reserved, least = dict[str, float](), dict[str, float]()
        if self.plan is not None and part != "test":
            turn, gate = self._turn(part), part == "gate"
            reserved = self.plan.amounts(turn.after if gate else turn.reserved)
            least = {} if gate else self.plan.amounts(self.plan.steps[len(self.report.steps)].least)
        return remaining_caps(self.options, self._spent(part), reserved=reserved, least=least)

    def _turn(self, part: str) -> "Turn":
        """What the current step, or its gate, may use of the caps."""
        assert self.plan is not None
        available = self.plan.remaining(self.caps, self._spent(part))
        return self.plan.turn(len(self.report.steps), self.caps, available, worked=part == "gate")

    def _spent(self, part: str) -> "Usage":
        """Usage of all parts except this one."""
        from assay.traces.resuming import spent_in

        return spent_in(self.store, self._runs, but=f"{len(self.report.steps)}.{part}")

    # -- preflight

    def _check_start(self) -> None:
        """Runs the program on one task and asks each judge once, those of monitor and retention tasks too; then plans.

        Raises:
            AssayError: see `assay.jobs.preflight.preflight`; settings with `preflight=False` try nothing.
        """
        from assay.jobs.checks import unused_settings
        from assay.jobs.preflight import checked, preflight, require_predictors
        from assay.jobs.trainings import Retained
        from assay.optimizers.budget import announce_splits

        settings, (program, model) = self.settings, self.start
        retained = [Retained.read(text) for text in settings.retention]
        options = {**self._capped("preflight"), "model": model}
        with self._opened(_Preflight, "preflight", program, options, need=settings.needed) as job:
            monitor = None if settings.monitor is None else job.additional_rubric(settings.monitor)
            guards = [*([] if monitor is None else [monitor]), *(job.additional_rubric(t.rubric) for t in retained)]
            notes = [
                *announce_splits(job.splits, self.progress),
                *job.warnings,
                *unused_settings(job, rubrics=guards, order=settings.order),
                *settings.unused_steps(),
            ]
            self._now(notes=notes, data=job.rows.to_dict())
            if "prompts" in settings.order:
                require_predictors(job)
            # those that the first step runs
            tasks = job.splits.val if settings.order[0] == "prompts" else job.splits.train
            checked(job, tasks)
            if monitor is not None and monitor.needs_judge and settings.preflight:
                # the program's run comes from the response cache
                session = replace(job.session, rubric=monitor)
                preflight(session, job.recorded, tasks, max_cost_usd=job.config.max_cost_usd)
            plan = settings.plan(job)
        for at, task in enumerate(retained if settings.preflight else (), start=1):
            part = f"preflight-{at}"
            # it has its own program, to whose parameters and fields these settings do not belong
            options = {**self._capped(part), "model": model, "parameters": {}, "sizes": {}, "rename": {}}
            with self._opened(
                _Preflight, part, task.program, options, rubric=task.rubric, data=task.data, need=("val", "test")
            ) as job:
                checked(job, job.splits.val)
        for line in plan.lines(self.caps):
            self.progress.say(line)
        self.plan = plan
        self._keep()

    # -- steps

    def _take(self, at: int, step: str) -> None:
        """Runs one step and its gate; keeps the result if it passes."""
        from assay.jobs.checks import settings_of_another_job
        from assay.reports.training import interval

        row: dict[str, Any] = {"step": step, "kept": False, "gate": None, "converged": None}
        try:
            if self.candidate is None:
                with settings_of_another_job(), self._part(step):
                    self.candidate = self._prompts(at) if step == "prompts" else self._weights(at, step)
                self._keep()
        except (DataError, Diverged) as error:
            row |= {"note": str(error), "converged": False if isinstance(error, Diverged) else None}
        else:
            program, model = self.candidate
            if step == "grpo":
                row["converged"] = find_adapter(self._adapter(at)).made.get("converged")
            row |= {"program": program, "model": model, **self._gate(self.candidate)}
            if row["kept"]:
                self._now(program=program, model=model)
        self.candidate = None
        self.report.steps.append(row)
        self._keep()
        reason = f"gate {interval(row['gate'])}" if row["gate"] else row["note"]
        self.progress.say(f"{step}: {'kept' if row['kept'] else 'not kept'}, {reason}")

    def _given(self, command: Any, part: str) -> dict[str, Any]:
        """The settings that a step's command takes of this improvement, with the caps that the step may use."""
        same = {name: getattr(self.settings, name) for name in ("rubric", "data", "store")}
        values = {**self._capped(part), **same, "progress": self.progress, "model": self.report.model}
        return {name: value for name, value in values.items() if name in options_of(command)}

    def _prompts(self, at: int) -> tuple[str, str]:
        out = self.folder / f"prompts-{at + 1}"
        remove_folder(out, self.owner)  # of an interrupted process; the replay makes it again
        report = compile_program(
            self.report.program, out=out, gate=False, test=False, **self._given(Compile, "prompts")
        )
        unchanged, settings = report.winner == "baseline", self.settings
        # `auto` always spends its search calls, so another cap ended it; other optimizers may end at that of the search
        capped = report.stopped and (settings.optimizer == "auto" or settings.max_search_calls is None)
        # a step that ended at its own share is done if a later one still fits
        if unchanged and capped and not (self.caps.any and self._turn("prompts").end > at + 1):
            raise BudgetExceeded(str(report.stopped))
        self._note_cut(at, "prompts", report.stopped)
        if unchanged:
            raise DataError("; ".join(report.notes))
        return str(report.artifact), self.report.model

    def _weights(self, at: int, step: str) -> tuple[str, str]:
        """The program with the adapter of this step, which is trained from its checkpoint if it has one."""
        from assay.optimizers.finetuning.run_folder import training_folder

        name = self._adapter(at)
        if (adapter_home() / name).is_dir():  # made by an interrupted process
            return self.report.program, served_as(find_adapter(name))
        begun = (training_folder(name) / "job.json").is_file()
        report = self._sft(at, begun) if step == "sft" else self._grpo(at, begun)
        if report.name is None:
            raise DataError(f"{self.report.model} is not served by name: its adapter is in {report.path}")
        return self.report.program, report.name

    def _adapter(self, at: int) -> str:
        return f"{self.settings.name}-{at + 1}"

    def _sft(self, at: int, begun: bool) -> Any:
        rows, settings = self.folder / f"sft-{at + 1}", self.settings
        if not begun:
            collected = collect(self.report.program, n=settings.rollouts, **self._given(Collect, "sft"))
            self._note_cut(at, "sft", collected.stopped)
            remove_folder(rows, self.owner)
            chosen = Selection(programs=(settings.origin[0],))
            # of rows that stay on this machine
            no_gates = Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="off")
            export("sft", rows, store=self.store, selection=chosen, gates=no_gates, progress=self.progress)
        update = {"model": self.report.model, "seed": settings.seed, **(settings.sft or {})}
        return train_sft(rows, name=self._adapter(at), store=self.store, resume=begun, progress=self.progress, **update)

    def _grpo(self, at: int, begun: bool) -> Any:
        settings, given = self.settings, self._given(TrainRL, "grpo")
        # `grpo` has a temperature of its own
        given["parameters"] = {name: value for name, value in settings.parameters.items() if name != "temperature"}
        return train(
            self.report.program, name=self._adapter(at), resume=begun, retention=list(settings.retention),
            monitor=settings.monitor, test=False, **{**given, "seed": settings.seed, **(settings.grpo or {})},
        )  # fmt: skip

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
        from assay.evaluation.comparison import what_would_decide

        result = self._compared("gate", self.best, after)
        if (cap := result.undecided("gate")) is not None:
            raise BudgetExceeded(
                f"{result.end_of('gate')}, and a part of the split is not enough for a decision", what=cap.what
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

    def _test(self) -> None:
        """Compares start and end on the sealed test split."""
        from assay.evaluation.comparison import losses_behind_gain
        from assay.optimizers.finetuning.comparison import compared

        try:
            result = self._compared("test", self.start, self.best)
        except BudgetExceeded as cap:
            self._now(stopped=self.report.stopped or f"sealed test: {cap}")
            return
        note = result.end_of("test")
        self.report.notes.extend([*([note] if note else []), *losses_behind_gain(result, "test")])
        self._now(test=compared(result.before, result.after, level=result.gain.level))
        if result.undecided("test") is not None:
            self._now(stopped=self.report.stopped or note)

    def _compared(self, split: str, before: tuple[str, str], after: tuple[str, str]) -> "Comparison":
        """Compares two programs, each with its model, on as many tasks of gate or test as their common caps allow.

        Ends early once the sequential test has decided, as the gate of a compile does. Test is opened once, for both.

        Raises:
            BudgetExceeded: a cap was reached before any pair was complete, or there is room for none. The test is not
                opened then.
            ModelError: one of them could not be scored at all.
        """
        from assay.evaluation.comparison import compare
        from assay.optimizers.budget import decision_tasks

        options = self._capped(split)
        jobs: list[Job] = []
        with ExitStack() as opened:
            for side, (program, model) in (("before", before), ("after", after)):
                job = self._opened(
                    _Side, f"{split}-{side}", program, {**options, "model": model}, need=(split,),
                    opens_as=self.opens_as,
                )  # fmt: skip
                jobs.append(opened.enter_context(job))
            first, second = (job.session for job in jobs)
            # each side has a meter of its own, and the caps are of both together
            first.meter.share_caps_with(second.meter)
            second.meter.share_caps_with(first.meter)
            assert self.plan is not None
            report = self.plan.report
            alone = replace(report, test=0, tested=False) if split == "gate" else replace(report, gate=0)
            if (fitting := int(getattr(alone.within(first.meter), split))) < 1:
                raise BudgetExceeded(f"the caps leave nothing for {split}")
            splits, decisions = jobs[0].splits, jobs[0].config.decisions
            if split == "test":
                splits.unseal()
            planned = decision_tasks(splits, split, decisions)
            tasks = planned[:fitting]
            result = compare(
                jobs[0].recorded, jobs[1].recorded, tasks, first, after_session=second, split=split,
                names=("before", "after"), rule=decisions.rule(len(tasks)),
            )  # fmt: skip
            if len(tasks) < len(planned) and not result.ended:
                cap = BudgetExceeded(f"the caps leave {counted(len(tasks), 'tasks')} for {split}")
                result = replace(result, planned=len(planned), cap=cap)
        self._now(test_openings=None if jobs[0].openings is None else jobs[0].openings.to_dict())
        return result

    def _finish(self, place: Path) -> None:
        """Writes the artifact, and keeps the report.

        `resume` returns the report if the process was killed before printing it, or if no cap was raised.
        """
        from assay.jobs.artifacts import keep_artifact
        from assay.reports.markdown import markdown
        from assay.traces.resuming import unrecorded_in

        with self._opened(_Preflight, "end", self.report.program, {**self.options, "model": self.report.model}) as job:
            missed = unrecorded_in(job.store, self._runs)
            self._now(models=job.models(self._runs)["models"], unrecorded=missed.count)
            kept = {"steps": self.report.steps, "test": self.report.test}
            about = f"Improved in the steps {', '.join(self.settings.order)}."
            text = markdown(self.report, title=self.settings.name, about=about)
            artifact = keep_artifact(job, job.recorded, place, kept, text)
        self._now(artifact=artifact, program=str(artifact))  # intermediate versions are deleted with the folder
        done = self.report.stopped is None
        self._ended(done=done).keep(self.report.to_dict())
        with suppress(StoreError):  # the report is returned all the same
            self.opened.flush()  # first: a state without its folder could not be continued
            self._check_lease()
            if done:
                remove_folder(self.folder, self.owner)


improve = function_of(Improve, "improve")
