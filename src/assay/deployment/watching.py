"""Evaluates the watches of a deployment, also after its promotion: drift, refusals, failures, scores, latency, cost.

A limit counts as passed once a confidence sequence is beyond it, so that the watches may be evaluated at any time.
Rollouts count as independent here. Decides nothing about a gain: `assay.deployment.decisions` does.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import sqlalchemy as sa

from assay.deployment.decisions import PAUSED, PROMOTED, ROLLED_BACK, RUNNING, Decision, State, decide, readings_now
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.evidence import CANDIDATE, CHAMPION, Arms, difference, mean_of
from assay.deployment.plan import INPUT_DRIFT, JUDGE_DRIFT, Hook, Metric, Notifier, Watch
from assay.deployment.pool import Profile, drift
from assay.deployment.readings import Reading, betting, normal_mixture, stated, stored_reading
from assay.deployment.rollout_values import columns_of, value_of
from assay.support.numbers import counted, figure, signed
from assay.support.report import Report
from assay.traces.store import tables as schema
from assay.traces.store.leases import present

# -- The watch `judge_drift`: when a judge's anchors are due, the stored results of their replays, and what these show.
#
# Calls no judge: `assay.commands.advancing` does. A replay is two rows of the deployment's history with the
# action `replay`: one when it begins, so that of several processes one pays for it, and one with its numbers.


BEGUN, DONE, FAILED = "begun", "done", "failed"
_REPLAY_ALPHA = 0.01  # of a false alarm of one watch, over all of its replays
_LOST = 0.05  # share of anchors without a verdict above which the judge counts as not working
_NUMBERS = ("n", "lost", "mean_difference", "mean_square", "mean_square_error", "noise", "changed", "calls", "cost_usd")


def replays_of(history: Sequence[Mapping[str, Any]], watch: Watch) -> list[Mapping[str, Any]]:
    """The rows of a watch's replays, oldest first."""
    return [row for row in history if row["action"] == "replay" and row["replay"]["watch"] == watch.key]


def due_replays(deployment: Deployment, history: Sequence[Mapping[str, Any]], now: float) -> list[Watch]:
    """The watches whose anchors are to be replayed now. One that was killed is due again after its interval."""
    due = []
    for watch in deployment.plan.watch:
        if watch.name == JUDGE_DRIFT:
            begun = [row["replay"]["at"] for row in replays_of(history, watch) if row["replay"]["status"] == BEGUN]
            if not begun or now - begun[-1] >= watch.every_s:
                due.append(watch)
    return due


def write_replay(
    deployments: Deployments, name: str, watch: Watch, status: str, *, at: float,
    report: Mapping[str, Any] | None = None, error: str = "", before: State | None = None,
) -> bool:  # fmt: skip
    """Writes a row of a replay. Changes neither the status nor the share of the deployment.

    Args:
        at: when the replay began, seconds since the epoch.
        report: of `assay.judges.quality.drift.compare`, for `done`.
        before: the state in which the replay was found to be due. If another process has decided since, nothing is
            written; without it the row is written whatever has been decided.
    """
    numbers = {key: report[key] for key in _NUMBERS if key in report} if report is not None else {}
    if report is not None:
        drift, low = _drift(numbers, 1)
        numbers.update(drift=drift, low=low)
        lost = numbers["lost"]
        if drift is None or lost > _LOST * (numbers["n"] + lost):
            status, error = FAILED, f"{lost} of {numbers['n'] + lost} anchors are unscored"
    row = {"watch": watch.key, "status": status, "at": at, "limit": watch.above, "error": error or None, **numbers}
    if status == DONE:
        reason = _text(row)
    else:
        reason = "anchors are replayed" if status == BEGUN else f"the anchors could not be replayed: {error}"
    for _ in range(1 if before is not None else 20):
        state = before or deployments.get(name).state
        decision = Decision(action="replay", rule="watch", reason=f"{watch.key}: {reason}", step=state.step, replay=row)
        if deployments.write(name, decision, state, replace(state, version=state.version + 1)):
            return True
    return False


