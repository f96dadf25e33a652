"""Opens runs: lease, store, meter, ledger, and language models with recording, counting and caching."""

import functools
import logging
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import dspy
import sqlalchemy as sa
from filelock import FileLock, Timeout

from assay.deployment.artifact import check_place
from assay.errors import ConfigError, ProgramFailed, StoreError
from assay.evaluation import Progress
from assay.evaluation.failures import Deaths
from assay.jobs.ending import ended_in_order, status_and_reason
from assay.jobs.groups import KeyedJob
from assay.models import LanguageModel, Meter, ResponseCache, Thinking, get_lm, with_recording
from assay.models.limits import OverTime, limited, within_limit
from assay.models.lm import check_thinking
from assay.models.meter import spent_before
from assay.models.roles import Endpoint, is_embedded
from assay.models.thinking import ThinkingError
from assay.models.unrecorded import Unrecorded
from assay.sources.artifact_files import is_artifact
from assay.sources.modules import without_call
from assay.support.names import place_in
from assay.traces import Recorder, Store
from assay.traces.records import short_id
from assay.traces.resuming import DeathsInStore, close_running, drop_cut_off, end_on_full_disk, opened_ledger
from assay.traces.store.leases import Lease, acquire, held_by, patiently
from assay.traces.store.listing import run_folder
from assay.traces.store.location import home_of
from assay.traces.store.sealing import claim_salt

T = TypeVar("T")


_BOOT = Path("/proc/sys/kernel/random/boot_id")
LEASE_S = 30.0  # without a sign of life, after which another machine may take a job over


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Holds a lock that other processes of this machine respect.

    Raises:
        Timeout: another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    lock.acquire(timeout=0)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def job_lease(engine: sa.Engine, store_id: str, home: Path, key: str, *, to_help: str = "") -> Iterator[Lease]:
    """Holds the lease of a job in its store, so that it runs once at a time on all machines.

    A file in the store's folder has the token of the lease and the machine that holds it. Who gets the lock of that
    file on the same machine knows that the process which wrote it has ended, and takes its lease over at once. Another
    machine waits until it has run out: it may see the folder and not its locks.

    Args:
        store_id: of the store, as other stores in the folder may have the same job.
        to_help: how another process can help the job, for the message.
    Raises:
        ConfigError: another process runs the job.
    """
    name, file = f"job:{key}", home / "runs" / f"{key}-{short_id(store_id)}.lock"
    with ExitStack() as locked:
        try:
            locked.enter_context(exclusive_lock(file))
            held = file.with_suffix(".lease")
            token, _, machine = held.read_text(encoding="utf-8").partition("\n") if held.is_file() else ("", "", "")
            lease = acquire(engine, name, LEASE_S, ended=token if machine == this_machine() else None)
        except Timeout:
            lease = None
        if lease is None:
            raise ConfigError(
                f"this very job is running already on {held_by(engine, name) or 'this machine'}: wait until it has "
                f"ended{f', or {to_help}' if to_help else ''}. If its process is gone, continue it with `resume=True`: "
                f"in the folder where it ran at once, elsewhere {LEASE_S:g} s after its last sign of life"
            )
        held.write_text(f"{lease.token}\n{this_machine()}", encoding="utf-8")
        with lease:
            yield lease


def this_machine() -> str:
    """Tells this machine from others, and from itself before it was started again."""
    try:
        started = _BOOT.read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        started = f"{uuid.getnode():x}"
    return f"{socket.gethostname()} {started}"


