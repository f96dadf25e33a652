"""How many tasks gate and test take, and the part of a job's caps that is kept for them while it searches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import dspy

from assay.datasets import Splits, Task
from assay.errors import ConfigError
from assay.models import Meter
from assay.models.meter import Usage
from assay.optimizers.estimate import calls_per_run
from assay.optimizers.evaluation import Evaluation
from assay.optimizers.sequential import POWER, WORST_SPREAD, detectable_difference, tasks_needed
from assay.optimizers.session import Progress, Session

__all__ = [
    "FEWEST",
    "Decisions",
    "ReportPlan",
    "announce_splits",
    "decision_tasks",
    "forecast_pair",
    "pair_of",
    "plan_report",
    "too_few_to_score",
    "too_small",
]

FEWEST = 5  # pairs under which no interval is claimed, see `assay.optimizers.statistics`
_LEAST = 20  # tasks of gate and of test, whatever the difference that they are to show
_SEARCH = 0.5  # share of a cap that the search has at least
_GROWTH = 1.5  # prompts grow by demonstrations and instructions


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """How gate and test decide.

    Args:
        difference: of mean scores, in (0, 1]: the smallest gain that they are to show. They take as many tasks as that needs, and a split's
            size that was set is taken whole.
        early_stop: they end once they have decided.
        sized: the splits whose size was set.
        gate: gate decides; without it the winner on val is the result.
        test: the test split is opened at the end.
    """

    difference: float = 0.1
    early_stop: bool = True
    sized: frozenset[str] = frozenset()
    gate: bool = True
    test: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.difference <= 1:
            raise ConfigError(f"difference={self.difference!r} must be above 0 and at most 1: the smallest gain in mean score that is to be shown")


@dataclass(frozen=True, kw_only=True)
class ReportPlan:
    """Tasks of gate and test, and what a pair of runs (the program before and after) takes of the caps; `gates` of them come, each as large."""

    gate: int
    test: int
    pair: Usage
    capped: bool = False
    tested: bool = True
    gates: int = 1

    @property
    def short(self) -> str | None:
        """Says so where the caps leave too few tasks for a decision."""
        if not self.capped or min(self.gate, self.test if self.tested else FEWEST) >= FEWEST:
            return None
        test = f" and {self.test} for test" if self.tested else ""
        return f"the caps leave {self.gate} tasks for gate{test}, and a decision needs {FEWEST}{' of each' if test else ''}"

    @property
    def shows(self) -> str:
        """The gain that the gate can show with its size."""
        if self.gate < FEWEST:
            return f"gate: {self.gate} tasks, too few to show any gain"
        return f"gate: up to {self.gate} tasks, which show a gain of {detectable_difference(self.gate):.2f} or more with {POWER:.0%} power"

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ReportPlan":
        """From its fields as JSON has them."""
        return cls(**{**fields, "pair": Usage(**fields["pair"])})

    @property
    def usage(self) -> dict[str, Usage]:
        """What a gate and test will take."""
        return {"gate": _times(self.pair, self.gate), "test": _times(self.pair, self.test)}

    def hold(self, meter: Meter) -> None:
        """Keeps what gate and test will take."""
        meter.hold(**self.usage)

    def within(self, meter: Meter, *, searching: bool = False) -> "ReportPlan":
        """As many of these tasks as the caps allow; see `plan_report`."""
        wanted, fitting = self.gates * self.gate + self.test, _fitting(meter, self.pair, searching)
        gate = self.gate if fitting >= wanted else min(self.gate, int(fitting) // (self.gates + self.tested))
        test = min(self.test, int(min(fitting, 10**9)) - self.gates * gate)
        return replace(self, gate=gate, test=test, capped=fitting < wanted)


def plan_report(
    splits: Splits, meter: Meter, decisions: Decisions, *, pair: Usage, spread: float = WORST_SPREAD, searching: bool = False
) -> ReportPlan:  # fmt: skip
    """As many tasks as the difference needs, the splits have and the caps allow.

    Args:
        pair: what a pair of runs is expected to take.
        spread: standard deviation of the paired differences, as far as it is known.
        searching: the search is still to come, and has half of each cap at least; of the calls no more than its own cap.
    """
    sizes, needed = splits.sizes(), max(_LEAST, tasks_needed(decisions.difference, spread=spread))
    wanted = {name: sizes[name] if name in decisions.sized else min(sizes[name], needed) for name in ("gate", "test")}
    wanted["gate"] *= decisions.gate
    wanted["test"] *= decisions.test
    whole = ReportPlan(gate=wanted["gate"], test=wanted["test"], pair=pair, tested=decisions.test)
    return whole.within(meter, searching=searching)


def decision_tasks(splits: Splits, split: str, decisions: Decisions) -> list[Task]:
    """The tasks of a split that a decision takes: as many as the difference needs, or all where the split's size was set."""
    tasks: list[Task] = getattr(splits, split)
    return tasks if split in decisions.sized else tasks[: max(_LEAST, tasks_needed(decisions.difference))]


