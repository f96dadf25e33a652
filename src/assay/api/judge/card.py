"""Measurements of the result of a judge's compile on held-out items: the reliability card and the anchor set."""

from dataclasses import replace
from typing import Any

from assay.evaluation import Session
from assay.evaluation.judged import judge_again, judge_items
from assay.judges.labels import Item, LabelSplits, output_name
from assay.judges.quality.agreement import Answers
from assay.judges.quality.audit import padded
from assay.judges.quality.card import reliability_card
from assay.judges.quality.drift import AnchorSet
from assay.judges.reading import scale_masses
from assay.models.meter import Meter
from assay.optimizers.judges.compile import JudgeOutcome
from assay.runs.anchors import freeze, made_by
from assay.support.values import digest_of

_RETEST = 30  # test items that are judged a second time
_ANCHORS = 60  # val items whose verdicts are stored with a compiled judge


def judge_card(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> dict[str, Any]:
    """The reliability card of the result on the items that it was measured on; some of them are judged twice."""
    judge, judged, split = outcome.result, outcome.judged, outcome.split
    assert judged is not None
    assert outcome.agreement is not None
    assert outcome.ceiling is not None
    items: list[Item] = getattr(splits, split)
    retested = items[:_RETEST]
    with session.phase(split):
        second = judge_again(judge, retested, session, name=f"{split}: once more", split=split)
    first = Answers(judged.answers.verdicts[: len(retested)], judged.answers.places[: len(retested)])
    longer = None
    if all(output_name(item.fields) in item.fields for item in retested):
        with session.phase(split):
            filled = [replace(item, fields=padded(item.fields)) for item in retested]
            longer = judge_items(judge, filled, session, name=f"{split}: with words that say nothing", split=split)
    card = reliability_card(
        judged.answers, items, judge.spec, agreement=outcome.agreement, ceiling=outcome.ceiling,
        objective=outcome.objective, split=split,
        retest=(first, second.answers), padded=(first, longer.answers) if longer else None,
        masses=scale_masses(judged.raw),
        model=judge.model or session.lm.model,
        # cached answers were paid for when they were first requested
        cost_usd=None if (price := price_per_call(session.meter)) is None else price * judged.calls,
    )  # fmt: skip
    return {"judge": digest_of(made_by(judge, session)), **card}


def price_per_call(meter: Meter) -> float | None:
    """Mean dollars per call over the whole run; None if a price is unknown."""
    usage = meter.usage
    return None if usage.unpriced else usage.cost_usd / usage.calls if usage.calls else 0.0


def anchor_set(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> AnchorSet | None:
    """Anchor set of the result's verdicts on val items, for replays after a change of judge or model.

    The response cache has the verdicts from the search.
    """
    judge, items = outcome.result, splits.val[:_ANCHORS]
    if not judge.spec.graded:
        return None
    with session.phase(outcome.split):
        first = judge_items(judge, items, session, name="anchors", split="val")
        repeat = judge_again(judge, items, session, name="anchors: once more", split="val")
    return freeze(judge, items, first.answers, repeat.answers, session)
