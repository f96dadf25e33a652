"""`assay export`: training data from the store, behind gates."""

from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from assay.commands.groups import InExistingStore, Reported, Trusting
from assay.errors import ConfigError
from assay.support.options import Flag, OneOf, Positive, Settings, function_of, options_of
from assay.traces.export.settings import (
    METHODS,
    Balance,
    Credited,
    ExportConfig,
    Gates,
    Gating,
    Protected,
    Rewarded,
    Selected,
    Selection,
    Target,
)

if TYPE_CHECKING:
    from assay.traces.export.pipeline import ExportReport
else:
    ExportReport = Any  # so that the types can be read without the heavy packages

_OF_BALANCE = {"by": ("down", "over", "temperature"), "most_copies": ("over",)}


class Selecting(Selected):
    """Selection of rollouts."""

    selection: Annotated[Selection | None, Flag(key=False, shown=False)] = None
    """An object in place of these settings."""

    @property
    def selected(self) -> Selection:
        given: Selection | None = _given(self, Selected, "selection", Selection)
        return given or Selection(**_values(self, Selected))


class Thresholds(Gating):
    """Gates: what the data must fulfil before anything is written."""

    gates: Annotated[Gates | None, Flag(key=False, shown=False)] = None
    """An object in place of these settings."""

    @property
    def thresholds(self) -> Gates:
        given: Gates | None = _given(self, Gating, "gates", Gates)
        return given or Gates(**_values(self, Gating))


class Balancing(Settings):
    """Balance."""

    balance: Annotated[str | Balance, OneOf(METHODS)] = "none"
    """How rollouts are balanced over the groups of `by`. In Python also an object in place of these settings."""
    by: Annotated[Sequence[str], Flag(metavar="A,B", commas=True)] = ("task_type",)
    """Fields to balance by: task_type, difficulty, outcome."""
    most_copies: Positive = 3
    """Maximum number of copies of a rollout, for `balance` over."""

    def check(self) -> None:
        for name, methods in _OF_BALANCE.items():
            if isinstance(self.balance, str) and self.balance not in methods and self.changed(name):
                raise ConfigError(
                    f"would have no effect with `balance` {self.balance!r}: it requires "
                    f"{' or '.join(map(repr, methods))}",
                    field=name,
                )

    @property
    def balanced(self) -> Balance:
        if not isinstance(self.balance, str):
            given: Balance = _given(self, Balancing, "balance", Balance)
            return given
        return Balance(method=self.balance, by=tuple(self.by), most_copies=self.most_copies)


def _given(settings: Settings, group: Any, name: str, kind: type[Any]) -> Any:
    """The object that is given in place of the settings of a group; None if there is none."""
    value = getattr(settings, name)
    if value is None:
        return None
    if not isinstance(value, kind):
        raise ConfigError(f"must be a {kind.__name__}, not {value!r}", field=name)
    if also := [key for key in settings.changed(*options_of(group)) if key != name]:
        raise ConfigError(f"sets the same fields as {', '.join(also)}: give one of them", field=name)
    return value


def _values(settings: Settings, group: Any) -> dict[str, Any]:
    """The settings of a group."""
    return {name: getattr(settings, name) for name in options_of(group)}


class OutOfStore(Trusting, Selecting, Thresholds, Balancing, Protected, InExistingStore, Reported):
    """Export."""

    out: Annotated[str | Path, Flag(metavar="DIR", key=False)]
    """Folder to write; it must not exist."""

    def check(self) -> None:
        if self.privacy == "off" and self.privacy_key is not None:
            raise ConfigError("would have no effect with `privacy` 'off'", field="privacy_key")

    def exported(self, kind: str, rubric: Any = None) -> "ExportReport":
        """Writes the rows of a kind."""
        from assay.jobs.export_rewards import ExportReward, notes_of
        from assay.jobs.loading import portable_rubric
        from assay.traces.export.pipeline import export_traces

        gates = self.thresholds
        if self.privacy == "off":  # an explicit choice, so the gate must not refuse it
            gates = replace(gates, privacy="off")
        parts = {"kind": kind, "selection": self.selected, "gates": gates, "balance": self.balanced}
        config = ExportConfig(
            **{name: getattr(self, name) for name in options_of(ExportConfig) if hasattr(self, name)} | parts
        )
        progress, reward = self.reporter, None if rubric is None else ExportReward(rubric)
        with self.opened() as store:
            report = export_traces(
                store, self.out, config,
                rubric=None if reward is None else portable_rubric(reward.source),
                check_reward=None if reward is None else reward.check,
                bar=lambda total: progress.bar(f"export {kind}", total),
            )  # fmt: skip
        return report if reward is None else replace(report, notes=notes_of(reward))


