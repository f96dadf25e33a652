"""An opened run: its settings, lock, store, meter, model, rubric, program and splits. What every command shares."""

import functools
import hashlib
import inspect
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy

from assay.datasets import SPLITS, Splits, check_sizes, load_splits
from assay.datasets.memory import data_spec
from assay.deployment import Artifact, load_artifact
from assay.deployment.artifact import check_pinned, demand_trust_around, is_artifact
from assay.deployment.trust import accept, entries, trusting, trusts
from assay.errors import BudgetExceeded, Cancelled, ConfigError
from assay.finished import FinishedRun
from assay.judges import Judge, resolver
from assay.judges.loading import AnyJudge, members_of
from assay.judges.loading import load_judge as read_judge
from assay.models import Caps, LanguageModel, Meter, ResponseCache, get_lm, with_recording
from assay.models.limits import DEFAULT_S, check_limit
from assay.models.lm import has_provider
from assay.models.meter import spent_before
from assay.models.roles import Endpoint, check_address, is_embedded
from assay.optimizers import Progress, Session, Student
from assay.optimizers.evaluation import finished_runs
from assay.optimizers.executors import EXECUTORS, Outbox, RayExecutor
from assay.optimizers.reserve import Decisions
from assay.optimizers.session import has_tools
from assay.programs import load_program, program_inputs, program_version
from assay.programs.loading import program_class
from assay.programs.wrapping import wrapped
from assay.rubrics import Rubric
from assay.rubrics import load_rubric as read_rubric
from assay.running import cancelled_by_signals, only_one
from assay.showing import carried_by
from assay.sourcecode import qualified_name
from assay.traces import Recorder, Store, shown_url, store_url
from assay.traces.missed import Unrecorded
from assay.traces.resuming import close_running, drop_cut_off, opened_ledger
from assay.traces.sealing import DEFAULT_SALT, Openings, claim_salt, know_splits, know_tasks, open_test, resolve_salt

__all__ = [
    "DEFAULT_MODEL",
    "CommonConfig",
    "Job",
    "Run",
    "RunConfig",
    "compiled_parts",
    "home_of",
    "load_judge",
    "load_rubric",
    "open_job",
    "open_run",
    "opened_store",
    "salt_at",
    "salt_in",
]

