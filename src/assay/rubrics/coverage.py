"""Coverage: the share of tasks on which each criterion was scored. A mean score does not show unscored criteria."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from assay.rubrics.scoring import ScoreResult

__all__ = ["MIN_COVERAGE", "coverage_report"]

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
