"""Settings of an export. Refuses settings that would have no effect."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from assay.errors import AssayError, ConfigError, DataError
from assay.models.roles import DEFAULT_WEIGHTS
from assay.support.numbers import counted
from assay.support.options import Flag, OneOf, Positive, Seed, Settings, Share
from assay.support.report import Report, ReportRepr, Table

# -- Selection.


class Selected(Settings):
    """Selection of rollouts."""

    runs: Annotated[Sequence[str], Flag(name="--run")] = ()
    """Only rollouts of this run; repeatable."""
    programs: Annotated[Sequence[str], Flag(name="--program")] = ()
    """Only rollouts of this program, by its full name as in assay traces list; repeatable."""
    task_types: Annotated[Sequence[str], Flag(name="--task-type")] = ()
    """Only rollouts of this task type; repeatable."""
    sources: Annotated[Sequence[str], Flag(name="--source")] = ()
    """Only rollouts of this source, such as program, gateway or otlp; repeatable."""
    tenants: Annotated[Sequence[str], Flag(name="--tenant")] = ()
    """Tenant whose rollouts are exported; repeatable. Rollouts of other tenants are left out."""
    require_consent: bool = False
    """Only rollouts with recorded consent."""
    rated: bool = False
    """Only rollouts with a human rating."""


class Selection(Selected):
    """Filter for rollouts. An empty list does not restrict.

    Exception: rollouts of a tenant are selected only if `tenants` contains it.
    """

    rollouts: Sequence[str] = ()
    """Ids of rollouts, at most a few thousand."""


# -- Balancing of an export by downsampling, oversampling or a temperature.
#
# A cell is a combination of task type, difficulty and outcome. Rollouts of a cell are sampled without replacement, in
# one pass and with a seed (selection sampling, Knuth, The Art of Computer Programming 2, 3.4.2, algorithm S). Only
# counts are kept in memory.


METHODS = ("none", "down", "over", "temperature")
BY = ("task_type", "difficulty", "outcome")
Cell = tuple[str, ...]


class Balance(Settings):
    """Balance of an export over its cells."""

    method: Annotated[str, OneOf(METHODS)] = "none"
    """down: every cell has the size of the smallest; over: rollouts are repeated up to the size of the largest cell;
    temperature: samples in proportion to n^temperature without repetition."""
    by: Sequence[str] = ("task_type",)
    """Properties that define a cell: any of task_type, difficulty, outcome."""
    most_copies: Positive = 3
    """Maximum number of copies of a rollout with `over`."""
    temperature: Share = 0.5
    """1 keeps the proportions, 0 makes the cells equal."""
    seed: Seed = 0

    def check(self) -> None:
        if not self.by or set(self.by) - set(BY):
            raise ConfigError(f"must be one or more of {', '.join(BY)}, not {list(self.by)}", field="by")


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
    "of a tenant that was not selected": "select it with `tenants=…`",
    "without any consent": "leave out `require_consent=True`",
    "without a human rating": "leave out `rated=True`, or rate with `assay traces rate`",
    "unscored": "`assay traces score --rubric R` scores them",
    "without an outcome or with a non-finite reward": "`assay traces score --rubric R` scores them",
    "by balancing": "change `balance=…`",
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
        raise DataError(f"no rows for {manifest['kind']}: {_why_nothing(manifest, drawn)}")
    failed = [
        f"{g['gate']} is {format_value(g['value'])}, required is {format_value(g['required'])}: {g['missing']}"
        for g in manifest["gates"]
        if g["enforced"] and not g["passed"]
    ]
    if failed:
        raise UngatedExport(
            f"the data does not pass the gates; nothing was written. {'; '.join(failed)}. "
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
    refused = (manifest.get("template") or {}).get("reasons", {})
    parts += [f"{count} calls: {reason}" for reason, count in refused.items()]
    if manifest["kind"] == "preferences" and manifest["rollouts"]:
        alone = manifest["groups"] == manifest["rollouts"]
        groups = f"{manifest['rollouts']} in {counted(manifest['groups'], 'groups')}"
        cure = "lower `margin=…`, or collect more rollouts per task"
        if alone and manifest["config"]["group_by"] != "task":
            cure = "give rollouts of one task the same inputs or task_id; `group_by='task'` pairs all runs"
        elif alone:
            cure = "collect more rollouts per task: rollouts of one task have the same inputs or task_id"
        parts.append(f"{groups}, without two answers to the same prompt whose returns differ by the margin ({cure})")
    return f"{counted(drawn, 'rollouts')}; " + ("; ".join(parts) or "none has a call that makes a row")


def _cure(reason: str, manifest: Mapping[str, Any]) -> str:
    least = manifest["filters"].get("min_quality")
    cures = {
        **_CURES,
        **({f"below the quality of {least:g}": "a lower `min_quality` includes them"} if least is not None else {}),
    }
    return f" ({cures[reason]})" if reason in cures else ""


def format_value(value: Any) -> str:
    """Display form of a gate's value: shares with four significant digits, counts with separators of thousands."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


