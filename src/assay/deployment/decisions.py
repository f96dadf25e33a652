"""Decides the next step of a deployment: `advance`. Called by the gateway, the schedule, by hand and by the simulation.

Tests are valid however often they are evaluated. Where the numbers come from, and where decisions are written, is
behind the Protocol `Records`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from assay.deployment.evidence import CANDIDATE, Arms
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.readings import (
    SCORED_BY,
    Paired,
    Reading,
    betting,
    beyond_limit,
    known_or_zero,
    obrien_fleming,
    reading_of,
    replayed_reading,
    stated,
    uncomparable,
)
from assay.support.numbers import signed

RUNNING, PAUSED, PROMOTED, ROLLED_BACK = "running", "paused", "promoted", "rolled_back"
_FEWEST_RUNNING = 5  # rollouts of the candidate that hang, from which on a step does not end
_RATIO_ALPHA = 0.001  # of the check that units arrive in the planned ratio


@dataclass(frozen=True, kw_only=True)
class State:
    """Status of a deployment.

    Attributes:
        step: index into the plan's steps.
        started_at: when the step began, seconds since the epoch.
        version: number of decisions so far; a decision is written only if it is still the same.
        evaluations: planned evaluations of the gain that were made, for obrien_fleming.
    """

    step: int = 0
    status: str = RUNNING
    started_at: float = 0.0
    version: int = 0
    evaluations: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What `advance` decided: continue, next, promote, rollback or pause; which rule, and the numbers that it used.

    Attributes:
        watch: the watch that gave an alarm (action alarm, pause or rollback).
        replay: numbers of a replay of a judge's anchors (action replay).
    """

    action: str
    rule: str
    reason: str
    step: int
    readings: tuple[Reading, ...] = ()
    evaluated: bool = False  # whether one of the planned evaluations was used
    requests: Mapping[str, int] = field(default_factory=dict)
    watch: str | None = None
    replay: Mapping[str, Any] | None = None


class Records(Protocol):
    """Where a deployment is stored, and what its arms have shown."""

    def state(self, name: str) -> tuple[Plan, State]:
        """Plan and state of a deployment."""
        ...

    def evidence(self, name: str, metric: Metric, now: float) -> Arms:
        """Sums of a metric by stratum and arm, of live rollouts that ended at least `horizon_s` before `now`."""
        ...

    def shadow(self, name: str, metric: Metric) -> Paired:
        """The replayed rollouts of the shadow step."""
        ...

    def units(self, name: str, step: int) -> Mapping[str, int]:
        """Units by arm that came first while a step was running."""
        ...

    def requests(self, name: str, step: int, now: float) -> Mapping[str, int]:
        """Rollouts by arm that ended while a step was running; replayed ones as those of the candidate."""
        ...

    def write(self, name: str, decision: Decision, before: State, after: State) -> bool:
        """Appends a decision and moves the deployment in one transaction. False if its state is no longer `before`."""
        ...


def advance(records: Records, name: str, now: float) -> Decision:
    """Evaluates a deployment and takes its next step, if there is one to take.

    Idempotent: called twice, or by two processes at once, it takes a step once. A decision to continue is not written,
    unless it used one of the planned evaluations.

    Args:
        now: seconds since the epoch.
    """
    plan, state = records.state(name)
    if state.status != RUNNING:
        return Decision(action="continue", rule="status", reason=f"the deployment is {state.status}", step=state.step)
    decision = decide(plan, state, name, records, now)
    after = _after(plan, state, decision, now)
    if after != state and not records.write(name, decision, state, after):
        return Decision(action="continue", rule="conflict", reason="another process has just decided", step=state.step)
    return decision


def readings_now(plan: Plan, state: State, name: str, records: Records, now: float) -> tuple[Reading, ...]:
    """The metrics of a deployment's step, in any status. Decides nothing."""
    if plan.steps[state.step].shadow:
        return tuple(replayed_reading(plan, metric, records.shadow(name, metric)) for metric in plan.metrics)
    return tuple(reading_of(plan, state.step, metric, records.evidence(name, metric, now)) for metric in plan.metrics)


def _after(plan: Plan, state: State, decision: Decision, now: float) -> State:
    if decision.action == "continue" and not decision.evaluated:
        return state
    status = {"promote": PROMOTED, "rollback": ROLLED_BACK, "pause": PAUSED}.get(decision.action, RUNNING)
    moved = decision.action == "next"
    return replace(
        state, step=state.step + moved, status=status, started_at=now if moved else state.started_at,
        version=state.version + 1, evaluations=state.evaluations + decision.evaluated,
    )  # fmt: skip


