"""An opened run: its settings, lock, store, meter, model, rubric, program and splits. What every command shares."""

import functools
import hashlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dspy
from filelock import FileLock, Timeout

from assay import __version__
from assay.datasets import SPLITS, Splits, load_splits
from assay.deployment import Artifact, load_artifact, save_artifact
from assay.deployment.artifact import check_pinned, is_artifact
from assay.errors import BudgetExceeded, Cancelled, ConfigError
from assay.judges import Judge, resolver
from assay.judges.loading import AnyJudge, members_of
from assay.judges.loading import load_judge as read_judge
from assay.models import Caps, LanguageModel, Meter, ResponseCache, get_lm, with_recording
from assay.optimizers import Progress, Session, Student
from assay.optimizers.executors import EXECUTORS, Outbox, RayExecutor
from assay.programs import load_program, program_inputs, program_version
from assay.programs.loading import program_class
from assay.rubrics import Rubric
from assay.rubrics import load_rubric as read_rubric
from assay.traces import Recorder, Store, shown_url, store_url
from assay.traces.records import subject_digest

__all__ = [
    "DEFAULT_MODEL",
    "CommonConfig",
    "Job",
    "Run",
    "RunConfig",
    "compiled_parts",
    "home_of",
    "keep_artifact",
    "load_judge",
    "load_rubric",
    "open_job",
    "open_run",
    "opened_store",
]

