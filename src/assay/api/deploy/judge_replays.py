"""Replays the anchors of the judges that a deployment is watched by, when they are due."""

import logging
import time
from pathlib import Path

from assay.api.judge.drift import replay_anchors
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.judge_drift import BEGUN, DONE, FAILED, due_replays, write_replay
from assay.deployment.watches import JUDGE_DRIFT, Watch
from assay.deployment.watching import watches_now
from assay.errors import BudgetExceeded
from assay.evaluation.progress import Progress
from assay.support.scrubbing import error_text

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
        write_replay(deployments, name, watch, DONE, at=at, report=report)
