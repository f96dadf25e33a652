"""Runs a program over tasks and holds what came out. Failures are counted; nothing is retried behind the caller's back."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay.datasets import Task
from assay.errors import Cancelled
from assay.optimizers.executors import in_threads
from assay.optimizers.metrics import Budget, TaskRun, measure, run_of
from assay.optimizers.session import Session, Student
from assay.optimizers.statistics import mean_interval
from assay.rubrics import ScoreResult
from assay.rubrics.scoring import mean_result

__all__ = ["Evaluation", "evaluate"]


@dataclass
class Evaluation:
    """Scores by task id, in the order the tasks were given; of a task that was run several times, means over its samples."""

    results: dict[str, ScoreResult] = field(default_factory=dict)
    task_types: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    cost_usd: dict[str, float] = field(default_factory=dict)
    runs: dict[tuple[str, int], TaskRun] = field(default_factory=dict)  # by task and sample, for the five metrics
    _samples: dict[str, list[ScoreResult]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def scores(self) -> dict[str, float]:
        """Score by task id; NaN where unscored."""
        return {task_id: result.value for task_id, result in self.results.items()}

    @property
    def mean(self) -> float:
        """Mean over the scored tasks; NaN where none is."""
        values = [value for value in self.scores.values() if not math.isnan(value)]
        return float(np.mean(values)) if values else math.nan

    @property
    def why_unscored(self) -> str | None:
        """Why the first task has no score, where no task has one."""
        if not self.results or self.unscored < len(self):
            return None
        first = next(iter(self.results.values()))
        return first.failed or first.feedback

    @property
    def unscored(self) -> int:
        return sum(math.isnan(value) for value in self.scores.values())

    def add(self, other: "Evaluation") -> None:
        """Takes in the results of other tasks."""
        self.results.update(other.results)
        self.task_types.update(other.task_types)
        self.tokens.update(other.tokens)
        self.calls.update(other.calls)
        self.cost_usd.update(other.cost_usd)
        self.runs.update(other.runs)
        self._samples.update(other._samples)

    def take(self, task: Task, prediction: Any) -> None:
        """Takes in a scored run of one task; another one of the same task is another sample."""
        samples, rollout = self._samples.setdefault(task.id, []), prediction._rollout
        samples.append(prediction._result)
        count = len(samples)
        self.results[task.id] = mean_result(samples)
        self.task_types[task.id] = task.task_type
        for known, value in ((self.tokens, rollout.tokens), (self.calls, len(rollout.transitions))):
            known[task.id] = known.get(task.id, 0.0) + (value - known.get(task.id, 0.0)) / count
        self.cost_usd[task.id] = self.cost_usd.get(task.id, 0.0) + rollout.cost_usd
        score, needed = prediction._result.value, task.metadata.get("tool_calls")
        self.runs[task.id, count - 1] = run_of(
            rollout,
            score=None if math.isnan(score) else score,
            has_tools=getattr(prediction, "_has_tools", False),
            needed=needed,
            error=None if not math.isnan(score) else prediction._result.failed or prediction._result.feedback,
        )

    def criteria(self) -> dict[str, float | None]:
        """Mean grade of each final criterion over the tasks where it was decided."""
        grades: dict[str, list[float]] = defaultdict(list)
        for result in self.results.values():
            for name, value in result.grades.items():
                grades[name] += [] if math.isnan(value) else [value]
        return {name: float(np.mean(values)) if values else None for name, values in grades.items()}

    def undecided(self) -> dict[str, dict[str, Any]]:
        """Final criteria that were not decided on some tasks: on how many (`n`), and the commonest `reason`."""
        reasons: dict[str, list[str]] = defaultdict(list)
        for result in self.results.values():
            for verdict in result.verdicts:
                if verdict.grade is None and result.failed is None:
                    reasons[verdict.criterion].append(verdict.reason)
        return {name: {"n": len(found), "reason": Counter(found).most_common(1)[0][0]} for name, found in reasons.items()}

    def report(self, *, budget: Budget | None = None) -> dict[str, Any]:
        """JSON-ready: `score`, `interval`, `n`, `unscored`, `failed`, `why_failed`, `undecided`, `criteria`, `metrics`, `task_types`,
        means of calls and tokens, dollars."""
        by_type: dict[str, list[float]] = defaultdict(list)
        for task_id, value in self.scores.items():
            by_type[self.task_types[task_id]] += [] if math.isnan(value) else [value]
        low, high = mean_interval(list(self.scores.values()))
        reasons = [result.failed for result in self.results.values() if result.failed is not None]
        return {
            "score": None if math.isnan(self.mean) else self.mean,
            "interval": None if math.isnan(self.mean) else [low, high],
            "n": len(self),
            "unscored": self.unscored,
            "failed": len(reasons),
            "why_failed": Counter(reasons).most_common(1)[0][0] if reasons else None,
            "undecided": self.undecided(),
            "criteria": self.criteria(),
            "metrics": measure(list(self.runs.values()), budget=budget).to_dict(),
            "task_types": {kind: float(np.mean(values)) if values else None for kind, values in sorted(by_type.items())},
            "calls_per_task": float(np.mean(list(self.calls.values()))) if self.calls else 0.0,
            "tokens_per_task": float(np.mean(list(self.tokens.values()))) if self.tokens else 0.0,
            "cost_usd": math.fsum(self.cost_usd.values()),
        }


def evaluate(
    student: Student, tasks: Sequence[Task], session: Session, *, name: str = "evaluate", samples: int = 1, into: Evaluation | None = None
) -> Evaluation:  # fmt: skip
    """Runs and scores `tasks`, several at a time. The results go `into` an evaluation, also those of a run that stops midway.

    Args:
        samples: runs of each task; the first is the one that a single run would be.
    Raises:
        BudgetExceeded, Cancelled: what was finished before is in the store.
    """
    session.know(list(tasks))
    evaluation, execute = Evaluation() if into is None else into, session.executor or in_threads
    with session.progress.bar(name, samples * len(tasks)) as advance:
        for sample in range(samples):
            runner = student if sample == 0 else student.another(sample)
            found: dict[str, Any] = {}
            try:
                for task, prediction in execute(runner, tasks, session):
                    found[task.id] = prediction
                    advance(1)
            except KeyboardInterrupt:
                session.meter.cancel()
                raise Cancelled("stopped by the user") from None
            finally:
                for task in tasks:
                    if task.id in found:
                        evaluation.take(task, found[task.id])
    return evaluation
