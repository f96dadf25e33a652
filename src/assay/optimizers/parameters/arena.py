"""Where an agent runs under parameters: a DSPy program with its rubric, or anybody's agent with an evaluator of its own."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from assay.errors import AssayError, ConfigError, ProgramError
from assay.optimizers.evaluation import Evaluation, evaluate
from assay.optimizers.metrics import TaskRun
from assay.optimizers.parameters.space import Point
from assay.optimizers.session import Progress, Session, Student
from assay.programs import BaseAgent

__all__ = ["AgentArena", "Arena", "ProgramArena"]

AgentEvaluation = Callable[[Any, Any], Mapping[str, float]]


class Arena(Protocol):
    """Runs an agent on tasks under a point of the space."""

    def run(self, point: Point, tasks: Sequence[Any]) -> list[TaskRun]:
        """One run a task and sample, in the order of the tasks.

        Raises:
            ProgramError: the agent cannot be put into this point at all.
        """
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
    """

    def __init__(self, agent: BaseAgent, evaluator: AgentEvaluation, *, samples: int = 1) -> None:
        if not isinstance(agent, BaseAgent):
            raise ProgramError(f"{type(agent).__name__} needs execute(task) and set_parameters(parameters) to be tuned")
        self.agent, self.evaluator, self.samples = agent, evaluator, samples

    def run(self, point: Point, tasks: Sequence[Any]) -> list[TaskRun]:
        try:
            self.agent.set_parameters(dict(point.parameters))
        except Exception as error:
            called = f"{type(self.agent).__name__}.set_parameters({dict(point.parameters)})"
            raise ProgramError(f"{called} raised {type(error).__name__}: {error}") from error
        return [self._one(task, sample) for sample in range(self.samples) for task in tasks]

    def _one(self, task: Any, sample: int) -> TaskRun:
        name, clock = task_name(task), time.perf_counter()
        kind = str(getattr(task, "task_type", None) or (task.get("task_type", "default") if isinstance(task, Mapping) else "default"))
        try:
            output = self.agent.execute(task)
        except AssayError:  # a missing package, a setting: the user's to mend, and never a score
            raise
        except Exception as error:  # the agent's own failure
            seconds, why = time.perf_counter() - clock, f"{type(error).__name__}: {error}"
            return TaskRun(task_id=name, task_type=kind, sample=sample, score=0.0, seconds=seconds, metrics={"accuracy": 0.0}, error=why)
        seconds = time.perf_counter() - clock
        found = self.evaluator(task, output)
        if not isinstance(found, Mapping):
            raise ConfigError(f"an evaluator gives metrics by name, and this one gave {found!r}")
        metrics = dict(found)
        if wrong := {name: value for name, value in metrics.items() if value is not None and not (math.isnan(value) or 0 <= value <= 1)}:
            raise ConfigError(f"an evaluator's metrics must be between 0 and 1, and these are not: {wrong}")
        accuracy = metrics.get("accuracy")
        return TaskRun(task_id=name, task_type=kind, sample=sample, score=accuracy, seconds=seconds, answer=output, metrics=metrics)


def task_name(task: Any) -> str:
    """A task's id: its own, else its text."""
    own = task.get("id") if isinstance(task, Mapping) else getattr(task, "id", None)
    return str(own) if own not in (None, "") else str(task)
