"""The users' lines in Python: `assay.compile`, `assay.evaluate`, `assay.load`, `assay.load_rubric`.

Joins the rooms below: data, model, rubric with judges, program, optimizer, artifact. The command line calls this.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy
from filelock import FileLock, Timeout

from assay import __version__
from assay.datasets import SPLITS, Splits, load_splits
from assay.deployment import Artifact, load_artifact, save_artifact
from assay.deployment.artifact import is_artifact, runnable
from assay.errors import BudgetExceeded, Cancelled, ConfigError
from assay.judges import resolver
from assay.models import Caps, Meter, ResponseCache, get_lm, with_recording
from assay.optimizers import AUTO_SEARCH_CALLS, CompileConfig, CompileOutcome, Evaluation, Progress, Session, Student, compile_prompts
from assay.optimizers import evaluate as run_evaluation
from assay.optimizers.estimate import Estimate, estimate_compile
from assay.programs import load_program, program_inputs
from assay.programs.loading import program_class
from assay.rubrics import Rubric
from assay.rubrics import load_rubric as read_rubric
from assay.traces import Recorder, Store, store_url

__all__ = ["CompileReport", "EvaluationReport", "RunConfig", "compile", "evaluate", "load", "load_rubric"]

DEFAULT_MODEL = "embedded/smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every run needs, from flags or arguments. `parameters` are agent parameters by name."""

    program: str
    rubric: str
    data: str
    kind: str = "compile"
    model: str = DEFAULT_MODEL
    judge_model: str | None = None
    reflection_model: str | None = None
    api_base: str | None = None
    optimizer: str = "auto"
    adapter: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    threads: int | None = None
    max_calls: int | None = None
    max_search_calls: int | None = None
    max_tokens: int | None = None
    max_cost_usd: float | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    salt: str = "assay"
    sizes: Mapping[str, int] = field(default_factory=dict)
    threshold: float = 0.8
    demos: int = 4
    cache: bool = True

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads!r} must be at least 1")
        if small := {name: size for name, size in self.sizes.items() if size < 1}:
            raise ConfigError(f"sizes {small} must be at least 1")
        if unknown := sorted(set(self.sizes) - set(SPLITS)):
            raise ConfigError(f"sizes names {unknown}; the splits are {', '.join(SPLITS)}")

    @property
    def key(self) -> str:
        """12 hex digits that are the same for the same job, whatever its caps and threads."""
        whole = {k: v for k, v in asdict(self).items() if not k.startswith("max_") and k not in ("threads", "cache")}
        return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:12]


@dataclass
class CompileReport:
    """What `compile` returns. `to_dict()` is the `--json` object; `program` runs under any language model."""

    artifact: Path
    outcome: CompileOutcome
    meter: Meter
    config: RunConfig
    unseen: int = 0
    dropped_rows: int = 0

    @property
    def program(self) -> dspy.Module:
        return runnable(self.outcome.compiled.program, self.outcome.compiled.settings)

    def to_dict(self) -> dict[str, Any]:
        usage, search, outcome = self.meter.usage, self.meter.of("search"), self.outcome
        return {
            "artifact": str(self.artifact),
            "optimizer": self.config.optimizer,
            "winner": outcome.winner,
            "search_calls": search.calls,
            "calls": usage.calls,
            "cached": usage.cached,
            "tokens": usage.tokens,
            "cost_usd": usage.cost_usd,
            "unpriced_calls": usage.unpriced,
            "unseen_calls": self.unseen,
            "rows_not_stored": self.dropped_rows,
            "replaces": outcome.replaces,
            "gate": outcome.gate.to_dict() if outcome.gate else None,
            "stopped": outcome.stopped,
            "candidates": outcome.candidates,
            "notes": outcome.notes,
            "test": {
                "baseline": outcome.test_baseline.report() if outcome.test_baseline else None,
                "compiled": outcome.test_compiled.report() if outcome.test_compiled else None,
                "gain": outcome.test_gain.to_dict() if outcome.test_gain else None,
            },
        }


@dataclass
class EvaluationReport:
    """What `evaluate` returns."""

    evaluation: Evaluation
    meter: Meter
    split: str

    def to_dict(self) -> dict[str, Any]:
        usage = self.meter.usage
        return {
            "result": self.evaluation.report(), "split": self.split, "calls": usage.calls, "cached": usage.cached,
            "tokens": usage.tokens, "cost_usd": usage.cost_usd,
        }  # fmt: skip


