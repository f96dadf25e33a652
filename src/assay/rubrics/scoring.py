"""Verdicts and weighted scores. Does not call a model: judges do. NaN means unscored, never 0."""

import math
import reprlib
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, SupportsFloat

from assay.datasets.tasks import Task, make_task
from assay.errors import FailureKind, StopRun
from assay.models.calls import failure_of_program, is_agent_failure, unanswered
from assay.models.limits import within_limit
from assay.models.scope import spending
from assay.rubrics.calling import call, definition_of
from assay.rubrics.checks import json_schema
from assay.rubrics.criteria import Criterion, Failed, Grade, NoGrade, NotApplicable, OutOfRange
from assay.support.numbers import figure
from assay.support.report import ReportRepr, shortened
from assay.support.scrubbing import error_text
from assay.support.sections import fields_in
from assay.support.values import json_value
from assay.traces.messages.dialects import chat_messages
from assay.traces.messages.final_answer import asked_outputs
from assay.traces.records import RUN_FIELDS, Rollout, Transition, Verdict

_SHIPPED = ("assay.rubrics.checks", "assay.rubrics.steps")
_ROUNDING = 1e-5  # of arithmetic at the ends of a range: a similarity of two equal float32 vectors may be 1.0000001
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, kw_only=True, repr=False)
class ScoreResult(ReportRepr):
    """Score of one prediction.

    Args:
        value: in [0, 1], higher is better; NaN if an essential criterion or all criteria are unscored.
        verdicts: one per final criterion.
        coverage: share of final criteria that were scored or do not apply (`Criterion.when`).
        feedback: what to improve, as text for users and reflection models.
        failed: why the run failed; None if it did not. `failure` is the kind of that failure.
        capped_by: essential criteria that capped the score.
    """

    value: float
    verdicts: tuple[Verdict, ...] = ()
    coverage: float = 1.0
    cost_usd: float = 0.0
    feedback: str = ""
    failed: str | None = None
    failure: FailureKind | None = None
    capped_by: tuple[str, ...] = field(default=())

    @property
    def scored(self) -> bool:
        """Whether `value` is a number."""
        return not math.isnan(self.value)

    @property
    def grades(self) -> dict[str, float]:
        """Grades of the final criteria by name; NaN if the criterion is unscored or does not apply."""
        return {v.criterion: math.nan if v.grade is None else v.grade for v in self.verdicts if v.scope == "final"}

    def _facts(self) -> list[tuple[str, str]]:
        facts = [("value", figure(self.value) if self.scored else "unscored")]
        for v in self.verdicts:
            grade = ("does not apply" if not v.applies else "unscored") if v.grade is None else f"{v.grade:.4g}"
            facts.append((v.criterion, grade + (f": {shortened(v.reason)}" if v.reason else "")))
        capped = [("capped_by", ", ".join(self.capped_by))] if self.capped_by else []
        return [*facts, *capped, *([("failed", shortened(self.failed))] if self.failed is not None else [])]


@dataclass
class ScoredRun:
    """A run of a recorded program.

    Attributes:
        prediction: without fields if the run failed.
        rollout: its record.
        has_tools: whether the program has tools at all.
        result: its score; None if no task has these inputs.
        task: that was run; None if no task has these inputs, or if it ran in another process.
        failed: why there is no answer; None if there is one.
        error: what the program raised; None if it did not, or ran in another process.
    """

    prediction: Any
    rollout: Rollout
    has_tools: bool = False
    result: ScoreResult | None = None
    task: Task | None = None
    failed: Failed | None = None
    error: BaseException | None = None

    @property
    def answer(self) -> Any:
        """The prediction, or the failure that took its place."""
        return self.failed or self.prediction

    @property
    def scored(self) -> ScoreResult:
        """The score of a run of a task."""
        assert self.result is not None
        return self.result

    def attach(self) -> Any:
        """The prediction for DSPy, which passes nothing else on; `of` finds the run of it again."""
        self.prediction._run = replace(self, prediction=None)  # private: the fields are the program's outputs
        return self.prediction

    @staticmethod
    def of(prediction: Any) -> "ScoredRun | None":
        """The run that a prediction comes from; its own `prediction` is None. None of any other prediction."""
        run = getattr(prediction, "_run", None)
        return run if isinstance(run, ScoredRun) else None


def fields_of(prediction: Any) -> dict[str, Any]:
    """Fields of a prediction: a mapping, a `dspy.Prediction` or an object with `items()`; a bare value is `answer`."""
    if prediction is None or isinstance(prediction, Failed):
        return {}
    if isinstance(prediction, Mapping):
        return dict(prediction)
    if hasattr(prediction, "items"):
        return dict(prediction.items())
    return {"answer": prediction}


