"""The five metrics of an agent's behaviour. Each is in [0, 1], higher is better; None means not measured.

Does not call a model. Runs are made from rollouts (`run_of`) or, for any other agent, as `TaskRun` by hand.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np

from assay.datasets import Task
from assay.errors import ConfigError
from assay.evaluation.statistics import interval_of
from assay.rubrics import NoGrade
from assay.rubrics.conversations import told_unasked
from assay.rubrics.criteria import Criterion
from assay.rubrics.loading import RubricSource, load_rubric
from assay.rubrics.steps import is_used, passed_on, plain_text
from assay.rubrics.tools import (
    abstention_when_not,
    adoption_when_needed,
    argument_exactness,
    made_calls,
    recovery_after_error,
)
from assay.support.numbers import parse_number, whole_number
from assay.support.report import ReportRepr
from assay.traces import Rollout, ToolCall, Transition
from assay.traces.messages.final_answer import sent_formats
from assay.traces.records import RUN_FIELDS
from assay.traces.thinking import ThinkingUse, thinking_of

_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one run may use up before its efficiency is 0: LM calls, tokens, and seconds."""

    steps: float = 10
    tokens: float = 4000
    seconds: float = 30

    def __post_init__(self) -> None:
        if wrong := {name: value for name, value in asdict(self).items() if not value > 0}:
            raise ConfigError(f"budget {wrong} must be above 0")


@dataclass(frozen=True, kw_only=True)
class TaskRun:
    """One run of an agent on one task.

    Attributes:
        score: in [0, 1], None where unscored.
        sample: number of the run among several of the same task.
        answer: compared between samples, and with the reasoning; None without an answer.
        reasoning: text of the thoughts or observations, in order; empty where there is none.
        tools_good: number of tool calls that were eligible, executed and used.
        tools_made: number of all tool calls.
        tool_errors: the errors of its tool calls that failed.
        tools_needed: number of tool calls that the task needs; None for an agent without tools.
        confidence: the agent's own, in [0, 1].
        metrics: values that a user's evaluator gave for this run; they replace the computed metrics of the same name.
        thinking: what the run spent on thinking; None if unknown.
        rounds: those of a `Refine` program.
        error: why the agent gave no answer.
        tool_figures: of an agent with tools, see `assay.evaluation.metrics`; only those that apply to the task.
        prompt_formats: of its calls, the most frequent first; see `assay.traces.messages.final_answer.sent_formats`.
        told: facts that a simulated user told before they were asked for.
    """

    task_id: str
    score: float | None
    task_type: str = "default"
    sample: int = 0
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    cost_usd: float | None = None
    answer: Any = None
    reasoning: str = ""
    tools_good: int = 0
    tools_made: int = 0
    tool_errors: Sequence[str] = ()
    tools_needed: int | None = None
    confidence: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    thinking: ThinkingUse | None = None
    rounds: Sequence[Mapping[str, Any]] = ()
    error: str | None = None
    tool_figures: Mapping[str, float] = field(default_factory=dict)
    prompt_formats: Sequence[str] = ()
    told: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class AgentMetrics:
    """The five, over all runs; see `measure` for their formulas."""

    accuracy: float | None = None
    efficiency: float | None = None
    coherence: float | None = None
    adaptability: float | None = None
    tool_usage: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


METRICS = tuple(entry.name for entry in fields(AgentMetrics))