_NOT_THE_JOB = ("threads", "cache", "trials", "storage", "workers", "executor")  # how far and where, not what
DEFAULT_MODEL = "embedded/smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """What every run needs, from flags or arguments: model, caps, splits, seed."""

    kind: str = "compile"
    model: str = DEFAULT_MODEL
    reflection_model: str | None = None
    api_base: str | None = None
    optimizer: str = "auto"
    seed: int = 0
    threads: int | None = None
    max_calls: int | None = None
    max_search_calls: int | None = None
    max_tokens: int | None = None
    max_cost_usd: float | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    salt: str = "assay"
    sizes: Mapping[str, int] = field(default_factory=dict)
    cache: bool = True

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed!r} must be at least 0")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads!r} must be at least 1")
        if small := {name: size for name, size in self.sizes.items() if size < 1}:
            raise ConfigError(f"sizes {small} must be at least 1")
        if unknown := sorted(set(self.sizes) - set(SPLITS)):
            raise ConfigError(f"sizes names {unknown}; the splits are {', '.join(SPLITS)}")

    @property
    def caps(self) -> Caps:
        return Caps(calls=self.max_calls, tokens=self.max_tokens, cost_usd=self.max_cost_usd, search_calls=self.max_search_calls)

    @property
    def key(self) -> str:
        """12 hex digits that are the same for the same job, whatever its caps and threads."""
        whole = {k: v for k, v in asdict(self).items() if not k.startswith("max_") and k not in _NOT_THE_JOB}
        return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class RunConfig(CommonConfig):
    """Settings of a run of a program against a rubric. `parameters` are agent parameters by name."""

    program: str
    rubric: str
    data: str
    judge_model: str | None = None
    adapter: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    threshold: float = 0.8
    demos: int = 4
    executor: str = "threads"

    @property
    def generation(self) -> dict[str, Any]:
        """Settings of the program's model beyond its own."""
        return {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.executor not in EXECUTORS:
            raise ConfigError(f"executor={self.executor!r} must be one of {', '.join(EXECUTORS)}")

    @classmethod
    def of(cls, program: str | dspy.Module, rubric: str | Path | Rubric, data: str, lm: dspy.LM | None, **options: Any) -> "RunConfig":
        """The settings of a job whose program, rubric or model may be objects: here they go by their names."""
        name = program if isinstance(program, str) else f"{type(program).__module__}:{type(program).__qualname__}"
        model = {} if lm is None else {"model": lm.model}
        return cls(program=name, rubric=rubric.name if isinstance(rubric, Rubric) else str(rubric), data=data, **{**options, **model})


def load_rubric(source: str | Path | Rubric, *, judge_lm: dspy.LM | None = None) -> Rubric:
    """A rubric from a YAML file or by a shipped name, its judge criteria decided by `judge_lm`."""
    rubric = source if isinstance(source, Rubric) else read_rubric(source)
    return rubric.with_resolver(resolver(judge_lm, load_judge)) if judge_lm is not None and rubric.resolver is None else rubric


def load_judge(source: str | Path, **spec: Any) -> AnyJudge:
    """A judge: a compiled one from its artifact's folder, or one as in `assay.judges.loading.load_judge`."""
    if not is_artifact(source):
        return read_judge(source, find=load_judge, **spec)
    if spec:
        raise ConfigError(f"{source} is a compiled judge with its own {', '.join(sorted(spec))}")
    program = load_artifact(source).program
    if not isinstance(program, Judge):
        raise ConfigError(f"{source} is an artifact of {type(program).__name__}, not of a judge")
    return program


def compiled_parts(judge: str) -> list[str]:
    """The compiled judges that a judge is made of: itself, or the members of a jury or cascade, and theirs."""
    if is_artifact(judge):
        return [judge]
    path = Path(judge)
    if path.suffix.lower() not in (".yaml", ".yml") or not path.is_file():
        return []
    return [part for member in members_of(path) for part in compiled_parts(member)]


@dataclass
class Job:
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
def open_job(
    config: RunConfig,
    *,
    program: str | dspy.Module,
    rubric: str | Path | Rubric,
    lm: dspy.LM | None = None,
    progress: Progress,
    store: str | Path | None = None,
    resume: bool = False,
    need: tuple[str, ...] = SPLITS,
) -> Iterator[Job]:
    """Opens what a run needs, holds its lock while it is open, and writes in the store how it ended (`Job.status`).

    Args:
        need: splits that must not be empty.
    Raises:
        AssayError: what was wrong, which rule, what to do; nothing has been asked of a model by then.
    """
    given = None if isinstance(program, str) else program
    artifact = load_artifact(config.program) if given is None and is_artifact(config.program) else None
    known = artifact.program if artifact else given
    name = artifact.manifest["program"] if artifact else config.program
    inputs = program_inputs(known if known is not None else program_class(name))
    checked = load_rubric(rubric)
    splits = load_splits(config.data, inputs=inputs, rename=config.rename, salt=config.salt, limits=config.sizes, need=need)
    if known is None:
        known = load_program(name, tasks=splits.train + splits.val)
    if artifact is not None and artifact.manifest["data"]["salt"] != config.salt and config.kind in ("compile", "tune"):
        raise ConfigError(
            f"salt={config.salt!r} is not the artifact's {artifact.manifest['data']['salt']!r}: what it was compiled on would fall into "
            "the new test split. Use the artifact's salt"
        )
    if config.executor == "ray" and lm is not None:
        raise ConfigError("executor='ray' needs the model by its name: an object of this process cannot travel to the hosts")
    with open_run(config, lm=lm, progress=progress, store=store, resume=resume) as run, ExitStack() as closing:
        judge = run.model(config.judge_model, temperature=0.1) if config.judge_model else run.lm.copy(temperature=0.1)
        session = Session(
            lm=run.lm.copy(**config.generation), rubric=load_rubric(checked, judge_lm=judge), recorder=run.recorder, meter=run.meter,
            program_name=name, seed=config.seed, threads=run.threads, progress=progress, prompt_lm=run.reflection, judge_lm=judge,
        )  # fmt: skip
        if config.executor == "ray":
            checks = [c.check for c in checked.criteria if c.check]
            made = functools.partial(_session_on_a_host, config, checked, name)
            session.executor = RayExecutor(made, threads=run.threads, carried=checks)
            closing.callback(session.executor.close)
        if artifact is not None:
            check_pinned(artifact, run.lm)
        settings = artifact.settings if artifact else {"adapter": None, "parameters": {}}
        student = Student(known, session, adapter=config.adapter or settings["adapter"])
        student.set_parameters({**settings["parameters"], **config.parameters})
        job = Job(config, run.folder, run.run_id, splits, student, session, run.store, artifact)
        yield job
        run.status = job.status


def _session_on_a_host(config: RunConfig, rubric: Rubric, program: str, outbox: Outbox) -> Session:
    """A job's session on a host of a cluster: its own model, cache and meter; what it records waits in the outbox."""
    logging.getLogger("dspy").setLevel(logging.ERROR)
    recorder, meter = Recorder(outbox), Meter()  # type: ignore[arg-type]
    shared: dict[str, Any] = {"cache": ResponseCache(), "meter": meter, "observers": [recorder.observe], "seed": config.seed}
    client: dict[str, Any] = {"api_base": config.api_base} if config.api_base else {}
    lm = get_lm(config.model, **shared, **client)
    judge = get_lm(config.judge_model, temperature=0.1, **shared) if config.judge_model else lm.copy(temperature=0.1)
    return Session(
        lm=lm.copy(**config.generation), rubric=load_rubric(rubric, judge_lm=judge), recorder=recorder, meter=meter, program_name=program,
        seed=config.seed,
        threads=1, judge_lm=judge,
    )  # fmt: skip


def _program_manifest(job: Job, student: Student, result: Mapping[str, Any]) -> dict[str, Any]:
    """What an artifact says of where its program comes from.

    Args:
        result: the report of the job, JSON-ready.
    """
    config, rubric, engine = job.config, job.session.rubric, job.session.lm.recording.backend
    return {
        "assay": __version__,
        "dspy": dspy.__version__,
        "program": job.session.program_name,
        "version": program_version(student.program, student.settings["adapter"]),
        "settings": student.settings,
        "model": config.model,
        "api_base": config.api_base,
        "weights": engine.weights,
        "adapters": list(engine.adapters),
        "rubric": {"name": rubric.name, "version": rubric.version, "criteria": [c.describe() for c in rubric.criteria]},
        "judge_model": config.judge_model if rubric.needs_judge else None,
        "data": {"spec": config.data, "salt": config.salt, "sha256": job.splits.manifest()["sha256"], "sizes": job.splits.sizes()},
        "seed": config.seed,
        "run": job.run_id,
        "parent": str(job.artifact.path) if job.artifact else None,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "result": dict(result),
    }


def keep_artifact(job: Job, student: Student, folder: Path, result: Mapping[str, Any], report: str) -> Path:
    """Writes a job's artifact, and remembers in the store whose data its tasks were: a person who is forgotten is told of it."""
    splits, manifest = job.splits, _program_manifest(job, student, result)
    path = save_artifact(folder.resolve(), student.program, manifest, splits=splits.manifest(), report=report)
    tasks = splits.train + splits.val + splits.gate
    if people := {subject_digest(str(task.metadata["data_subject"])) for task in tasks if task.metadata.get("data_subject")}:
        job.store.put_artifact(str(path), sorted(people))
    return path


@dataclass
class Run:
    """A run that is open: its place, its store, and language models that are all recorded, counted and cached alike."""

    run_id: str
    folder: Path
    store: Store
    recorder: Recorder
    meter: Meter
    lm: LanguageModel
    model: Callable[..., LanguageModel]  # another model, by name
    reflection: LanguageModel | None
    threads: int
    status: str = "done"


@contextmanager
def open_run(
    config: CommonConfig, *, lm: dspy.LM | None = None, progress: Progress, store: str | Path | None = None, resume: bool = False
) -> Iterator[Run]:
    """Holds the job's lock while it is open, and writes in the store how it ended (`Run.status`)."""
    logging.getLogger("dspy").setLevel(logging.ERROR)
    home = home_of(store)
    with _only_one(home / "runs" / f"{config.key}.lock"), opened_store(store, progress) as opened:
        run_id, started, status = _run_id(opened, config.key, resume), time.time(), "failed"
        storage = getattr(config, "storage", None)
        told = {**asdict(config), **({"storage": shown_url(storage)} if storage else {})}
        recorder = Recorder(opened, run_id=run_id, unseen=opened.unseen(run_id) if resume else 0)
        meter = Meter(config.caps, spent=opened.spent(run_id) if resume else None)
        try:
            cache = ResponseCache(home / "cache" / "responses.db") if config.cache else ResponseCache()
            shared: dict[str, Any] = {"cache": cache, "meter": meter, "observers": [recorder.observe]}
            client: dict[str, Any] = {"api_base": config.api_base} if config.api_base else {}
            model = with_recording(lm, **shared) if lm is not None else get_lm(config.model, seed=config.seed, **shared, **client)
            reflection = get_lm(config.reflection_model, temperature=1.0, max_tokens=4096, **shared) if config.reflection_model else None
            opened.put_run(run_id, kind=config.kind, config=told, status="running", started_at=started)
            run = Run(
                run_id, home / "runs" / run_id, opened, recorder, meter, model, functools.partial(get_lm, seed=config.seed, **shared), reflection,
                config.threads or model.recording.backend.concurrency,
            )  # fmt: skip
            with _cancelled_by_signals(meter):
                yield run
            status = run.status
        except (Cancelled, KeyboardInterrupt, BudgetExceeded):
            status = "stopped"
            raise
        finally:
            opened.put_run(run_id, kind=config.kind, config=told, status=status, started_at=started, unseen=recorder.unseen)


@contextmanager
def _cancelled_by_signals(meter: Meter) -> Iterator[None]:
    """Ctrl-C and SIGTERM also cancel the meter: threads that are at work end at their next call to a model, so that whoever
    waits for them, DSPy's own pools included, does not wait for all that they still had to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def cancel(number: int, frame: Any) -> None:
        meter.cancel()
        if callable(before[number]):
            before[number](number, frame)
        else:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, cancel)
    try:
        yield
    finally:
        for caught in before:
            signal.signal(caught, before[caught])


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Held while a job runs, so that the same job does not run twice at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"this very job is running already (its lock is {path})") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def opened_store(store: str | Path | None, progress: Progress) -> Iterator[Store]:
    """The store, closed at the end; rows that it refused are a warning, not the end of a run whose result is at hand."""
    opened = Store(store)
    try:
        yield opened
    finally:
        try:
            opened.close()
        except Exception as error:  # the run's result must not be lost with its last rows
            progress.say(f"warning: {error}")


def home_of(store: str | Path | None) -> Path:
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
