"""Runs a judge over many items and collects its verdicts."""

import copy
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from assay.errors import FailureKind, StopRun
from assay.evaluation.executors import as_finished
from assay.evaluation.session import Session
from assay.evaluation.statistics import interval_of
from assay.judges import Judge
from assay.judges.calibration import Calibration, expected_step
from assay.judges.labels import Item
from assay.judges.quality.agreement import FEWEST, AgreementTable, Answers, oriented
from assay.judges.questions import is_needed
from assay.models import sample_scope, spending
from assay.models.limits import OverTime, limited, within_limit
from assay.programs import program_version
from assay.rubrics import JudgeSpec, NoGrade
from assay.support.scrubbing import error_text
from assay.traces import Rollout


@dataclass
class Judged:
    """A judge's verdicts on items, in the order of the items, with their cost.

    Attributes:
        raw: probabilities before calibration, `raw[item]`; None where the model gave none.
        calls: calls for all verdicts, those answered from the cache included.
    """

    answers: Answers
    raw: list[Mapping[str, float] | None]
    reasons: list[str]
    cost_usd: float = 0.0
    calls: int = 0

    @property
    def unscored(self) -> int:
        return sum(verdict is None for verdict in self.answers.verdicts)

    def coverage(self, judge: Judge, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """`coverage` and `undecided` in the form of `assay.rubrics.scoring`, over all items or over `rows`."""
        reasons = [
            self.reasons[row]
            for row in (range(len(self.reasons)) if rows is None else rows)
            if self.answers.verdicts[row] is None
        ]
        of = len(self.reasons) if rows is None else len(rows)
        name = f"judge {judge.spec.text[:80]!r}"
        gap = {"n": len(reasons), "of": of, "reason": Counter(reasons).most_common(1)[0][0]} if reasons else None
        return {"coverage": 1 - len(reasons) / of if of else 1.0, "undecided": {name: gap} if gap else {}}


def judge_items(judge: Judge, items: Sequence[Item], session: Session, *, name: str, split: str = "") -> Judged:
    """Asks the judge about every item, several at a time; each is a rollout in the store. What fails is unscored.

    Raises:
        BudgetExceeded, Cancelled: what was judged before is in the response cache.
    """
    version, calls = program_version(judge, None), [0] * len(items)
    parts: list[Any] = [None] * len(items)  # (prediction, reason, prices) of each item

    def judge_item(index: int) -> None:
        item = items[index]
        rollout = Rollout(
            task_id=item.id[:200],
            task_type="verdict",
            source="judge",
            program=session.program_name,
            program_version=version,
            model=session.lm.model,
            seed=session.seed,
            split=split,
            inputs=dict(item.fields),
        )
        rollout.group_id = rollout.task_id
        with session.context(), session.recorder.rollout(rollout), spending() as prices:
            try:
                if missing := [name for name in judge.shows if is_needed(name) and name not in item.fields]:
                    raise NoGrade(f"the judge sees {list(judge.shows)}, and the item has no {', '.join(missing)}")
                inputs = {name: item.fields.get(name) for name in judge.shows}  # None: the item lacks the field
                with limited(session.task_timeout):
                    prediction = within_limit(lambda: judge(**inputs), "the judge")
            except (KeyboardInterrupt, StopRun):
                raise
            except BaseException as error:  # the item is unscored; the reason is kept
                kind = FailureKind.TIMEOUT if isinstance(error, OverTime) else FailureKind.JUDGE
                rollout.status, rollout.error, rollout.failure = "error", error_text(error), kind
                parts[index] = (None, rollout.error, prices)
                return
            finally:
                calls[index] = len(rollout.transitions)
            rollout.prediction = {key: prediction[key] for key in ("verdict", "confidence", "value")}
        parts[index] = (prediction, "", prices)

    with session.progress.bar(name, len(items)) as advance:
        for _ in as_finished(judge_item, len(items), threads=session.threads):
            advance(1)
    return replace(_collected(parts, judge.spec), calls=sum(calls))


def judge_again(judge: Judge, items: Sequence[Item], session: Session, *, name: str, split: str = "") -> Judged:
    """`judge_items` with new samples, asked in another order, so that what depends on the order is noise too."""
    order = random.Random(session.seed).sample(range(len(items)), len(items))
    with sample_scope(1):
        judged = judge_items(judge, [items[at] for at in order], session, name=name, split=split)
    places = sorted(range(len(order)), key=order.__getitem__)
    return replace(only(judged, places), cost_usd=judged.cost_usd, calls=judged.calls)


def _collected(parts: Sequence[Any], spec: JudgeSpec) -> Judged:
    steps = dict(zip(spec.scale, spec.steps, strict=True))
    verdicts, places, probabilities, raw, orders = [], [], [], [], []
    for prediction, _, _ in parts:
        orders.append(None if prediction is None else prediction.get("orders"))
        verdicts.append(None if prediction is None else prediction.verdict)
        raw.append(None if prediction is None else prediction.raw)
        probabilities.append(None if prediction is None else prediction.probabilities)
        if prediction is None:
            places.append(math.nan)
        elif prediction.probabilities is None:
            places.append(steps[prediction.verdict])
        else:
            places.append(expected_step([prediction.probabilities[label] for label in spec.scale], spec))
    cost = math.fsum(price for _, _, prices in parts for price in prices)
    return Judged(Answers(verdicts, places, probabilities, orders), raw, [reason for _, reason, _ in parts], cost)


def recalibrated(judged: Judged, calibration: Calibration | None, judge: Judge) -> Judged:
    """The same readings under another calibration; no model is asked."""
    changed = copy.copy(judge)
    changed.calibration = calibration
    parts = [
        (changed.judged(raw, verdict) if raw is not None or verdict is not None else None, reason, ())
        for raw, verdict, reason in zip(judged.raw, judged.answers.verdicts, judged.reasons, strict=True)
    ]
    return _collected(parts, judge.spec)


def only(judged: Judged, rows: Sequence[int]) -> Judged:
    """Some of the answers, in the order of `rows`."""

    def select(column: Sequence[Any]) -> list[Any]:
        return [column[row] for row in rows] if column else []

    a = judged.answers
    answers = Answers(select(a.verdicts), select(a.places), select(a.probabilities), select(a.orders))
    return Judged(answers, select(judged.raw), select(judged.reasons))


def joined(parts: Sequence[Judged]) -> Judged:
    """Several sets of answers as one."""

    def chained(name: str) -> list[Any]:
        return [value for part in parts for value in getattr(part.answers, name)]

    answers = Answers(chained("verdicts"), chained("places"), chained("probabilities"), chained("orders"))
    raw, reasons = (
        [entry for part in parts for entry in part.raw],
        [reason for part in parts for reason in part.reasons],
    )
    return Judged(answers, raw, reasons, math.fsum(part.cost_usd for part in parts))


# -- Paired gain of one judge over another in agreement with raters: what the gate of a judge's compile decides by.


def measure_gain(
    name: str, before: Answers, after: Answers, items: Sequence[Item], spec: JudgeSpec
) -> dict[str, float | int | None]:
    """Gain of `after` over `before` on one measure, over the items that both scored, with its 95 % interval.

    Higher is better. `low` and `high` are None below 20 items, if the measure is undefined, or if it is so without one
    of the items.

    The interval is `assay.evaluation.statistics.interval_of` of the jackknife pseudo-values, which are what each item
    contributes to the gain (Miller 1974, Biometrika 61:1): for the accuracy, the item's own difference. Their range is
    that of the gain, or wider where they are: an item with a rare label may contribute more to kappa. Simulated figures
    are in `docs/explanation/judges.md`.
    """
    paired = [
        i
        for i, (a, b) in enumerate(zip(before.verdicts, after.verdicts, strict=True))
        if a is not None and b is not None
    ]
    tables = [AgreementTable(_only(answers, paired), [items[i] for i in paired], spec) for answers in (before, after)]
    old, new = (table.measure(name)[0] for table in tables)
    mean = None if old is None or new is None else oriented(name, new - old)
    low, high = (None, None) if mean is None or len(paired) < FEWEST else _interval(name, mean, tables)
    return {"mean": mean, "low": low, "high": high, "n": len(paired)}


def _interval(name: str, mean: float, tables: Sequence[AgreementTable]) -> tuple[float | None, float | None]:
    without = [oriented(name, 1.0) * table.without_each(name) for table in tables]
    gaps = without[1] - without[0]
    if not np.isfinite(gaps).all():
        return None, None
    values = mean + (len(gaps) - 1) * (gaps.mean() - gaps)
    span = 1.0 if name == "accuracy" else 2.0  # other measures are in [-1, 1], the Brier score in [0, 2]
    reach = max(span, float(abs(values).max()))
    low, high = interval_of(values, -reach, reach)
    return max(-span, low), min(span, high)


def _only(answers: Answers, rows: Sequence[int]) -> Answers:
    probabilities = [answers.probabilities[i] for i in rows] if answers.probabilities else ()
    return Answers([answers.verdicts[i] for i in rows], [answers.places[i] for i in rows], probabilities)