def decide(plan: Plan, state: State, name: str, records: Records, now: float) -> Decision:
    """The decision that the numbers give, without writing it.

    Rules in order: `sample_ratio`, `failure_above`, `failure_loss`, `missing` (these hold in every step), then whether
    the step is over: `step`, `success`, `inconclusive`.
    """
    step = plan.steps[state.step]
    requests = records.requests(name, state.step, now)
    made = _Maker(state.step, requests)
    if step.shadow:
        return _shadow(plan, step, state, name, records, made, now)
    if (ratio := _ratio(records.units(name, state.step), step.share)) is not None:
        return made("pause", "sample_ratio", ratio)
    arms = {metric.name: records.evidence(name, metric, now) for metric in plan.metrics}
    readings = tuple(reading_of(plan, state.step, metric, arms[metric.name]) for metric in plan.metrics)
    made.readings = readings
    for metric, reading in zip(plan.metrics, readings, strict=True):
        if (above := beyond_limit(plan, metric, arms[metric.name])) is not None:
            return made("rollback", "failure_above", above)
        if reading.high < -metric.tolerated(known_or_zero(reading.champion)):
            return made("rollback", "failure_loss", _harm(metric, reading))
    for metric, reading in zip(plan.metrics, readings, strict=True):
        if (missing := uncomparable(plan, metric, reading, arms[metric.name])) is not None:
            return made("pause", "missing", missing)
    if (running := _running(arms, state.step, requests)) is not None:
        return made("continue", "step", running)
    return _end_of_step(plan, step, state, made, now, _old_enough(arms, state.step))


def _old_enough(arms: Mapping[str, Arms], step: int) -> int:
    """Rollouts of a step that are older than the horizon of every metric. Others have shown no harm because they could
    not yet; also those that ended in the future, by the clock of another machine."""
    return min(
        sum(cell.count + cell.missing for stratum, of_arm in of_metric.items() if stratum[0] == step
            for cell in of_arm.values())
        for of_metric in arms.values()
    )  # fmt: skip


def _running(arms: Mapping[str, Arms], step: int, requests: Mapping[str, int]) -> str | None:
    """Why the step cannot end yet: most of the candidate's rollouts have not ended. None if they have."""
    of_step = next(iter(arms.values()), {})
    running = sum(of_arm[CANDIDATE].running for stratum, of_arm in of_step.items() if stratum[0] == step)
    ended = requests.get(CANDIDATE, 0)
    if running < _FEWEST_RUNNING or running <= ended:
        return None
    return f"{running} rollouts of the candidate have not ended, {ended} have: it hangs, or has just begun"


class _Maker:
    """Makes decisions with the numbers collected so far."""

    def __init__(self, step: int, requests: Mapping[str, int]) -> None:
        self.step, self.requests, self.readings = step, requests, tuple[Reading, ...]()

    def __call__(self, action: str, rule: str, reason: str, *, evaluated: bool = False) -> Decision:
        return Decision(
            action=action, rule=rule, reason=reason, step=self.step, readings=self.readings, evaluated=evaluated,
            requests=self.requests,
        )  # fmt: skip


def _shadow(plan: Plan, step: Step, state: State, name: str, records: Records, made: _Maker, now: float) -> Decision:
    readings = []
    for metric in plan.metrics:
        reading = replayed_reading(plan, metric, records.shadow(name, metric))
        readings.append(reading)
        made.readings = tuple(readings)
        if reading.high < -metric.tolerated(known_or_zero(reading.champion)):
            return made("rollback", "failure_loss", f"in the replay: {_harm(metric, reading)}")
    done = made.requests.get(CANDIDATE, 0)
    if done >= step.requests and (missing := _unpaired(plan, readings)) is not None:
        return made("pause", "missing", missing)
    if done >= step.requests and now - state.started_at >= step.hold_s:
        return made("next", "step", f"{done} rollouts replayed, no harm shown")
    return made("continue", "step", f"{done} of {step.requests} rollouts replayed")


def _unpaired(plan: Plan, readings: Sequence[Reading]) -> str | None:
    """Why too few pairs have values; None if enough have. Human ratings arrive later, so they are not required."""
    for metric, reading in zip(plan.metrics, readings, strict=True):
        lost, count = reading.missing.get(CANDIDATE, 0), reading.counts.get(CANDIDATE, 0)
        if (
            metric.success_gain is not None
            and metric.name != "human_rating"
            and lost > plan.max_missing * (lost + count)
        ):
            hint = "" if count else f"; {SCORED_BY}"
            return f"in the replay: {reading.metric} has no value in {lost} of {lost + count} pairs{hint}"
    return None


