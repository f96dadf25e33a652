"""`assay evaluate`: score a program or an artifact on one split."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from assay.commands.groups import InStore, JobOutput, Planned, Reported, Trusting, WithPage
from assay.errors import AssayError, BudgetExceeded, ModelError, StoreError
from assay.runs.groups import ProgramJob, Sampled
from assay.support.options import Flag, Share, function_of
from assay.support.report import Report, Table, Words

if TYPE_CHECKING:
    from assay.datasets import Task
    from assay.datasets.rows import RowFindings
    from assay.evaluation import Evaluation, Progress
    from assay.models import Meter
    from assay.models.unrecorded import Unrecorded
    from assay.runs.jobs import Job
    from assay.runs.planning import Request
    from assay.traces.store.evaluations import Evaluated
    from assay.traces.store.sealing import Openings
    from assay.traces.store.store import StoreReads


@dataclass(frozen=True, kw_only=True, repr=False)
class ScoredRuns(Report):
    """Scored runs of a program in one job."""

    program: str
    evaluation: "Evaluation"
    meter: "Meter"
    stopped: str | None
    unrecorded: "Unrecorded"
    dropped_rows: int
    notes: Sequence[str]
    run_id: str
    rows: "RowFindings"
    called: Mapping[str, Any]  # see `Job.models`

    def to_dict(self) -> dict[str, Any]:
        usage = self.meter.usage
        return {
            "result": self.unrecorded.priced(self.evaluation.report()), "data": self.rows.to_dict(),
            "calls": usage.calls, "cached": usage.cached, "repeated_calls": usage.repeated,
            "tokens": usage.tokens, "cost_usd": self.unrecorded.cost(usage.known_cost_usd),
            "stopped": self.stopped, "notes": list(self.notes),
            "model": self.called.get("model"), "models": self.called.get("models", []),
            **self.unrecorded.to_dict(), "rows_not_stored": self.dropped_rows,
        }  # fmt: skip

    def limiting_lines(self, data: Mapping[str, Any]) -> Iterator[str]:
        """What limits the result: failed runs, calls that were not recorded, notes."""
        from assay.datasets.rows import near_notes
        from assay.reports.markdown import failure_lines, gap_lines
        from assay.runs.ending import advised

        yield from failure_lines(data["result"], is_error=True)
        yield from gap_lines(data)
        stopped = [f"stopped early: {advised(data['stopped'])}"] if data["stopped"] else []
        for note in [*data["notes"], *near_notes(data["data"]), *stopped]:
            yield f"note: {note}"


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationReport(ScoredRuns):
    """What `evaluate` returns."""

    split: str
    alarms: Sequence[str]  # of compiled judges whose verdicts have drifted
    # by criterion, see `assay.runs.correction.corrected_means`
    corrected: Mapping[str, dict[str, Any]]
    openings: "Openings | None"  # of the test split
    tasks: int  # of the split; a cap may have ended the run before all of them were scored
    held_out: bool  # only sealed tasks were scored, from which the artifact did not learn

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(), "split": self.split, "tasks": self.tasks, "held_out": self.held_out,
            "alarms": list(self.alarms), "corrected": dict(self.corrected),
            "test_openings": self.openings.to_dict() if self.openings else None,
        }  # fmt: skip

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.markdown import models_text
        from assay.traces.store.sealing import openings_line

        data = self.to_dict()
        yield self._table(data)
        if text := models_text(data):
            yield f"LM calls by model: {text}"
        for name, corrected in data["corrected"].items():
            yield (
                f"{name}, corrected by {corrected['n_people']} human labels: {corrected['mean']:.3f}, 95 % "
                f"[{corrected['low']:.3f}, {corrected['high']:.3f}] "
                f"(verdicts alone {corrected['verdicts_alone']:.3f})"
            )
        if data["test_openings"]:
            yield openings_line(data["test_openings"])
        yield from self.limiting_lines(data)

    def write_page(self, path: str | Path, *, store: str | Path | None = None, words: Words = str) -> Path:
        from assay.reports.files import (
            opened_facts,
            page_notes,
            scores_of,
            short_name,
            spent_facts,
            stopped_facts,
            write_report,
        )
        from assay.traces import Store

        data = self.to_dict()
        result = data["result"]
        with Store(store) as opened:
            scores = scores_of(opened, self.run_id, self.evaluated(opened))
            opened.put_report(path, self.run_id)
        score = "unscored" if result["score"] is None else "{:.3f} [{:.3f}, {:.3f}]".format(
            result["score"], *result["interval"]
        )  # fmt: skip
        facts = [
            ("Score, 95 % interval", score),
            ("Tasks", f"{result['n']} of {self.split}, {result['unscored']} unscored, {result['failed']} failed"),
            *spent_facts(data), *stopped_facts(data, words), *opened_facts(data),
        ]  # fmt: skip
        return write_report(
            path, "report_evaluate.html", title=f"Evaluation of {short_name(self.program)}", facts=facts,
            scores=scores, notes=page_notes(data, words),
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

    def _table(self, data: Mapping[str, Any]) -> Table:
        from assay.reports.markdown import graded, thinking_row, tool_rows, type_label
        from assay.support.numbers import calls_text, counted, figure, price

        result = data["result"]
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
            ("LM calls, with the preflight's", calls_text(data["calls"], data["cached"])),
            *([("thinking tokens a run", thinking_row(thinking))] if thinking is not None else []),
            ("tokens, dollars", f"{data['tokens']:,}, {price(data['cost_usd'])}"),
        ]
        finished = f"{counted(result['n'], 'tasks')}{' finished' if data['stopped'] else ''}"
        title = f"{self.program} on {data['split']}, {finished}"
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
        if problem := _below(report.to_dict(), self.fail_under):
            raise AssayError(f"the score {problem} `fail_under` {self.fail_under:g}")


def _below(data: dict[str, Any], least: float) -> str:
    """Why a score does not meet a threshold; empty if it does. The score of a part of the tasks meets none."""
    from assay.support.numbers import counted

    score, scored, tasks = data["result"]["score"], data["result"]["n"], data["tasks"]
    if score is None:
        return "is missing and cannot meet"
    if data["stopped"] and scored < tasks:
        return f"{score:.3f} is of {scored} of {counted(tasks, 'tasks')} ({data['stopped']}) and cannot meet"
    return f"{score:.3f} is below" if score < least else ""


class Evaluate(Reported, Trusting, InStore, Sampled, ProgramJob):
    """Score PROGRAM (a program's name or an artifact's folder), with a 95 % interval, by criterion and by task type.

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
        from assay.optimizers.budget import too_few_to_score
        from assay.runs.planning import Request

        sizes = job.splits.sizes()
        small = too_few_to_score(sizes, self.split)
        notes = [] if small is None else [f"warning: {small}"]
        return Request(runs=self.samples * sum(sizes[name] for name in self.splits), notes=notes)

    def run(self) -> EvaluationReport:
        from assay.evaluation import Evaluation
        from assay.evaluation.metrics import overridden_format, run_notes, unscored_steps
        from assay.runs.arguments import named
        from assay.runs.correction import corrected_means
        from assay.runs.finished import FinishedRun
        from assay.runs.jobs import open_job
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
            tasks = _registered(job, config)
            learned = job.training_splits()
            used = sum(task.key in learned for task in tasks)
            notes = _notes(job, config, progress)
            stopped, alarms = _evaluated(job, config, tasks, into=evaluation, notes=notes)
            notes += _bias(config, job, used=used, of=len(tasks), finished=len(evaluation))
            notes += run_notes(evaluation.runs.values())
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
            openings = job.openings.to_dict() if job.openings else None
            called = job.models()
            shown = {"stopped": stopped, "notes": notes, "alarms": list(alarms), "test_openings": openings, **called}
            FinishedRun(job.folder, caps=config.caps, about={}).keep(shown)  # for its page
        return EvaluationReport(
            program=config.program, evaluation=evaluation, meter=job.session.meter, split=split, stopped=stopped,
            unrecorded=job.session.recorder.unrecorded, dropped_rows=job.store.not_stored, alarms=alarms,
            corrected=corrected, openings=job.openings, notes=notes, run_id=job.run_id, rows=job.rows, tasks=len(tasks),
            called=called, held_out=split in SEALED and not used,
        )  # fmt: skip


def _registered(job: "Job", config: Evaluate) -> "list[Task]":
    """The tasks to score, registered with their split. Opens the test split if they are among them."""
    tasks: list[Task] = []
    for name in config.splits:
        part = job.splits.unseal() if name == "test" else getattr(job.splits, name)
        job.session.register(part, name)
        tasks += part
    return tasks


def _notes(job: "Job", config: Evaluate, progress: "Progress") -> list[str]:
    """Notes that limit what the score means: rows of the data, unused settings, too few tasks."""
    from assay.optimizers.budget import too_few_to_score
    from assay.optimizers.prompts.thinking import never_revises
    from assay.runs.unused import unused_settings

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
    from assay.runs.anchors import replay_of_rubric
    from assay.runs.preflight import checked

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


evaluate = function_of(Evaluate, "evaluate")
