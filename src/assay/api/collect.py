"""Public API for `assay collect`: groups of scored rollouts in the store. Exports nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import dspy

from assay.datasets import Task
from assay.errors import BudgetExceeded
from assay.evaluation import Evaluation, Progress, RecordedProgram, SilentProgress
from assay.evaluation import evaluate as run_evaluation
from assay.models import Meter
from assay.rubrics import Rubric
from assay.runs.arguments import program_settings, resolve_model, resolve_program, takes
from assay.runs.jobs import Job, open_job
from assay.runs.preflight import checked
from assay.runs.settings import CollectSettings
from assay.runs.settings.options import CollectOptions
from assay.runs.unused import unused_settings
from assay.sources.trust import trusts
from assay.support.reprs import ReportRepr
from assay.traces.missed import NOTHING, Unrecorded

__all__ = ["CollectReport", "collect"]


@dataclass(repr=False)
class CollectReport(ReportRepr):
    """What `collect` returns: one evaluation over all rollouts. `resumed`: how many of them an earlier process made."""

    evaluation: Evaluation
    meter: Meter
    run_id: str
    rollouts: int
    resumed: int
    stopped: str | None = None
    unrecorded: Unrecorded = NOTHING

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
            "stopped": self.stopped, **self.unrecorded.to_dict(),
        }  # fmt: skip


@trusts
@takes(CollectSettings)
def collect(
    program: Any,
    *,
    rubric: str | Path | Rubric,
    data: Any,
    lm: dspy.LM | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Unpack[CollectOptions],
) -> CollectReport:
    """Stores `n` scored rollouts of each task of a split, as one group per task.

    Rollouts of the same task have separate entries in the response cache, so a seeded run replays. `resume` continues
    an unfinished run without repeating finished rollouts.

    Args:
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
        progress or SilentProgress(),
    )
    n, split, over = config.n, config.split, config.over
    evaluation, stopped, resumed_runs = Evaluation(), None, 0
    with open_job(
        config, program=program, rubric=rubric, lm=lm, progress=progress, store=store, resume=resume, need=(split,)
    ) as job:
        tasks = _tasks(job, split)
        done = job.runs_before("collect")
        try:
            if any((task.id, sample) not in done for task in tasks for sample in range(n)):
                checked(job, tasks, split=split, student=_sampler(job, 0, over))
            with job.session.phase("collect"):
                for sample in range(n):
                    earlier = {(task.id, 0): done[task.id, sample] for task in tasks if (task.id, sample) in done}
                    resumed_runs += len(earlier)
                    name = f"collect: rollout {sample + 1} of {n}"
                    run_evaluation(
                        _sampler(job, sample, over), tasks, job.session, name=name, into=evaluation, known=earlier
                    )
        except BudgetExceeded as cap:
            job.status, stopped = "stopped", str(cap)
    return CollectReport(
        evaluation,
        job.session.meter,
        job.run_id,
        len(evaluation.runs),
        resumed_runs,
        stopped,
        job.session.recorder.unrecorded,
    )


def _tasks(job: Job, split: str) -> list[Task]:
    tasks: list[Task] = getattr(job.splits, split)
    job.session.register(tasks, split)
    unused_settings(job, split=split)
    return tasks


def _sampler(job: Job, sample: int, over: Sequence[Mapping[str, Any]]) -> RecordedProgram:
    """The program for the `sample`-th rollout of every task, with its parameters from `over`."""
    student = job.student.another(sample)
    if over:
        student.program = student.program.deepcopy()
        student.set_parameters(over[sample % len(over)])
    student.group = job.run_id
    return student
