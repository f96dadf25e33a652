"""Settings of the searches for prompts, for a judge, and for agent parameters.

Light: the command line lists them before it loads anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from assay.errors import ConfigError
from assay.support.names import nearest
from assay.support.options import EXPERT, Count, Flag, Parse, Positive, Seed, Settings, apply_preset

if TYPE_CHECKING:
    from assay.evaluation.metrics import Budget

_DEMOS = 16
_NO_JUDGES = ("knn", "ensemble")  # optimizers whose result is not a judge
OBJECTIVES: dict[str, Literal["minimize", "maximize"]] = {
    "score": "maximize",
    "tokens": "minimize",
    "latency": "minimize",
    "cost": "minimize",
}


def optimizer_of(value: Any) -> str:
    """The stored form of an optimizer: its name, see `assay.optimizers.prompts.given.optimizer_name`."""
    if isinstance(value, str | Path) and str(value).strip():
        return str(value)
    from assay.optimizers.prompts.given import optimizer_name

    return optimizer_name(value)


class CompileConfig(Settings):
    """Search."""

    optimizer: Annotated[Any, Flag(path=True), Parse(optimizer_of)] = "auto"
    """Optimizer: auto, labeled, bootstrap, bootstrap-search, knn, copro, mipro, simba, gepa, infer-rules, ensemble,
    optuna, a class of DSPy such as SIMBA, or the class, function or object package.module:NAME or file.py:NAME. Also a
    preset: light, or a .toml file of settings such as optimizers/gepa.toml."""
    optimizer_settings: Annotated[Mapping[str, Any] | None, Flag(name="--optimizer-set", metavar="NAME=VALUE")] = None
    """Setting of the optimizer, such as max_metric_calls=400 for gepa."""
    threshold: Annotated[float, Gt(0), Le(1)] = 0.8
    """Minimum score at which a run counts as a success to learn from."""
    demos: Annotated[int, Ge(1), Le(64)] = _DEMOS
    """Maximum number of demonstrations per predictor; auto also tries fewer."""
    token_margin: Annotated[float, Ge(0), Lt(1), replace(EXPERT, job=False)] = 0.01
    """A candidate with fewer prompt tokens wins on val if its expected score is at most this much lower, unless the
    other candidate is significantly better."""
    max_search_calls: Annotated[Count | None, Flag(job=False)] = None
    """Maximum number of LM calls of the search; by default 300 with optimizer auto, otherwise no limit."""

    @property
    def shown_demos(self) -> int:
        """Maximum number of demonstrations in a prompt, for estimates."""
        return self.demos

    def check(self) -> None:
        from assay.optimizers.prompts.teleprompters import check_optimizer, shows_demos

        apply_preset(self, "optimizer", CompileConfig)
        check_optimizer(self.optimizer, self.optimizer_settings)
        if self.demos != _DEMOS and not shows_demos(self.optimizer):
            raise ConfigError(
                f"{self.demos} would have no effect on `optimizer` {self.optimizer!r}: it adds no demonstrations or "
                "has its own settings for them (`optimizer_settings`)",
                field="demos",
            )


class JudgeConfig(Settings):
    """Search."""

    optimizer: Annotated[Any, Flag(path=True), Parse(optimizer_of)] = "auto"
    """Optimizer: auto (prompt forms, demonstrations and calibration), calibrate (calibration alone), or one of assay
    compile, such as gepa, mipro or copro."""
    objective: Literal["accuracy", "kappa", "weighted_kappa", "alpha", "spearman", "brier"] | None = None
    """Measure of agreement to optimize; by default chosen by the kind of the scale."""
    demos: Annotated[int, Ge(1), Le(16)] = 2
    """Number of demonstrations of each label."""

    def check(self) -> None:
        if self.optimizer in ("auto", "calibrate"):
            return
        from assay.optimizers.prompts.teleprompters import OPTIMIZERS, check_optimizer

        if self.optimizer in _NO_JUDGES:
            raise ConfigError(
                f"{self.optimizer} makes another program around the judge; "
                f"take auto, calibrate, or another of {', '.join(OPTIMIZERS)}"
            )
        check_optimizer(self.optimizer)


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
