"""Public API for `assay deploy status`, `advance`, `pause`, `resume`, `promote`, `rollback` and `history`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from assay.api.deploy.advancing import advanced
from assay.api.traces import named_judge, score_rollouts
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.events import Hook
from assay.deployment.standing import DeploymentReport, order, status_of
from assay.errors import ConfigError
from assay.evaluation.progress import Progress, default_progress
from assay.models import Meter
from assay.runs.loading import load_rubric
from assay.runs.settings import AdvanceSettings
from assay.runs.settings.store_options import StoredJudgeOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.traces import Store


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
            scores = score_rollouts(rubric, store=store, agent=current.agent, progress=progress, **options)
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
