"""Settings of an export. Refuses settings that would have no effect."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from assay.errors import AssayError, ConfigError, DataError
from assay.models.defaults import DEFAULT_WEIGHTS
from assay.support.numbers import counted
from assay.support.report import Report, Table
from assay.support.reprs import ReportRepr
from assay.support.settings import one_of
from assay.traces.credit import RETURNS, returns
from assay.traces.export.rendering import TOOL_FORMS
from assay.traces.export.selection import Selection

# -- Balancing of an export by downsampling, oversampling or a temperature.
#
# A cell is a combination of task type, difficulty and outcome. Rollouts of a cell are sampled without replacement, in
# one pass and with a seed (selection sampling, Knuth, The Art of Computer Programming 2, 3.4.2, algorithm S). Only
# counts are kept in memory.


METHODS = ("none", "down", "over", "temperature")
BY = ("task_type", "difficulty", "outcome")
Cell = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Settings of the balancing.

    Args:
        method: `none`; `down` reduces every cell to the size of the smallest; `over` repeats rollouts up to the size
            of the largest cell; `temperature` samples in proportion to n^temperature without repetition.
        by: Properties that define a cell: any of `task_type`, `difficulty`, `outcome`.
        most_copies: Maximum number of copies of a rollout with `over`.
        temperature: Exponent in [0, 1]: 1 keeps the proportions, 0 makes the cells equal.
        seed: Seed of the sampling.
    """

    method: str = "none"
    by: tuple[str, ...] = ("task_type",)
    most_copies: int = 3
    temperature: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"balance={self.method!r} {one_of(self.method, METHODS)}")
        if not self.by or (unknown := sorted(set(self.by) - set(BY))):
            raise ConfigError(f"by={list(self.by) if not self.by else unknown} must be one or more of {', '.join(BY)}")
        if self.most_copies < 1:
            raise ConfigError(f"most_copies={self.most_copies!r} must be at least 1")
        if not 0 <= self.temperature <= 1:
            raise ConfigError(f"temperature={self.temperature!r} of the balance must be between 0 and 1")


def targets(counts: Mapping[Cell, int], balance: Balance) -> dict[Cell, int]:
    """Number of rollouts in each cell after balancing, copies included.

    Args:
        counts: Number of rollouts in each cell before balancing.
    """
    nonempty = {cell: count for cell, count in counts.items() if count > 0}
    if not nonempty or balance.method == "none":
        return nonempty
    if balance.method == "down":
        return dict.fromkeys(nonempty, min(nonempty.values()))
    if balance.method == "over":
        return {cell: min(max(nonempty.values()), balance.most_copies * count) for cell, count in nonempty.items()}
    shares = {cell: count**balance.temperature for cell, count in nonempty.items()}
    scale = min(nonempty[cell] / share for cell, share in shares.items())
    return {cell: min(nonempty[cell], max(1, round(scale * share))) for cell, share in shares.items()}


class Sampler:
    """Decides for one rollout at a time how many copies are exported. The totals are exactly `targets`.

    Args:
        counts: Number of rollouts in each cell that will be passed to `take`.
    """

    def __init__(self, counts: Mapping[Cell, int], balance: Balance) -> None:
        self.before, self.after = dict(counts), Counter[Cell]()
        self._ahead, self._rng = dict(counts), random.Random(balance.seed)
        self._quotas = {cell: divmod(target, counts[cell]) for cell, target in targets(counts, balance).items()}
        self._extra = {cell: extra for cell, (_, extra) in self._quotas.items()}

    def take(self, cell: Cell) -> int:
        """Number of copies of the next rollout of a cell.

        Returns:
            0 if the rollout is left out, also if the cell has had all its counted rollouts.
        """
        remaining = self._ahead.get(cell, 0)
        if not remaining:
            return 0
        self._ahead[cell] = remaining - 1
        copies = self._quotas[cell][0]
        if self._rng.random() * remaining < self._extra[cell]:
            self._extra[cell] -= 1
            copies += 1
        self.after[cell] += copies
        return copies


