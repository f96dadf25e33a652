"""Where an agent runs under parameters: a DSPy program with its rubric, or anybody's agent with an evaluator of its own."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from numbers import Real
from typing import Any, Protocol

import numpy as np

from assay.errors import AssayError, ConfigError, ModelError, ProgramError, Unscored
from assay.models.failures import failure_of_program, is_own
from assay.optimizers.evaluation import Evaluation, evaluate
from assay.optimizers.metrics import TaskRun
from assay.optimizers.parameters.space import Point
from assay.optimizers.session import Progress, Session, Student
from assay.programs import BaseAgent
from assay.scrubbing import said

__all__ = ["AgentArena", "Arena", "ProgramArena"]

_FIRST = 3  # malformed answers of an evaluator that has given no other, after which training is refused
AgentEvaluation = Callable[[Any, Any], Mapping[str, float]]


class Arena(Protocol):
    """Runs an agent on tasks under a point of the space."""

    def run(self, point: Point, tasks: Sequence[Any]) -> list[TaskRun]:
        """One run a task and sample, in the order of the tasks.

        Raises:
            ProgramError: the agent cannot be put into this point at all.
        """
        ...

    def within(self, trial: str) -> AbstractContextManager[None]:
        """What runs inside belongs to a trial, where runs are recorded."""
        ...


class ProgramArena:
    """DSPy programs by name, run, recorded and scored in one session.

    Args:
        students: by name, each with the parameters and adapter it starts from; they are copied, never changed.
        samples: runs of each task.
    """

    def __init__(self, students: Mapping[str, Student], session: Session, *, samples: int = 1) -> None:
        self.students, self.samples = dict(students), samples
        self.session = replace(session, progress=Progress())  # a bar for every few tasks would hide the trials

    def within(self, trial: str) -> AbstractContextManager[None]:
        return self.session.recorder.within(trial)

    def student(self, point: Point) -> Student:
        """A program of its own at a point."""
        chosen = copy.deepcopy(self.students[point.program])
        chosen.set_parameters(point.parameters)
        return chosen

    def run(self, point: Point, tasks: Sequence[Any]) -> list[TaskRun]:
        found = Evaluation()
        evaluate(self.student(point), tasks, self.session, name="", samples=self.samples, into=found)
        return list(found.runs.values())


class AgentArena:
    """Anybody's agent: an object with `execute(task)` and `set_parameters(mapping)`, one task at a time.

    Args:
        evaluator: `evaluator(task, output)` gives metrics of one run by name, `accuracy` among them, each in [0, 1].
            An answer that is not leaves the run unscored, and is an error where the first three all are none.
    """

    def __init__(self, agent: BaseAgent, evaluator: AgentEvaluation, *, samples: int = 1) -> None:
        missing = [name for name in ("execute", "set_parameters") if not _implements(agent, name)]
        if missing:
            raise ProgramError(
                f"{type(agent).__name__} has no {' and no '.join(missing)} of its own: an agent needs execute(task), and set_parameters(mapping), "
                "which its next runs follow"
            )
        self.agent, self.evaluator, self.samples = agent, evaluator, samples
        self._malformed: int | None = 0  # answers of the evaluator that are none, until the first that is one

    def within(self, trial: str) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, point: Point, tasks: Sequence[Any]) -> list[TaskRun]:
        try:
            self.agent.set_parameters(dict(point.parameters))
        except Exception as error:
            called = f"{type(self.agent).__name__}.set_parameters({dict(point.parameters)})"
            raise ProgramError(f"{called} raised {type(error).__name__}: {error}") from error
        return [self._one(task, sample) for sample in range(self.samples) for task in tasks]

    def _one(self, task: Any, sample: int) -> TaskRun:
        clock = time.perf_counter()
        kind = str(getattr(task, "task_type", None) or (task.get("task_type", "default") if isinstance(task, Mapping) else "default"))
        run = TaskRun(task_id=task_name(task), task_type=kind, sample=sample, score=None)
        try:
            output = self.agent.execute(task)
        except AssayError as error:
            if not isinstance(error, ModelError | Unscored):  # a missing package, a setting: the user's to mend, and never a score
                raise
            return replace(run, seconds=time.perf_counter() - clock, error=_words(error))
        except Exception as error:
            failed = replace(run, seconds=time.perf_counter() - clock, error=_words(error))
            return failed if not is_own(failure_of_program(error)) else replace(failed, score=0.0, metrics={"accuracy": 0.0})
        seconds = time.perf_counter() - clock
        try:
            found = self.evaluator(task, output)
        except AssayError as error:
            if not isinstance(error, ModelError | Unscored):
                raise
            return replace(run, seconds=seconds, answer=output, error=f"the evaluator: {_words(error)}")
        except Exception as error:
            return replace(run, seconds=seconds, answer=output, error=f"the evaluator: {_words(error)}")
        wrong = _malformed(found)
        if wrong is not None:
            self._malformed = None if self._malformed is None else self._malformed + 1
            if self._malformed == _FIRST:
                raise ConfigError(wrong)
            return replace(run, seconds=seconds, answer=output, error=f"the evaluator: {wrong}")
        self._malformed = None
        metrics = {name: None if value is None else float(value) for name, value in found.items()}
        return replace(run, score=metrics.get("accuracy"), seconds=seconds, answer=output, metrics=metrics)


def _implements(agent: Any, name: str) -> bool:
    """Whether a method is there and is not the protocol's own empty one, which a subclass of `BaseAgent` inherits."""
    method = getattr(type(agent), name, None) or getattr(agent, name, None)
    return callable(method) and method is not getattr(BaseAgent, name)


def _malformed(found: Any) -> str | None:
    """What is wrong with an evaluator's answer; None where nothing is."""
    if not isinstance(found, Mapping):
        return f"an evaluator gives metrics by name, such as {{'accuracy': 0.5}}; this one gave {found!r}"
    wrong = {name: value for name, value in found.items() if value is not None and not _in_range(value)}
    return f"an evaluator's metrics must be numbers between 0 and 1, and these are not: {wrong}" if wrong else None


def _in_range(value: Any) -> bool:
    return isinstance(value, Real | np.bool_) and bool(math.isnan(float(value)) or 0 <= float(value) <= 1)


def _words(error: Exception) -> str:
    return said(error)


def task_name(task: Any) -> str:
    """A task's id: its own, else its text."""
    own = task.get("id") if isinstance(task, Mapping) else getattr(task, "id", None)
    return str(own) if own not in (None, "") else str(task)