def measure(runs: Sequence[TaskRun], *, budget: Budget | None = None) -> AgentMetrics:
    """The five metrics of some runs.

    - accuracy: the mean score of the runs that have one.
    - efficiency: the mean over runs of 1 - mean(min(1, used / budget)) over what is known of steps, tokens and seconds.
    - coherence: the mean of two agreements, or the one that can be measured. First, the share of runs whose answer is
      at the end of their reasoning (its last number, or in its last sentence); runs without reasoning use their last
      tool result, unless the program passed it on to a later step. Second, over tasks with several samples, the share
      of pairs of samples with equal answers.
    - adaptability: the mean score of the worst task type divided by the mean score, at most 1; undefined with one task
      type, or with a mean of 0.
    - tool_usage: the mean over runs of good / max(made, needed), where good calls are eligible, executed and used; a
      run that needs no call and makes none has 1.

    A metric that runs have in `TaskRun.metrics` is the mean of those values instead.
    """
    reported: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, figure in run.metrics.items():
            if name in METRICS and figure is not None and math.isfinite(figure):
                reported[name].append(figure)
    scores = [(run.task_type, run.score) for run in runs if run.score is not None and math.isfinite(run.score)]
    limits = budget or Budget()
    follows = _mean([value for run in runs if (value := _follows(run)) is not None])
    agreements = [value for value in (follows, _stable(runs)) if value is not None]
    computed: dict[str, float | None] = {
        "accuracy": _mean([score for _, score in scores]),
        "efficiency": _mean([value for run in runs if (value := _efficiency(run, limits)) is not None]),
        "coherence": _mean(agreements),
        "adaptability": _adaptability(scores),
        "tool_usage": _mean([value for run in runs if (value := _tool_usage(run)) is not None]),
    }
    return AgentMetrics(**{name: _mean(reported[name]) if reported[name] else computed[name] for name in METRICS})


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _efficiency(run: TaskRun, budget: Budget) -> float | None:
    used = [
        min(1.0, value / limit)
        for value, limit in zip((run.steps, run.tokens, run.seconds), asdict(budget).values(), strict=True)
        if value is not None
    ]
    return None if not used else 1 - math.fsum(used) / len(used)


