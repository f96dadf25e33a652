"""Public API for `assay collect`: groups of scored rollouts in the store. Exports nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import dspy

from assay.datasets import SPLITS, Task
from assay.datasets.rows import NO_ROWS, RowFindings
from assay.datasets.schedule import Schedule, promotion_score
from assay.errors import BudgetExceeded
from assay.evaluation import Evaluation, Progress, RecordedProgram, default_progress
from assay.evaluation import evaluate as run_evaluation
from assay.models import Meter
from assay.models.unrecorded import NOTHING, Unrecorded
from assay.programs.isolation import copied
from assay.rubrics.loading import RubricSource
from assay.runs.arguments import program_settings, resolve_model, resolve_program
from assay.runs.curricula import keep_schedule, schedule_of
from assay.runs.jobs import Job, open_job
from assay.runs.preflight import checked
from assay.runs.settings import CollectSettings
from assay.runs.settings.options import CollectOptions
from assay.runs.unused import unused_settings
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.reprs import ReportRepr


@dataclass(repr=False)
class CollectReport(ReportRepr):
    """What `collect` returns: one evaluation over all rollouts. `resumed`: how many of them an earlier process made."""

    evaluation: Evaluation
    meter: Meter
    run_id: str
    rollouts: int
    resumed: int
    stopped: str | None = None
    curriculum: Mapping[str, Any] | None = None  # see `assay.datasets.schedule.Schedule.report`
    notes: Sequence[str] = ()
    unrecorded: Unrecorded = NOTHING
    dropped_rows: int = 0
    rows: RowFindings = NO_ROWS
    called: Mapping[str, Any] = field(default_factory=dict)  # see `Job.models`

    def to_dict(self) -> dict[str, Any]:
        usage, result = self.meter.usage, self.unrecorded.priced(self.evaluation.report())
        values = [result.value for result in self.evaluation.results.values()]
        spread = [
            len({round(s.value, 9) for s in samples}) > 1
            for samples in self.evaluation._samples.values()
            if len(samples) > 1
        ]
        return {
            "run": self.run_id, "rollouts": self.rollouts, "kept_from_before": self.resumed, "tasks": len(values),
            "result": result,
            "groups_with_spread": sum(spread), "calls": usage.calls, "cached": usage.cached,
            "repeated_calls": usage.repeated,
            "tokens": usage.tokens, "cost_usd": self.unrecorded.cost(usage.known_cost_usd),
            "stopped": self.stopped, "curriculum": self.curriculum, "notes": list(self.notes),
            "data": self.rows.to_dict(),
            "model": self.called.get("model"), "models": self.called.get("models", []),
            **self.unrecorded.to_dict(), "rows_not_stored": self.dropped_rows,
        }  # fmt: skip


@takes(CollectSettings)
@trusts
def collect(
    program: Any,
    *,
    rubric: RubricSource,
    data: Any = None,
    lm: dspy.LM | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Unpack[CollectOptions],
) -> CollectReport:
    """Stores `n` scored rollouts of each task of a split, as one group per task.

    Rollouts of the same task have separate entries in the response cache, so a seeded run replays. `resume` continues
    an unfinished run without repeating finished rollouts.

    With a `curriculum`, the train tasks of its stages are collected in turn. The program runs once on the val tasks of
    a stage; the next stage follows if their mean score is high enough, or if the stage has a limit. These runs are
    not exported.

    Args:
        data: None if the stages of a curriculum name their data.
        options: the fields of `assay.runs.settings.CollectSettings`. `over`: agent parameters that the rollouts of a
            task use in turn, such as `[{"temperature": 0.3}, {"temperature": 1.0}]`. `untruncated`: samples from the
            whole distribution, as a policy gradient on the export needs. By default llama.cpp excludes unlikely
            tokens, which lets fewer rollouts fail.
    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    program = resolve_program(program)
    lm, settings = resolve_model(program, lm, options)
    config, progress = (
        program_settings(CollectSettings, program, rubric, data, lm, settings),
        default_progress(progress),
    )
    split = config.split
    with open_job(
        config, program=program, rubric=rubric, lm=lm, progress=progress, store=store, resume=resume, need=(split,)
    ) as job:
        collection = _Collection(job, config, progress)
        try:
            collection.run()
        except BudgetExceeded as cap:
            job.status, collection.stopped = "stopped", str(cap)
        finally:
            curriculum = collection.keep_curriculum()
        if collection.schedule is not None:
            collection.notes += collection.schedule.notes()
        called = job.models()
    return CollectReport(
        collection.evaluation,
        job.session.meter,
        job.run_id,
        len(collection.evaluation.runs),
        collection.resumed,
        collection.stopped,
        curriculum,
        collection.notes,
        job.session.recorder.unrecorded,
        job.store.not_stored,
        job.rows,
        called,
    )


