"""Settings of a prompt search. Light: the command line lists them before it loads anything."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from assay.errors import ConfigError
from assay.support.options import EXPERT, Count, Flag, Parse, Settings
from assay.support.presets import apply_preset

_DEMOS = 16


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