def read_by(criterion: Criterion, prediction: dict[str, Any]) -> dict[str, Any]:
    """What a criterion reads of a prediction: JSON values, but for a check of the user's own what the program returned.

    A stored prediction has JSON values only, so such a check reads these when rollouts are scored again.
    """
    users = criterion.check is not None and not is_shipped(criterion)
    return prediction if users or type(prediction) is not dict else json_value(prediction, placeholders=True)


def is_shipped(criterion: Criterion) -> bool:
    """Whether a criterion's check is one of the package."""
    return _module_of(criterion).startswith("assay.")


def _module_of(criterion: Criterion) -> str:
    """Module in which a criterion's check is defined."""
    return str(definition_of(criterion.check).__module__)


def grade(criterion: Criterion, decide: Any, task: Any, prediction: dict[str, Any], rollout: Rollout | None) -> Verdict:
    """Calls a check or judge and returns its verdict. A failure is an unscored verdict with the reason, never a number.

    The verdict's cost is the cost of the LM calls made.
    """
    with spending() as prices:
        verdict = _verdict_or_failure(criterion, decide, task, prediction, rollout)
    verdict.cost_usd = math.fsum(prices)
    return verdict


def _verdict_or_failure(
    criterion: Criterion, decide: Any, task: Any, prediction: dict[str, Any], rollout: Rollout | None
) -> Verdict:
    try:
        return _call(criterion, decide, task, prediction, rollout)
    except NotApplicable as error:
        return replace(_verdict(criterion, None, str(error)), applies=False)
    except NoGrade as error:
        return _verdict(criterion, None, str(error))
    except (KeyboardInterrupt, StopRun, OutOfRange):
        raise
    except BaseException as error:  # `sys.exit()` inside a check is a failure of that check
        return _verdict(criterion, None, error_text(error) + _place(criterion, error))


def _call(criterion: Criterion, decide: Any, task: Any, prediction: dict[str, Any], rollout: Rollout | None) -> Verdict:
    """Verdict of a check or judge, within the time limit.

    The result is converted within the limit too, because its class may be the check's own code.
    """

    def verdict() -> Verdict:
        given = read_by(criterion, prediction) if criterion.scope == "final" else prediction
        return _read(criterion, call(decide, (task, given, rollout), criterion.arguments))

    if _limits_itself(criterion, prediction):
        return verdict()
    return within_limit(verdict, f"the {'judge' if criterion.check is None else 'check'} of {criterion.name!r}")


def _limits_itself(criterion: Criterion, prediction: dict[str, Any]) -> bool:
    """Whether a shipped check needs no time limit.

    True for all but `json_schema`, as long as the fields are of built-in types; others may run their own `__str__`.
    """
    if criterion.check is None or criterion.check is json_schema or (module := _module_of(criterion)) not in _SHIPPED:
        return False
    return module != json_schema.__module__ or all(type(value) in _PLAIN for value in prediction.values())


def _read(criterion: Criterion, answer: Any) -> Verdict:
    """Converts the result of a check or judge to a verdict of built-in types."""
    if isinstance(answer, Mapping) or callable(getattr(answer, "items", None)):  # a `dspy.Prediction` of a metric
        if "score" not in (fields := dict(answer.items())):
            return _verdict(criterion, None, f"graded {_short_repr(answer)}, which has no score")
        answer = Grade(value=fields["score"], reason=fields.get("feedback") or "")
    if not isinstance(answer, Grade):
        return _verdict(criterion, answer, "")
    verdict = _verdict(
        criterion, answer.value, answer.reason if type(answer.reason) is str else str(answer.reason or "")
    )
    verdict.label, verdict.confidence = answer.label, answer.confidence
    return verdict


def _place(criterion: Criterion, error: BaseException) -> str:
    """File and line where a check raised an exception, within the check's own file."""
    code = getattr(definition_of(criterion.check), "__code__", None)
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if code is not None and frame.filename == code.co_filename
    ]
    return f" ({Path(code.co_filename).name}:{lines[-1]})" if code is not None and lines else ""