def load_rubric(source: str | Path | Rubric, *, judge_lm: dspy.LM | None = None) -> Rubric:
    """A rubric from a YAML file or by a shipped name, its judge criteria decided by `judge_lm`."""
    rubric = source if isinstance(source, Rubric) else read_rubric(source)
    return rubric.with_resolver(resolver(judge_lm)) if judge_lm is not None and rubric.resolver is None else rubric


def load(path: str | Path, *, program: dspy.Module | None = None) -> dspy.Module:
    """The compiled program of an artifact, with its adapter and parameters: `assay.load(path)(question=…)`.

    Args:
        program: an uncompiled instance to load into, for programs that cannot be built from their name alone.
    """
    return load_artifact(path, program=program).runnable()


@dataclass
class _Job:
    """An opened run: everything that `compile` and `evaluate` share."""

    config: RunConfig
    folder: Path
    run_id: str
    splits: Splits
    student: Student
    session: Session
    store: Store
    artifact: Artifact | None
    status: str = "done"


@contextmanager
def _open(
    config: RunConfig, *, kind: str, caps: Caps, progress: Progress, store: str | Path | None, resume: bool,
    program: Any = None, rubric: Any = None, lm: dspy.LM | None = None, need: tuple[str, ...] = SPLITS,
) -> Iterator[_Job]:  # fmt: skip
    logging.getLogger("dspy").setLevel(logging.ERROR)
    home = _home(store)
    artifact = load_artifact(config.program) if program is None and is_artifact(config.program) else None
    name = artifact.manifest["program"] if artifact else config.program
    inputs = program_inputs(program if program is not None else artifact.program if artifact else program_class(name))
    checked = load_rubric(rubric if rubric is not None else config.rubric)
    splits = load_splits(config.data, inputs=inputs, rename=config.rename, salt=config.salt, limits=config.sizes, need=need)
    if program is None:
        program = artifact.program if artifact else load_program(name, tasks=splits.train + splits.val)
    if artifact is not None and artifact.manifest["data"]["salt"] != config.salt and kind == "compile":
        raise ConfigError(
            f"salt={config.salt!r} is not the artifact's {artifact.manifest['data']['salt']!r}: what it was compiled on would fall into "
            "the new test split. Use the artifact's salt"
        )
    opened = Store(store)
    lock = FileLock(home / "runs" / f"{config.key}.lock")
    try:
        (home / "runs").mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        opened.close()
        raise ConfigError(f"this very job is running already (its lock is {home / 'runs' / (config.key + '.lock')})") from None
    run_id, started = _run_id(opened, config.key, resume), time.time()
    recorder = Recorder(opened, run_id=run_id)
    meter = Meter(caps, spent=opened.spent(run_id) if resume else None)
    status = "failed"
    try:
        cache = ResponseCache(home / "cache" / "responses.db") if config.cache else ResponseCache()
        shared: dict[str, Any] = {"cache": cache, "meter": meter, "observers": [recorder.observe]}
        client: dict[str, Any] = {"api_base": config.api_base} if config.api_base else {}
        model = with_recording(lm, **shared) if lm is not None else get_lm(config.model, seed=config.seed, **shared, **client)
        judge = get_lm(config.judge_model, temperature=0.1, seed=config.seed, **shared) if config.judge_model else model.copy(temperature=0.1)
        reflection = get_lm(config.reflection_model, temperature=1.0, max_tokens=4096, **shared) if config.reflection_model else None
        session = Session(
            lm=model, rubric=load_rubric(checked, judge_lm=judge), recorder=recorder, meter=meter, program_name=name,
            seed=config.seed, threads=config.threads or model.recording.backend.concurrency, progress=progress, prompt_lm=reflection,
        )  # fmt: skip
        settings = artifact.settings if artifact else {"adapter": None, "parameters": {}}
        student = Student(program, session, adapter=config.adapter or settings["adapter"])
        student.set_parameters({**settings["parameters"], **config.parameters})
        opened.put_run(run_id, kind=kind, config=asdict(config), status="running", started_at=started)
        job = _Job(config, home / "runs" / run_id, run_id, splits, student, session, opened, artifact)
        yield job
        status = job.status
    except (Cancelled, KeyboardInterrupt, BudgetExceeded):
        status = "stopped"
        raise
    finally:
        opened.put_run(run_id, kind=kind, config=asdict(config), status=status, started_at=started, unseen=recorder.unseen)
        _close(opened, progress)
        lock.release()


