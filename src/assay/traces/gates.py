"""What data must meet before it is handed to training, each gate reported with its figure.

The defaults are the field's numbers: 5,000 transitions, 95 % of them clean, anonymised, five task types.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from assay.errors import AssayError, ConfigError, DataError

__all__ = ["FAILED", "PATTERNS", "VERIFIED", "GateReport", "Gates", "UngatedExport", "refuse_ungated", "shown_value"]

VERIFIED = "verified"  # patterns and names were looked for, and a second reading found nothing more
PATTERNS = "patterns only"  # the same, but names were not looked for
FAILED = "failed"  # nothing was anonymised, or the second reading found something


class UngatedExport(AssayError, RuntimeError):
    """A gate failed, and nothing was written. `gates` has what each says."""

    def __init__(self, message: str, gates: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.gates = gates


_CURES = {  # by the reason for which rollouts were left out
    "of the gate or test split": "these are never exported; `assay collect` makes rollouts of train tasks",
    "whose inputs are those of a sealed task": "these are never exported; `assay collect` makes rollouts of train tasks",
    "still running": "`assay traces close` ends those that were left open",
    "ended by an error of the model or machinery": "run their tasks again once the model answers",
    "of a tenant that was not named": "tenants=… names it",
    "without any consent": "leave out require_consent=True",
    "without a person's rating": "leave out rated=True, or `assay traces rate`",
    "unscored": "`assay traces score RUBRIC` scores them",
    "without an outcome, or with a reward that is no finite number": "`assay traces score RUBRIC` scores them",
    "by the balance": "balance=… draws from them",
}


def refuse_ungated(manifest: Mapping[str, Any], *, drawn: int) -> None:
    """Raises where the manifest of an export has no rows (DataError) or a gate that stops it (UngatedExport).

    Args:
        drawn: rollouts of the runs, programs, task types and sources that were to be exported.
    """
    if not manifest["rows"]:
        raise DataError(f"there is nothing to export as {manifest['kind']}: {_why_nothing(manifest, drawn)}")
    failed = [gate for gate in manifest["gates"] if gate["enforced"] and not gate["passed"]]
    if failed:
        text = "; ".join(f"{gate['gate']} is {shown_value(gate['value'])}, required is {gate['required']}: {gate['missing']}" for gate in failed)
        raise UngatedExport(
            f"the data does not pass its gates, nothing was written. {text}. "
            "Correct the data, select other rollouts (runs, programs), or set another limit (min_clean, privacy)",
            manifest["gates"],
        )


def _why_nothing(manifest: Mapping[str, Any], drawn: int) -> str:
    """How many rollouts there were, why each part of them was left out, and what would include it."""
    if not drawn:
        return "no rollout of an agent was selected. `assay collect` makes some, and `assay traces list` shows what there is"
    parts = [f"{count} left out: {reason}{_cure(reason, manifest)}" for reason, count in manifest["left_out"].items()]
    parts += [f"{count} calls with a problem: {problem}" for problem, count in manifest["problems"].items()]
    parts += [f"{count} calls: {reason}" for reason, count in (manifest.get("template") or {}).get("reasons", {}).items()]
    if manifest["kind"] == "preferences" and manifest["rollouts"]:
        groups = f"{manifest['rollouts']} in {manifest['groups']} group{'s' if manifest['groups'] > 1 else ''}"
        parts.append(f"{groups}, without two answers to one prompt whose returns differ by the margin (a lower margin=…, or more rollouts a task)")
    return f"of {drawn} rollout{'s' if drawn > 1 else ''}: " + ("; ".join(parts) or "none has a call that makes a row")


def _cure(reason: str, manifest: Mapping[str, Any]) -> str:
    least = manifest["filters"].get("min_quality")
    cures = {**_CURES, **({f"below the quality of {least:g}": "a lower min_quality takes them"} if least is not None else {})}
    return f" ({cures[reason]})" if reason in cures else ""


def shown_value(value: Any) -> str:
    """A gate's value for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Gates:
    """Least values; 0 switches a gate off, and the manifest says so.

    Cleanliness and privacy stop an export that fails them. Volume and diversity warn, unless it is `gated`: what is enough data depends on
    what it is for.

    `privacy` is what anonymisation must have reached: `patterns` (personal data that has a form), `names` (names too), or `off`.
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


@dataclass
class GateReport:
    """Counts of what was read, and what the gates say of them."""

    gates: Gates
    transitions: int = 0
    problems: Counter[str] = field(default_factory=Counter)  # of transitions that are not clean, by why
    task_types: Counter[str] = field(default_factory=Counter)  # clean transitions of each
    runs: Counter[str] = field(default_factory=Counter)  # transitions that are not clean, by run
    verified: bool = False  # what was anonymised was read again and nothing more was found
    residual: int = 0  # findings of that second reading
    finds_names: bool = False  # whether names were looked for
    template: Mapping[str, Any] | None = None  # what the chat template of the model made of the calls; None where nothing is rendered

    def see(self, task_type: str, problem: str | None, run: str | None = None) -> None:
        """Counts one transition."""
        self.transitions += 1
        if problem is None:
            self.task_types[task_type] += 1
        else:
            self.problems[problem] += 1
            self.runs[run or "none"] += 1

    @property
    def clean(self) -> int:
        return self.transitions - sum(self.problems.values())

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Gates that stop the export."""
        return [gate for gate in self.to_list() if gate["enforced"] and not gate["passed"]]

    @property
    def passed(self) -> bool:
        return all(gate["passed"] for gate in self.to_list())

    def to_list(self) -> list[dict[str, Any]]:
        """One object a gate: `gate`, `passed`, `enforced`, `value`, `required`, and where it failed what is `missing`."""
        share = self.clean / self.transitions if self.transitions else 0.0
        least, kinds = self.gates.min_transitions, len(self.task_types)
        worst = ", ".join(f"{count} {why}" for why, count in self.problems.most_common())
        if len(self.runs) > 1:
            run, count = self.runs.most_common(1)[0]
            worst += f"; {count} of them in run {run}"
        wanted = self.gates.min_clean
        # n more clean ones make (clean + n) / (all + n) enough: n = (min·all - clean) / (1 - min), without rounding errors
        exact = Fraction(str(wanted))
        more = 0 if share >= wanted or wanted == 1 else math.ceil((exact * self.transitions - self.clean) / (1 - exact))
        return [
            _gate("transitions", self.clean, least, f"{least - self.clean} more clean transitions", enforced=self.gates.gated),
            _gate("clean", share, wanted, f"{worst or 'there are none'}" + (f"; {more} more clean transitions would do" if more else "")),
            _gate("task types", kinds, self.gates.min_task_types, f"{self.gates.min_task_types - kinds} more task types", enforced=self.gates.gated),
            self._privacy(),
            *([] if self.template is None else [_template_gate(self.template)]),
        ]  # fmt: skip

    @property
    def state(self) -> str:
        """What anonymisation reached: `VERIFIED`, `PATTERNS` or `FAILED`."""
        return FAILED if not self.verified else VERIFIED if self.finds_names else PATTERNS

    def _privacy(self) -> dict[str, Any]:
        state, wanted = self.state, self.gates.privacy
        gate: dict[str, Any] = {
            "gate": "privacy",
            "enforced": True,
            "value": state,
            "required": {"names": VERIFIED, "patterns": PATTERNS, "off": "nothing"}[str(wanted)],
        }
        gate["passed"] = wanted == "off" or state == VERIFIED or (state == PATTERNS and wanted == "patterns")
        if not gate["passed"]:
            gate["missing"] = self._missing(state)
        elif state == PATTERNS:
            gate["warning"] = "names were not looked for; install 'assay[privacy]' with a language model, or require it with --privacy names"
        return gate

    def _missing(self, state: str) -> str:
        if state == PATTERNS:
            return "names were not looked for; install 'assay[privacy]' with a language model"
        found = f"a second reading still found {self.residual} personal values" if self.residual else "nothing was anonymised"
        return f"{found}; export with --privacy auto"


def _template_gate(told: Mapping[str, Any]) -> dict[str, Any]:
    """Warns of calls that were not checked or not written. What was refused counts as not clean."""
    gate = {"gate": "template", "passed": True, "enforced": False, "value": "not checked", "required": "every answer is rendered"}
    if not told["found"]:
        return {**gate, "warning": f"{told['note']}; name a model as model whose tokenizer is here, or pull it"}
    gate["value"] = f"{told['calls']} calls, {told['converted']} with tools in text, {told['refused']} refused"
    reasons = "; ".join(f"{count}: {reason}" for reason, count in told["reasons"].items())
    return {**gate, **({"warning": f"left out {reasons}"} if reasons else {})}


def _gate(name: str, value: float, required: float, missing: str, *, enforced: bool = True) -> dict[str, Any]:
    passed = value >= required
    return {"gate": name, "passed": passed, "enforced": enforced, "value": value, "required": required, **({} if passed else {"missing": missing})}
