"""Fits an agent's thinking policy on val: the largest saving that is shown to keep the score within a margin."""

import math
from collections.abc import Mapping

from assay.evaluation.evaluation import Evaluation
from assay.evaluation.statistics import largest_loss, lossless_tasks, paired_gain
from assay.programs import ThinkingPolicy
from assay.support.numbers import signed

__all__ = ["FULL", "POLICIES", "fitted_policy", "why_none"]

FULL = "thinks once"
POLICIES: Mapping[str, ThinkingPolicy] = {
    FULL: ThinkingPolicy(),
    "probe 0.3": ThinkingPolicy(probe_margin=0.3),
    "probe 0.6": ThinkingPolicy(probe_margin=0.6),
    "probe 0.9": ThinkingPolicy(probe_margin=0.9),
    "stops when stable": ThinkingPolicy(stable=2, piece=16),
    "probe 0.6, stops when stable": ThinkingPolicy(probe_margin=0.6, stable=2, piece=16),
}
"""Policies that are tried, the one without allocation first. None of them samples, which needs more tokens."""

Rows = dict[str, dict[str, float]]


def fitted_policy(
    evaluations: Mapping[str, Evaluation], *, baseline: str = FULL, margin: float = 0.01
) -> tuple[str, Rows]:
    """The policy that saves most tokens among those that are shown to lose at most `margin` of the score.

    Shown is what the one-sided 95 % interval of the paired loss says, see `largest_loss`: a mean loss within the margin
    on a few tasks says little about the next ones. The interval is that of one policy; it is not corrected for their
    number.

    Args:
        evaluations: of each policy on the same val tasks.
        baseline: the policy that losses and savings are measured against; it is returned if no other saves tokens and
            is within the margin.
        margin: largest loss of score, in [0, 1).
    Returns:
        The name, and of each policy `n` (tasks scored under both), `loss`, `loss_high` (upper end of its interval) and
        `saved` (share of all tokens).
    """
    before, rows = evaluations[baseline], Rows()
    for name, evaluation in evaluations.items():
        gain = paired_gain(before.scores, evaluation.scores)
        common = [task for task in before.tokens if task in evaluation.tokens]
        spent = [math.fsum(side.tokens[task] for task in common) for side in (before, evaluation)]
        rows[name] = {
            "n": gain.n,
            "loss": -gain.mean if gain.n else math.nan,
            "loss_high": largest_loss(before.scores, evaluation.scores),
            "saved": 1 - spent[1] / spent[0] if spent[0] else 0.0,
        }
    fitting = [name for name in saving(rows, baseline) if rows[name]["loss_high"] <= margin]
    return max(fitting, key=lambda name: rows[name]["saved"], default=baseline), rows


def saving(rows: Rows, baseline: str) -> list[str]:
    """The policies other than the baseline that save tokens."""
    return [name for name, row in rows.items() if name != baseline and row["saved"] > 0]


def why_none(rows: Rows, *, baseline: str, margin: float) -> str:
    """Why `fitted_policy` returned the baseline, and how many val tasks another policy would need."""
    others = saving(rows, baseline)
    if not others:
        return "no other saves tokens"
    best = min(others, key=lambda name: (tasks_for(rows[name], margin), rows[name]["loss_high"]))
    row, needed = rows[best], tasks_for(rows[best], margin)
    return (
        f"none that saves tokens is shown to lose at most {margin:g}. Closest is {best!r}: tokens "
        f"{signed(-100 * row['saved'], 0)} %, score {signed(-row['loss'])}, a loss of up to {row['loss_high']:.3f} "
        f"(one-sided 95 %) on {row['n']} val tasks; "
        + (f"about {needed:.0f} are needed" if math.isfinite(needed) else "more tasks would not show it")
    )


def tasks_for(row: Mapping[str, float], margin: float) -> float:
    """Val tasks on which a policy with this mean loss would be shown to keep the margin; infinite if it does not.

    The interval shrinks with the square root of the number of tasks, but not below the rule of three.
    """
    if not row["loss"] < margin:
        return math.inf
    fewest = 0 if row["loss"] < 0 else lossless_tasks(margin)
    if row["loss"] == 0 and row["n"] < fewest:
        return fewest
    return max(fewest, math.ceil(row["n"] * ((row["loss_high"] - row["loss"]) / (margin - row["loss"])) ** 2))
