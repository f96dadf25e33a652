"""Optuna's Wilcoxon pruner, paired by task: compares a trial with the best trial on the tasks that both have run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna

_FEWEST = 5  # pairs
# pairs for which scipy's exact test with ties takes up to seconds (2^n evaluations)
_SLOW = range(8, 14)


def is_worse_paired(
    study: "optuna.Study", values: Mapping[str, float | None], best: Mapping[str, float], *, p: float
) -> bool:
    """Whether a trial with these values by task is significantly worse than the best.

    Optuna's pruner compares the two trials in a temporary study: in the study's own storage each value would be a
    transaction.

    Args:
        p: largest one-sided p-value at which a trial is pruned.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    pairs = [(value, best[task]) for task, value in values.items() if value is not None and task in best]
    if len(pairs) < _FEWEST or len(pairs) in _SLOW:
        return False
    comparison = optuna.create_study(direction=study.direction)
    leader = create_trial(
        value=sum(best.values()) / len(best), intermediate_values=dict(enumerate(against for _, against in pairs))
    )
    comparison.add_trial(leader)
    trial = create_trial(state=TrialState.RUNNING, intermediate_values=dict(enumerate(value for value, _ in pairs)))
    return optuna.pruners.WilcoxonPruner(p_threshold=p).prune(comparison, trial)
