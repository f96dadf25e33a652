"""The number of tasks of gate and test, and the part of a job's caps that is reserved for them during the search."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import dspy

from assay.datasets import Splits, Task
from assay.errors import ConfigError
from assay.evaluation.evaluation import Evaluation
from assay.evaluation.progress import Progress
from assay.evaluation.sequential import (
    POWER,
    WORST_SPREAD,
    detectable_difference,
    fewest_to_accept,
    tasks_needed,
)
from assay.evaluation.session import Session
from assay.evaluation.statistics import FEWEST
from assay.models import Meter
from assay.models.meter import Usage
from assay.optimizers.prompts.estimate import calls_per_run
from assay.support.numbers import counted

__all__ = [
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

_LEAST = 20  # fewest tasks of gate and of test, whatever the difference to detect
_MORE_TASKS = "Add tasks, raise the size of the split where it has more, or name each task's split in a field 'split'"
_SEARCH = 0.5  # share of a cap that the search has at least
_GROWTH = 1.5  # prompts grow by demonstrations and instructions


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """How gate and test decide.

    Args:
        difference: smallest gain in mean score to detect, in (0, 1]. It sets the number of tasks of both splits.
        early_stop: stop a comparison once it has decided.
        sized: splits whose size the user set; all their tasks are used.
        gate: decide on gate; False takes the winner on val as the result.
        test: open the test split at the end.
    """

    difference: float = 0.1
    early_stop: bool = True
    sized: frozenset[str] = frozenset()
    gate: bool = True
    test: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.difference <= 1:
            raise ConfigError(
                f"difference={self.difference!r} must be above 0 and at most 1: "
                "the smallest gain in mean score that is to be shown"
            )


@dataclass(frozen=True, kw_only=True)
class ReportPlan:
    """The planned tasks of gate and test.

    Attributes:
        gate, test: numbers of tasks.
        pair: expected usage of a pair of runs (the program before and after) on one task.
        capped: the caps allow fewer tasks than wanted.
        tested: the test split will be opened.
        gates: number of gate decisions that follow, each with `gate` tasks.
    """

    gate: int
    test: int
    pair: Usage
    capped: bool = False
    tested: bool = True
    gates: int = 1

    @property
    def short(self) -> str | None:
        """A message if the caps leave too few tasks for a decision, else None."""
        fewest = fewest_to_accept()
        if not self.capped or min(self.gate, self.test if self.tested else fewest) >= fewest:
            return None
        test = f" and {self.test} for test" if self.tested else ""
        each = " of each" if test else ""
        return f"the caps leave {counted(self.gate, 'tasks')} for gate{test}, and a decision needs {fewest}{each}"

    @property
    def detectable_gain(self) -> str:
        """A message that says which gain the gate can detect with its size."""
        if self.gate < fewest_to_accept():
            return (
                f"gate: {counted(self.gate, 'tasks')}, too few to show any gain: "
                f"at least {fewest_to_accept()} are needed"
            )
        gain = detectable_difference(self.gate)
        return (
            f"gate: up to {counted(self.gate, 'tasks')}, which show a gain of {gain:.2f} or more with {POWER:.0%} power"
        )

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ReportPlan":
        """From its fields as JSON has them."""
        return cls(**{**fields, "pair": Usage(**fields["pair"])})

    @property
    def usage(self) -> dict[str, Usage]:
        """Expected usage of gate and test."""
        return {"gate": _times(self.pair, self.gate), "test": _times(self.pair, self.test)}

    def reserve(self, meter: Meter) -> None:
        """Reserves the expected usage of gate and test in the meter."""
        meter.hold(**self.usage)

    def within(self, meter: Meter, *, searching: bool = False) -> "ReportPlan":
        """As many of these tasks as the caps allow; see `plan_report`."""
        requested, fitting = self.gates * self.gate + self.test, _fitting(meter, self.pair, searching)
        gate = self.gate if fitting >= requested else min(self.gate, int(fitting) // (self.gates + self.tested))
        test = min(self.test, int(min(fitting, 10**9)) - self.gates * gate)
        return replace(self, gate=gate, test=test, capped=fitting < requested)


def plan_report(
    splits: Splits,
    meter: Meter,
    decisions: Decisions,
    *,
    pair: Usage,
    spread: float = WORST_SPREAD,
    searching: bool = False,
) -> ReportPlan:
    """Plans as many tasks as the difference needs, limited by the splits and the caps.

    Args:
        pair: expected usage of a pair of runs.
        spread: standard deviation of the paired differences.
        searching: the search follows; at least half of each cap is left to it, but no more calls than its own cap.
    """
    sizes, needed = splits.sizes(), max(_LEAST, tasks_needed(decisions.difference, spread=spread))
    requested = {
        name: sizes[name] if name in decisions.sized else min(sizes[name], needed) for name in ("gate", "test")
    }
    requested["gate"] *= decisions.gate
    requested["test"] *= decisions.test
    plan = ReportPlan(gate=requested["gate"], test=requested["test"], pair=pair, tested=decisions.test)
    return plan.within(meter, searching=searching)


def decision_tasks(splits: Splits, split: str, decisions: Decisions) -> list[Task]:
    """The tasks of a split that a decision uses: as many as the difference needs, or all if the user set its size."""
    tasks: list[Task] = getattr(splits, split)
    return tasks if split in decisions.sized else tasks[: max(_LEAST, tasks_needed(decisions.difference))]


def _fitting(meter: Meter, pair: Usage, searching: bool) -> float:
    """Number of pairs of runs that the caps allow after the search.

    Usage of gate and test before an interruption does not count: it belongs to the same pairs.
    """
    caps, tried, searched = meter.caps, meter.of("preflight"), meter.of("search")
    done, pairs = [tried, searched], math.inf
    # the search makes at most these calls
    few = math.inf if caps.search_calls is None else float(caps.search_calls + tried.calls)
    for cap, spent, each, most in (
        (caps.calls, sum(part.calls for part in done), pair.calls, few),
        (caps.tokens, sum(part.tokens for part in done), pair.tokens, math.inf),
        (caps.cost_usd, sum(part.cost_usd for part in done), pair.cost_usd, math.inf),
    ):
        if cap is not None and each > 0:
            pairs = min(pairs, (cap - min(cap * _SEARCH, most) if searching else max(0.0, cap - spent)) // each)
    return pairs


def forecast_pair(program: dspy.Module, session: Session, *, cost_per_call: float = 0.0) -> Usage:
    """Expected usage of a pair of runs before the search, from the preflight or from the program's predictors."""
    measured, judges = session.measured, sum(c.judge is not None for c in session.rubric.finals)
    calls = max(calls_per_run(program), measured.calls if measured else 0.0) + (
        measured.judge_calls if measured else judges
    )
    tokens = calls * ((measured.tokens if measured else None) or 300.0) * _GROWTH
    return Usage(
        calls=math.ceil(2 * calls), prompt_tokens=math.ceil(2 * tokens), cost_usd=2 * calls * cost_per_call * _GROWTH
    )