def _follows(run: TaskRun) -> float | None:
    """1.0 if the answer is at the end of the reasoning, else 0.0; None without an answer or without reasoning."""
    if run.answer is None or not run.reasoning.strip():
        return None
    answer = plain_text(run.answer)
    number, last_number = whole_number(answer), parse_number(run.reasoning)
    if number is not None and last_number is not None:
        difference = abs(Fraction(number) - Fraction(last_number))
        return float(difference <= max(abs(Fraction(number)) / 10**6, Fraction(1, 10**9)))
    last = [plain_text(part) for part in _SENTENCE.split(run.reasoning) if part.strip()][-1:]
    return float(bool(answer) and any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", part) for part in last))


def _stable(runs: Sequence[TaskRun]) -> float | None:
    groups: dict[str, list[str | None]] = defaultdict(list)
    for run in runs:
        groups[run.task_id].append(None if run.answer is None else plain_text(run.answer))
    pairs = [a is not None and a == b for answers in groups.values() for a, b in combinations(answers, 2)]
    return _mean([float(pair) for pair in pairs])


def _adaptability(scores: Sequence[tuple[str, float]]) -> float | None:
    by_type: dict[str, list[float]] = defaultdict(list)
    for kind, score in scores:
        by_type[kind].append(score)
    mean = _mean([score for _, score in scores])
    if not mean or len(by_type) < 2:
        return None
    return min(1.0, min(math.fsum(values) / len(values) for values in by_type.values()) / mean)


def _tool_usage(run: TaskRun) -> float | None:
    if run.tools_needed is None:
        return None
    most = max(run.tools_made, run.tools_needed)
    return 1.0 if most == 0 else run.tools_good / most


def run_of(
    rollout: Rollout,
    *,
    score: float | None,
    has_tools: bool,
    needed: Any = None,
    error: str | None = None,
    tool_figures: Mapping[str, float] | None = None,
) -> TaskRun:
    """A recorded rollout as a run.

    Args:
        has_tools: whether the program has tools at all.
        needed: number or list of the tool calls that the task needs; any other value counts as 1.
    """
    tools_needed = (
        len(needed) if isinstance(needed, list | tuple) else needed if isinstance(needed, int) and needed >= 0 else 1
    )
    prediction = rollout.prediction or {}
    answers = {name: value for name, value in prediction.items() if name not in {*RUN_FIELDS, "reasoning", "thought"}}
    if "answer" in answers and isinstance(answers.get("calls"), list):  # of `tool_user`: the calls of the run
        del answers["calls"]
    answer = next(iter(answers.values())) if len(answers) == 1 else answers or None
    calls, transitions = rollout.tools, rollout.transitions
    probabilities = [p for t in transitions if t.logprobs for p in t.logprobs]
    return TaskRun(
        task_id=rollout.task_id,
        task_type=rollout.task_type,
        sample=rollout.sample,
        score=score,
        steps=len(transitions),
        tokens=rollout.tokens,
        seconds=math.fsum([t.latency_ms for t in transitions]) / 1000,
        cost_usd=rollout.cost_usd,
        answer=answer,
        reasoning=_reasoning(prediction, rollout),
        tools_good=sum(
            _good(call, after, calls[index + 1 :], answer) for index, (call, after) in enumerate(_calls(rollout))
        ),
        tools_made=len(calls),
        tool_errors=[call.error for call in calls if call.error is not None],
        tools_needed=tools_needed if has_tools else None,
        error=error,
        thinking=thinking_of(rollout),
        rounds=rounds if isinstance(rounds := prediction.get("rounds"), list) else (),
        tool_figures=tool_figures or {},
        prompt_formats=[name for name, _ in sent_formats(transitions).most_common()],
        told=told_unasked(rollout.inputs.get("user"), prediction.get("messages")),
        confidence=math.exp(math.fsum(probabilities) / len(probabilities)) if probabilities else None,
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class ThinkingReport(ReportRepr):
    """The metric `thinking`, over the runs whose thinking tokens are known.

    Attributes:
        runs: their number.
        tokens: mean thinking tokens of a run.
        after_stable: of them, those spent after the choice of a step, or the answer, was first the final one.
        wasted_share: the second divided by the first.
        budget_share: thinking tokens divided by those that were allowed; null without a budget.
        loops: calls of all runs that ended in a loop, and tool calls that brought nothing new.
        tokens_saved: tokens that calls stopped in a loop had left until their limit, at most; after a loop of tool
            calls those of the steps that were left, at the mean of the steps before.
    """

    runs: int
    tokens: float
    after_stable: float
    wasted_share: float
    budget_share: float | None
    loops: int
    tokens_saved: int

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)


def thinking_report(runs: Sequence[TaskRun]) -> ThinkingReport | None:
    """The metric `thinking` of some runs; None if no run thought, was limited, or ended in a loop."""
    uses = [run.thinking for run in runs if run.thinking is not None]
    known = [use for use in uses if use.tokens is not None]
    loops, allowed = sum(use.loops for use in uses), sum(use.budget for use in known)
    tokens, after = sum(use.tokens or 0 for use in known), sum(use.after_stable or 0 for use in known)
    if not known or not (tokens or loops or allowed):
        return None
    used = math.fsum((use.budget_share or 0.0) * use.budget for use in known)
    return ThinkingReport(
        runs=len(known),
        tokens=tokens / len(known),
        after_stable=after / len(known),
        wasted_share=after / tokens if tokens else 0.0,
        budget_share=used / allowed if allowed else None,
        loops=loops,
        tokens_saved=sum(use.tokens_saved for use in uses),
    )


def _calls(rollout: Rollout) -> list[tuple[ToolCall, Sequence[Transition]]]:
    """The tool calls in order, each with the LM calls after it."""
    turns: Sequence[Transition] = rollout.transitions
    return [(call, turns) for call in rollout.early_tools] + [
        (call, turns[index + 1 :]) for index, turn in enumerate(turns) for call in turn.tools
    ]


def _reasoning(prediction: Mapping[str, Any], rollout: Rollout) -> str:
    """The run's thoughts; without any, its last tool result.

    A result that the program passed on to a later step is an input and not a conclusion, so it is left out.
    """
    thoughts = " ".join(str(prediction[name]) for name in ("reasoning", "thought") if prediction.get(name))
    results = [(call, after) for call, after in _calls(rollout) if call.error is None and call.result is not None]
    if thoughts or not results or passed_on(*results[-1]):
        return thoughts
    return str(results[-1][0].result)


def _good(call: ToolCall, following: Sequence[Transition], later: Sequence[ToolCall], answer: Any) -> bool:
    """Whether a tool call was eligible (no empty argument), executed (no error) and used.

    It is used if its result is in the answer, in the arguments of a later call, or was passed on to a later step.
    """
    eligible = all(value not in (None, "") for value in call.arguments.values())
    used = is_used(call, [answer, *(other.arguments for other in later)])
    return eligible and call.error is None and (used or passed_on(call, following))


class AgentEvaluator:
    """A rubric as the evaluator of anybody's agent: `evaluator(task, output)` gives the metrics of one run.

    Args:
        rubric: scores the output; its score is the accuracy. An output that could not be scored has none.
    """

    def __init__(self, rubric: RubricSource) -> None:
        self.rubric = load_rubric(rubric)

    def __call__(self, task: Any, output: Any) -> dict[str, float]:
        value = self.rubric.score(task if isinstance(task, Task | Mapping) else {"input": task}, output).value
        return {} if math.isnan(value) else {"accuracy": value}

    @staticmethod
    def table(before: Sequence[TaskRun], after: Sequence[TaskRun]) -> list[dict[str, float | str | None]]:
        """The classic table of an agent before and after, see `before_and_after`."""
        return before_and_after(before, after)


def before_and_after(
    before: Sequence[TaskRun], after: Sequence[TaskRun], *, pass_at: float = 0.8
) -> list[dict[str, float | str | None]]:
    """Four figures of an agent before and after a change.

    The rows are: average confidence (stated by the agent), task accuracy (share of scored runs with a score of at least
    `pass_at`), response quality (mean score), and overall score (mean of the other three).

    Returns:
        Rows with `name`, `before`, `after`, `points` (the difference times 100) and `percent` (of before); None where
        nothing was measured, or where `before` is 0.
    """
    sides = [_row_values(runs, pass_at) for runs in (before, after)]
    rows = []
    for name in sides[0]:
        old, new = (side[name] for side in sides)
        points = None if old is None or new is None else 100 * (new - old)
        percent = None if points is None or not old else points / old
        rows.append({"name": name, "before": old, "after": new, "points": points, "percent": percent})
    return rows


def _row_values(runs: Sequence[TaskRun], pass_at: float) -> dict[str, float | None]:
    scores = [run.score for run in runs if run.score is not None and math.isfinite(run.score)]
    values = {
        "average confidence": _mean([run.confidence for run in runs if run.confidence is not None]),
        "task accuracy": _mean([float(score >= pass_at) for score in scores]),
        "response quality": _mean(scores),
    }
    return {**values, "overall score": _mean([value for value in values.values() if value is not None])}


# -- Figures of an agent's tool use, each with a 95 % interval, for every report of a program with tools.
#
# Adoption and abstention are reported next to each other: adoption alone can be gained by calling a tool on every task.
# Does not call a model.


_GRADED = {
    "adoption_when_needed": adoption_when_needed,
    "abstention_when_not": abstention_when_not,
    "argument_exactness": argument_exactness,
    "recovery_after_error": recovery_after_error,
}
TOOL_FIGURES = (*_GRADED, "calls_per_task")


def figures_of(task: Task, rollout: Rollout) -> dict[str, float]:
    """The figures of one run that apply to its task: grades in [0, 1], and the number of tool calls.

    A run that failed without an answer counts with the calls that it made.
    """
    prediction = dict(rollout.prediction or {})
    figures: dict[str, float] = {}
    for name, check in _GRADED.items():
        try:
            figures[name] = check(task, prediction, rollout).value
        except NoGrade:
            continue
    calls = made_calls(prediction, rollout)
    return figures if calls is None else {**figures, "calls_per_task": float(len(calls))}


def tool_use(runs: Sequence[TaskRun]) -> dict[str, dict[str, float | int]] | None:
    """`mean`, `low`, `high` and number of tasks `n` of each figure that was measured; None if none was.

    Several runs of one task count with their mean.
    """
    by_task: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in TOOL_FIGURES}
    for run in runs:
        for name, value in run.tool_figures.items():
            if name in by_task and math.isfinite(value):
                by_task[name][run.task_id].append(value)
    report = {name: _summary(values, name) for name, values in by_task.items() if values}
    return report or None