def answered_within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a program, within a time limit in seconds.

    Raises:
        ProgramFailed: the limit was exceeded, or the program called `sys.exit()`.
    """
    try:
        with limited(seconds):
            return within_limit(call, "the run")
    except OverTime as error:
        raise ProgramFailed(f"{error}; `task_timeout` allows more") from error
    except SystemExit as error:
        raise ProgramFailed(f"the program ended itself with sys.exit({error.code!r})") from error


_SKIPPING = ("collect", "tune", "evaluate", "referee")  # kinds whose runs skip what was finished before
_LAST_ROWS_S = 10.0  # in which a store takes the last rows of a run


@dataclass
class Run:
    """An open run. All its language models share recorder, meter and cache."""

    run_id: str
    folder: Path
    store: Store
    recorder: Recorder
    meter: Meter
    lm: LanguageModel
    model: Callable[..., LanguageModel]  # makes another model, by name
    reflection: LanguageModel | None
    threads: int
    status: str = "done"
    reason: str | None = None  # why it was stopped, if no report says it
    ended: bool = False  # an earlier process had ended it and nothing was run
    was_done: bool = False  # an earlier process had completed it
    deaths: Deaths = field(default_factory=Deaths)


@contextmanager
def open_run(
    config: KeyedJob,
    *,
    lm: dspy.LM | None = None,
    progress: Progress,
    store: str | Path | None = None,
    resume: bool = False,
) -> Iterator[Run]:
    """Opens a run, holds its lock while it is open, and stores how it ended (`Run.status`)."""
    logging.getLogger("dspy").setLevel(logging.ERROR)
    home, lease_key = home_of(store), config.key if (pin := _pin.get()) is None else f"{pin}-{config.key}"
    with (
        ExitStack() as after,
        opened_store(store, progress) as opened,
        job_lease(opened.engine, opened.id, home, lease_key, to_help=config.to_help) as lease,
    ):
        opened.belong_to(lease)
        if config.stored_salt is not None:
            claim_salt(opened, config.stored_salt)
        started, status, failure, ended = opened.clock.now(), "failed", None, False
        run_id, resumed = new_run_id(
            opened, config.key, kind=config.kind, started_at=started, resume=resume, cache=config.cache
        )
        folder = run_folder(store, run_id)
        stored = {**config.without_passwords, "dspy": dspy.__version__}
        was_done = resumed and (run_id, "done") in opened.runs(run_id.rpartition("-")[0])
        left = close_running(opened, run_id.rpartition("-")[0] + "-")
        deaths = Deaths(DeathsInStore(opened, run_id), running=left if resumed else ())
        for line in deaths.notes:
            progress.say(f"note: {line}")
        # the other kinds repeat what was finished before, so their count starts at zero
        earlier, before = (opened.run_row(run_id), opened.unrecorded(run_id)) if resumed else ({}, Unrecorded())
        # the ledger counts those that were lost
        unrecorded = replace(before, lost=0) if config.kind in _SKIPPING else Unrecorded()
        recorder = Recorder(opened, run_id=run_id, unrecorded=unrecorded, replayable=True, resumed=resumed)
        cache = ResponseCache(home / "cache" / "responses.db") if config.cache else ResponseCache()
        ledger = opened_ledger(opened, recorder, cache)
        meter = Meter(config.caps, spent=spent_before(ledger), ledger=ledger)
        meter.unrecorded = lambda: recorder.missed.calls
        if opened.address.file is None:
            # the lease last: a call that was counted while this process had the job is known to who takes it over
            meter.is_counting = lambda: ledger.is_complete() and not (lease.lost or lease.is_doubtful)
        try:
            lm_options: dict[str, Any] = {"cache": cache, "meter": meter, "observers": [recorder.observe]}
            name = config.model_name
            model = (
                with_recording(lm, price=config.price, **lm_options)
                if lm is not None
                else get_lm(name, seed=config.seed, **lm_options, **client_of(config, "program", name))
            )
            model = _of_role(config, model)
            reflection = _reflection_lm(config, model, lm_options)
            opened.put_run(run_id, kind=config.kind, config=stored, status="running", started_at=started)
            opened.flush()  # before the first call, so that a run that is killed at once can be resumed
            run = Run(
                run_id, folder, opened, recorder, meter, model,
                functools.partial(get_lm, seed=config.seed, **lm_options), reflection,
                config.threads or model.recording.backend.concurrency, was_done=was_done, deaths=deaths,
            )  # fmt: skip
            with ended_in_order(meter, recorder, opened, progress, to_continue="continue with `resume=True`"):
                yield run
            status, failure = run.status, run.reason
            recorder.finish()
            ended = run.ended
            if resumed and status == "done" and not ended:
                drop_cut_off(opened, run_id, started)
        except BaseException as error:
            status, failure = status_and_reason(error)
            raise
        finally:
            deaths.close()
            if not opened.full:
                _flushed(opened)
            opened.use_room(whole=True)
            ledger.close()
            if opened.full:  # before the rows that wait take the space
                end_on_full_disk(opened, run_id, status, recorder.unrecorded, failure)
            missed = before if ended else recorder.unrecorded
            if ended and earlier["ended_at"] is not None:  # else it was killed after it had written its report
                _put_back(opened, earlier)
            else:
                opened.put_run(
                    run_id, kind=config.kind, config=stored, status=status, started_at=started, unrecorded=missed,
                    failure=failure,
                )  # fmt: skip
            if opened.full:  # again once it is closed: its last rows may have fitted, or not
                after.callback(lambda: end_on_full_disk(opened, run_id, status, recorder.unrecorded, failure))
            else:
                opened.written(_LAST_ROWS_S)  # while the lease is held: later they would be those of a lost job


def _put_back(store: Store, row: Mapping[str, Any]) -> None:
    with suppress(StoreError):  # the report is given again all the same
        store.put_run_back(row)


def _flushed(store: Store) -> None:
    with suppress(StoreError, KeyboardInterrupt):  # its rows are counted; how the run ended is still to be written
        store.flush()


def _reflection_lm(config: KeyedJob, lm: LanguageModel, lm_options: dict[str, Any]) -> LanguageModel | None:
    """The model that proposes prompts; None if it is the program's own."""
    model, address, key = config.endpoints.get("reflection", (None, None, None))
    thinking = getattr(config, "reflection_thinking", None)
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 4096}
    if not (model or address or key):
        return None if thinking is None else budgeted(lm.copy(**options), thinking, "reflection_thinking")
    name = model or lm.model
    reflection = get_lm(name, **options, **lm_options, **client_of(config, "reflection", name, lm))
    return budgeted(reflection, thinking, "reflection_thinking")


