"""`assay evaluate`: score a program or an artifact on one split."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from assay.commands.groups import InStore, JobOutput, Planned, Reported, Trusting, WithPage
from assay.errors import AssayError, BudgetExceeded, ModelError, StoreError
from assay.jobs.groups import AgentJob, ProgramJob, Sampled
from assay.jobs.job_report import JobReport
from assay.support.options import Flag, Share, function_of
from assay.support.report import OBJECT, Table

if TYPE_CHECKING:
    from assay.datasets import Task
    from assay.evaluation import Evaluation, Progress
    from assay.jobs.job import Job
    from assay.jobs.planning import Request
    from assay.reports.files import Page
    from assay.traces import Store
    from assay.traces.store.evaluations import Evaluated
    from assay.traces.store.store import StoreReads


@dataclass(frozen=True, kw_only=True, repr=False)
class ScoredRuns(JobReport):
    """Scored runs of a program in one job."""

    result: Mapping[str, Any]
    tasks: int  # of the split; a cap may have ended the run before all of them were scored
    program: str = field(metadata=OBJECT)
    evaluation: "Evaluation" = field(metadata=OBJECT)

    def limits(self) -> Iterator[str]:
        """Also failed runs."""
        from assay.reports.markdown import failure_lines

        yield from failure_lines(self.result, is_error=True)
        yield from super().limits()


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationReport(ScoredRuns):
    """What `evaluate` returns."""

    split: str
    held_out: bool  # only sealed tasks were scored, from which the artifact did not learn
    alarms: Sequence[str]  # of compiled judges whose verdicts have drifted
    # by criterion, see `assay.jobs.rescoring.corrected_means`
    corrected: Mapping[str, dict[str, Any]]
    run_id: str = field(metadata=OBJECT)

    def lines(self) -> Iterator[str | Table]:
        yield self._table()
        yield from self.called()
        for name, corrected in self.corrected.items():
            yield (
                f"{name}, corrected by {corrected['n_people']} human labels: {corrected['mean']:.3f}, 95 % "
                f"[{corrected['low']:.3f}, {corrected['high']:.3f}] "
                f"(verdicts alone {corrected['verdicts_alone']:.3f})"
            )
        yield from self.opened()
        yield from (f"note: {alarm}" for alarm in self.alarms)
        yield from self.limits()

    def page_of(self, store: "Store") -> "Page":
        from assay.reports.files import Page, scores_of, short_name

        return Page(
            template="report_evaluate.html", title=f"Evaluation of {short_name(self.program)}",
            values={"scores": scores_of(store, self.run_id, self.evaluated(store))}, runs=[self.run_id],
        )  # fmt: skip

    def evaluated(self, store: "StoreReads") -> "Evaluated":
        """The rollouts of the evaluation.

        Raises:
            StoreError: the store has none of them.
        """
        from assay.traces.store.evaluations import evaluations_of

        parts = [one for one in evaluations_of(store, self.run_id) if one.phase == "evaluate"]
        if self.split != "all":
            parts = [one for one in parts if one.split == self.split]
        if not parts:
            raise StoreError(f"the store has no rollouts of the run {self.run_id}: there is nothing to report")
        return replace(
            parts[0],
            split=self.split,
            tasks={key: task for part in parts for key, task in part.tasks.items()},
            runs=sorted(run for part in parts for run in part.runs),
        )

    def _table(self) -> Table:
        from assay.reports.markdown import graded, thinking_row, tool_rows, type_label
        from assay.support.numbers import calls_text, counted, figure, price

        result = self.result
        score = "– (nothing could be scored)"
        if result["score"] is not None:
            score = "{:.3f}  95 % [{:.3f}, {:.3f}]".format(result["score"], *result["interval"])
        types = result["task_types"] if len(result["task_types"]) > 1 else {}
        thinking = result["thinking"]
        rows = [
            ("score", score),
            *((f"  {name}", graded(result, name)) for name in result["criteria"]),
            *((f"  {type_label(kind)}", figure(mean)) for kind, mean in types.items()),
            *tool_rows([result]),
            ("failed runs, unscored", f"{result['failed']}, {result['unscored']}"),
            ("LM calls, preflight included", calls_text(self.calls, self.cached)),
            *([("thinking tokens a run", thinking_row(thinking))] if thinking is not None else []),
            ("tokens, dollars", f"{self.tokens:,}, {price(self.cost_usd)}"),
        ]
        finished = f"{counted(result['n'], 'tasks')}{' finished' if self.stopped else ''}"
        title = f"{self.program} on {self.split}, {finished}"
        return Table(title=title, rows=rows, strong=() if result["score"] is None else ("score",))


class ScoredOutput(Planned, JobOutput):
    """Output."""

    def finish(self, command: Any, report: Any) -> None:
        if (reason := report.evaluation.why_unscored) is not None:
            raise ModelError(f"none of the {len(report.evaluation)} tasks could be scored: {reason}")
        super().finish(command, report)


class EvaluationOutput(WithPage, ScoredOutput):
    """Output."""

    fail_under: Annotated[Share | None, Flag(metavar="SCORE")] = None
    """Exit with code 1 if the score is below this or missing (for CI)."""

    def finish(self, command: Any, report: Any) -> None:
        super().finish(command, report)
        if self.dry_run or self.fail_under is None:
            return
        if problem := _below(report, self.fail_under):
            raise AssayError(f"the score {problem} `fail_under` {self.fail_under:g}")


def _below(report: EvaluationReport, least: float) -> str:
    """Why a score does not meet a threshold; empty if it does. The score of a part of the tasks meets none."""
    from assay.support.numbers import counted

    score, scored = report.result["score"], report.result["n"]
    if score is None:
        return "is missing and cannot meet"
    if report.stopped and scored < report.tasks:
        return f"{score:.3f} is of {scored} of {counted(report.tasks, 'tasks')} ({report.stopped}) and cannot meet"
    return f"{score:.3f} is below" if score < least else ""


class Evaluate(Reported, Trusting, InStore, AgentJob, Sampled, ProgramJob):
    """Score PROGRAM (a program's name or an artifact's folder), or an agent of any framework (`agent`), with a 95 %
    interval, by criterion and by task type.

    By default the tasks of `val` are scored. With several samples of each task, the agreement of its answers is part
    of the coherence metric. When a cap is reached, the report covers the finished tasks, and its `stopped` holds the
    reason.

    Raises:
        AssayError: what was wrong, which rule, what to do.
    """

    OUTPUT: ClassVar[Any] = EvaluationOutput
    kind: ClassVar[str] = "evaluate"

    opens_as: Annotated[str | None, Flag(key=False, shown=False)] = None
    """Id that an opening of the test split is counted for, if this evaluation is part of a larger job."""

    def request(self, job: "Job", each: float) -> "Request":
        from assay.jobs.planning import Request
        from assay.optimizers.budget import too_few_to_score

        sizes = job.splits.sizes()
        small = too_few_to_score(sizes, self.split)
        notes = [] if small is None else [f"warning: {small}"]
        return Request(runs=self.samples * sum(sizes[name] for name in self.splits), notes=notes)

    def run(self) -> EvaluationReport:
        from assay.evaluation import Evaluation
        from assay.evaluation.metrics import overridden_format, run_notes, unscored_steps
        from assay.jobs.agents import agent_notes
        from assay.jobs.arguments import named
        from assay.jobs.ending import FinishedRun
        from assay.jobs.job import open_job
        from assay.jobs.rescoring import corrected_means
        from assay.traces.store.sealing import SEALED

        program, lm, config = named(self)
        progress = self.reporter
        split, evaluation = config.split, Evaluation()
        with open_job(
            config,
            program=program,
            rubric=self.rubric,
            lm=lm,
            progress=progress,
            store=self.store,
            resume=self.resume,
            need=config.needed,
            opens_as=self.opens_as,
        ) as job:
            tasks = _tasks(job, config)
            learned = job.training_splits()
            used = sum(task.key in learned for task in tasks)
            notes = _notes(job, config, progress)
            stopped, alarms = _evaluated(job, config, tasks, into=evaluation, notes=notes)
            notes += _bias(config, job, used=used, of=len(tasks), finished=len(evaluation))
            notes += [*run_notes(evaluation.runs.values()), *agent_notes(job.recorded.program)]
            calls = [run.steps or 0 for run in evaluation.runs.values() if run.error is None]
            notes += [
                note
                for note in (
                    *overridden_format(job.recorded.prompt_format, evaluation.sent_formats),
                    *unscored_steps(job.session.rubric.criteria, calls),
                )
                if note not in notes  # the preflight may have said so
            ]
            corrected = {}
            if job.session.rubric.needs_judge:
                job.store.settle()
                file = config.rubric if config.rubric.lower().endswith((".yaml", ".yml")) else ""
                corrected = corrected_means(job.session.rubric, job.store, job.run_id, file=file)
            called = job.models()

            def report() -> EvaluationReport:
                return EvaluationReport(
                    result=job.priced(evaluation), tasks=len(tasks), program=config.program, evaluation=evaluation,
                    split=split, held_out=split in SEALED and not used, alarms=alarms, corrected=corrected,
                    run_id=job.run_id, stopped=stopped, notes=notes, **job.spent(called),
                )  # fmt: skip

            FinishedRun(job.store, job.run_id, caps=config.caps, about={}).keep(report().to_dict())
        return report()


def _tasks(job: "Job", config: Evaluate) -> "list[Task]":
    """The tasks to score. Opens the test split if they are among them."""
    parts = (job.splits.unseal() if name == "test" else getattr(job.splits, name) for name in config.splits)
    return [task for part in parts for task in part]


def _notes(job: "Job", config: Evaluate, progress: "Progress") -> list[str]:
    """Notes that limit what the score means: rows of the data, unused settings, too few tasks."""
    from assay.jobs.checks import unused_settings
    from assay.optimizers.budget import too_few_to_score
    from assay.optimizers.prompts.thinking import never_revises

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


def _bias(config: Evaluate, job: "Job", *, used: int, of: int, finished: int) -> list[str]:
    """Notes about tasks that are not held out; none without such tasks."""
    from assay.support.numbers import counted

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
    job: "Job", config: Evaluate, tasks: "Sequence[Task]", *, into: "Evaluation", notes: list[str]
) -> tuple[str | None, list[str]]:
    """Runs the tasks that no earlier process has finished.

    Returns:
        The cap that ended the run, if any, and the alarms of judges that have drifted.
    """
    from assay.evaluation import evaluate as run_evaluation
    from assay.jobs.anchors import replay_of_rubric
    from assay.jobs.preflight import checked

    earlier, samples, alarms = job.runs_before("evaluate"), config.samples, list[str]()
    try:
        if any((task.id, sample) not in earlier for task in tasks for sample in range(samples)):
            measured = checked(job, tasks)
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


evaluate = function_of(Evaluate, "evaluate")
