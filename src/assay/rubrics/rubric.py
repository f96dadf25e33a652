"""The rubric: one object that scores, serves as a DSPy metric, reports, and is a plain callable for any agent."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from assay.datasets import Task, make_task
from assay.errors import RubricError
from assay.models import sample_scope
from assay.rubrics.criteria import Check, Criterion, Failed
from assay.rubrics.scoring import ScoreResult, combine, fields_of, grade
from assay.traces.records import Rollout, Verdict

if TYPE_CHECKING:
    from assay.rubrics.metric import RubricMetric

__all__ = ["STEP_CAP", "Resolver", "Rubric"]

Resolver = Callable[[Criterion], Check]
STEP_CAP = 0.5  # most that a rollout's step rewards may sum to: below the 1.0 of being right


class Rubric:
    """Weighted criteria under a name.

    Args:
        criteria: at least one `final` criterion with a positive weight; names must differ.
        resolver: makes a judge criterion decidable (`assay.judges.resolver(lm)`); without one they stay unscored.
    Raises:
        RubricError: the criteria break a rule; the message says which.
    """

    def __init__(self, name: str, criteria: Sequence[Criterion], *, step_cap: float = STEP_CAP, resolver: Resolver | None = None) -> None:
        self.name, self.criteria, self.step_cap, self.resolver = name, tuple(criteria), step_cap, resolver
        names = [c.name for c in self.criteria]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise RubricError(f"rubric {name!r} has more than one criterion called {', '.join(twice)}")
        if not any(c.scope == "final" and c.weight > 0 for c in self.criteria):
            raise RubricError(f"rubric {name!r} needs at least one final criterion with a weight above 0")
        if not 0 <= step_cap < 1:
            raise RubricError(f"rubric {name!r}: step_cap={step_cap!r} must be at least 0 and below 1, the reward for being right")
        self._decide = {c.name: self._decider(c) for c in self.criteria}

    def __deepcopy__(self, memo: object) -> "Rubric":
        return self

    def __repr__(self) -> str:
        return f"Rubric({self.name!r}, {[c.name for c in self.criteria]})"

    def _decider(self, criterion: Criterion) -> Check | None:
        if criterion.check is not None:
            return criterion.check
        return self.resolver(criterion) if self.resolver is not None else None

    def with_resolver(self, resolver: Resolver) -> "Rubric":
        """The same rubric with its judges decided by `resolver`."""
        return Rubric(self.name, self.criteria, step_cap=self.step_cap, resolver=resolver)

    @property
    def needs_judge(self) -> bool:
        return any(c.judge is not None for c in self.criteria)

    @property
    def finals(self) -> tuple[Criterion, ...]:
        return tuple(c for c in self.criteria if c.scope == "final")

    @property
    def version(self) -> str:
        """The first 16 hex digits of a sha256 over criteria, weights, arguments and the checks' source code."""
        entries = [c.describe() for c in self.criteria]
        whole = json.dumps({"name": self.name, "step_cap": self.step_cap, "criteria": entries}, sort_keys=True, default=str)
        return hashlib.sha256(whole.encode()).hexdigest()[:16]

    def score(self, task: Task | Mapping[str, Any], prediction: Any, rollout: Rollout | None = None) -> ScoreResult:
        """Scores one prediction. Criteria that come back unscored are judged once more.

        Args:
            task: a `Task`, or a mapping that `make_task` understands.
            prediction: a `dspy.Prediction`, a mapping, a bare answer; None or `Failed` where the run gave none.
            rollout: what the recorder saw, for checks that look at tools, steps and tokens.
        """
        if not isinstance(task, Task):
            task = make_task(task)
        failure = Failed("the agent gave no answer") if prediction is None else _failure(prediction)
        if failure is not None:
            return self._failed(failure)
        fields = fields_of(prediction)
        if _empty(fields) and not _empty(dict(task.expected)):
            return self._failed(Failed("every field of the answer is empty"))
        verdicts = [self._grade(c, task, fields, rollout) for c in self.finals]
        return combine(self.criteria, verdicts)

    __call__ = score

    def _grade(self, criterion: Criterion, task: Task, fields: dict[str, Any], rollout: Rollout | None) -> Verdict:
        decide = self._decide[criterion.name]
        if decide is None:
            reason = "no judge model was given"
            return Verdict(criterion=criterion.name, grade=None, weight=criterion.weight, reason=reason)
        verdict = grade(criterion, decide, task, fields, rollout)
        if verdict.grade is None:
            spent = verdict.cost_usd
            with sample_scope(1):  # a judge is asked anew, not answered from the cache
                verdict = grade(criterion, decide, task, fields, rollout)
            verdict.cost_usd += spent
        return verdict

    def _failed(self, failure: Failed) -> ScoreResult:
        value, mark = (0.0, 0.0) if failure.own else (math.nan, None)
        verdicts = tuple(
            Verdict(criterion=c.name, grade=mark if c.weight >= 0 else None, weight=c.weight, reason=failure.reason) for c in self.finals
        )
        return ScoreResult(
            value=value,
            verdicts=verdicts,
            coverage=1.0 if failure.own else 0.0,
            feedback=f"The run failed: {failure.reason}",
            failed=failure.reason,
        )

    def step_rewards(self, task: Task, rollout: Rollout) -> list[dict[str, float]]:
        """Weight times grade of each step criterion, one mapping a transition, in order.

        Over the rollout the positive rewards are scaled down together where they sum to more than `step_cap`.
        Unscored step criteria are absent.
        """
        steps = [c for c in self.criteria if c.scope == "step"]
        rewards: list[dict[str, float]] = []
        for transition in rollout.transitions:
            entry = {}
            for c in steps:
                verdict = grade(c, self._decide[c.name], task, {"transition": transition}, rollout)
                if verdict.grade is not None:
                    entry[c.name] = c.weight * verdict.grade
            rewards.append(entry)
        total = math.fsum(value for entry in rewards for value in entry.values() if value > 0)
        if total > self.step_cap:
            rewards = [{k: v * self.step_cap / total if v > 0 else v for k, v in entry.items()} for entry in rewards]
        return rewards

    def metric(self, *, threshold: float = 0.8, feedback: bool = False, tasks: Mapping[str, Task] | None = None) -> "RubricMetric":
        """This rubric as a DSPy metric. See `RubricMetric`."""
        from assay.rubrics.metric import RubricMetric

        return RubricMetric(self, threshold=threshold, feedback=feedback, tasks=tasks)

    def reweighted(self, weights: Mapping[str, float]) -> "Rubric":
        """The same criteria with other weights, by name."""
        criteria = [replace(c, weight=weights.get(c.name, c.weight)) for c in self.criteria]
        return Rubric(self.name, criteria, step_cap=self.step_cap, resolver=self.resolver)


def _empty(fields: dict[str, Any]) -> bool:
    """Whether nothing was answered; that a task expects nothing is another matter."""
    answers = [value for name, value in fields.items() if name != "steps"]
    return bool(answers) and all(value is None or (isinstance(value, str) and not value.strip()) for value in answers)


def _failure(prediction: Any) -> Failed | None:
    if isinstance(prediction, Failed):
        return prediction
    if isinstance(prediction, BaseException):
        return Failed(f"{type(prediction).__name__}: {prediction}")
    marked = getattr(prediction, "_failed", None)
    if isinstance(marked, Failed):
        return marked
    return None if fields_of(prediction) else Failed("the prediction has no fields")
