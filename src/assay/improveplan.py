"""How `assay improve` divides its caps: what each step takes, how many of the steps fit, and what is kept for gates, later steps and the sealed test.

Amounts are runs of the program, as many as all caps allow. Does not run anything.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.jobs import RunConfig
from assay.models import Caps, Meter
from assay.models.meter import Usage
from assay.optimizers import AUTO_SEARCH_CALLS
from assay.optimizers.reserve import FEWEST, ReportPlan
from assay.optimizers.weights.config import PolicyConfig

__all__ = ["ROUNDING", "ImprovePlan", "StepPlan", "Turn", "plan_steps", "search_runs", "training_runs"]

ROUNDING = 1e-9  # of shares of a cap
_PASSES = 10  # over val, of a search without a cap
_LEAST = 2 * FEWEST  # runs of a search or a collection: a pair on as many tasks as an interval needs


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Runs that the settings of a step ask for, and the least without which it is not begun.

    A search and a collection do with less than they ask for; a training does not, as it would be cut off without a result.
    """

    step: str
    runs: float
    least: float


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a step may take when its turn comes.

    `end`: the steps up to this number fit the caps. `report`: tasks of each of their gates and of test. `work`: most runs of the step's own work.
    `kept`: runs that are not its to take while it works, and `after` while its gate runs.
    """

    end: int
    report: ReportPlan
    work: float
    kept: float
    after: float


@dataclass(frozen=True, kw_only=True)
class ImprovePlan:
    """`report`: tasks of a gate and of test where nothing is capped, and what a pair of runs takes."""

    report: ReportPlan
    steps: Sequence[StepPlan]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ImprovePlan":
        """From what `asdict` gave, as JSON has it."""
        return cls(report=ReportPlan.of(fields["report"]), steps=[StepPlan(**step) for step in fields["steps"]])

    def amounts(self, runs: float) -> dict[str, float]:
        """What so many runs take, by the names of the caps."""
        pair = self.report.pair
        return {"max_calls": runs * pair.calls / 2, "max_tokens": runs * pair.tokens / 2, "max_cost_usd": runs * pair.cost_usd / 2}

    def left(self, caps: Caps, spent: Usage) -> float:
        """Runs that the caps leave; infinite without caps."""
        rests = zip((caps.calls, caps.tokens, caps.cost_usd), (spent.calls, spent.tokens, spent.cost_usd), self.amounts(1).values(), strict=True)
        return min(((cap - used) / each for cap, used, each in rests if cap is not None and each > 0), default=math.inf)

    def turn(self, at: int, caps: Caps, left: float, *, worked: bool = False) -> Turn:
        """What step number `at` may take of the runs that are left.

        As many steps as possible are to fit, each with its gate, and the sealed test. Gates and test have at most half of each cap; the work of
        these steps shares the rest in proportion to what they ask for beyond their least.

        Args:
            worked: the step's own work is done, and its gate comes now.
        """
        now = replace(self.steps[at], runs=0.0, least=0.0) if worked else self.steps[at]
        for end, done in itertools.product(range(len(self.steps), at, -1), (at, 0)):  # what earlier gates left over, or as it was planned with them
            report, later = self._report(caps, end - done), self.steps[at + 1 : end]
            held, least = _held(report, end - at), sum(step.least for step in later)
            if self._decides(report) and left - held + ROUNDING >= now.least + least:
                aside = _aside(left - held, now, later)
                return Turn(end=end, report=report, work=left - held - aside, kept=held + aside, after=held - 2 * report.gate + least)
        report = self._report(caps, 1)
        held = _held(report, 1)
        return Turn(end=at + 1, report=report, work=left - held, kept=held, after=held - 2 * report.gate)

    def shares(self, caps: Caps) -> list[float]:
        """Runs for the work of each step from the first on that fits the caps, where each takes all that it may."""
        left, found = self.left(caps, Usage()), list[float]()
        for at, step in enumerate(self.steps):
            turn = self.turn(at, caps, left)
            if turn.work + ROUNDING < step.least:
                break
            found.append(min(step.runs, turn.work))
            left -= found[-1] + 2 * turn.report.gate
        return found

    @property
    def runs(self) -> float:
        """Of all steps, their gates and the sealed test, where nothing is capped."""
        return sum(step.runs for step in self.steps) + _held(self.report, len(self.steps))

    def rows(self, caps: Caps) -> list[dict[str, Any]]:
        """Each step with the calls that it asks for and its share of the caps, None where it does not fit them. JSON-ready."""
        shares: list[float | None] = [*self.shares(caps), *([None] * len(self.steps))]
        return [
            {"step": step.step, "calls": self._calls(step.runs), "share": None if share is None else self._calls(share)}
            for step, share in zip(self.steps, shares, strict=False)
        ]

    def lines(self, caps: Caps) -> list[str]:
        """The plan for the user: calls of each step's work, of its gate and of the sealed test, and which steps do not fit the caps."""
        rows, report = self.rows(caps), self.turn(0, caps, self.left(caps, Usage())).report
        parts = [f"{number} {row['step']}, {_of(row['share'], row['calls'])} calls" for number, row in enumerate(rows, start=1)]
        gate, test = self._calls(2 * report.gate), self._calls(2 * report.test)
        lines = [f"steps: {'; '.join(parts)}. Up to {gate:,} calls for the gate of each, {test:,} for the sealed test"]
        lines.append(f"warning: {report.short}" if report.short else report.shows)
        fits = sum(row["share"] is not None for row in rows)
        if fits < len(rows):
            lines.append(
                f"warning: {fits} of the {len(rows)} steps fit the caps: step {fits + 1}, {rows[fits]['step']}, is begun only where "
                f"{self._calls(self.steps[fits].least):,} calls are left for its work, beside its gate and the sealed test. Raise the caps, or ask "
                "for less"
            )
        return lines

    def _calls(self, runs: float) -> int:
        return math.ceil(self.amounts(runs)["max_calls"] - ROUNDING)

    def _report(self, caps: Caps, gates: int) -> ReportPlan:
        return replace(self.report, gates=gates).within(Meter(caps), searching=True)

    def _decides(self, report: ReportPlan) -> bool:
        """Whether the caps leave gate and test the tasks that an interval needs, as far as the splits have them."""
        return report.gate >= min(FEWEST, self.report.gate) and report.test >= min(FEWEST, self.report.test)


