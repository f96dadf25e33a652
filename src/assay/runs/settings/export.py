"""Settings of `export`: selection of rollouts, gates, balance, and content of the rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import ConfigError
from assay.models.defaults import DEFAULT_WEIGHTS
from assay.support.settings import LARGEST_SEED, Settings, setting, settings_of

if TYPE_CHECKING:
    from assay.traces.export.selection import Selection
    from assay.traces.export.settings import Balance, Gates

_TARGET = ("model", "tools")
_CREDIT = ("group_by", "returns", "discount", "step_weight", "outcome_weight", "outcome")
_PRIVACY = ("auto", "patterns", "names", "presidio", "off")


@dataclass(frozen=True, kw_only=True)
class SelectionSettings(Settings):
    """Which rollouts are exported."""

    runs: Sequence[str] = setting((), "Only rollouts of this run; repeatable.", flag="--run", many=True)
    programs: Sequence[str] = setting(
        (),
        "Only rollouts of this program, by its full name as in assay traces list; repeatable.",
        flag="--program",
        many=True,
    )
    task_types: Sequence[str] = setting(
        (), "Only rollouts of this task type; repeatable.", flag="--task-type", many=True
    )
    sources: Sequence[str] = setting(
        (), "Only rollouts of this source, such as program, gateway or otlp; repeatable.", flag="--source", many=True
    )
    tenants: Sequence[str] = setting(
        (),
        "Tenant whose rollouts are exported; repeatable. Rollouts of other tenants are left out.",
        flag="--tenant",
        many=True,
    )
    require_consent: bool = setting(False, "Only rollouts with recorded consent.")
    rated: bool = setting(False, "Only rollouts with a human rating.")

    @property
    def selection(self) -> "Selection":
        from assay.traces.export.selection import Selection

        return Selection(
            runs=tuple(self.runs),
            programs=tuple(self.programs),
            task_types=tuple(self.task_types),
            sources=tuple(self.sources),
            tenants=tuple(self.tenants),
            require_consent=self.require_consent,
            rated=self.rated,
        )


@dataclass(frozen=True, kw_only=True)
class GateSettings(Settings):
    """Gates: what the data must fulfil before anything is written."""

    min_transitions: int = setting(5000, "Gate: minimum number of transitions; 0 turns it off.", ge=0)
    min_clean: float = setting(0.95, "Gate: minimum share of clean transitions.", ge=0, le=1)
    min_task_types: int = setting(5, "Gate: minimum number of task types; 0 turns it off.", ge=0)
    gated: bool = setting(
        False, "Enforce all gates. By default too few transitions or task types only cause a warning."
    )

    @property
    def gates(self) -> "Gates":
        from assay.traces.export.settings import Gates

        return Gates(
            min_transitions=self.min_transitions,
            min_clean=self.min_clean,
            min_task_types=self.min_task_types,
            gated=self.gated,
        )


@dataclass(frozen=True, kw_only=True)
class BalanceSettings(Settings):
    """How the rollouts are balanced."""

    balance: str = setting(
        "none", "How rollouts are balanced over the groups of --by.", choices=("none", "down", "over", "temperature")
    )
    by: Sequence[str] = setting(("task_type",), "Fields to balance by: task_type, difficulty, outcome.", metavar="A,B")
    balance_temperature: float = setting(
        0.5, "Exponent for --balance temperature: 1 keeps the shares, 0 makes them equal.", ge=0, le=1
    )
    most_copies: int = setting(3, "Maximum number of copies of a rollout, for --balance over.", ge=1)
    seed: int = setting(0, "Seed of the random number generators.", ge=0, le=LARGEST_SEED)

    @property
    def balanced(self) -> "Balance":
        from assay.traces.export.settings import Balance

        return Balance(
            method=self.balance,
            by=tuple(self.by),
            temperature=self.balance_temperature,
            most_copies=self.most_copies,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class RowSettings(Settings):
    """Content of the rows. `assay.traces.export.ExportConfig` checks which settings a kind of export uses."""

    privacy: str = setting(
        "auto",
        "Personal data to replace. patterns: e-mail addresses, numbers and the like; names: also names of people, "
        "which needs dspy-assay[privacy]; presidio: names by Presidio alone; auto: names if that extra is installed, "
        "otherwise patterns; off: none.",
        choices=_PRIVACY,
    )
    privacy_key: str | Path | None = setting(
        None,
        "Key file outside the export. With it the replacements are the same in every export, and can be reversed.",
        metavar="FILE",
    )
    licence: str = setting("not stated", "Licence of the data, written into the manifest.")
    min_quality: float = setting(0.8, "Minimum rating or score of a good rollout.", ge=0, le=1)
    whole: bool = setting(False, "Write one row per conversation, as messages, instead of one row per LM call.")
    model: str = setting(
        DEFAULT_WEIGHTS,
        "Model to train: a hub name, a folder, embedded/NAME or embedded:FILE. Its chat template renders the rows.",
        metavar="NAME",
    )
    tools: str = setting(
        "auto",
        "How tool calls are written. text: in the messages; native: as fields; auto: as text if the chat template "
        "ignores tools, otherwise as fields.",
        choices=("auto", "native", "text"),
    )
    demos: bool = setting(
        True,
        "Keep the demonstrations in the prompts of a compiled program.",
        flag="--without-demos",
        flag_help="Leave the demonstrations out of the prompts of a compiled program: the model learns to work without "
        "them.",
    )
    agents: Sequence[str] = setting(
        (),
        "Only LM calls of this agent, by the name that the program gave it; repeatable.",
        flag="--agent",
        many=True,
    )
    call: str = setting("last", "Which LM call of a rollout becomes a row.", choices=("last", "first", "all"))
    margin: float = setting(0.1, "Minimum difference between the returns of the two answers of a pair.", ge=0)
    unpaired: bool = setting(False, "Write rows for KTO: single completions with a label.")
    returns: str = setting(
        "to_go",
        "How the reward of a rollout is assigned to its LM calls.",
        choices=("to_go", "episode", "step", "uniform"),
    )
    discount: float = setting(1.0, "Discount factor of later rewards, per LM call.", ge=0, le=1)
    advantage: str = setting(
        "group",
        "Baseline of the returns: the mean of the group, or of the whole export (batch). With none, every advantage is "
        "0.",
        choices=("group", "batch", "none"),
    )
    group_by: str = setting(
        "group",
        "Group of rollouts. group: as collected; task: all rollouts of a task, of any run.",
        choices=("group", "task"),
    )
    by_outcome: bool = setting(False, "Compute advantages separately for good and other rollouts of a group.")
    step_weight: float = setting(1.0, "Weight of step rewards in the return.")
    outcome_weight: float = setting(1.0, "Weight of the outcome in the return.")
    outcome: str = setting(
        "human",
        "Outcome of a rollout. human: the human rating if there is one, otherwise the score; score: the score.",
        choices=("score", "human"),
    )


@dataclass(frozen=True, kw_only=True)
class ExportSettings(RowSettings, BalanceSettings, GateSettings, SelectionSettings):
    """Settings of `assay.export`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.privacy == "off" and self.privacy_key is not None:
            raise ConfigError(f"privacy_key={str(self.privacy_key)!r} would have no effect with privacy='off'")
        for name, methods in _OF_BALANCE.items():
            if self.balance not in methods and self.changed(name):
                raise ConfigError(
                    f"{name} would have no effect with balance={self.balance!r}: it requires balance="
                    f"{' or '.join(map(repr, methods))}"
                )

    def check_kind(self, kind: str) -> None:
        """Raises `ConfigError` where a setting is not one of this kind of export; an unknown kind passes."""
        own = OF_KIND.get(kind, settings_of(RowSettings))
        if unused := [name for name in self.changed(*settings_of(RowSettings)) if name not in own]:
            kinds = ", ".join(other for other, names in OF_KIND.items() if set(unused) <= set(names))
            raise ConfigError(
                f"{', '.join(unused)} would have no effect on kind={kind!r}" + (f", only on {kinds}" if kinds else "")
            )


_OF_EVERY_KIND = ("privacy", "privacy_key", "licence")
OF_KIND = {  # settings of the rows that a kind of export has
    "sft": (*_OF_EVERY_KIND, *_TARGET, "min_quality", "whole", "demos", "agents"),
    "grpo": (*_OF_EVERY_KIND, *_TARGET, "call"),
    "preferences": (*_OF_EVERY_KIND, *_TARGET, "min_quality", *_CREDIT, "margin", "unpaired", "agents"),
    "transitions": (*_OF_EVERY_KIND, "min_quality", *_CREDIT, "advantage", "by_outcome", "agents"),
}
_OF_BALANCE = {
    "by": ("down", "over", "temperature"),
    "balance_temperature": ("temperature",),
    "most_copies": ("over",),
}