def _summary(by_task: Mapping[str, Sequence[float]], name: str) -> dict[str, Any]:
    values = np.array([math.fsum(runs) / len(runs) for runs in by_task.values()])
    most = float(values.max()) + 1 if name == "calls_per_task" else 1.0  # the largest number of calls is not known
    low, high = interval_of(values, 0.0, most)
    return {"mean": float(values.mean()), "low": low, "high": high, "n": len(values)}


# -- Notes on what runs did that their score does not show: tools that all failed, verifiers that did not decide,
# budgets that were not kept, users that tell the answer.


_REASON_CHARS = 300


def run_notes(runs: Collection[TaskRun]) -> list[str]:
    """The notes on some runs of one program; none where nothing is to be said."""
    notes = (_without_tools(runs), _undecided(runs), _over_budget(runs), _not_reported(runs), _told_unasked(runs))
    return [note for note in notes if note]


def overridden_format(asked: str | None, sent: Collection[str]) -> list[str]:
    """A note where a program was run with a prompt format and its calls were sent in others."""
    if asked is None or not sent or asked in sent:
        return []
    return [f"the prompt format {asked!r} has no effect: the program sets its own, {', '.join(map(repr, sent))}"]


def unscored_steps(criteria: Iterable[Criterion], calls: Iterable[int]) -> list[str]:
    """A note where no LM call of any run was recorded, so that criteria of scope step have nothing to grade.

    Args:
        criteria: the rubric's.
        calls: number of recorded LM calls of each run.
    """
    steps, numbers = [c.name for c in criteria if c.scope == "step"], list(calls)
    if not steps or not numbers or any(numbers):
        return []
    return [
        f"the criteria of scope step ({', '.join(steps)}) are unscored: no LM call of these runs was recorded. Run the "
        "agent through the gateway (`assay serve`), then `assay traces score` grades its steps; or record each call "
        "with run.call(…, tools=[ToolCall(…)]) inside of assay.record(…)"
    ]