def _is_numpy_bool(value: Any) -> bool:
    """Whether a value is a NumPy bool, which is not `numbers.Real`. Does not import NumPy (16 MB)."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.bool_)


def _verdict(criterion: Criterion, value: Any, reason: str) -> Verdict:
    """The verdict of a value: a bool, or a number in the criterion's range.

    Raises:
        OutOfRange: a finite number outside of it.
    """
    number: float | None = None
    if isinstance(value, SupportsFloat) and not isinstance(value, Real) and not _is_numpy_bool(value):
        value = float(value)  # a Decimal, an array of one number
    if isinstance(value, bool) or _is_numpy_bool(value):
        number = float(value)
    elif isinstance(value, Real) and value == value and abs(value) != math.inf:
        low, high = criterion.range
        slack = _ROUNDING * (high - low)
        if not low - slack <= value <= high + slack:  # type: ignore[operator]  # float() overflows on a huge int
            raise OutOfRange(_out_of_range(criterion, value))
        number = min(1.0, max(0.0, (float(value) - low) / (high - low)))
    elif not reason:
        reason = f"graded {_short_repr(value)}, which is not a number"
    return Verdict(
        criterion=criterion.name, grade=number, weight=criterion.weight, scope=criterion.scope, reason=reason
    )


def _out_of_range(criterion: Criterion, value: Any) -> str:
    low, high = criterion.range
    check = f"Criterion(name={criterion.name!r}, check=…, range=(LOWEST, HIGHEST))"
    return (
        f"criterion {criterion.name!r} graded {_short_repr(value)}, which is not between {low:g} and {high:g}. Declare "
        f"the lowest and highest value of its check: range: [LOWEST, HIGHEST] in the rubric's file, or {check}"
    )


def _short_repr(value: Any) -> str:
    """Shortened repr that does not raise, also for integers too long for decimal notation."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"a {type(value).__name__} with too many digits to print"
    except SystemExit:
        return f"a {type(value).__name__} that cannot be printed"


def combine(criteria: Sequence[Criterion], verdicts: Sequence[Verdict]) -> ScoreResult:
    """Sum of w·g over the scored final criteria, divided by the sum of their positive weights, clipped to [0, 1].

    A criterion whose `when` did not pass adds 0 to the sum, but its positive weight stays in the divisor, so that
    passing its condition never lowers the score. A criterion that does not apply to the task (`NotApplicable`) is in
    neither. An essential criterion graded below `pass_at` caps the score. The
    value is NaN if an essential criterion is unscored or no criterion with a positive weight is scored.

    Example: correct 4·0, clear 1·1, rambling -1·0.5: (0 + 1 - 0.5) / (4 + 1) = 0.1; a cap of 0.5 does not change it.

    Source: HealthBench (arXiv 2505.08775), scoring section. Caps and NaN are additions.
    """
    by_name = {verdict.criterion: verdict for verdict in verdicts}
    finals = [c for c in criteria if c.scope == "final"]
    scored = [(c, g) for c in finals if (g := by_name[c.name].grade) is not None]
    inapplicable = [c for c in finals if not by_name[c.name].applies]
    waiting = [c for c in inapplicable if waits(c, criteria, by_name)]
    positive = math.fsum(c.weight for c in [*(c for c, _ in scored), *waiting] if c.weight > 0)
    missing = [
        c.name for c in finals if c.essential is not None and by_name[c.name].grade is None and c not in inapplicable
    ]
    value, capped_by = math.nan, []
    if scored and positive > 0 and not missing:
        value = min(1.0, max(0.0, math.fsum(c.weight * g for c, g in scored) / positive))
        for c, g in scored:
            if c.essential is not None and g < c.essential.pass_at:
                capped_by.append(c.name)
                value = min(value, c.essential.cap)
    return ScoreResult(
        value=value,
        verdicts=tuple(verdicts),
        coverage=(len(scored) + len(inapplicable)) / len(finals),
        cost_usd=math.fsum(verdict.cost_usd for verdict in verdicts),
        feedback=_feedback(value, finals, by_name, capped_by),
        capped_by=tuple(capped_by),
    )


def waits(criterion: Criterion, criteria: Sequence[Criterion], by_name: Mapping[str, Verdict]) -> bool:
    """Whether a criterion does not apply because its `when` did not pass, and not because of the task."""
    gate = next((c for c in criteria if c.name == criterion.when), None)
    if gate is None:
        return False
    verdict = by_name[gate.name]
    if not verdict.applies:
        return waits(gate, criteria, by_name)
    return verdict.grade is not None and not gate.passed(verdict.grade)


