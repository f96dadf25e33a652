"""Public API for `assay evaluate`: `assay.evaluate`. Scores one split; does not compile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import dspy

from assay.api.judge.correction import corrected_means
from assay.datasets import Task
from assay.datasets.rows import NO_ROWS, RowFindings
from assay.errors import BudgetExceeded
from assay.evaluation import Evaluation, Progress, default_progress
from assay.evaluation import evaluate as run_evaluation
from assay.evaluation.metrics import overridden_format, run_notes
from assay.models import Meter
from assay.models.unrecorded import NOTHING, Unrecorded
from assay.optimizers.budget import too_few_to_score
from assay.optimizers.prompts.thinking import never_revises
from assay.rubrics.loading import RubricSource
from assay.runs.anchors import replay_of_rubric
from assay.runs.arguments import program_settings, resolve_model, resolve_program
from assay.runs.finished import FinishedRun
from assay.runs.jobs import Job, open_job
from assay.runs.preflight import checked
from assay.runs.settings import EvaluateSettings
from assay.runs.settings.options import EvaluateOptions
from assay.runs.unused import unused_settings
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.numbers import counted
from assay.support.reprs import ReportRepr
from assay.traces.store.sealing import SEALED, Openings


@dataclass(repr=False)
class EvaluationReport(ReportRepr):
    """What `evaluate` returns."""

    evaluation: Evaluation
    meter: Meter
    split: str
    stopped: str | None = None
    unrecorded: Unrecorded = NOTHING
    dropped_rows: int = 0
    alarms: Sequence[str] = ()  # of compiled judges whose verdicts have drifted
    # by criterion, see `assay.api.judge.correction.corrected_means`
    corrected: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    openings: Openings | None = None  # of the test split
    notes: Sequence[str] = ()
    run_id: str = ""
    rows: RowFindings = NO_ROWS
    tasks: int = 0  # of the split; a cap may have ended the run before all of them were scored
    called: Mapping[str, Any] = field(default_factory=dict)  # see `Job.models`
    held_out: bool = False  # only sealed tasks were scored, from which the artifact did not learn

    def to_dict(self) -> dict[str, Any]:
        usage = self.meter.usage
        return {
            "result": self.unrecorded.priced(self.evaluation.report()), "split": self.split,
            "tasks": self.tasks, "held_out": self.held_out, "data": self.rows.to_dict(),
            "calls": usage.calls, "cached": usage.cached, "repeated_calls": usage.repeated,
            "tokens": usage.tokens, "cost_usd": self.unrecorded.cost(usage.known_cost_usd),
            "stopped": self.stopped, "alarms": list(self.alarms), "notes": list(self.notes),
            "corrected": dict(self.corrected), "test_openings": self.openings.to_dict() if self.openings else None,
            "model": self.called.get("model"), "models": self.called.get("models", []),
            **self.unrecorded.to_dict(), "rows_not_stored": self.dropped_rows,
        }  # fmt: skip


@takes(EvaluateSettings)
@trusts
def evaluate(
    program: Any,
    *,
    rubric: RubricSource,
    data: Any,
    lm: dspy.LM | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    opens_as: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[EvaluateOptions],
) -> EvaluationReport:
    """Scores a program or an artifact on one split, by default `val`. `split="test"` opens the sealed split.

    `split="all"` scores every row, without a limit on their number. That opens the test split too, and the score is
    not held out.

    When a cap is reached, the report covers the finished tasks and its `stopped` holds the reason.

    Args:
        program: as in `compile`, or a function of the task's inputs, or an agent with `execute` and `set_parameters`.
        data: as in `compile`.
        lm: as in `compile`; without a model, an artifact is evaluated with the one that it was measured with.
        opens_as: id that an opening of the test split is counted for, if this evaluation is part of a larger job.
        options: the fields of `assay.runs.settings.EvaluateSettings`. With several `samples` of each task, the
            agreement of its answers is part of the coherence metric.
    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    program = resolve_program(program)
    lm, settings = resolve_model(program, lm, options)
    config = program_settings(EvaluateSettings, program, rubric, data, lm, settings)
    progress = default_progress(progress)
    split, evaluation = config.split, Evaluation()
    with open_job(
        config,
        program=program,
        rubric=rubric,
        lm=lm,
        progress=progress,
        store=store,
        resume=resume,
        need=(split,) if split != "all" else (),
        opens_as=opens_as,
    ) as job:
        tasks = _registered(job, config)
        learned = job.training_splits()
        used = sum(task.key in learned for task in tasks)
        notes = _notes(job, config, progress)
        stopped, alarms = _evaluated(job, config, tasks, into=evaluation, notes=notes)
        notes += _bias(config, job, used=used, of=len(tasks), finished=len(evaluation))
        notes += run_notes(evaluation.runs.values())
        notes += [
            note
            for note in overridden_format(job.recorded.prompt_format, evaluation.sent_formats)
            if note not in notes  # the preflight may have said so
        ]
        corrected = {}
        if job.session.rubric.needs_judge:
            job.store.settle()
            file = config.rubric if config.rubric.lower().endswith((".yaml", ".yml")) else ""
            corrected = corrected_means(job.session.rubric, job.store, job.run_id, file=file)
        openings = job.openings.to_dict() if job.openings else None
        called = job.models()
        shown = {"stopped": stopped, "notes": notes, "alarms": list(alarms), "test_openings": openings, **called}
        FinishedRun(job.folder, caps=config.caps, about={}).keep(shown)  # for its page
    return EvaluationReport(
        evaluation, job.session.meter, split, stopped, job.session.recorder.unrecorded, job.store.not_stored, alarms,
        corrected, job.openings, notes, job.run_id, job.rows, len(tasks), called,
        held_out=split in SEALED and not used,
    )  # fmt: skip


