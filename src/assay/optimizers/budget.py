"""The budget of a job: what its runs are expected to use, and how its caps are divided.

Gate and test get the tasks that the smallest gain to detect needs, and at most half of each cap; the search, or the
steps of an improvement, share the rest. The unit is one run of the program: a cap on calls, tokens or dollars is
converted into runs by the expected usage of a pair of runs (before and after). Calls no model.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dspy

from assay.datasets import Splits, Task
from assay.errors import BudgetExceeded, ConfigError
from assay.evaluation.evaluation import Evaluation
from assay.evaluation.progress import Progress
from assay.evaluation.session import Session
from assay.evaluation.statistics import (
    FEWEST,
    POWER,
    WORST_SPREAD,
    SequentialTest,
    detectable_difference,
    fewest_to_accept,
    tasks_needed,
)
from assay.models import Caps, LanguageModel, Meter
from assay.models.hosted import rough_tokens
from assay.models.meter import Usage
from assay.models.prices import price
from assay.optimizers.finetuning.settings import PolicySettings
from assay.programs import ToolAgent
from assay.programs.foreign_agent import TextAgent
from assay.support.numbers import counted

CAPS = {"max_calls": "calls", "max_tokens": "tokens", "max_cost_usd": "cost_usd"}  # setting of a cap -> what it limits
_UNITS = {"calls": "calls", "tokens": "tokens", "cost_usd": "dollars"}
_LEAST_TASKS = 20  # of gate and of test, whatever the difference to detect
_MORE_TASKS = "Add tasks, raise the size of the split where it has more, or name each task's split in a field 'split'"
_SEARCH = 0.5  # share of a cap that the search has at least
_GROWTH = 1.5  # prompts grow by demonstrations and instructions
_PROMPT, _ANSWER = 120, 40  # assumed tokens of a call: its prompt without the task, and its answer
_PASSES = 10  # over val, of a search without a cap
_LEAST_RUNS = 2 * FEWEST  # of a search or a collection: a pair on as many tasks as an interval needs
_ROUNDING = 1e-9  # of shares of a cap
_HARDLY = 0.9  # gain in score that hardly any baseline leaves room for


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
                f"`difference={self.difference!r}` must be above 0 and at most 1: "
                "the smallest gain in mean score that is to be shown"
            )

    def rule(self, tasks: int, *, futility: bool = True) -> SequentialTest | None:
        """The test that stops a comparison on so many tasks; None runs all of them.

        Args:
            futility: also stop where a difference can hardly be shown any more.
        """
        return SequentialTest(tasks=tasks, difference=self.difference, futility=futility) if self.early_stop else None


# -- expected usage


def calls_per_run(program: dspy.Module) -> int:
    """A tool agent decides, calls, decides and answers; any other program is taken to ask each predictor once. The
    predictors of an agent of one's own are its texts, which may all be in one call."""
    if isinstance(program, ToolAgent):
        return 4
    return 1 if isinstance(program, TextAgent) else max(1, len(program.predictors()))


def run_calls(program: dspy.Module, session: Session) -> tuple[float, float]:
    """LM calls of one run, of the program and of its judges: as the preflight measured them, else by their number."""
    if session.measured is not None:
        return session.measured.calls, session.measured.judge_calls
    return calls_per_run(program), sum(criterion.judge is not None for criterion in session.rubric.finals)


def price_of(lm: Any, prompt_tokens: int = 1, completion_tokens: int = 1) -> float | None:
    """As `assay.models.prices.price`, for a model as an object."""
    own = lm.recording.price if isinstance(lm, LanguageModel) else None
    return price(lm.model, prompt_tokens, completion_tokens, own=own)


def forecast_pair(program: dspy.Module, session: Session) -> Usage:
    """Expected usage of a pair of runs before the search, from the preflight or from the program's predictors."""
    measured, (own, judges) = session.measured, run_calls(program, session)
    calls = max(calls_per_run(program), own) + judges
    tokens = calls * ((measured.tokens if measured else None) or 300.0) * _GROWTH
    cost = (price_of(session.lm, 300, 40) or 0.0) * calls * _GROWTH
    return Usage(calls=math.ceil(2 * calls), prompt_tokens=math.ceil(2 * tokens), cost_usd=2 * cost)


