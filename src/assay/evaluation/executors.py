"""Executors of an evaluation: local threads, or the hosts of a Ray cluster. Both return the same results."""

import contextvars
import functools
import importlib.metadata
import inspect
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import dspy

from assay.datasets import Task
from assay.errors import BudgetExceeded, Cancelled, ConfigError, MissingExtra, ModelError
from assay.evaluation.hosts import Answers, Exchange, HostMeter, Mail, Message, Outbox, Recorded
from assay.evaluation.session import RecordedProgram, Session
from assay.models.limits import LAST_CALLS_S
from assay.models.meter import Caps
from assay.models.unrecorded import Unrecorded
from assay.programs.wrapping import wrapped
from assay.rubrics.scoring import ScoredRun, ScoreResult
from assay.sources.modules import is_private
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
_CONTROLS = 2  # concurrent calls of a host besides its tasks: exchange and stop
_EXCHANGE_S = 1.0  # after which a host without a message answers
_CLOSE_S = 5.0  # that the last messages of a host are waited for
_LOSSES = 2  # hosts that may be lost on one task; one more, and the task counts as the cause


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


class Host:
    """One host's part: a session of its own, in which it runs the tasks it is given."""

    def __init__(self, make: Callable[[Outbox, HostMeter], Session], caps: Caps) -> None:
        self.outbox, self.mail = Outbox(), Mail()
        self.meter = HostMeter(caps, self.mail)
        self.session = make(self.outbox, self.meter)
        self.meter.owner, self.meter.after_call = self.session.recorder.owner, lambda: self._send(loose=True)
        self._missed, self._lock = 0, threading.Lock()

    def exchange(self, answers: Answers) -> list[Message]:
        """See `Exchange`."""
        self.meter.give_up()
        return self.mail.exchange(answers, _EXCHANGE_S)

    def run(self, program: dspy.Module, settings: dict[str, Any], task: Task, place: tuple[str, str]) -> Report:
        session = self.session
        session.register([task])
        session.recorder.phase, session.recorder.scope = place
        copy = RecordedProgram(program, session, prompt_format=settings["adapter"], sample=settings["sample"])
        copy.set_parameters(settings["parameters"])
        copy.group = settings["group"]
        try:
            with session.context():
                run = copy.run(task)
        finally:
            self._send()
            self.mail.delivered()
        return Report(run.rollout, run.scored, run.has_tools)

    def stop(self, reason: str) -> None:
        """Ends the open rollouts, and sends what there is of them."""
        self.session.recorder.stop(reason)
        self._send()
        self.mail.delivered()

    def _send(self, *, loose: bool = False) -> None:
        with self._lock:  # messages in the order of what they have
            rollouts, transitions = self.outbox.emptied(loose=loose)
            missed = self.session.recorder.missed
            more = Unrecorded(missed.calls - self._missed, missed.reason)
            self._missed = missed.calls
            if rollouts or transitions or more.calls or more.reason:
                self.mail.put(Recorded(rollouts, transitions, more))


