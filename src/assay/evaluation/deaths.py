"""Tasks that end the process that runs them: `os._exit`, a crash in C code, too much memory.

The run's folder has a line for each task that begins and ends. A process that ends in order says so; where it did not,
the tasks that were running are suspects. The process that resumes the job runs each of them alone, so that a second
death has one cause, and that task then counts as failed. On a cluster, `assay.evaluation.executors` finds the cause.
"""

import json
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from assay.errors import FailureKind
from assay.rubrics import Failed

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
