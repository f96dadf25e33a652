"""Public API for `assay deploy status`, `advance`, `pause`, `resume`, `promote`, `rollback` and `history`."""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from assay.api.deploy.replay import replay
from assay.commands.judge_drift import replay_anchors
from assay.deployment.decisions import PROMOTED, RUNNING, Decision, advance
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.plan import JUDGE_DRIFT, Hook, Watch
from assay.deployment.watching import (
    BEGUN,
    DONE,
    FAILED,
    DeploymentReport,
    due_replays,
    notify,
    order,
    status_of,
    watched,
    watches_now,
    write_replay,
)
from assay.errors import BudgetExceeded, ConfigError, DeploymentError
from assay.evaluation.progress import Progress, default_progress
from assay.models import Meter
from assay.runs.loading import load_rubric
from assay.runs.rescoring import named_judge, score_stored
from assay.runs.scoring_settings import ScoringSettings
from assay.runs.settings import AdvanceSettings
from assay.runs.settings.store_options import StoredJudgeOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.scrubbing import error_text
from assay.traces import Store

# -- Replays the anchors of the judges that a deployment is watched by, when they are due.


_LOGGED = logging.getLogger("assay.deployed")


def replay_judges(
    deployments: Deployments, deployment: Deployment, *, store: str | Path | None, now: float | None = None,
    progress: Progress | None = None,
) -> int:  # fmt: skip
    """Replays what is due, with each judge as it runs now, and stores the results. Decides nothing.

    A judge that cannot be called is a row with the reason. Of several processes one replays.

    Args:
        now: seconds since the epoch; by default the present.
    Returns:
        The number of judges that were replayed.
    """
    if not any(watch.name == JUDGE_DRIFT for watch in deployment.plan.watch):
        return 0
    moment = time.time() if now is None else now
    if watches_now(deployments, deployment, moment) is None:
        return 0
    replayed = 0
    for watch in due_replays(deployment, deployments.history(deployment.id), moment):
        state = deployments.get(deployment.id).state
        if state.status != deployment.state.status:
            break
        if write_replay(deployments, deployment.id, watch, BEGUN, at=moment, before=state):
            _replay(deployments, deployment.id, watch, moment, store, progress)
            replayed += 1
    return replayed


def _replay(
    deployments: Deployments, name: str, watch: Watch, at: float, store: str | Path | None, progress: Progress | None
) -> None:
    options = {key: value for key in ("model", "api_base") if (value := getattr(watch, key)) is not None}
    try:
        report = replay_anchors(str(watch.judge), anchors=watch.anchors, store=store, progress=progress, **options)
    except (Exception, BudgetExceeded) as error:  # a folder that is gone, a model that is away
        _LOGGED.warning("the anchors of %s could not be replayed: %s", watch.judge, error_text(error))
        write_replay(deployments, name, watch, FAILED, at=at, error=error_text(error)[:1000])
    else:
        write_replay(deployments, name, watch, DONE, at=at, report=report.to_dict())


# -- One evaluation of a deployment, and the thread with which a gateway makes them.


_LOG = logging.getLogger("assay.deployed")
_REST = 50  # an evaluation is followed by a pause of so many times its CPU time, so that it takes at most 2 % of a core
_LONGEST_S = 300.0  # of such a pause
_REPLAYED = 20  # rollouts per call


def advanced(
    opened: Store, deployment: Deployment, *, rubric: Any = None, hooks: Sequence[Hook] = (), now: float | None = None,
    most: int | None = None, progress: Progress | None = None,
) -> Decision:  # fmt: skip
    """Replays what a shadow step needs, decides, and tells the hooks. Safe to call by several processes at once.

    Watches come first, with the replays of judges that they need. Of a promoted deployment nothing else is evaluated.

    Args:
        rubric: scores replayed rollouts.
        most: rollouts that are replayed now; None for all that the step needs.
        now: seconds since the epoch; by default the present.
    """
    deployments = Deployments(opened.engine)
    if deployment.state.status == RUNNING and deployment.plan.steps[deployment.state.step].shadow:
        replay(deployments, deployment, rubric=rubric, store=opened.url, most=most, progress=progress)
    moment = time.time() if now is None else now
    if replay_judges(deployments, deployment, store=opened.url, now=moment, progress=progress):
        deployment = deployments.get(deployment.id)
    if (alarm := watched(deployments, deployment, moment)) is not None:
        notify(deployment, alarm, hooks)
        if alarm.action != "alarm":
            return alarm
    decision = advance(deployments, deployment.id, moment)
    notify(deployment, decision, hooks)
    return decision