# -- Gates of an export: thresholds that the data must reach, each reported with its value.
#
# Defaults: 5,000 transitions, 95 % of them clean, five task types, anonymized.


VERIFIED = "verified"  # as `patterns only`, and planted values show the required recall by type and language
PATTERNS = "patterns only"  # what the detectors found was replaced; what they do not find was not shown to be absent
FAILED = "failed"  # the second pass found personal values, or there were no rows
OFF = "off"  # nothing was anonymized, which `privacy="off"` requires


class UngatedExport(AssayError, RuntimeError):
    """A gate failed and nothing was written. `gates` has the result of every gate."""

    def __init__(self, message: str, gates: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.gates, self.report = gates, RefusedExport(gates=gates)


@dataclass(frozen=True, kw_only=True, repr=False)
class RefusedExport(Report):
    """An export that was not written.

    Attributes:
        path: None.
        rows: rows that were written: none.
        gates: the result of every gate.
    """

    path: None = None
    rows: int = 0
    gates: list[dict[str, Any]]

    def lines(self) -> Iterator[str | Table]:
        yield gates_table(self.gates)


def gates_table(gates: Sequence[Mapping[str, Any]]) -> Table:
    """The gates with their values, as a table."""
    rows = [(g["gate"], format_value(g["value"]), format_value(g["required"]), _gate_text(g)) for g in gates]
    return Table(title="gates", header=("gate", "value", "required", ""), rows=rows)


def _gate_text(gate: Mapping[str, Any]) -> str:
    if not gate["passed"]:
        return f"{'FAILED' if gate['enforced'] else 'WARNING'}: {gate['missing']}"
    return f"passed; WARNING: {gate['warning']}" if gate.get("warning") else "passed"


_CURES = {  # advice by exclusion reason
    "of the gate or test split": "these are never exported; `assay collect` makes rollouts of train tasks",
    "with the inputs of a sealed task": "inputs with this hash are in the gate or test split; record other inputs",
    "still running": "`assay traces close` ends open rollouts",
    "ended by an error of the model or the infrastructure": "run the tasks again when the model is available",
    "of a tenant that was not selected": "select it with tenants=…",
    "without any consent": "leave out require_consent=True",
    "without a human rating": "leave out rated=True, or rate with `assay traces rate`",
    "unscored": "`assay traces score --rubric R` scores them",
    "without an outcome or with a non-finite reward": "`assay traces score --rubric R` scores them",
    "by balancing": "change balance=…",
}


def refuse_ungated(manifest: Mapping[str, Any], *, drawn: int) -> None:
    """Refuse an export without rows or with a failed enforced gate.

    Args:
        manifest: Manifest of the export.
        drawn: Number of rollouts in the selected runs, programs, task types and sources.
    Raises:
        DataError: There are no rows; the message has the number of excluded rollouts by reason.
        UngatedExport: An enforced gate failed.
    """
    if not manifest["rows"]:
        raise DataError(f"there is nothing to export as {manifest['kind']}: {_why_nothing(manifest, drawn)}")
    failed = [gate for gate in manifest["gates"] if gate["enforced"] and not gate["passed"]]
    if failed:
        text = "; ".join(
            f"{gate['gate']} is {format_value(gate['value'])}, required is {format_value(gate['required'])}: "
            f"{gate['missing']}"
            for gate in failed
        )
        raise UngatedExport(
            f"the data does not pass the gates; nothing was written. {text}. "
            "Correct the data, select other rollouts (`runs`, `programs`), or change a threshold (`min_clean`, "
            "`privacy`)",
            manifest["gates"],
        )


def _why_nothing(manifest: Mapping[str, Any], drawn: int) -> str:
    """Number of rollouts, the reasons for their exclusion, and how to include them."""
    if not drawn:
        return (
            "no rollout of an agent was selected. Record some with `assay collect`; `assay traces list` shows the "
            "existing ones"
        )
    parts = [f"{count} left out: {reason}{_cure(reason, manifest)}" for reason, count in manifest["left_out"].items()]
    parts += [f"{count} calls with a problem: {problem}" for problem, count in manifest["problems"].items()]
    parts += [
        f"{count} calls: {reason}" for reason, count in (manifest.get("template") or {}).get("reasons", {}).items()
    ]
    if manifest["kind"] == "preferences" and manifest["rollouts"]:
        groups = f"{manifest['rollouts']} in {counted(manifest['groups'], 'groups')}"
        parts.append(
            f"{groups}, without two answers to the same prompt whose returns differ by the margin (lower margin=…, or "
            f"collect more rollouts per task)"
        )
    return f"of {counted(drawn, 'rollouts')}: " + ("; ".join(parts) or "none has a call that makes a row")


def _cure(reason: str, manifest: Mapping[str, Any]) -> str:
    least = manifest["filters"].get("min_quality")
    cures = {
        **_CURES,
        **({f"below the quality of {least:g}": "a lower min_quality includes them"} if least is not None else {}),
    }
    return f" ({cures[reason]})" if reason in cures else ""


def format_value(value: Any) -> str:
    """Display form of a gate's value: shares with four significant digits, counts with separators of thousands."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, kw_only=True)
class Gates:
    """Thresholds of the gates. 0 disables a gate; the manifest records it.

    `min_clean` and `privacy` are always enforced. `min_transitions` and `min_task_types` only warn unless `gated` is
    set, because the amount of data needed depends on its purpose.

    Args:
        min_transitions: Minimum number of clean transitions.
        min_clean: Minimum share of clean transitions, in [0, 1].
        min_task_types: Minimum number of task types with clean transitions.
        privacy: Required anonymization: `patterns` (what the detectors find is replaced), `names` (`verified`: planted
            values, names among them, are found in every language of the rows) or `off`.
        gated: Enforce all gates.
    """

    min_transitions: int = 5000
    min_clean: float = 0.95
    min_task_types: int = 5
    privacy: str | bool = "patterns"
    gated: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.min_clean <= 1:
            raise ConfigError(f"min_clean={self.min_clean!r} must be between 0 and 1")
        if self.min_transitions < 0 or self.min_task_types < 0:
            raise ConfigError("min_transitions and min_task_types must be at least 0")
        if isinstance(self.privacy, bool):
            object.__setattr__(self, "privacy", "patterns" if self.privacy else "off")
        if self.privacy not in ("patterns", "names", "off"):
            raise ConfigError(f"privacy={self.privacy!r} must be patterns, names or off")


@dataclass(repr=False)
class GateReport(ReportRepr):
    """Counts of the transitions read, and the result of each gate."""

    gates: Gates
    transitions: int = 0
    problems: Counter[str] = field(default_factory=Counter)  # transitions that are not clean, by problem
    task_types: Counter[str] = field(default_factory=Counter)  # clean transitions by task type
    runs: Counter[str] = field(default_factory=Counter)  # transitions that are not clean, by run
    state: str = FAILED  # of the anonymization: `VERIFIED`, `PATTERNS`, `FAILED` or `OFF`
    missing: str = "nothing was anonymized"  # why the state is not `VERIFIED`
    template: Mapping[str, Any] | None = None  # `Target.to_dict()`; None if nothing is rendered

    def see(self, task_type: str, problem: str | None, run: str | None = None) -> None:
        """Count one transition.

        Args:
            problem: Why it is not clean; None if it is clean.
        """
        self.transitions += 1
        if problem is None:
            self.task_types[task_type] += 1
        else:
            self.problems[problem] += 1
            self.runs[run or "none"] += 1

    def _facts(self) -> list[tuple[str, str]]:
        facts = [("all_passed", str(self.passed))]
        for gate in self.to_list():
            word = "passed" if gate["passed"] else "failed"
            facts.append(
                (gate["gate"], f"{word}: {format_value(gate['value'])}, required {format_value(gate['required'])}")
            )
        return facts

    @property
    def clean(self) -> int:
        return self.transitions - sum(self.problems.values())

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Enforced gates that failed; they stop the export."""
        return [gate for gate in self.to_list() if gate["enforced"] and not gate["passed"]]

    @property
    def passed(self) -> bool:
        return all(gate["passed"] for gate in self.to_list())

    def to_list(self) -> list[dict[str, Any]]:
        """One object per gate: `gate`, `passed`, `enforced`, `value`, `required`, and `missing` if it failed."""
        share = self.clean / self.transitions if self.transitions else 0.0
        least, task_types = self.gates.min_transitions, len(self.task_types)
        worst = ", ".join(f"{count:,} {why}" for why, count in self.problems.most_common())
        if len(self.runs) > 1:
            run, count = self.runs.most_common(1)[0]
            worst += f"; {count:,} of them in run {run}"
        required = self.gates.min_clean
        # n more clean ones make (clean + n) / (all + n) enough: n = (min·all - clean) / (1 - min), without rounding
        # errors
        exact_min = Fraction(str(required))
        more = (
            0
            if share >= required or required == 1
            else math.ceil((exact_min * self.transitions - self.clean) / (1 - exact_min))
        )
        return [
            _gate(
                "transitions",
                self.clean,
                least,
                f"{least - self.clean:,} more clean transitions",
                enforced=self.gates.gated,
            ),
            _gate(
                "clean",
                share,
                required,
                f"{worst or 'there are none'}" + (f"; {more:,} more clean transitions would do" if more else ""),
            ),
            _gate(
                "task types",
                task_types,
                self.gates.min_task_types,
                f"{self.gates.min_task_types - task_types} more task types",
                enforced=self.gates.gated,
            ),
            self._privacy(),
            *([] if self.template is None else [_template_gate(self.template)]),
        ]

    def _privacy(self) -> dict[str, Any]:
        state, required = self.state, self.gates.privacy
        gate: dict[str, Any] = {
            "gate": "privacy",
            "enforced": True,
            "value": state,
            "required": {"names": VERIFIED, "patterns": PATTERNS, "off": "nothing"}[str(required)],
        }
        gate["passed"] = required == "off" or state == VERIFIED or (state == PATTERNS and required == "patterns")
        if not gate["passed"]:
            gate["missing"] = self.missing + ("; export with privacy='auto'" if state in (FAILED, OFF) else "")
        elif state == PATTERNS:
            gate["warning"] = self.missing
        return gate


def _template_gate(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Warning about calls that were not checked or were refused, which also count as not clean.

    Fails where whole conversations cannot be trained on.
    """
    gate = {
        "gate": "template",
        "passed": True,
        "enforced": False,
        "value": "not checked",
        "required": "every answer is rendered",
    }
    if not counts["found"]:
        return {
            **gate,
            "warning": (
                f"{counts['note']}; set model=… to a model whose tokenizer is installed, or download it with "
                f"`assay models pull`"
            ),
        }
    if counts["masks"] is False:
        return {
            **gate,
            "passed": False,
            "enforced": True,
            "value": "no generation marks",
            "required": "marks around the assistant's text",
            "missing": (
                f"TRL trains on the assistant's text of whole conversations by `{{% generation %}}` marks. The chat "
                f"template of {counts['model']} has none, and TRL has no copy of it with marks. Export "
                "one row per call (without whole=True), or add marks to the template in the model's folder"
            ),
        }
    gate["value"] = f"{counts['calls']} calls, {counts['converted']} with tools in text, {counts['refused']} refused"
    reasons = "; ".join(f"{count}: {reason}" for reason, count in counts["reasons"].items())
    return {**gate, **({"warning": f"left out {reasons}"} if reasons else {})}


def _gate(name: str, value: float, required: float, missing: str, *, enforced: bool = True) -> dict[str, Any]:
    passed = value >= required
    return {
        "gate": name,
        "passed": passed,
        "enforced": enforced,
        "value": value,
        "required": required,
        **({} if passed else {"missing": missing}),
    }


# -- Settings.


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
