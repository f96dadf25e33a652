"""Fits an agent's thinking policy on val: the largest saving whose score stays within a margin."""

import math
from collections.abc import Mapping

from assay.evaluation.evaluation import Evaluation
from assay.evaluation.statistics import paired_gain
from assay.programs import ThinkingPolicy

__all__ = ["POLICIES", "fitted_policy"]

POLICIES: Mapping[str, ThinkingPolicy] = {
    "thinks once": ThinkingPolicy(),
    "probe 0.3": ThinkingPolicy(probe_margin=0.3),
    "probe 0.6": ThinkingPolicy(probe_margin=0.6),
    "probe 0.9": ThinkingPolicy(probe_margin=0.9),
    "stops when stable": ThinkingPolicy(stable=2, piece=16),
    "probe 0.6, stops when stable": ThinkingPolicy(probe_margin=0.6, stable=2, piece=16),
}
"""Policies that are tried, the one without allocation first. None of them samples, which needs more tokens."""


def fitted_policy(
    evaluations: Mapping[str, Evaluation], *, baseline: str = "thinks once", margin: float = 0.01
) -> tuple[str, dict[str, dict[str, float]]]:
    """The policy that saves most tokens among those whose mean paired score loss is at most `margin`.

    Args:
        evaluations: of each policy on the same val tasks.
        baseline: the policy that losses and savings are measured against; it is returned if nothing saves tokens.
        margin: largest loss of score, in [0, 1).
    Returns:
        The name, and of each policy `n` (tasks scored under both), `loss` and `saved` (share of all tokens).
    """
    before, rows = evaluations[baseline], dict[str, dict[str, float]]()
    for name, evaluation in evaluations.items():
        gain = paired_gain(before.scores, evaluation.scores)
        common = [task for task in before.tokens if task in evaluation.tokens]
        spent = [math.fsum(side.tokens[task] for task in common) for side in (before, evaluation)]
        saved = 1 - spent[1] / spent[0] if spent[0] else 0.0
        rows[name] = {"n": gain.n, "loss": -gain.mean if gain.n else math.nan, "saved": saved}
    # a NaN loss compares as false: a policy that was never scored is not chosen
    fitting = [name for name, row in rows.items() if row["loss"] <= margin and row["saved"] > 0]
    return max(fitting, key=lambda name: rows[name]["saved"], default=baseline), rows
