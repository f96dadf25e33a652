"""`Rubric`: weighted criteria that score predictions. Usable as a plain callable, a DSPy metric or a TRL reward."""

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from assay.datasets.tasks import Task, TaskIndex
from assay.errors import ConfigError, RubricError, StopRun
from assay.models.limits import current_limit, within_limit
from assay.models.scope import sample_scope, spending
from assay.rubrics.calling import MetricCheck, named_keywords
from assay.rubrics.criteria import (
    Check,
    Criterion,
    Failed,
    NoGrade,
    OutOfRange,
    check_conditions,
    condition,
    is_number,
    merge_judge_criteria,
)
from assay.rubrics.protocols import GroupGrader, JointGrader, JointResolver, Resolver
from assay.rubrics.scoring import ScoreResult, combine, failure_of, fields_of, grade, read_by, set_failure, task_of
from assay.support.names import one_of
from assay.support.scrubbing import error_text
from assay.support.values import json_text
from assay.traces.records import Rollout, Verdict

if TYPE_CHECKING:
    from assay.rubrics.dspy_metric import RubricMetric
    from assay.rubrics.trl_reward import Reward

__all__ = ["JUDGING", "STEP_CAP", "Resolver", "Rubric", "score_rollout"]

JUDGING = ("each", "together", "overall")
STEP_CAP = 0.5  # maximum sum of a rollout's step rewards; below 1.0, the reward of a correct answer


