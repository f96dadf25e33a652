"""Runs an agent under given parameters: a DSPy program with its rubric, or any agent with its own evaluator."""

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
from assay.evaluation.evaluation import Evaluation, evaluate
from assay.evaluation.metrics import TaskRun
from assay.evaluation.progress import SilentProgress
from assay.evaluation.session import RecordedProgram, Session
from assay.models.calls import failure_of_program, is_agent_failure
from assay.optimizers.parameters.space import Point
from assay.programs import BaseAgent
from assay.programs.budgets import set_thresholds
from assay.programs.thinking import THRESHOLDS
from assay.support.scrubbing import error_text

_FIRST = 3  # malformed results after which an evaluator that never gave a valid one is refused
AgentEvaluation = Callable[[Any, Any], Mapping[str, float]]


class Objective(Protocol):
    """Runs an agent on tasks under a point of the space."""

    def run(self, point: Point, tasks: Sequence[Any]) -> list[TaskRun]:
        """One run per task and sample, in the order of the tasks.

        Raises:
            ProgramError: the agent cannot take the parameters of this point.
        """
        ...

    def within(self, trial: str) -> AbstractContextManager[None]:
        """Inside: runs are recorded as part of this trial."""
        ...


class ProgramObjective:
    """DSPy programs by name, run, recorded and scored in one session.

    Args:
        programs: programs by name, each with its initial parameters and adapter; they are copied, never changed.
        samples: runs of each task.
    """

    def __init__(self, programs: Mapping[str, RecordedProgram], session: Session, *, samples: int = 1) -> None:
        self.programs, self.samples, self.scope = dict(programs), samples, ""
        self.coverage: dict[str, Any] = {}  # of the rubric, on the tasks that were run first
        self.session = replace(
            session, progress=SilentProgress()
        )  # a progress bar per block of tasks would hide that of the trials

    def within(self, trial: str) -> AbstractContextManager[None]:
        return self.session.recorder.within(self.scope + trial)

    def named(self, scope: str) -> "ProgramObjective":
        """The same, for trials of another study of the run: their records are kept apart by `scope`."""
        other = copy.copy(self)
        other.scope = scope
        return other

    def program_at(self, point: Point) -> RecordedProgram:
        """A copy of the program with the parameters of a point."""
        chosen = copy.deepcopy(self.programs[point.program])
        set_point(chosen, point.parameters)
        return chosen

    def run(self, point: Point, tasks: Sequence[Any]) -> list[TaskRun]:
        evaluation = Evaluation()
        evaluate(self.program_at(point), tasks, self.session, name="", samples=self.samples, into=evaluation)
        if not self.coverage:
            self.coverage.update(evaluation.coverage())
        return list(evaluation.runs.values())


def set_point(recorded: RecordedProgram, parameters: Mapping[str, Any]) -> None:
    """Sets agent parameters, and thresholds of the thinking policy."""
    recorded.set_parameters({name: value for name, value in parameters.items() if name not in THRESHOLDS})
    set_thresholds(recorded.program, {name: value for name, value in parameters.items() if name in THRESHOLDS})


class AgentObjective:
    """Any agent with `execute(task)` and `set_parameters(mapping)`. It runs one task at a time.

    Args:
        evaluator: `evaluator(task, output)` returns the metrics of one run by name, `accuracy` among them, each in
            [0, 1]. After any other result the run is unscored. If the first three results are invalid, ConfigError is
            raised.
    """

    def __init__(self, agent: BaseAgent, evaluator: AgentEvaluation, *, samples: int = 1) -> None:
        missing = [name for name in ("execute", "set_parameters") if not _implements(agent, name)]
        if missing:
            raise ProgramError(
                f"{type(agent).__name__} has no {' and no '.join(missing)} of its own: "
                "an agent needs execute(task), and set_parameters(mapping), which its next runs follow"
            )
        self.agent, self.evaluator, self.samples = agent, evaluator, samples
        self._malformed: int | None = 0  # malformed results so far; None after the first valid one

    def within(self, trial: str) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, point: Point, tasks: Sequence[Any]) -> list[TaskRun]:
        try:
            self.agent.set_parameters(dict(point.parameters))
        except Exception as error:
            called = f"{type(self.agent).__name__}.set_parameters({dict(point.parameters)})"
            raise ProgramError(f"{called} raised {type(error).__name__}: {error}") from error
        return [self._run_task(task, sample) for sample in range(self.samples) for task in tasks]

    def _run_task(self, task: Any, sample: int) -> TaskRun:
        clock = time.perf_counter()
        kind = str(
            getattr(task, "task_type", None)
            or (task.get("task_type", "default") if isinstance(task, Mapping) else "default")
        )
        run = TaskRun(task_id=task_name(task), task_type=kind, sample=sample, score=None)
        try:
            output = self.agent.execute(task)
        except AssayError as error:
            # others (a missing package, a wrong setting) must be fixed by the user, and never become a score
            if not isinstance(error, ModelError | Unscored):
                raise
            return replace(run, seconds=time.perf_counter() - clock, error=error_text(error))
        except Exception as error:
            failed = replace(run, seconds=time.perf_counter() - clock, error=error_text(error))
            return (
                failed
                if not is_agent_failure(failure_of_program(error))
                else replace(failed, score=0.0, metrics={"accuracy": 0.0})
            )
        seconds = time.perf_counter() - clock
        try:
            result = self.evaluator(task, output)
        except AssayError as error:
            if not isinstance(error, ModelError | Unscored):
                raise
            return replace(run, seconds=seconds, answer=output, error=f"the evaluator: {error_text(error)}")
        except Exception as error:
            return replace(run, seconds=seconds, answer=output, error=f"the evaluator: {error_text(error)}")
        wrong = _malformed(result)
        if wrong is not None:
            self._malformed = None if self._malformed is None else self._malformed + 1
            if self._malformed == _FIRST:
                raise ConfigError(wrong)
            return replace(run, seconds=seconds, answer=output, error=f"the evaluator: {wrong}")
        self._malformed = None
        metrics = {name: None if value is None else float(value) for name, value in result.items()}
        return replace(run, score=metrics.get("accuracy"), seconds=seconds, answer=output, metrics=metrics)


def _implements(agent: Any, name: str) -> bool:
    """Whether the agent has its own method, not the empty one inherited from `BaseAgent`."""
    method = getattr(type(agent), name, None) or getattr(agent, name, None)
    return callable(method) and method is not getattr(BaseAgent, name)


def _malformed(result: Any) -> str | None:
    """What is wrong with the result of an evaluator; None if it is valid."""
    if not isinstance(result, Mapping):
        return f"an evaluator gives metrics by name, such as {{'accuracy': 0.5}}; this one gave {result!r}"
    wrong = {name: value for name, value in result.items() if value is not None and not _in_range(value)}
    return f"an evaluator's metrics must be numbers between 0 and 1, and these are not: {wrong}" if wrong else None


def _in_range(value: Any) -> bool:
    return isinstance(value, Real | np.bool_) and bool(math.isnan(float(value)) or 0 <= float(value) <= 1)


def runs_by_task(runs: Sequence[TaskRun]) -> dict[str, list[TaskRun]]:
    """The runs of each task."""
    groups: dict[str, list[TaskRun]] = {}
    for run in runs:
        groups.setdefault(run.task_id, []).append(run)
    return groups


def task_name(task: Any) -> str:
    """The id of a task; its text if it has none."""
    task_id = task.get("id") if isinstance(task, Mapping) else getattr(task, "id", None)
    return str(task_id) if task_id not in (None, "") else str(task)
