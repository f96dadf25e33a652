"""The users' lines in Python: `assay.compile`, `assay.evaluate`, `assay.load`, `assay.load_rubric`.

Joins the rooms below: data, model, rubric with judges, program, optimizer, artifact. The command line calls this.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy

from assay.anchors import replay_of_rubric
from assay.compilereport import compile_markdown
from assay.datasets import SPLITS
from assay.datasets.tasks import make_task, missing_inputs
from assay.deployment import load_artifact
from assay.deployment.artifact import check_pinned, check_place, is_artifact, runnable
from assay.deployment.trust import trusting, trusts
from assay.errors import AssayError, BudgetExceeded, ConfigError, ModelError, ProgramError
from assay.given import given_model, given_program, takes
from assay.jobs import DEFAULT_MODEL, Job, RunConfig, home_of, load_rubric, open_job, opened_store, salt_in
from assay.keeping import keep_artifact, rehearsed
from assay.models import Meter, get_lm
from assay.models.limits import DEFAULT_S
from assay.models.roles import Endpoint
from assay.optimizers import AUTO_SEARCH_CALLS, CompileConfig, CompileOutcome, Evaluation, Gain, Progress, Student, compile_prompts
from assay.optimizers import evaluate as run_evaluation
from assay.optimizers.estimate import Estimate, estimate_compile, minutes_text
from assay.optimizers.reserve import Decisions, announce_splits, forecast_pair, plan_report, too_few_to_score
from assay.optimizers.session import Measured
from assay.preflight import checked
from assay.programs import load_program, program_inputs, program_version
from assay.programs.loading import full_name
from assay.programs.wrapping import as_prediction
from assay.reprs import Shown
from assay.rubrics import Rubric
from assay.running import answered_within
from assay.showing import carried_by
from assay.traces import Recorder, Rollout
from assay.traces.missed import NOTHING, Unrecorded
from assay.traces.sealing import HASH, Openings, claim_salt, openings_line, resolve_salt
from assay.verdicts import corrected_by_people

__all__ = ["CompileReport", "EvaluationReport", "RunConfig", "compile", "evaluate", "load", "load_rubric", "run"]


@dataclass(repr=False)
class CompileReport(Shown):
    """What `compile` returns. `to_dict()` is the `--json` object; `program` runs under any language model."""

    artifact: Path
    outcome: CompileOutcome
    meter: Meter
    config: RunConfig
    unrecorded: Unrecorded = NOTHING
    dropped_rows: int = 0
    openings: Openings | None = None  # of the test split
    kept: Mapping[str, Any] | None = None  # of a run that had ended before

    @property
    def program(self) -> dspy.Module:
        if self.kept is not None:
            return load(self.artifact)
        return runnable(self.outcome.compiled.program, self.outcome.compiled.settings)

    def to_dict(self) -> dict[str, Any]:
        if self.kept is not None:
            return dict(self.kept)
        usage, search, outcome = self.meter.usage, self.meter.of("search"), self.outcome
        return {
            "artifact": str(self.artifact),
            "optimizer": self.config.optimizer,
            "winner": outcome.winner,
            "search_calls": search.calls,
            "calls": usage.calls,
            "cached": usage.cached,
            "repeated_calls": usage.repeated,
            "tokens": usage.tokens,
            "cost_usd": self.unrecorded.cost(usage.known_cost_usd),
            "unpriced_calls": usage.unpriced,
            **self.unrecorded.to_dict(),
            "rows_not_stored": self.dropped_rows,
            "replaces": outcome.replaces,
            "gate": outcome.gate.to_dict() if outcome.gate else None,
            "stopped": outcome.stopped,
            "candidates": outcome.candidates,
            "notes": outcome.notes,
            "test": {
                "baseline": self.unrecorded.priced(outcome.test_baseline.report()) if outcome.test_baseline else None,
                "compiled": self.unrecorded.priced(outcome.test_compiled.report()) if outcome.test_compiled else None,
                "gain": outcome.test_gain.to_dict() if outcome.test_gain else None,
            },
            "test_openings": self.openings.to_dict() if self.openings else None,
        }


@dataclass(repr=False)
class EvaluationReport(Shown):
    """What `evaluate` returns."""

    evaluation: Evaluation
    meter: Meter
    split: str
    stopped: str | None = None
    unrecorded: Unrecorded = NOTHING
    dropped_rows: int = 0
    alarms: Sequence[str] = ()  # of judges that were compiled, and no longer judge as they did
    corrected: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # by criterion, see `assay.verdicts.corrected_by_people`
    openings: Openings | None = None  # of the test split
    notes: Sequence[str] = ()
    used: int = 0  # of the tasks, those of train or val that an artifact was made with

    def to_dict(self) -> dict[str, Any]:
        usage = self.meter.usage
        return {
            "result": self.unrecorded.priced(self.evaluation.report()), "split": self.split,
            "calls": usage.calls, "cached": usage.cached, "repeated_calls": usage.repeated,
            "tokens": usage.tokens, "cost_usd": self.unrecorded.cost(usage.known_cost_usd),
            "stopped": self.stopped, "alarms": list(self.alarms), "notes": list(self.notes),
            "corrected": dict(self.corrected), "test_openings": self.openings.to_dict() if self.openings else None,
            **self.unrecorded.to_dict(), "rows_not_stored": self.dropped_rows,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _EvaluateConfig(RunConfig):
    """Settings of `evaluate`. Another split is another job, so that `resume` continues a run of the same one."""

    split: str | None = None  # of val, so that earlier runs keep their key


def load(path: str | Path, *, program: dspy.Module | None = None, trust: bool = False) -> dspy.Module:
    """The compiled program of an artifact, with its adapter and parameters: `assay.load(path)(question=…)`. An artifact with source files runs
    them.

    Args:
        program: an uncompiled instance to load into, for programs that cannot be built from their name alone; then no file of the artifact is run.
        trust: trusts the content of an artifact that somebody else compiled, from now on; see `docs/explanation/security.md`.
    Raises:
        UntrustedArtifact: it holds code that this user has neither compiled nor trusted.
        ArtifactError: it was changed, or its program is none.
    """
    with trusting(trust):
        return load_artifact(path, program=program).runnable()


def run(
    program: str | Path,
    inputs: Mapping[str, Any],
    *,
    model: str | None = None,
    api_base: str | None = None,
    api_key_env: str | None = None,
    store: str | Path | None = None,
    task_timeout: float = DEFAULT_S,
    trust: bool = False,
) -> dspy.Prediction:
    """One recorded prediction of a program or an artifact, by name; the artifact's own model where none is named.

    Args:
        task_timeout: seconds that it may take.
        trust: as in `load`.
    Raises:
        ProgramFailed: it took longer, or called `sys.exit()`.
        AssayError: what was wrong, which rule, what to do.
    """
    with (
        trusting(trust),
        predictor(program, model=model, api_base=api_base, api_key_env=api_key_env, store=store, task_timeout=task_timeout) as predict,
    ):
        return predict(inputs)


@contextmanager
def predictor(
    program: str | Path,
    *,
    model: str | None = None,
    api_base: str | None = None,
    api_key_env: str | None = None,
    store: str | Path | None = None,
    task_timeout: float = DEFAULT_S,
    columns: Collection[str] | None = None,
) -> Iterator[Callable[..., dspy.Prediction]]:
    """A function that gives recorded predictions, while it is open: `run` for many inputs. Settings as in `run`.

    With `where`, the place of a row of data, it takes the row as `compile` would: columns that are no input of the program are left out.

    Args:
        columns: of the rows of data that it is for, if there are any; the program's inputs must be among them.
    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    program = full_name(str(program))
    artifact = load_artifact(program) if is_artifact(program) else None
    built: Any = artifact.runnable() if artifact else load_program(program)
    inner = artifact.program if artifact else built
    wanted = program_inputs(inner)
    if columns and (missing := sorted(set(wanted or ()) - set(columns))):
        raise missing_inputs("the data", missing, columns)
    name = model or (artifact.model if artifact else DEFAULT_MODEL)
    if api_base is None and model is None and artifact:
        api_base, api_key_env = artifact.endpoint.api_base, api_key_env or artifact.endpoint.api_key_env
    client = Endpoint(api_base, api_key_env).client(name)
    salt = resolve_salt(None, store, artifact=salt_in(artifact)) if salt_in(artifact) else None
    with opened_store(store, Progress()) as opened:
        if salt is not None:  # its rollouts may be of sealed tasks, which the salt tells
            claim_salt(opened, salt)
        recorder = Recorder(opened)
        if artifact is not None:
            recorder.carried = carried_by(artifact)
        lm = get_lm(name, observers=[recorder.observe], **client)
        if artifact:
            check_pinned(artifact, lm)

        def predict(inputs: Mapping[str, Any], *, where: str | None = None) -> dspy.Prediction:
            if where is not None:
                inputs = make_task(inputs, where=where, inputs=wanted).inputs
            if wanted is not None and set(inputs) != set(wanted):
                raise ConfigError(f"{program} takes the inputs {wanted}, got {sorted(inputs)}")
            rollout = Rollout(
                phase="run", program=artifact.manifest["program"] if artifact else program, inputs=dict(inputs), model=name,
                program_version=program_version(inner, artifact.settings["adapter"] if artifact else None),
                parameters=artifact.settings["parameters"] if artifact else {},
            )  # fmt: skip
            with dspy.context(lm=lm), recorder.active(), recorder.rollout(rollout):
                prediction = answered_within(task_timeout, lambda: as_prediction(built(**inputs)))
                rollout.prediction = dict(prediction.items())
            return prediction

        yield predict