class ExportSFT(OutOfStore, Target, Rewarded):
    """Export prompts and completions of good rollouts, one row per LM call."""

    whole: bool = False
    """Write one row per conversation, as messages, instead of one row per LM call."""
    demos: Annotated[bool, Flag(name=" /--without-demos")] = True
    """Whether the demonstrations stay in the prompts of a compiled program. Without them the model learns to work
    without them."""

    def run(self) -> "ExportReport":
        return self.exported("sft")


class ExportGRPO(OutOfStore, Target):
    """Export prompts, the columns that the rubric reads, and the rubric as a reward module for plain `trl grpo`."""

    rubric: Annotated[Any, Flag(metavar="R", key=False)]
    """A rubric's name or YAML file, by which completions are scored."""
    call: Literal["last", "first", "all"] = "last"
    """Which LM call of a rollout becomes a row."""

    def run(self) -> "ExportReport":
        return self.exported("grpo", self.rubric)


class ExportPreferences(OutOfStore, Target, Credited):
    """Export pairs of answers to the same prompt, from groups, for DPO (or `unpaired` for KTO)."""

    margin: Annotated[float, Ge(0)] = 0.1
    """Minimum difference between the returns of the two answers of a pair."""
    unpaired: bool = False
    """Write rows for KTO: single completions with a label."""

    def run(self) -> "ExportReport":
        return self.exported("preferences")


class ExportTransitions(OutOfStore, Credited):
    """Export every LM call with token ids, logprobs, reward, return and advantage, as JSON lines and Parquet."""

    advantage: Literal["group", "batch", "none"] = "group"
    """Baseline of the returns: the mean of the group, or of the whole export (batch). With none, every advantage is
    0."""

    def run(self) -> "ExportReport":
        return self.exported("transitions")


_KINDS: dict[str, Any] = {
    "sft": ExportSFT, "grpo": ExportGRPO, "preferences": ExportPreferences, "transitions": ExportTransitions,
}  # fmt: skip


class _Named(Settings):
    kind: Literal["sft", "grpo", "preferences", "transitions"] = field(kw_only=False)
    out: str | Path = field(kw_only=False)


class Export(ExportSFT, ExportGRPO, ExportPreferences, ExportTransitions, _Named):
    """Exports training data of one `kind` from the store into the new folder `out`.

    Args:
        kind: `sft`, `grpo`, `preferences` or `transitions`.
        rubric: for `grpo`: name or file of the rubric that scores completions.
        selection, gates, balance: objects that replace the settings of the same parts.
    Raises:
        ConfigError: a setting that this kind of export has no use for.
        DataError: nothing fits, or a gate failed; nothing was written.
        StoreError: there is no store.
    """

    out: str | Path = field(kw_only=False)
    rubric: Any = None

    def check(self) -> None:
        own = options_of(_KINDS[self.kind])
        for name in self.changed(*options_of(Export)):
            if name not in own and name != "kind":
                kinds = ", ".join(kind for kind, known in _KINDS.items() if name in options_of(known))
                raise ConfigError(f"would have no effect on kind {self.kind!r}, only on {kinds}", field=name)
        if self.kind == "grpo" and self.rubric is None:
            raise ConfigError("is required by kind 'grpo': it scores the completions", field="rubric")

    def run(self) -> "ExportReport":
        return self.exported(self.kind, self.rubric)


export = function_of(Export, "export")