class Advancer:
    """Advances the deployments of an agent in a thread, so that no call waits for it.

    Without an active deployment it makes one query in `every_s`. An error is logged, and the next evaluation tries
    again. Other callers of `advance` may run at the same time.

    Args:
        opened: the store; stays open while the thread runs.
        rubric: scores the rollouts that a shadow step replays.
        every_s: seconds between two evaluations, at least.
    """

    def __init__(self, opened: Store, agent: str, *, rubric: Any = None, every_s: float = 10.0) -> None:
        self.opened, self.agent, self.rubric, self.every_s = opened, agent, rubric, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._running, name=f"advance-{agent}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the evaluation or replayed rollout that is running, or after `timeout_s`."""
        self._ended.set()
        self._thread.join(timeout_s)

    def _running(self) -> None:
        wait = self.every_s
        while not self._ended.wait(wait):
            try:
                wait = max(self.every_s, self.once())
            except Exception as error:  # a store that is away, a candidate that cannot be loaded
                level = logging.DEBUG if isinstance(error, DeploymentError) else logging.WARNING
                _LOG.log(level, "the deployment of %s could not be advanced: %s", self.agent, error_text(error))
                wait = self.every_s

    def once(self) -> float:
        """Advances the active deployment, if there is one. Returns for how many seconds to pause."""
        deployments = Deployments(self.opened.engine)
        deployment = next(iter(deployments.all(self.agent, limit=1)), None)
        if deployment is None or deployment.state.status not in (RUNNING, PROMOTED):
            return 0.0
        if deployment.state.status == PROMOTED and watches_now(deployments, deployment, time.time()) is None:
            return 0.0
        began = time.thread_time()  # a busy machine must not make the pauses longer
        decision = advanced(self.opened, deployment, rubric=self.rubric, most=_REPLAYED)
        if decision.action != "continue":
            _LOG.info("%s: %s (%s): %s", deployment.id, decision.action, decision.rule, decision.reason)
        if deployment.plan.steps[deployment.state.step].shadow:
            return 0.0
        return min(_LONGEST_S, _REST * (time.thread_time() - began))


# -- Status.


@takes()
def deployment_status(
    deployment: str, *, store: str | Path | None = None, now: float | None = None
) -> DeploymentReport:
    """The status of a deployment; nothing is written.

    Args:
        deployment: its id or the first characters of it, or an agent, for its newest one.
        now: seconds since the epoch; by default the present.
    Raises:
        DeploymentError: there is none.
    """
    with Store(store) as opened:
        return status_of(Deployments(opened.engine), deployment, time.time() if now is None else now)


@takes(AdvanceSettings)
@trusts
def advance_deployment(
    deployment: str,
    *,
    rubric: str | Path | None = None,
    dry_run: bool = False,
    hooks: Sequence[Hook] = (),
    store: str | Path | None = None,
    now: float | None = None,
    progress: Progress | None = None,
    **options: Unpack[StoredJudgeOptions],
) -> DeploymentReport:
    """Evaluates a deployment and takes its next step, if there is one to take. Safe to call at any time, by anybody.

    Args:
        rubric: scores rollouts without a score first, and those that a shadow step replays.
        dry_run: writes nothing.
        hooks: called with the decision, in addition to those of the plan.
        now: seconds since the epoch; by default the present.
        options: the fields of `assay.runs.settings.AdvanceSettings`: the model of the rubric's judges.
    Raises:
        DeploymentError: there is no such deployment.
        ConfigError: a criterion needs a judge and no model is named for it, or a judge's model is named without a
            rubric.
    """
    values: dict[str, Any] = {**options}
    settings = AdvanceSettings(**values)
    if rubric is None and settings.judge_model is not None:
        raise ConfigError(f"judge_model={settings.judge_model!r} would have no effect without rubric")
    with Store(store) as opened:
        deployments = Deployments(opened.engine)
        current = deployments.get(deployment)
        moment = time.time() if now is None else now
        if dry_run:
            return status_of(deployments, current.id, moment)
        measure = None
        if rubric is not None:
            scoring = ScoringSettings(**{name: getattr(settings, name) for name in ("judge_model", *settings.OF_JUDGE)})
            scores = score_stored(opened, rubric, scoring, agent=current.agent, progress=progress)
            for name, gap in scores["undecided"].items():
                default_progress(progress).say(
                    f"{name} was not decided on {gap['n']} of {gap['of']}: {gap['reason']}. Checks that compare "
                    "expected outputs need them in the calls of the agent (expected=…)"
                )
            judge = named_judge(settings, Meter())
            measure = load_rubric(rubric, judge_model=judge)  # for replays
        decision = advanced(opened, current, rubric=measure, hooks=hooks, now=moment, progress=progress)
        return status_of(deployments, current.id, moment, decision)


@takes()
def order_deployment(
    deployment: str, action: str, *, reason: str = "", by: str | None = None, store: str | Path | None = None
) -> Deployment:
    """What a person orders.

    Args:
        action: pause, resume, promote or rollback; a rollback also takes back a promotion.
        by: who orders it; by default the user of this process.
    Raises:
        DeploymentError: not possible in the deployment's state.
    """
    with Store(store) as opened:
        return order(Deployments(opened.engine), deployment, action, reason=reason, by=by)


@takes()
def deployment_history(deployment: str, *, store: str | Path | None = None) -> list[dict[str, Any]]:
    """All decisions of a deployment, oldest first: action, rule, reason, numbers, when and by whom."""
    with Store(store) as opened:
        return Deployments(opened.engine).history(deployment)