def _of(share: int | None, asked: int) -> str:
    return f"about {asked:,}" if share is None or share >= asked else f"{share:,} of about {asked:,}"


def _held(report: ReportPlan, gates: int) -> int:
    """Runs of so many gates and of the sealed test."""
    return 2 * (gates * report.gate + report.test)


def _aside(room: float, now: StepPlan, later: Sequence[StepPlan]) -> float:
    """Runs of `room` that later steps are to have."""
    asked, least = sum(step.runs for step in later), sum(step.least for step in later)
    if not later or room >= now.runs + asked:
        return asked
    flexible = now.runs - now.least + asked - least
    return least + (room - now.least - least) * (asked - least) / flexible


def plan_steps(
    order: Sequence[str], sizes: Mapping[str, int], config: RunConfig, *, each: float, rollouts: int, grpo: PolicyConfig, retained: int
) -> list[StepPlan]:  # fmt: skip
    """What each step of an improvement asks for.

    Args:
        sizes: tasks of each split.
        each: LM calls of a run of the program with its judges.
        rollouts: of each train task that `sft` collects.
        retained: programs that `grpo` is not to forget.
    """
    runs = {
        "prompts": search_runs(config, each, sizes["val"]),
        "sft": float(rollouts * sizes["train"]),
        "grpo": float(training_runs(grpo, sizes["val"], retained)),
    }
    return [StepPlan(step=step, runs=runs[step], least=runs[step] if step == "grpo" else min(_LEAST, runs[step])) for step in order]


def search_runs(config: RunConfig, each: float, val: int) -> float:
    """Runs that a search makes: those of its cap on calls, else some passes over val."""
    cap = config.max_search_calls or (AUTO_SEARCH_CALLS if config.optimizer == "auto" else None)
    return cap / each if cap is not None else float(_PASSES * min(50, val))


def training_runs(config: PolicyConfig, val: int, retained: int = 0) -> int:
    """Runs of the program that a training makes without its sealed test: rollouts, and held-out tasks along the way, greedily and sampled.

    Worked: 30 steps of 4 tasks with 6 rollouts, and 16 tasks evaluated in two ways before step 1 and every 10: 720 + 4 * 32 = 848.

    Args:
        val: tasks of val; a retained program is taken to have as many, and its tasks are run greedily.
    """
    rollouts = math.ceil(config.steps / config.iterations) * config.tasks * config.num_generations
    if not config.evaluate_every:
        return rollouts
    evaluations = 1 + math.ceil(config.steps / config.evaluate_every)  # before the first step, every so many, and after the last
    return rollouts + evaluations * (2 + retained) * min(config.held_out, val)