def _registered(job: Job, config: EvaluateSettings) -> list[Task]:
    """The tasks to score, registered with their split. Opens the test split if they are among them."""
    tasks: list[Task] = []
    for name in config.splits:
        part = job.splits.unseal() if name == "test" else getattr(job.splits, name)
        job.session.register(part, name)
        tasks += part
    return tasks


def _notes(job: Job, config: EvaluateSettings, progress: Progress) -> list[str]:
    """Notes that limit what the score means: rows of the data, unused settings, too few tasks."""
    warning = too_few_to_score(job.splits.sizes(), config.split)
    notes = [
        *job.warnings,
        *unused_settings(job, read=config.splits),
        *([warning] if warning else []),
        *([why] if (why := never_revises(job.recorded.program)) else []),
    ]
    if warning is not None:
        progress.say(f"warning: {warning}")
    return notes


def _bias(config: EvaluateSettings, job: Job, *, used: int, of: int, finished: int) -> list[str]:
    """Notes about tasks that are not held out; none without such tasks."""
    notes = []
    if config.split == "all":
        sizes = ", ".join(f"{name} {count}" for name, count in job.splits.sizes().items())
        rows = "all rows" if finished == of else f"{finished} of {counted(of, 'rows')}"
        notes = [f"the score is of {rows} ({sizes}), so it is not held out: train and val are there to learn from"]
    if not used:
        return notes
    return [
        *notes,
        f"{used} of these {of} tasks were used to compile {config.program} (demonstrations and selection): its score "
        "on them is biased upwards. The splits gate and test have tasks that it has not seen",
    ]


def _evaluated(
    job: Job, config: EvaluateSettings, tasks: Sequence[Task], *, into: Evaluation, notes: list[str]
) -> tuple[str | None, list[str]]:
    """Runs the tasks that no earlier process has finished.

    Returns:
        The cap that ended the run, if any, and the alarms of judges that have drifted.
    """
    earlier, samples, alarms = job.runs_before("evaluate"), config.samples, list[str]()
    try:
        if any((task.id, sample) not in earlier for task in tasks for sample in range(samples)):
            measured = checked(job, tasks, split=None)
            notes += measured.warnings if measured else ()
        alarms = replay_of_rubric(job.session.rubric, job.session)
        with job.session.phase("evaluate"):
            run_evaluation(
                job.recorded,
                tasks,
                job.session,
                name=f"evaluate: {config.split}",
                samples=samples,
                into=into,
                known=earlier,
            )
    except BudgetExceeded as cap:
        job.status = "stopped"
        return str(cap), alarms
    return None, alarms
