"""One evaluation of a deployment, and the thread with which a gateway makes them."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from assay.api.deploy.judge_replays import replay_judges
from assay.api.deploy.replay import replay
from assay.deployment.decisions import PROMOTED, RUNNING, Decision, advance
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.events import Hook
from assay.deployment.standing import notify
from assay.deployment.watching import watched, watches_now
from assay.errors import DeploymentError
from assay.evaluation.progress import Progress
from assay.support.scrubbing import error_text
from assay.traces import Store

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