def judge_alarm(history: Sequence[Mapping[str, Any]], watch: Watch) -> tuple[bool, str] | None:
    """The alarm of the newest replay: whether the anchors could be replayed, and the reason. None without an alarm.

    The error of all replays of a watch together is bounded: that of replay k is alpha / (k (k + 1)).
    """
    results = [row["replay"] for row in replays_of(history, watch) if row["replay"]["status"] != BEGUN]
    if not results:
        return None
    newest = results[-1]
    if newest["status"] == FAILED:
        return False, f"{watch.key}: the anchors could not be replayed: {newest['error']}"
    _, low = _drift(newest, sum(row["status"] == DONE for row in results))
    if watch.above is None or low is None or low <= watch.above:
        return None
    return True, f"{watch.key}: {_text(newest)}"


def judge_watches(deployments: Deployments, deployment: Deployment) -> list[dict[str, Any]]:
    """Each watch of a judge with its newest result; `at` is None before the first one."""
    history, watches = deployments.history(deployment.id), []
    for watch in deployment.plan.watch:
        if watch.name != JUDGE_DRIFT:
            continue
        results = [row for row in replays_of(history, watch) if row["replay"]["status"] != BEGUN]
        alarm = judge_alarm(history, watch)
        last: Mapping[str, Any] = results[-1] if results else {"at": None, "replay": {}}
        names = ("status", "drift", "low", "n", "lost", "mean_difference", "error")
        watches.append(
            {
                "watch": watch.key, "judge": watch.judge, "limit": watch.above, "every_s": watch.every_s,
                "at": last["at"], **{name: last["replay"].get(name) for name in names},
                "ok": None if not results else alarm is None,
            }
        )  # fmt: skip
    return watches


def _drift(numbers: Mapping[str, Any], replay: int) -> tuple[float | None, float | None]:
    """The drift and its lower bound: roots of the mean squared difference, and of its bound, less the noise squared."""
    from scipy import stats

    mean, error = numbers.get("mean_square"), numbers.get("mean_square_error")
    if mean is None:
        return None, None
    noise = float(numbers["noise"]) ** 2
    z = float(stats.norm.isf(_REPLAY_ALPHA / (replay * (replay + 1))))
    bound = math.inf if error is None else z * error
    return math.sqrt(max(0.0, mean - noise)), math.sqrt(max(0.0, mean - bound - noise))


def _text(numbers: Mapping[str, Any]) -> str:
    changed = f"; changed: {', '.join(numbers['changed'])}" if numbers.get("changed") else ""
    return (
        f"the verdicts on {numbers['n']} anchors differ from the frozen ones by {numbers['drift']:.3f} of the scale, "
        f"on average {signed(numbers['mean_difference'])}{changed}"
    )


# -- Watching.


_ALPHA = 0.01  # of a false alarm of one watch
_COMPARED = 1000  # newest rollouts before and since, for drift
_FEWEST = 100  # of each of them
_ROLLOUTS = schema.rollouts.c


def watches_now(deployments: Deployments, deployment: Deployment, now: float) -> float | None:
    """Since when the candidate is watched, seconds since the epoch; None if it is not."""
    if not deployment.plan.watch:
        return None
    if deployment.state.status == RUNNING:
        return deployment.started_at
    if (
        deployment.state.status != PROMOTED
        or deployments.registry.alias(deployment.agent, "champion") != deployment.candidate
    ):
        return None
    promoted = [row["at"] for row in deployments.history(deployment.id) if row["action"] == "promote"]
    return promoted[-1] if promoted and now - promoted[-1] <= deployment.plan.watch_s else None


def watched(deployments: Deployments, deployment: Deployment, now: float | None = None) -> Decision | None:
    """The first alarm that is due, after it is written; None without one. Safe to call by several processes at once."""
    moment = present(deployments.engine) if now is None else now
    if (since := watches_now(deployments, deployment, moment)) is None:
        return None
    history = deployments.history(deployment.id)
    acted = {row.get("watch") for row in history}
    for watch in deployment.plan.watch:
        action, key = watch.action, watch.key
        if watch.name == JUDGE_DRIFT:
            called, reason = judge_alarm(history, watch) or (True, None)
            if not called:  # is not evidence about the candidate
                action, key = "alarm", f"{watch.key}: not called"
        elif key in acted:
            continue
        else:
            reason = _beyond(deployments.engine, deployment, watch, since)
        if reason is None or key in acted:
            continue
        if deployment.state.status != RUNNING:
            gone = deployment.champion in deployments.registry.retired(deployment.agent)
            if action == "rollback" and gone:
                reason += f"; not rolled back, because {deployment.agent}@{deployment.champion} is retired"
            action = "alarm" if action == "pause" or gone else action
        status = {"rollback": ROLLED_BACK, "pause": PAUSED}.get(action, deployment.state.status)
        decision = Decision(action=action, rule="watch", reason=reason, step=deployment.state.step, watch=key)
        after = replace(deployment.state, status=status, version=deployment.state.version + 1)
        if deployments.write(deployment.id, decision, deployment.state, after):
            return decision
        return None  # another process has just decided
    return None


