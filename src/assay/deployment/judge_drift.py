"""The watch `judge_drift`: when a judge's anchors are due, the stored results of their replays, and what these show.

Calls no judge: `assay.api.deploy.judge_replays` does. A replay is two rows of the deployment's history with the action
`replay`: one when it begins, so that of several processes one pays for it, and one with its numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.deployment.decisions import Decision, State
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.watches import JUDGE_DRIFT, Watch
from assay.support.numbers import signed

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