class Gating(Settings):
    """Gates: what the data must fulfil before anything is written."""

    min_clean: Share = 0.95
    """Gate: minimum share of clean transitions."""
    gated: bool = False
    """Enforce all gates. By default fewer than 5,000 transitions or 5 task types only cause a warning."""


class Gates(Gating):
    """Thresholds of the gates. The manifest records a gate that is turned off.

    `min_clean` and `privacy` are always enforced. `min_transitions` and `min_task_types` only warn unless `gated` is
    set, because the amount of data needed depends on its purpose.
    """

    min_transitions: Annotated[int, Ge(0)] = 5000
    """Minimum number of transitions; 0 turns it off."""
    min_task_types: Annotated[int, Ge(0)] = 5
    """Minimum number of task types; 0 turns it off."""
    privacy: Annotated[str, OneOf(("patterns", "names", "off"))] = "patterns"
    """Required anonymization. patterns: what the detectors find is replaced; names (`verified`): planted values, names
    among them, are found in every language of the rows."""


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
        words = {True: "passed", False: "failed"}
        return [("all_passed", str(self.passed))] + [
            (g["gate"], f"{words[g['passed']]}: {format_value(g['value'])}, required {format_value(g['required'])}")
            for g in self.to_list()
        ]

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
        gates, clean, task_types = self.gates, self.clean, len(self.task_types)
        share = clean / self.transitions if self.transitions else 0.0
        worst = ", ".join(f"{count:,} {why}" for why, count in self.problems.most_common()) or "there are none"
        if len(self.runs) > 1:
            run, count = self.runs.most_common(1)[0]
            worst += f"; {count:,} of them in run {run}"
        if self.transitions and share < gates.min_clean < 1:
            # n more clean ones make (clean + n) / (all + n) enough: n = (min·all - clean) / (1 - min), without rounding
            # errors
            least = Fraction(str(gates.min_clean))
            worst += (
                f"; {math.ceil((least * self.transitions - clean) / (1 - least)):,} more clean transitions would do"
            )
        few, kinds = f"{gates.min_transitions - clean:,} more clean transitions", gates.min_task_types - task_types
        return [
            _gate(
                "transitions", clean, gates.min_transitions, passed=clean >= gates.min_transitions,
                enforced=gates.gated, missing=few,
            ),
            _gate("clean", share, gates.min_clean, passed=share >= gates.min_clean, missing=worst),
            _gate(
                "task types", task_types, gates.min_task_types, passed=kinds <= 0, enforced=gates.gated,
                missing=f"{kinds} more task types",
            ),
            self._privacy(),
            *([] if self.template is None else [_template_gate(self.template)]),
        ]  # fmt: skip

    def _privacy(self) -> dict[str, Any]:
        state, required = self.state, self.gates.privacy
        texts = {"names": VERIFIED, "patterns": PATTERNS, "off": "nothing"}
        passed = required == "off" or state == VERIFIED or (state == PATTERNS and required == "patterns")
        missing = self.missing + ("; export with `privacy='auto'`" if state in (FAILED, OFF) else "")
        warning = {"warning": self.missing} if passed and state == PATTERNS else {}
        return _gate("privacy", state, texts[required], passed=passed, enforced=True, missing=missing, **warning)