def _without_tools(runs: Collection[TaskRun]) -> str:
    """In how many runs each tool call failed: an agent whose tools are down may answer, and be scored, without them."""
    called = [run for run in runs if run.tools_made]
    failed = [run for run in called if len(run.tool_errors) == run.tools_made]
    if not failed:
        return ""
    reason, _ = Counter(error for run in failed for error in run.tool_errors).most_common(1)[0]
    return (
        f"in {len(failed)} of {len(called)} runs that called tools every call failed; the commonest reason: "
        f"{reason[:_REASON_CHARS]}"
    )


def _undecided(runs: Collection[TaskRun]) -> str:
    """How many answers of a `Refine` program its verifier could not grade: these are not revised."""
    verified = [run.rounds for run in runs if run.rounds]
    reasons = Counter(str(rounds[0]["reason"]) for rounds in verified if rounds[0]["probability"] is None)
    if not reasons:
        return ""
    return (
        f"the verifier could not grade {reasons.total()} of {len(verified)} answers, which were therefore not revised; "
        f"the commonest reason: {reasons.most_common(1)[0][0]}"
    )


def _over_budget(runs: Collection[TaskRun]) -> str:
    uses = [run.thinking for run in runs if run.thinking is not None and run.thinking.tokens is not None]
    shares = [use.budget_share for use in uses if use.budget_share is not None]
    over = [share for share in shares if share > 1]
    if not over:
        return ""
    return (
        f"{len(over)} of {len(shares)} runs thought more than their budget (of thinking or reasoning_depth), up to "
        f"{100 * max(over):.0f} % of it: the server keeps no limit, or the thoughts are of digits, which have fewer "
        "characters a token"
    )


def _not_reported(runs: Collection[TaskRun]) -> str:
    uses = [run.thinking for run in runs if run.thinking is not None]
    unknown = sum(use.tokens is None for use in uses)
    if not unknown:
        return ""
    return (
        f"the thinking tokens of {unknown} of {len(uses)} runs are unknown: the model thought, and the server did not "
        "report how many tokens that took"
    )


def _told_unasked(runs: Collection[TaskRun]) -> str:
    told = [run.told for run in runs if run.told]
    if not told:
        return ""
    name, _ = Counter(name for names in told for name in names).most_common(1)[0]
    return (
        f"in {len(told)} of {len(runs)} runs the simulated user told facts before they were asked for, such "
        f"as {name!r}: the score may be too high; test the user with `assay judge fidelity`"
    )
