"""Division of the caps of `assay improve` between steps, gates and the sealed test.

The unit is one run of the program; a cap on calls, tokens or dollars is converted into runs. Does not run anything.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.evaluation.sequential import fewest_to_accept
from assay.evaluation.statistics import FEWEST
from assay.models import Caps, Meter
from assay.models.meter import Usage
from assay.optimizers import AUTO_SEARCH_CALLS
from assay.optimizers.finetuning.settings import PolicySettings
from assay.optimizers.prompts.reserve import ReportPlan
from assay.runs.settings.shared import PromptSettings

__all__ = ["ROUNDING", "ImprovePlan", "StepPlan", "Turn", "plan_steps", "search_runs", "training_runs"]

ROUNDING = 1e-9  # of shares of a cap
_PASSES = 10  # over val, of a search without a cap
_LEAST = 2 * FEWEST  # runs of a search or a collection: a pair on as many tasks as an interval needs


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Runs that the settings of a step request (`runs`), and the minimum below which it is not started (`least`).

    A search and a collection can work with fewer runs than requested. A training cannot: it would stop without a
    result.
    """

    step: str
    runs: float
    least: float


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Runs that a step may use.

    `end`: the steps before this index fit the caps. `report`: number of tasks of each of their gates and of test.
    `work`: maximum runs of the step itself. `reserved`: runs reserved for other parts while the step runs; `after`: the
    same while its gate runs.
    """

    end: int
    report: ReportPlan
    work: float
    reserved: float
    after: float


@dataclass(frozen=True, kw_only=True)
class ImprovePlan:
    """The steps of an improvement.

    `report`: tasks of a gate and of test without caps, and the usage of a pair of runs.
    """

    report: ReportPlan
    steps: Sequence[StepPlan]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ImprovePlan":
        """From the JSON form of `dataclasses.asdict`."""
        return cls(report=ReportPlan.of(fields["report"]), steps=[StepPlan(**step) for step in fields["steps"]])

    def amounts(self, runs: float) -> dict[str, float]:
        """Estimated usage of that many runs, by cap name."""
        pair = self.report.pair
        return {
            "max_calls": runs * pair.calls / 2,
            "max_tokens": runs * pair.tokens / 2,
            "max_cost_usd": runs * pair.cost_usd / 2,
        }

    def remaining(self, caps: Caps, spent: Usage) -> float:
        """Runs that remain within the caps; infinite without caps."""
        rests = zip(
            (caps.calls, caps.tokens, caps.cost_usd),
            (spent.calls, spent.tokens, spent.cost_usd),
            self.amounts(1).values(),
            strict=True,
        )
        return min(((cap - used) / each for cap, used, each in rests if cap is not None and each > 0), default=math.inf)

    def turn(self, at: int, caps: Caps, available: float, *, worked: bool = False) -> Turn:
        """Runs that step number `at` may use of those that are left.

        Reserves gates and the sealed test for as many steps as fit. Gates and test get at most half of each cap; the
        steps share the rest in proportion to what they request above their minimum.

        Args:
            at: index of the step.
            available: runs that remain within the caps.
            worked: the step itself is done and only its gate remains.
        """
        current = replace(self.steps[at], runs=0.0, least=0.0) if worked else self.steps[at]
        for end, done in itertools.product(
            range(len(self.steps), at, -1), (at, 0)
        ):  # first with what earlier gates did not use, then as planned at the start
            report, later = self._report(caps, end - done), self.steps[at + 1 : end]
            reserved, least = _reserved_runs(report, end - at), sum(step.least for step in later)
            if self._decides(report) and available - reserved + ROUNDING >= current.least + least:
                aside = _runs_for_later(available - reserved, current, later)
                return Turn(
                    end=end,
                    report=report,
                    work=available - reserved - aside,
                    reserved=reserved + aside,
                    after=reserved - 2 * report.gate + least,
                )
        report = self._report(caps, 1)
        reserved = _reserved_runs(report, 1)
        return Turn(
            end=at + 1, report=report, work=available - reserved, reserved=reserved, after=reserved - 2 * report.gate
        )

    def shares(self, caps: Caps) -> list[float]:
        """Runs of each step that fits the caps, from the first on, if every step uses its whole share."""
        available, shares = self.remaining(caps, Usage()), list[float]()
        for at, step in enumerate(self.steps):
            turn = self.turn(at, caps, available)
            if turn.work + ROUNDING < step.least:
                break
            shares.append(min(step.runs, turn.work))
            available -= shares[-1] + 2 * turn.report.gate
        return shares

    @property
    def runs(self) -> float:
        """Runs of all steps, their gates and the sealed test without caps."""
        return sum(step.runs for step in self.steps) + _reserved_runs(self.report, len(self.steps))

    def rows(self, caps: Caps) -> list[dict[str, Any]]:
        """Each step with the calls it requests and its share of the caps (None if it does not fit). JSON-ready."""
        shares: list[float | None] = [*self.shares(caps), *([None] * len(self.steps))]
        return [
            {"step": step.step, "calls": self._calls(step.runs), "share": None if share is None else self._calls(share)}
            for step, share in zip(self.steps, shares, strict=False)
        ]

    def lines(self, caps: Caps) -> list[str]:
        """The plan as text: calls of each step, of its gate and of the sealed test; a warning if steps do not fit."""
        rows, report = self.rows(caps), self.turn(0, caps, self.remaining(caps, Usage())).report
        parts = [
            f"{number} {row['step']}, {_of(row['share'], row['calls'])} calls"
            for number, row in enumerate(rows, start=1)
        ]
        gate, test = self._calls(2 * report.gate), self._calls(2 * report.test)
        lines = [f"steps: {'; '.join(parts)}. Up to {gate:,} calls for the gate of each, {test:,} for the sealed test"]
        lines.append(f"warning: {report.short}" if report.short else report.detectable_gain)
        fits = sum(row["share"] is not None for row in rows)
        if fits < len(rows):
            lines.append(
                f"warning: {fits} of the {len(rows)} steps fit the caps: step {fits + 1}, {rows[fits]['step']}, is "
                f"started only where {self._calls(self.steps[fits].least):,} calls are left for its work, besides its "
                "gate and the sealed test. Raise the caps, or ask for less"
            )
        return lines

    def _calls(self, runs: float) -> int:
        return math.ceil(self.amounts(runs)["max_calls"] - ROUNDING)

    def _report(self, caps: Caps, gates: int) -> ReportPlan:
        return replace(self.report, gates=gates).within(Meter(caps), searching=True)

    def _decides(self, report: ReportPlan) -> bool:
        """Whether gate and test get enough tasks to show a gain, as far as the splits have them."""
        fewest = fewest_to_accept()
        return report.gate >= min(fewest, self.report.gate) and report.test >= min(fewest, self.report.test)


def _of(share: int | None, requested: int) -> str:
    if share is None or share >= requested:
        return f"about {requested:,}"
    return f"{share:,} of about {requested:,}"


def _reserved_runs(report: ReportPlan, gates: int) -> int:
    """Runs of that many gates and of the sealed test."""
    return 2 * (gates * report.gate + report.test)


def _runs_for_later(available: float, current: StepPlan, later: Sequence[StepPlan]) -> float:
    """Runs of `available` that are reserved for later steps."""
    requested, least = sum(step.runs for step in later), sum(step.least for step in later)
    if not later or available >= current.runs + requested:
        return requested
    flexible = current.runs - current.least + requested - least
    return least + (available - current.least - least) * (requested - least) / flexible


def plan_steps(
    order: Sequence[str], sizes: Mapping[str, int], config: PromptSettings, *, each: float, rollouts: int,
    grpo: PolicySettings, retained: int
) -> list[StepPlan]:  # fmt: skip
    """Runs that each step of an improvement requests.

    Args:
        sizes: tasks of each split.
        each: LM calls of a run of the program with its judges.
        rollouts: of each train task that `sft` collects.
        retained: retention tasks of `grpo`.
    """
    runs = {
        "prompts": search_runs(config, each, sizes["val"]),
        "sft": float(rollouts * sizes["train"]),
        "grpo": float(training_runs(grpo, sizes["val"], retained)),
    }
    return [
        StepPlan(step=step, runs=runs[step], least=runs[step] if step == "grpo" else min(_LEAST, runs[step]))
        for step in order
    ]


def search_runs(config: PromptSettings, each: float, val: int) -> float:
    """Runs of a search: its cap on calls in runs, else some passes over val."""
    cap = config.max_search_calls or (AUTO_SEARCH_CALLS if config.optimizer == "auto" else None)
    return cap / each if cap is not None else float(_PASSES * min(50, val))


def training_runs(config: PolicySettings, val: int, retained: int = 0) -> int:
    """Runs of the program in a training without its sealed test: rollouts and periodic evaluations.

    An evaluation runs its tasks twice: greedy and sampled. Example: 30 steps of 4 tasks with 6 rollouts, and 16 tasks
    evaluated before step 1 and every 10 steps: 720 + 4 * 32 = 848.

    Args:
        val: number of val tasks. A retention task is assumed to have as many; they are run greedily only.
        retained: number of retention tasks.
    """
    rollouts = config.rollout_steps * config.prompts_per_step * config.num_generations
    if not config.evaluate_every:
        return rollouts
    evaluations = 1 + math.ceil(
        config.steps / config.evaluate_every
    )  # before the first step, every few steps, and after the last
    return rollouts + evaluations * (2 + retained) * min(config.eval_tasks, val)
