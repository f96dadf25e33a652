"""Executors of an evaluation: local threads, or the hosts of a Ray cluster. Both return the same results."""

import contextvars
import io
import logging
import os
import pickle
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Generic, Protocol, TypeVar

import dspy

from assay.datasets import Task
from assay.errors import (
    AssayError,
    BudgetExceeded,
    Cancelled,
    ConfigError,
    FailureKind,
    MissingExtra,
    ModelError,
    unspoken,
)
from assay.evaluation.failures import DIED_ALONE
from assay.evaluation.hosts import Answers, Exchange, HostGone, HostMeter, Mail, Message, Outbox, Recorded
from assay.evaluation.session import RecordedProgram, Session
from assay.models.hosted import HostedBackend
from assay.models.limits import LAST_CALLS_S
from assay.models.meter import Caps
from assay.models.unrecorded import Unrecorded
from assay.rubrics.scoring import ScoredRun, ScoreResult
from assay.sources.files import is_user_file
from assay.sources.modules import public
from assay.sources.shipping import Delivery, Shipment, not_sent
from assay.support.scrubbing import error_text
from assay.traces import Rollout

# -- Jobs in daemon threads. At a cap, jobs in progress are waited for; after Ctrl-C they are not.
#
# `ThreadPoolExecutor` waits for them at the end of its `with` block and at the end of the process: for a slow server up
# to the time limit of a call.


T = TypeVar("T")
Around = Callable[[], AbstractContextManager[Any]]
_MAX_WAIT_S = 0.05  # longest wait in seconds before finished jobs are yielded
_AT_ONCE = 16  # first jobs, each of which is yielded at once: they may show that the others are not worth their calls


def as_finished(
    job: Callable[[int], T], count: int, *, threads: int, around: Around = nullcontext, drop: bool = False
) -> Iterator[tuple[int, T]]:
    """Calls `job(0)` to `job(count - 1)`, `threads` at a time; yields (index, result) as they finish.

    An exception ends the iteration after the jobs finished before it were yielded. At a cap, jobs in progress are
    waited for and yielded too: their calls are answered and paid for. Otherwise they are dropped if the user stopped
    the run or with `drop`, else waited for.

    Args:
        job: called in a copy of the caller's context; what it sets is its own.
        around: entered once in each thread.
        drop: an exception other than a cap does not wait for jobs in progress.
    """
    jobs = _Jobs(job, count, around)
    jobs.start(threads)
    yield from jobs.results(drop=drop)


def in_order(job: Callable[[int], T], count: int, *, threads: int) -> list[T]:
    """The results of `as_finished` in the order of the jobs."""
    results = dict(as_finished(job, count, threads=threads))
    return [results[index] for index in range(count)]


def in_background(job: Callable[[], T]) -> Callable[[], T]:
    """Starts a job; the function that is returned waits for its result."""
    jobs = _Jobs(lambda _: job(), 1, nullcontext)
    jobs.start(1)
    return lambda: next(jobs.results(drop=True))[1]


class _Jobs(Generic[T]):
    """State shared by the threads.

    The collecting thread is woken by the first jobs and once all are done, not by each job: for a program that answers
    immediately, one wake-up per run took as long as recording the run.
    """

    def __init__(self, job: Callable[[int], T], count: int, around: Around) -> None:
        self.job, self.count, self.around = job, count, around
        self.next = iter(range(count))
        self.done: deque[tuple[int, T]] = deque()
        self.failed: BaseException | None = None
        self.stopped = False
        self.finished = threading.Event()
        self.threads: list[threading.Thread] = []

    def start(self, threads: int) -> None:
        for _ in range(min(max(1, threads), self.count)):
            context = contextvars.copy_context()
            self.threads.append(threading.Thread(target=context.run, args=(self._work,), name="assay", daemon=True))
            self.threads[-1].start()

    def results(self, *, drop: bool) -> Iterator[tuple[int, T]]:
        try:
            remaining = self.count
            while remaining:
                self.finished.wait(_MAX_WAIT_S)
                self.finished.clear()
                failed = self.failed  # read first, so that every job that finished before the failure is among `done`
                if isinstance(failed, BudgetExceeded) or not (
                    drop or isinstance(failed, KeyboardInterrupt | Cancelled | None)
                ):
                    for thread in self.threads:
                        thread.join()
                while self.done:
                    yield self.done.popleft()
                    remaining -= 1
                if failed is not None:
                    raise failed
        finally:
            self.stopped = True

    def _work(self) -> None:
        try:
            with self.around():
                for index in self.next:
                    if self.stopped:
                        return
                    self.done.append((index, contextvars.copy_context().run(self.job, index)))
                    if index < _AT_ONCE:
                        self.finished.set()
        except BaseException as error:
            self.failed, self.stopped = self.failed or error, True
        finally:
            self.finished.set()