@named_keywords()
class Rubric:
    """Weighted criteria under a name.

    Args:
        criteria: at least one `final` criterion with a positive weight; names must differ.
        step_cap: maximum sum of a rollout's positive step rewards, in [0, 1).
        resolver: creates the graders of judge criteria (`assay.judges.resolver(lm)`); without one a rubric with judges
            does not score.
        judging: how judge criteria are evaluated. `each`: one call per criterion. `together`: one call that returns a
            verdict per criterion. `overall` (implicit aggregation): all judge criteria are merged into one criterion
            named `overall`. Its weight is the sum of their positive weights; its judge sees all of them with their
            weights and returns one rating.
    Raises:
        RubricError: the criteria are invalid; the message names the rule.
    """

    def __init__(
        self,
        name: str,
        criteria: Sequence[Criterion],
        *,
        step_cap: float = STEP_CAP,
        resolver: Resolver | None = None,
        judging: str = "each",
    ) -> None:
        if not isinstance(criteria, Iterable) or isinstance(criteria, str | bytes):
            raise RubricError(f"rubric {name!r}: criteria={criteria!r} must be a list of Criterion")
        self.name, self.criteria, self.step_cap = name, tuple(criteria), step_cap
        self.resolver, self.judging = resolver, judging
        if others := [one for one in self.criteria if not isinstance(one, Criterion)]:
            raise RubricError(f"rubric {name!r}: criteria must be of type Criterion, got {others[0]!r}")
        if judging not in JUDGING:
            raise RubricError(f"rubric {name!r}: judging={judging!r} {one_of(judging, JUDGING)}")
        if judging == "overall":
            self.criteria, self.judging = merge_judge_criteria(name, self.criteria), "each"
        names = [c.name for c in self.criteria]
        if duplicates := sorted({n for n in names if names.count(n) > 1}):
            raise RubricError(f"rubric {name!r} has more than one criterion named {', '.join(duplicates)}")
        if not any(c.scope == "final" and c.weight > 0 for c in self.criteria):
            raise RubricError(f"rubric {name!r} needs at least one final criterion with a weight above 0")
        self._by_name = check_conditions(name, self.criteria)
        if not (is_number(step_cap) and 0 <= step_cap < 1):
            raise RubricError(
                f"rubric {name!r}: step_cap={step_cap!r} must be >= 0 and < 1 (the reward of a correct answer)"
            )
        self._graders = {c.name: self._grader(c) for c in self.criteria}
        judged = [c for c in self.criteria if c.judge is not None]
        self._together = self._joint_grader(judged) if judging == "together" and judged else None

    def __deepcopy__(self, memo: object) -> "Rubric":
        return self

    def __repr__(self) -> str:
        return f"Rubric({self.name!r}, {[c.name for c in self.criteria]})"

    def _grader(self, criterion: Criterion) -> Check | None:
        if criterion.check is not None:
            return criterion.check
        return self.resolver(criterion) if self.resolver is not None else None

    def _joint_grader(self, judged: Sequence[Criterion]) -> JointGrader | None:
        if self.resolver is None:
            return None
        if not isinstance(self.resolver, JointResolver):
            raise RubricError(
                f"rubric {self.name!r}: judging='together' needs a resolver with a method together(criteria), "
                "such as assay.judges.resolver(lm)"
            )
        return self.resolver.together(judged)

    def _with(self, criteria: Sequence[Criterion], resolver: Resolver | None) -> "Rubric":
        return Rubric(self.name, criteria, step_cap=self.step_cap, resolver=resolver, judging=self.judging)

    def with_resolver(self, resolver: Resolver | None) -> "Rubric":
        """Returns the same rubric with another resolver for its judge criteria; None: none decides them."""
        return self._with(self.criteria, resolver)

    def with_metric_model(self, lm: Any) -> "Rubric":
        """Returns the same rubric with a model that its DSPy metrics call, where they have none yet."""
        criteria = [
            replace(c, check=MetricCheck(c.check.metric, lm))
            if isinstance(c.check, MetricCheck) and c.check.lm is None
            else c
            for c in self.criteria
        ]
        return self._with(criteria, self.resolver)

    def decider(self, name: str) -> Check | None:
        """Returns the grader of a criterion: its check, or its judge if a model is available, otherwise None."""
        return self._graders[name]

    def compares(self, name: str) -> bool:
        """Whether the criterion's judge compares several outputs of a task and cannot grade a single one."""
        return isinstance(self._graders[name], GroupGrader)

    def require_judges(self) -> None:
        """Raises where a final criterion has a judge and no model to decide it.

        Raises:
            ConfigError: names the criteria.
        """
        if unasked := [c.name for c in self.finals if self._graders[c.name] is None]:
            raise ConfigError(
                f"the rubric {self.name!r} has a judge decide {', '.join(map(repr, unasked))}, and no model was named "
                "for it. Name one: `judge_model=NAME`, or model: NAME in the judge's own file"
            )

    @property
    def needs_judge(self) -> bool:
        """Whether any criterion is decided by a judge."""
        return any(c.judge is not None for c in self.criteria)

    @property
    def expected_names(self) -> set[str]:
        """Names of the expected outputs that its criteria name, see `Criterion.expected_names`."""
        return {name for criterion in self.criteria for name in criterion.expected_names}

    @property
    def takes_model(self) -> bool:
        """Whether a model named for judges has an effect: for a judge, or a DSPy metric, which may call a model."""
        return self.needs_judge or any(isinstance(c.check, MetricCheck) for c in self.criteria)

    @property
    def finals(self) -> tuple[Criterion, ...]:
        """Criteria of scope `final`, in order."""
        return tuple(c for c in self.criteria if c.scope == "final")

    @cached_property
    def version(self) -> str:
        """First 16 hex digits of the SHA-256 of criteria, weights, arguments and the checks' source code.

        Computed on first access.
        """
        entries = [c.describe() for c in self.criteria]
        content = {"name": self.name, "step_cap": self.step_cap, "criteria": entries}
        if self.judging != "each":
            content["judging"] = self.judging
        return hashlib.sha256(json_text(content, sort_keys=True).encode()).hexdigest()[:16]

    def score(self, task: Task | Mapping[str, Any], prediction: Any, rollout: Rollout | None = None) -> ScoreResult:
        """Scores one prediction. Criteria that come back unscored are graded once more.

        Args:
            task: a `Task`, a `dspy.Example`, or a mapping that `make_task` accepts. In a flat mapping, a column is an
                expected output if it has a usual name (`answer`, `label`, …) or a criterion names it (as its `field`,
                or as `expected.NAME` in the `shows` of its judge). A column that the prediction has too is in
                `task.inputs` and in `task.expected`. To say which is which, pass
                `{"inputs": {…}, "expected": {…}}`.
            prediction: a `dspy.Prediction`, a mapping or a bare answer; None or `Failed` if the run produced none.
            rollout: the recorded run, for checks that read tool calls, steps and tokens.
        Raises:
            ConfigError: a criterion has a judge and no model was named for it.
            RubricError: a check graded outside of the range of its criterion.
        """
        self.require_judges()
        task = task_of(task, [prediction], self.criteria)
        failure = failure_of(task, prediction, rollout)
        if failure is not None:
            return self._failed(failure)
        return self._scored(task, fields_of(prediction), rollout, {})

    __call__ = score

    def score_group(
        self,
        task: Task | Mapping[str, Any],
        predictions: Sequence[Any],
        rollouts: Sequence[Rollout | None] | None = None,
    ) -> list[ScoreResult]:
        """Scores several predictions of one task, in order.

        Comparing judges and checks see all predictions that did not fail at once, of those where `when` passed. Every
        other criterion is graded as in `score`.

        Raises:
            RubricError: the numbers of predictions and rollouts differ.
        """
        self.require_judges()
        task = task_of(task, predictions, self.criteria)
        runs = list(rollouts) if rollouts is not None else [None] * len(predictions)
        if len(runs) != len(predictions):
            raise RubricError(
                f"{len(predictions)} predictions with {len(runs)} rollouts: pass one rollout, or None, per prediction"
            )
        failures = [failure_of(task, prediction, run) for prediction, run in zip(predictions, runs, strict=True)]
        valid = [index for index, failure in enumerate(failures) if failure is None]
        fields = {index: fields_of(predictions[index]) for index in valid}
        compared: dict[int, dict[str, Verdict]] = {index: {} for index in valid}
        for c in self.finals:
            grader = self._graders[c.name]
            if isinstance(grader, GroupGrader):
                counted = [i for i in valid if self._condition(c, task, fields[i], runs[i], compared[i]) is None]
                if counted:
                    given = [read_by(c, fields[i]) for i in counted]
                    verdicts = self._compare(c, grader, task, given, [runs[i] for i in counted])
                    for index, verdict in zip(counted, verdicts, strict=True):
                        compared[index][c.name] = verdict
        return [
            self._scored(task, fields[index], runs[index], compared[index])
            if failure is None
            else self._failed(failure)
            for index, failure in enumerate(failures)
        ]

    def _scored(
        self, task: Task, fields: dict[str, Any], rollout: Rollout | None, known: Mapping[str, Verdict]
    ) -> ScoreResult:
        verdicts = {**known, **self._grade_together(task, fields, rollout)}
        return combine(self.criteria, [self._verdict(c, task, fields, rollout, verdicts) for c in self.finals])

    def _verdict(
        self, c: Criterion, task: Task, fields: dict[str, Any], rollout: Rollout | None, verdicts: dict[str, Verdict]
    ) -> Verdict:
        """Returns the verdict on a criterion; grades it and adds it to `verdicts` if it is not there.

        Conditions (`when`) are decided first.
        """
        replacement = self._condition(c, task, fields, rollout, verdicts)
        if replacement is not None:
            replacement.cost_usd = verdicts[c.name].cost_usd if c.name in verdicts else 0.0
            verdicts[c.name] = replacement
        elif c.name not in verdicts:
            verdicts[c.name] = self._grade(c, task, fields, rollout)
        return verdicts[c.name]

    def _condition(
        self, c: Criterion, task: Task, fields: dict[str, Any], rollout: Rollout | None, verdicts: dict[str, Verdict]
    ) -> Verdict | None:
        """Verdict that replaces the criterion's if its `when` did not pass or is unscored; otherwise None."""
        if not c.when:
            return None
        gate = self._by_name[c.when]
        return condition(c, gate, self._verdict(gate, task, fields, rollout, verdicts))

    def _compare(
        self,
        c: Criterion,
        grader: GroupGrader,
        task: Task,
        fields: list[dict[str, Any]],
        rollouts: list[Rollout | None],
    ) -> list[Verdict]:
        with spending() as prices:
            arguments = c.arguments if c.check is not None else {}
            grades = _grades(lambda: grader.grade_group(task, fields, rollouts, **arguments), len(fields))
        return [_verdict_of(c, value, math.fsum(prices) / len(fields)) for value in grades]

    def _grade_together(self, task: Task, fields: dict[str, Any], rollout: Rollout | None) -> dict[str, Verdict]:
        """Verdicts on all judge criteria from one call. Criteria left unscored are retried in a second call."""
        if (joint := self._together) is None:
            return {}
        judged = [c for c in self.finals if c.judge is not None]
        given = read_by(judged[0], fields)
        verdicts: dict[str, Verdict] = {}
        for sample in (None, 1):
            if missing := [c for c in judged if c.name not in verdicts or verdicts[c.name].grade is None]:
                with spending() as prices, sample_scope(sample) if sample else nullcontext():
                    grades = _grades(lambda: list(joint.grade_all(task, given, rollout).values()), len(judged))
                by_name = dict(zip([c.name for c in judged], grades, strict=True))
                for c in judged:
                    spent = verdicts[c.name].cost_usd if c.name in verdicts else 0.0
                    if c in missing:
                        verdicts[c.name] = _verdict_of(c, by_name[c.name], spent)
                    verdicts[c.name].cost_usd = spent + math.fsum(prices) / len(judged)
        return verdicts

    def _grade(self, criterion: Criterion, task: Task, fields: dict[str, Any], rollout: Rollout | None) -> Verdict:
        grader = self._graders[criterion.name]
        began, limit = time.monotonic(), current_limit()
        verdict = grade(criterion, grader, task, fields, rollout)
        timed_out = limit is not None and time.monotonic() - began >= limit
        # a grader that used its whole time limit is not retried
        if criterion.scope == "final" and verdict.grade is None and verdict.applies and not timed_out:
            spent = verdict.cost_usd
            with sample_scope(1):  # a new sample, so that the response cache does not repeat the first answer
                verdict = grade(criterion, grader, task, fields, rollout)
            verdict.cost_usd += spent
        return verdict

    def _failed(self, failure: Failed) -> ScoreResult:
        mark = 0.0 if failure.by_agent else None
        verdicts = tuple(
            Verdict(criterion=c.name, grade=mark if c.weight >= 0 else None, weight=c.weight, reason=failure.reason)
            for c in self.finals
        )
        return ScoreResult(
            value=0.0 if failure.by_agent else math.nan,
            verdicts=verdicts,
            coverage=1.0 if failure.by_agent else 0.0,
            feedback=f"The run failed: {failure.reason}",
            failed=failure.reason,
            failure=failure.kind,
        )

    def step_rewards(self, task: Task, rollout: Rollout) -> list[dict[str, float]]:
        """Returns weight times grade of each step criterion, one mapping per transition, in order.

        If the positive rewards of the rollout sum to more than `step_cap`, they are scaled down to it. Unscored step
        criteria are absent, and so are those whose `when` did not pass. A `when` on a final criterion is decided by the
        rollout's verdicts (if it has none, checks are run), a `when` on a step criterion by the same transition.
        """
        steps = [c for c in self.criteria if c.scope == "step"]
        finals = self._final_verdicts(task, rollout) if any(c.when for c in steps) else {}
        rewards: list[dict[str, float]] = []
        for transition in rollout.transitions:
            verdicts = dict(finals)
            for c in steps:
                self._verdict(c, task, {"transition": transition}, rollout, verdicts)
            rewards.append({c.name: c.weight * value for c in steps if (value := verdicts[c.name].grade) is not None})
        total = math.fsum(value for entry in rewards for value in entry.values() if value > 0)
        if total > self.step_cap:
            rewards = [{k: v * self.step_cap / total if v > 0 else v for k, v in entry.items()} for entry in rewards]
        return rewards

    def _final_verdicts(self, task: Task, rollout: Rollout) -> dict[str, Verdict]:
        """The rollout's verdicts on final criteria. If it has none, checks are run; judges are not called."""
        recorded = {v.criterion: v for v in rollout.verdicts if v.scope == "final" and v.criterion in self._by_name}
        if rollout.prediction is not None and not recorded:
            for c in self.finals:
                if c.check is not None:
                    recorded[c.name] = grade(c, c.check, task, dict(rollout.prediction), rollout)
        reason = "the rollout was not scored"
        return {
            c.name: recorded.get(c.name) or Verdict(criterion=c.name, grade=None, weight=c.weight, reason=reason)
            for c in self.finals
        }

    def metric(
        self, *, threshold: float = 0.8, feedback: bool = False, tasks: TaskIndex | None = None
    ) -> "RubricMetric":
        """Returns this rubric as a DSPy metric. See `RubricMetric`."""
        from assay.rubrics.dspy_metric import RubricMetric

        return RubricMetric(self, threshold=threshold, feedback=feedback, tasks=tasks)

    def trl_reward(
        self,
        *,
        answer: str = "answer",
        question: str = "question",
        inputs: Mapping[str, str] | None = None,
        outputs: Sequence[str] = (),
        concurrency: int = 8,
        group: bool = False,
    ) -> "Reward":
        """Returns this rubric as an async reward function for TRL. See `assay.rubrics.trl_reward.trl_reward`."""
        from assay.rubrics.trl_reward import trl_reward

        return trl_reward(
            self,
            answer=answer,
            question=question,
            inputs=inputs,
            outputs=outputs,
            concurrency=concurrency,
            group=group,
        )

    def reweighted(self, weights: Mapping[str, float]) -> "Rubric":
        """Returns the same rubric with new weights. `weights` maps criterion names; others keep their weight."""
        criteria = [replace(c, weight=weights.get(c.name, c.weight)) for c in self.criteria]
        return self._with(criteria, self.resolver)

    def without(self, names: Collection[str]) -> "Rubric":
        """Returns the same rubric without the criteria of these names.

        Raises:
            RubricError: no criterion with a positive weight is left, or one counts only where a removed one passes.
        """
        criteria = [c for c in self.criteria if c.name not in names]
        return self._with(criteria, self.resolver)


