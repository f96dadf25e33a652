"""Settings of an export. Refuses settings that would have no effect."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from assay.errors import ConfigError
from assay.models.defaults import DEFAULT_WEIGHTS
from assay.support.settings import one_of
from assay.traces.credit import RETURNS, returns
from assay.traces.export.balance import Balance
from assay.traces.export.gates import Gates
from assay.traces.export.rendering import TOOL_FORMS
from assay.traces.export.selection import Selection

__all__ = ["ADVANTAGES", "KINDS", "ExportConfig"]

KINDS = ("sft", "grpo", "preferences", "transitions")
ADVANTAGES = ("group", "batch", "none")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of an export.

    Args:
        kind: `sft`, `grpo`, `preferences` or `transitions`.
        selection: Rollouts to export.
        gates: Thresholds that the data must reach.
        balance: Balancing over task types, difficulty and outcome.
        min_quality: Minimum rating or score, in [0, 1], of rollouts that become SFT rows; KTO labels are True from it.
        whole: SFT rows are whole conversations.
        model: Model to be trained on the rows: a hub name, a folder, `embedded/NAME` or `embedded:FILE`. Rows of `sft`,
            `grpo` and `preferences` are rendered with its chat template if that is installed; the `trl` configuration
            names the model.
        tools: `native` keeps tool calls and tools as fields; `text` writes them into the messages; `auto` does so if
            the chat template ignores them.
        demos: SFT rows keep the demonstrations of DSPy prompts.
        agents: Names of agents whose calls become rows; empty: all.
        call: Calls of a rollout that become GRPO prompts: `last`, `first` or `all`.
        margin: Minimum difference in return of a preference pair.
        unpaired: Write KTO rows instead of preference pairs.
        returns, discount, step_weight, outcome_weight, outcome: See `assay.traces.credit`.
        advantage: Baseline over the `group`, over the whole `batch`, or `none`.
        group_by: `group` keeps the groups as collected; `task` groups all rollouts of a task, of any run.
        by_outcome: Split each group into rollouts with at least `min_quality` and the others.
        privacy: `auto` (also names if the extra `privacy` is installed), `patterns`, `names` (required), `presidio` or
            `off`.
        privacy_key: Key file that makes surrogates reversible and the same in every export; created if missing.
        licence: Licence of the data, for the manifest.
    Raises:
        ConfigError: A value is out of range, or a setting would have no effect.
    """

    kind: str
    selection: Selection = field(default_factory=Selection)
    gates: Gates = field(default_factory=Gates)
    balance: Balance = field(default_factory=Balance)
    min_quality: float = 0.8
    whole: bool = False
    model: str = DEFAULT_WEIGHTS
    tools: str = "auto"
    demos: bool = True
    agents: tuple[str, ...] = ()
    call: str = "last"
    margin: float = 0.1
    unpaired: bool = False
    returns: str = "to_go"
    discount: float = 1.0
    advantage: str = "group"
    group_by: str = "group"
    by_outcome: bool = False
    step_weight: float = 1.0
    outcome_weight: float = 1.0
    outcome: str = "human"
    privacy: str = "auto"
    privacy_key: Path | None = None
    licence: str = "not stated"

    def __post_init__(self) -> None:
        choices = (
            ("group_by", ("group", "task")),
            ("kind", KINDS),
            ("tools", TOOL_FORMS),
            ("call", ("last", "first", "all")),
            ("advantage", ADVANTAGES),
            ("outcome", ("score", "human")),
            ("privacy", ("auto", "patterns", "names", "presidio", "off")),
            ("returns", RETURNS),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} {one_of(getattr(self, name), allowed)}")
        if not 0 <= self.min_quality <= 1:
            raise ConfigError(f"min_quality={self.min_quality!r} must be between 0 and 1")
        if not self.margin >= 0:
            raise ConfigError(f"margin={self.margin!r} must be at least 0")
        if not (math.isfinite(self.step_weight) and math.isfinite(self.outcome_weight)):
            raise ConfigError(
                f"step_weight={self.step_weight!r} and outcome_weight={self.outcome_weight!r} must be finite numbers"
            )
        if not self.demos and (self.whole or self.kind != "sft"):
            raise ConfigError(
                "demos=False requires kind='sft' and whole=False: other rows have no demonstrations to leave out"
            )
        if self.agents and (self.whole or self.kind == "grpo"):
            raise ConfigError(
                f"agents={self.agents!r} requires rows of one call each, and not kind='grpo' or whole=True, whose rows "
                "have whole rollouts"
            )
        if self.kind == "transitions" and (self.model, self.tools) != (DEFAULT_WEIGHTS, "auto"):
            raise ConfigError(
                "model=… and tools=… have no effect on kind='transitions': its rows have the exact requests and token "
                "ids"
            )
        if self.advantage == "batch" and self.by_outcome:
            raise ConfigError("by_outcome=True has no effect with advantage='batch'; use advantage='group'")
        if self.balance.method == "over" and self.kind in ("grpo", "preferences"):
            raise ConfigError(
                f"balance='over' repeats rollouts, but {self.kind} keeps distinct rows; use 'down' or 'temperature'"
            )
        returns([0.0], scheme=self.returns, discount=self.discount)
