"""`judging="overall"`: merges the judge criteria of a rubric into one (implicit aggregation)."""

import math
from collections.abc import Sequence

from assay.errors import RubricError
from assay.rubrics.criteria import SHOWS, Criterion, JudgeSpec

__all__ = ["merge_judge_criteria"]

_RATING = ("very poor", "poor", "fair", "good", "very good")


def merge_judge_criteria(name: str, criteria: Sequence[Criterion]) -> tuple[Criterion, ...]:
    """Returns the criteria with all judge criteria replaced by one whose question lists them with their weights.

    Raises:
        RubricError: a judge criterion is essential, uses a judge defined elsewhere, or is linked to another by `when`;
            or none has a positive weight.
    """
    judged = [c for c in criteria if c.judge is not None]
    if unfit := [c.name for c in judged if c.essential is not None or (c.judge and c.judge.use)]:
        raise RubricError(
            f"rubric {name!r}: judging='overall' merges the judge criteria into one question, "
            f"so {unfit} can neither be essential nor use a judge"
        )
    names = {c.name for c in judged}
    if linked := [c.name for c in criteria if c.when and (c in judged or c.when in names)]:
        raise RubricError(
            f"rubric {name!r}: judging='overall' merges the judge criteria into one question, "
            f"so {linked} cannot depend on one with when"
        )
    weight = math.fsum(c.weight for c in judged if c.weight > 0)
    if not weight:
        raise RubricError(f"rubric {name!r}: judging='overall' needs a judge criterion with a weight above 0")
    questions = " ".join(f"({c.weight:+g}) {c.judge.text}" for c in judged if c.judge)
    text = f"Rate the output as a whole by these criteria, each with its weight, a negative one a pitfall: {questions}"
    shows = tuple(dict.fromkeys(name for c in judged if c.judge for name in c.judge.shows or SHOWS))
    spec = JudgeSpec(text=text, scale=_RATING, shows=() if shows == SHOWS else shows)
    overall = Criterion(name="overall", weight=weight, judge=spec)
    return (*(c for c in criteria if c.judge is None), overall)