def pair_of(before: Evaluation, after: Evaluation, session: Session) -> Usage:
    """Mean usage of a pair of runs on val, with the judges' calls as measured by the preflight."""
    measured, judges = session.measured, sum(c.judge is not None for c in session.rubric.finals)
    judged = 2 * (measured.judge_calls if measured else judges)
    calls, tokens, cost = (
        sum(_mean(getattr(side, name)) for side in (before, after)) for name in ("calls", "tokens", "cost_usd")
    )
    share = 1 + judged / calls if calls else 1.0
    return Usage(calls=math.ceil(calls + judged), prompt_tokens=math.ceil(tokens * share), cost_usd=cost * share)


def _mean(values: dict[str, float]) -> float:
    return math.fsum(values.values()) / len(values) if values else 0.0


def _times(usage: Usage, count: int) -> Usage:
    return Usage(calls=usage.calls * count, prompt_tokens=usage.tokens * count, cost_usd=usage.cost_usd * count)


def too_small(sizes: dict[str, int]) -> str | None:
    """A message that names the splits too small for a decision; None if all are large enough."""
    small = {name: sizes[name] for name in ("val", "gate", "test") if sizes[name] < FEWEST}
    if not small:
        return None
    counts = ", ".join(f"{name} has {counted(count, 'tasks')}" for name, count in small.items())
    return (
        f"too few tasks for a decision: {counts}; a gain needs at least {fewest_to_accept()} of gate and of test, "
        f"and {_LEAST} of each show one of {detectable_difference(_LEAST):.2f} or more. {_MORE_TASKS}"
    )


def too_few_to_score(sizes: dict[str, int], split: str) -> str | None:
    """A message if a split, or `all` of them, is too small for the interval of a score; None if it is large enough."""
    count = sizes[split] if split in sizes else sum(sizes.values())
    if count >= FEWEST:
        return None
    return f"{split} has {counted(count, 'tasks')}: the interval of a score needs at least {FEWEST}. {_MORE_TASKS}"


def announce_splits(splits: Splits, progress: Progress) -> list[str]:
    """Reports the sizes of the splits; returns warnings about splits too small for gate and test."""
    sizes = ", ".join(f"{name} {count}" for name, count in splits.sizes().items())
    progress.say(f"tasks: {sizes}; the test split is sealed")
    warning = too_small(splits.sizes())
    if warning is None:
        return []
    progress.say(f"warning: {warning}")
    return [warning]