def _of_role(config: KeyedJob, lm: LanguageModel) -> LanguageModel:
    """The model with a judge's budget. A program has its own, which `assay.jobs.job.open_job` sets."""
    return budgeted(lm, config.thinking, "thinking") if config.ROLE == "judge" else lm


def budgeted(lm: LanguageModel, thinking: int | str | None, setting: str) -> LanguageModel:
    """The model with the thinking budget of a role; the model itself without one.

    Raises:
        ThinkingError: the model's engine cannot honour it; the message names the setting.
    """
    if thinking is None:
        return lm
    budget = Thinking.of(thinking)
    try:
        check_thinking(lm, budget)
    except ThinkingError as error:
        model = f"{setting.removesuffix('thinking')}model"
        raise error.of(setting, f"Name a model that thinks (`{model}`), or set no budget") from None
    return lm.copy(thinking=budget)


def client_of(config: KeyedJob, role: str, model: str, lm: dspy.LM | None = None) -> dict[str, Any]:
    """Address, key and price for a role's model, see `assay.models.roles`.

    Args:
        role: `program`, `judge` or `reflection`.
        lm: the program's model as an object. Its address and key are used for other roles unless theirs are set.
    Raises:
        ConfigError: the environment variable of a key is not set.
    """
    same_model = role == "program" or model == (config.model_name if lm is None else lm.model)
    price = {"price": config.price} if same_model and config.price is not None else {}
    return {**_address_of(config, role, model, lm), **price}


def _address_of(config: KeyedJob, role: str, model: str, lm: dspy.LM | None) -> dict[str, Any]:
    program = Endpoint(config.api_base, config.api_key_env)
    if role == "program":
        return program.client(model)
    _, base, env = config.endpoints.get(role, (None, None, None))
    if base is None and env is None and isinstance(lm, LanguageModel) and not is_embedded(model):
        client = dict(lm.recording.client)  # an embedded model has none: then the address of the settings applies
        return client or program.client(model)
    return program.role(base, env).client(model, "api_key_env" if env is None else f"{role}_api_key_env")