def set_failure(rollout: Rollout, criteria: Sequence[Criterion], result: ScoreResult) -> None:
    """Sets the failure kind of a rollout without a score.

    It is the kind of the first unscored criterion (`check` or `judge`). If the model's failure ended the run, status,
    error and failure kind are set to that failure. An agent that was ended in a loop of tool calls and then answered
    keeps the kind `loop`.
    """
    if rollout.status == "done" and result.failed is not None and not result.scored:
        rollout.status, rollout.error, rollout.failure = "error", result.failed, result.failure
    kinds = {c.name: FailureKind.JUDGE if c.check is None else FailureKind.CHECK for c in criteria}
    missing = [
        kinds[v.criterion]
        for v in result.verdicts
        if v.scope == "final" and v.grade is None and v.applies and v.criterion in kinds
    ]
    if rollout.status == "done":
        looped = rollout.failure if rollout.failure is FailureKind.LOOP else None
        rollout.failure = missing[0] if not result.scored and missing else looped


def mean_result(results: Sequence[ScoreResult]) -> ScoreResult:
    """Combines several runs of one task: means of the values and of each criterion's grades, over the scored runs.

    The result is failed only if every run failed. Feedback and reasons are those of the first run.
    """
    if len(results) == 1:
        return results[0]
    verdicts: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in (verdict for result in results for verdict in result.verdicts):
        verdicts.setdefault((verdict.criterion, verdict.scope), []).append(verdict)
    return ScoreResult(
        value=_mean([result.value for result in results]),
        verdicts=tuple(_mean_verdict(group) for group in verdicts.values()),
        coverage=math.fsum(result.coverage for result in results) / len(results),
        cost_usd=math.fsum(result.cost_usd for result in results),
        feedback=results[0].feedback,
        failed=results[0].failed if all(result.failed is not None for result in results) else None,
        failure=results[0].failure if all(result.failed is not None for result in results) else None,
        capped_by=tuple(dict.fromkeys(name for result in results for name in result.capped_by)),
    )


def _mean_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Mean over the runs where the criterion applied; the first run's verdict if it never did."""
    applied = [verdict for verdict in verdicts if verdict.applies]
    return (
        replace(applied[0], grade=_mean_of_scored([verdict.grade for verdict in applied])) if applied else verdicts[0]
    )


def _mean_of_scored(grades: Sequence[float | None]) -> float | None:
    scored = [value for value in grades if value is not None]
    return math.fsum(scored) / len(scored) if scored else None


def _mean(values: Sequence[float]) -> float:
    mean = _mean_of_scored([None if math.isnan(value) else value for value in values])
    return math.nan if mean is None else mean


def _feedback(
    value: float, finals: Sequence[Criterion], by_name: Mapping[str, Verdict], capped_by: Sequence[str]
) -> str:
    lines = [f"Score {value:.2f} of 1." if not math.isnan(value) else "Unscored."]
    for c in sorted(finals, key=lambda c: -abs(c.weight)):
        verdict = by_name[c.name]
        detail = f" {verdict.reason}" if verdict.reason else ""
        if not verdict.applies:
            if c.weight > 0 and c.when:
                lines.append(f"- {c.name} (weight {c.weight:g}) counts only where {c.when} passes.")
        elif verdict.grade is None:
            lines.append(f"- {c.name} could not be decided.{detail}")
        elif (c.weight >= 0 and verdict.grade < 1) or (c.weight < 0 and verdict.grade > 0):
            effect = "to gain" if c.weight >= 0 else "a pitfall to avoid"
            cap = " This caps the whole score." if c.name in capped_by else ""
            lines.append(f"- {c.name}: {verdict.grade:.2f} ({effect}, weight {c.weight:g}).{detail}{cap}")
    return "\n".join(lines) if len(lines) > 1 else f"{lines[0]} Nothing to improve."


# -- Coverage: the share of tasks on which each criterion was scored. A mean score does not show unscored criteria.


MIN_COVERAGE = 0.9  # default for the minimum share of tasks on which each final criterion must be scored


def coverage_report(results: Iterable[ScoreResult]) -> dict[str, Any]:
    """Returns the coverage of the final criteria over results.

    `coverage` in [0, 1] is the minimum over criteria of (tasks scored) / (tasks where it applied); 1.0 if no criterion
    applied. `undecided` maps each criterion with unscored tasks to their number `n`, the number of tasks `of` where it
    applied, and the most frequent `reason`.

    A failure of the agent counts as scored (0). A run stopped by a failure of the model server leaves every criterion
    unscored: it lowers `coverage` but is not in `undecided`, because the cause is not the criterion.

    Example: four tasks, `right` scored on all, `clear` on one of the two where it applied: coverage 0.5.
    """
    applied, decided, reasons = Counter[str](), Counter[str](), defaultdict[str, list[str]](list)
    for result in results:
        broken = result.failed is not None and math.isnan(result.value)
        for verdict in result.verdicts:
            if verdict.scope != "final" or not verdict.applies:
                continue
            agent_failed = result.failed is not None and not broken
            applied[verdict.criterion] += 1
            decided[verdict.criterion] += agent_failed or verdict.grade is not None
            if verdict.grade is None and result.failed is None:
                reasons[verdict.criterion].append(verdict.reason)
    return {
        "coverage": min((decided[name] / count for name, count in applied.items()), default=1.0),
        "undecided": {
            name: {"n": len(texts), "of": applied[name], "reason": Counter(texts).most_common(1)[0][0]}
            for name, texts in reasons.items()
        },
    }


