"""Measurements of a compiled judge on its sealed items: the reliability card and the anchor set."""

from dataclasses import replace
from typing import Any

from assay.evaluation import Session
from assay.evaluation.judged import judge_again, judge_items
from assay.judges.labels import LabelSplits, output_name
from assay.judges.quality.agreement import Answers
from assay.judges.quality.audit import padded
from assay.judges.quality.card import reliability_card
from assay.judges.quality.drift import AnchorSet
from assay.judges.reading import scale_masses
from assay.optimizers.judges.compile import JudgeOutcome
from assay.runs.anchors import freeze

__all__ = ["anchor_set", "judge_card", "price_per_call"]

_RETEST = 30  # test items that are judged a second time
_ANCHORS = 60  # val items whose verdicts are stored with a compiled judge


def judge_card(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> dict[str, Any]:
    """The reliability card of the compiled judge on the sealed items; some of them are judged twice."""
    judged, retested = outcome.answers["compiled"], splits.test[:_RETEST]
    with session.phase("test"):
        second = judge_again(outcome.compiled, retested, session, name="test: once more", split="test")
    first = Answers(judged.answers.verdicts[: len(retested)], judged.answers.places[: len(retested)])
    longer = None
    if all(output_name(item.fields) in item.fields for item in retested):
        with session.phase("test"):
            filled = [replace(item, fields=padded(item.fields)) for item in retested]
            longer = judge_items(
                outcome.compiled, filled, session, name="test: with words that say nothing", split="test"
            )
    assert outcome.test_compiled is not None
    assert outcome.ceiling is not None
    return reliability_card(
        judged.answers, splits.test, outcome.compiled.spec, agreement=outcome.test_compiled, ceiling=outcome.ceiling,
        objective=outcome.objective,
        retest=(first, second.answers), padded=(first, longer.answers) if longer else None,
        masses=scale_masses(judged.raw),
        model=outcome.compiled.model or session.lm.model,
        # cached answers were paid for when they were first requested
        cost_usd=None if (price := price_per_call(session)) is None else price * judged.calls,
    )  # fmt: skip


def price_per_call(session: Session) -> float | None:
    """Mean dollars per call over the whole run; None if a price is unknown."""
    usage = session.meter.usage
    return None if usage.unpriced else usage.cost_usd / usage.calls if usage.calls else 0.0


def anchor_set(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> AnchorSet | None:
    """Anchor set of the compiled judge's verdicts on val items, for replays after a change of judge or model.

    The response cache has the verdicts from the search.
    """
    if not outcome.compiled.spec.graded:
        return None
    items = splits.val[:_ANCHORS]
    with session.phase("test"):
        first = judge_items(outcome.compiled, items, session, name="anchors", split="val")
        repeat = judge_again(outcome.compiled, items, session, name="anchors: once more", split="val")
    return freeze(outcome.compiled, items, first.answers, repeat.answers, session)