# -- Executors.


EXECUTORS = ("threads", "ray")
_LOSSES = 2  # hosts that may be lost on one task, or processes of a host that may end while they load the program
_CONTROLS = 3  # concurrent calls of a process besides its tasks: load, exchange, stop
_EXCHANGE_S = 1.0  # after which a host without a message answers
_CLOSING_S = 5.0  # for a process to remove its files and to send its last messages
_NAMED = 5  # differences that a message lists


def in_threads(recorded: RecordedProgram, tasks: Sequence[Task], session: Session) -> Iterator[tuple[Task, ScoredRun]]:
    """Runs the tasks, `session.threads` at a time; yields each task with its run as it finishes."""
    for place, run in pairs_in_threads([(recorded, task) for task in tasks], session):
        yield tasks[place], run


def pairs_in_threads(
    pairs: Sequence[tuple[RecordedProgram, Task]], session: Session
) -> Iterator[tuple[int, ScoredRun]]:
    """Runs each program on its task, `session.threads` pairs at a time; yields index of the pair and run.

    An exception ends the iteration after the runs finished before it were yielded. At a cap, those still in progress
    are yielded as well. Otherwise they are dropped: the end of the job waits for their calls in flight.
    """

    def run(place: int) -> ScoredRun:
        recorded, task = pairs[place]
        return recorded.run(task)

    yield from as_finished(run, len(pairs), threads=session.threads, around=session.context, drop=True)


@dataclass(frozen=True)
class Report:
    """One scored run of a host; its records and its calls are in the messages before it."""

    rollout: Rollout
    result: ScoreResult
    has_tools: bool


class Sender(Protocol):
    """What an executor sends to the hosts; see `assay.jobs.hosts.Consignment`."""

    def packed(self, program: dspy.Module) -> Callable[[], dspy.Module]:
        """A function without arguments, sent by reference, that returns the program on a host."""

    def shipment(self, named: Collection[tuple[str, str]]) -> Shipment:
        """The files that are needed on a host, also by the classes and functions of these modules and names."""


@dataclass(frozen=True)
class Loaded:
    """What a host sees after it has loaded a program: the hashes of `Shipment`, the environment variables that it
    lacks, and why it could not load the program."""

    seen: Mapping[str, str]
    absent: Sequence[str] = ()
    reason: str = ""