def _beyond(engine: sa.Engine, deployment: Deployment, watch: Watch, since: float) -> str | None:
    if watch.name == INPUT_DRIFT:
        return _drifted(engine, deployment, watch, since)
    metric, limit = Metric(name=watch.name), watch.below if watch.above is None else watch.above
    values = _values(engine, deployment, metric, since)
    if not values or limit is None:
        return None
    total: float
    if metric.is_amount:  # whether the median is beyond: exact for every distribution, also with outliers
        total, bound, mean = sum(value > math.log(max(limit, 1e-9)) for value in values), 0.5, math.exp(median(values))
    else:
        total, bound, mean = math.fsum(values), limit, math.fsum(values) / len(values)
    low, high = betting(total, len(values), alpha=2 * _ALPHA)
    what = f"the median of {watch.name}" if metric.is_amount else watch.name
    measured = f"{what} of {deployment.agent}@{deployment.candidate} is {mean:.3{'g' if metric.is_amount else 'f'}}"
    if watch.above is not None and low > bound:
        return f"{measured}, above {watch.above:g} ({len(values)} values)"
    if watch.below is not None and high < bound:
        return f"{measured}, below {watch.below:g} ({len(values)} values)"
    return None


def _values(engine: sa.Engine, deployment: Deployment, metric: Metric, since: float) -> list[float]:
    """The candidate's values, those of amounts as logarithms; without rollouts that have none."""
    query = sa.select(*columns_of(metric)).where(
        _ROLLOUTS.version == f"{deployment.agent}@{deployment.candidate}", _ROLLOUTS.phase == "deployed",
        _ROLLOUTS.started_at >= since, _ROLLOUTS.ended_at.is_not(None),
    )  # fmt: skip
    with engine.connect() as connection:
        values = [value_of(metric, row) for row in connection.execute(query).mappings()]
    return [value for value in values if not math.isnan(value)]


def _drifted(engine: sa.Engine, deployment: Deployment, watch: Watch, since: float) -> str | None:
    """Inputs of the agent since then against those before; a difference must also be more than sampling noise."""
    from scipy import stats

    before = _profile(engine, deployment, _ROLLOUTS.started_at < deployment.started_at)
    now = _profile(engine, deployment, _ROLLOUTS.started_at >= since)
    if min(len(before.lengths), len(now.lengths)) < _FEWEST or watch.above is None:
        return None
    change = drift(before, now) or {}
    kinds = sorted(before.types.keys() | now.types.keys())
    table = [[profile.types[kind] for kind in kinds] for profile in (before, now)]
    p = float(stats.chi2_contingency(table).pvalue) if len(kinds) > 1 else 1.0
    distance, length = change["distance"], change["length"]
    if distance > watch.above and p < _ALPHA / 10:
        new = f"; new: {', '.join(change['new_task_types'])}" if change["new_task_types"] else ""
        return f"task types differ from those before by {distance:.2f}, above {watch.above:g}{new}"
    if length["ks"] > watch.above and length["p"] < _ALPHA / 10:
        return (
            f"lengths of inputs differ from those before by {length['ks']:.2f}, above {watch.above:g}: the median was "
            f"{length['before']:g} characters and is {length['now']:g}"
        )
    return None


def _profile(engine: sa.Engine, deployment: Deployment, when: Any) -> Profile:
    query = (
        sa.select(_ROLLOUTS.task_type, _ROLLOUTS.inputs_json)
        .where(
            _ROLLOUTS.version.startswith(f"{deployment.agent}@", autoescape=True), _ROLLOUTS.phase == "deployed", when
        )
        .order_by(_ROLLOUTS.started_at.desc())
        .limit(_COMPARED)
    )
    profile = Profile()
    with engine.connect() as connection:
        rows: Iterable[Any] = connection.execute(query)
        for kind, inputs in rows:
            profile.add(str(kind), json.loads(inputs))
    return profile