# how far and where, not what
_NOT_THE_JOB = (
    "threads",
    "cache",
    "trials",
    "storage",
    "workers",
    "executor",
    "preflight",
    "difference",
    "early_stop",
    "token_margin",
    "task_timeout",
)
_LATER = (
    "judge_api_base",
    "reflection_api_base",
    "optimizer_settings",
    "split",
)  # settings that came later: where they are not used, a job keeps its key
DEFAULT_MODEL = "embedded/smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """What every run needs, from flags or arguments: model, caps, splits, seed.

    `salt` is that of the splits; None for the store's own, which is the artifact's, or `assay`, where the store is new. `task_timeout`: seconds that
    one run of a program with its tools, one check or one judge may take; one tool call may take a quarter of it (`assay.models.limits`).
    """

    kind: str = "compile"
    model: str = DEFAULT_MODEL
    reflection_model: str | None = None
    api_base: str | None = None
    api_key_env: str | None = None
    reflection_api_base: str | None = None
    reflection_api_key_env: str | None = None
    optimizer: str = "auto"
    seed: int = 0
    threads: int | None = None
    max_calls: int | None = None
    max_search_calls: int | None = None
    max_tokens: int | None = None
    max_cost_usd: float | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    salt: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    cache: bool = True
    preflight: bool = True
    task_timeout: float = DEFAULT_S

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed!r} must be at least 0")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads!r} must be at least 1")
        check_limit(self.task_timeout)
        check_sizes(self.sizes)
        for name in ("api_base", "judge_api_base", "reflection_api_base"):  # before any of them is stored
            check_address(getattr(self, name, None), name)

    @property
    def caps(self) -> Caps:
        return Caps(calls=self.max_calls, tokens=self.max_tokens, cost_usd=self.max_cost_usd, search_calls=self.max_search_calls)

    def client(self, role: str, model: str, lm: dspy.LM | None = None) -> dict[str, Any]:
        """Address and key for a role's model, see `assay.models.roles`.

        Args:
            role: `program`, `judge` or `reflection`.
            lm: the program's model where it is an object: its address and key are the others' too, unless theirs are given.
        Raises:
            ConfigError: a variable for a key is not set.
        """
        program = Endpoint(self.api_base, self.api_key_env)
        if role == "program":
            return program.client(model)
        base, env = getattr(self, f"{role}_api_base", None), getattr(self, f"{role}_api_key_env", None)
        if base is None and env is None and isinstance(lm, LanguageModel) and not is_embedded(model):
            return dict(lm.recording.client)
        return program.role(base, env).client(model)

    @property
    def key(self) -> str:
        """12 hex digits that are the same for the same job, whatever its caps and threads."""
        whole = {k: v for k, v in asdict(self).items() if not k.startswith("max_") and not k.endswith("_key_env") and k not in _NOT_THE_JOB}
        whole = {k: v for k, v in whole.items() if v is not None or k not in _LATER}
        whole["salt"] = self.salt or DEFAULT_SALT
        return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class RunConfig(CommonConfig):
    """Settings of a run of a program against a rubric. `parameters` are agent parameters by name; for `difference` and `early_stop` see
    `assay.optimizers.reserve.Decisions`."""

    program: str
    rubric: str
    data: str
    judge_model: str | None = None
    judge_api_base: str | None = None
    judge_api_key_env: str | None = None
    adapter: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    threshold: float = 0.8
    demos: int = 16
    executor: str = "threads"
    difference: float = 0.1
    early_stop: bool = True
    token_margin: float = 0.01
    optimizer_settings: Mapping[str, Any] | None = None

    @property
    def own_models(self) -> bool:
        """Whether compiled judges ask the model that they were calibrated with: no model and no address is named for judges."""
        return not (self.judge_model or self.judge_api_base or self.judge_api_key_env)

    @property
    def generation(self) -> dict[str, Any]:
        """Settings of the program's model beyond its own."""
        return {}

    @property
    def decisions(self) -> Decisions:
        """How gate and test decide."""
        return Decisions(difference=self.difference, early_stop=self.early_stop, sized=frozenset(self.sizes))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.executor not in EXECUTORS:
            raise ConfigError(f"executor={self.executor!r} must be one of {', '.join(EXECUTORS)}")
        self.decisions  # noqa: B018 - its settings are checked before anything is opened

    @classmethod
    def of(cls, program: str | dspy.Module, rubric: str | Path | Rubric, data: Any, lm: dspy.LM | None, **options: Any) -> "RunConfig":
        """The settings of a job whose program, rubric or model may be objects: here they go by their names."""
        name = program if isinstance(program, str) else qualified_name(wrapped(program))
        model = {} if lm is None else {"model": lm.model}
        return cls(program=name, rubric=rubric.name if isinstance(rubric, Rubric) else str(rubric), data=data_spec(data), **{**options, **model})


def load_rubric(source: str | Path | Rubric, *, judge_lm: dspy.LM | None = None, own_models: bool = False, trust: bool = False) -> Rubric:
    """A rubric from a YAML file or by a shipped name, its judge criteria decided by `judge_lm`. The check files that it names are run.

    Args:
        own_models: compiled judges ask the model that they were calibrated with, at its own address, and not `judge_lm`.
        trust: trusts the contents of artifacts that it names and somebody else compiled, from now on; see `docs/explanation/security.md`.
    Raises:
        RubricError: it is wrong, or names something that is.
        UntrustedArtifact: an artifact that it names, or is a part of, holds code that this user has neither compiled nor trusted.
    """
    with trusting(trust):
        return _loaded_rubric(source, judge_lm, own_models)


def _loaded_rubric(source: str | Path | Rubric, judge_lm: dspy.LM | None, own_models: bool) -> Rubric:
    if not isinstance(source, str | Path | Rubric):
        raise ConfigError(f"rubric={source!r} must be a Rubric, a YAML file's path or a shipped name")
    if not isinstance(source, Rubric):
        demand_trust_around(source)
    rubric = source if isinstance(source, Rubric) else read_rubric(source)
    if rubric.resolver is not None or (judge_lm is None and not own_models):
        return rubric
    return rubric.with_resolver(resolver(judge_lm, functools.partial(load_judge, own_model=own_models)))