@trusts
@takes(RunConfig)
def compile(
    program: Any,
    *,
    rubric: str | Path | Rubric,
    data: Any,
    lm: dspy.LM | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    gate: bool = True,
    test: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> CompileReport:
    """Compiles a program's prompts against a rubric and reports it on the sealed test split.

    Args:
        program: a name (`math_qa`, `file.py:Class`, `package.module:Class`), an artifact's path, a `dspy.Module` or a class of one.
        rubric: a name, a YAML file, or a `Rubric`.
        data: a dataset's spec, see `assay.datasets.iter_rows`, a path, a data frame, or a list of `dspy.Example` or mappings.
        lm: a `dspy.LM` of your own; else `model=` names one; else the one that is set in DSPy; else the embedded model.
        out: folder of the artifact; by default `.assay/artifacts/PROGRAM-OPTIMIZER`.
        gate: whether gate decides if the result replaces the program; without it the result is the winner on val, for a job that decides itself.
        test: whether the sealed test split is opened for the report at the end.
        options: the fields of `RunConfig`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; call again with `resume=True`.
    """
    program = given_program(program)
    lm, options = given_model(program, lm, options)
    config = RunConfig.of(program, rubric, data, lm, **options)
    decisions = replace(config.decisions, gate=gate, test=test)
    check = CompileConfig(
        optimizer=config.optimizer,
        threshold=config.threshold,
        demos=config.demos,
        test=test,
        decisions=decisions,
        settings=config.optimizer_settings or {},
        token_margin=config.token_margin,
    )
    if config.optimizer == "auto" and config.max_search_calls is None:
        config = replace(config, max_search_calls=AUTO_SEARCH_CALLS)
    shown = progress or Progress()
    if out is not None:
        check_place(Path(out).resolve())
    with open_job(config, program=program, rubric=rubric, lm=lm, progress=shown, store=store, resume=resume) as job:
        if not job.student.program.predictors():
            raise ProgramError(f"{config.program} has no predictors, so there is nothing to compile; evaluate it, or tune it where it is an agent")
        job.status = "stopped"  # until all of it is done
        finished = job.finished(gate=gate, test=test)
        if job.session.recorder.resumed and (kept := finished.report(shown, out=out)) is not None:
            job.end_as_before(kept)
            return _as_kept(job, kept)
        warnings = announce_splits(job.splits, shown)
        measured = checked(job, job.splits.val, split="val")
        _announce(job, shown, config, decisions, measured)
        warnings += [*(measured.warnings if measured else ()), *rehearsed(job)]
        alarms = replay_of_rubric(job.session.rubric, job.session)
        outcome = compile_prompts(job.student, job.splits, job.session, check, folder=job.folder)
        outcome.notes += [*warnings, *alarms]
        report = CompileReport(Path(), outcome, job.session.meter, config, job.session.recorder.unrecorded, job.store.dropped)
        report.openings = job.openings
        if outcome.stopped is None:
            job.status = "done"
        report.artifact = _save(job, report, Path(out) if out else home_of(store) / "artifacts" / _artifact_name(job, config))
        if outcome.broken is not None:
            raise ModelError(f"{outcome.broken}. What was searched is kept in {report.artifact}; compile with --resume once the model answers")
        finished.keep(report.to_dict())
    return report


def _as_kept(job: Job, kept: Mapping[str, Any]) -> CompileReport:
    """The report of a run that had ended. Its outcome has no evaluations of single tasks, and the baseline for a program that cannot be loaded."""
    compiled = job.student
    try:
        artifact = load_artifact(kept["artifact"])
        compiled = Student(artifact.program, job.session, adapter=artifact.settings["adapter"])
        compiled.set_parameters(artifact.settings["parameters"])
    except AssayError as error:  # the report is all there: what cannot be loaded takes nothing from it
        kept = {**kept, "notes": [*kept["notes"], f"the artifact cannot be loaded here: {error}"]}
    outcome = CompileOutcome(
        job.student, compiled, kept["winner"], kept["candidates"], [], kept["stopped"], replaces=kept["replaces"], notes=kept["notes"],
        gate=Gain.of(kept["gate"]), test_gain=Gain.of(kept["test"]["gain"]),
    )  # fmt: skip
    return CompileReport(Path(kept["artifact"]), outcome, job.session.meter, job.config, kept=kept)


def _artifact_name(job: Job, config: RunConfig) -> str:
    short = job.session.program_name.rpartition(":")[2].lower()
    return f"{short}-{config.optimizer.rpartition(':')[2].lower()}"


def _announce(job: Job, progress: Progress, config: RunConfig, decisions: Decisions, measured: Measured | None) -> None:
    pair = forecast_pair(job.student.program, job.session)
    plan = plan_report(job.splits, job.session.meter, decisions, pair=pair, searching=True)
    guess = estimate_compile(job.student, job.splits, job.session, demos=config.demos, reported=pair.calls * (plan.gate + plan.test))
    minutes = ""
    if measured is not None and measured.latency_s is not None:
        minutes = f"; {minutes_text(guess.calls * measured.latency_s / max(1, job.session.threads) / 60)} at the latency of the preflight"
    progress.say(_estimate_line(guess, config) + minutes)


def _estimate_line(guess: Estimate, config: RunConfig) -> str:
    price = "cost unknown for these models" if guess.cost_usd is None else f"${guess.cost_usd:.2f}"
    caps = [f"{k.removeprefix('max_')} {v:g}" for k, v in asdict(config).items() if k.startswith("max_") and v is not None]
    return f"estimate: {guess.calls} calls ({guess.search_calls} of them searching), about {guess.tokens:,} tokens, {price}" + (
        f"; caps: {', '.join(caps)}" if caps else "; no caps"
    )


def _save(job: Job, report: CompileReport, folder: Path) -> Path:
    result = {key: value for key, value in report.to_dict().items() if key != "artifact"}
    return keep_artifact(job, report.outcome.compiled, folder, result, _markdown(report))


def _markdown(report: CompileReport) -> str:
    data = report.to_dict()
    return compile_markdown(data, program=report.config.program, model=report.config.model, openings=openings_line(data["test_openings"]))


@trusts
@takes(RunConfig)
def evaluate(
    program: Any,
    *,
    rubric: str | Path | Rubric,
    data: Any,
    split: str = "val",
    samples: int = 1,
    lm: dspy.LM | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    opens_as: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> EvaluationReport:
    """Scores a program or an artifact on one split, by default `val`. Asking for `test` opens the sealed split.

    A cap that is reached ends it with the tasks that were finished; the report's `stopped` says so.

    Args:
        program: as in `compile`, or a function of the task's inputs, or an agent with `execute` and `set_parameters`.
        data: as in `compile`, and so is `lm`; without one an artifact is evaluated with the model that it was measured with.
        samples: runs of each task; a task's score is their mean, and how well its answers agree is part of its coherence.
        opens_as: the job that an opening of the test split is counted for, where this evaluation is a part of one.
    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split!r} must be one of {', '.join(SPLITS)}")
    if samples < 1:
        raise ConfigError(f"samples={samples!r} must be at least 1")
    program = given_program(program)
    lm, options = given_model(program, lm, options)
    options = {"kind": "evaluate", "split": None if split == "val" else split, **options}
    config, shown = _EvaluateConfig.of(program, rubric, data, lm, **options), progress or Progress()
    evaluation, stopped, alarms = Evaluation(), None, list[str]()
    with open_job(config, program=program, rubric=rubric, lm=lm, progress=shown, store=store, resume=resume, need=(split,), opens_as=opens_as) as job:
        few, left_out = too_few_to_score(job.splits.sizes(), split), job.splits.left_out()
        notes = [*([few] if few else []), *([f"of the data: {left_out}"] if left_out else [])]
        if few is not None:
            shown.say(f"warning: {few}")
        tasks = job.splits.unseal() if split == "test" else getattr(job.splits, split)
        job.session.know(tasks, split)
        used = len(job.made_with() & {task.content_hash[:HASH] for task in tasks})
        if used:
            notes.append(
                f"{used} of these {len(tasks)} tasks were used to compile {config.program} (demonstrations and selection): its score on them "
                "is biased upwards; the splits gate and test have others"
            )
        known = job.runs_before("evaluate")
        try:
            if any((task.id, sample) not in known for task in tasks for sample in range(samples)):
                measured = checked(job, tasks, split=split)
                notes += measured.warnings if measured else ()
            alarms = replay_of_rubric(job.session.rubric, job.session)
            with job.session.phase("evaluate"):
                run_evaluation(job.student, tasks, job.session, name=f"evaluate: {split}", samples=samples, into=evaluation, known=known)
        except BudgetExceeded as cap:
            job.status, stopped = "stopped", str(cap)
        corrected = {}
        if job.session.rubric.needs_judge:
            job.store.flush()
            corrected = corrected_by_people(job.session.rubric, job.store, job.run_id)
    return EvaluationReport(
        evaluation, job.session.meter, split, stopped, job.session.recorder.unrecorded, job.store.dropped, alarms, corrected, job.openings,
        notes, used,
    )  # fmt: skip
