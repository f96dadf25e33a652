"""`assay compile`: the main job. Does not search prompts: `assay.optimizers.prompts` does."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt

from assay.commands.groups import InStore, JobOutput, NewArtifact, Planned, Reported, Trusting, WithPage, check_coverage
from assay.errors import AssayError, ConfigError, ModelError
from assay.jobs.groups import AgentJob, PromptJob, Source
from assay.jobs.job_report import JobReport
from assay.support.options import Flag, Positive, function_of
from assay.support.report import OBJECT, Table

if TYPE_CHECKING:
    from typing import Self

    import dspy

    from assay.evaluation import Progress
    from assay.evaluation.session import Measured
    from assay.jobs.job import Job
    from assay.jobs.planning import Request
    from assay.optimizers import CompileOutcome
    from assay.optimizers.budget import Decisions
    from assay.reports.files import Page
    from assay.traces import Store


_OF_PROGRAMS = ("knn", "ensemble", "labeled")  # optimizers that choose demonstrations per task, or show labels


@dataclass(frozen=True, kw_only=True, repr=False)
class CompileReport(JobReport):
    """What `compile` returns. `program` runs under any language model.

    Attributes:
        unproven: artifact of the winner on val, if gate did not prove it better; the artifact then has the baseline
        failed: why the optimizer ended with an error; null if it did not
        patch: file with the changes of the agent's files, for `git apply`; null for a program, and without a change
        applied: files of the agent that `apply` wrote
        test: `baseline`, the program as it was, and `compiled`, each an [Evaluation](#evaluation), and their `gain`,
            see [Gain](#gain); these are null where the baseline is kept
    """

    artifact: Path
    unproven: Path | None = None
    optimizer: str
    winner: str
    search_calls: int
    replaces: bool
    gate: Mapping[str, Any] | None
    failed: str | None
    candidates: Sequence[Mapping[str, Any]]
    test: Mapping[str, Any]
    patch: Path | None = None
    applied: Sequence[str] = ()
    not_applied: str = field(default="", metadata=OBJECT)  # why `apply` wrote nothing
    config: Any = field(metadata=OBJECT)  # the settings, with names in place of objects
    run_id: str = field(metadata=OBJECT)
    # what was searched and compared; None for the report of a run that had already ended
    outcome: "CompileOutcome | None" = field(default=None, metadata=OBJECT)
    own_lm: Callable[[], Any] | None = field(default=None, metadata=OBJECT)  # if none is configured in DSPy

    @property
    def program(self) -> "dspy.Module":
        from assay.deployment.artifact import runnable
        from assay.jobs.loading import load
        from assay.programs.isolation import copied

        if self.outcome is None:
            return load(self.artifact)
        result = self.outcome.result
        return runnable(copied(result.program), result.settings, self.own_lm)

    @property
    def failure(self) -> str:
        return self.failed or self.not_applied

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.markdown import cost_words, failure_lines, gain_claim, why_sealed, with_interval
        from assay.support.numbers import calls_text

        before, after, gain = (self.test[key] for key in ("baseline", "compiled", "gain"))
        if before and after and gain:
            yield sides_table(before, after)
            yield from failure_lines(after)
            claim = "" if gain["mean"] is None else f": {gain_claim(gain['low'], gain['high'], self.test_openings)}"
            yield f"gain, paired: {with_interval(gain)}{claim}"
        else:
            yield why_sealed(vars(self))
        yield from self.opened()
        if self.gate:
            verdict = (
                "the compiled program replaces the baseline"
                if self.replaces
                else "no proof on gate that it is better: the baseline is kept, in the artifact too"
            )
            yield f"gate: {with_interval(self.gate)}: {verdict}"
        elif self.winner != "baseline":
            yield (
                "gate: not decided, so nothing proves that the compiled program is better: the baseline is kept"
                if self.unproven
                else "gate: not asked to decide; the artifact has the winner on val"
            )
        unpriced = f" ({self.unpriced_calls} calls without a known price)" if self.unpriced_calls else ""
        yield (
            f"winner: {self.winner}; LM calls: {calls_text(self.calls, self.cached)}, {self.search_calls:,} of them "
            f"searching; {self.tokens:,} tokens, {cost_words(self.cost_usd)}{unpriced}"
        )
        yield from self.called()
        yield from self.limits()
        if self.artifact.name:  # not yet while its own page is written
            yield f"artifact: {self.artifact}"
        if self.unproven:
            yield f"unproven program: {self.unproven}"
        winner = next((one for one in self.candidates if one["name"] == self.winner), {})
        yield from (f"changed {reason}" for reason in winner.get("why", ()))
        if self.applied:
            yield f"applied: {', '.join(self.applied)}"
        elif self.patch is not None:
            yield f"new texts: git apply {self.patch}"

    def page_of(self, store: "Store") -> "Page":
        from assay.reports.compiled import compile_page
        from assay.reports.files import ROWS, Page, short_name
        from assay.traces.store.listing import run_folder

        config = self.config
        facts = [("Program", config.program), ("Model", config.model_name), ("Optimizer", self.optimizer)]
        # rows of the store, not of the report in memory: the page of a finished run can be written again
        page = compile_page(store, self.run_id, self.to_dict(), run_folder(store.url, self.run_id), rows=ROWS)
        page = replace(page, decisions=[], openings="")  # which the lines say
        return Page(
            template="report_compile.html", title=f"Compile of {short_name(config.program)}", facts=facts,
            values={"page": page, "run_id": self.run_id}, runs=[self.run_id],
        )  # fmt: skip


def sides_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
    """The sealed test, before and after."""
    from assay.reports.markdown import graded, tool_rows, type_label
    from assay.support.numbers import counted, figure, price

    sides, kinds = (before, after), after["task_types"]
    # a side that came from the cache has no cost to compare with either
    unpriced = any(side["cost_usd"] is None for side in sides)

    def row(label: str, cell: Callable[[Mapping[str, Any]], str]) -> tuple[str, ...]:
        return label, *map(cell, sides)

    rows = [
        row("score", lambda side: figure(side["score"])),
        *((f"  {name}", *(graded(side, name) for side in sides)) for name in after["criteria"]),
        *(
            (f"  {type_label(kind)}", *(figure(side["task_types"].get(kind)) for side in sides))
            for kind in (kinds if len(kinds) > 1 else ())
        ),
        *tool_rows(sides),
        row("failed runs", lambda side: str(side["failed"])),
        row("unscored", lambda side: str(side["unscored"])),
        row("LM calls a task", lambda side: f"{side['calls_per_task']:.1f}"),
        row("tokens a task", lambda side: f"{side['tokens_per_task']:.1f}"),
        row("cost", lambda side: price(None if unpriced else side["cost_usd"])),
    ]
    title = f"sealed test split, {counted(after['n'], 'tasks')}"
    return Table(title=title, header=("", "baseline", "compiled"), rows=rows, strong=("score",))


class CompileOutput(WithPage, Planned, JobOutput):
    """Output."""

    def finish(self, command: Any, report: Any) -> None:
        # the baseline's on val where the test stayed sealed
        parts = report.candidates[:1] if report.test["compiled"] is None else report.test
        check_coverage(parts, self.min_coverage)


class Compile(Reported, Trusting, InStore, NewArtifact, AgentJob, PromptJob):
    """Compile the prompts of PROGRAM, or the texts of an agent of any framework (`agent`, `text`), against a rubric,
    and report the gain on a sealed test split.

    PROGRAM is path/to/file.py[:Class], package.module:Class, an artifact's folder, or a shipped program
    (math_qa, classify, extract, tool_user, code_repair, answer_from_documents, text_to_sql, nim, experiment,
    converse).

    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; call again with `resume=True`.
    """

    OUTPUT: ClassVar[Any] = CompileOutput
    kind: ClassVar[str] = "compile"

    text: Annotated[Sequence[str], Flag(metavar="FILE", path=True)] = ()
    """Text of the agent to improve: FILE, FILE#NAME for what is between `<!-- assay:NAME -->` and
    `<!-- /assay:NAME -->`, or FILE#/json/pointer for a value of a JSON or YAML file; repeatable."""
    delivery: Literal["gateway", "copy", "task"] = "gateway"
    """How the agent gets new texts. gateway: they are replaced in its requests, and the agent stays as it is; copy: a
    command runs in a copy of the working directory that has them; task: the agent reads them from task['texts'], or
    from the JSON file in ASSAY_TEXTS."""
    max_text_tokens: Positive = 2000
    """Maximum number of tokens of a new text of the agent without its examples. A text may also have at most 300 tokens
    more than its own, or twice as many."""
    data: Annotated[Source | None, Flag(metavar="D", path=True)] = None
    """Tasks: a .jsonl, .json, .csv or .parquet file, or a spec (hf:…, reasoning_gym:…, bfcl:…, mutants:…,
    arithmetic:…, tools:…, documents:…, conversations:…, nim:…, experiment:…, curriculum:…). In Python also a data
    frame, rows, or a mapping from splits to such data."""
    trainset: Annotated[Source | None, Flag(metavar="FILE", key=False)] = None
    """Tasks of train; the splits that have no file are taken from `data`."""
    valset: Annotated[Source | None, Flag(metavar="FILE", key=False)] = None
    """Tasks of val, as `trainset`."""
    thinking_margin: Annotated[float, Ge(0), Lt(1)] | None = None
    """Maximum loss in score for saving thinking tokens. After the search, the agent's thinking policy, or the halting
    of a Refine program, is fitted on val: of the settings whose loss is at most this by a one-sided 95 % interval, the
    one that saves most tokens is chosen. This takes at least 3 / margin val tasks. By default nothing is fitted. The
    program must be an Agent with a thinking budget, or a Refine program. A policy takes six runs of each val task,
    which `max_search_calls` does not count."""
    apply: Annotated[bool, Flag(key=False)] = False
    """Write the new texts into the agent's files, if they replace the old ones. A file that changed meanwhile is not
    overwritten. Outside of a git repository the old file is kept as FILE.orig."""
    gate: Annotated[bool, Flag(key=False, shown=False)] = True
    """Whether the gate split decides if the result replaces the program. If not, the result is the winner on val; for
    callers that decide themselves."""
    test: Annotated[bool, Flag(key=False, shown=False)] = True
    """Whether the report at the end includes the sealed test split."""

    def check(self) -> None:
        if self.data is None and self.trainset is None and self.valset is None:
            hint = "Give it here or in assay.toml, which assay init writes"
            raise ConfigError("is missing: it names the tasks", field="data", hint=hint)
        if self.agent is None and (unused := self.changed("text", "delivery", "max_text_tokens")):
            raise ConfigError("would have no effect without `agent`", field=unused[0])
        if self.agent is None and self.apply:
            raise ConfigError("would have no effect without `agent`: a program has no files of texts", field="apply")
        if self.agent is not None and not self.text:
            raise ConfigError("is missing: it names the files whose texts are improved", field="text")
        if self.agent is not None and self.optimizer in _OF_PROGRAMS:
            raise ConfigError(
                f"{self.optimizer} cannot be used for the texts of an agent, as no file can hold its result: use auto, "
                "or one that writes instructions, such as gepa",
                field="optimizer",
            )

    @property
    def texts(self) -> Sequence[str]:
        return self.text

    @property
    def delivered(self) -> Mapping[str, Any]:
        return {"delivery": self.delivery, "most_tokens": self.max_text_tokens}

    @property
    def decisions(self) -> "Decisions":
        return replace(super().decisions, gate=self.gate, test=self.test)

    @property
    def reports_on(self) -> tuple[str, ...]:
        """The splits that the job runs."""
        off = {"gate": self.gate, "test": self.test}
        return tuple(name for name in ("train", "val", "gate", "test") if off.get(name, True))

    @property
    def needed(self) -> tuple[str, ...]:
        from assay.datasets.memory import names_splits

        return self.reports_on if names_splits(self.data) else super().needed

    def prepared(self) -> "Self":
        from assay.jobs.arguments import split_data

        data = split_data(self.data, self.trainset, self.valset, need=self.reports_on)
        return replace(self, data=data, trainset=None, valset=None)

    def request(self, job: "Job", each: float) -> "Request":
        from assay.jobs.planning import with_report
        from assay.optimizers.budget import search_runs

        return with_report(job, search_runs(self.max_search_calls, each, job.splits.sizes()["val"]))

    def run(self) -> CompileReport:
        from assay.jobs.arguments import named, refuse_function, resolve_program
        from assay.jobs.artifacts import require_portable
        from assay.jobs.job import open_job
        from assay.jobs.opening import artifact_place, check_out
        from assay.jobs.preflight import require_predictors

        if self.agent is None and self.program is not None:
            refuse_function(resolve_program(self.program))
        settings, progress = self.prepared(), self.reporter
        program, lm, config = named(settings)
        check_out(self.out, resume=self.resume)
        with open_job(
            config, program=program, rubric=self.rubric, lm=lm, progress=progress, store=self.store,
            resume=self.resume, need=settings.needed,
        ) as job:  # fmt: skip
            require_predictors(job)
            job.status = "stopped"  # until the job is complete
            finished = job.finished({"gate": self.gate, "test": self.test})
            if job.session.recorder.resumed and (stored := finished.report(progress, out=self.out)) is not None:
                job.end_as_before(stored)
                return _applied(_as_stored(stored, config, job.run_id))
            place = artifact_place(self.store, self.out, _artifact_name(job, config), resume=self.resume)
            outcome = _compiled(job, config, progress)
            called = job.models()

            def report() -> CompileReport:
                return _report(job, config, outcome, called, partial(_model_of, lm, config))

            if outcome.stopped is None:
                job.status = "done"
            written = _artifacts(job, report(), place)
            if outcome.broken is not None:
                kept = written["unproven"] or written["artifact"]
                raise ModelError(
                    f"{outcome.broken}. What was searched is kept in {kept}; compile with `resume=True` "
                    "once the model answers"
                )
            finished.keep(replace(report(), **written).to_dict())
            if config.portable and config.agent is None:
                require_portable(job, written["artifact"])
        return _applied(replace(report(), **written))


def _applied(report: CompileReport) -> CompileReport:
    """The report of an agent's texts, which are written into its files if `apply` asks for it."""
    from assay.jobs.agents import apply_texts

    if not report.config.apply or report.patch is None:
        return report
    try:
        files, kept = apply_texts(report.artifact)
    except ConfigError as error:
        return replace(report, not_applied=f"{error} ({report.patch})")
    notes = [f"the old file is kept as {path}" for path in kept]
    return replace(report, applied=[str(path) for path in files], notes=[*report.notes, *notes])


def _model_of(lm: "dspy.LM | None", config: Compile) -> "dspy.LM":
    """The model that a job was given, or one by the name that it was given."""
    from assay.models import get_lm
    from assay.models.roles import Endpoint

    if lm is not None:
        return lm
    return get_lm(config.model_name, **Endpoint(config.api_base, config.api_key_env).client(config.model_name))


def _compiled(job: "Job", config: Compile, progress: "Progress") -> "CompileOutcome":
    """Preflight, estimate, search, gate and test."""
    from assay.jobs.agents import agent_notes, find_texts
    from assay.jobs.anchors import replay_of_rubric
    from assay.jobs.artifacts import rehearsed
    from assay.jobs.checks import unused_settings
    from assay.jobs.preflight import checked, see_models
    from assay.optimizers import compile_prompts
    from assay.optimizers.budget import announce_splits
    from assay.optimizers.prompts.named import Proposal
    from assay.optimizers.prompts.teleprompters import check_made

    splits, session = job.splits, job.session
    made = Proposal(job.recorded, splits.train, splits.val, session, settings=config.optimizer_settings or {})
    check_made(config.optimizer, made)
    notes = [*announce_splits(splits, progress), *job.warnings, *unused_settings(job)]
    measured = checked(job, splits.val)
    find_texts(job.recorded, splits.val, session)
    _announce(job, config, measured)
    notes += [*(measured.warnings if measured else ()), *see_models(job)]
    notes += rehearsed(job, portable=config.portable) if config.agent is None else []
    notes += replay_of_rubric(session.rubric, session)
    outcome = compile_prompts(
        job.recorded, splits, session, config, config.decisions, thinking_margin=config.thinking_margin,
        folder=job.folder,
    )  # fmt: skip
    outcome.notes += [note for note in [*notes, *agent_notes(job.recorded.program)] if note not in outcome.notes]
    return outcome


def _report(
    job: "Job", config: Compile, outcome: "CompileOutcome", called: Mapping[str, Any], own_lm: Callable[[], Any]
) -> CompileReport:
    """The report without the artifact, which is written with it."""
    sides = {"baseline": outcome.test_baseline, "compiled": outcome.test_compiled}
    test = {name: None if side is None else job.priced(side) for name, side in sides.items()}
    return CompileReport(
        artifact=Path(), optimizer=config.optimizer, winner=outcome.winner, stopped=outcome.stopped,
        search_calls=job.session.meter.of("search").calls, replaces=outcome.replaces, failed=outcome.failed,
        gate=outcome.gate.to_dict() if outcome.gate else None, candidates=outcome.candidates, notes=outcome.notes,
        test={**test, "gain": outcome.test_gain.to_dict() if outcome.test_gain else None},
        config=config, run_id=job.run_id, outcome=outcome, own_lm=own_lm, **job.spent(called),
    )  # fmt: skip


def _as_stored(stored: Mapping[str, Any], config: Compile, run_id: str) -> CompileReport:
    """The report of a run that had already ended."""
    from assay.deployment import load_artifact

    report = CompileReport.read(stored, {"config": config, "run_id": run_id})
    try:
        load_artifact(report.artifact)
    except AssayError as error:  # the report is complete without the program
        return replace(report, notes=[*report.notes, f"the artifact cannot be loaded here: {error}"])
    return report


def _artifact_name(job: "Job", config: Compile) -> str:
    from assay.jobs.opening import short_title
    from assay.optimizers.prompts.given import title_of

    class_name = short_title(job.session.program_name)
    return f"{class_name}-{title_of(config.optimizer).rpartition(':')[2].lower()}"


def _announce(job: "Job", config: Compile, measured: "Measured | None") -> None:
    """Says what the search as far as its caps allow, gate and test will probably take."""
    from assay.optimizers.budget import (
        cost_text,
        estimated,
        forecast_pair,
        minutes_text,
        plan_report,
        run_calls,
        search_runs,
    )

    session, splits, program = job.session, job.splits, job.recorded.program
    pair, each = forecast_pair(program, session), max(1.0, sum(run_calls(program, session)))
    plan = plan_report(splits, session.meter, config.decisions, pair=pair, searching=True)
    reported = pair.calls * (plan.gate + plan.test)
    search = each * search_runs(session.meter.caps.search_calls, each, splits.sizes()["val"])
    if config.max_calls is not None:  # which keeps those of gate and test from the search
        search = min(search, max(0, config.max_calls - reported))
    latency = None if measured is None else measured.latency_s
    calls = round(search) + reported
    guess = estimated(calls, program, splits, session, demos=config.demos, latency_s=latency)
    caps = [f"{name} {value:g}" for name, value in asdict(config.caps).items() if value is not None]
    minutes = "" if guess.minutes is None else f"; {minutes_text(guess.minutes)} at the latency of the preflight"
    session.progress.say(
        f"estimate: {guess.calls} calls ({round(search)} of them searching), about {guess.tokens:,} tokens, "
        f"{cost_text(guess.cost_usd)}" + (f"; caps: {', '.join(caps)}" if caps else "; no caps") + minutes
    )


def _artifacts(job: "Job", report: CompileReport, folder: Path) -> dict[str, Any]:
    """Writes the artifact of the result, and one of a winner on val that is unproven."""
    from assay.jobs.artifacts import keep_artifact
    from assay.reports.files import short_name
    from assay.reports.markdown import markdown
    from assay.sources.artifact_files import PATCH

    outcome, beside = report.outcome, None
    assert outcome is not None
    result = {key: value for key, value in report.to_dict().items() if key not in ("artifact", "unproven", "patch")}
    title, about = (
        short_name(report.config.program),
        f"Compiled with `{report.optimizer}` for `{job.session.lm.model}`.",
    )
    if outcome.unproven:
        beside = folder.with_name(f"{folder.name}-unproven")
        text = markdown(replace(report, unproven=beside), title=title, about=about)
        beside = keep_artifact(job, outcome.compiled, beside, result, text, unproven=True)
    text = markdown(replace(report, unproven=beside), title=title, about=about)
    artifact = keep_artifact(job, outcome.result, folder, result, text)
    patch = artifact / PATCH
    return {"unproven": beside, "artifact": artifact, "patch": patch if patch.is_file() else None}


compile = function_of(Compile, "compile")