class _Collection:
    """The rollouts of a job: of all tasks of a split, or of the stages of a curriculum."""

    def __init__(self, job: Job, config: CollectSettings, progress: Progress) -> None:
        self.job, self.config, self.progress = job, config, progress
        self.evaluation, self.resumed = Evaluation(), 0
        self.stopped: str | None = None
        self.notes = list[str]()
        self.done = job.runs_before("collect")
        self.schedule = schedule_of(job, seed=config.seed, steps=None, progress=progress)

    def run(self) -> None:
        job, n, split = self.job, self.config.n, self.config.split
        tasks = getattr(job.splits, split)
        job.session.register(tasks, split)
        read = (split,) if self.schedule is None else SPLITS  # a curriculum reads val too
        self.notes += [*job.warnings, *unused_settings(job, read=read)]
        if any((task.id, sample) not in self.done for task in tasks for sample in range(n)):
            measured = checked(job, tasks, split=split, recorded=_sampler(job, 0, self.config.over))
            self.notes += measured.warnings if measured else ()
        if self.schedule is None:
            self._collect(tasks)
        else:
            self._collect_stages(self.schedule)

    def _collect(self, tasks: Sequence[Task], first: int = 0, title: str = "") -> None:
        """`n` rollouts of each task, numbered from `first`."""
        job, n = self.job, self.config.n
        with job.session.phase("collect"):
            for sample in range(first, first + n):
                known = {(task.id, 0): self.done[task.id, sample] for task in tasks if (task.id, sample) in self.done}
                self.resumed += len(known)
                name = f"collect{title}: rollout {sample - first + 1} of {n}"
                recorded = _sampler(job, sample, self.config.over)
                run_evaluation(recorded, tasks, job.session, name=name, into=self.evaluation, known=known)

    def _collect_stages(self, schedule: Schedule) -> None:
        """The stages in turn, until one is not passed on val; a stage with a limit is left all the same.

        A resumed run draws the same tasks in the same order, and takes what was finished from the store.
        """
        scored, step = self.job.runs_before("promotion"), 0
        self.job.session.register(self.job.splits.val, "val")
        times = Counter[str]()  # collections of each task
        while not schedule.complete:
            stage, tasks = schedule.stage, schedule.whole_stage(step)
            rounds = sorted({times[task.id] for task in tasks})
            for number in rounds:
                part = [task for task in tasks if times[task.id] == number]
                self._collect(part, number * self.config.n, f" {stage.name}{', replays' if number else ''}")
            times.update(task.id for task in tasks)
            step += 1
            with self.job.session.phase("promotion"):
                name = f"val of stage {stage.name}"
                result = run_evaluation(
                    self.job.recorded, schedule.val_tasks(), self.job.session, name=name, known=scored
                )
            if not schedule.scored(promotion_score(result.scores.values()), step):
                if stage.max_share is None:
                    break
                schedule.leave(step)
            self.keep_curriculum()

    def keep_curriculum(self) -> Mapping[str, Any] | None:
        return None if self.schedule is None else keep_schedule(self.schedule)


def _sampler(job: Job, sample: int, over: Sequence[Mapping[str, Any]]) -> RecordedProgram:
    """The program for the `sample`-th rollout of every task, with its parameters from `over`."""
    recorded = job.recorded.another(sample)
    if over:
        recorded.program = copied(recorded.program)
        recorded.set_parameters(over[sample % len(over)])
    recorded.group = job.run_id
    return recorded