@contextmanager
def opened_store(store: str | Path | None, progress: Progress, *, patient: bool = False) -> Iterator[Store]:
    """Opens the store and closes it at the end. Rows that it refused are a warning: they must not cost the result.

    Args:
        patient: a store that is away is waited for, a minute.
    """
    opened = patiently(lambda: Store(store)) if patient else Store(store)
    try:
        yield opened
    finally:
        try:
            opened.close()
        except Exception as error:  # the run's result must not be lost with its last rows
            progress.say(f"warning: {error}")


def short_title(program: str) -> str:
    """The name of a program without its module, in lower case; of an agent's command its words, for a folder's name."""
    title = without_call(program).rpartition(":")[2].lower()
    return title if title.isidentifier() else re.sub(r"[^a-z0-9_]+", "-", title).strip("-")[-40:] or "agent"


def artifact_place(store: str | Path | None, out: str | Path | None, name: str, *, resume: bool = False) -> Path:
    """The folder for the artifact of a job: the named one, or that of a name in the store's folder.

    To be called before the job costs anything. In the store's folder, `save_artifact` adds a number to the name if
    there is such an artifact, unless it is of the run that is resumed; a folder that the user names is new, or the
    artifact of the job that is resumed.

    Raises:
        ConfigError: the name is not a name of a folder, a symbolic link has it, or the named folder exists.
        NoArtifact: nothing can be written there.
    """
    if out:
        check_out(out, resume=resume)
        return Path(out)
    place = place_in(home_of(store) / "artifacts", name)
    check_place(place.resolve())
    return place


def check_out(out: str | Path | None, *, resume: bool = False) -> None:
    """Checks the folder that the user names for an artifact; raises as `artifact_place`."""
    if not out:
        return
    place = Path(out)
    if place.is_symlink():
        raise ConfigError(f"{place} is a symbolic link, and nothing is written through it: name a new folder")
    if place.exists() and not (resume and is_artifact(place)):
        raise ConfigError(f"{place} already exists and is not overwritten; name a new folder (`out`)")
    check_place(place.resolve())


_pin: ContextVar[str | None] = ContextVar("assay_pinned_run", default=None)


@contextmanager
def pinned(name: str) -> Iterator[None]:
    """Makes runs opened inside parts of a larger job.

    Their ids begin with `name`. A run that exists already is resumed or replayed.
    """
    token = _pin.set(name)
    try:
        yield
    finally:
        _pin.reset(token)


def new_run_id(store: Store, key: str, *, kind: str, started_at: float, resume: bool, cache: bool) -> tuple[str, bool]:
    """The id of the run to open, reserved in the store, and whether an earlier process has started it.

    `resume` takes the latest run of the job: an unfinished one that is older was superseded, for example where a check
    failed on the first tasks and was corrected. It replays a finished run without calling the model: its process may
    have been killed before it printed the report.
    """
    if (pin := _pin.get()) is not None:
        run_id = f"{pin}-{key}"
        return run_id, not store.reserve_run(run_id, kind=kind, started_at=started_at)
    earlier = store.runs(key)
    if not resume or not earlier:  # without an earlier run there is nothing to resume
        number = int(earlier[-1][0].rpartition("-")[2]) + 1 if earlier else 1
        return _reserved(store, key, number, kind=kind, started_at=started_at), False
    run_id, status = earlier[-1]
    if status != "done" or cache:
        return run_id, True
    raise ConfigError(
        "this job has finished, and without a response cache it cannot be replayed: run it anew, without `resume=True`"
    )


_STORE = "store"  # file in a run's folder: id of the store that has the run


def _reserved(store: Store, key: str, number: int, *, kind: str, started_at: float) -> str:
    """The first free id of a run from a number on. A folder of this name may be of another store in the same place."""
    while True:
        run_id = f"{key}-{number}"
        mark = run_folder(store.url, run_id) / _STORE
        mark.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), mark.open("x", encoding="utf-8") as file:
            file.write(store.id)
        ours = mark.read_text(encoding="utf-8") == store.id
        if ours and store.reserve_run(run_id, kind=kind, started_at=started_at):
            return run_id
        number += 1
