"""The rubric: one object that scores, serves as a DSPy metric, reports, and is a plain callable for any agent."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from assay.datasets.tasks import Task, make_task
from assay.errors import RubricError, StopRun
from assay.models.failures import failure_of_program, is_own, unanswered
from assay.models.limits import current_limit, within_limit
from assay.models.scope import sample_scope, spending
from assay.rubrics.conditions import check_conditions, condition
from assay.rubrics.criteria import Check, Criterion, Failed, JudgeSpec, NoGrade
from assay.rubrics.scoring import ScoreResult, combine, fields_of, grade
from assay.scrubbing import said
from assay.traces.records import Rollout, Verdict

if TYPE_CHECKING:
    from assay.rubrics.metric import RubricMetric
    from assay.rubrics.reward import Reward

__all__ = ["JUDGING", "STEP_CAP", "Resolver", "Rubric"]

Resolver = Callable[[Criterion], Check | None]
JUDGING = ("each", "together", "overall")
STEP_CAP = 0.5  # most that a rollout's step rewards may sum to: below the 1.0 of being right
_RATING = ("very poor", "poor", "fair", "good", "very good")


class Rubric:
    """Weighted criteria under a name.

    Args:
        criteria: at least one `final` criterion with a positive weight; names must differ.
        resolver: makes a judge criterion decidable (`assay.judges.resolver(lm)`); without one they stay unscored.
        judging: how judge criteria are asked. `each`: one call a criterion. `together`: one call, with a verdict for each.
            `overall` (implicit aggregation): they become one criterion of that name, weighing the sum of their positive
            weights, whose judge sees them all with their weights and gives one rating.
    Raises:
        RubricError: the criteria break a rule; the message says which.
    """

    def __init__(
        self, name: str, criteria: Sequence[Criterion], *, step_cap: float = STEP_CAP, resolver: Resolver | None = None, judging: str = "each"
    ) -> None:
        self.name, self.criteria, self.step_cap, self.resolver, self.judging = name, tuple(criteria), step_cap, resolver, judging
        if judging not in JUDGING:
            raise RubricError(f"rubric {name!r}: judging={judging!r} must be one of {', '.join(JUDGING)}")
        if judging == "overall":
            self.criteria, self.judging = _folded(name, self.criteria), "each"
        names = [c.name for c in self.criteria]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise RubricError(f"rubric {name!r} has more than one criterion called {', '.join(twice)}")
        if not any(c.scope == "final" and c.weight > 0 for c in self.criteria):
            raise RubricError(f"rubric {name!r} needs at least one final criterion with a weight above 0")
        self._by_name = check_conditions(name, self.criteria)
        if not 0 <= step_cap < 1:
            raise RubricError(f"rubric {name!r}: step_cap={step_cap!r} must be at least 0 and below 1, the reward for being right")
        self._decide = {c.name: self._decider(c) for c in self.criteria}
        asked = [c for c in self.criteria if c.judge is not None]
        self._together: Any = resolver.together(asked) if judging == "together" and asked and resolver is not None else None  # type: ignore[attr-defined]

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
        return Rubric(self.name, self.criteria, step_cap=self.step_cap, resolver=resolver, judging=self.judging)

    def decider(self, name: str) -> Check | None:
        """What decides the criterion of that name: its check, or its judge where there is a model for it."""
        return self._decide[name]

    def compares(self, name: str) -> bool:
        """Whether the criterion's judge compares several outputs of a task and cannot judge one."""
        return hasattr(self._decide[name], "grade_group")

    @property
    def needs_judge(self) -> bool:
        return any(c.judge is not None for c in self.criteria)

    @property
    def finals(self) -> tuple[Criterion, ...]:
        return tuple(c for c in self.criteria if c.scope == "final")

    @cached_property
    def version(self) -> str:
        """The first 16 hex digits of a sha256 over criteria, weights, arguments and the checks' source code, as of the first read."""
        entries = [c.describe() for c in self.criteria]
        kept = {"name": self.name, "step_cap": self.step_cap, "criteria": entries, **({"judging": self.judging} if self.judging != "each" else {})}
        whole = json.dumps(kept, sort_keys=True, default=str)
        return hashlib.sha256(whole.encode()).hexdigest()[:16]

    def score(self, task: Task | Mapping[str, Any], prediction: Any, rollout: Rollout | None = None) -> ScoreResult:
        """Scores one prediction. Criteria that come back unscored are judged once more.

        Args:
            task: a `Task`, or a mapping that `make_task` understands.
            prediction: a `dspy.Prediction`, a mapping, a bare answer; None or `Failed` where the run gave none.
            rollout: what the recorder saw, for checks that look at tools, steps and tokens.
        """
        task = task if isinstance(task, Task) else make_task(task)
        failure = _failure(task, prediction, rollout)
        if failure is not None:
            return self._failed(failure)
        return self._scored(task, fields_of(prediction), rollout, {})

    __call__ = score

    def score_group(
        self, task: Task | Mapping[str, Any], predictions: Sequence[Any], rollouts: Sequence[Rollout | None] | None = None
    ) -> list[ScoreResult]:
        """Scores several predictions of one task, in order. Judges that compare see them together, the failed ones left out;
        everything else decides each by itself, as in `score`."""
        task = task if isinstance(task, Task) else make_task(task)
        seen = list(rollouts) if rollouts is not None else [None] * len(predictions)
        if len(seen) != len(predictions):
            raise RubricError(f"{len(predictions)} predictions with {len(seen)} rollouts: give one rollout, or None, for each")
        failures = [_failure(task, prediction, run) for prediction, run in zip(predictions, seen, strict=True)]
        alive = [index for index, failure in enumerate(failures) if failure is None]
        fields = {index: fields_of(predictions[index]) for index in alive}
        compared: dict[int, dict[str, Verdict]] = {index: {} for index in alive}
        for c in self.finals:
            if hasattr(self._decide[c.name], "grade_group"):
                counted = [i for i in alive if self._condition(c, task, fields[i], seen[i], compared[i]) is None]
                if counted:
                    answers = self._compare(c, task, [fields[i] for i in counted], [seen[i] for i in counted])
                    for index, verdict in zip(counted, answers, strict=True):
                        compared[index][c.name] = verdict
        return [
            self._failed(failure) if failure is not None else self._scored(task, fields[index], seen[index], compared[index])
            for index, failure in enumerate(failures)
        ]

    def _scored(self, task: Task, fields: dict[str, Any], rollout: Rollout | None, known: Mapping[str, Verdict]) -> ScoreResult:
        found = {**known, **self._asked_together(task, fields, rollout)}
        return combine(self.criteria, [self._decided(c, task, fields, rollout, found) for c in self.finals])

    def _decided(self, c: Criterion, task: Task, fields: dict[str, Any], rollout: Rollout | None, found: dict[str, Verdict]) -> Verdict:
        """The verdict on a final criterion, from `found` or asked for and put there. Conditions are decided first."""
        waits = self._condition(c, task, fields, rollout, found)
        if waits is not None:
            waits.cost_usd = found[c.name].cost_usd if c.name in found else 0.0
            found[c.name] = waits
        elif c.name not in found:
            found[c.name] = self._grade(c, task, fields, rollout)
        return found[c.name]

    def _condition(self, c: Criterion, task: Task, fields: dict[str, Any], rollout: Rollout | None, found: dict[str, Verdict]) -> Verdict | None:
        """The verdict that replaces a criterion's where its `when` did not pass or is unknown; else None."""
        if not c.when:
            return None
        gate = self._by_name[c.when]
        return condition(c, gate, self._decided(gate, task, fields, rollout, found))

    def _compare(self, c: Criterion, task: Task, fields: list[dict[str, Any]], rollouts: list[Rollout | None]) -> list[Verdict]:
        decide: Any = self._decide[c.name]
        with spending() as prices:
            answers = _answers(lambda: decide.grade_group(task, fields, rollouts), len(fields))
        return [_verdict_of(c, answer, math.fsum(prices) / len(fields)) for answer in answers]

    def _asked_together(self, task: Task, fields: dict[str, Any], rollout: Rollout | None) -> dict[str, Verdict]:
        """Verdicts of all judge criteria from one call; what it left out is asked for once more."""
        if self._together is None:
            return {}
        asked = [c for c in self.finals if c.judge is not None]
        found: dict[str, Verdict] = {}
        for sample in (None, 1):
            if missing := [c for c in asked if c.name not in found or found[c.name].grade is None]:
                with spending() as prices, sample_scope(sample) if sample else nullcontext():
                    answers = _answers(lambda: list(self._together.grade_all(task, fields, rollout).values()), len(asked))
                by_name = dict(zip([c.name for c in asked], answers, strict=True))
                for c in asked:
                    spent = found[c.name].cost_usd if c.name in found else 0.0
                    if c in missing:
                        found[c.name] = _verdict_of(c, by_name[c.name], spent)
                    found[c.name].cost_usd = spent + math.fsum(prices) / len(asked)
        return found

    def _grade(self, criterion: Criterion, task: Task, fields: dict[str, Any], rollout: Rollout | None) -> Verdict:
        decide = self._decide[criterion.name]
        if decide is None:
            reason = f"no judge model was given to ask {criterion.judge.text if criterion.judge else criterion.name!r}"
            return Verdict(criterion=criterion.name, grade=None, weight=criterion.weight, reason=reason)
        began, limit = time.monotonic(), current_limit()
        verdict = grade(criterion, decide, task, fields, rollout)
        if verdict.grade is None and (limit is None or time.monotonic() - began < limit):  # what took all its time is not asked again
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
            failure=failure.kind,
        )

    def step_rewards(self, task: Task, rollout: Rollout) -> list[dict[str, float]]:
        """Weight times grade of each step criterion, one mapping a transition, in order.

        Over the rollout the positive rewards are scaled down together where they sum to more than `step_cap`.
        Unscored step criteria are absent, and so are those whose `when` did not pass: a final criterion by the rollout's
        verdicts (a check of a rollout that has none is run), a step criterion by the same transition.
        """
        steps = [c for c in self.criteria if c.scope == "step"]
        finals = self._final_verdicts(task, rollout) if any(c.when for c in steps) else {}
        rewards: list[dict[str, float]] = []
        for transition in rollout.transitions:
            found = dict(finals)
            for c in steps:
                self._step_verdict(c, task, {"transition": transition}, rollout, found)
            rewards.append({c.name: c.weight * value for c in steps if (value := found[c.name].grade) is not None})
        total = math.fsum(value for entry in rewards for value in entry.values() if value > 0)
        if total > self.step_cap:
            rewards = [{k: v * self.step_cap / total if v > 0 else v for k, v in entry.items()} for entry in rewards]
        return rewards

    def _step_verdict(self, c: Criterion, task: Task, fields: dict[str, Any], rollout: Rollout, found: dict[str, Verdict]) -> Verdict:
        if c.name not in found:
            gate = self._by_name.get(c.when)
            waits = condition(c, gate, self._step_verdict(gate, task, fields, rollout, found)) if gate is not None else None
            found[c.name] = waits or grade(c, self._decide[c.name], task, fields, rollout)
        return found[c.name]

    def _final_verdicts(self, task: Task, rollout: Rollout) -> dict[str, Verdict]:
        """The rollout's verdicts on final criteria. What is missing is decided where code decides it; a judge is not asked."""
        known = {v.criterion: v for v in rollout.verdicts if v.scope == "final" and v.criterion in self._by_name}
        if rollout.prediction is not None and not known:
            for c in self.finals:
                if c.check is not None:
                    known[c.name] = grade(c, c.check, task, dict(rollout.prediction), rollout)
        reason = "the rollout was not scored"
        return {c.name: known.get(c.name) or Verdict(criterion=c.name, grade=None, weight=c.weight, reason=reason) for c in self.finals}

    def metric(self, *, threshold: float = 0.8, feedback: bool = False, tasks: Mapping[str, Task] | None = None) -> "RubricMetric":
        """This rubric as a DSPy metric. See `RubricMetric`."""
        from assay.rubrics.metric import RubricMetric

        return RubricMetric(self, threshold=threshold, feedback=feedback, tasks=tasks)

    def trl_reward(self, **options: Any) -> "Reward":
        """This rubric as an async reward function of TRL's trainers. See `assay.rubrics.reward.trl_reward`."""
        from assay.rubrics.reward import trl_reward

        return trl_reward(self, **options)

    def reweighted(self, weights: Mapping[str, float]) -> "Rubric":
        """The same criteria with other weights, by name."""
        criteria = [replace(c, weight=weights.get(c.name, c.weight)) for c in self.criteria]
        return Rubric(self.name, criteria, step_cap=self.step_cap, resolver=self.resolver, judging=self.judging)


