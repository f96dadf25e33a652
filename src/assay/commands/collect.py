"""`assay collect`: groups of scored rollouts in the store. Exports nothing."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from assay.commands.evaluate import ScoredOutput, ScoredRuns
from assay.commands.groups import InStore, Reported, Trusting
from assay.errors import BudgetExceeded, ConfigError
from assay.jobs.groups import AgentJob, OneSplit, StagedJob
from assay.models.roles import is_embedded
from assay.support.options import Flag, Parse, Positive, function_of
from assay.support.report import Table

if TYPE_CHECKING:
    from assay.datasets import Task
    from assay.datasets.curriculum import Schedule
    from assay.evaluation import Progress, RecordedProgram
    from assay.jobs.job import Job
    from assay.jobs.planning import Request


@dataclass(frozen=True, kw_only=True, repr=False)
class CollectReport(ScoredRuns):
    """What `collect` returns: one evaluation over all rollouts."""

    run: str
    rollouts: int
    kept_from_before: int
    groups_with_spread: int
    curriculum: Mapping[str, Any] | None  # see `assay.datasets.curriculum.Schedule.report`

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.markdown import curriculum_lines
        from assay.support.numbers import calls_text, figure, price

        rows = [
            ("run", self.run),
            ("rollouts (from earlier runs)", f"{self.rollouts} ({self.kept_from_before})"),
            ("tasks, groups with nonzero variance", f"{self.tasks}, {self.groups_with_spread}"),
            ("mean score", figure(self.result["score"])),
            ("LM calls", calls_text(self.calls, self.cached)),
            ("tokens, dollars", f"{self.tokens:,}, {price(self.cost_usd)}"),
        ]
        yield Table(title=f"{self.program}: rollouts collected", rows=rows)
        yield from self.called()
        yield from curriculum_lines(self.curriculum)
        yield from self.limits()


def _turns(turns: Sequence[Mapping[str, Any] | str]) -> list[Mapping[str, Any]]:
    """Mappings of agent parameters to values; of texts `NAME=V,V…` all combinations of the values."""
    values: dict[str, list[Any]] = {}
    for text in turns:
        if not isinstance(text, str):
            continue
        name, equals, listed = text.partition("=")
        if not equals or not name:
            raise ValueError(f"must be NAME=V,V…, not {text!r}")
        if name in values:
            raise ValueError(f"gives {name!r} twice")
        try:
            values[name] = [json.loads(value) for value in listed.split(",")]
        except json.JSONDecodeError as error:
            raise ValueError(f"must be numbers with commas, as in max_steps=2,10, not {error.doc!r}") from None
    combined = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())] if values else []
    return [*(turn for turn in turns if not isinstance(turn, str)), *combined]


class Collect(Reported, Trusting, InStore, AgentJob, StagedJob, OneSplit):
    """Run PROGRAM (a name or an artifact's folder), or an agent of any framework (`agent`), n times on each task of a
    split, score every run, and keep them as groups in the store.

    Rollouts of the same task have separate entries in the response cache, so a seeded run replays. With a curriculum,
    the train tasks of its stages are collected in turn. The program runs once on the val tasks of a stage; the next
    stage follows if their mean score is high enough, or if the stage has a limit. These runs are not exported.

    Raises:
        AssayError: what was wrong, which rule, what to do.
    """

    OUTPUT: ClassVar[Any] = ScoredOutput
    kind: ClassVar[str] = "collect"

    n: Annotated[Positive, Flag(name="-n/--n")] = 8
    """Number of rollouts of each task."""
    split: Literal["train", "val"] = "train"
    """Split of the tasks. Gate and test are not available for training."""
    over: Annotated[Sequence[Mapping[str, Any] | str], Flag(metavar="NAME=V,V…"), Parse(_turns)] = ()
    """Values of an agent parameter, taken in turn by the rollouts of a task; repeatable. In Python also a list of
    mappings, such as [{'temperature': 0.3}, {'temperature': 1.0}]."""
    temperatures: Annotated[Sequence[float], Flag(metavar="T,T…", commas=True, key=False)] = ()
    """Temperatures to cycle through over the rollouts of a task."""
    untruncated: bool = False
    """Sample from the whole distribution of an embedded model, without top-k and top-p, as a policy gradient on the
    export needs. By default llama.cpp excludes unlikely tokens, so that fewer rollouts fail."""

    def check(self) -> None:
        if self.curriculum is not None and self.split != "train":
            raise ConfigError(
                f"{self.split} would have no effect: with a `curriculum`, train tasks are collected, and val tasks "
                "decide about promotion",
                field="split",
            )
        if self.untruncated and not is_embedded(self.model_name):
            raise ConfigError(
                f"would have no effect on {self.model}: its server sets top-k and top-p", field="untruncated",
                hint="Set them there",
            )  # fmt: skip
        if self.temperatures:
            turns = [{**turn, "temperature": value} for turn in self.turns or [{}] for value in self.temperatures]
            object.__setattr__(self, "over", turns)
            object.__setattr__(self, "temperatures", ())

    @property
    def turns(self) -> list[Mapping[str, Any]]:
        """Agent parameters of the rollouts of a task, in turn."""
        return [turn for turn in self.over if not isinstance(turn, str)]

    @property
    def generation(self) -> dict[str, Any]:
        return {"top_p": 1.0} if self.untruncated else {}

    def request(self, job: "Job", each: float) -> "Request":
        """The runs of a collection; with a curriculum those of all its stages."""
        from assay.evaluation import SilentProgress
        from assay.jobs.curricula import schedule_of
        from assay.jobs.planning import ALL_STAGES, Request

        schedule = schedule_of(job, seed=self.seed, steps=None, progress=SilentProgress())
        if schedule is None:
            return Request(runs=self.n * job.splits.sizes()[self.split])
        runs, step = 0, 0
        while not schedule.complete:
            runs += self.n * len(schedule.whole_stage(step)) + len(schedule.val_tasks())
            step += 1
            schedule.scored(1.0, step)
        return Request(runs=runs, notes=[ALL_STAGES])

    def run(self) -> CollectReport:
        from assay.jobs.agents import agent_notes
        from assay.jobs.arguments import named
        from assay.jobs.job import open_job

        program, lm, config = named(self)
        with open_job(
            config, program=program, rubric=self.rubric, lm=lm, progress=self.reporter, store=self.store,
            resume=self.resume, need=config.needed,
        ) as job:  # fmt: skip
            collection = _Collection(job, config, self.reporter)
            try:
                collection.run()
            except BudgetExceeded as cap:
                job.status, job.reason, collection.stopped = "stopped", str(cap), str(cap)
            finally:
                curriculum = collection.keep_curriculum()
            if collection.schedule is not None:
                collection.notes += collection.schedule.notes()
            collection.notes += agent_notes(job.recorded.program)
            called = job.models()
        evaluation = collection.evaluation
        groups = [group for group in evaluation._samples.values() if len(group) > 1]
        return CollectReport(
            result=job.priced(evaluation), tasks=len(evaluation.results), program=config.program, evaluation=evaluation,
            run=job.run_id, rollouts=len(evaluation.runs), kept_from_before=collection.resumed,
            groups_with_spread=sum(len({round(sample.value, 9) for sample in group}) > 1 for group in groups),
            curriculum=curriculum, stopped=collection.stopped, notes=collection.notes, **job.spent(called),
        )  # fmt: skip


class _Collection:
    """The rollouts of a job: of all tasks of a split, or of the stages of a curriculum."""

    def __init__(self, job: "Job", config: Collect, progress: "Progress") -> None:
        from assay.evaluation import Evaluation
        from assay.jobs.curricula import schedule_of

        self.job, self.config = job, config
        self.evaluation, self.resumed = Evaluation(), 0
        self.stopped: str | None = None
        self.notes = list[str]()
        self.done = job.runs_before("collect")
        self.schedule = schedule_of(job, seed=config.seed, steps=None, progress=progress)

    def run(self) -> None:
        from assay.datasets import SPLITS
        from assay.jobs.checks import unused_settings
        from assay.jobs.preflight import checked

        job, n, split = self.job, self.config.n, self.config.split
        tasks = getattr(job.splits, split)
        read = (split,) if self.schedule is None else SPLITS  # a curriculum reads val too
        self.notes += [*job.warnings, *unused_settings(job, read=read)]
        if any((task.id, sample) not in self.done for task in tasks for sample in range(n)):
            measured = checked(job, tasks, recorded=self._sampler(0))
            self.notes += measured.warnings if measured else ()
        if self.schedule is None:
            self._collect(tasks)
        else:
            self._collect_stages(self.schedule)

    def _collect(self, tasks: "Sequence[Task]", first: int = 0, title: str = "") -> None:
        """`n` rollouts of each task, numbered from `first`."""
        from assay.evaluation import evaluate

        job, n = self.job, self.config.n
        with job.session.phase("collect"):
            for sample in range(first, first + n):
                known = {(task.id, 0): self.done[task.id, sample] for task in tasks if (task.id, sample) in self.done}
                self.resumed += len(known)
                name = f"collect{title}: rollout {sample - first + 1} of {n}"
                evaluate(self._sampler(sample), tasks, job.session, name=name, into=self.evaluation, known=known)

    def _collect_stages(self, schedule: "Schedule") -> None:
        """The stages in turn, until one is not passed on val; a stage with a limit is left all the same.

        A resumed run draws the same tasks in the same order, and takes what was finished from the store.
        """
        from assay.datasets.curriculum import promotion_score
        from assay.evaluation import evaluate

        job, scored, step = self.job, self.job.runs_before("promotion"), 0
        times = Counter[str]()  # collections of each task
        while not schedule.complete:
            stage, tasks = schedule.stage, schedule.whole_stage(step)
            rounds = sorted({times[task.id] for task in tasks})
            for number in rounds:
                part = [task for task in tasks if times[task.id] == number]
                self._collect(part, number * self.config.n, f" {stage.name}{', replays' if number else ''}")
            times.update(task.id for task in tasks)
            step += 1
            with job.session.phase("promotion"):
                name = f"val of stage {stage.name}"
                result = evaluate(job.recorded, schedule.val_tasks(), job.session, name=name, known=scored)
            if not schedule.scored(promotion_score(result.scores.values()), step):
                if stage.max_share is None:
                    break
                schedule.leave(step)
            self.keep_curriculum()

    def keep_curriculum(self) -> Mapping[str, Any] | None:
        from assay.jobs.curricula import keep_schedule

        return None if self.schedule is None else keep_schedule(self.schedule)

    def _sampler(self, sample: int) -> "RecordedProgram":
        """The program for the `sample`-th rollout of every task, with its parameters from `over`."""
        from assay.programs.isolation import copied

        recorded, turns = self.job.recorded.another(sample), self.config.turns
        if turns:
            recorded.program = copied(recorded.program)
            recorded.set_parameters(turns[sample % len(turns)])
        recorded.group = self.job.run_id
        return recorded


collect = function_of(Collect, "collect")