def pair_of(before: Evaluation, after: Evaluation, session: Session, program: dspy.Module) -> Usage:
    """Mean usage of a pair of runs on val, with the judges' calls as measured by the preflight."""
    judged = 2 * run_calls(program, session)[1]
    calls, tokens, cost = (
        sum(_mean(getattr(side, name)) for side in (before, after)) for name in ("calls", "tokens", "cost_usd")
    )
    share = 1 + judged / calls if calls else 1.0
    return Usage(calls=math.ceil(calls + judged), prompt_tokens=math.ceil(tokens * share), cost_usd=cost * share)


def of_all(evaluation: Evaluation) -> Usage:
    """Expected usage of another evaluation on the same tasks. Proposed instructions make the prompts longer."""
    calls, tokens, cost = (
        math.fsum(values.values()) for values in (evaluation.calls, evaluation.tokens, evaluation.cost_usd)
    )
    return Usage(calls=math.ceil(calls), prompt_tokens=math.ceil(_GROWTH * tokens), cost_usd=_GROWTH * cost)


def _mean(values: dict[str, float]) -> float:
    return math.fsum(values.values()) / len(values) if values else 0.0


def search_runs(cap: int | None, each: float, val: int) -> float:
    """Runs of a search: its cap on calls in runs of `each` calls, else some passes over val."""
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