class Host:
    """One process of a host: a session of its own, in which it runs the tasks it is given."""

    def __init__(self, caps: Caps) -> None:
        self.outbox, self.mail, self.delivery = Outbox(), Mail(), Delivery()
        self.meter = HostMeter(caps, self.mail)
        self.session: Session | None = None
        self._program: tuple[int, dspy.Module | None] = (0, None)
        self._missed, self._lock = 0, threading.Lock()

    def load(self, files: Shipment, make: bytes, program: bytes, number: int) -> Loaded:
        """Takes in the files and makes the session and the program.

        Args:
            make: pickled function that makes the session.
            program: pickled function that makes the program.
            number: of the program, which `run` names.
        """
        seen: dict[str, str] = {}
        absent = [name for name in files.variables if not os.environ.get(name)]
        try:
            self.delivery.unpack(files)
            seen = self.delivery.seen(files)
            if absent or files.differences(seen):
                return Loaded(seen, absent)
            self.session = self.session or self._opened(pickle.loads(make))
            with self.session.context():
                self._program = number, pickle.loads(program)()
        except BaseException as error:  # also `sys.exit()` of a module
            return Loaded(seen, reason=self._reason(error))
        return Loaded(seen)

    def _opened(self, make: Callable[[Outbox, HostMeter], Session]) -> Session:
        session = make(self.outbox, self.meter)
        self.meter.owner, self.meter.after_call = session.recorder.owner, lambda: self._send(session, loose=True)
        for lm in filter(None, (session.lm, session.judge_lm)):
            if isinstance(lm.recording.backend, HostedBackend):
                lm.recording.backend.load()  # else its seconds count against the time limit of the first tasks
        return session

    def exchange(self, answers: Answers) -> list[Message]:
        """See `Exchange`."""
        self.meter.give_up()
        return self.mail.exchange(answers, _EXCHANGE_S)

    def _reason(self, error: BaseException) -> str:
        """An error with the line of the user's file that raised it, in the words of the sender."""
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f"{f.filename}:{f.lineno}: " for f in reversed(frames) if is_user_file(Path(f.filename))), "")
        text = unspoken(error) if isinstance(error, AssayError) else f"{place}{error_text(error)}"
        return public(text).replace(str(self.delivery.home), "")

    def run(self, number: int, settings: dict[str, Any], task: Task, place: tuple[str, str]) -> Report:
        """Runs a task with the program that was loaded under this number."""
        session, (loaded, program) = self.session, self._program
        assert session is not None
        assert loaded == number
        session.register([task])
        session.recorder.phase, session.recorder.scope = place
        copy = RecordedProgram(program, session, prompt_format=settings["adapter"], sample=settings["sample"])
        copy.set_parameters(settings["parameters"])
        copy.group = settings["group"]
        try:
            with session.context():
                run = copy.run(task)
        finally:
            self._send(session)
            self.mail.delivered()
        return Report(run.rollout, run.scored, run.has_tools)

    def stop(self, reason: str) -> None:
        """Ends the open rollouts, and sends what there is of them."""
        if self.session is not None:
            self.session.recorder.stop(reason)
            self._send(self.session)
            self.mail.delivered()

    def _send(self, session: Session, *, loose: bool = False) -> None:
        with self._lock:  # messages in the order of what they have
            rollouts, transitions = self.outbox.emptied(loose=loose)
            missed, absent = session.recorder.missed, self.delivery.missed()
            more = Unrecorded(missed.calls - self._missed, missed.reason)
            self._missed = missed.calls
            if rollouts or transitions or absent or more.calls or more.reason:
                self.mail.put(Recorded(rollouts, transitions, more, absent))

    def close(self) -> None:
        self.delivery.remove()


@dataclass
class _Process:
    """A host's process, as its driver sees it.

    Attributes:
        ready: it has loaded the program.
        alone: it runs a task that may end it, and no other.
        interrupted: tasks that ran when the process before it ended.
    """

    node: Mapping[str, Any]
    actor: Any
    ready: bool = False
    alone: bool = False
    at_work: int = 0
    attempts: int = 0  # processes that ended while they loaded the program
    interrupted: list[Task] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.node['NodeManagerHostname']} ({self.node['NodeManagerAddress']})"


