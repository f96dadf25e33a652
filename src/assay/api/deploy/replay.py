"""Stage 0 of a deployment: recorded rollouts of the champion are run again by the candidate, and compared in pairs."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.api.deployed import LoadedVersion
from assay.api.record import opened_store
from assay.deployment.assignment import CANDIDATE
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.readings import SCORED_BY
from assay.deployment.rollout_values import SHADOW
from assay.errors import AssayError, DeploymentError
from assay.evaluation.progress import Progress, default_progress
from assay.models.limits import OverTime
from assay.rubrics.loading import RubricSource
from assay.traces import Rollout
from assay.traces.store import tables as schema

_HUNG = 3  # rollouts over the time limit, after which a call of `replay` ends


def replay(
    deployments: Deployments,
    deployment: Deployment,
    *,
    rubric: RubricSource | None,
    store: str | Path | None,
    most: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Runs as many of the champion's newest rollouts on the candidate as the shadow step asks for.

    Rollouts that were replayed before are not run again, so that it continues after a stop. Two processes that replay
    the same rollout at the same time write one row. A rollout on which the candidate fails counts as its failure.

    Tools with side effects (`assay.side_effects`) are answered from the recorded rollout. Where the candidate calls one
    in another way, the result is unknown: the pair is missing.

    Args:
        rubric: scores the replayed rollouts; without one they are unscored until `assay traces score`.
        most: rollouts that are replayed now; None for all.
    Returns:
        The number of rollouts that were replayed now.
    Raises:
        DeploymentError: there are fewer recorded rollouts of the champion than the step needs.
    """
    needed = deployment.plan.steps[0].requests - deployments.requests(deployment.id, 0, 0.0).get(CANDIDATE, 0)
    if needed <= 0:
        return 0
    opened, _ = opened_store(store)
    champion = f"{deployment.agent}@{deployment.champion}"
    recorded = _recorded(deployments.engine, champion, deployment.id, needed, scored=True)
    if len(recorded) < needed:
        unscored = len(_recorded(deployments.engine, champion, deployment.id, None, scored=False))
        raise DeploymentError(
            f"the shadow step replays {deployment.plan.steps[0].requests} scored rollouts of {champion}; {needed} more "
            f"are needed, and {len(recorded)} scored and {unscored} unscored ones are recorded. "
            f"{f'The unscored: {SCORED_BY}. ' if unscored else ''}Serve the agent longer, or leave the shadow step out "
            "of the plan"
        )
    version = deployments.registry.version(f"{deployment.agent}@{deployment.candidate}")
    loaded = LoadedVersion(deployments.registry.folder_of(version))
    recorded = recorded[:most]
    with default_progress(progress).bar(f"replay on {version.name}", len(recorded)) as advance:
        hung = done = 0
        for name in recorded:
            hung += not _run(loaded, opened.rollout(name), rubric, opened.url, version.name, deployment.id)
            advance(1)
            done += 1
            if hung >= _HUNG:  # decided on what is known before more time passes
                break
    opened.flush()
    return done


def _run(loaded: LoadedVersion, original: Rollout, rubric: Any, store: str, version: str, deployment: str) -> bool:
    """Replays one rollout. False if it exceeded the time limit."""
    # one row for a rollout, whoever replays it
    row = sha256(f"{deployment}\0{original.id}".encode()).hexdigest()[:32]
    fields = {"id": row, "deployment": deployment, "stage": 0, "arm": CANDIDATE, "unit": original.unit}
    try:
        loaded.replay(original, rubric=rubric, store=store, version=version, phase=SHADOW, **fields)
    except DeploymentError:
        pass  # a call without a recorded answer: the pair is missing
    except AssayError:
        raise
    except Exception as error:  # the candidate's failure is recorded with its kind, and scored
        return not isinstance(error, OverTime)
    return True


def _recorded(engine: sa.Engine, champion: str, deployment: str, most: int | None, *, scored: bool) -> list[str]:
    """Ids of the newest production rollouts of a version, scored or not, that this deployment has not replayed."""
    rollouts = schema.rollouts.c
    replayed = sa.select(rollouts.group_id).where(rollouts.deployment == deployment, rollouts.phase == SHADOW)
    query = (
        sa.select(rollouts.id)
        .where(
            rollouts.version == champion,
            rollouts.phase == "deployed",
            rollouts.score.is_not(None) if scored else rollouts.score.is_(None),
            rollouts.id.not_in(replayed),
        )
        .order_by(rollouts.started_at.desc())
        .limit(most)
    )
    with engine.connect() as connection:
        return list(connection.execute(query).scalars())
