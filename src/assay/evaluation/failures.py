"""Programs that do not work: locates their exceptions, stops a job whose first runs all fail, and finds deadly tasks.

Failures of the model server and unparseable answers do not count against the program. Does not run programs.

A task can end the process that runs it: by `os._exit`, a crash in C code, too much memory. The run's folder has a line
for each task that begins and ends. A process that ends in order says so; where it did not, the tasks that were running
are suspects. The process that resumes the job runs each of them alone, so that a second death has one cause, and that
task then counts as failed. On a cluster, `assay.evaluation.executors` finds the cause.
"""

import inspect
import json
import os
import threading
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
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


class Deaths:
    """The suspects of a run, and the tasks that count as the cause of a death. Thread-safe.

    Args:
        file: of the run; None keeps nothing.
        running: tasks that the store has as running, although no process runs the job.
    """

    def __init__(self, file: Path | None = None, *, running: Collection[str] = ()) -> None:
        self._suspects: set[str] = set()
        self._blamed: set[str] = set()
        self._turn = threading.Condition()
        self._at_work = self._number = 0
        self._alone = self._waiting = 0  # suspects that run, and that wait for their turn
        self._file, self._lock = -1, threading.Lock()
        if file is None:
            return
        unfinished = self._read(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = file, os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if not unfinished.issuperset(running):  # it died on another machine
            self._died(set(running))
            self._write("process")
            for number, task in enumerate(running):
                self._write("begin", -number, task)
        self._write("process")

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
        self._suspects.discard(task)
        self._blamed.add(task)
        self._write("blamed", task)

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
            self._number += 1
            number = self._number
        self._write("begin", number, task)
        try:
            yield
        finally:
            self._write("end", number)
            with self._turn:
                self._at_work -= 1
                self._alone -= suspect
                self._suspects.discard(task)
                self._turn.notify_all()

    def _has_turn(self, suspect: bool) -> bool:
        return self._at_work == 0 if suspect else not (self._alone or self._waiting)

    def close(self) -> None:
        """The process ends in order: the tasks that it leaves are no suspects."""
        if self._file < 0:
            return
        self._write("closed")
        with self._lock:
            os.close(self._file)
            self._file = -1
        if not self._suspects and not self._blamed:
            self._path.unlink(missing_ok=True)

    def _write(self, *line: Any) -> None:
        with self._lock:
            if self._file >= 0:
                os.write(self._file, json.dumps(line).encode() + b"\n")

    def _read(self, file: Path) -> set[str]:
        """Takes in what earlier processes wrote; returns the tasks that the last one left."""
        begun: dict[int, str] = {}
        for text in file.read_text("utf-8").splitlines() if file.is_file() else []:
            try:
                kind, *values = json.loads(text)
            except ValueError:  # the disk was full
                continue
            if kind == "begin":
                begun[values[0]] = values[1]
            elif kind == "end":
                self._suspects.discard(begun.pop(values[0], ""))
            elif kind == "blamed":
                self._suspects.discard(values[0])
                self._blamed.add(values[0])
            elif kind == "closed":
                begun.clear()
            elif kind == "process":
                self._died(set(begun.values()))
                begun.clear()
        left = set(begun.values())
        self._died(left)
        return left

    def _died(self, running: set[str]) -> None:
        """Takes in that a process died while it ran these tasks."""
        if len(running) == 1 and running <= self._suspects:  # a suspect runs alone
            (task,) = running
            self._suspects.discard(task)
            self._blamed.add(task)
        else:
            self._suspects |= running - self._blamed