def _empty(fields: dict[str, Any]) -> bool:
    """Whether nothing was answered; that a task expects nothing is another matter."""
    answers = [value for name, value in fields.items() if name != "steps"]
    return bool(answers) and all(value is None or (isinstance(value, str) and not value.strip()) for value in answers)


def _folded(name: str, criteria: Sequence[Criterion]) -> tuple[Criterion, ...]:
    """The criteria with those of judges made one, which shows them all with their weights."""
    judged = [c for c in criteria if c.judge is not None]
    if unfit := [c.name for c in judged if c.essential is not None or (c.judge and c.judge.use)]:
        raise RubricError(f"rubric {name!r}: judging='overall' makes one question of its judges, so {unfit} can neither be essential nor use a judge")
    if waiting := [c.name for c in criteria if c.when and (c in judged or c.when in {other.name for other in judged})]:
        raise RubricError(f"rubric {name!r}: judging='overall' makes one question of its judges, so {waiting} cannot depend on one by when")
    weight = math.fsum(c.weight for c in judged if c.weight > 0)
    if not weight:
        raise RubricError(f"rubric {name!r}: judging='overall' needs a judge criterion with a weight above 0")
    listed = " ".join(f"({c.weight:+g}) {c.judge.text}" for c in judged if c.judge)
    text = f"Rate the output as a whole by these criteria, each with its weight, a negative one a pitfall: {listed}"
    one = Criterion(name="overall", weight=weight, judge=JudgeSpec(text=text, scale=_RATING))
    return (*(c for c in criteria if c.judge is None), one)