def _grades(call: Callable[[], Sequence[Any]], count: int) -> Sequence[Any]:
    """Grades of several criteria or outputs from one call. If it fails, each gets a `NoGrade` with the reason."""
    try:
        grades = within_limit(call, "the judge")
    except (KeyboardInterrupt, StopRun, OutOfRange):
        raise
    except BaseException as error:
        return [NoGrade(str(error) if isinstance(error, NoGrade) else error_text(error))] * count
    if len(grades) != count:
        return [NoGrade(f"the judge returned {len(grades)} grades for {count} items; they cannot be assigned")] * count
    return grades


def _verdict_of(criterion: Criterion, value: Any, cost_usd: float) -> Verdict:
    def decide(*_: Any, **__: Any) -> Any:
        if isinstance(value, NoGrade):
            raise value
        return value

    verdict = grade(criterion, decide, None, {}, None)
    verdict.cost_usd = cost_usd
    return verdict


# -- Scores a rollout by a rubric.
#
# Every rollout gets its score here: that of a program, of a recorded agent, and of the store when it is scored again.
# Does not write to the store.


def score_rollout(rubric: Rubric, task: Task, prediction: Any, rollout: Rollout) -> ScoreResult:
    """Scores a prediction and sets the rollout's rubric, score, coverage, verdicts and failure kind.

    Step rewards are not set: `Rubric.step_rewards` gives them, and `Recorder.scored` writes both.

    Args:
        prediction: what the program returned, or `Failed`.
        rollout: its LM calls and tool calls are complete.
    """
    result = rubric.score(task, prediction, rollout)
    rollout.rubric = f"{rubric.name}@{rubric.version}"
    rollout.score = None if math.isnan(result.value) else result.value
    rollout.coverage, rollout.verdicts = result.coverage, list(result.verdicts)
    set_failure(rollout, rubric.criteria, result)
    return result