def _close(store: Store, progress: Progress) -> None:
    try:
        store.close()
    except Exception as error:  # the run's result must not be lost with its last rows
        progress.say(f"warning: {error}")


def _home(store: str | Path | None) -> Path:
    """The folder of runs, cache and artifacts: beside the SQLite file, `.assay` where the store is a server."""
    url = store_url(store)
    return Path(url.removeprefix("sqlite:///")).parent if url.startswith("sqlite:///") else Path(".assay")


def _run_id(store: Store, key: str, resume: bool) -> str:
    earlier = store.runs(key)
    if resume:
        unfinished = [run_id for run_id, status in earlier if status != "done"]
        if not unfinished:
            raise ConfigError("there is no unfinished run of this job to resume (same program, rubric, data, model, optimizer and seed)")
        return unfinished[-1]
    return f"{key}-{len(earlier) + 1}"


def compile(
    program: str | dspy.Module,
    *,
    rubric: str | Path | Rubric,
    data: str,
    lm: dspy.LM | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> CompileReport:
    """Compiles a program's prompts against a rubric and reports it on the sealed test split.

    Args:
        program: a name (`math_qa`, `file.py:Class`, `package.module:Class`), an artifact's path, or a `dspy.Module`.
        rubric: a name, a YAML file, or a `Rubric`.
        data: a dataset's spec, see `assay.datasets.iter_rows`.
        lm: a `dspy.LM` of your own; else `model=` names one.
        out: folder of the artifact; by default `.assay/artifacts/PROGRAM-OPTIMIZER`.
        options: the fields of `RunConfig`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: the user stopped the run; call again with `resume=True`.
    """
    given, name = _named(program)
    if lm is not None:
        options["model"] = lm.model
    config = RunConfig(program=name, rubric=rubric.name if isinstance(rubric, Rubric) else str(rubric), data=data, **options)
    check = CompileConfig(optimizer=config.optimizer, threshold=config.threshold, demos=config.demos)
    if config.optimizer == "auto" and config.max_search_calls is None:
        config = replace(config, max_search_calls=AUTO_SEARCH_CALLS)
    caps = Caps(calls=config.max_calls, tokens=config.max_tokens, cost_usd=config.max_cost_usd, search_calls=config.max_search_calls)
    shown = progress or Progress()
    with _open(
        config,
        kind="compile",
        caps=caps,
        progress=shown,
        store=store,
        resume=resume,
        program=given,
        rubric=rubric if isinstance(rubric, Rubric) else None,
        lm=lm,
    ) as job:
        _announce(job, shown, config)
        job.status = "stopped"  # until all of it is done
        outcome = compile_prompts(job.student, job.splits, job.session, check, folder=job.folder)
        report = CompileReport(Path(), outcome, job.session.meter, config, job.session.recorder.unseen, job.store.dropped)
        if outcome.stopped is None:
            job.status = "done"
        report.artifact = _save(job, report, Path(out) if out else _home(store) / "artifacts" / _artifact_name(job, config))
    return report


def _named(program: str | dspy.Module) -> tuple[dspy.Module | None, str]:
    """A program that was given as an object, or None, and the name that an artifact records."""
    if isinstance(program, str):
        return None, program
    return program, f"{type(program).__module__}:{type(program).__qualname__}"


def _artifact_name(job: _Job, config: RunConfig) -> str:
    short = job.session.program_name.rpartition(":")[2].lower()
    return f"{short}-{config.optimizer.rpartition(':')[2].lower()}"


def _announce(job: _Job, progress: Progress, config: RunConfig) -> None:
    splits, guess = job.splits, estimate_compile(job.student, job.splits, job.session, demos=config.demos)
    sizes = ", ".join(f"{name} {count}" for name, count in splits.sizes().items())
    left_out = f" ({splits.duplicates} duplicates and {splits.conflicts} contradictions left out)" if splits.duplicates or splits.conflicts else ""
    progress.say(f"tasks: {sizes}{left_out}; the test split is sealed")
    progress.say(_estimate_line(guess, config))


def _estimate_line(guess: Estimate, config: RunConfig) -> str:
    price = "no price is known for this model" if guess.cost_usd is None else f"${guess.cost_usd:.2f}"
    caps = [f"{k.removeprefix('max_')} {v:g}" for k, v in asdict(config).items() if k.startswith("max_") and v is not None]
    return f"estimate: {guess.calls} calls ({guess.search_calls} of them searching), about {guess.tokens:,} tokens, {price} with {config.model}" + (
        f"; caps: {', '.join(caps)}" if caps else "; no caps"
    )


def _save(job: _Job, report: CompileReport, folder: Path) -> Path:
    config, outcome, rubric = report.config, report.outcome, job.session.rubric
    compiled = outcome.compiled
    manifest = {
        "assay": __version__,
        "dspy": dspy.__version__,
        "program": job.session.program_name,
        "settings": compiled.settings,
        "model": config.model,
        "weights": job.session.lm.recording.backend.weights,
        "adapters": list(job.session.lm.recording.backend.adapters),
        "rubric": {"name": rubric.name, "version": rubric.version, "criteria": [c.describe() for c in rubric.criteria]},
        "judge_model": config.judge_model if rubric.needs_judge else None,
        "data": {"spec": config.data, "salt": config.salt, "sha256": job.splits.manifest()["sha256"], "sizes": job.splits.sizes()},
        "seed": config.seed,
        "run": job.run_id,
        "parent": str(job.artifact.path) if job.artifact else None,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "result": {key: value for key, value in report.to_dict().items() if key != "artifact"},
    }
    return save_artifact(folder, compiled.program, manifest, splits=job.splits.manifest(), report=_markdown(report))


def _markdown(report: CompileReport) -> str:
    data = report.to_dict()
    lines = [f"# {report.config.program}, compiled with {data['optimizer']}", "", f"Model `{report.config.model}`, winner: {data['winner']}.", ""]
    before, after = data["test"]["baseline"], data["test"]["compiled"]
    if before and after:
        lines += ["| sealed test | baseline | compiled |", "|---|---|---|", f"| score | {before['score']} | {after['score']} |"]
        lines += [f"| {name} | {before['criteria'][name]} | {after['criteria'][name]} |" for name in before["criteria"]]
        lines += ["", f"Gain, paired, 95 %: {data['test']['gain']}. Replaces the baseline (gate): {data['replaces']}."]
    lines += ["", f"{data['calls']} calls ({data['search_calls']} searching), {data['tokens']} tokens, {data['cost_usd']} USD."]
    return "\n".join(lines) + "\n"


def evaluate(
    program: str | dspy.Module,
    *,
    rubric: str | Path | Rubric,
    data: str,
    split: str = "val",
    lm: dspy.LM | None = None,
    store: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> EvaluationReport:
    """Scores a program or an artifact on one split, by default `val`. Asking for `test` opens the sealed split.

    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split!r} must be one of {', '.join(SPLITS)}")
    given, name = _named(program)
    if lm is not None:
        options["model"] = lm.model
    if given is None and lm is None and options.get("model") is None and is_artifact(name):
        options["model"] = load_artifact(name).manifest["model"]
    options = {"kind": "evaluate", **{key: value for key, value in options.items() if value is not None}}
    config = RunConfig(program=name, rubric=rubric.name if isinstance(rubric, Rubric) else str(rubric), data=data, **options)
    caps = Caps(calls=config.max_calls, tokens=config.max_tokens, cost_usd=config.max_cost_usd)
    shown = progress or Progress()
    with _open(
        config,
        kind="evaluate",
        caps=caps,
        progress=shown,
        store=store,
        resume=False,
        program=given,
        rubric=rubric if isinstance(rubric, Rubric) else None,
        lm=lm,
        need=(split,),
    ) as job:
        tasks = job.splits.unseal() if split == "test" else getattr(job.splits, split)
        job.session.know(tasks, split)
        with job.session.phase("evaluate"):
            evaluation = run_evaluation(job.student, tasks, job.session, name=f"evaluate: {split}")
    return EvaluationReport(evaluation, job.session.meter, split)