# -- Status of a deployment, and orders of users. For the command line and the local page; runs no program.


_EVENTS = {"promote": "promoted", "rollback": "rolled_back", "pause": "paused", "next": "next", "alarm": "alarm"}
_PLANNED = 0.25 / 200  # variance at which the shown intervals are narrowest: that of 200 rollouts


@dataclass(frozen=True, kw_only=True, repr=False)
class DeploymentReport(Report):
    """Status of a deployment, and the decision that its numbers give now.

    Attributes:
        deployment: id of the deployment.
        agent: name of the agent.
        champion: number of the version in production.
        candidate: number of the version that is to replace it.
        status: running, paused, promoted or rolled_back.
        stage: the current step, such as `10 %`.
        step: its number, from 1.
        steps: number of steps.
        share: share of the units on the candidate.
        decision: what was decided, or with `status` what the numbers give now.
        rule: rule of the decision.
        reason: the rule's reason with its numbers.
        requests: ended rollouts of the step by arm.
        arms: for each arm the number of values, the mean with its confidence sequence, and the unscored rollouts.
        readings: each metric as the decision saw it.
        judges: each watch of a judge (`judge_drift`) with the result of its newest replay of anchors.
        variance_removed: share of the variance of the difference that the covariate removed; null without one.
    """

    deployment: str
    agent: str
    champion: int
    candidate: int
    status: str
    stage: str
    step: int
    steps: int
    share: float
    decision: str
    rule: str
    reason: str
    requests: Mapping[str, int]
    arms: dict[str, dict[str, float | int | None]]
    readings: tuple[Reading, ...]
    judges: list[dict[str, Any]]
    variance_removed: float | None

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.agent}@{self.candidate} in place of {self.agent}@{self.champion}: {self.status}, step {self.step} "
            f"of {self.steps} ({self.stage}), {self.share:.0%} on the candidate"
        )
        for arm, values in self.arms.items():
            unscored = f", {values['unscored']} unscored" if values["unscored"] else ""
            score, low, high = (figure(values[name]) for name in ("score", "low", "high"))
            score += "" if values["score"] is None else f", lower bound {low}, upper bound {high}"
            yield f"  {arm:9} {counted(int(values['n'] or 0), 'rollouts'):>15}{unscored}  {score}"
        for reading in self.readings:
            if not any(reading.counts.values()):
                yield f"  {reading.metric}: nothing measured yet"
                continue
            gain, low, high = map(signed, (reading.gain, reading.low, reading.high))
            yield (
                f"  {reading.metric}: champion {figure(reading.champion)}, candidate {figure(reading.candidate)}, gain "
                f"{gain}, lower bound {low}, upper bound {high}{stated(reading.missing_by)}"
            )
        if self.variance_removed is not None:
            yield f"  the covariate removed {self.variance_removed:.0%} of the variance of the difference"
        yield from judge_lines(self.judges)
        waits = self.decision == "continue" and self.status != RUNNING
        decision = f"last decision ({self.rule})" if waits else f"decision: {self.decision} ({self.rule})"
        yield f"{decision}: {self.reason}"


