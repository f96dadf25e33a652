"""Programs that do not work: locates their exceptions, stops a job whose first runs all fail, and finds deadly tasks.

Failures of the model server and unparseable answers do not count against the program. Does not run programs.

A task can end the process that runs it: by `os._exit`, a crash in C code, too much memory. The store has the tasks that
run, from before they begin. A process that ends in order leaves none; where it did not, the tasks that were running are
suspects. The process that resumes the job, on any machine, runs each of them alone, so that a second death has one
cause, and that task then counts as failed. On a cluster, `assay.evaluation.executors` finds the cause.
"""

import inspect
import threading
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import dspy

from assay.datasets import Task
from assay.errors import FailureKind, ProgramFailed
from assay.models.limits import OverTime
from assay.programs.runners import AgentFailed
from assay.rubrics import Failed
from assay.rubrics.scoring import ScoredRun
from assay.support.package import OWN_FOLDERS

_CHAIN = 20  # causes of an exception that are followed
_FIRST = 10  # runs that a job begins with
_FEWEST = 3  # runs below which a job is never stopped
_EMPTY = (
    ". The answer of `forward` needs a value: return a dspy.Prediction (or a mapping) with fields that are not empty"
)
_LIBRARIES = (*map(str, OWN_FOLDERS), str(Path(dspy.__file__).parent), str(Path(inspect.__file__).parent))


class FirstRuns:
    """The first runs of a job. If each fails in the program itself, the job stops: every later score would be 0."""

    def __init__(self, *, proven: bool = False) -> None:
        self.runs: list[ScoredRun] = []
        self.proven = proven  # at least one run did not fail in the program itself

    def deciding(self, tasks: Sequence[Task]) -> dict[str, ScoredRun | None]:
        """A mapping from the ids of the deciding tasks to their runs, to be filled; empty if already proven."""
        return {} if self.proven else dict.fromkeys(task.id for task in tasks[:_FIRST])

    def done(self, deciding: dict[str, ScoredRun | None], task: Task, run: ScoredRun) -> None:
        """Stores a run in `deciding`; once the mapping is full, passes all runs to `add`.

        Raises:
            ProgramFailed: as `add`.
        """
        if task.id in deciding and deciding[task.id] is None:
            deciding[task.id] = run
            runs = [done for done in deciding.values() if done is not None]
            if len(runs) == len(deciding):
                self.add(runs)

    def add(self, runs: Iterable[ScoredRun]) -> None:
        """Adds runs.

        Raises:
            ProgramFailed: at least three runs were made, and each failed in the program itself.
        """
        if self.proven:
            return
        self.runs += runs
        self.proven = len(self.runs) >= _FIRST or not all(_failed_itself(run) for run in self.runs)
        require_answers(self.runs)


def require_answers(runs: Sequence[ScoredRun]) -> None:
    """Checks that not every run failed in the program itself; does nothing for fewer than three runs.

    Raises:
        ProgramFailed: with the most common reason and a traceback.
    """
    if len(runs) < _FEWEST or not all(_failed_itself(run) for run in runs):
        return
    reason, count = Counter(run.scored.failed for run in runs).most_common(1)[0]
    error = next((run.error for run in runs if run.error is not None), None)
    how = correction(error) if error is not None else _EMPTY
    how = ". Correct the agent" if isinstance(error, AgentFailed) else how  # the traceback is of the code that ran it
    example = "" if count == len(runs) else ", such as"
    raise ProgramFailed(
        f"the program failed on each of the first {len(runs)} tasks{example}: {reason}{how}. "
        "`preflight=False` skips this check"
    )


def _failed_itself(run: ScoredRun) -> bool:
    result = run.result
    return result is not None and result.failed is not None and result.failure is FailureKind.AGENT


@dataclass(frozen=True)
class Place:
    """Where an exception was raised: the last line of the program's own code in the traceback."""

    kind: type[BaseException]
    file: str
    line: int


def place_of(error: BaseException, program: Any) -> Place:
    """The last traceback line in the program's own files; its `forward` if no own line was reached (wrong
    arguments)."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if _in_program_files(frame.filename)]
    if own_frames:
        return Place(type(error), own_frames[-1].filename, own_frames[-1].lineno or 0)
    inside = [
        frame for frame in frames if "assay" in Path(frame.filename).parts and "programs" in Path(frame.filename).parts
    ]
    if inside:
        return Place(type(error), inside[-1].filename, inside[-1].lineno or 0)
    forward = getattr(type(program), "forward", type(program))
    try:
        return Place(type(error), inspect.getsourcefile(forward) or "?", inspect.getsourcelines(forward)[1])
    except (OSError, TypeError):
        last = frames[-1] if frames else None
        return Place(type(error), last.filename if last else "?", (last.lineno or 0) if last else 0)


def _in_program_files(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, "<")) and "site-packages" not in file


def correction(error: BaseException) -> str:
    """What to correct after an exception of a program: the address where no server listens, or the program."""
    if (address := refused_address(error)) is not None:
        return f". No server listens at {address}: start it, or correct the address that the program calls"
    own = any(_in_program_files(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    if isinstance(error, OverTime) and not own:  # an agent in another process: the traceback is of what waited for it
        return ". Correct the agent, or allow it more time"
    return f"\n{program_traceback(error)}\nCorrect the program"


def refused_address(error: BaseException | None) -> str | None:
    """Host and port that refused the connection from which an exception follows, "that address" where they are not
    known; None if no connection was refused."""
    address = "that address"
    for _ in range(_CHAIN):
        if error is None:
            break
        with suppress(Exception):  # a client's request may be missing, or its attribute may raise
            url = urlsplit(str(error.request.url))  # type: ignore[attr-defined]
            address = f"{url.scheme}://{url.hostname}:{url.port or (443 if url.scheme == 'https' else 80)}"
        if isinstance(error, ConnectionRefusedError):
            return address
        error = error.__cause__ or error.__context__
    return None


def program_traceback(error: BaseException) -> str:
    """The traceback from the program's first own line; the whole traceback if it has none."""
    trace = traceback.TracebackException.from_exception(error)
    own_indexes = [index for index, frame in enumerate(trace.stack) if _in_program_files(frame.filename)]
    if own_indexes:
        trace.stack = traceback.StackSummary.from_list(list(trace.stack)[own_indexes[0] :])
    return "".join(trace.format()).rstrip()


