"""Optuna's Wilcoxon pruner, paired by task: a trial's values against the best trial's on the tasks that both have run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna

__all__ = ["worse_on_the_same_tasks"]

_FEWEST = 5  # pairs
_SLOW = range(8, 14)  # pairs for which scipy's exact test with ties takes up to seconds (2^n evaluations); it is fast for fewer and for more


def worse_on_the_same_tasks(study: "optuna.Study", values: Mapping[str, float | None], best: Mapping[str, float], *, p: float) -> bool:
    """Whether a trial with these values by task is losing against the best.

    Args:
        p: one-sided p of being worse than the best, under which it is.

    The values stay out of the study's storage, where each would be a transaction: Optuna's pruner sees both trials in a
    study of their own.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    pairs = [(value, best[task]) for task, value in values.items() if value is not None and task in best]
    if len(pairs) < _FEWEST or len(pairs) in _SLOW:
        return False
    both = optuna.create_study(direction=study.direction)
    leader = create_trial(value=sum(best.values()) / len(best), intermediate_values=dict(enumerate(against for _, against in pairs)))
    both.add_trial(leader)
    trial = create_trial(state=TrialState.RUNNING, intermediate_values=dict(enumerate(value for value, _ in pairs)))
    return optuna.pruners.WilcoxonPruner(p_threshold=p).prune(both, trial)