@trusts
def load_judge(source: str | Path, *, own_model: bool = False, **spec: Any) -> AnyJudge:
    """A judge: a compiled one from its artifact's folder, or one as in `assay.judges.loading.load_judge`. A judge's file of one's own, and an
    artifact's, run their code; `trust=True` trusts an artifact that somebody else compiled.

    Args:
        own_model: a compiled judge that names no model asks the one that it was calibrated with, at its own address.
    """
    if not is_artifact(source):
        demand_trust_around(source)
        return read_judge(source, find=functools.partial(load_judge, own_model=own_model), **spec)
    if spec:
        raise ConfigError(f"{source} is a compiled judge with its own {', '.join(sorted(spec))}")
    artifact = load_artifact(source)
    judge = artifact.program
    if not isinstance(judge, Judge):
        raise ConfigError(f"{source} is an artifact of {type(judge).__name__}, not of a judge")
    if own_model and judge.model is None and has_provider(artifact.manifest["model"]):
        judge.model, judge.endpoint = artifact.model, artifact.endpoint
    return judge


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
    rubric_path: str | Path | None  # or its shipped name; None where it was made in Python
    status: str = "done"
    openings: Openings | None = None  # of the test split, once this job has opened it
    ended: bool = False  # before: its report was given again, and nothing was run
    was_done: bool = False  # an earlier process had done all of it

    def rubric_beside(self, source: str | Path | Rubric) -> Rubric:
        """Another rubric than the job's own, decided by the same models."""
        return load_rubric(source, judge_lm=self.session.judge_lm, own_models=self.session.own_models)

    def runs_before(self, phase: str) -> dict[tuple[str, int], Any]:
        """Runs of a phase that an earlier process finished, see `finished_runs`. Of a job that was done those that failed as well: it is only
        reported again."""
        if not self.session.recorder.resumed:
            return {}
        return finished_runs(self.session, phase, has_tools=has_tools(self.student.program), errors=self.was_done)

    def finished(self, **more: Any) -> FinishedRun:
        """Where the report of this run is kept. `more`: arguments that it depends on and that are no part of `config`."""
        rubric, student = self.session.rubric, self.student
        about = {
            **{name: getattr(self.config, name, None) for name in ("difference", "early_stop", "token_margin", "trials")}, **more,
            "rubric": [rubric.name, rubric.version], "source": _source_of(student.program),
            "program": [program_version(student.program, student.settings["adapter"]), student.settings],
            "data": self.splits.manifest()["sha256"],
        }  # fmt: skip
        return FinishedRun(self.folder, caps=self.config.caps, about=about)

    def tasks_of_artifact(self) -> dict[str, list[str]]:
        """The first digits of the tasks' content hashes that the artifact was made with, by split; empty where there is none."""
        if self.artifact is None:
            return {}
        told = json.loads((self.artifact.path / "splits.json").read_text(encoding="utf-8")).get("tasks") or {}
        return {name: hashes for name, hashes in told.items() if name in SPLITS}

    def made_with(self) -> set[str]:
        """Of those the tasks that it learned from or was selected on."""
        return {content for name in ("train", "val") for content in self.tasks_of_artifact().get(name, ())}

    def end_as_before(self, report: Mapping[str, Any]) -> None:
        """Ends with the report of an earlier process: the store keeps what it says of the run."""
        self.ended, self.status = True, "done" if report["stopped"] is None else "stopped"


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
    opens_as: str | None = None,
) -> Iterator[Job]:
    """Opens what a run needs, holds its lock while it is open, and writes in the store how it ended (`Job.status`).

    Args:
        need: splits that must not be empty.
        opens_as: the job on whose behalf the test split is opened, where several runs are one job; by default the run itself.
    Raises:
        AssayError: what was wrong, which rule, what to do; nothing has been asked of a model by then.
    """
    given = None if isinstance(program, str) else program
    artifact = load_artifact(config.program) if given is None and is_artifact(config.program) else None
    config = replace(config, salt=resolve_salt(config.salt, store, artifact=salt_in(artifact)))
    known = artifact.program if artifact else given
    name = artifact.manifest["program"] if artifact else config.program
    inputs = program_inputs(known if known is not None else program_class(name))
    checked = load_rubric(rubric)
    splits = load_splits(config.data, inputs=inputs, rename=config.rename, salt=config.salt or DEFAULT_SALT, limits=config.sizes, need=need)
    if known is None:
        known = load_program(name, tasks=splits.train + splits.val)
    if config.executor == "ray" and lm is not None:
        raise ConfigError("executor='ray' needs the model by its name: an object of this process cannot travel to the hosts")
    with open_run(config, lm=lm, progress=progress, store=store, resume=resume) as run, ExitStack() as closing:
        judge = _judge_lm(config, run.lm, run.model)
        session = Session(
            lm=run.lm.copy(**config.generation), rubric=load_rubric(checked, judge_lm=judge, own_models=config.own_models),
            recorder=run.recorder, meter=run.meter, program_name=name, seed=config.seed, threads=run.threads, progress=progress,
            prompt_lm=run.reflection, judge_lm=judge, own_models=config.own_models, task_timeout=config.task_timeout,
        )  # fmt: skip
        if config.executor == "ray":
            checks = [c.check for c in checked.criteria if c.check]
            trusted = frozenset(entry.sha256 for entry in entries())
            made = functools.partial(_session_on_a_host, config, checked, name, run.run_id, trusted)
            session.executor = RayExecutor(made, threads=run.threads, carried=checks)
            closing.callback(session.executor.close)
        if artifact is not None:
            check_pinned(artifact, run.lm)
        settings = artifact.settings if artifact else {"adapter": None, "parameters": {}}
        student = Student(known, session, adapter=config.adapter or settings["adapter"])
        splits.outputs = frozenset(name for predictor in student.program.predictors() for name in predictor.signature.output_fields)
        student.set_parameters({**settings["parameters"], **config.parameters})
        path = None if isinstance(rubric, Rubric) else rubric
        job = Job(config, run.folder, run.run_id, splits, student, session, run.store, artifact, path, was_done=run.was_done)
        _keep_splits(job, opens_as or run.run_id)
        yield job
        run.status, run.ended = job.status, job.ended


