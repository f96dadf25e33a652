"""Public API for `assay compile`: `assay.compile`.

Combines data, model, rubric with judges, program, optimizer and artifact. Does not search prompts:
`assay.optimizers.prompts` does.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import dspy

from assay.api.run import load
from assay.datasets import SPLITS
from assay.datasets.memory import names_splits
from assay.datasets.rows import NO_ROWS, RowFindings
from assay.deployment import load_artifact
from assay.deployment.artifact import runnable
from assay.errors import AssayError, ModelError
from assay.evaluation import Gain, Progress, RecordedProgram, default_progress
from assay.evaluation.session import Measured
from assay.models import Meter, get_lm
from assay.models.roles import Endpoint
from assay.models.unrecorded import NOTHING, Unrecorded
from assay.optimizers import CompileConfig, CompileOutcome, compile_prompts
from assay.optimizers.budget import (
    Decisions,
    announce_splits,
    cost_text,
    estimated,
    forecast_pair,
    minutes_text,
    plan_report,
    run_calls,
    search_cap,
    search_runs,
)
from assay.optimizers.prompts.given import title_of
from assay.optimizers.prompts.named import Proposal
from assay.optimizers.prompts.teleprompters import check_made
from assay.programs.isolation import copied
from assay.reports.markdown import compile_markdown
from assay.rubrics.loading import RubricSource
from assay.runs.anchors import replay_of_rubric
from assay.runs.arguments import program_settings, refuse_function, resolve_model, resolve_program, split_data
from assay.runs.artifacts import keep_artifact, rehearsed, require_portable
from assay.runs.jobs import Job, open_job
from assay.runs.opening import artifact_place, check_out
from assay.runs.preflight import checked, require_predictors, see_models
from assay.runs.settings import CompileSettings
from assay.runs.settings.options import CompileOptions
from assay.runs.unused import unused_settings
from assay.sources.modules import without_call
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.reprs import ReportRepr
from assay.traces.store.sealing import Openings, openings_line


@dataclass(repr=False)
class CompileReport(ReportRepr):
    """What `compile` returns. `to_dict()` is the `--json` object; `program` runs under any language model."""

    artifact: Path
    outcome: CompileOutcome
    meter: Meter
    config: CompileSettings
    unrecorded: Unrecorded = NOTHING
    dropped_rows: int = 0
    openings: Openings | None = None  # of the test split
    stored: Mapping[str, Any] | None = None  # stored report of a run that had already ended
    run_id: str = ""
    own_lm: Callable[[], Any] | None = None  # the model of `program` if none is configured in DSPy
    unproven: Path | None = None  # artifact of the winner on val that gate did not prove better
    rows: RowFindings = NO_ROWS
    called: Mapping[str, Any] = field(default_factory=dict)  # see `Job.models`

    @property
    def program(self) -> dspy.Module:
        if self.stored is not None:
            return load(self.artifact)
        result = self.outcome.result
        return runnable(copied(result.program), result.settings, self.own_lm)

    def to_dict(self) -> dict[str, Any]:
        if self.stored is not None:
            return dict(self.stored)
        usage, search, outcome = self.meter.usage, self.meter.of("search"), self.outcome
        return {
            "artifact": str(self.artifact),
            "unproven": None if self.unproven is None else str(self.unproven),
            "optimizer": self.config.optimizer,
            "winner": outcome.winner,
            "search_calls": search.calls,
            "calls": usage.calls,
            "cached": usage.cached,
            "repeated_calls": usage.repeated,
            "tokens": usage.tokens,
            "cost_usd": self.unrecorded.cost(usage.known_cost_usd),
            "unpriced_calls": usage.unpriced,
            "model": self.called.get("model"),
            "models": self.called.get("models", []),
            **self.unrecorded.to_dict(),
            "rows_not_stored": self.dropped_rows,
            "replaces": outcome.replaces,
            "gate": outcome.gate.to_dict() if outcome.gate else None,
            "stopped": outcome.stopped,
            "failed": outcome.failed,
            "candidates": outcome.candidates,
            "notes": outcome.notes,
            "test": {
                "baseline": self.unrecorded.priced(outcome.test_baseline.report()) if outcome.test_baseline else None,
                "compiled": self.unrecorded.priced(outcome.test_compiled.report()) if outcome.test_compiled else None,
                "gain": outcome.test_gain.to_dict() if outcome.test_gain else None,
            },
            "test_openings": self.openings.to_dict() if self.openings else None,
            "data": self.rows.to_dict(),
        }


@takes(CompileSettings)
@trusts
def compile(
    program: Any,
    *,
    rubric: RubricSource,
    data: Any = None,
    trainset: Any = None,
    valset: Any = None,
    lm: dspy.LM | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    gate: bool = True,
    test: bool = True,
    progress: Progress | None = None,
    words: Callable[[str], str] = str,
    **options: Unpack[CompileOptions],
) -> CompileReport:
    """Compiles a program's prompts against a rubric and reports it on the sealed test split.

    Args:
        program: a name (`math_qa`, `file.py:Class`, `package.module:Class`), an artifact's path, a `dspy.Module` or a
            class of one.
        rubric: a name, a YAML file, a `Rubric`, a DSPy metric or a check.
        data: a dataset spec (see `assay.datasets.iter_rows`), a path, a data frame, a list of `dspy.Example` or
            mappings, or a mapping from splits to such data: `{"train": …, "val": …, "gate": …, "test": …}`.
        trainset: rows to learn from, if the caller chooses them; the splits that are not given are taken from `data`.
        valset: rows to select on, as `trainset`.
        lm: a `dspy.LM`. If None: the model named by `model=`, else the one configured in DSPy, else the embedded model.
        out: new folder of the artifact; by default `.assay/artifacts/PROGRAM-OPTIMIZER`, with a number if it exists.
        gate: whether the gate split decides if the result replaces the program. If not, the result is the winner on
            val; for callers that decide themselves.
        test: whether the report at the end includes the sealed test split.
        words: changes the notes of the artifact's `report.md`, and why it was stopped; the command line puts its flags
            into them, in place of Python arguments.
        options: the fields of `assay.runs.settings.CompileSettings`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; call again with `resume=True`.
    """
    program = resolve_program(program)
    refuse_function(program)
    lm, settings = resolve_model(program, lm, options)
    need = tuple(name for name in SPLITS if {"gate": gate, "test": test}.get(name, True))
    named = trainset is not None or valset is not None or names_splits(data)
    data = split_data(data, trainset, valset, need=need)
    config = program_settings(CompileSettings, program, rubric, data, lm, settings)
    decisions = replace(config.decisions, gate=gate, test=test)
    config = replace(config, max_search_calls=search_cap(config.max_search_calls, config.optimizer))
    search, progress = _search_of(config, decisions), default_progress(progress)
    check_out(out, resume=resume)
    with open_job(
        config, program=program, rubric=rubric, lm=lm, progress=progress, store=store, resume=resume,
        need=need if named else SPLITS,
    ) as job:  # fmt: skip
        require_predictors(job)
        job.status = "stopped"  # until the job is complete
        finished = job.finished({"gate": gate, "test": test})
        if job.session.recorder.resumed and (stored := finished.report(progress, out=out)) is not None:
            job.end_as_before(stored)
            return _as_stored(job, config, stored)
        place = artifact_place(store, out, _artifact_name(job, config), resume=resume)
        report = _compiled(job, config, search, progress)
        report.run_id, report.own_lm = job.run_id, partial(_model_of, lm, config)
        _save(job, report, place, words)
        _require_model(report)
        finished.keep(report.to_dict())
        if config.portable:
            require_portable(job, report.artifact)
    report.unrecorded, report.dropped_rows = job.session.recorder.unrecorded, job.store.not_stored
    return report


def _model_of(lm: dspy.LM | None, config: CompileSettings) -> dspy.LM:
    """The model that a job was given, or one by the name that it was given."""
    if lm is not None:
        return lm
    return get_lm(config.model, **Endpoint(config.api_base, config.api_key_env).client(config.model))


def _require_model(report: CompileReport) -> None:
    if report.outcome.broken is not None:
        raise ModelError(
            f"{report.outcome.broken}. What was searched is kept in {report.artifact}; compile with resume=True once "
            "the model answers"
        )


def _search_of(config: CompileSettings, decisions: Decisions) -> CompileConfig:
    return CompileConfig(
        optimizer=config.optimizer, threshold=config.threshold, demos=config.demos, test=decisions.test,
        decisions=decisions,
        settings=config.optimizer_settings or {}, token_margin=config.token_margin,
        thinking_margin=config.thinking_margin,
    )  # fmt: skip


def _compiled(job: Job, config: CompileSettings, search: CompileConfig, progress: Progress) -> CompileReport:
    """Preflight, estimate, search, gate and test."""
    check_made(
        search.optimizer,
        Proposal(job.recorded, job.splits.train, job.splits.val, job.session, settings=search.settings),
    )
    warnings = [*announce_splits(job.splits, progress), *job.warnings, *unused_settings(job)]
    measured = checked(job, job.splits.val, split="val")
    _announce(job, progress, config, search.decisions, measured)
    warnings += [*(measured.warnings if measured else ()), *see_models(job)]
    warnings += rehearsed(job, portable=config.portable)
    alarms = replay_of_rubric(job.session.rubric, job.session)
    outcome = compile_prompts(job.recorded, job.splits, job.session, search, folder=job.folder)
    outcome.notes += [note for note in (*warnings, *alarms) if note not in outcome.notes]
    report = CompileReport(
        Path(), outcome, job.session.meter, config, job.session.recorder.unrecorded, job.store.not_stored
    )
    report.openings, report.rows, report.called = job.openings, job.rows, job.models()
    if outcome.stopped is None:
        job.status = "done"
    return report


def _as_stored(job: Job, config: CompileSettings, stored: Mapping[str, Any]) -> CompileReport:
    """The report of a run that had already ended.

    Its outcome has no per-task evaluations; `compiled` is the baseline if the artifact cannot be loaded.
    """
    compiled = job.recorded
    try:
        artifact = load_artifact(stored["artifact"])
        compiled = RecordedProgram(artifact.program, job.session, prompt_format=artifact.settings["adapter"])
        compiled.set_parameters(artifact.settings["parameters"])
    except AssayError as error:  # the report is complete without the program
        stored = {**stored, "notes": [*stored["notes"], f"the artifact cannot be loaded here: {error}"]}
    outcome = CompileOutcome(
        job.recorded, compiled, stored["winner"], stored["candidates"], [], stored["stopped"],
        replaces=stored["replaces"],
        notes=stored["notes"], failed=stored.get("failed"), gated=False,  # its program is the result
        gate=Gain.of(stored["gate"]), test_gain=Gain.of(stored["test"]["gain"]),
    )  # fmt: skip
    return CompileReport(Path(stored["artifact"]), outcome, job.session.meter, config, stored=stored, run_id=job.run_id)


def _artifact_name(job: Job, config: CompileSettings) -> str:
    class_name = without_call(job.session.program_name).rpartition(":")[2].lower()
    return f"{class_name}-{title_of(config.optimizer).rpartition(':')[2].lower()}"


def _announce(
    job: Job, progress: Progress, config: CompileSettings, decisions: Decisions, measured: Measured | None
) -> None:
    """Says what the search as far as its caps allow, gate and test will probably take."""
    session, splits, program = job.session, job.splits, job.recorded.program
    pair, each = forecast_pair(program, session), max(1.0, sum(run_calls(program, session)))
    plan = plan_report(splits, session.meter, decisions, pair=pair, searching=True)
    reported = pair.calls * (plan.gate + plan.test)
    search = each * search_runs(session.meter.caps.search_calls, each, splits.sizes()["val"])
    if config.max_calls is not None:  # which keeps those of gate and test from the search
        search = min(search, max(0, config.max_calls - reported))
    latency = None if measured is None else measured.latency_s
    calls = round(search) + reported
    guess = estimated(calls, program, splits, session, demos=config.demos, latency_s=latency)
    caps = [
        f"{k.removeprefix('max_')} {v:g}" for k, v in asdict(config).items() if k.startswith("max_") and v is not None
    ]
    minutes = "" if guess.minutes is None else f"; {minutes_text(guess.minutes)} at the latency of the preflight"
    progress.say(
        f"estimate: {guess.calls} calls ({round(search)} of them searching), about {guess.tokens:,} tokens, "
        f"{cost_text(guess.cost_usd)}" + (f"; caps: {', '.join(caps)}" if caps else "; no caps") + minutes
    )


def _save(job: Job, report: CompileReport, folder: Path, words: Callable[[str], str]) -> None:
    """Writes the artifact of the result, and one of a winner on val that is unproven."""
    result = {key: value for key, value in report.to_dict().items() if key not in ("artifact", "unproven")}
    text, outcome = _markdown(report, words), report.outcome
    if outcome.unproven:
        beside = folder.with_name(f"{folder.name}-unproven")
        report.unproven = keep_artifact(job, outcome.compiled, beside, result, text, unproven=True)
    report.artifact = keep_artifact(job, outcome.result, folder, result, text)


def _markdown(report: CompileReport, words: Callable[[str], str]) -> str:
    data = report.to_dict()
    return compile_markdown(
        data, program=report.config.program, model=report.config.model, openings=openings_line(data["test_openings"]),
        words=words,
    )  # fmt: skip