class RayExecutor:
    """Runs the tasks of an evaluation on the hosts of a Ray cluster, a process with a session of its own on each.

    The cluster is the one at `RAY_ADDRESS`; without it a local one is started. Files travel through Ray's object store,
    once to each host; Ray's `runtime_env` would need a connection of its own, and forgets the files of a process that
    ended.

    A task whose process ends is run once more, alone in a process; if that ends too, the task is the cause and counts
    as failed. A host is lost only if Ray reports its node dead.

    Args:
        make: builds a session on a host.
        program: of the job.
        sender: knows the files.
        threads: tasks at once on a host.
        caps: of the job, see `HostMeter`.
    Raises:
        MissingExtra: ray is not installed.
        ConfigError: there is no cluster at the address, or a host cannot run the program, sees other files, or lacks
            the key of a model.
    """

    def __init__(
        self,
        make: Callable[[Outbox, HostMeter], Session],
        program: dspy.Module,
        sender: Sender,
        *,
        threads: int,
        caps: Caps,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("ray", "ray") from error
        self.ray: Any = ray
        errors = ray.exceptions
        self._gone = (errors.RayActorError, errors.ActorUnschedulableError, errors.ObjectLostError)
        self.sender, self.threads, self.caps = sender, max(1, threads), caps
        self._began = not ray.is_initialized()
        if self._began:
            try:
                ray.init(
                    log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False, configure_logging=False
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"no Ray cluster could be joined or started: {error}. RAY_ADDRESS names one that runs"
                ) from error
        self._evaluations = 0
        self._exchanges: dict[Any, Exchange] = {}  # by process
        self._checked: set[str] = set()  # paths that a host missed
        self._absent: str | None = None  # the first of them that this process has
        self.hosts: list[_Process] = []
        self._files, self._sent, self._program = Shipment(), list[Any](), None
        try:
            self._make, self._named = pickled(make, "the rubric", ray)
            alive = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
            self.hosts = [_Process(node, self._started(node)) for node in alive]
            self._load(program)
        except BaseException:
            self.close()
            raise

    def _started(self, node: Mapping[str, Any]) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options = {"num_cpus": 0, "max_concurrency": self.threads + _CONTROLS, "scheduling_strategy": where}
        return self.ray.remote(Host).options(**options).remote(self.caps)

    def _load(self, program: dspy.Module) -> None:
        """Makes all hosts load a program, and checks that they see what this process sees."""
        self._evaluations += 1
        packed, named = pickled(self.sender.packed(program), "the program", self.ray)
        files = self.sender.shipment({*self._named, *named})
        if files != self._files or not self._sent:
            self._files, self._sent = files, [self.ray.put(files), self.ray.put(self._make)]
        self._program = self.ray.put(packed)
        for process in self.hosts:
            process.alone, process.at_work, process.interrupted = False, 0, []
        waiting = {self._loading(process): process for process in self.hosts}
        while waiting:
            for reference in self.ray.wait(list(waiting), num_returns=1)[0]:
                process = waiting.pop(reference)
                if not self._is_ready(reference, process) and process in self.hosts:
                    waiting[self._replaced(process)] = process

    def _loading(self, process: _Process) -> Any:
        process.ready = False
        return process.actor.load.remote(*self._sent, self._program, self._evaluations)

    def _is_ready(self, reference: Any, process: _Process) -> bool:
        """Whether a process has loaded the program; if its node is dead, the host is lost.

        Raises:
            ConfigError: it cannot load it.
            ModelError: each process of the host ended while it loaded the program.
        """
        try:
            loaded: Loaded = self.ray.get(reference)
        except self._gone as error:
            process.attempts += 1
            if not self._is_alive(process):
                self.hosts.remove(process)
            elif process.attempts > _LOSSES:
                raise ModelError(
                    f"on host {process.name} of the Ray cluster, {process.attempts} processes ended while they loaded "
                    f"the program: {str(error).strip().splitlines()[-1]}"
                ) from error
            return False
        except self.ray.exceptions.RayTaskError as error:
            raise ConfigError(f"host {process.name} of the Ray cluster cannot run assay: {error.cause!r}") from error
        if loaded.absent:
            raise ConfigError(
                f"host {process.name} of the Ray cluster lacks the environment variable {loaded.absent[0]}, which this "
                "process has: keys are read on the hosts. Set it where Ray is started there"
            )
        if loaded.reason:
            raise ConfigError(f"host {process.name} of the Ray cluster cannot load the program: {loaded.reason}")
        if differences := self._files.differences(loaded.seen):
            raise ConfigError(
                f"host {process.name} of the Ray cluster does not see what this process sees: "
                + "; ".join(differences[:_NAMED])
            )
        process.ready, process.attempts = True, 0
        return True

    def _is_alive(self, process: _Process) -> bool:
        return any(node["Alive"] and node["NodeID"] == process.node["NodeID"] for node in self.ray.nodes())

    def _replaced(self, process: _Process) -> Any:
        """Starts another process on the host of one that ended. Its calls without a row are lost."""
        self._end_exchange(process.actor, lost=True)
        with suppress(Exception):
            self.ray.kill(process.actor)  # it may only have been out of reach
        process.actor, process.alone, process.at_work = self._started(process.node), False, 0
        return self._loading(process)

    def _exchange_with(self, actor: Any, session: Session) -> None:
        def exchange(answers: Answers) -> list[Message]:
            try:
                messages: list[Message] = self.ray.get(actor.exchange.remote(answers))
            except self._gone as error:
                raise HostGone from error
            return messages

        if actor not in self._exchanges:
            self._exchanges[actor] = Exchange(exchange, session, check=self._check)

    def _end_exchange(self, actor: Any, *, lost: bool = False) -> None:
        if (exchange := self._exchanges.pop(actor, None)) is not None:
            exchange.close(_CLOSING_S, lost=lost)

    def close(self) -> None:
        for actor in list(self._exchanges):
            self._end_exchange(actor)
        for reference in [process.actor.close.remote() for process in self.hosts]:
            with suppress(Exception):
                self.ray.get(reference, timeout=_CLOSING_S)
        for process in self.hosts:
            self.ray.kill(process.actor)
        if self._began:
            self.ray.shutdown()

    def __call__(
        self, recorded: RecordedProgram, tasks: Sequence[Task], session: Session
    ) -> Iterator[tuple[Task, ScoredRun]]:
        """As `in_threads`."""
        self._load(recorded.program)
        settings = {**recorded.settings, "sample": recorded.sample, "group": recorded.group}
        # hosts do not share the numbers of repeated rollouts, so each evaluation has a scope of its own
        place = (session.recorder.phase, f"{session.recorder.scope}/{self._evaluations}")
        waiting = _Waiting(deque(task for task in tasks if session.deaths.failure_of(task.id) is None))
        working: dict[Any, tuple[Task, _Process]] = {}
        starting: dict[Any, _Process] = {}
        cap: BudgetExceeded | None = None
        for task in tasks:
            if session.deaths.failure_of(task.id) is not None:
                yield task, self._failed(recorded, task, session, place)
        try:
            while waiting.tasks or waiting.suspects or working or starting:
                while cap is None and (process := self._free(waiting)) is not None:
                    try:
                        session.meter.check()
                    except BudgetExceeded as error:  # those at work are waited for
                        cap = error
                        break
                    task = waiting.take(process)
                    process.at_work += 1
                    self._exchange_with(process.actor, session)
                    working[process.actor.run.remote(self._evaluations, settings, task, place)] = (task, process)
                if not working and (cap is not None or not starting):
                    if cap is not None:
                        break
                    raise ModelError(
                        "every host of the Ray cluster is gone; what was finished is in the store. "
                        "Continue with `resume=True`"
                    )
                ended, _ = self.ray.wait([*working, *starting], num_returns=1, timeout=_EXCHANGE_S)
                if (fault := next((each.fault for each in self._exchanges.values() if each.fault), None)) is not None:
                    raise fault
                for reference in ended:
                    if reference in starting:
                        process = starting.pop(reference)
                        ready = self._is_ready(reference, process)
                        if not ready and process in self.hosts:
                            starting[self._replaced(process)] = process
                            continue
                        for task in waiting.take_back(process, died=ready):
                            session.deaths.blame(task.id)
                            session.progress.say(f"task {task.id} counts as failed: {DIED_ALONE}")
                            yield task, self._failed(recorded, task, session, place)
                        continue
                    task, process = working.pop(reference)
                    try:
                        report = self._fetch(reference)
                    except BudgetExceeded as error:  # the tasks at work are waited for
                        cap = cap or error
                        process.at_work -= 1
                        continue
                    if report is not None:
                        process.at_work -= 1
                        process.alone = False
                        yield task, self._run(report)
                        continue
                    process.interrupted = [task]
                    for other in [other for other, (_, at) in working.items() if at is process]:
                        task, _ = working.pop(other)
                        if (report := self._fetch(other)) is not None:
                            yield task, self._run(report)
                        else:
                            process.interrupted.append(task)
                    names = ", ".join(task.id for task in process.interrupted[:_NAMED])
                    session.progress.say(f"a process of host {process.name} ended while it ran {names}; it is replaced")
                    starting[self._replaced(process)] = process
            if cap is not None:
                raise cap
        finally:
            self._end(working)

    def _free(self, waiting: "_Waiting") -> _Process | None:
        """The process that gets the next task; one without tasks for a suspect. None if all are busy."""
        ready = [process for process in self.hosts if process.ready and not process.alone]
        if waiting.suspects and (idle := [process for process in ready if not process.at_work]):
            where = waiting.suspects[0][1]
            return next((process for process in idle if process is not where), idle[0])
        open_ = [process for process in ready if process.at_work < self.threads] if waiting.tasks else []
        return min(open_, key=lambda process: process.at_work, default=None)

    def _failed(self, recorded: RecordedProgram, task: Task, session: Session, place: tuple[str, str]) -> ScoredRun:
        """Records the failure of a task that ends its process."""
        with session.context(), session.recorder.within(place[1]):
            return recorded.run(task)

    def _end(self, working: Mapping[Any, tuple[Task, _Process]]) -> None:
        """Waits for the tasks at work, whose records the hosts send; the others are stopped."""
        if not working:
            return
        _, left = self.ray.wait(list(working), num_returns=len(working), timeout=LAST_CALLS_S)
        for reference in left:
            self.ray.cancel(reference, force=False)
        actors = {working[reference][1].actor for reference in left}
        if stops := [actor.stop.remote("the run ended") for actor in actors]:
            self.ray.wait(stops, num_returns=len(stops), timeout=_CLOSING_S)

    def _fetch(self, reference: Any) -> Report | None:
        """A host's report; None where its process ended."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, BaseException) else ModelError(str(error)) from error
        except self._gone:
            return None

    def _check(self, recorded: Recorded) -> None:
        """Marks the rollouts of a program that asked for a file that was not sent: a resumed job repeats them."""
        missed = [path for path in recorded.asked_in_vain if path not in self._checked]
        self._checked.update(missed)
        self._absent = self._absent or not_sent(missed, [self._files.folder, *self._files.roots.values()])
        if self._absent is not None:
            for rollout in recorded.rollouts:
                rollout.status, rollout.error, rollout.failure = "error", self._absence, FailureKind.RECORD

    @property
    def _absence(self) -> str:
        return f"on a host of the Ray cluster, the program looked for {self._absent}"

    def _run(self, report: Report) -> ScoredRun:
        """The run of a report.

        Raises:
            ConfigError: a program asked for a file that was not sent. The run is no result.
        """
        if self._absent is not None:
            raise ConfigError(self._absence)
        prediction = dspy.Prediction(**(report.rollout.prediction or {}))
        return ScoredRun(prediction, report.rollout, report.has_tools, report.result)


@dataclass
class _Waiting:
    """Tasks that are to be sent out.

    Attributes:
        suspects: tasks whose process ended, and where; each runs alone.
        losses: hosts that were lost on a task.
    """

    tasks: deque[Task]
    suspects: deque[tuple[Task, _Process]] = field(default_factory=deque)
    suspected: set[str] = field(default_factory=set)
    losses: Counter[str] = field(default_factory=Counter)

    def take(self, process: _Process) -> Task:
        """The next task for a process that `RayExecutor._free` returned."""
        if self.suspects and not process.at_work:
            process.alone = True
            return self.suspects.popleft()[0]
        return self.tasks.popleft()

    def take_back(self, process: _Process, *, died: bool) -> list[Task]:
        """Takes back the tasks of a process that ended; returns those that ended a process before.

        Args:
            died: the process alone; otherwise its host is lost.
        Raises:
            ModelError: too many hosts were lost on one task.
        """
        tasks, process.interrupted = process.interrupted, []
        causes = [task for task in tasks if died and task.id in self.suspected]
        for task in tasks:
            if not died:
                self.losses[task.id] += 1
                if self.losses[task.id] > _LOSSES:
                    raise ModelError(f"task {task.id}: {self.losses[task.id]} hosts were lost while they ran it")
            if task in causes:
                continue
            if died or task.id in self.suspected:
                self.suspected.add(task.id)
                self.suspects.append((task, process))
            else:
                self.tasks.appendleft(task)
        return causes


def pickled(value: Any, what: str, ray: Any) -> tuple[bytes, set[tuple[str, str]]]:
    """A value for a host, and module and name of what is sent by reference: classes, functions, modules.

    Args:
        what: what it contains, for a message.
    Raises:
        ConfigError: it cannot be pickled.
    """
    named: set[tuple[str, str]] = set()

    class Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, part: Any) -> Any:
            if isinstance(part, type | FunctionType):
                named.add((str(part.__module__), part.__qualname__))
            elif isinstance(part, ModuleType):
                named.add((part.__name__, ""))
            return super().reducer_override(part)

    file = io.BytesIO()
    try:
        Pickler(file).dump(value)
    except Exception as error:
        raise ConfigError(
            f"{what} has an object that cannot be sent to the hosts of a Ray cluster: {error_text(error)}. Name it "
            "instead, as file.py:NAME or package.module:NAME: then the hosts load it from its file"
        ) from error
    return file.getvalue(), named