# -- estimates for the user


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a number of calls will probably take. A field is None if a price, or the latency, is unknown."""

    calls: int
    tokens: int
    cost_usd: float | None
    minutes: float | None


def estimated(
    calls: int, program: dspy.Module, splits: Splits, session: Session, *, demos: int, latency_s: float | None
) -> Estimate:
    """The estimate of `calls`, of which the judges' share has the judges' price.

    Args:
        demos: demonstrations in a prompt.
        latency_s: mean seconds of a call.
    """
    own, judges = run_calls(program, session)
    judged = round(calls * judges / max(1.0, own + judges))
    task = next(iter([*splits.train, *splits.val, *splits.gate]), None)
    task_tokens = 100 if task is None else rough_tokens(f"{dict(task.inputs)} {dict(task.expected)}")
    prompt = _PROMPT + task_tokens * (1 + demos)
    shares = [(session.lm, calls - judged), *([(session.judge_lm or session.lm, judged)] if judged else [])]
    prices = [price_of(lm, count * prompt, count * _ANSWER) for lm, count in shares]
    if session.prompt_lm is not None and price_of(session.prompt_lm, 1, 1) != 0:
        prices.append(None)  # how often a reflecting model is asked is not known before
    known_prices = [each for each in prices if each is not None]
    return Estimate(
        calls=calls,
        tokens=calls * (prompt + _ANSWER),
        cost_usd=sum(known_prices) if len(known_prices) == len(prices) else None,
        minutes=None if latency_s is None else calls * latency_s / max(1, session.threads) / 60,
    )


def minutes_text(minutes: float) -> str:
    """A duration as one says it."""
    return "under a minute" if minutes < 1 else f"about {counted(round(minutes), 'minutes')}"


def cost_text(cost_usd: float | None) -> str:
    """An estimated price."""
    return "cost unknown for these models" if cost_usd is None else f"${cost_usd:.2f}"


# -- gate and test


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
        """A line that says which gain the gate can detect with its size: a warning if hardly any gain is that large."""
        if self.short:
            return f"warning: {self.short}"
        if self.gate < fewest_to_accept():
            return (
                f"warning: gate: {counted(self.gate, 'tasks')}, too few to show any gain: "
                f"at least {fewest_to_accept()} are needed"
            )
        gain, tasks = detectable_difference(self.gate), counted(self.gate, "tasks")
        if gain < _HARDLY:
            return f"gate: up to {tasks}, which show a gain of {gain:.2f} or more with {POWER:.0%} power"
        return (
            f"warning: gate: {tasks}, too few for most gains: only a gain of {gain:.2f} or more in score is shown with "
            f"{POWER:.0%} power. {'Raise the caps' if self.capped else _MORE_TASKS}"
        )

    @property
    def runs(self) -> int:
        """Runs of all gates and of test."""
        return 2 * (self.gates * self.gate + self.test)

    def reserve(self, meter: Meter) -> None:
        """Reserves the expected usage of gate and test in the meter."""
        calls, tokens, cost = _amounts(self.pair)
        meter.hold(
            **{
                name: Usage(calls=int(calls) * count, prompt_tokens=int(tokens) * count, cost_usd=cost * count)
                for name, count in (("gate", self.gate), ("test", self.test))
            }
        )

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
    sizes, needed = splits.sizes(), max(_LEAST_TASKS, tasks_needed(decisions.difference, spread=spread))
    gate, test = (sizes[name] if name in decisions.sized else min(sizes[name], needed) for name in ("gate", "test"))
    plan = ReportPlan(gate=gate * decisions.gate, test=test * decisions.test, pair=pair, tested=decisions.test)
    return plan.within(meter, searching=searching)


def decision_tasks(splits: Splits, split: str, decisions: Decisions) -> list[Task]:
    """The tasks of a split that a decision uses: as many as the difference needs, or all if the user set its size."""
    tasks: list[Task] = getattr(splits, split)
    return tasks if split in decisions.sized else tasks[: max(_LEAST_TASKS, tasks_needed(decisions.difference))]


def _amounts(of: Caps | Usage) -> tuple[Any, Any, Any]:
    return of.calls, of.tokens, of.cost_usd


def _fitting(meter: Meter, pair: Usage, searching: bool) -> float:
    """Number of pairs of runs that the caps allow after the search.

    Usage of gate and test before an interruption does not count: it belongs to the same pairs.
    """
    caps, tried, searched = meter.caps, meter.of("preflight"), meter.of("search")
    # the search makes at most these calls
    few = math.inf if caps.search_calls is None else float(caps.search_calls + tried.calls)
    pairs = math.inf
    for cap, *spent, each, most in zip(
        _amounts(caps), _amounts(tried), _amounts(searched), _amounts(pair), (few, math.inf, math.inf), strict=True
    ):
        if cap is not None and each > 0:
            pairs = min(pairs, (cap - min(cap * _SEARCH, most) if searching else max(0.0, cap - sum(spent))) // each)
    return pairs


def too_small(sizes: Mapping[str, int]) -> str | None:
    """A message that names the splits too small for a decision; None if all are large enough."""
    small = {name: sizes[name] for name in ("val", "gate", "test") if sizes[name] < FEWEST}
    if not small:
        return None
    counts = ", ".join(f"{name} has {counted(count, 'tasks')}" for name, count in small.items())
    return (
        f"too few tasks for a decision: {counts}; a gain needs at least {fewest_to_accept()} of gate and of test, "
        f"and {_LEAST_TASKS} of each show one of {detectable_difference(_LEAST_TASKS):.2f} or more. {_MORE_TASKS}"
    )


def too_few_to_score(sizes: Mapping[str, int], split: str) -> str | None:
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


# -- the steps of an improvement


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
        report = {**fields["report"], "pair": Usage(**fields["report"]["pair"])}
        return cls(report=ReportPlan(**report), steps=[StepPlan(**step) for step in fields["steps"]])

    def amounts(self, runs: float) -> dict[str, float]:
        """Estimated usage of that many runs, by cap name."""
        return {name: runs * amount / 2 for name, amount in zip(CAPS, _amounts(self.report.pair), strict=True)}

    def remaining(self, caps: Caps, spent: Usage) -> float:
        """Runs that remain within the caps; infinite without caps."""
        rests = zip(_amounts(caps), _amounts(spent), self.amounts(1).values(), strict=True)
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
            reserved, least = replace(report, gates=end - at).runs, sum(step.least for step in later)
            if self._decides(report) and available - reserved + _ROUNDING >= current.least + least:
                aside = _runs_for_later(available - reserved, current, later)
                return Turn(
                    end=end,
                    report=report,
                    work=available - reserved - aside,
                    reserved=reserved + aside,
                    after=reserved - 2 * report.gate + least,
                )
        report = self._report(caps, 1)
        return Turn(
            end=at + 1,
            report=report,
            work=available - report.runs,
            reserved=report.runs,
            after=report.runs - 2 * report.gate,
        )

    def shares(self, caps: Caps) -> list[float]:
        """Runs of each step that fits the caps, from the first on, if every step uses its whole share."""
        available, shares = self.remaining(caps, Usage()), list[float]()
        for at, step in enumerate(self.steps):
            turn = self.turn(at, caps, available)
            if turn.work + _ROUNDING < step.least:
                break
            shares.append(min(step.runs, turn.work))
            available -= shares[-1] + 2 * turn.report.gate
        return shares

    @property
    def runs(self) -> float:
        """Runs of all steps, their gates and the sealed test without caps."""
        return sum(step.runs for step in self.steps) + replace(self.report, gates=len(self.steps)).runs

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
        lines.append(report.detectable_gain)
        fits = sum(row["share"] is not None for row in rows)
        if fits < len(rows):
            lines.append(
                f"warning: {fits} of the {len(rows)} steps fit the caps: step {fits + 1}, {rows[fits]['step']}, is "
                f"started only where {self._calls(self.steps[fits].least):,} calls are left for its work, besides its "
                "gate and the sealed test. Raise the caps, or ask for less"
            )
        return lines

    def _calls(self, runs: float) -> int:
        return math.ceil(self.amounts(runs)["max_calls"] - _ROUNDING)

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


def _runs_for_later(available: float, current: StepPlan, later: Sequence[StepPlan]) -> float:
    """Runs of `available` that are reserved for later steps."""
    requested, least = sum(step.runs for step in later), sum(step.least for step in later)
    if not later or available >= current.runs + requested:
        return requested
    flexible = current.runs - current.least + requested - least
    return least + (available - current.least - least) * (requested - least) / flexible


def plan_steps(
    order: Sequence[str], sizes: Mapping[str, int], *, search: float, rollouts: int, grpo: PolicySettings, retained: int
) -> list[StepPlan]:
    """Runs that each step of an improvement requests.

    Args:
        sizes: tasks of each split.
        search: runs of a search, see `search_runs`.
        rollouts: of each train task that `sft` collects.
        retained: retention tasks of `grpo`.
    """
    runs = {
        "prompts": search,
        "sft": float(rollouts * sizes["train"]),
        "grpo": float(training_runs(grpo, sizes["val"], retained)),
    }
    return [
        StepPlan(step=step, runs=runs[step], least=runs[step] if step == "grpo" else min(_LEAST_RUNS, runs[step]))
        for step in order
    ]


# -- caps of a job with several parts


def remaining_caps(
    options: Mapping[str, Any], spent: Usage, *, reserved: Mapping[str, float], least: Mapping[str, float]
) -> dict[str, Any]:
    """Options for one part of a job, with its caps reduced to what the other parts leave.

    Args:
        spent: by the other parts, see `assay.traces.resuming.spent_in`.
        reserved: amounts reserved for later parts, by the names of the caps.
        least: minimum that the part needs, by the names of the caps.
    Raises:
        BudgetExceeded: less than that is left, or nothing.
    """
    remaining = dict(options)
    for name, amount in CAPS.items():
        if remaining.get(name) is None:
            continue
        cap, used, later, needed = remaining[name], getattr(spent, amount), reserved.get(name, 0), least.get(name, 0)
        unit, unspent = _UNITS[amount], cap - used - later
        spent_text = f"{used:g} of {cap:g} {unit} of the whole improvement are spent"
        reason = None
        if unspent <= 0:
            reason = (
                f"{spent_text}; the rest is kept for its gate and its sealed test"
                if used < cap
                else f"the cap of {counted(cap, unit)} of the whole improvement is reached"
            )
        elif unspent + _ROUNDING < needed:
            reason = (
                f"{spent_text} and {later:g} are kept for its gate and its sealed test: {unspent:g} are left, and its "
                f"work takes about {needed:g}"
            )
        if reason is not None:
            raise BudgetExceeded(reason, what=unit)
        remaining[name] = unspent if name == "max_cost_usd" else int(unspent + _ROUNDING)
    return remaining