def salt_in(artifact: Artifact | None) -> tuple[str, str] | None:
    """An artifact's path and the salt of its splits; a judge's has none of tasks."""
    salt = (artifact.manifest.get("data") or {}).get("salt") if artifact is not None else None
    return (str(artifact.path), str(salt)) if artifact is not None and salt else None


def salt_at(program: Any) -> tuple[str, str] | None:
    """The same of a program's path, which is read as an artifact where it is one."""
    return salt_in(load_artifact(program)) if isinstance(program, str) and is_artifact(program) else None


def _keep_splits(job: Job, opens_as: str) -> None:
    """Tells the store which split each task is in, and has it count when the test split is opened."""
    splits = job.splits
    know_tasks(job.store, splits.parts())
    if job.artifact is not None:
        job.session.recorder.carried = carried_by(job.artifact)
        know_splits(job.store, {name: [(content, "") for content in hashes] for name, hashes in job.tasks_of_artifact().items()})

    def count() -> None:
        job.openings = open_test(job.store, opens_as, data=job.config.data, tasks=[task.content_hash for task in splits.parts()["test"]])

    splits.on_open = count


def _judge_lm(config: RunConfig, lm: LanguageModel, make: Callable[..., LanguageModel]) -> LanguageModel:
    """The model of the rubric's judges: the program's own, unless another model or address is named for them."""
    if config.own_models:
        return lm.copy(temperature=0.1)
    name = config.judge_model or lm.model
    return make(name, temperature=0.1, **config.client("judge", name, lm))


def _session_on_a_host(config: RunConfig, rubric: Rubric, program: str, run_id: str, trusted: frozenset[str], outbox: Outbox) -> Session:
    """A job's session on a host of a cluster: its own model, cache and meter; what it records waits in the outbox. It trusts what the driver
    trusts."""
    accept(trusted)
    logging.getLogger("dspy").setLevel(logging.ERROR)
    recorder, meter = Recorder(outbox, run_id=run_id, replayable=True), Meter()  # type: ignore[arg-type]
    shared: dict[str, Any] = {"cache": ResponseCache(), "meter": meter, "observers": [recorder.observe], "seed": config.seed}
    lm = get_lm(config.model, **shared, **config.client("program", config.model))
    judge = _judge_lm(config, lm, functools.partial(get_lm, **shared))
    return Session(
        lm=lm.copy(**config.generation), rubric=load_rubric(rubric, judge_lm=judge, own_models=config.own_models),
        recorder=recorder, meter=meter, program_name=program, seed=config.seed,
        threads=1, judge_lm=judge, own_models=config.own_models, task_timeout=config.task_timeout,
    )  # fmt: skip