DIED_ALONE = (
    "the process that ran the task ended twice while it ran it: by os._exit, by a crash, or by a kill, which is also "
    "what the system does when memory runs out"
)
_NAMED = 5  # tasks that a message lists


def _listed(tasks: Collection[str]) -> str:
    others = f" and {len(tasks) - _NAMED} more" if len(tasks) > _NAMED else ""
    return f"task {', '.join(sorted(tasks)[:_NAMED])}{others}"


class Kept(Protocol):
    """Where the tasks of a run are kept by what is known of them, see `assay.traces.resuming.DeathsInStore`."""

    def read(self) -> dict[str, list[str]]: ...

    def write(self, tasks: Mapping[str, Collection[str]], *, last: bool = False) -> None: ...


class Deaths:
    """The suspects of a run, and the tasks that count as the cause of a death. Thread-safe.

    Args:
        kept: of the run; None keeps nothing.
        running: tasks whose rollouts are running in the store, although no process runs the job.
    """

    def __init__(self, kept: Kept | None = None, *, running: Collection[str] = ()) -> None:
        self._suspects: set[str] = set()
        self._blamed: set[str] = set()
        self._running: Counter[str] = Counter()  # tasks at work, with the number of their runs
        self._turn = threading.Condition()
        self._at_work = 0
        self._alone = self._waiting = 0  # suspects that run, and that wait for their turn
        self._kept, self._writing = kept, threading.Lock()
        self._changes = self._written = 0
        if kept is None:
            return
        earlier = kept.read()
        self._suspects.update(earlier.get("suspects", ()))
        self._blamed.update(earlier.get("blamed", ()))
        if left := earlier.get("running"):
            self._died(set(left))
        else:  # the store may have been out of reach when they began, so that nothing tells which of them ran alone
            self._suspects |= set(running) - self._blamed
        if left or running:
            self._keep()

    @property
    def has_suspects(self) -> bool:
        """Whether some tasks run alone, so that others wait for them."""
        return bool(self._suspects)

    @property
    def notes(self) -> list[str]:
        """What a resumed job says before it runs tasks."""
        lines = []
        if self._suspects:
            lines.append(
                f"the process that ran this job was killed or crashed while it ran {_listed(self._suspects)}: each of "
                "these tasks runs alone now; one that ends the process again counts as failed"
            )
        if self._blamed:
            lines.append(
                f"failed, and not run again: {_listed(self._blamed)}. {DIED_ALONE.capitalize()}. If you ended the "
                "process yourself, run the job without `resume`: answers come from the cache"
            )
        return lines

    def failure_of(self, task: str) -> Failed | None:
        """The failure of a task that ends its process; it is not run again."""
        return Failed(DIED_ALONE, by_agent=True, kind=FailureKind.AGENT) if task in self._blamed else None

    def blame(self, task: str) -> None:
        """Counts a task as the cause of a death."""
        with self._turn:
            self._suspects.discard(task)
            self._blamed.add(task)
        self._keep()

    @contextmanager
    def running(self, task: str) -> Iterator[None]:
        """Inside, a task runs: a suspect alone, after those at work have ended."""
        suspect = task in self._suspects
        with self._turn:
            self._waiting += suspect
            self._turn.wait_for(lambda: self._has_turn(suspect))
            self._waiting -= suspect
            self._at_work += 1
            self._alone += suspect
            self._running[task] += 1
        self._keep()
        try:
            yield
        finally:
            with self._turn:
                self._running[task] -= 1
                if not self._running[task]:
                    del self._running[task]
                self._suspects.discard(task)
                to_keep = suspect or not self._running
            if to_keep:  # else the next task that begins keeps it: only a suspect could be blamed by that
                self._keep()
            with self._turn:
                self._at_work -= 1
                self._alone -= suspect
                self._turn.notify_all()

    def _has_turn(self, suspect: bool) -> bool:
        return self._at_work == 0 if suspect else not (self._alone or self._waiting)

    def close(self) -> None:
        """The process ends in order: the tasks that it leaves are no suspects."""
        with self._writing:
            self._running.clear()
            self._write(last=True)
            self._kept = None

    def _keep(self) -> None:
        """Returns once the present state is kept. Threads that wait meanwhile are served by one change."""
        with self._turn:
            self._changes += 1
            change = self._changes
        with self._writing:
            if self._written < change:
                self._write()

    def _write(self, *, last: bool = False) -> None:
        if self._kept is None:
            return
        with self._turn:
            self._written = self._changes
            tasks = {"running": [*self._running], "suspects": [*self._suspects], "blamed": [*self._blamed]}
        self._kept.write(tasks, last=last)

    def _died(self, running: set[str]) -> None:
        """Takes in that a process died while it ran these tasks."""
        if len(running) == 1 and running <= self._suspects:  # a suspect runs alone
            (task,) = running
            self._suspects.discard(task)
            self._blamed.add(task)
        else:
            self._suspects |= running - self._blamed