class RayExecutor:
    """Runs the tasks of an evaluation on the hosts of a Ray cluster, one session on each.

    The cluster is the one at `RAY_ADDRESS`; without it a local one is started.

    Args:
        make: builds a session on a host; it is pickled, and imported there.
        threads: tasks at once on a host.
        caps: of the job, see `HostMeter`.
        carried: functions that `make` needs; those from files of the user's travel with their code.
    Raises:
        MissingExtra: ray is not installed.
        ConfigError: there is no cluster at the address.
    """

    def __init__(
        self, make: Callable[[Outbox, HostMeter], Session], *, threads: int, caps: Caps, carried: Sequence[Any] = ()
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("ray", "ray") from error
        self.ray: Any = ray
        self.threads = max(1, threads)
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
        _by_value({str(getattr(part, "__module__", "")) for part in carried}, ray)
        self.hosts = self._hosts(make, caps)
        self._evaluations = 0
        self._exchanges: dict[Any, Exchange] = {}  # by host

    def _hosts(self, make: Callable[[Outbox, HostMeter], Session], caps: Caps) -> list[Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        maker = self.ray.remote(Host)
        return [
            maker.options(
                num_cpus=0,
                max_concurrency=self.threads + _CONTROLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(make, caps)
            for node in alive
        ]

    def close(self) -> None:
        for exchange in self._exchanges.values():
            exchange.close(_CLOSE_S)
        for host in self.hosts:
            self.ray.kill(host)
        if self._began:
            self.ray.shutdown()

    def __call__(
        self, recorded: RecordedProgram, tasks: Sequence[Task], session: Session
    ) -> Iterator[tuple[Task, ScoredRun]]:
        """As `in_threads`."""
        parts = (recorded.program, *(inner for _, inner in recorded.program.named_sub_modules()))
        _by_value({name for part in parts for name in _modules_of(part)}, self.ray)
        program = self.ray.put(recorded.program)
        settings = {**recorded.settings, "sample": recorded.sample, "group": recorded.group}
        # hosts do not share the numbers of repeated rollouts, so each evaluation has a scope of its own
        self._evaluations += 1
        place = (session.recorder.phase, f"{session.recorder.scope}/{self._evaluations}")
        remaining, lost = list(reversed(tasks)), dict.fromkeys((task.id for task in tasks), 0)
        working: dict[Any, tuple[Task, Any]] = {}
        free = [host for host in self.hosts for _ in range(self.threads)]
        for host in self.hosts:
            if host not in self._exchanges:
                self._exchanges[host] = Exchange(self._exchange_with(host), session)
        cap: BudgetExceeded | None = None
        try:
            while remaining or working:
                while remaining and free:
                    try:
                        session.meter.check()
                    except BudgetExceeded as error:  # those at work are waited for
                        cap, remaining = error, []
                        break
                    task, host = remaining.pop(), free.pop(0)
                    working[host.run.remote(program, settings, task, place)] = (task, host)
                if not working and cap is None:
                    raise ModelError(
                        "every host of the Ray cluster is gone; what was finished is in the store. "
                        "Continue with `resume=True`"
                    )
                for reference in self.ray.wait(list(working), num_returns=1)[0] if working else ():
                    task, host = working.pop(reference)
                    try:
                        report = self._fetch(reference, task, host)
                    except BudgetExceeded as error:  # the other tasks are waited for
                        cap, remaining = cap or error, []
                        continue
                    if report is not None:
                        free.append(host)
                        yield task, _scored_run(report)
                        continue
                    self._exchanges[host].close(_CLOSE_S)  # its calls without a row are lost
                    lost[task.id] += 1
                    if cap is None and lost[task.id] > _LOSSES:
                        raise ModelError(f"task {task.id}: {lost[task.id]} hosts were lost while they ran it")
                    remaining += [task] if cap is None else []
                    self.hosts = [other for other in self.hosts if other is not host]
                    free = [other for other in free if other is not host]
            if cap is not None:
                raise cap
        finally:
            self._end(working, session)

    def _exchange_with(self, host: Any) -> Callable[[Answers], list[Message]]:
        return lambda answers: self.ray.get(host.exchange.remote(answers))

    def _end(self, working: Mapping[Any, tuple[Task, Any]], session: Session) -> None:
        """Waits for the tasks at work, whose records the hosts send; the others are stopped."""
        if not working:
            return
        _, left = self.ray.wait(list(working), num_returns=len(working), timeout=LAST_CALLS_S)
        for reference in left:
            self.ray.cancel(reference, force=False)
        stops = [host.stop.remote("the run ended") for host in {working[reference][1] for reference in left}]
        self.ray.wait(stops, num_returns=len(stops), timeout=_CLOSE_S) if stops else None

    def _fetch(self, reference: Any, task: Task, host: Any) -> Report | None:
        """A host's report; None where the host is lost."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except errors.RayTaskError as error:
            raise error.cause if isinstance(error.cause, BaseException) else ModelError(str(error)) from error
        except errors.ActorDiedError as error:
            if error.actor_init_failed:  # its own `__init__` raised
                raise ModelError(
                    f"a host of the Ray cluster could not start: {str(error).strip().splitlines()[-1]}"
                ) from error
            return None
        except errors.RayActorError:
            return None


def _scored_run(report: Report) -> ScoredRun:
    prediction = dspy.Prediction(**(report.rollout.prediction or {}))
    return ScoredRun(prediction, report.rollout, report.has_tools, report.result)


def _modules_of(part: Any) -> set[str]:
    """The modules that a program's class comes from, and the function or agent that it wraps."""
    inner = wrapped(part)
    called = inner.func if isinstance(inner, functools.partial) else inner
    function = inspect.unwrap(called) if inspect.isfunction(called) else called
    return {str(getattr(source, "__module__", "")) for source in (type(part), type(inner), called, function)}


def _by_value(modules: Collection[str], ray: Any) -> None:
    """What comes from a file of the user's travels with its code: the other hosts do not have the file."""
    installed = {"assay", "__main__", *sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    for name in modules:
        top = name.partition(".")[0]
        if top not in installed and name in sys.modules:
            ray.cloudpickle.register_pickle_by_value(
                sys.modules[top if is_private(name) else name]
            )  # with the helpers of its file