def judge_lines(judges: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The watches of judges with their newest replays."""
    for row in judges:
        mark = {True: "ok", False: "ALARM", None: "–"}[row["ok"]]
        if row["error"]:
            result = f"anchors could not be replayed: {row['error']}"
        elif row["drift"] is None:
            result = "anchors not replayed so far"
        else:
            result = f"drift {row['drift']:.3f}, limit {row['limit']:g} ({row['n']} anchors)"
        yield f"{mark:5}  judge {row['judge']}: {result}"


def status_of(deployments: Deployments, name: str, now: float, decision: Decision | None = None) -> DeploymentReport:
    """The status of a deployment; nothing is written.

    Args:
        name: its id or the first characters of it, or an agent, for its newest one.
        now: seconds since the epoch.
        decision: that was just taken; by default what the numbers give now.
    Raises:
        DeploymentError: there is none.
    """
    deployment = deployments.get(name)
    if decision is None:
        if deployment.state.status == RUNNING:
            decision = decide(deployment.plan, deployment.state, deployment.id, deployments, now)
        else:
            decision = _last_decision(deployments, deployment, now)
    metric = next(metric for metric in deployment.plan.metrics if metric.success_gain is not None)
    cells = deployments.evidence(deployment.id, metric, now)
    state, steps = deployment.state, deployment.plan.steps
    return DeploymentReport(
        deployment=deployment.id, agent=deployment.agent, champion=deployment.champion, candidate=deployment.candidate,
        status=state.status, stage=steps[state.step].label, step=state.step + 1, steps=len(steps),
        share=deployment.share, decision=decision.action, rule=decision.rule, reason=decision.reason,
        requests=decision.requests, arms=_arms(metric, cells),
        readings=tuple(reading.in_units() for reading in decision.readings),
        judges=judge_watches(deployments, deployment), variance_removed=_removed(cells),
    )  # fmt: skip


def _last_decision(deployments: Deployments, deployment: Deployment, now: float) -> Decision:
    """Why a deployment that is not running stands where it does, with the numbers that this was decided on.

    If a person ordered it, or a watch gave an alarm, there are none: then those of its rollouts now.
    """
    state = deployment.state
    rows = [row for row in deployments.history(deployment.id) if row["action"] != "replay"]
    last: Mapping[str, Any] = rows[-1] if rows else {}
    readings = tuple(map(stored_reading, last.get("readings") or ()))
    return Decision(
        action="continue", rule=last.get("rule", "status"), step=state.step,
        reason=last.get("reason", f"the deployment is {state.status}"),
        readings=readings or readings_now(deployment.plan, state, deployment.id, deployments, now),
        requests=(readings and last.get("requests")) or deployments.requests(deployment.id, state.step, now),
    )  # fmt: skip


def _removed(cells: Arms) -> float | None:
    """Share of the variance of the difference that the covariate removed; None without one or without a difference."""
    if not any(cell.shift is not None and cell.shift.any() for of_arm in cells.values() for cell in of_arm.values()):
        return None
    before, after = difference(cells, covariate=False).variance, difference(cells).variance
    return 1 - after / before if math.isfinite(before) else None


def _arms(metric: Metric, cells: Arms) -> dict[str, dict[str, float | int | None]]:
    """Number of values, mean and 95 % confidence sequence of each arm, for the first metric that promotes."""
    arms = {}
    for arm in (CHAMPION, CANDIDATE):
        of_arm = [of_stratum[arm] for of_stratum in cells.values()]
        mean, variance, _ = mean_of(of_arm)
        known = math.isfinite(mean)
        width = normal_mixture(variance, alpha=0.05, planned=_PLANNED) if known else math.inf
        low, high = (
            (mean - width, mean + width) if metric.is_amount else (max(0.0, mean - width), min(1.0, mean + width))
        )
        arms[arm] = {
            "n": sum(cell.count for cell in of_arm), "score": mean if known else None, "low": low if known else None,
            "high": high if known else None, "unscored": sum(cell.missing for cell in of_arm),
        }  # fmt: skip
    return arms


def notify(deployment: Deployment, decision: Decision, hooks: Sequence[Hook] = ()) -> None:
    """Sends what was decided, after it was written."""
    if decision.action not in _EVENTS:
        return
    notifier = Notifier((*deployment.plan.events, *hooks))
    notifier.notify(
        _EVENTS[decision.action], agent=deployment.agent, deployment=deployment.id, champion=deployment.champion,
        candidate=deployment.candidate, step=decision.step + 1, rule=decision.rule, reason=decision.reason,
    )  # fmt: skip
    notifier.close()


def order(deployments: Deployments, name: str, action: str, *, reason: str = "", by: str | None = None) -> Deployment:
    """Writes an order of a user, and sends it to the hooks of the plan.

    Args:
        action: pause, resume, promote or rollback; a rollback also takes back a promotion.
        by: who orders it; by default the user of this process.
    Raises:
        DeploymentError: not possible in the deployment's state.
    """
    deployment = deployments.get(name)
    notify(deployment, deployments.order(deployment.id, action, reason=reason, by=by))
    return deployments.get(deployment.id)