def _template_gate(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Warning about calls that were not checked or were refused, which also count as not clean.

    Fails where whole conversations cannot be trained on.
    """
    value, required, more = "not checked", "every answer is rendered", dict[str, str]()
    if not counts["found"]:
        more["warning"] = (
            f"{counts['note']}; set `model=…` to a model whose tokenizer is installed, or download it with "
            f"`assay models pull`"
        )
    elif counts["masks"] is False:
        value, required = "no generation marks", "marks around the assistant's text"
        more["missing"] = (
            f"TRL trains on the assistant's text of whole conversations by `{{% generation %}}` marks. The chat "
            f"template of {counts['model']} has none, and TRL has no copy of it with marks. Export "
            "one row per call (without `whole=True`), or add marks to the template in the model's folder"
        )
    else:
        value = f"{counts['calls']} calls, {counts['converted']} with tools in text, {counts['refused']} refused"
        reasons = "; ".join(f"{count}: {reason}" for reason, count in counts["reasons"].items())
        more |= {"warning": f"left out {reasons}"} if reasons else {}
    return _gate("template", value, required, passed="missing" not in more, enforced="missing" in more, **more)


def _gate(name: str, value: Any, required: Any, *, passed: bool, enforced: bool = True, **more: str) -> dict[str, Any]:
    """A gate; `missing` is left out if it passed."""
    shown = {key: text for key, text in more.items() if not (passed and key == "missing")}
    return {"gate": name, "passed": passed, "enforced": enforced, "value": value, "required": required, **shown}


# -- Settings.


KINDS = ("sft", "grpo", "preferences", "transitions")


class Target(Settings):
    """Model to be trained."""

    model: Annotated[str, Flag(metavar="NAME")] = DEFAULT_WEIGHTS
    """Model to train: a hub name, a folder, embedded/NAME or embedded:FILE. Its chat template renders the rows."""
    tools: Literal["auto", "native", "text"] = "auto"
    """How tool calls are written. text: in the messages; native: as fields; auto: as text if the chat template ignores
    tools, otherwise as fields."""


class Rewarded(Settings):
    """Good rollouts."""

    min_quality: Share = 0.8
    """Minimum rating or score of a good rollout."""
    agents: Annotated[Sequence[str], Flag(name="--only-agent")] = ()
    """Only LM calls of this agent, by the name that the program gave it; repeatable."""


class Credited(Rewarded):
    """Rewards of LM calls."""

    returns: Literal["to_go", "episode", "step", "uniform"] = "to_go"
    """How the reward of a rollout is assigned to its LM calls."""
    discount: Share = 1.0
    """Discount factor of later rewards, per LM call."""
    group_by: Literal["group", "task"] = "group"
    """Group of rollouts. group: as collected; task: all rollouts of a task, of any run."""
    step_weight: float = 1.0
    """Weight of step rewards in the return."""
    outcome: Literal["human", "score"] = "human"
    """Outcome of a rollout. human: the human rating if there is one, otherwise the score; score: the score."""

    def check(self) -> None:
        if self.discount != 1 and self.returns != "to_go":
            raise ConfigError(
                f"would have no effect with `returns` {self.returns!r}: it requires 'to_go'", field="discount"
            )


class Protected(Settings):
    """Export."""

    privacy: Literal["auto", "patterns", "names", "presidio", "off"] = "auto"
    """Personal data to replace. patterns: e-mail addresses, numbers and the like; names: also names of people, which
    needs dspy-assay[privacy]; presidio: names by Presidio alone; auto: names if that extra is installed, otherwise
    patterns; off: none."""
    privacy_key: Annotated[str | Path | None, Flag(metavar="FILE")] = None
    """Key file outside the export. With it the replacements are the same in every export, and can be reversed."""


class ExportConfig(Target, Credited, Protected):
    """Settings of an export. Those that are not described here are options of `assay export`."""

    kind: Annotated[str, OneOf(KINDS)]
    selection: Selection = field(default_factory=Selection)
    gates: Gates = field(default_factory=Gates)
    balance: Balance = field(default_factory=Balance)
    whole: bool = False
    demos: bool = True
    call: Literal["last", "first", "all"] = "last"
    margin: Annotated[float, Ge(0)] = 0.1
    unpaired: bool = False
    advantage: Literal["group", "batch", "none"] = "group"

    def check(self) -> None:
        if not self.demos and (self.whole or self.kind != "sft"):
            raise ConfigError(
                "`demos=False` requires `kind='sft'` and `whole=False`: other rows have no demonstrations to leave out"
            )
        if self.agents and (self.whole or self.kind == "grpo"):
            raise ConfigError(
                f"`agents={self.agents!r}` requires rows of one call each, and not `kind='grpo'` or `whole=True`, "
                "whose rows have whole rollouts"
            )
        if self.kind == "transitions" and (self.model, self.tools) != (DEFAULT_WEIGHTS, "auto"):
            raise ConfigError(
                "`model=…` and `tools=…` have no effect on `kind='transitions'`: its rows have the exact requests "
                "and token ids"
            )
        if self.balance.method == "over" and self.kind in ("grpo", "preferences"):
            raise ConfigError(
                f"`balance='over'` repeats rollouts, but {self.kind} keeps distinct rows; use 'down' or 'temperature'"
            )
