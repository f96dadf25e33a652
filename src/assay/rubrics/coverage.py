"""How much of what a rubric asks was decided. A score says nothing about a criterion that was never graded."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from assay.rubrics.scoring import ScoreResult

__all__ = ["MIN_COVERAGE", "coverage_report"]

MIN_COVERAGE = 0.9  # share of the tasks on which each final criterion must be decided, by default


def coverage_report(results: Iterable[ScoreResult]) -> dict[str, Any]:
    """`coverage`, in [0, 1]: of the final criterion that was decided on the smallest share of the tasks where it applied, that
    share; 1.0 where nothing was asked. `undecided`, by criterion: on how many (`n`) `of` them it was not, and the commonest `reason`.

    The agent's own failure is decided: its score is 0. A run that the model's server broke off leaves every criterion undecided; it
    counts in `coverage` and not in `undecided`, as its reason is not the criterion's.

    Worked: four tasks, `right` decided on all, `clear` on one of the two where it applied: coverage 0.5.
    """
    asked, decided, reasons = Counter[str](), Counter[str](), defaultdict[str, list[str]](list)
    for result in results:
        broken = result.failed is not None and math.isnan(result.value)
        for verdict in result.verdicts:
            if verdict.scope != "final" or not verdict.applies:
                continue
            own_failure = result.failed is not None and not broken
            asked[verdict.criterion] += 1
            decided[verdict.criterion] += own_failure or verdict.grade is not None
            if verdict.grade is None and result.failed is None:
                reasons[verdict.criterion].append(verdict.reason)
    return {
        "coverage": min((decided[name] / count for name, count in asked.items()), default=1.0),
        "undecided": {name: {"n": len(found), "of": asked[name], "reason": Counter(found).most_common(1)[0][0]} for name, found in reasons.items()},
    }
