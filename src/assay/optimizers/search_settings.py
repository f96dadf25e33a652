"""Settings of a search over agent parameters. Light: the command line lists them before it loads anything."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt, Le

from assay.errors import ConfigError
from assay.support.names import nearest
from assay.support.options import EXPERT, Flag, Positive, Seed, Settings

if TYPE_CHECKING:
    from assay.evaluation.metrics import Budget

OBJECTIVES: dict[str, Literal["minimize", "maximize"]] = {
    "score": "maximize",
    "tokens": "minimize",
    "latency": "minimize",
    "cost": "minimize",
}


class Objectives(Settings):
    """Objectives."""

    objectives: Annotated[Sequence[str], Flag(name="--objective", commas=True)] = ("score",)
    """Objectives, separated by commas: score, tokens, latency, cost. Several give a Pareto front."""
    budget: Annotated[Mapping[str, float], EXPERT] = field(default_factory=dict)
    """Number of steps, tokens or seconds at which the efficiency of a run is 0."""

    def check(self) -> None:
        unknown = set(self.objectives) - set(OBJECTIVES)
        if unknown or not self.objectives or len(set(self.objectives)) != len(self.objectives):
            raise ConfigError(
                f"{list(self.objectives)} must be different ones of {', '.join(OBJECTIVES)}", field="objectives"
            )
        names = ("steps", "tokens", "seconds")
        if wrong := sorted(set(self.budget) - set(names)):
            near = nearest(wrong[0], names)
            hint = f"Did you mean {near!r}?" if near else ""
            raise ConfigError(f"has {', '.join(names)}, not {wrong}", field="budget", hint=hint)
        if wrong := [name for name, value in self.budget.items() if not value > 0]:
            raise ConfigError(f"{', '.join(wrong)} must be above 0", field="budget")

    @property
    def run_budget(self) -> "Budget":
        """What a run may use, for the metric efficiency."""
        from assay.evaluation.metrics import Budget

        return Budget(**self.budget)


class SearchConfig(Objectives):
    """Search."""

    trials: Annotated[Positive, Flag(job=False)] = 60
    """Number of completed trials, of all processes together; a pruned one counts."""
    sampler: Literal["tpe", "gp", "cmaes", "nsga2", "random", "grid"] = "tpe"
    """Sampler of Optuna; gp needs torch."""
    pruner: Annotated[Literal["auto", "wilcoxon", "hyperband", "none"], EXPERT] = "auto"
    """Pruner; auto is wilcoxon (task by task against the best trial) if there is one objective, otherwise none."""
    prune_at: Annotated[float, Gt(0), Le(0.5), EXPERT] = 0.1
    """One-sided p-value against the best trial below which a trial is pruned. A higher one saves more runs and loses
    more good trials."""
    block: Annotated[Positive, EXPERT] = 5
    """Number of tasks between two pruning checks of a trial."""
    seed: Seed = 0
    """Seed of the random number generators."""

    def check(self) -> None:
        if len(self.objectives) > 1 and self.pruner not in ("auto", "none"):
            raise ConfigError(
                f"{self.pruner} needs one objective; with {len(self.objectives)} no trial is pruned", field="pruner"
            )
        if self.sampler == "cmaes" and len(self.objectives) > 1:
            raise ConfigError("cmaes needs one objective; use tpe, gp or nsga2 for several", field="sampler")

    @property
    def prunes(self) -> str:
        if self.pruner != "auto":
            return self.pruner
        return "wilcoxon" if len(self.objectives) == 1 else "none"
