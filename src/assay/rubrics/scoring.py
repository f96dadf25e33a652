"""Verdicts and the score made of them. Does not call a model: judges do. NaN means unscored, never 0."""

import math
import reprlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

from assay.errors import FailureKind, StopRun
from assay.models.limits import within_limit
from assay.models.scope import spending
from assay.rubrics.checks import json_schema
from assay.rubrics.criteria import Criterion, Failed, Grade, NoGrade
from assay.scrubbing import said
from assay.traces.records import Rollout, Verdict

__all__ = ["ScoreResult", "combine", "fields_of", "grade", "mark_unscored", "mean_result"]

_SHIPPED = ("assay.rubrics.checks", "assay.rubrics.steps")
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """What a rubric says of one prediction.

    `value` is in [0, 1], higher is better; NaN where an essential criterion or all criteria are unscored.
    `coverage` is the share of final criteria that were scored, or do not apply (`Criterion.when`). `feedback` says what to do better.
    """

    value: float
    verdicts: tuple[Verdict, ...] = ()
    coverage: float = 1.0
    cost_usd: float = 0.0
    feedback: str = ""
    failed: str | None = None
    failure: FailureKind | None = None  # of a run that failed
    capped_by: tuple[str, ...] = field(default=())

    @property
    def scored(self) -> bool:
        return not math.isnan(self.value)

    @property
    def grades(self) -> dict[str, float]:
        """Final criteria by name; NaN where unscored and where the criterion does not apply."""
        return {v.criterion: math.nan if v.grade is None else v.grade for v in self.verdicts if v.scope == "final"}


def fields_of(prediction: Any) -> dict[str, Any]:
    """A prediction's fields: of a mapping, a `dspy.Prediction` or anything with `items()`; a bare value is `answer`."""
    if prediction is None or isinstance(prediction, Failed):
        return {}
    if isinstance(prediction, Mapping):
        return dict(prediction)
    if hasattr(prediction, "items"):
        return dict(prediction.items())
    return {"answer": prediction}


def grade(criterion: Criterion, decide: Any, task: Any, prediction: dict[str, Any], rollout: Rollout | None) -> Verdict:
    """Asks a check or judge, and never lets its failure become a number. What its LM calls cost is the verdict's cost."""
    with spending() as prices:
        found = _decided(criterion, decide, task, prediction, rollout)
    found.cost_usd = math.fsum(prices)
    return found


def _decided(criterion: Criterion, decide: Any, task: Any, prediction: dict[str, Any], rollout: Rollout | None) -> Verdict:
    try:
        return _asked(criterion, decide, task, prediction, rollout)
    except NoGrade as error:
        return _verdict(criterion, None, str(error))
    except (KeyboardInterrupt, StopRun):
        raise
    except BaseException as error:  # `sys.exit()` of a check is that check's failure
        return _verdict(criterion, None, said(error) + _place(criterion, error))


def _asked(criterion: Criterion, decide: Any, task: Any, prediction: dict[str, Any], rollout: Rollout | None) -> Verdict:
    """The verdict of a check or judge, within the time limit. What it answered is read there too: its class is the check's own code."""

    def verdict() -> Verdict:
        return _read(criterion, decide(task, prediction, rollout, **criterion.arguments))

    if _limits_itself(criterion, prediction):
        return verdict()
    return within_limit(verdict, f"the {'judge' if criterion.check is None else 'check'} of {criterion.name!r}")


def _limits_itself(criterion: Criterion, prediction: dict[str, Any]) -> bool:
    """Whether a shipped check ends by itself: all do but `json_schema`, on fields that are plain. Others have code of their own (`__str__`)."""
    if criterion.check is None or getattr(criterion.check, "__module__", None) not in _SHIPPED or criterion.check is json_schema:
        return False
    return criterion.check.__module__ != json_schema.__module__ or all(type(value) in _PLAIN for value in prediction.values())


def _read(criterion: Criterion, answer: Any) -> Verdict:
    """What a check or judge answered, as a verdict of plain values."""
    if not isinstance(answer, Grade):
        return _verdict(criterion, answer, "")
    found = _verdict(criterion, answer.value, answer.reason if type(answer.reason) is str else str(answer.reason or ""))
    found.label, found.confidence = answer.label, answer.confidence
    return found