def _answers(ask: Callable[[], Sequence[Any]], count: int) -> Sequence[Any]:
    """What several criteria or outputs got at once; a failure is each one's reason."""
    try:
        answers = within_limit(ask, "the judge")
    except (KeyboardInterrupt, StopRun):
        raise
    except BaseException as error:
        return [NoGrade(str(error) if isinstance(error, NoGrade) else said(error))] * count
    return answers if len(answers) == count else [NoGrade(f"{len(answers)} grades for {count}: they cannot be told apart")] * count


def _verdict_of(criterion: Criterion, answer: Any, cost_usd: float) -> Verdict:
    def decide(*_: Any, **__: Any) -> Any:
        if isinstance(answer, NoGrade):
            raise answer
        return answer

    verdict = grade(criterion, decide, None, {}, None)
    verdict.cost_usd = cost_usd
    return verdict


def _failure(task: Task, prediction: Any, rollout: Rollout | None) -> Failed | None:
    """Why a prediction is none. One that is empty because the run's last call failed is the model's failure."""
    failure = _refused(task, prediction)
    broken = unanswered(rollout.transitions) if rollout is not None and failure is not None and failure.empty else None
    if failure is None or broken is None:
        return failure
    return Failed(f"{failure.reason}: the last call of the model failed", own=False, kind=broken)


def _refused(task: Task, prediction: Any) -> Failed | None:
    if prediction is None:
        return Failed("the agent gave no answer", empty=True)
    if isinstance(prediction, Failed):
        return prediction
    if isinstance(prediction, BaseException):
        kind = failure_of_program(prediction)
        return Failed(f"{type(prediction).__name__}: {prediction}", own=is_own(kind), kind=kind)
    marked = getattr(prediction, "_failed", None)
    if isinstance(marked, Failed):
        return marked
    fields = fields_of(prediction)
    if not fields:
        return Failed("the prediction has no fields", empty=True)
    return Failed("every field of the answer is empty", empty=True) if _empty(fields) and not _empty(dict(task.expected)) else None