def _fitting(meter: Meter, pair: Usage, searching: bool) -> float:
    """Pairs of runs that the caps allow after what was searched; what gate and test have spent already, before a kill, is theirs."""
    caps, tried, searched = meter.caps, meter.of("preflight"), meter.of("search")
    done, room = [tried, searched], math.inf
    few = math.inf if caps.search_calls is None else float(caps.search_calls + tried.calls)  # the search takes no more of the calls
    for cap, spent, each, most in (
        (caps.calls, sum(part.calls for part in done), pair.calls, few),
        (caps.tokens, sum(part.tokens for part in done), pair.tokens, math.inf),
        (caps.cost_usd, sum(part.cost_usd for part in done), pair.cost_usd, math.inf),
    ):
        if cap is not None and each > 0:
            room = min(room, (cap - min(cap * _SEARCH, most) if searching else max(0.0, cap - spent)) // each)
    return room


def forecast_pair(program: dspy.Module, session: Session, *, cost_per_call: float = 0.0) -> Usage:
    """What a pair of runs will take, before the search: by the preflight, or by the program's form."""
    measured, judges = session.measured, sum(c.judge is not None for c in session.rubric.finals)
    calls = max(calls_per_run(program), measured.calls if measured else 0.0) + (measured.judge_calls if measured else judges)
    tokens = calls * ((measured.tokens if measured else None) or 300.0) * _GROWTH
    return Usage(calls=math.ceil(2 * calls), prompt_tokens=math.ceil(2 * tokens), cost_usd=2 * calls * cost_per_call * _GROWTH)


def pair_of(before: Evaluation, after: Evaluation, session: Session) -> Usage:
    """What a pair of runs took on val; the judges' calls as the preflight counted them."""
    measured, judges = session.measured, sum(c.judge is not None for c in session.rubric.finals)
    judged = 2 * (measured.judge_calls if measured else judges)
    calls, tokens, cost = (sum(_mean(getattr(side, name)) for side in (before, after)) for name in ("calls", "tokens", "cost_usd"))
    share = 1 + judged / calls if calls else 1.0
    return Usage(calls=math.ceil(calls + judged), prompt_tokens=math.ceil(tokens * share), cost_usd=cost * share)


def _mean(values: dict[str, float]) -> float:
    return math.fsum(values.values()) / len(values) if values else 0.0


def _times(usage: Usage, count: int) -> Usage:
    return Usage(calls=usage.calls * count, prompt_tokens=usage.tokens * count, cost_usd=usage.cost_usd * count)


def too_small(sizes: dict[str, int], *, of: tuple[str, ...] = ("val", "gate", "test")) -> str | None:
    """Says which splits are too small for a decision, and what to do; None where all are large enough."""
    few = {name: sizes[name] for name in of if sizes[name] < FEWEST}
    if not few:
        return None
    shown = ", ".join(f"{name} has {count} task{'s' if count != 1 else ''}" for name, count in few.items())
    return (
        f"too few tasks for a decision: {shown}; a gain needs at least {FEWEST} of gate and of test, and {_LEAST} of each show one of "
        f"{detectable_difference(_LEAST):.2f} or more. Add tasks, or name each task's split in a field 'split'"
    )


def too_few_to_score(sizes: dict[str, int], split: str) -> str | None:
    """Says where a split is too small for the interval of a score; None where it is large enough."""
    count = sizes[split]
    if count >= FEWEST:
        return None
    return (
        f"{split} has {count} task{'s' if count != 1 else ''}: the interval of a score needs at least {FEWEST}. "
        "Add tasks, or name each task's split in a field 'split'"
    )


def announce_splits(splits: Splits, progress: Progress) -> list[str]:
    """Says how large the splits of a job are that decides on gate and reports on test; returns what is wrong with that."""
    sizes = ", ".join(f"{name} {count}" for name, count in splits.sizes().items())
    left_out = splits.left_out()
    progress.say(f"tasks: {sizes}{left_out and f' ({left_out})'}; the test split is sealed")
    warning = too_small(splits.sizes())
    if warning is None:
        return []
    progress.say(f"warning: {warning}")
    return [warning]