def _source_of(program: dspy.Module) -> str:
    """Hash of the file that a program's class is in; empty where there is none."""
    try:
        return hashlib.sha256(Path(inspect.getsourcefile(type(program)) or "").read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


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
    ended: bool = False  # before: nothing was run
    was_done: bool = False  # by an earlier process


@contextmanager
def open_run(
    config: CommonConfig, *, lm: dspy.LM | None = None, progress: Progress, store: str | Path | None = None, resume: bool = False
) -> Iterator[Run]:
    """Holds the job's lock while it is open, and writes in the store how it ended (`Run.status`)."""
    logging.getLogger("dspy").setLevel(logging.ERROR)
    home = home_of(store)
    with only_one(home / "runs" / f"{config.key}.lock"), opened_store(store, progress) as opened:
        if config.salt is not None:
            claim_salt(opened, config.salt)
        (run_id, resumed), started, status = _run_id(opened, config.key, resume=resume, cache=config.cache), time.time(), "failed"
        ended = False
        storage = getattr(config, "storage", None)
        told = {**asdict(config), **({"storage": shown_url(storage)} if storage else {})}
        was_done = resumed and (run_id, "done") in opened.runs(run_id.rpartition("-")[0])
        close_running(opened, run_id.rpartition("-")[0] + "-")
        # a job that runs what it had finished once more counts from nothing
        before = opened.unrecorded(run_id) if resumed else Unrecorded()
        unrecorded = before if config.kind in ("collect", "tune", "evaluate") else Unrecorded()
        recorder = Recorder(opened, run_id=run_id, unrecorded=unrecorded, replayable=True, resumed=resumed)
        cache = ResponseCache(home / "cache" / "responses.db") if config.cache else ResponseCache()
        ledger = opened_ledger(home / "runs" / run_id / "calls.db", recorder, opened, cache)
        meter = Meter(config.caps, spent=spent_before(ledger), ledger=ledger)
        meter.unrecorded = lambda: recorder.unrecorded.calls
        try:
            shared: dict[str, Any] = {"cache": cache, "meter": meter, "observers": [recorder.observe]}
            client = config.client("program", config.model)
            model = with_recording(lm, **shared) if lm is not None else get_lm(config.model, seed=config.seed, **shared, **client)
            reflection = _reflection_lm(config, model, shared)
            opened.put_run(run_id, kind=config.kind, config=told, status="running", started_at=started)
            opened.flush()  # before the first call: a run that is killed at once can be resumed
            run = Run(
                run_id, home / "runs" / run_id, opened, recorder, meter, model, functools.partial(get_lm, seed=config.seed, **shared), reflection,
                config.threads or model.recording.backend.concurrency, was_done=was_done,
            )  # fmt: skip
            with cancelled_by_signals(meter):
                yield run
            status = run.status
            recorder.finish()
            ended = run.ended
            if resumed and status == "done" and not ended:
                drop_cut_off(opened, run_id, started)
        except (Cancelled, KeyboardInterrupt, BudgetExceeded):
            status = "stopped"
            raise
        finally:
            missed = before if ended else recorder.unrecorded
            opened.put_run(run_id, kind=config.kind, config=told, status=status, started_at=started, unrecorded=missed)
            ledger.close()


def _reflection_lm(config: CommonConfig, lm: LanguageModel, shared: dict[str, Any]) -> LanguageModel | None:
    """The model that proposes prompts; None where it is the program's own."""
    if not (config.reflection_model or config.reflection_api_base or config.reflection_api_key_env):
        return None
    name = config.reflection_model or lm.model
    return get_lm(name, temperature=1.0, max_tokens=4096, **shared, **config.client("reflection", name, lm))


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


_pin: ContextVar[str | None] = ContextVar("assay_pinned_run", default=None)


@contextmanager
def pinned(name: str) -> Iterator[None]:
    """Runs opened inside are parts of a larger job: their ids begin with `name`, and one that is there already is continued or replayed."""
    token = _pin.set(name)
    try:
        yield
    finally:
        _pin.reset(token)


def _run_id(store: Store, key: str, *, resume: bool, cache: bool) -> tuple[str, bool]:
    """The id of the run to open, and whether an earlier process has begun it.

    A finished run is replayed by `resume`, which asks the model nothing: its process may have been killed before it could print the report.
    """
    if (pin := _pin.get()) is not None:
        run_id = f"{pin}-{key}"
        return run_id, any(known == run_id for known, _ in store.runs(pin))
    earlier = store.runs(key)
    if not resume or not earlier:  # a job that was never begun begins
        return f"{key}-{len(earlier) + 1}", False
    unfinished = [run_id for run_id, status in earlier if status != "done"]
    if unfinished or cache:
        return (unfinished or [run_id for run_id, _ in earlier])[-1], True
    raise ConfigError("this job has finished, and without a response cache it cannot be replayed: run it anew, without --resume")