def _place(criterion: Criterion, error: BaseException) -> str:
    """File and line of the exception of a check, in the file that the check is in."""
    code = getattr(criterion.check, "__code__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if code is not None and frame.filename == code.co_filename]
    return f" ({Path(code.co_filename).name}:{lines[-1]})" if code is not None and lines else ""


def _is_numpy_bool(value: Any) -> bool:
    """NumPy's numbers are `numbers.Real`, its truth values are not; without NumPy loaded there are none (importing it costs 16 MB)."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.bool_)


def _verdict(criterion: Criterion, value: Any, reason: str) -> Verdict:
    number: float | None = None
    if isinstance(value, bool) or _is_numpy_bool(value):
        number = float(value)
    elif isinstance(value, Real) and value == value:
        if 0 <= value <= 1:  # type: ignore[operator]  # as it is: what is too large for a float is a number all the same
            number = float(value)
        else:
            reason = f"graded {_shown(value)}, which is not between 0 and 1. {reason}".strip()
    elif not reason:
        reason = f"graded {_shown(value)}, which is no number"
    return Verdict(criterion=criterion.name, grade=number, weight=criterion.weight, scope=criterion.scope, reason=reason)


def _shown(value: Any) -> str:
    """What a check answered, shortened; also a number that Python refuses to write out, and what cannot be written at all."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"a {type(value).__name__} of more digits than are written out"
    except SystemExit:
        return f"a {type(value).__name__} that cannot be written out"


def combine(criteria: Sequence[Criterion], verdicts: Sequence[Verdict]) -> ScoreResult:
    """Sum of w·g over the scored final criteria, divided by the sum of their positive weights, clipped to [0, 1].

    A criterion that does not apply (`when`) adds nothing; its positive weight stays in the divisor, so that passing what it
    waits for never lowers a score. Essential criteria graded below `pass_at` cap the result. With an essential criterion unscored, or nothing with a
    positive weight scored, the value is NaN. Source: HealthBench (arXiv 2505.08775), scoring; caps and NaN are ours.

    Worked: correct 4·0, clear 1·1, rambling -1·0.5 gives (0 + 1 - 0.5) / (4 + 1) = 0.1; a cap of 0.5 leaves it.
    """
    by_name = {verdict.criterion: verdict for verdict in verdicts}
    finals = [c for c in criteria if c.scope == "final"]
    scored = [(c, g) for c in finals if (g := by_name[c.name].grade) is not None]
    waiting = [c for c in finals if not by_name[c.name].applies]
    positive = math.fsum(c.weight for c in [*(c for c, _ in scored), *waiting] if c.weight > 0)
    missing = [c.name for c in finals if c.essential is not None and by_name[c.name].grade is None and c not in waiting]
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
        coverage=(len(scored) + len(waiting)) / len(finals),
        cost_usd=math.fsum(verdict.cost_usd for verdict in verdicts),
        feedback=_feedback(value, finals, by_name, capped_by),
        capped_by=tuple(capped_by),
    )


def mark_unscored(rollout: Rollout, criteria: Sequence[Criterion], result: ScoreResult) -> None:
    """Sets the failure kind of a rollout that ran and has no score: `check` or `judge`, by the first criterion that was not graded, or
    the model's, which then broke the run off."""
    if rollout.status == "done" and result.failed is not None and not result.scored:
        rollout.status, rollout.error, rollout.failure = "error", result.failed, result.failure
    kinds = {c.name: FailureKind.JUDGE if c.check is None else FailureKind.CHECK for c in criteria}
    missing = [kinds[v.criterion] for v in result.verdicts if v.scope == "final" and v.grade is None and v.applies and v.criterion in kinds]
    if rollout.status == "done":
        rollout.failure = missing[0] if not result.scored and missing else None


def mean_result(results: Sequence[ScoreResult]) -> ScoreResult:
    """Several runs of one task as one result: means of the values and of each criterion's grades, over those that were scored.

    It counts as failed where every run failed; feedback and reasons are the first run's.
    """
    if len(results) == 1:
        return results[0]
    verdicts: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in (verdict for result in results for verdict in result.verdicts):
        verdicts.setdefault((verdict.criterion, verdict.scope), []).append(verdict)
    return ScoreResult(
        value=_mean([result.value for result in results]),
        verdicts=tuple(_mean_verdict(found) for found in verdicts.values()),
        coverage=math.fsum(result.coverage for result in results) / len(results),
        cost_usd=math.fsum(result.cost_usd for result in results),
        feedback=results[0].feedback,
        failed=results[0].failed if all(result.failed is not None for result in results) else None,
        failure=results[0].failure if all(result.failed is not None for result in results) else None,
        capped_by=tuple(dict.fromkeys(name for result in results for name in result.capped_by)),
    )


def _mean_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Of the runs where the criterion applied; the first run's where it never did."""
    applied = [verdict for verdict in verdicts if verdict.applies]
    return replace(applied[0], grade=_known([verdict.grade for verdict in applied])) if applied else verdicts[0]


def _known(grades: Sequence[float | None]) -> float | None:
    known = [value for value in grades if value is not None]
    return math.fsum(known) / len(known) if known else None


def _mean(values: Sequence[float]) -> float:
    mean = _known([None if math.isnan(value) else value for value in values])
    return math.nan if mean is None else mean


def _feedback(value: float, finals: Sequence[Criterion], by_name: Mapping[str, Verdict], capped_by: Sequence[str]) -> str:
    lines = [f"Score {value:.2f} of 1." if not math.isnan(value) else "Unscored."]
    for c in sorted(finals, key=lambda c: -abs(c.weight)):
        verdict = by_name[c.name]
        detail = f" {verdict.reason}" if verdict.reason else ""
        if not verdict.applies:
            if c.weight > 0:
                lines.append(f"- {c.name} (weight {c.weight:g}) counts only where {c.when} passes.")
        elif verdict.grade is None:
            lines.append(f"- {c.name} could not be decided.{detail}")
        elif (c.weight >= 0 and verdict.grade < 1) or (c.weight < 0 and verdict.grade > 0):
            what = "to gain" if c.weight >= 0 else "a pitfall to avoid"
            cap = " This caps the whole score." if c.name in capped_by else ""
            lines.append(f"- {c.name}: {verdict.grade:.2f} ({what}, weight {c.weight:g}).{detail}{cap}")
    return "\n".join(lines) if len(lines) > 1 else f"{lines[0]} Nothing to improve."
