"""Settings of an export. Refuses what would have no effect."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from assay.errors import ConfigError
from assay.traces.balance import Balance
from assay.traces.credit import RETURNS, returns
from assay.traces.gates import Gates
from assay.traces.rendering import TOOL_FORMS
from assay.traces.selection import Selection

__all__ = ["ADVANTAGES", "DEFAULT_MODEL", "KINDS", "ExportConfig"]

KINDS = ("sft", "grpo", "preferences", "transitions")
ADVANTAGES = ("group", "batch", "none")
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of an export.

    Args:
        kind: `sft`, `grpo`, `preferences` or `transitions`.
        min_quality: least rating or score of a rollout whose calls become SFT rows, and from which a KTO label is good.
        whole: SFT rows are whole conversations.
        model: that will be trained on the rows: a name on the hub, a folder, `embedded/NAME` or `embedded:FILE`. Each row of `sft`, `grpo` and
            `preferences` is rendered with its chat template where that is on this machine; the config for `trl` names the model.
        tools: `native` keeps tool calls and tools as fields, `text` writes them into the messages, `auto` does so where the chat template ignores
            them.
        demos: SFT rows keep the demonstrations that a DSPy program showed.
        call: which call of a rollout is a GRPO prompt: `last`, `first` or `all`.
        margin: least difference in return of a preference pair; `unpaired` gives rows for KTO.
        returns, discount, step_weight, outcome_weight, outcome: see `assay.traces.credit`.
        advantage: against the other rollouts of the group, of the whole batch, or none.
        group_by: what a group is: `group`, as it was collected, or `task`: all rollouts of a task, of whatever run.
        by_outcome: rollouts that reached `min_quality` and those that did not are groups of their own.
        privacy: `auto` (names too, where the extra `privacy` is installed), `patterns`, `names` (required), `presidio`, or `off`.
        privacy_key: file of the key that makes surrogates the same in every export, and reversible; made where it is missing.
        licence: of the data, for the manifest.
    """

    kind: str
    selection: Selection = field(default_factory=Selection)
    gates: Gates = field(default_factory=Gates)
    balance: Balance = field(default_factory=Balance)
    min_quality: float = 0.8
    whole: bool = False
    model: str = DEFAULT_MODEL
    tools: str = "auto"
    demos: bool = True
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
            ("group_by", ("group", "task")), ("kind", KINDS), ("tools", TOOL_FORMS),
            ("call", ("last", "first", "all")), ("advantage", ADVANTAGES), ("outcome", ("score", "human")),
            ("privacy", ("auto", "patterns", "names", "presidio", "off")), ("returns", RETURNS),
        )  # fmt: skip
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        if not 0 <= self.min_quality <= 1:
            raise ConfigError(f"min_quality={self.min_quality!r} must be between 0 and 1")
        if not self.margin >= 0:
            raise ConfigError(f"margin={self.margin!r} must be at least 0")
        if not (math.isfinite(self.step_weight) and math.isfinite(self.outcome_weight)):
            raise ConfigError(f"step_weight={self.step_weight!r} and outcome_weight={self.outcome_weight!r} must be finite numbers")
        if not self.demos and (self.whole or self.kind != "sft"):
            raise ConfigError("demos=False leaves demonstrations out of SFT rows of single calls; there are none elsewhere")
        if self.kind == "transitions" and (self.model, self.tools) != (DEFAULT_MODEL, "auto"):
            raise ConfigError("model and tools would have no effect on transitions: their rows hold requests as they were sent, and token ids")
        if self.advantage == "batch" and self.by_outcome:
            raise ConfigError("by_outcome=True would have no effect on advantages over the whole batch")
        if self.balance.method == "over" and self.kind in ("grpo", "preferences"):
            raise ConfigError(f"balance='over' repeats rollouts, and {self.kind} keeps distinct rows: take down or temperature")
        returns([0.0], scheme=self.returns, discount=self.discount)