def _harm(metric: Metric, reading: Reading) -> str:
    bound, word = metric.sign * reading.high, "upper" if metric.sign > 0 else "lower"
    return (
        f"{metric.name}: candidate less champion is {signed(metric.sign * reading.gain)}, {word} bound "
        f"{signed(bound)}{stated(reading.missing_by)} ({reading.counts.get(CANDIDATE, 0)} values of the candidate)"
    )


def _ratio(units: Mapping[str, int], share: float) -> str | None:
    candidate, whole = units.get(CANDIDATE, 0), sum(units.values())
    low, high = betting(candidate, whole, alpha=_RATIO_ALPHA)
    if low <= share <= high:
        return None
    return (
        f"{candidate} of {whole} units are on the candidate, {share:.0%} were planned: units are lost or repeated in "
        "one arm, so the arms cannot be compared"
    )


def _end_of_step(plan: Plan, step: Step, state: State, made: _Maker, now: float, old: int) -> Decision:
    done = sum(made.requests.values())
    held = min(done, old) >= step.requests and now - state.started_at >= step.hold_s
    if step.decides:
        return _gain(plan, step, state, made, done, held)
    if not held:
        young = f", {old} of them older than every horizon" if old < done else ""
        return made("continue", "step", f"{done} of {step.requests} rollouts at {step.label}{young}, no harm shown")
    unknown = [
        metric.name
        for metric, reading in zip(plan.metrics, made.readings, strict=True)
        if metric.success_gain is not None and not any(reading.counts.values())
    ]
    if unknown and done:
        without = f"none of them has a value of {', '.join(unknown)}, so harm could not show"
        return made("continue", "step", f"{done} rollouts at {step.label}, {without}; {SCORED_BY}")
    if state.step + 1 == len(plan.steps):
        return made("promote", "step", f"held for {done} rollouts at {step.label} without harm")
    return made("next", "step", f"{done} rollouts at {step.label}, no harm shown")


def _gain(plan: Plan, step: Step, state: State, made: _Maker, done: int, held: bool) -> Decision:
    evaluated = False
    if plan.test == "obrien_fleming":
        planned = (state.evaluations + 1) * (step.max_requests or 1000) / plan.evaluations
        if state.evaluations >= plan.evaluations or done < planned:
            return made("continue", "step", f"{done} rollouts; the next evaluation is at {planned:.0f}")
        evaluated = True
    goals = [
        (metric, reading)
        for metric, reading in zip(plan.metrics, made.readings, strict=True)
        if metric.success_gain is not None
    ]
    won = [_has_gain(plan, state, metric, reading) for metric, reading in goals]
    fading = [
        f"{metric.name} {signed(reading.newer)} (lower bound {signed(reading.newer_low)})"
        for metric, reading in goals
        if reading.newer < metric.needed(known_or_zero(reading.champion)) or reading.newer_low <= 0
    ]
    texts = ", ".join(
        f"{metric.name} {signed(reading.gain)} (lower bound {signed(reading.low)}{stated(reading.missing_by)})"
        if math.isfinite(reading.gain)
        else f"{metric.name} not known of both arms in this step"
        for metric, reading in goals
    )
    if fading and all(won):
        texts += f"; not shown in the newer half of this step, so that it may fade: {', '.join(fading)}"
    elif held and all(won):
        last = state.step + 1 == len(plan.steps)
        lasted = f"in both halves of a step of {done} rollouts; a slower fade than that would not show"
        return made("promote" if last else "next", "success", f"gain: {texts}, {lasted}", evaluated=evaluated)
    if done >= (step.max_requests or math.inf):
        return made("pause", "inconclusive", f"after {done} rollouts no gain: {texts}", evaluated=evaluated)
    return made("continue", "step", f"{done} rollouts at {step.label}: {texts}", evaluated=evaluated)


def _has_gain(plan: Plan, state: State, metric: Metric, reading: Reading) -> bool:
    low = reading.low
    if plan.test == "obrien_fleming":
        low = reading.least - reading.least_error * obrien_fleming(
            state.evaluations + 1, plan.evaluations, 2 * plan.alpha
        )
    return low > 0 and reading.gain >= metric.needed(known_or_zero(reading.champion))