# -- Why a prediction cannot be scored: the run failed, or its answer is empty. The task that it is scored for.


def failure_of(task: Task, prediction: Any, rollout: Rollout | None) -> Failed | None:
    """Returns the failure of a run, or None if the prediction can be scored.

    An empty answer after a failed last LM call is a failure of the model, otherwise of the agent. So is the text of a
    refusal, or what a content filter left of an answer, where a run returned it as its prediction.
    """
    failure = _failure(task, prediction)
    if rollout is None or not rollout.transitions:
        return failure
    last = rollout.transitions[-1]
    if failure is None:
        return _refused(prediction, last)
    if not failure.empty:
        return failure
    if (kind := unanswered(rollout.transitions)) is not None:
        return Failed(f"{failure.reason}: the last call of the model failed", by_agent=False, kind=kind)
    from assay.traces.messages.endings import ending_of  # here, because it loads DSPy

    ending = ending_of(last)
    return replace(failure, reason=f"{failure.reason}: {ending}") if ending else failure


def _refused(prediction: Any, last: Transition) -> Failed | None:
    """The failure of a run whose prediction is the answer of a call that the model refused or a filter ended."""
    values = [value for value in fields_of(prediction).values() if isinstance(value, str)]
    parts = fields_in(last.output, asked_outputs(chat_messages(last.request))).values()
    if not last.output or not (last.output in values or (parts and all(part in values for part in parts))):
        return None
    from assay.traces.messages.endings import refusal_of  # here, because it loads DSPy

    refusal = refusal_of(last)
    return Failed(refusal) if refusal else None


def _failure(task: Task, prediction: Any) -> Failed | None:
    if prediction is None:
        return Failed("the agent gave no answer", empty=True)
    if isinstance(prediction, Failed):
        return prediction
    if isinstance(prediction, BaseException):
        kind = failure_of_program(prediction)
        return Failed(f"{type(prediction).__name__}: {prediction}", by_agent=is_agent_failure(kind), kind=kind)
    if (run := ScoredRun.of(prediction)) is not None and run.failed is not None:
        return run.failed
    if isinstance(raised := getattr(prediction, "_broken", None), BaseException):  # see `assay.rubrics.dspy_metric`
        return Failed(error_text(raised), by_agent=False, kind=failure_of_program(raised))
    fields = fields_of(prediction)
    if not fields:
        return Failed("the prediction has no fields", empty=True)
    if _is_empty(fields) and not _is_empty(dict(task.expected)):  # some tasks expect an empty answer
        return Failed("every field of the answer is empty", empty=True)
    return None


def _is_empty(fields: dict[str, Any]) -> bool:
    values = [value for name, value in fields.items() if name not in RUN_FIELDS]
    return bool(values) and all(value is None or (isinstance(value, str) and not value.strip()) for value in values)


def task_of(row: Any, predictions: Sequence[Any], criteria: Sequence[Criterion]) -> Task:
    """The task of a `Task`, a `dspy.Example` or a mapping of its fields.

    Which fields of a flat mapping are inputs is not known. Those that a criterion names (`expected_names`) are expected
    outputs, besides those with a usual name. Those that a prediction has too are inputs and expected outputs: they may
    be outputs under other names, or inputs that the agent repeats.
    """
    if isinstance(row, Task):
        return row
    if hasattr(row, "toDict"):  # a `dspy.Example`; dspy is not imported here
        inputs, row = getattr(row, "_input_keys", None), dict(row.items())
        if inputs:
            return make_task(row, inputs=inputs)
    task = make_task(row, outputs={name for c in criteria for name in c.expected_names})
    if isinstance(row.get("inputs"), Mapping):
        return task
    predicted = {name for prediction in predictions for name in fields_of(prediction)}
    both = {name: value for name, value in task.inputs.items() if name in predicted and value is not None}
    return replace(task, expected={**both, **task.expected})
